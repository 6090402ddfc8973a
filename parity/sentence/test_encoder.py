"""Sentences to embeddings: the numbers of torch, the order of the sentences, and few shapes to compile."""

import copy
import functools
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weights
from pallas_models import gpt2, minilm, target
from pallas_models.corpus.command import EXAMPLES
from pallas_models.corpus.embedder import Embedder
from pallas_models.minilm import CrossEncoder, Encoder
from pallas_models.sentence import packing, pipeline, programs
from parity import ROOT
from parity.support.common import assert_close, by_device, cosines
from parity.weights import checkpoints
from parity.weights.checkpoints import CONFIG, WORDS, bert_tensors
from weights import checkpoint, lazy


def random_sentences(count: int, longest: int = 30) -> list[str]:
    rng = np.random.default_rng(3)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(count)]


# Each has 20 tokens, the length of a row here; 480 tokens are one batch of 24 rows.
LONG_SENTENCES = [" ".join(WORDS * 2)] * 26


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "checkpoint", max_length=20)


@pytest.fixture
def encoder(folder: Path) -> Encoder:
    return Encoder.from_pretrained(folder)


def one_by_one(encoder: Encoder, sentences: list[str]) -> np.ndarray:
    """Each sentence alone, at its own length, through `minilm.embed`."""
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_truncation(encoder.max_length)
    ids = [jnp.array([tokenizer.encode(sentence).ids]) for sentence in sentences]
    embed = jax.jit(functools.partial(minilm.embed, config=encoder.config))
    return np.concatenate([embed(encoder.params, i, jnp.ones_like(i)) for i in ids])


# Results


def test_each_sentence_is_embedded_as_if_alone_and_in_order(encoder):
    sentences = random_sentences(6)
    expected = one_by_one(encoder, sentences)
    for batch_size in (1, 3, 64):
        embeddings = encoder.encode(sentences, batch_size=batch_size)
        assert embeddings.dtype == np.float32
        assert_close(embeddings, expected, 1e-5)


