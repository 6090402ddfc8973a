"""The STS benchmark's sentences through the real MiniLM: are the embeddings right, and how many a second.

Every distinct sentence is embedded in each dtype by `Encoder.encode` and compared with the float32 torch model;
Spearman's correlation of the cosine of each test pair with its human score must be the published one.

Rates are for the distinct sentences over and over, as a corpus: text in, with the default arguments of `encode`,
beside sentence-transformers; and token ids in that lie on the device, packed, beside rows padded to the longest of
a batch, ours and torch's.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

import weights
from bench.measuring import environment, results
from bench.measuring.contenders import absent
from bench.measuring.harness import DTYPES, cosine_distance, parse_dtypes
from bench.measuring.results import Accuracy, Case, Entry, Family
from bench.models import minilm_models
from bench.models.minilm_models import Checkpoint
from bench.reporting import tables
from pallas_models import minilm
from pallas_models._processes import cores
from pallas_models.sentence import packing

HELP = "MiniLM on real sentences: accuracy against torch, Spearman's correlation, sentences a second"
NAME = "sts"
SHOWN = "fp16"  # the case in README.md

FILES = ("stsb-en-test.csv", "stsb-en-dev.csv")
LIMITS = {"fp32": 1e-5, "fp16": 1e-4, "bf16": 1e-4}  # on 1 - cosine, for every sentence
SPEARMAN, SPEARMAN_TOLERANCE = 82.0, 0.1  # published for all-MiniLM-L6-v2: 82.03
CORPUS = 65536  # sentences, as ids
TEXT = 1_000_000  # sentences, as text
ATTENTION = ("sdpa", "flash_attention_2")  # of sentence-transformers; the second where flash-attn is installed
TEXT_IN, IDS_IN = "encode_sentences_per_s", "forward_sentences_per_s"
PASSES = 5  # over all sentences, of which the median time counts

Pair = tuple[str, str, float]
Batch = tuple[list[int], np.ndarray, np.ndarray]  # rows, ids, mask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench sts`."""
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--dtype", type=parse_dtypes, help="fp32, fp16, bf16 or all; all, with --quick fp16")
    parser.add_argument("--weights", help="checkpoint folder, or tensor file with config.json beside it")
    parser.add_argument("--batch-size", type=int, default=4096, help="sentences that others compute at a time")
    parser.add_argument(
        "--sentences", type=int, help=f"of the corpus, at least; on a GPU {CORPUS}, and as text {TEXT} for ours"
    )
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--show-results", action="store_true", help="print the table, not only the file's name")
    parser.add_argument("--quick", action="store_true", help=f"only the sentences of {FILES[0]}")
    parser.add_argument(
        "--throughput",
        action=argparse.BooleanOptionalAction,
        help="measure sentences a second; by default on a GPU",
    )


def read_pairs(path: Path) -> list[Pair]:
    """Reads rows of sentence1, sentence2, score.

    Raises:
      ValueError: a row is something else; names the file and the row.
    """
    pairs = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            try:
                first, second, score = row
                pairs.append((first, second, float(score)))
            except ValueError:
                message = f"{path}, row {number}: expected sentence1, sentence2, score, got {row!r:.100}"
                raise ValueError(message) from None
    return pairs


