"""Packed sentences: `packing.pack` on the host, and `minilm.embed_packed` against padded rows."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import minilm
from pallas_models._modules import position_ids
from pallas_models.sentence import packing
from parity.models.test_minilm import SMALL, in_every_dtype
from parity.support.common import KERNEL, ON_GPU, assert_close, cosines, normal, random_params
from parity.support.tolerances import COSINE, MODEL, MODEL_GRADIENT

CONFIG = minilm.MiniLMConfig() if ON_GPU else SMALL
BUDGET = 2048


def random_tokens(lengths: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, CONFIG.vocab_size, np.sum(lengths)).astype(np.int32)


def check(batches: list[packing.Batch], tokens: np.ndarray, lengths: np.ndarray, limit: int, budget: int) -> None:
    """Every sentence with tokens is whole in one row of one batch, and batches are as `Batch` says."""
    sentences = np.split(tokens, np.cumsum(lengths)[:-1])
    known = [shape for shapes in packing.shapes(limit, budget).values() for shape in shapes]
    seen = []
    for batch in batches:
        shape = batch.tokens.shape[1:]
        assert batch.tokens.dtype == np.int32 and shape in known
        ids, segments = batch.tokens
        steps = np.diff(segments.ravel(), prepend=-1)
        assert set(steps) <= {0, 1}  # ascending, and none is left out
        assert np.all(steps.reshape(shape)[:, 0] == 1)  # a row begins with a segment of its own
        assert np.all(batch.segments < packing.num_segments(shape))
        for which, segment in zip(batch.sentences, batch.segments, strict=True):
            np.testing.assert_array_equal(ids[segments == segment], sentences[which])
        seen += batch.sentences.tolist()
    assert sorted(seen) == np.flatnonzero(lengths).tolist()


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 90), min_size=1, max_size=200), st.sampled_from([90, 128, 500]), st.integers(1, 3000)
)
@hypothesis.example([1] * 200, 90, 2048)  # more sentences than a batch has segments for
@hypothesis.example([90] * 9, 90, 1)
@hypothesis.example([0, 0], 90, 100)
def test_every_sentence_is_packed_once(lengths, limit, budget):
    lengths = np.array(lengths)
    tokens = random_tokens(lengths)
    check(list(packing.pack(tokens, lengths, limit, budget)), tokens, lengths, limit, budget)


@pytest.mark.parametrize("limit", [2, 7, 20, 64, 65, 512])
def test_any_limit(limit):
    lengths = np.random.default_rng(1).integers(1, limit + 1, 300)
    tokens = random_tokens(lengths)
    check(list(packing.pack(tokens, lengths, limit, BUDGET)), tokens, lengths, limit, BUDGET)


def test_at_most_five_shapes():
    for limit in (16, 64, 65, 256, 512):
        for budget in (1, 256, 2048, 65536):
            shapes = [shape for shapes in packing.shapes(limit, budget).values() for shape in shapes]
            assert len(shapes) == len(set(shapes)) <= 5
            assert max(rows * length for rows, length in shapes) <= max(budget, limit)
    assert packing.shapes(256, 65536) == {64: [(16, 64), (128, 64), (1024, 64)], 256: [(4, 256), (64, 256)]}


def test_rows_are_full():
    lengths = np.clip(np.random.default_rng(2).gamma(6.0, 2.5, 20000).astype(int), 3, 64)
    filled = [(rows.shape[0], kinds.sum()) for rows, kinds in packing.fill(lengths, 64, 31)]
    assert sum(n * tokens for n, tokens in filled) == lengths.sum()
    assert lengths.sum() / (64 * sum(n for n, _ in filled)) > 0.98  # in the order given, half a sentence is lost
    batches = list(packing.pack(random_tokens(lengths), lengths, 64, 8192))
    *full, _ = batches  # the last has what is left over
    assert (
        sum(lengths[batch.sentences].sum() for batch in full) / sum(batch.tokens[0].size for batch in full) > 0.96
    )


def test_many_sentences_need_one_shape():
    """What is left over when four large batches are full fills another, however little it is."""
    lengths = np.full(4 * 32 * 4 + 1, 16)
    batches = list(packing.pack(random_tokens(lengths), lengths, 64, BUDGET))
    assert [batch.tokens.shape for batch in batches] == [(2, 32, 64)] * 5
    few = list(packing.pack(random_tokens(lengths[:129]), lengths[:129], 64, BUDGET))
    assert [batch.tokens.shape for batch in few] == [(2, 32, 64), (2, 4, 64)]


def test_position_ids():
    segments = jnp.array([[0, 0, 0, 1, 2, 2], [3, 3, -1, -1, -1, 4], [0, 0, 0, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 0, 1], [0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert position_ids(segments).tolist() == expected


def packed(
    lengths: np.ndarray, config: minilm.MiniLMConfig = CONFIG
) -> tuple[packing.Batch, jax.Array, jax.Array]:
    """One batch that holds all sentences, and the same padded: ids and mask."""
    tokens = random_tokens(lengths) % config.vocab_size
    longest = config.max_positions
    (batch,) = packing.pack(tokens, lengths, longest, 8 * longest)
    order = np.argsort(batch.sentences)
    batch = packing.Batch(batch.tokens, batch.segments[order], batch.sentences[order])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = tokens
    return batch, jnp.asarray(ids), jnp.asarray(mask, jnp.int32)


LENGTHS = np.array([9, 2, 25, 3, 17, 40, 6, 11, 1, 19])


@functools.cache
def compiled(implementation: str | None, num_segments: int, config: minilm.MiniLMConfig = CONFIG):
    options = dict(config=config, implementation=implementation)
    embed_packed = functools.partial(minilm.embed_packed, num_segments=num_segments, **options)
    return jax.jit(embed_packed), jax.jit(functools.partial(minilm.embed, **options))


@in_every_dtype
def test_values_are_those_of_padded_rows(implementation, dtype):
    params = random_params(CONFIG, dtype)
    batch, ids, mask = packed(LENGTHS)
    count = packing.num_segments(batch.tokens.shape[1:])
    embed_packed, embed = compiled(implementation, count)
    out = embed_packed(params, *batch.tokens)
    assert out.shape == (count, CONFIG.hidden_size) and out.dtype == "float32"
    out, expected = np.asarray(out)[batch.segments], embed(params, ids, mask)
    assert_close(out, expected, MODEL[dtype])
    assert np.min(cosines(out, expected)) >= COSINE[dtype]


def test_against_torch(reference, bert, implementation):
    params = random_params(CONFIG)
    batch, ids, mask = packed(LENGTHS)
    encoder = bert.Encoder(bert.bert_tensors(params), num_heads=CONFIG.num_heads, epsilon=CONFIG.epsilon)
    embed_packed, _ = compiled(implementation, packing.num_segments(batch.tokens.shape[1:]))
    out = np.asarray(embed_packed(params, *batch.tokens))[batch.segments]
    assert_close(out, reference.compute(encoder.embed, ids, mask), MODEL["float32"])


def test_ids_need_no_order_and_padding_is_of_no_segment(implementation):
    params = random_params(CONFIG)
    batch, _, _ = packed(LENGTHS)
    ids, segments = (jnp.asarray(x) for x in batch.tokens)
    count = packing.num_segments(ids.shape)
    embed_packed, _ = compiled(implementation, count)
    expected = np.asarray(embed_packed(params, ids, segments))
    taken = jnp.isin(segments, batch.segments)
    out = embed_packed(params, ids, jnp.where(taken, count - 1 - segments, -1))
    assert_close(out[::-1][batch.segments], expected[batch.segments], MODEL["float32"])
    empty = np.setdiff1d(np.arange(count), count - 1 - batch.segments)
    assert empty.size and np.all(np.asarray(out)[empty] == 0.0)
    beyond = embed_packed(params, ids, jnp.where(taken, segments, count))
    assert_close(beyond[batch.segments], expected[batch.segments], MODEL["float32"])


def test_a_sentence_does_not_depend_on_its_neighbours():
    params = random_params(CONFIG)
    batch, _, _ = packed(LENGTHS)
    ids, segments = (jnp.asarray(x) for x in batch.tokens)
    embed_packed, _ = compiled(KERNEL, packing.num_segments(ids.shape))
    kept, other = batch.segments[4], (ids + 7) % CONFIG.vocab_size
    changed = embed_packed(params, jnp.where(segments == kept, ids, other), segments)
    out = embed_packed(params, ids, segments)
    np.testing.assert_array_equal(changed[kept], out[kept])
    assert not np.allclose(changed[batch.segments[0]], out[batch.segments[0]], atol=1e-3)


def test_gradients_are_those_of_padded_rows():
    config = minilm.MiniLMConfig(
        vocab_size=20, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=12
    )
    lengths = np.array([5, 12, 2, 7, 3])
    params = random_params(config)
    batch, ids, mask = packed(lengths, config)
    cotangent = normal(np.random.default_rng(5), len(lengths), config.hidden_size)
    embed_packed, embed = compiled(KERNEL, packing.num_segments(batch.tokens.shape[1:]), config)

    def of_packed(params):
        return jnp.sum(embed_packed(params, *map(jnp.asarray, batch.tokens))[batch.segments] * cotangent)

    found = jax.grad(of_packed)(params)
    expected = jax.grad(lambda params: jnp.sum(embed(params, ids, mask) * cotangent))(params)
    for path, leaf in jax.tree.leaves_with_path(expected):
        ours = functools.reduce(lambda tree, key: tree[key.key], path, found)
        if path[-1].key == "bias" and path[-2].key == "qkv":  # the bias of the keys has none
            third = config.hidden_size
            ours, leaf = (jnp.delete(x, slice(third, 2 * third)) for x in (ours, leaf))
        assert_close(ours, leaf, MODEL_GRADIENT)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(segment_ids=jnp.zeros((1, 8))), TypeError, "segment_ids has dtype float32; expected an integer"),
        (
            dict(segment_ids=jnp.zeros((1, 7), int)),
            ValueError,
            r"segment_ids has shape \(1, 7\); expected \(1, 8\)",
        ),
        (dict(num_segments=-1), ValueError, "num_segments=-1; expected at least 0"),
        (dict(ids=jnp.zeros(8, int)), ValueError, r"ids has shape \(8,\); expected 2 axes, \(B, S\)"),
    ],
)
def test_errors(change, error, message):
    given = dict(ids=jnp.zeros((1, 8), int), segment_ids=jnp.zeros((1, 8), int), num_segments=1) | change
    with pytest.raises(error, match=message):
        minilm.embed_packed(random_params(CONFIG), **given, config=CONFIG)