def test_computes_what_torch_computes(reference, bert, folder, implementation):
    sentences = ["A man is playing the guitar.", "a woman cuts an onion", "unknown words"]
    encoder = Encoder.from_pretrained(folder, implementation=implementation)
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(sentences)
    ids, mask = (jnp.array([getattr(e, name) for e in encodings]) for name in ("ids", "attention_mask"))
    model = bert.Encoder(bert_tensors(), num_heads=CONFIG.num_heads, epsilon=CONFIG.epsilon)
    assert_close(encoder.encode(sentences), reference.compute(model.embed, ids, mask), 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype(folder, dtype):
    sentences = random_sentences(5)
    encoder = Encoder.from_pretrained(folder, dtype=dtype)
    for leaf in jax.tree.leaves(encoder.params):
        assert leaf.dtype == (jnp.float32 if leaf.ndim == 1 else dtype)
    embeddings = encoder.encode(sentences)
    assert embeddings.dtype == np.float32
    assert_close(embeddings, Encoder.from_pretrained(folder).encode(sentences), 0.03)


def test_kinds_of_input(encoder):
    one = encoder.encode("a man")
    assert one.shape == (64,)
    both = encoder.encode(["a man", "a woman"])
    assert both.shape == (2, 64)
    np.testing.assert_allclose(both[0], one, atol=1e-6)
    for given in (("a man", "a woman"), iter(["a man", "a woman"]), np.array(["a man", "a woman"])):
        np.testing.assert_array_equal(encoder.encode(given), both)
    np.testing.assert_array_equal(encoder.encode(inputs=["a man", "a woman"]), both)
    np.testing.assert_array_equal(encoder.encode_query(inputs="a man"), one)
    np.testing.assert_array_equal(encoder.encode_document(sentences="a man"), one)
    assert encoder.encode([]).shape == (0, 64) and encoder.encode([]).dtype == np.float32


def test_columns_of_tables(encoder):
    pyarrow, pandas = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    expected = encoder.encode(["a man", "a woman", "an onion"])
    for given in (
        pyarrow.array(["a man", "a woman", "an onion"]),
        pyarrow.chunked_array([["a man"], ["a woman", "an onion"]]),
        pyarrow.array(["a man", "a woman", "an onion"]).dictionary_encode(),
        pandas.Series(["a man", "a woman", "an onion"], index=[5, 3, 1]),
    ):
        np.testing.assert_array_equal(encoder.encode(given), expected)
        assert_close(np.concatenate(list(encoder.encode_iter(given))), expected, 1e-6)
    with pytest.raises(TypeError, match=r"sentences\[1\] is of type NoneType; expected str"):
        encoder.encode(pyarrow.array(["a man", None]))
    with pytest.raises(TypeError, match="sentences is of type Table; expected an iterable of str"):
        encoder.encode(pyarrow.table({"text": ["a man"]}))


def test_empty_sentence_is_the_special_tokens_alone(encoder):
    ids = jnp.array([[2, 3]])  # [CLS] [SEP]
    expected = minilm.embed(encoder.params, ids, jnp.ones_like(ids), config=CONFIG)
    for embeddings in (encoder.encode(["", "a man is playing", "  "]), encoder.encode([""] * 3)):
        np.testing.assert_allclose(embeddings[[0, 2]], np.repeat(expected, 2, 0), atol=1e-6)


def test_normalize_embeddings(folder):
    """A model whose modules do not normalise."""
    (folder / "modules.json").write_text(json.dumps(checkpoints.modules("Transformer", "Pooling")))
    encoder, sentences = Encoder.from_pretrained(folder), random_sentences(6)
    unit, plain = (encoder.encode(sentences, normalize_embeddings=value) for value in (True, False))
    norms = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
    assert np.all(np.abs(norms - 1) > 0.1)
    np.testing.assert_allclose(plain / norms, unit, atol=1e-6)


# Length


def test_truncation_is_that_of_sentence_transformers(folder):
    sentence = " ".join(WORDS * 3)
    assert Encoder.from_pretrained(folder).max_length == 20
    words = sentence.split()
    for given, expected in ((None, 20), (8, 8), (2, 2)):
        encoder = Encoder.from_pretrained(folder, max_length=given)
        kept = " ".join(words[: expected - 2])
        np.testing.assert_allclose(encoder.encode(sentence), encoder.encode(kept), atol=1e-6)
    assert not np.allclose(encoder.encode(sentence), Encoder.from_pretrained(folder).encode(sentence), atol=0.01)


def test_limit_of_the_model_holds(folder):
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 1000}')
    assert Encoder.from_pretrained(folder).max_length == CONFIG.max_positions
    (folder / "sentence_bert_config.json").write_text("{}")
    assert Encoder.from_pretrained(folder).max_length == CONFIG.max_positions
    (folder / "sentence_bert_config.json").unlink()
    encoder = Encoder.from_pretrained(folder)
    assert encoder.max_length == CONFIG.max_positions
    assert encoder.encode(" ".join(WORDS * 10)).shape == (64,)


def test_the_dtype_of_a_converted_folder(folder, tmp_path, capsys):
    from weights.__main__ import main

    sentences = random_sentences(6)
    expected = Encoder.from_pretrained(folder, dtype="float16").encode(sentences)
    assert Encoder.from_pretrained(folder).dtype == np.float32
    assert main(["minilm", str(folder), str(tmp_path / "half"), "--dtype", "float16"]) == 0
    half = Encoder.from_pretrained(tmp_path / "half")
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half.encode(sentences), expected)
    assert Encoder.from_pretrained(tmp_path / "half", dtype="float32").dtype == np.float32
    for load in (weights.load_minilm, weights.load_encoder):
        assert load(tmp_path / "half")["layers"]["0"]["mlp"]["up"]["kernel"].dtype == np.float16
    embedder = Embedder(str(tmp_path / "half"))
    assert embedder.settings["compute_dtype"] == "float16" and embedder.load().dtype == np.float16
    assert Embedder(str(folder)).settings["compute_dtype"] == "float32"


