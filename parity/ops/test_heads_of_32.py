"""Pooling, dense layers and normalisation of sentence encoders, of padded and of packed sentences."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.sentence import heads
from pallas_models.sentence.heads import Dense, Head, Normalize
from parity.support.common import assert_close, normal
from parity.support.tolerances import SHORT

LENGTHS = (5, 1, 7, 3)
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
POOLINGS = (*((mode,) for mode in MODES), MODES[::-1])


def hidden_states() -> np.ndarray:
    """(4, 7, 6); what stands in padding must not be seen."""
    x = np.array(normal(np.random.default_rng(0), len(LENGTHS), max(LENGTHS), 6))
    x[~mask().astype(bool)] = 1e4
    return x


def mask() -> np.ndarray:
    return (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int32)


def packed() -> tuple[np.ndarray, np.ndarray]:
    """The sentences in two rows of 9: the first two and the fourth, then the third; the rest is padding."""
    x, ids = np.full((2, 9, 6), 1e4, np.float32), np.full((2, 9), 4, np.int32)
    ids[1, 7:] = -1
    for sentence, row, start in ((0, 0, 0), (1, 0, 5), (3, 0, 6), (2, 1, 0)):
        places = slice(start, start + LENGTHS[sentence])
        x[row, places], ids[row, places] = hidden_states()[sentence, : LENGTHS[sentence]], sentence
    return x, ids


def pooled(sentence: np.ndarray, mode: str) -> np.ndarray:
    """One sentence, (tokens, features), by the definition."""
    count = len(sentence)
    weights = np.arange(1, count + 1)[:, None]
    return {
        "cls": sentence[0],
        "lasttoken": sentence[-1],
        "max": sentence.max(0),
        "mean": sentence.mean(0),
        "mean_sqrt_len_tokens": sentence.sum(0) / np.sqrt(count),
        "weightedmean": (sentence * weights).sum(0) / weights.sum(),
    }[mode]


def expected(pooling: tuple[str, ...]) -> np.ndarray:
    sentences = [x[:n].astype(np.float64) for x, n in zip(hidden_states(), LENGTHS, strict=True)]
    return np.stack([np.concatenate([pooled(x, mode) for mode in pooling]) for x in sentences])


@pytest.mark.covering(2)
@pytest.mark.parametrize("pooling", POOLINGS, ids="+".join)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalize"])
def test_pooling(implementation, pooling, normalize):
    head = Head(pooling=pooling, layers=(Normalize(),) if normalize else ())
    values = expected(pooling)
    if normalize:
        values /= np.linalg.norm(values, axis=1, keepdims=True)
    options = dict(implementation=implementation)
    padded = heads.apply(head, {}, jnp.asarray(hidden_states()), jnp.asarray(mask()), **options)
    assert padded.shape == (4, head.features(6)) and padded.dtype == jnp.float32
    assert_close(padded, values, SHORT)
    x, ids = map(jnp.asarray, packed())
    assert_close(heads.apply(head, {}, x, segment_ids=ids, num_segments=4, **options), values, SHORT)


@pytest.mark.parametrize("pooling", POOLINGS, ids="+".join)
def test_a_sentence_without_tokens_is_zero(pooling):
    x, ids = map(jnp.asarray, packed())
    out = heads.apply(Head(pooling=pooling), {}, x, segment_ids=ids % 4, num_segments=6)
    assert out.shape[0] == 6 and not np.asarray(out[4:]).any() and np.isfinite(out).all()


def test_dense_layers(implementation):
    layers = (
        Dense(in_features=12, out_features=5),
        Normalize(),
        Dense(in_features=5, out_features=5, activation="relu", use_bias=False, residual=True),
        Dense(in_features=5, out_features=4, activation="identity", residual=True),
    )
    head = Head(pooling=("cls", "mean"), layers=layers)
    assert head.features(6) == 4
    rng = np.random.default_rng(1)
    a, b, c, d = (np.array(normal(rng, *shape)) for shape in ((12, 5), (5, 5), (5, 4), (5, 4)))
    biases = np.array(normal(rng, 9))
    params = {"0": {"kernel": a, "bias": biases[:5]}, "2": {"kernel": b}}
    params["3"] = {"kernel": c, "bias": biases[5:], "residual": d}
    y = np.tanh(expected(("cls", "mean")) @ a + biases[:5])
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    y = np.maximum(y @ b, 0) + y
    y = y @ c + biases[5:] + y @ d
    params = {i: {name: jnp.asarray(x) for name, x in layer.items()} for i, layer in params.items()}
    x, m = jnp.asarray(hidden_states()), jnp.asarray(mask())
    assert_close(heads.apply(head, params, x, m, implementation=implementation), y, SHORT)


def test_normalized():
    assert Head().normalized() is not None and Head().normalized() == Head()
    assert Head(layers=()).normalized() == Head()


def test_errors():
    x, m = jnp.asarray(hidden_states()), jnp.asarray(mask())
    with pytest.raises(ValueError, match="expected either mask or segment_ids"):
        heads.apply(Head(), {}, x)
    with pytest.raises(ValueError, match="expected either mask or segment_ids"):
        heads.apply(Head(), {}, x, m, segment_ids=m, num_segments=2)
    with pytest.raises(ValueError, match=r"pooling=\('first',\); expected some of"):
        Head(pooling=("first",))
    with pytest.raises(ValueError, match="activation='mish' is unknown; expected one of"):
        Dense(in_features=1, out_features=1, activation="mish")
