"""Attention and its gradient by `mma` on whichever GPU is there: values, masks, pairs, where they serve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops, target
from pallas_models.dispatch import choice
from pallas_models.dispatch.records import Call
from pallas_models.kernels.forms import attention as forms
from pallas_models.kernels.forms import triangle_attention as pair_forms
from pallas_models.kernels.mosaic import attention as hopper
from pallas_models.kernels.mosaic import attention_backward as hopper_backward
from pallas_models.kernels.mosaic import attention_backward_mma as mma_backward
from pallas_models.kernels.mosaic import attention_mma as mma
from pallas_models.kernels.triton import attention as triton
from pallas_models.kernels.triton import attention_backward as triton_backward
from pallas_models.ops.attention import OP as ATTENTION
from pallas_models.ops.triangle_attention import OP as TRIANGLE
from parity.support.common import MOSAIC, assert_close, by_device, normal, without_triton
from parity.support.primitives import all_called
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no mma")
A_CONFIG = dict(block_q=64, block_kv=32, num_stages=2)


def a_form(seq, kv_seq, *, heads=2, kv_heads=2, head_dim=64, batch=1, dtype="bfloat16", fused=False, **options):
    """A call; `mask`, `bias` (dtype, B, heads) and `segments` say which operands it has beside q, k and v."""
    rng = np.random.default_rng(seq + kv_seq + head_dim)
    counts = [heads, kv_heads, kv_heads]
    columns = [(batch, n, head_dim * count) for n, count in zip((seq, kv_seq, kv_seq), counts, strict=True)]
    if fused:
        columns = [(batch, seq, head_dim * sum(counts))]
    mask, bias, segments = (options.pop(name, None) for name in ("mask", "bias", "segments"))
    return forms.Form(
        qkv=tuple(normal(rng, *shape).astype(dtype) for shape in columns),
        mask=jnp.asarray(rng.random((batch, kv_seq)) < 0.7, jnp.int32) if mask else None,
        bias=normal(rng, *bias[1:], seq, kv_seq).astype(bias[0]) if bias else None,
        segment_ids=jnp.arange(batch * seq, dtype=jnp.int32).reshape(batch, seq) // 50 if segments else None,
        kv_segment_ids=jnp.arange(batch * kv_seq, dtype=jnp.int32).reshape(batch, -1) // 50 if segments else None,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sm_scale=head_dim**-0.5,
        return_lse=True,
        precision=jax.lax.Precision.DEFAULT,
        **options,
    )


def of_pairs(n, direction, *, head_dim=32, batch=1, lines=None, mask=False, bias="float32", dtype="bfloat16"):
    """A call of triangle attention, with so many lines."""
    rng, heads = np.random.default_rng(n + head_dim), 2
    sides = (lines or n, n) if direction == "starting" else (n, lines or n)
    return pair_forms.Form(
        qkv=tuple(normal(rng, batch, *sides, heads * head_dim).astype(dtype) for _ in range(3)),
        mask=jnp.asarray(rng.random((batch, *sides)) < 0.7, jnp.int32) if mask else None,
        bias=None if bias is None else normal(rng, batch, heads, n, n).astype(bias),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        sm_scale=head_dim**-0.5,
        return_lse=True,
        precision=jax.lax.Precision.DEFAULT,
        direction=direction,
    )


def exactly(form, operands):
    """The results of a call in float32."""
    op = TRIANGLE if isinstance(form, pair_forms.Form) else ATTENTION
    return op.reference(form.of(operands).replace(precision=jax.lax.Precision.HIGHEST))


def widened(form):
    return jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), form.operands)


def check(form, config=None, *, backward=True):
    """Holds results and gradients against float32."""
    options = dict(target=target.current(), interpret=INTERPRET)
    found = jax.jit(functools.partial(mma.attention, config=config, **options))(form)
    wide = widened(form)
    expected, vjp = jax.vjp(lambda *operands: exactly(form, operands), *wide)
    bound = OP[str(form.dtype)]
    assert found[0].dtype == form.dtype and found[1].dtype == jnp.float32
    assert_close(found[0], expected[0], bound)
    assert_close(found[1], expected[1], bound)
    if not backward:
        return
    rng = np.random.default_rng(7)
    dout, dlse = normal(rng, *form.out_shape).astype(form.dtype), normal(rng, *form.lse_shape)
    call = functools.partial(mma_backward.attention_backward, wanted=(True,) * 5, config=None, **options)
    dqkv, dmask, dbias, *ids = jax.jit(call)(form, list(found), [dout, dlse])
    exact = vjp((dout.astype(jnp.float32), dlse))
    for dx, wanted, x in zip(dqkv, exact[0], form.qkv, strict=True):
        assert dx.dtype == x.dtype
        assert_close(dx, wanted, 2 * bound)  # weights and the gradients of scores are rounded too
    assert (dmask, *ids) == (None,) * 3
    if form.bias is not None:
        assert dbias.dtype == form.bias.dtype
        assert_close(dbias, exact[2], 2 * bound)


CASES = {
    "plain": dict(seq=128, kv_seq=128),
    "ragged causal": dict(seq=200, kv_seq=150, causal=True),
    "shared keys": dict(seq=70, kv_seq=70, heads=4, kv_heads=2, head_dim=32, mask=True),
    "window": dict(seq=130, kv_seq=130, window=40, causal=True, head_dim=128, kv_heads=1),
    "window to both sides": dict(seq=150, kv_seq=130, window=30, head_dim=16),
    "bias of each": dict(seq=72, kv_seq=100, batch=2, bias=("float32", 2, 2), head_dim=16),
    "bias of all": dict(seq=64, kv_seq=64, batch=3, bias=("bfloat16", 1, 1), mask=True),
    "segments": dict(seq=100, kv_seq=100, batch=2, segments=True, bias=("float32", 1, 2)),
    "fused": dict(seq=90, kv_seq=90, heads=4, kv_heads=2, fused=True, causal=True, mask=True),
    "one": dict(seq=1, kv_seq=1),
    "long masks": dict(seq=64, kv_seq=640, mask=True, segments=True, head_dim=32),
}


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, "bfloat16") for name in CASES), ("ragged causal", "float16"), ("bias of each", "float16")],
)
def test_values(name, dtype):
    check(a_form(**CASES[name], dtype=dtype))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences(head_dim, causal):
    seq = by_device(cpu=192, gpu=2048)
    check(a_form(seq, seq, head_dim=head_dim, causal=causal, batch=by_device(cpu=1, gpu=2)))


@pytest.mark.parametrize("direction", ["starting", "ending"])
@pytest.mark.parametrize(
    "options",
    [
        dict(mask=True),
        dict(head_dim=16, batch=2, lines=3, bias="bfloat16"),
        dict(head_dim=64, bias=None, mask=True),
    ],
    ids=["mask", "lines", "no bias"],
)
def test_pairs(direction, options):
    check(of_pairs(by_device(cpu=64, gpu=256), direction, **options))


def test_products_are_their_meaning():
    """In registers on a GPU, in the interpreter elsewhere: both are held to the same values."""
    with all_called("mosaic.common.products_mma"):
        check(a_form(64, 64, head_dim=32))


@pytest.mark.parametrize("block_q, block_kv", [(64, 32), (64, 128), (128, 32), (128, 64)])
def test_blocks(block_q, block_kv):
    config = mma.Config(block_q=block_q, block_kv=block_kv, num_stages=2)
    check(a_form(300, 260, causal=True), config, backward=False)


def test_queries_without_keys_have_zeros():
    form = a_form(64, 64)
    form = form.replace(mask=jnp.zeros((1, 64), jnp.int32))
    options = dict(target=target.current(), interpret=INTERPRET)
    out, lse = jax.jit(functools.partial(mma.attention, config=None, **options))(form)
    call = functools.partial(mma_backward.attention_backward, wanted=(True,) * 5, config=None, **options)
    dqkv, *_ = jax.jit(call)(form, [out, lse], [jnp.ones_like(out), jnp.ones_like(lse)])
    assert all(not jnp.any(x) for x in (out, *dqkv))


def test_a_masked_key_may_be_anything():
    form = a_form(64, 96, mask=True)
    q, k, v = form.qkv
    k = jnp.where(form.mask[..., None] != 0, k, jnp.nan)
    options = dict(target=target.current(), interpret=INTERPRET)
    out, lse = jax.jit(functools.partial(mma.attention, config=None, **options))(form.replace(qkv=(q, k, v)))
    assert_close(out, exactly(form, widened(form))[0], OP["bfloat16"])
    call = functools.partial(mma_backward.attention_backward, wanted=(True,) * 5, config=None, **options)
    dqkv, *_ = jax.jit(call)(form.replace(qkv=(q, k, v)), [out, lse], [jnp.ones_like(out), None])
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in dqkv)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("bias", [None, ("float32", 1, 2)])
@pytest.mark.parametrize("name", ["A100", "A10", "L4", "H200", "RTX PRO 6000"])
def test_a_config_fits_every_gpu(name, head_dim, bias):
    form, gpu = a_form(64, 64, head_dim=head_dim, bias=bias), target.GPUS[name]
    config = mma.heuristic(form, gpu)
    assert mma.shared_memory(config, head_dim, 4 if bias else 0) <= gpu.shared_memory
    assert config in mma.candidates(form)


@pytest.mark.parametrize("field, value", [("block_q", 32), ("block_kv", 16), ("num_stages", 1)])
def test_configs_that_do_not_exist(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        mma.Config(**A_CONFIG | {field: value})


def chosen(form, gpu, *names):
    """The kernels of a call and of its gradient."""
    op = TRIANGLE if isinstance(form, pair_forms.Form) else ATTENTION
    call = Call(op=op, form=form.abstract(), config=None, names=names, target=gpu)
    kernel, gradient = choice.choose(call), choice.choose_backward(call)
    return kernel and kernel[0].call, gradient and gradient[0].call


HOPPERS = hopper.attention, hopper_backward.attention_backward
TRITONS = triton.attention, triton_backward.attention_backward
BY_MMA = mma.attention, mma_backward.attention_backward


def test_on_hopper_it_serves_what_the_kernels_for_hopper_do_not():
    gpu = target.GPUS["H200"]
    large, small = a_form(1024, 1024), a_form(128, 128, head_dim=16)
    biased = a_form(1024, 1024, bias=("float32", 1, 1))
    assert chosen(large, gpu) == chosen(large, gpu, "mosaic") == HOPPERS
    assert chosen(small, gpu) == TRITONS and chosen(small, gpu, "mosaic") == BY_MMA
    assert chosen(biased, gpu, "mosaic") == (hopper.attention, mma_backward.attention_backward)
    with without_triton():
        assert chosen(large, gpu) == HOPPERS and chosen(small, gpu) == BY_MMA
        assert chosen(biased, gpu) == (hopper.attention, mma_backward.attention_backward)


@pytest.mark.parametrize("form", [a_form(1024, 1024), of_pairs(128, "ending")], ids=["attention", "triangle"])
@pytest.mark.parametrize("name", ["A100", "A10", "L4", "B200", "RTX PRO 6000"])
def test_elsewhere_it_takes_the_place_of_triton(name, form):
    gpu = target.GPUS[name]
    assert chosen(form, gpu) == TRITONS and chosen(form, gpu, "mosaic") == BY_MMA
    with without_triton():
        assert chosen(form, gpu) == BY_MMA


def test_what_it_does_not_serve():
    gpu = target.GPUS["A100"]
    assert mma.unsupported(a_form(64, 64, dtype="float32"), gpu) == "takes float16 and bfloat16, not float32"
    assert "takes heads of 16, 32, 64 and 128, not" in mma.unsupported(a_form(64, 64, head_dim=48), gpu)
    assert mma.unsupported(of_pairs(72, "starting"), gpu) == "takes pairs in multiples of 64, not 72"
    assert "positive scales, not sm_scale=-1.0" in mma.unsupported(a_form(64, 64).replace(sm_scale=-1.0), gpu)
    x = jnp.ones((1, 64, 2, 40), "bfloat16")
    with pytest.raises(NotImplementedError, match=r"takes heads of 16, 32, 64 and 128, not head_dim=40"):
        ops.attention(x, x, x, implementation=MOSAIC)