def test_half(folder):
    encoder = Encoder.from_pretrained(folder)
    sentences = random_sentences(6)
    expected = Encoder.from_pretrained(folder, dtype="float16").encode(sentences)
    encoder.encode(sentences)
    assert encoder.half() is encoder and encoder.dtype == np.float16
    np.testing.assert_array_equal(encoder.encode(sentences), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(encoder)).encode(sentences), expected)
    assert encoder.params["embeddings"]["norm"]["scale"].dtype == np.float32
    params = weights.load_minilm(folder)
    params["embeddings"]["word"]["embedding"] *= 1e6
    large = Encoder(params, encoder.tokenizer, config=CONFIG)
    with pytest.raises(
        weights.CheckpointError, match=r"embeddings\.word\.embedding with values up to .*at most 65504"
    ):
        large.half()
    assert large.dtype == np.float32


def test_it_is_pickled_and_copied(folder, tmp_path):
    encoder = Encoder.from_pretrained(folder, truncate_dim=8, compilation_cache=tmp_path / "kept")
    encoder.max_seq_length, encoder.prompts["query"] = 12, "guitar "
    sentences = random_sentences(5)
    expected = encoder.encode_query(sentences)  # with programs, and what else has locks
    encoder.encode(sentences[0], device="cpu")
    for other in (pickle.loads(pickle.dumps(encoder)), copy.deepcopy(encoder)):
        assert repr(other) == repr(encoder) and "max_seq_length=12" in repr(other)
        np.testing.assert_array_equal(other.encode_query(sentences), expected)
        other.prompts["query"], other.max_seq_length = "", 20
        np.testing.assert_array_equal(encoder.encode_query(sentences), expected)


def test_limits_in_tokenizer_json_are_not_used(folder, encoder):
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_id=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    sentences = random_sentences(4)
    np.testing.assert_array_equal(Encoder.from_pretrained(folder).encode(sentences), encoder.encode(sentences))


# Batches


@pytest.fixture
def calls(monkeypatch) -> list[str | tuple[int, ...]]:
    """What happens in `encode`: the shape of each batch given to the device, "read" for each result taken."""
    seen: list[str | tuple[int, ...]] = []
    run = programs.Programs.__call__

    class Result:
        def __init__(self, value):
            self.value = value

        def __array__(self, *args, **kwargs):
            seen.append("read")
            return np.asarray(self.value, *args, **kwargs)

    def recorded(self, tokens, normalize):
        seen.append(tokens.shape)
        return Result(run(self, tokens, normalize))

    monkeypatch.setattr(programs.Programs, "__call__", recorded)
    return seen


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes that are compiled, of encoders made in this test; none is there before."""
    seen: list[tuple[int, ...]] = []
    lower = programs.Programs._lower

    def recorded(self, shape, normalize):
        seen.append(shape)
        return lower(self, shape, normalize)

    monkeypatch.setattr(programs, "_COMPILED", {})
    monkeypatch.setattr(programs.Programs, "_lower", recorded)
    return seen


def test_lengths_of_one_sentence():
    lengths = [packing.padded_length(length, 512) for length in range(1, 513)]
    assert sorted(set(lengths)) == [16, 32, 64, 96, 128, 192, 256, 384, 512]
    assert lengths == sorted(lengths)
    for length, padded in enumerate(lengths, start=1):
        assert length <= padded <= max(16, (2 if length <= 64 else 1.5) * length)
    assert packing.padded_length(18, 20) == 20 and packing.padded_length(9, 12) == 12


def test_few_shapes(folder, calls):
    encoder = Encoder.from_pretrained(folder)
    for count in (2, 25, 61, 300):
        encoder.encode(random_sentences(count))
    shapes = [(2, rows, 20) for rows in by_device(cpu=[1, 12, 102], gpu=[51, 409])]
    assert {call for call in calls if call != "read"} == set(shapes)
    calls.clear()
    for sentences in ("a man", ["a man"], ["a man"] * 2):
        encoder.encode(sentences)
    batches = by_device(cpu=[shapes[0]] * 2, gpu=[shapes[0]])  # of a sentence each, or of both
    assert [call for call in calls if call != "read"] == [(1, 16), (1, 16), *batches]


def test_batch_size_bounds_the_tokens_of_a_batch(folder, calls):
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    sentences = random_sentences(50)
    expected = encoder.encode(sentences, batch_size=1)
    assert {call for call in calls if call != "read"} == {(2, 1, 20)}
    calls.clear()
    np.testing.assert_allclose(encoder.encode(sentences, batch_size=24), expected, atol=1e-6)
    assert {call for call in calls if call != "read"} == {(2, 24, 20), (2, 3, 20)}


def test_a_stream_is_read_as_it_is_needed(encoder, monkeypatch):
    sentences, read = random_sentences(50), []
    expected = encoder.encode(sentences)
    monkeypatch.setattr(pipeline, "CHUNK", 4)
    monkeypatch.setattr(pipeline, "_BATCHES_IN_FLIGHT", 2)
    stream = encoder.encode_iter(read.append(s) or s for s in sentences)
    assert read == []
    chunks = [next(stream)]
    assert 4 <= len(read) <= 4 * 7  # of chunks that are tokenized or computed
    chunks += list(stream)
    assert [len(rows) for rows in chunks] == [4] * 12 + [2]
    np.testing.assert_allclose(np.concatenate(chunks), expected, atol=1e-6)


def started(before):
    # Threads of other tests, which are in ``before``, may end at any time.
    return set(threading.enumerate()) - before


def test_a_stream_can_be_ended(encoder, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 128)
    before, read = set(threading.enumerate()), []
    sentences = itertools.cycle(random_sentences(50))
    chunks = (random_sentences(128) for _ in itertools.count())
    for stream in (encoder.encode_iter(read.append(s) or s for s in sentences), encoder.encode_chunks(chunks)):
        assert len(next(stream)) == 128
        assert started(before)
        stream.close()
        assert not started(before)
        assert list(stream) == []
    assert 128 <= len(read) <= 128 * 12


PROGRAM = """
import sys
import jax, numpy as np, pytest
from pallas_models.__main__ import main
from pallas_models.minilm import Encoder
from pallas_models.sentence import programs