def batches(tokens: Sequence[Sequence[int]], batch_size: int, step: int = 8) -> Iterator[Batch]:
    """Groups sentences by length and pads each batch to its longest, rounded up to a multiple of `step`.

    Yields:
      The rows of the batch, and ids and mask, int32 (batch_size, length), with empty sentences at the end of a
      batch that is not full, so that few shapes occur.
    """
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]), reverse=True)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        length = -(-len(tokens[rows[0]]) // step) * step
        ids, mask = np.zeros((2, batch_size, length), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(tokens[row])] = tokens[row]
            mask[i, : len(tokens[row])] = 1
        yield rows, ids, mask


def reference(checkpoint: Checkpoint, tokens: Sequence[Sequence[int]]) -> tuple[np.ndarray, str]:
    """Float32 embeddings by torch, or by plain JAX without torch; and which it was."""
    missing = minilm_models.torch_missing()
    embed: Callable[[np.ndarray, np.ndarray], Any]
    if missing:
        params, function = minilm_models.plain_jax(checkpoint, "fp32")
        embed, name = functools.partial(jax.jit(function), params), f"plain JAX ({missing})"
    else:
        import torch

        model, name = minilm_models.torch_model(checkpoint, "fp32", "cpu"), "torch"
        embed = lambda ids, mask: model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()  # noqa: E731
    output = np.empty((len(tokens), checkpoint.config.hidden_size), np.float32)
    for rows, ids, mask in batches(tokens, batch_size=64):
        output[rows] = np.asarray(embed(ids, mask))[: len(rows)]
    return output, f"{name}, float32"


def spearman(embeddings: np.ndarray, index: dict[str, int], pairs: Sequence[Pair]) -> float:
    """100 times Spearman's rank correlation of the cosines of the pairs with their scores."""
    from scipy import stats  # type: ignore[import-untyped]

    first = embeddings[[index[sentence] for sentence, _, _ in pairs]]
    second = embeddings[[index[sentence] for _, sentence, _ in pairs]]
    norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    cosines = np.sum(first.astype(np.float64) * second, axis=-1) / norms
    return 100 * float(stats.spearmanr(cosines, [score for *_, score in pairs]).statistic)


def sentences_per_s(run: Callable[[], Any], sentences: int, passes: int = PASSES) -> float:
    """The rate of `run`, which embeds all sentences; after one pass to warm up."""
    run()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return sentences / float(np.median(seconds))


def forward_rate(checkpoint: Checkpoint, dtype: str, tokens: Sequence[Sequence[int]]) -> float:
    """Sentences a second of the forward pass alone: packed ids on the device, all batches queued."""
    lengths = np.array([len(ids) for ids in tokens])
    flat = np.concatenate([np.asarray(ids, np.int32) for ids in tokens])
    budget = packing.budget(jax.default_backend())
    packed = packing.pack(flat, lengths, checkpoint.config.max_positions, budget)

    def embed(params: Any, tokens: jax.Array) -> jax.Array:
        ids, segment_ids = tokens
        count = packing.num_segments(ids.shape)
        return minilm.embed_packed(params, ids, segment_ids, num_segments=count, config=checkpoint.config)

    return queued_rate(embed, checkpoint.params(dtype), [(batch.tokens,) for batch in packed], len(tokens))


def padded_rate(checkpoint: Checkpoint, dtype: str, tokens: Sequence[Sequence[int]], batch_size: int) -> float:
    """The same with rows that are sorted by length and padded."""
    embed = functools.partial(minilm.embed, config=checkpoint.config)
    padded = [(ids, mask) for _, ids, mask in batches(tokens, batch_size)]
    return queued_rate(embed, checkpoint.params(dtype), padded, len(tokens))


def queued_rate(
    embed: Callable[..., jax.Array], params: Any, inputs: Sequence[tuple[np.ndarray, ...]], sentences: int
) -> float:
    """Sentences a second of `embed(params, *arrays)`, for all inputs, which lie on the device."""
    jitted, given = jax.jit(embed), jax.device_put(inputs)
    examples = {arrays[0].shape: arrays for arrays in given}
    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        compiled = pool.map(lambda arrays: jitted.lower(params, *arrays).compile(), examples.values())
        programs = dict(zip(examples, compiled, strict=True))
    return sentences_per_s(
        lambda: jax.block_until_ready([programs[arrays[0].shape](params, *arrays) for arrays in given]), sentences
    )


def torch_forward_rate(
    checkpoint: Checkpoint, dtype: str, tokens: Sequence[Sequence[int]], batch_size: int
) -> dict[str, float]:
    """The same with torch, eager, and no more padding than a batch needs."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = minilm_models.torch_model(checkpoint, dtype, device)
    inputs = [
        tuple(torch.from_numpy(x[: len(rows)]).to(device).long() for x in pair)
        for rows, *pair in batches(tokens, batch_size, step=1)
    ]

    def run() -> None:
        for ids, mask in inputs:
            model(ids, mask)
        if device == "cuda":
            torch.cuda.synchronize()

    return {IDS_IN: sentences_per_s(run, len(tokens))}


def sentence_transformers_rate(
    folder: Path, dtype: str, attention: str, sentences: list[str], batch_size: int
) -> dict[str, float]:
    """Sentences a second of `SentenceTransformer.encode`, text in; 16-bit flash attention takes them unpadded."""
    import torch
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    target = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    model = SentenceTransformer(
        str(folder),
        device="cuda" if torch.cuda.is_available() else "cpu",
        model_kwargs={"dtype": target, "attn_implementation": attention},
    )
    encode = functools.partial(model.encode, sentences, batch_size=batch_size, show_progress_bar=False)
    return {TEXT_IN: sentences_per_s(encode, len(sentences), passes=3)}


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit code, 1 if a target was missed."""
    try:
        data = {name: read_pairs(args.data / name) for name in (FILES[:1] if args.quick else FILES)}
        found = weights.resolve() if args.weights is None else weights.resolve(args.weights)
        checkpoint = minilm_models.load_checkpoint(found)
    except (OSError, ValueError) as error:
        print(f"{error}")
        return 2
    gpu = environment.has_gpu()
    dtypes = args.dtype or (["fp16"] if args.quick else list(DTYPES))
    throughput = gpu if args.throughput is None else args.throughput
    sentences = list(dict.fromkeys(s for pairs in data.values() for pair in pairs for s in pair[:2]))
    index = {sentence: i for i, sentence in enumerate(sentences)}
    folder = found if found.is_dir() else found.parent
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)  # as the model's sentence_bert_config.json says
    tokens = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]

    def repeats(most: int) -> int:
        return max(1, -(-(args.sentences or (most if gpu else 0)) // len(sentences)))

    text, corpus, corpus_tokens = sentences * repeats(TEXT), sentences * repeats(CORPUS), tokens * repeats(CORPUS)
    expected, by = reference(checkpoint, tokens)
    pairs = data[FILES[0]]
    correlation = spearman(expected, index, pairs)
    print(
        f"{len(sentences)} distinct sentences, {np.mean([len(t) for t in tokens]):.1f} tokens on average;"
        f" reference: {by}, Spearman {correlation:.2f} on the {len(pairs)} test pairs"
    )
    settings = {
        "weights": checkpoint.origin,
        "reference": by,
        "batch size of others": str(args.batch_size),
        "corpus": f"{len(corpus)} sentences, {len(text)} as text for ours",
    }
    result = results.begun(NAME, settings)
    for dtype in dtypes:
        encoder = minilm.Encoder.from_pretrained(found, dtype=DTYPES[dtype])
        output = encoder.encode(sentences, show_progress_bar=False)
        distance, correlation = cosine_distance(output, expected), spearman(output, index, pairs)
        mean = float(np.mean(np.sum(output.astype(np.float64) * expected, axis=-1)))
        metrics = {"spearman": correlation}
        missed = []
        if distance > LIMITS[dtype]:
            missed.append(f"the lowest cosine is {1 - distance:.7f}, must be {1 - LIMITS[dtype]:g}")
        if not abs(correlation - SPEARMAN) <= SPEARMAN_TOLERANCE:
            missed.append(f"Spearman is {correlation:.2f}, must be {SPEARMAN} +- {SPEARMAN_TOLERANCE}")
        print(
            f"{dtype}: cosine min {1 - distance:.7f}, mean {mean:.7f};"
            f" Spearman {correlation:.2f}; {'MISSED: ' + '; '.join(missed) if missed else 'ok'}",
            flush=True,
        )
        theirs: list[Entry] = []
        if throughput:
            encode = functools.partial(encoder.encode, text, show_progress_bar=False)
            metrics[TEXT_IN] = sentences_per_s(encode, len(text), passes=3)
            metrics[IDS_IN] = forward_rate(checkpoint, dtype, corpus_tokens)
            metrics["padded_sentences_per_s"] = padded_rate(checkpoint, dtype, corpus_tokens, args.batch_size)
            line = f"{dtype}: {metrics[TEXT_IN]:.0f} sentences/s end to end,"
            line += f" {metrics[IDS_IN]:.0f} forward only,"
            line += f" {metrics['padded_sentences_per_s']:.0f} padded"
            theirs.append(
                entry_of(
                    "torch-eager",
                    "torch",
                    functools.partial(torch_forward_rate, checkpoint, dtype, corpus_tokens, args.batch_size),
                )
            )
            for attention in ATTENTION:
                rate = functools.partial(
                    sentence_transformers_rate, folder, dtype, attention, corpus, args.batch_size
                )
                theirs.append(entry_of(f"sentence-transformers-{attention}", "peer", rate))
            rates = (f"; {entry.name} {value:.0f}" for entry in theirs for value in entry.metrics.values())
            print(line + "".join(rates), flush=True)
        entry = Entry(
            name="pallas" if gpu else "xla-ops",
            family="ours",
            status="wrong" if missed else "ok",
            message="; ".join(missed),
            accuracy=Accuracy(measure="1 - cosine", value=distance, limit=LIMITS[dtype]),
            metrics=metrics,
        )
        sizes = {"sentences": len(sentences)}
        result.cases.append(Case(label=dtype, dtype=dtype, shape=sizes, flop=None, entries=[entry, *theirs]))
        results.save(result, args.output)  # kept, should the run be interrupted
    if gpu and not args.quick and set(dtypes) == set(DTYPES):
        result = results.complete(result, args.output)
    if args.show_results:
        print(f"\n{table(result)}\n\n{tables.conditions(result)}")
    for line in tables.failures(result):
        print(line)
    print(f"results: {results.path_of(result, args.output)}")
    return int(any(case.entries[0].status != "ok" for case in result.cases))


def entry_of(name: str, family: Family, measure: Callable[[], dict[str, float]]) -> Entry:
    """An entry with the figures that `measure` gives; skipped where a package is missing."""
    entry = Entry(name=name, family=family, status="ok")
    try:
        return dataclasses.replace(entry, metrics=measure())
    except ImportError as error:
        return dataclasses.replace(entry, status="skipped", message=absent(error))
    except Exception as error:  # whatever another library raises is its result, and no reason to stop
        message = f"{type(error).__name__}: {error}"[:300]
        return dataclasses.replace(entry, status="failed", message=message)


TABLE = (  # columns: title, family, metric, format
    ("lowest cosine", "ours", "cosine", ".6f"),
    ("Spearman", "ours", "spearman", ".2f"),
    ("sentences/s, text in", "ours", TEXT_IN, ",.0f"),
    ("sentence-transformers", "peer", TEXT_IN, ",.0f"),
    ("sentences/s, ids in", "ours", IDS_IN, ",.0f"),
    ("padded", "ours", "padded_sentences_per_s", ",.0f"),
    ("torch eager, ids in", "torch", IDS_IN, ",.0f"),
)


def best(case: Case) -> dict[str, dict[str, float]]:
    """The figures of each family, of several the highest."""
    found: dict[str, dict[str, float]] = {}
    for entry in case.entries:
        of = found.setdefault(entry.family, {})
        of |= {name: max(value, of.get(name, value)) for name, value in entry.metrics.items()}
        if entry.accuracy is not None:  # of a cosine a file has too few digits
            of["cosine"] = 1 - entry.accuracy.value
    return found


RIVALS = (  # what is compared, metric, family and name of the other
    ("text in", TEXT_IN, "peer", "sentence-transformers"),
    ("ids in", IDS_IN, "torch", "torch eager"),
)


def comparisons(result: results.Result) -> list[tables.Comparison]:
    """Ours against sentence-transformers, from text, and against torch, from ids."""
    return [
        tables.Comparison(clock=title, case=case.label, rival=rival, ratio=ours / theirs)
        for title, metric, family, rival in RIVALS
        for case, found in ((case, best(case)) for case in result.cases)
        if (ours := found.get("ours", {}).get(metric)) and (theirs := found.get(family, {}).get(metric))
    ]


def headline(result: results.Result) -> tables.Headline | None:
    """Sentences a second from text, fp16, against sentence-transformers."""
    ratios = {row.case: row.ratio for row in comparisons(result) if row.clock == "text in"}
    if SHOWN not in ratios:
        return None
    found = next(best(case) for case in result.cases if case.label == SHOWN)
    ours, theirs = (f"{found[family][TEXT_IN]:,.0f} sentences/s" for family in ("ours", "peer"))
    return tables.Headline(
        case=SHOWN,
        ours=f"{ours}, text in",
        baseline=f"sentence-transformers, {theirs}",
        ratio=ratios[SHOWN],
        mean=tables.mean(list(ratios.values())),
    )


def table(result: results.Result) -> str:
    """Agreement with the reference on real sentences, Spearman's correlation and sentences a second, by dtype."""
    found = [best(case) for case in result.cases]
    columns = [c for c in TABLE if any(c[2] in metrics.get(c[1], {}) for metrics in found)]
    rows = []
    for case, metrics in zip(result.cases, found, strict=True):
        values = [(metrics.get(family, {}).get(metric), form) for _, family, metric, form in columns]
        rows.append([case.dtype, *("-" if value is None else format(value, form) for value, form in values)])
    return tables.markdown(["dtype", *(title for title, *_ in columns)], rows)
