"""`ops.embed_tokens` and its gradient in Mosaic, whose CTAs walk the tokens, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models import target as targets
from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.mosaic import embedding, embedding_backward
from pallas_models.kernels.mosaic.embedding_walk import Config, apart, blocks_of, config_of, configs
from pallas_models.target import GPUS
from parity.ops.test_embedding import operands
from parity.ops.test_lowering import every_device, lowered_for_cuda
from parity.ops.test_rows import ROWS, older
from parity.support.common import (
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    assert_close,
    by_device,
    cuda_device,
    float64,
    gpu,
    normal,
    traces,
    without_gpu,
    without_triton,
)
from parity.support.tolerances import GRADIENT, OP

H200 = GPUS["H200"]
SHAPES = by_device(  # batch, seq, width, vocabulary
    cpu=[(1, 1, 16, 5), (3, 7, 33, 50), (2, 20, 384, 101)],
    gpu=[
        (1, 16, 384, 30522),
        (40, 1, 384, 99),
        (64, 128, 384, 30522),
        (3, 77, 385, 1001),
        (33, 100, 1024, 30522),
        (2, 9, 6144, 30),
    ],
)
OPTIONS = pytest.mark.parametrize("names", [(), ("token_type_ids",), ("token_type_ids", "position_ids")], ids=str)


def drawn(shape, dtype, names=()):
    """A form, with types and positions where they are named, and the cotangent of its result."""
    (ids, *tables), types = operands(shape, dtype)
    given = dict.fromkeys(("token_type_ids", "position_ids")) | dict.fromkeys(names, types)
    tables = dict(zip(("word", "position", "token_type", "scale", "bias"), tables, strict=True))
    form = Form(ids=ids, **given, **tables, epsilon=1e-12)
    return form, normal(np.random.default_rng(41), *shape[:3], dtype=dtype)


def expected(form, dout):
    """The embeddings, and the gradients of tables, scale and bias, in float64."""
    batch, seq = form.ids.shape
    numbers = [form.ids, form.position_ids, form.token_type_ids]
    instead = [None, np.broadcast_to(np.arange(seq), (batch, seq)), np.zeros((batch, seq), int)]
    tables = [form.word, form.position, form.token_type]
    numbers = [np.asarray(found if x is None else x) for x, found in zip(numbers, instead, strict=True)]
    y = sum(float64(table)[index] for table, index in zip(tables, numbers, strict=True))
    d = y - y.mean(-1, keepdims=True)
    factor = 1.0 / np.sqrt(np.square(d).mean(-1, keepdims=True) + form.epsilon)
    h, dout = d * factor, float64(dout)
    dh = dout * float64(form.scale)
    dy = (dh - dh.mean(-1, keepdims=True) - h * (dh * h).mean(-1, keepdims=True)) * factor
    sums = [np.zeros(table.shape) for table in tables]
    for total, index in zip(sums, numbers, strict=True):
        np.add.at(total, index, dy)
    out = h * float64(form.scale) + float64(form.bias)
    return out, (*sums, (dout * h).sum((0, 1)), dout.sum((0, 1)))


def embed(form, **options):
    """`ops.embed_tokens` of a form, as a function of the tables, scale and bias; and these."""
    ids = dict(token_type_ids=form.token_type_ids, position_ids=form.position_ids)
    call = functools.partial(ops.embed_tokens, form.ids, **ids, epsilon=form.epsilon, **options)
    return call, (form.word, form.position, form.token_type, form.scale, form.bias)


@pytest.mark.covering(1)
@OPTIONS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(dtype, tolerance, shape, names):
    form, dout = drawn(shape, dtype, names)
    call, arrays = embed(form, implementation=ROWS)

    @jax.jit
    def f(*arrays):
        out, pull = jax.vjp(call, *arrays)
        return out, pull(dout)

    assert traces("embed_tokens", f, *arrays) and traces("embed_tokens_backward", f, *arrays)
    out, found = f(*arrays)
    assert {x.dtype for x in (out, *found)} == {jnp.dtype(dtype)}
    wanted = expected(form, dout)
    assert_close(out, wanted[0], tolerance)
    for gradient, exact in zip(found, wanted[1], strict=True):
        assert_close(gradient, exact, max(tolerance, GRADIENT))


# Tokens: of a part of a warp, a warp, some warps, some warpgroups; one step, several, some past the last token;
# the same positions in every step or others; loaded none, one or two steps ahead.
WAYS = [
    ((6, 8, 64, 50), Config(threads=16, warpgroups=1, num_ctas=6)),
    ((6, 8, 64, 50), Config(threads=16, warpgroups=1, num_ctas=1)),
    ((5, 7, 33, 50), Config(threads=32, warpgroups=1, num_ctas=2, ahead=2)),
    ((5, 8, 33, 50), Config(threads=32, warpgroups=1, num_ctas=2, ahead=2)),
    ((9, 6, 72, 50), Config(threads=32, warpgroups=3, num_ctas=1, ahead=1)),
    ((5, 8, 136, 50), Config(threads=64, warpgroups=2, num_ctas=2, ahead=0)),
    ((3, 5, 520, 50), Config(threads=128, warpgroups=3, num_ctas=2, ahead=1)),
    ((3, 5, 520, 50), Config(threads=256, warpgroups=4, num_ctas=2, ahead=1)),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("names", [(), ("token_type_ids", "position_ids")], ids=str)
@pytest.mark.parametrize("shape, config", WAYS, ids=str)
def test_every_config(shape, config, names):
    form, dout = drawn(shape, "float32", names)
    options = dict(config=config, target=gpu(), interpret=not ON_GPU)

    @jax.jit
    def f(operands, dout):
        given = form.of(operands)
        found = embedding_backward.embed_tokens_backward(given, dout, **options)
        return embedding.embed_tokens(given, **options), found

    out, (dtotal, by_position, dscale, dbias) = f(form.operands, dout)
    wanted, (dword, dposition, _, *dvectors) = expected(form, dout)
    assert_close(out, wanted, OP["float32"])
    dword_found = np.zeros(dword.shape)
    np.add.at(dword_found, np.asarray(form.ids), float64(dtotal))
    assert_close(dword_found, dword, GRADIENT)
    (batch, seq), n = form.ids.shape, shape[2]
    walked = apart(blocks_of(config, jax.ShapeDtypeStruct((batch * seq, n), "float32")))
    assert (by_position is not None) == (not names and walked < batch * seq and walked % seq == 0)
    if by_position is not None:
        assert_close(by_position, dposition[:seq], GRADIENT)
    for found, exact in zip((dscale, dbias), dvectors, strict=True):
        assert_close(found, exact, GRADIENT)


def test_a_gradient_past_the_last_token_is_none():
    """A table of one number, and no epsilon: the factor of what lies past the end is infinite."""
    form, dout = drawn((5, 1, 40, 9), "float32")
    zeros = dict(position=form.position * 0.0, token_type=form.token_type * 0.0)
    form = form.replace(**zeros, epsilon=0.0)
    config = Config(threads=32, warpgroups=1, num_ctas=1)
    options = dict(config=config, target=gpu(), interpret=not ON_GPU)
    f = functools.partial(embedding_backward.embed_tokens_backward, **options)
    _, by_position, dscale, dbias = jax.jit(lambda operands, dout: f(form.of(operands), dout))(form.operands, dout)
    _, (_, dposition, _, *dvectors) = expected(form, dout)
    for found, exact in zip((by_position, dscale, dbias), (dposition[:1], *dvectors), strict=True):
        assert_close(found, exact, GRADIENT)


@pytest.mark.parametrize(
    "batch, seq, n, dtype, forward, backward",
    [
        (512, 128, 384, "float16", (32, 1, 1056), (32, 4, 128)),
        (64, 512, 1024, "float16", (64, 4, 128), (128, 4, 128)),
        (64, 512, 1024, "float32", (64, 4, 128), (128, 4, 128)),
        (512, 77, 384, "float16", (32, 1, 1001), (32, 4, 132)),  # no fewer CTAs of four meet the same positions
        (1, 16, 384, "float16", (32, 1, 4), (32, 1, 4)),  # few tokens: of many CTAs
        (8, 128, 384, "float16", (32, 1, 256), (32, 1, 256)),
        (64, 128, 8, "float16", (1, 1, 64), (1, 1, 64)),
        (64, 128, 16384, "float32", (512, 4, 128), (512, 4, 128)),  # which few registers hold
    ],
)
def test_threads_have_what_registers_have_room_for(batch, seq, n, dtype, forward, backward):
    for module, wanted in ((embedding, forward), (embedding_backward, backward)):
        config = module.heuristic(batch * seq, seq, n, dtype, H200)
        assert (config.threads, config.warpgroups, config.num_ctas) == wanted


def test_a_gradient_has_fewer_warps_before_hopper_where_ptxas_takes_more_registers():
    def warpgroups(capability):
        target = dataclasses.replace(H200, capability=capability)
        return embedding_backward.heuristic(512 * 128, 128, 384, "float16", target).warpgroups

    assert [warpgroups(capability) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))] == [2, 2, 4, 4]


@pytest.mark.parametrize("seq, num_ctas", [(128, 128), (512, 128), (96, 120), (7, 126), (360, 132), (1000, 132)])
def test_ctas_meet_the_same_positions_where_few_of_them_are_left_out(seq, num_ctas):
    config = config_of(512 * seq, seq, 32, 1, 1, 1, H200)
    assert config.num_ctas == num_ctas
    rows = jax.ShapeDtypeStruct((512 * seq, 384), "float16")
    assert (apart(blocks_of(config, rows)) % seq == 0) == (seq < 130 or seq == 512)


@pytest.mark.parametrize("n", [1, 8, 384, 1000, 4096, 16384])
def test_configs_worth_measuring(n):
    found = list(configs(8192, 128, n, H200))
    assert found and len(found) == len(set(found))
    for config in found:
        blocks = blocks_of(config, jax.ShapeDtypeStruct((8192, n), "bfloat16"))
        assert blocks.steps == 1 and blocks.columns * blocks.vector <= 32


@pytest.mark.parametrize(
    "changes", [dict(num_ctas=0), dict(warpgroups=0), dict(threads=3), dict(ahead=-1)], ids=str
)
def test_a_config_that_cannot_be_is_refused(changes):
    config = Config(threads=32, warpgroups=1, num_ctas=2)
    with pytest.raises(ValueError, match="|".join(changes)):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    "module, most", [(embedding, 16384), (embedding_backward, 6144)], ids=["forward", "gradient"]
)
def test_rows_that_it_serves(module, most):
    for n in (most, most + 1):
        table, vector = jax.ShapeDtypeStruct((9, n), "float16"), jax.ShapeDtypeStruct((n,), "float16")
        form, _ = drawn((1, 1, 1, 1), "float16")
        form = form.replace(word=table, position=table, token_type=table, scale=vector, bias=vector)
        refused = f"takes rows of up to {most} columns, not {n}"
        assert module.unsupported(form, H200) == (refused if n > most else None)


@older
@without_gpu
@every_device
@pytest.mark.parametrize("dtype, kernels", [("float16", 2), ("float32", 1)])
def test_it_is_for_hopper_and_for_every_gpu_where_it_is_named_or_triton_is_missing(device, dtype, kernels):
    """By default in 16 bits, and in float32 its gradient alone."""
    call, arrays = embed(drawn((2, 20, 384, 101), dtype)[0])

    def gradient(implementation):
        def f(*arrays):
            out, pull = jax.vjp(functools.partial(call, implementation=implementation), *arrays)
            return out, pull(out)

        return f

    with cuda_device(*device):
        assert lowered_for_cuda(gradient("mosaic"), *arrays).count(f"@{MOSAIC_CALL}") == 2
        by_default = lowered_for_cuda(gradient(None), *arrays).count(f"@{MOSAIC_CALL}")
        assert by_default == (kernels if targets.current().capability == (9, 0) else 0)
    with without_triton(), cuda_device(*device):
        text = lowered_for_cuda(gradient(None), *arrays)
    assert text.count(f"@{MOSAIC_CALL}") == 2 and TRITON_CALL not in text


@older
@without_gpu
@pytest.mark.parametrize("names", [(), ("token_type_ids", "position_ids")], ids=str)
@pytest.mark.parametrize("shape, config", WAYS, ids=str)
def test_every_config_lowers(shape, config, names):
    form, dout = drawn(shape, "float16", names)
    options = dict(config=config, target=H200, interpret=False)

    def f(operands, dout):
        given = form.of(operands)
        found = embedding_backward.embed_tokens_backward(given, dout, **options)
        return embedding.embed_tokens(given, **options), found

    with cuda_device("NVIDIA H200", 132):
        assert lowered_for_cuda(f, form.operands, dout).count(f"@{MOSAIC_CALL}") == 2