folder, sentences = sys.argv[1], open(sys.argv[2]).read().splitlines()
run, used = programs.Programs.__call__, []

def recorded(self, tokens, head):
    used.append(self.devices)
    return run(self, tokens, head)

programs.Programs.__call__ = recorded
expected = Encoder.from_pretrained(folder).encode(sentences, batch_size=4)
devices = jax.devices()
mesh = jax.make_mesh((3, 1), ("a", "b"))
for options in dict(devices=devices[:3]), dict(devices=["cpu:2", "cpu:1"]), dict(mesh=mesh):
    used.clear()
    encoder = Encoder.from_pretrained(folder, **options)
    np.testing.assert_allclose(encoder.encode(sentences, batch_size=4), expected, atol=1e-6)
    places = devices[2:0:-1] if options.get("devices") == ["cpu:2", "cpu:1"] else devices[:3]
    assert len(used) >= 6 and used == [{places[i % len(places)]} for i in range(len(used))]
    if "mesh" in options:
        batch = np.concatenate(list(encoder.encode_chunks([sentences[:5], [], sentences[5:]], batch_size=4)))
        np.testing.assert_allclose(batch, expected, atol=1e-6)
        used.clear()
        np.testing.assert_allclose(encoder.encode(sentences[:2], device="cpu:1"), expected[:2], atol=1e-6)
        assert used and all(of == {devices[1]} for of in used)
