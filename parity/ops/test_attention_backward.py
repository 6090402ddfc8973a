"""The gradients of attention in kernels against torch in float64: options, tiles, dtypes, edges, memory."""

import functools
import itertools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models import target as targets
from pallas_models.kernels.common.scores import NO_KEY
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common import attention_walk
from pallas_models.kernels.triton import attention_backward as triton
from pallas_models.kernels.triton.attention import Config as Forward
from pallas_models.tuning import Chooser, Problem
from parity.dispatch.test_target import DEVICES, Recorder
from parity.ops.test_attention import CASES, edges, operands
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    array,
    assert_close,
    assert_equal,
    cuda_device,
    float64,
    gpu,
    kernel_calls,
    normal,
    random_mask,
    relative_error,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, OP


class Tiles(Chooser):
    """Tiles for all kernels: the forward pass has small ones, the others those given."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def choose(self, problem: Problem[Any]) -> Any:
        if problem.config is Forward:
            return Forward(block_q=16, block_kv=16, num_warps=1, num_stages=1)
        return self.config if isinstance(self.config, problem.config) else None


def tiles(block_q: int = 16, block_kv: int = 16, num_warps: int = 1, num_stages: int = 1) -> Tiles:
    return Tiles(triton.Config(block_q=block_q, block_kv=block_kv, num_warps=num_warps, num_stages=num_stages))


def pulling(*, implementation=KERNEL, config=None, **options):
    """A program of q, k, v and, if there is one, the bias, and of the gradients of output and log-sum-exp."""

    def f(*arrays):
        q, k, v, *rest = arrays
        bias = rest[0] if rest else None
        settings = dict(config=config, implementation=implementation, return_lse=True)
        return ops.attention(q, k, v, bias=bias, **settings, **options)

    return jax.jit(lambda operands, cotangents: jax.vjp(f, *operands)[1](cotangents))


def pulled(arrays, bias, cotangents, **options):
    """The gradients of the arrays and, if there is one, the bias."""
    return pulling(**options)(arrays if bias is None else (*arrays, bias), cotangents)


def expected_of(reference, arrays, bias, cotangents, **options):
    """The same in float64; queries without a key have no part."""
    options = {n: reference.tensor(x) if isinstance(x, jax.Array) else x for n, x in options.items()}
    arrays = arrays if bias is None else (*arrays, bias)
    dout, dlse = cotangents
    gradients = reference.gradients(functools.partial(reference.attention, **options), arrays, dout)
    others = [x for i, x in enumerate(arrays) if i != 2]
    of_lse = reference.gradients(functools.partial(reference.attention_lse, **options), others, dlse)
    of_lse.insert(2, np.zeros_like(gradients[2]))
    return [a + np.nan_to_num(b) for a, b in zip(gradients, of_lse, strict=True)]


def cotangents_of(reference, arrays, bias, **options):
    """Random gradients of the output and of the log-sum-exp, 0 where that is -inf."""
    q, k, _ = arrays
    rng = np.random.default_rng(50)
    lse = reference.compute(reference.attention_lse, q, k, bias, **options)
    dlse = np.where(np.isneginf(lse), 0.0, rng.normal(size=lse.shape))
    return normal(rng, *q.shape, dtype=str(q.dtype)), jnp.asarray(dlse, jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_every_option_against_torch(reference, name):
    arrays, bias, options = operands(CASES[name])
    cotangents = cotangents_of(reference, arrays, bias, **options)
    expected = expected_of(reference, arrays, bias, cotangents, **options)
    gradients = pulled(arrays, bias, cotangents, config=tiles(), **options)
    for gradient, wanted in zip(gradients, expected, strict=True):
        if np.any(wanted):
            assert_close(gradient, wanted, GRADIENT)
        assert np.all(float64(gradient)[wanted == 0.0] == 0.0)  # of queries without keys, keys without queries


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "block_q, block_kv, num_warps, num_stages", [(16, 64, 2, 2), (64, 16, 4, 1), (32, 32, 1, 3)]
)
@pytest.mark.parametrize("name", ["causal", "window"])
def test_tiles_of_any_size(reference, name, block_q, block_kv, num_warps, num_stages):
    arrays, bias, options = operands(CASES[name])
    cotangents = cotangents_of(reference, arrays, bias, **options)
    config = tiles(block_q, block_kv, num_warps, num_stages)
    gradients = pulled(arrays, bias, cotangents, config=config, **options)
    for gradient, wanted in zip(
        gradients, expected_of(reference, arrays, bias, cotangents, **options), strict=True
    ):
        assert_close(gradient, wanted, GRADIENT)


@pytest.mark.parametrize("window", [2, 18, 31])
def test_windows_that_end_at_the_edge_of_a_block(reference, window):
    arrays, _, _ = operands((128, 128, 1, 1, 16, {}))
    options = dict(causal=True, window=window)
    cotangents = cotangents_of(reference, arrays, None, **options)
    gradients = pulled(arrays, None, cotangents, config=tiles(), **options)
    for gradient, wanted in zip(
        gradients, expected_of(reference, arrays, None, cotangents, **options), strict=True
    ):
        assert_close(gradient, wanted, GRADIENT)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["grouped heads", "bias"])
def test_every_dtype_with_the_tiles_chosen_for_it(reference, dtype, tolerance, name):
    arrays, bias, options = operands(CASES[name], dtype)
    cotangents = cotangents_of(reference, arrays, bias, **options)
    gradients = pulled(arrays, bias, cotangents, **options)
    for gradient, wanted in zip(
        gradients, expected_of(reference, arrays, bias, cotangents, **options), strict=True
    ):
        assert gradient.dtype == dtype
        assert np.all(np.isfinite(float64(gradient)))
        # As a whole: where a weight is near 1, its score's gradient is a small difference of what was rounded.
        assert relative_error(gradient, wanted) <= tolerance


def test_the_fused_buffer_gets_its_gradients_in_place():
    qkv = normal(np.random.default_rng(51), 2, 37, (4 + 2 * 2) * 16)
    cotangent = normal(np.random.default_rng(52), 2, 37, 4 * 16)
    options = dict(causal=True, config=tiles(), implementation=KERNEL)

    @jax.jit
    def fused(qkv):
        f = functools.partial(ops.attention_qkv, num_heads=4, num_kv_heads=2, **options)
        return jax.vjp(f, qkv)[1](cotangent)[0]

    parts = jnp.split(qkv.reshape(2, 37, 8, 16), [4, 6], axis=2)
    cotangents = cotangent.reshape(2, 37, 4, 16), jnp.zeros((2, 4, 37))
    apart = pulled(parts, None, cotangents, config=tiles(), causal=True)
    out, expected = fused(qkv).reshape(2, 37, 8, 16), jnp.concatenate(apart, axis=2)
    if ON_GPU:  # where XLA sums delta in another order
        assert_close(out, expected, GRADIENT)
    else:
        assert_equal(out, expected)


# Queries and keys none of which see each other, by blocks of 16.
APART = {
    "causal": (slice(0, 16), slice(16, 300), {"causal": True}),
    "window": (slice(64, 300), slice(0, 32), {"causal": True, "window": 20}),
    "mask": (slice(0, 300), slice(160, 300), {"mask": jnp.arange(300)[None] < 150}),
    "segments": (slice(0, 96), slice(112, 300), {"segment_ids": jnp.arange(300)[None] // 100}),
    "causal segments": (
        slice(208, 300),
        slice(0, 192),
        {"segment_ids": jnp.arange(300)[None] // 100, "causal": True},
    ),
}


@pytest.mark.parametrize("name", APART)
def test_blocks_without_a_valid_pair_are_not_read(name):
    queries, keys, options = APART[name]
    rng = np.random.default_rng(53)
    q, k, v, dout = (normal(rng, 1, 300, 1, 16) for _ in range(4))
    cotangents, pull = (dout, jnp.zeros((1, 1, 300))), pulling(config=tiles(), **options)
    dq, dk, dv = pull((q, k, v), cotangents)
    poisoned = (x.at[:, keys].set(jnp.nan) for x in (k, v))
    assert_equal(pull((q, *poisoned), cotangents)[0][:, queries], dq[:, queries])
    poisoned = (q.at[:, queries].set(jnp.nan), k, v)
    for gradient, expected in zip(pull(poisoned, cotangents)[1:], (dk, dv), strict=True):
        assert_equal(gradient[:, keys], expected[:, keys])


def test_the_same_bits_every_time():
    arrays, bias, options = operands(CASES["bias"], "bfloat16")
    cotangents = normal(np.random.default_rng(54), *arrays[0].shape, dtype="bfloat16"), jnp.zeros((2, 4, 37))
    pull = pulling(**options)
    first = pull((*arrays, bias), cotangents)
    for _ in range(10 if ON_GPU else 2):
        for a, b in zip(pull((*arrays, bias), cotangents), first, strict=True):
            assert_equal(a, b)


def shaped(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient_of(heads: int, kv_heads: int, **options: Any) -> Any:
    def loss(qkv: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        out = ops.attention_qkv(qkv, num_heads=heads, num_kv_heads=kv_heads, bias=bias, **options)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss) if "bias" not in options else jax.grad(loss, (0, 1))


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", [HOPPER, ("NVIDIA GeForce RTX 4090", 128)], ids=["hopper", "ada"])
@pytest.mark.parametrize(
    "on_hopper, dtype, batch, seq, heads, kv_heads, head_dim, options",
    [
        ("mosaic", "bfloat16", 8, 1024, 12, 12, 64, {"causal": True}),
        ("mosaic", "bfloat16", 2, 3008, 32, 8, 128, {"causal": True, "window": 1000}),
        ("triton", "bfloat16", 2, 1024, 4, 4, 64, {"mask": array(np.ones((2, 1024), bool))}),
        ("triton", "float16", 1, 3001, 4, 4, 80, {"mask": array(np.ones((1, 3001), bool))}),
        ("triton", "float32", 2, 300, 4, 1, 256, {"segment_ids": array(np.ones((2, 300)), "int32")}),
    ],
)
def test_kernels_alone_and_no_array_of_all_pairs(
    device, on_hopper, dtype, batch, seq, heads, kv_heads, head_dim, options
):
    qkv = shaped(dtype, batch, seq, (heads + 2 * kv_heads) * head_dim)
    with cuda_device(*device):
        text = lowered_for_cuda(gradient_of(heads, kv_heads, **options), qkv)
    in_mosaic = on_hopper == "mosaic" and device == HOPPER
    # Forward, and gradients; Triton has a kernel for queries and one for keys and values.
    assert kernel_calls(text) == (2 if in_mosaic else 3)
    assert text.count(f"@{MOSAIC_CALL}") == (2 if in_mosaic else 0)
    assert "stablehlo.dot_general" not in text
    assert not [shape for shape in re.findall(r"tensor<([\dx]+)x", text) if shape.split("x").count(str(seq)) > 1]


@pytest.mark.parametrize("names, kernels", [([], 3), (["attention"], 2)])
def test_a_policy_that_keeps_attention_runs_its_kernel_once(names, kernels):
    def layer(qkv):
        return ops.attention_qkv(qkv, num_heads=4, causal=True)

    def loss(qkv):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return jnp.sum(jax.checkpoint(layer, policy=policy)(qkv).astype(jnp.float32) ** 2)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(jax.grad(loss), shaped("bfloat16", 1, 1024, 3 * 4 * 64))
    assert kernel_calls(text) == kernels


@without_gpu
@pytest.mark.parametrize(
    "seq, heads, head_dim, options",
    [
        (1000, 8, 64, {}),  # a last block to mask; causal ones and windows are above
        (1024, 8, 128, {}),  # or none
        (64, 12, 32, {"mask": array(np.ones((2, 64), bool))}),
        (
            1024,
            8,
            128,
            {"mask": array(np.ones((2, 1024), bool)), "segment_ids": array(np.zeros((2, 1024)), "int32")},
        ),
    ],
)
def test_hopper_kernel_lowers(seq, heads, head_dim, options):
    qkv = shaped("bfloat16", 2, seq, 3 * heads * head_dim)
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(gradient_of(heads, heads, implementation="mosaic", **options), qkv)
    assert text.count(f"@{MOSAIC_CALL}") == kernel_calls(text) == 2
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device[0].replace(" ", "-"))
def test_tiles_fit_into_shared_memory(device):
    with cuda_device(*device):
        gpu = targets.current()
    for dtype, head_dim, keys_first in itertools.product(
        ("bfloat16", "float32"), (32, 64, 128, 256), (True, False)
    ):
        config = triton.heuristic(2048, 2048, head_dim, gpu, keys_first=keys_first, dtype=dtype)
        itemsize = jnp.dtype(dtype).itemsize
        size = triton.shared_memory(config, keys_first=keys_first, head_dim=head_dim, itemsize=itemsize)
        assert 0 < size <= DEVICES[device][1] * 1024, config


def test_the_gradient_of_a_bias_fits_into_shared_memory():
    """Its loop reads all of its tiles in each stage; the loop of the queries' gradient holds two of them."""

    def loss(qkv: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(ops.attention_qkv(qkv, num_heads=4, num_kv_heads=2, bias=bias, implementation="triton"))

    arrays = shaped("float16", 1, 192, 8 * 80), shaped("float16", 1, 1, 192, 192)
    with cuda_device(*HOPPER):
        gpu = targets.current()
        text = lowered_for_cuda(jax.grad(loss, (0, 1)), *arrays)
    config = triton.heuristic(192, 192, 80, gpu, keys_first=False, dtype="float16")
    (stages,) = re.findall(r'name = "bias_kernel", num_stages = (\d+)', text)
    fitting = triton.Config(
        block_q=config.block_q, block_kv=config.block_kv, num_warps=config.num_warps, num_stages=int(stages)
    )
    sizes = [triton.bias_shared_memory(c, head_dim=80, itemsize=2) for c in (fitting, config)]
    assert sizes[0] <= gpu.shared_memory < sizes[1]


def test_tuning_knows_the_shared_memory_of_both_kernels():
    recorder = Recorder()
    with cuda_device(*HOPPER):
        gradient = gradient_of(4, 4, config=recorder, causal=True, implementation="triton")
        jax.eval_shape(gradient, shaped("bfloat16", 1, 2048, 12 * 64))
    found = [problem for problem in recorder.problems if problem.config is triton.Config]
    sizes = [problem.shared_memory(problem.heuristic()) for problem in found if problem.shared_memory]
    expected = [
        triton.shared_memory(problem.heuristic(), keys_first=keys_first, head_dim=64, itemsize=2)
        for problem, keys_first in zip(found, (True, False), strict=True)
    ]
    assert sizes == expected


@pytest.mark.parametrize("value", [0, -16, 48])
@pytest.mark.parametrize("field", ["block_q", "block_kv", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        tiles(**{field: value})


# The reference, which takes many queries a block at a time.

attention = sys.modules["pallas_models.ops.attention"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["window", "grouped heads", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_by_blocks_is_the_reference_as_a_whole(monkeypatch, name, dtype):
    (q, k, v), bias, options = operands(CASES[name], dtype)
    (_, seq, num_heads, head_dim), num_kv_heads = q.shape, k.shape[2]
    mask, ids = options.pop("mask", None), [options.pop(n, None) for n in ("segment_ids", "kv_segment_ids")]
    masks = dict(mask=mask, segment_ids=ids[0], kv_segment_ids=ids[1])
    heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    options = dict(sm_scale=head_dim**-0.5, precision=jax.lax.Precision.HIGHEST, return_lse=True) | options
    rng = np.random.default_rng(57)
    cotangent = normal(rng, 2, seq, num_heads * head_dim, dtype=dtype), normal(rng, 2, num_heads, seq)
    qkv = tuple(x.reshape(*x.shape[:2], -1) for x in (q, k, v))

    def everything(qkv, bias):
        """Results, gradients and, along these, derivatives in forward mode."""

        def f(qkv, bias):
            return attention.reference(Form(qkv=qkv, bias=bias, **masks, **heads, **options))

        (out, lse), pull = jax.vjp(f, qkv, bias)
        dout, dlse = cotangent
        gradients = pull((dout, jnp.where(lse == NO_KEY, 0.0, dlse)))
        tangents = jax.jvp(f, (qkv, bias), gradients)[1]
        return out, jnp.where(lse == NO_KEY, 0.0, lse), gradients, tangents

    whole = jax.jit(everything)(qkv, bias)
    monkeypatch.setattr(attention, "_MOST_QUERIES", 32)
    by_blocks = jax.jit(lambda *operands: everything(*operands))(qkv, bias)
    for a, b in zip(jax.tree.leaves(by_blocks), jax.tree.leaves(whole), strict=True):
        assert relative_error(a, b) <= (GRADIENT if dtype == "float32" else OP[dtype])


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_reference_holds_no_array_of_all_pairs(mode):
    def f(qkv):
        out = ops.attention_qkv(qkv, num_heads=2, implementation="xla", causal=True)
        return jnp.sum(out.astype(jnp.float32))

    compiled = jax.jit(f if mode == "forward" else jax.grad(f)).lower(shaped("bfloat16", 1, 4096, 3 * 2 * 32))
    shapes = re.findall(r"tensor<([\dx]+)x", compiled.as_text())
    assert shapes and not [shape for shape in shapes if shape.split("x").count("4096") > 1]


# The kernel for Hopper GPUs: tiles of 128 against blocks of 128, or for the keys of heads of 128 of 64.

HOPPER_CASES = {
    "heads of 128, more queries than keys": (256, 128, 1, 1, 128, {"causal": True}),
    "grouped heads": (128, 256, 2, 1, 64, {"causal": True, "sm_scale": 0.3}),
    "window": (128, 384, 1, 1, 64, {"causal": True, "window": 150}),
    "window of full blocks": (384, 384, 1, 1, 64, {"causal": True, "window": 300}),
    "all masks, searched": (256, 256, 1, 1, 64, {"causal": True, "mask": True, "segments": True}),
    "window to both sides, masks": (256, 128, 1, 1, 64, {"window": 90, "mask": True, "segments": True}),
    "ragged": (203, 331, 2, 1, 64, {"causal": True, "mask": True, "segments": True}),
    "ragged, heads of 128": (70, 150, 1, 1, 128, {}),
    "window of one key": (130, 140, 1, 1, 128, {"causal": True, "window": 1}),
    "few": (5, 9, 2, 1, 64, {"causal": True}),
    "heads of 32": (256, 128, 2, 1, 32, {}),
    "heads of 32, few": (16, 16, 2, 2, 32, {"mask": True}),
    "heads of 32, ragged": (150, 203, 2, 1, 32, {"causal": True, "mask": True, "segments": True}),
}
on_hopper = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[edges] * (c[0] % 128 + c[1] % 128 > 0)) for n, c in HOPPER_CASES.items()],
)


@pytest.fixture
def few_ctas(monkeypatch):
    """Has a CTA walk over all tiles where they are few, as in the interpreter."""
    if MOSAIC != "mosaic":
        monkeypatch.setattr(targets, "_local", lambda: gpu(1))


@on_hopper
def test_hopper_kernel(reference, monkeypatch, few_ctas, name):
    if "searched" in name:
        monkeypatch.setattr(attention_walk, "SEARCHED", 1)
    arrays, _, options = operands(HOPPER_CASES[name], "bfloat16")
    cotangents = cotangents_of(reference, arrays, None, **options)
    gradients = pulled(arrays, None, cotangents, implementation=MOSAIC, **options)
    expected = expected_of(reference, arrays, None, cotangents, **options)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert np.all(float64(gradient)[wanted == 0.0] == 0.0)
        if np.any(wanted):
            assert_close(gradient, wanted, OP["bfloat16"])


@finds_races
@pytest.mark.parametrize("name", ["grouped heads", "ragged, heads of 128"])
def test_hopper_kernel_has_no_races(few_ctas, name):
    arrays, _, options = operands(HOPPER_CASES[name], "bfloat16")
    batch, seq, num_heads, _ = arrays[0].shape
    cotangents = jnp.ones_like(arrays[0]), jnp.ones((batch, num_heads, seq))
    with no_races():
        pulled(arrays, None, cotangents, implementation=MOSAIC, **options)


@pytest.mark.parametrize("seq", [128, pytest.param(70, marks=edges)])
def test_hopper_kernel_reads_the_fused_buffer_in_place(few_ctas, seq):
    # With a mask keys are copied, lest NaN of a masked one reaches the gradients of queries.
    mask = random_mask(np.random.default_rng(58), 1, seq)
    qkv = normal(np.random.default_rng(55), 1, seq, (2 + 2 * 1) * 64, dtype="bfloat16")
    cotangent = normal(np.random.default_rng(56), 1, seq, 2 * 64, dtype="bfloat16")

    @jax.jit
    def fused(qkv):
        f = functools.partial(ops.attention_qkv, num_heads=2, num_kv_heads=1, mask=mask, implementation=MOSAIC)
        return jax.vjp(f, qkv)[1](cotangent)[0]

    parts = jnp.split(qkv.reshape(1, seq, 4, 64), [2, 3], axis=2)
    cotangents = cotangent.reshape(1, seq, 2, 64), jnp.zeros((1, 2, seq))
    apart = pulled(parts, None, cotangents, implementation=MOSAIC, mask=mask)
    poisoned = jnp.where((mask == 0)[..., None] & (jnp.arange(4 * 64) // 64 == 2), jnp.nan, qkv)
    assert_equal(fused(poisoned).reshape(1, seq, 4, 64), jnp.concatenate(apart, axis=2))
