"""Sentences to embeddings: the numbers of torch, the order of the sentences, and few shapes to compile."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weights
from pallas_models import encoder as encoder_module
from pallas_models import minilm
from pallas_models.__main__ import EXAMPLES
from pallas_models.minilm import Encoder
from parity import checkpoints
from parity.checkpoints import CONFIG, WORDS, bert_tensors
from parity.common import assert_close, cosines
from weights import checkpoint


def random_sentences(count: int, longest: int = 30) -> list[str]:
    rng = np.random.default_rng(3)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(count)]


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
    sentences = random_sentences(8)
    expected = one_by_one(encoder, sentences)
    for batch_size in (1, 3, 64):
        embeddings = encoder.encode(sentences, batch_size=batch_size)
        assert embeddings.dtype == np.float32
        assert_close(embeddings, expected, 1e-5)


def test_computes_what_torch_computes(reference, folder, implementation):
    sentences = ["A man is playing the guitar.", "a woman cuts an onion", "unknown words"]
    encoder = Encoder.from_pretrained(folder, implementation=implementation)
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(sentences)
    ids, mask = (jnp.array([getattr(e, name) for e in encodings]) for name in ("ids", "attention_mask"))
    model = reference.Encoder(bert_tensors(), num_heads=CONFIG.num_heads, epsilon=CONFIG.epsilon)
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
    assert encoder.encode([]).shape == (0, 64) and encoder.encode([]).dtype == np.float32


def test_empty_sentence_is_the_special_tokens_alone(encoder):
    ids = jnp.array([[2, 3]])  # [CLS] [SEP]
    expected = minilm.embed(encoder.params, ids, jnp.ones_like(ids), config=CONFIG)
    for embeddings in (encoder.encode(["", "a man is playing", "  "]), encoder.encode([""] * 3)):
        np.testing.assert_allclose(embeddings[[0, 2]], np.repeat(expected, 2, 0), atol=1e-6)


def test_normalize_embeddings(encoder):
    sentences = random_sentences(6)
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


def test_limits_in_tokenizer_json_are_not_used(folder, encoder):
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_id=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    sentences = random_sentences(4)
    np.testing.assert_array_equal(Encoder.from_pretrained(folder).encode(sentences), encoder.encode(sentences))


# Batches


@pytest.fixture
def calls(monkeypatch) -> list[str | tuple[int, int]]:
    """What happens in `encode`: the shape of each batch given to the device, "read" for each result taken."""
    seen: list[str | tuple[int, int]] = []
    embed = encoder_module._embed

    class Result:
        def __init__(self, value):
            self.value = value

        def __array__(self, *args, **kwargs):
            seen.append("read")
            return np.asarray(self.value, *args, **kwargs)

    def recorded(params, ids, mask, **options):
        seen.append(ids.shape)
        assert mask.shape == ids.shape and np.all(ids[mask == 0] == 0)
        return Result(embed(params, ids, mask, **options))

    monkeypatch.setattr(encoder_module, "_embed", recorded)
    return seen


def test_few_shapes(folder, calls):
    encoder = Encoder.from_pretrained(folder, max_length=24)
    encoder.encode(random_sentences(61), batch_size=8)
    shapes = [call for call in calls if call != "read"]
    assert sum(rows for rows, _ in shapes) == 64  # 7 batches of 8 and one of 5, padded to 8
    assert {length for _, length in shapes} <= {16, 24}
    assert shapes == sorted(shapes, key=lambda shape: shape[1], reverse=True)
    calls.clear()
    for count in (1, 2, 3, 5, 6):
        encoder.encode(["a man"] * count, batch_size=6)
    assert [call for call in calls if call != "read"] == [(1, 16), (2, 16), (4, 16), (6, 16), (6, 16)]


def test_batches_are_queued(encoder, calls):
    encoder.encode(["a man"] * 20, batch_size=1)
    in_flight = [calls[: i + 1].count((1, 16)) - calls[: i + 1].count("read") for i in range(len(calls))]
    assert calls.count("read") == 20
    assert calls.index("read") >= 2 and max(in_flight) <= 10


def test_progress_bar(encoder, capsys):
    encoder.encode(["a man"] * 40, batch_size=1)
    encoder.encode(["a man"] * 3, show_progress_bar=False)
    assert capsys.readouterr() == ("", "")
    encoder.encode(["a man"] * 3, batch_size=2, show_progress_bar=True)
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err


# Errors


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"batch_size": 0}, ValueError, "batch_size=0; expected at least 1"),
        ({"sentences": ["a", None]}, TypeError, r"sentences\[1\] is of type NoneType; expected str"),
        ({"sentences": [["a", "b"]]}, TypeError, r"sentences\[0\] is of type list"),
    ],
)
def test_encode_checks_its_arguments(encoder, given, error, message):
    with pytest.raises(error, match=message):
        encoder.encode(**{"sentences": ["a"]} | given)


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


def test_tokenizer_of_another_model(encoder):
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(40)])
    with pytest.raises(ValueError, match="the tokenizer has 57 ids, the model only 40"):
        Encoder(encoder.params, tokenizer, config=CONFIG)


def test_files_are_checked(folder):
    pooling = folder / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}
    pooling.write_text(json.dumps(modes))
    Encoder.from_pretrained(folder)
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with pytest.raises(NotImplementedError, match="pooling_mode_cls_token"):
        Encoder.from_pretrained(folder)
    pooling.unlink()
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


@checkpoints.needs_real_weights
def test_real_tokens():
    encoder = Encoder.from_pretrained()
    assert encoder.max_length == 256
    ids, mask = encoder._tokenize(["Hello, World!", "unaffable"], 32)
    assert ids.shape == (2, 16)
    assert ids[0, :6].tolist() == [101, 7592, 1010, 2088, 999, 102]
    assert ids[1, :6].tolist() == [101, 14477, 20961, 3468, 102, 0]  # una ##ffa ##ble
    assert mask.sum(1).tolist() == [6, 5]


@checkpoints.needs_real_weights
@pytest.mark.parametrize("dtype, least", [("float32", 0.999999), ("float16", 0.9999), ("bfloat16", 0.9999)])
def test_real_weights_against_torch(reference, dtype, least):
    sentences = [*EXAMPLES, "", "Ünïcödé 文字 🙂", "a " * 300]
    encoder = Encoder.from_pretrained(dtype=dtype)
    ids, mask = encoder._tokenize(sentences, len(sentences))
    tensors = checkpoint.read_tensors(weights.resolve())
    del tensors["embeddings.position_ids"]
    model = reference.Encoder(tensors, num_heads=12)
    expected = reference.compute(model.embed, jnp.asarray(ids), jnp.asarray(mask))
    embeddings = encoder.encode(sentences, batch_size=3)
    assert cosines(embeddings, expected).min() >= least
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)


@checkpoints.needs_real_weights
def test_real_embeddings_know_meaning():
    similarity = np.triu(np.inner(*[Encoder.from_pretrained().encode(EXAMPLES)] * 2), 1)
    first, second = np.unravel_index(np.argsort(similarity, axis=None)[-2:], similarity.shape)
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == {(0, 1), (2, 3)}


@checkpoints.needs_real_weights
def test_readme_example(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]  # the others need weights from a hub
    names: dict = {}
    exec(example, names)
    assert 0.5 < float(capsys.readouterr().out.removeprefix("similarity ")) < 1
    assert names["embeddings"].shape == (1, 384) and names["embeddings"].dtype == jnp.float32