for options, message in (
    (dict(devices=[]), "expected a list of one device or more"),
    (dict(devices="cpu:0"), "expected a list of one device or more"),
    (dict(devices=["cpu:1", devices[1]]), "each once"),
    (dict(devices=devices, mesh=mesh), "or a mesh"),
    (dict(devices=["cpu:3"]), "device='cpu:3' is not there"),
):
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder, **options)
command = ["embed", sys.argv[2], "--model", folder, "--batch-size", "4", "--no-compilation-cache", "--output"]
used.clear()
assert main([*command, sys.argv[2] + ".npy", "--devices", "all"]) == 0
np.testing.assert_allclose(np.load(sys.argv[2] + ".npy"), expected, atol=1e-6)
assert set.union(*used) == set(jax.devices())
assert main([*command, sys.argv[2] + ".npy", "--devices", "cpu:7"]) == 1
"""


def test_devices_take_turns(folder, tmp_path):
    """Three devices of a CPU give what one gives, in the same order; a process has the devices it begins with."""
    (tmp_path / "sentences.txt").write_text("\n".join(random_sentences(60)))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=3"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, folder, tmp_path / "sentences.txt"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "device='cpu:7' is not there" in done.stderr


# Programs


@pytest.mark.parametrize("model", [Encoder, CrossEncoder])
def test_a_gpu_starts_while_files_are_read(model, tmp_path, monkeypatch):
    started = threading.Event()
    monkeypatch.setattr(target, "start", started.set)
    with pytest.raises(FileNotFoundError):
        model.from_pretrained(tmp_path / "nowhere")
    assert started.wait(10)


def test_warm_up_compiles_what_a_corpus_needs(folder, compiled):
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    sentences = LONG_SENTENCES
    assert encoder.warm_up(sentences, batch_size=24) == 2
    assert sorted(compiled) == [(2, 3, 20), (2, 24, 20)]
    assert encoder.warm_up(sentences, batch_size=24) == 0
    encoder.encode(sentences, batch_size=24)
    Encoder.from_pretrained(folder, implementation="xla").encode(sentences, batch_size=24)
    assert len(compiled) == 2
    encoder.encode(sentences, batch_size=24, normalize_embeddings=True)  # as its modules do
    assert len(compiled) == 2
    encoder.encode(sentences, batch_size=24, output_value="token_embeddings")
    assert len(compiled) == 4


def test_warm_up_counts_the_default_prompt(folder, compiled):
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    encoder.prompts["query"] = " ".join(WORDS[:7]) + " "
    encoder.default_prompt_name = "query"
    sentences = ["a man"] * 60  # five fit into a row, or one with the prompt
    assert encoder.warm_up(sentences, batch_size=200) == len(compiled) == 1
    encoder.encode(sentences, batch_size=200)
    assert compiled == [(2, 200, 20)]


def test_warm_up_of_lengths(folder, compiled):
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    assert encoder.warm_up(lengths=[3, 16, 500], batch_size=8) == 4
    assert sorted(compiled) == [(1, 16), (1, 20), (2, 1, 20), (2, 8, 20)]
    assert encoder.warm_up(batch_size=8) == 0
    with pytest.raises(ValueError, match="lengths holds 0; expected numbers of tokens"):
        encoder.warm_up(lengths=[0])
    with pytest.raises(ValueError, match="batch_size=0"):
        encoder.warm_up(batch_size=0)
    with pytest.raises(TypeError, match=r"sentences\[0\] is of type int"):
        encoder.warm_up([3])


@pytest.mark.parametrize("sentences, name", [("a \ud800", "sentences"), (["é", "\udfff"], r"sentences\[1\]")])
def test_half_of_a_surrogate_pair(folder, sentences, name):
    with pytest.raises(ValueError, match=rf"{name} holds '.ud(800|fff)' at [02], half of a surrogate pair"):
        Encoder.from_pretrained(folder).encode(sentences)


def test_programs_are_compiled_side_by_side_while_the_first_runs(folder, compiled, monkeypatch):
    together, first_ran = threading.Barrier(2, timeout=60), threading.Event()
    compile_, run = programs.Programs._compile, programs.Programs.__call__

    def compiles(self, lowered, name):
        together.wait()  # breaks unless two threads are here
        result = compile_(self, lowered, name)
        if "2x3x20xi32" in lowered.as_text():  # the second batch
            assert first_ran.wait(60)
        return result

    def runs(self, tokens, normalize):
        result = run(self, tokens, normalize)
        first_ran.set()
        return result

    monkeypatch.setattr(programs, "cores", lambda: 2)
    monkeypatch.setattr(programs.Programs, "_compile", compiles)
    monkeypatch.setattr(programs.Programs, "__call__", runs)
    embeddings = Encoder.from_pretrained(folder, implementation="xla").encode(LONG_SENTENCES, batch_size=24)
    assert compiled == [(2, 24, 20), (2, 3, 20)]
    assert np.all(np.isfinite(embeddings))


def test_a_list_is_packed_while_its_program_is_compiled(folder, compiled, monkeypatch):
    sentences, packed = random_sentences(200), []
    expected = Encoder.from_pretrained(folder, implementation="xla").encode(sentences)
    all_packed = threading.Event()
    compile_, pack = programs.Programs._compile, packing.pack

    def compiles(self, lowered, name):
        assert all_packed.wait(10)
        return compile_(self, lowered, name)

    def packs(*args):
        packed.append(args)
        if len(packed) == 50:
            all_packed.set()
        return pack(*args)

    monkeypatch.setattr(programs, "_COMPILED", {})
    monkeypatch.setattr(programs.Programs, "_compile", compiles)
    monkeypatch.setattr(packing, "pack", packs)
    monkeypatch.setattr(pipeline, "CHUNK", 4)
    monkeypatch.setattr(pipeline, "_BATCHES_IN_FLIGHT", 2)
    found = Encoder.from_pretrained(folder, implementation="xla").encode(sentences)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_long_list_s_program_is_lowered_while_its_first_texts_are_tokenized(folder, compiled, monkeypatch):
    encoder, seen = Encoder.from_pretrained(folder, implementation="xla"), []
    tokenized = pipeline._tokenized

    def after(*args):
        for tokens in tokenized(*args):
            seen.append(list(compiled))
            yield tokens

    monkeypatch.setattr(pipeline, "MANY", 50)
    monkeypatch.setattr(pipeline, "CHUNK", 20)
    monkeypatch.setattr(pipeline, "_tokenized", after)
    monkeypatch.setattr(Encoder, "_elsewhere", lambda self, programs, count: None)
    encoder.encode(["a man" if i % 2 else "a man is playing" for i in range(100)], batch_size=8)
    assert seen[0] == [(2, 8, 20)]


def test_what_a_list_has_left_over_has_no_program_of_its_own(folder, compiled, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 36)
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    assert encoder.encode(["a man is playing the guitar"] * 73, batch_size=8).shape == (73, 64)
    assert compiled == [(2, 8, 20)]


def test_an_error_ends_what_is_tokenized_ahead(folder, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 4)
    monkeypatch.setattr(pipeline, "_FEW", 0)
    monkeypatch.setattr(pipeline, "_THREADS", 1)
    encoder, seen = Encoder.from_pretrained(folder, implementation="xla"), []

    def tokenizes(self, texts):
        seen.append(texts)
        time.sleep(0.01)  # less than it takes to see the error
        raise ZeroDivisionError

    monkeypatch.setattr(Encoder, "_tokenize", tokenizes)
    with pytest.raises(ZeroDivisionError):
        encoder.encode(random_sentences(200))
    assert len(seen) < 10


def test_a_failure_to_compile_is_not_kept(folder, compiled, monkeypatch):
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    with monkeypatch.context() as patch:
        patch.setattr(programs.Programs, "_compile", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encoder.encode("a man")
    assert encoder.encode("a man").shape == (64,)


def test_without_jit(encoder):
    sentences = random_sentences(2)
    expected = encoder.encode(sentences)
    with jax.disable_jit():
        np.testing.assert_allclose(encoder.encode(sentences), expected, atol=1e-6)


def test_precision_in_force_counts(folder, compiled):
    encoder = Encoder.from_pretrained(folder, implementation="xla")
    for precision in (None, "highest", None):
        with jax.default_matmul_precision(precision):
            encoder.encode("a man")
    assert compiled == [(1, 16)] * 2


def test_batches_are_queued(encoder, monkeypatch):
    """So many as `pipeline._BATCHES_IN_FLIGHT` says and one more, while the results of the first are awaited."""
    run, started, read = programs.Programs.__call__, [], []
    queued = threading.Event()

    class Result:
        def __init__(self, value):
            self.value = value

        def __array__(self, *args, **kwargs):
            assert queued.wait(60)
            read.append(len(started) - len(read))
            return np.asarray(self.value, *args, **kwargs)

    def recorded(self, tokens, head):
        started.append(tokens)
        if len(started) == pipeline._BATCHES_IN_FLIGHT + 1:
            queued.set()
        return Result(run(self, tokens, head))

    monkeypatch.setattr(programs.Programs, "__call__", recorded)
    encoder.encode(LONG_SENTENCES[:20], batch_size=1)
    assert len(started) == len(read) == 20
    assert max(read) <= pipeline._BATCHES_IN_FLIGHT + 2


def test_progress_bar(encoder, capsys):
    encoder.encode(["a man"] * 40)
    encoder.encode(["a man"] * 3, show_progress_bar=False)
    assert capsys.readouterr() == ("", "")
    encoder.encode(["a man"] * 3, show_progress_bar=True)
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err
    encoder.warm_up(lengths=[16, 20], batch_size=8, show_progress_bar=True)
    out, err = capsys.readouterr()
    assert out == "" and "4/4" in err


# Errors


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"batch_size": 0}, ValueError, "batch_size=0; expected at least 1"),
        ({"sentences": ["a", None]}, TypeError, r"sentences\[1\] is of type NoneType; expected str"),
        ({"sentences": [["a", "b"]]}, TypeError, r"sentences\[0\] is of type list"),
        ({"sentences": {"a": "b"}}, TypeError, "sentences is of type dict; expected an iterable of str"),
        ({"sentences": "a", "batch_size": 0}, ValueError, "batch_size=0; expected at least 1"),
        ({"batch_size": 1.5}, TypeError, "batch_size=1.5 is of type float; expected an integer"),
        ({"truncate_dim": 8.0}, TypeError, "truncate_dim=8.0 is of type float; expected an integer"),
        ({"inputs": ["a"]}, TypeError, "sentences and inputs are both given; expected one of them"),
        ({"sentences": None}, TypeError, "sentences is of type NoneType; expected an iterable of str"),
        (
            {"sentences": "a", "precision": "int8"},
            ValueError,
            "has 1 rows; expected at least 2 .* `ranges` of others",
        ),
    ],
)
def test_encode_checks_its_arguments(encoder, given, error, message):
    with pytest.raises(error, match=message):
        encoder.encode(**{"sentences": ["a"]} | given)


def test_encode_iter_checks_its_arguments(encoder):
    with pytest.raises(TypeError, match="sentences is of type str; expected an iterable of str"):
        encoder.encode_iter("a man")
    with pytest.raises(TypeError, match="sentences is of type dict; expected an iterable of str"):
        encoder.encode_iter({"a": 1})
    with pytest.raises(ValueError, match="batch_size=0; expected at least 1"):
        encoder.encode_iter(["a man"], batch_size=0)
    stream = encoder.encode_iter(["a man", 3])
    with pytest.raises(TypeError, match=r"sentences\[1\] is of type int; expected str"):
        list(stream)


def test_many_pieces_of_a_chunk_keep_their_order(encoder, monkeypatch):
    sentences = random_sentences(100)
    expected = encoder.encode(sentences)
    monkeypatch.setattr(pipeline, "_FEW", 0)
    monkeypatch.setattr(pipeline, "_PIECE", 7)
    np.testing.assert_array_equal(encoder.encode(sentences), expected)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"max_length": 1}, ValueError, "max_length=1; expected 2 to 24"),
        ({"max_length": 25}, ValueError, "max_length=25; expected 2 to 24"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is unknown"),
        ({"dtype": "float64"}, TypeError, "float64; expected float16"),
    ],
)
def test_from_pretrained_checks_its_arguments(folder, given, error, message):
    with pytest.raises(error, match=message):
        Encoder.from_pretrained(folder, **given)


def test_max_length_can_be_set_and_nothing_unknown(encoder):
    sentence = " ".join(WORDS * 3)
    encoder.max_length = 8
    kept = encoder.encode(" ".join(sentence.split()[:6]))
    np.testing.assert_allclose(encoder.encode(sentence), kept, atol=1e-6)
    with pytest.raises(ValueError, match="max_length=25; expected 2 to 24"):
        encoder.max_length = 25
    encoder.max_seq_length = 6
    assert encoder.max_length == 6
    for name in ("max_tokens", "config", "params", "implementation"):
        with pytest.raises(AttributeError, match=name):
            setattr(encoder, name, 8)


def test_a_model_that_embeds_no_sentences(tmp_path):
    config = gpt2.GPT2Config(vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=24)
    weights.save(gpt2.init(jax.random.key(0), config), tmp_path, config=config)
    with pytest.raises(checkpoint.CheckpointError, match="holds a model of gpt2, which embeds no sentences"):
        Encoder.from_pretrained(tmp_path)


def test_a_users_own_module_named_weights(tmp_path):
    (tmp_path / "weights.py").write_text("raise SystemExit('the wrong module was run')")
    (tmp_path / "script.py").write_text("""
