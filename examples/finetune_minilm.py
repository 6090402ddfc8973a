"""Fine-tunes a sentence encoder on pairs of sentences that belong together, for sentence-transformers to load.

    python examples/finetune_minilm.py pairs.csv tuned
    python -c "from sentence_transformers import SentenceTransformer as S; print(S('tuned').encode('Hello'))"

A row of the file is a question and its answer, a title and its text, or two ways to say the same: two columns,
separated by commas or, in a .tsv file, by tabs. The other rows of a batch serve as wrong answers: the larger the
batch, the harder the task. A batch should not hold a sentence twice.
"""

import argparse
import csv
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tokenizers import Tokenizer

import weights
from pallas_models import minilm, training
from weights.text import read_tokenizer

Tokens = tuple[np.ndarray, np.ndarray]  # ids and mask


def at_least(least: int) -> Callable[[str], int]:
    """An integer of the command line that is no less."""

    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value}; expected at least {least}")
        return value

    return integer


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a sentence encoder on pairs of sentences.")
    parser.add_argument("pairs", type=Path, help=".csv or .tsv file, two sentences a row")
    parser.add_argument("output", type=Path, help="folder for the new model")
    parser.add_argument(
        "--model", default="all-MiniLM-L6-v2", help="where to begin, as weights.load_minilm takes it"
    )
    parser.add_argument("--epochs", type=at_least(1), default=1)
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="pairs a step")
    parser.add_argument("--max-length", type=at_least(3), default=128, help="tokens kept of a sentence")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the products")
    args = parser.parse_args(arguments)
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"argument output: {args.output} is a file; expected a folder, or nothing there")
    return args


def read_pairs(path: Path) -> list[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    except (UnicodeDecodeError, csv.Error) as error:
        sys.exit(f"{path} is no table of text in UTF-8: {error}")
    for number, row in enumerate(rows, start=1):
        if len(row) != 2 or not all(row):
            sys.exit(f"{path}, row {number}: expected two sentences, got {row}")
    return [(first, second) for first, second in rows]


def tokenize(tokenizer: Tokenizer, sentences: Sequence[str]) -> Tokens:
    """ids and mask, as long as the longest sentence, rounded up so that few shapes occur."""
    encodings = tokenizer.encode_batch(sentences)
    length = -(-max(len(encoding.ids) for encoding in encodings) // 16) * 16
    ids, mask = np.zeros((2, len(encodings), length), np.int32)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding.ids)] = encoding.ids
        mask[row, : len(encoding.ids)] = 1
    return ids, mask


def batches(pairs: Sequence[tuple[str, str]], size: int, epochs: int) -> Iterator[list[tuple[str, str]]]:
    """Whole batches in random order; sentences that are left over in an epoch wait for the next."""
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(pairs))
        for start in range(0, len(pairs) - size + 1, size):
            yield [pairs[i] for i in order[start : start + size]]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Fine-tunes and saves; returns the loss before each step, in nats."""
    args = parse(arguments)
    pairs = read_pairs(args.pairs)
    if len(pairs) < args.batch_size:
        sys.exit(f"{args.pairs} has {len(pairs)} pairs; expected at least {args.batch_size}, the --batch-size")
    source = weights.resolve(args.model)
    config, params = weights.load_minilm_config(source), weights.load_minilm(source)
    tokenizer = read_tokenizer(source)
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(args.max_length, config.max_positions))
    steps = len(pairs) // args.batch_size * args.epochs
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, max(steps // 10, 1), max(steps, 2))
    optimizer = optax.adamw(rate, weight_decay=0.01)

    def loss(params: Any, first: Tokens, second: Tokens) -> jax.Array:
        return minilm.contrastive_loss(training.cast(params, args.dtype), first, second, config=config)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, moments: Any, first: Tokens, second: Tokens) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, first, second)
        changes, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, changes), moments, value

    moments, losses = optimizer.init(params), []
    for step, chosen in enumerate(batches(pairs, args.batch_size, args.epochs)):
        first, second = (tokenize(tokenizer, side) for side in zip(*chosen, strict=True))
        params, moments, value = update(params, moments, first, second)
        losses.append(float(value))
        print(f"step {step + 1} of {steps}: loss {losses[-1]:.3f}", flush=True)
    print(f"saved: {weights.export(params, args.output, config=config, like=source).parent}")
    return losses


if __name__ == "__main__":
    try:
        main()
    except (OSError, weights.CheckpointError) as error:
        sys.exit(f"error: {error}")