import pallas_models
from pallas_models.minilm import Encoder
try:
    Encoder.from_pretrained()
except ImportError as error:
    print(error)
""")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'weights.py'} is what `import weights` finds")


def test_tokenizer_of_another_model(encoder):
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(40)])
    with pytest.raises(ValueError, match="the tokenizer has 57 ids, the model only 40"):
        Encoder(encoder.params, tokenizer, config=CONFIG)


def test_files_are_checked(folder):
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    with pytest.raises(checkpoint.CheckpointError, match="max_seq_length is 'long'"):
        Encoder.from_pretrained(folder)
    (folder / "sentence_bert_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(checkpoint.CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Encoder.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Encoder.from_pretrained(folder)


# Real weights


def batch_of(encoder: Encoder, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Padded ids and mask of the tokens that the encoder makes."""
    tokens = encoder._tokenize(sentences)
    ids, mask = np.zeros((2, len(tokens), max(map(len, tokens))), np.int32)
    for i, row in enumerate(tokens):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask


@pytest.fixture(scope="module")
def real_encoder() -> Encoder:
    return Encoder.from_pretrained()


@checkpoints.needs_real_weights
def test_real_tokens(real_encoder):
    assert real_encoder.max_length == 256
    ids, mask = batch_of(real_encoder, ["Hello, World!", "unaffable"])
    assert ids.shape == (2, 6)
    assert ids[0].tolist() == [101, 7592, 1010, 2088, 999, 102]
    assert ids[1].tolist() == [101, 14477, 20961, 3468, 102, 0]  # una ##ffa ##ble
    assert mask.sum(1).tolist() == [6, 5]


REAL_SENTENCES = [*EXAMPLES, "", "Ünïcödé 文字 🙂", "a " * 300]


@pytest.fixture(scope="module")
def real_embeddings(reference, bert, real_encoder) -> np.ndarray:
    """Of `REAL_SENTENCES`, by torch in float32."""
    ids, mask = batch_of(real_encoder, REAL_SENTENCES)
    tensors = lazy.read_tensors(weights.resolve())
    del tensors["embeddings.position_ids"]
    model = bert.Encoder(tensors, num_heads=12)
    return reference.compute(model.embed, jnp.asarray(ids), jnp.asarray(mask))


@checkpoints.needs_real_weights
@pytest.mark.parametrize("dtype, least", [("float32", 0.999999), ("float16", 0.9999), ("bfloat16", 0.9999)])
def test_real_weights_against_torch(real_embeddings, dtype, least):
    embeddings = Encoder.from_pretrained(dtype=dtype).encode(REAL_SENTENCES, batch_size=3)
    assert cosines(embeddings, real_embeddings).min() >= least
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)


@checkpoints.needs_real_weights
def test_real_embeddings_know_meaning(real_encoder):
    similarity = np.triu(np.inner(*[real_encoder.encode(EXAMPLES)] * 2), 1)
    first, second = np.unravel_index(np.argsort(similarity, axis=None)[-2:], similarity.shape)
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == {(0, 1), (2, 3)}


@checkpoints.needs_real_weights
def test_readme_example(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]  # the others need weights from a hub
    names: dict = {}
    exec(example, names)
    assert 0.5 < float(capsys.readouterr().out.removeprefix("similarity ")) < 1
    assert names["embeddings"].shape == (1, 384) and names["embeddings"].dtype == jnp.float32
