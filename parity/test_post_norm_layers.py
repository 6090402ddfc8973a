"""`ops.post_norm_layers` against torch: in one kernel, and in those that it stands for; MiniLM, which calls it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import minilm, ops
from pallas_models.kernels.mosaic.post_norm_layers import unsupported
from pallas_models.ops import _dispatch
from pallas_models.ops.post_norm_layers import _OP
from parity.calls import layer
from parity.common import (
    MOSAIC,
    ON_HOPPER,
    array,
    assert_close,
    assert_gradients_close,
    by_device,
    cuda_device,
    kernel_calls,
    normal,
    traces,
)
from parity.test_lowering import HOPPER, lowered_for_cuda
from parity.tolerances import MODEL

needs_inline = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs JAX 0.11")


def operands(
    batch: int, seq: int, n: int, f: int, count: int, dtype: str = "float32", *, spread: float = 1.0
) -> dict[str, Any]:
    """x, layers and a mask; sizes of x and of weights vary by `spread` between tokens and between layers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, seq, n)) * spread ** rng.integers(-1, 2, (batch, seq, 1))
    layers = [layer(rng, n, f, dtype, spread ** (i % 3 - 1)) for i in range(count)]
    return {"x": array(x, dtype), "layers": layers, "mask": masks(rng, batch, seq)}


def masks(rng: np.random.Generator, batch: int, seq: int) -> jax.Array:
    """Holes in the first sequence, padding at the end of the second, nothing of the third."""
    kinds = [rng.integers(0, 4, seq) > 0, np.arange(seq) < 2 * seq // 3, np.zeros(seq)]
    return array([kinds[i % 3] for i in range(batch)], "int32")


def of_torch(reference, arrays: dict[str, Any], **options: Any) -> np.ndarray:
    return reference.compute(reference.post_norm_layers, **arrays, **options)


def call(arrays: dict[str, Any], **options: Any) -> jax.Array:
    return jax.jit(lambda arrays: ops.post_norm_layers(**arrays, **options))(arrays)


def in_float32(arrays: dict[str, Any], **options: Any) -> jax.Array:
    """What the tests below take for exact, as errors of half precisions go."""
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype.itemsize == 2 else x, arrays)
    return call(wide, implementation="xla", **options)


def test_against_torch(reference, implementation, dtype):
    arrays = operands(3, 7, 32, 48, 2, dtype)
    out = call(arrays, num_heads=2, implementation=implementation)
    assert out.dtype == dtype
    assert_close(out, of_torch(reference, arrays, num_heads=2), MODEL[dtype])


def test_bias_segments_and_options(reference):
    arrays, rng = operands(2, 7, 32, 48, 2), np.random.default_rng(1)
    arrays |= {"bias": normal(rng, 1, 2, 7, 7), "segment_ids": array(np.sort(rng.integers(0, 3, (2, 7))), "int32")}
    options = dict(num_heads=2, activation="relu", epsilon=0.1)
    expected = of_torch(reference, arrays, **options)
    assert_close(call(arrays, implementation="xla", **options), expected, MODEL["float32"])
    traced = jax.jit(lambda e: ops.post_norm_layers(**arrays, **options | {"epsilon": e}))(0.1)
    assert_close(traced, expected, MODEL["float32"])


@needs_inline
@pytest.mark.parametrize(
    "batch, seq, n, count, dtype, spread",
    by_device(
        cpu=[(3, 5, 128, 2, "float16", 1.0)],
        gpu=[
            case
            for dtype in ("float16", "bfloat16")
            for case in [
                (1, 16, 384, 6, dtype, 1.0),
                (2, 8, 384, 6, dtype, 1.0),
                (3, 5, 256, 3, dtype, 1.0),  # fewer tokens, of lengths that divide nothing
                (1, 1, 128, 1, dtype, 1.0),
                (16, 1, 384, 2, dtype, 1.0),
                (1, 16, 384, 12, dtype, 1.0),
                (3, 4, 384, 2, dtype, 16.0),  # of more layers results change with the last bit of the first
            ]
        ],
    ),
)
def test_hopper_kernel(batch, seq, n, count, dtype, spread):
    arrays = operands(batch, seq, n, 4 * n, count, dtype, spread=spread)
    for mask in by_device(cpu=[arrays["mask"]], gpu=[arrays["mask"], None]):
        arrays["mask"] = mask
        out = call(arrays, num_heads=n // 32, implementation=MOSAIC)
        assert out.dtype == dtype
        assert_close(out, in_float32(arrays, num_heads=n // 32), MODEL[dtype])


@pytest.mark.skipif(not ON_HOPPER, reason="one kernel takes the interpreter a while")
def test_hopper_kernel_under_vmap():
    arrays = operands(3, 16, 384, 1536, 6, "float16")
    layers = arrays["layers"]

    def one(x, mask):
        return ops.post_norm_layers(x[None], layers, num_heads=12, mask=mask[None], implementation=MOSAIC)[0]

    out = jax.jit(jax.vmap(one))(arrays["x"], arrays["mask"])
    assert_close(out, in_float32(arrays, num_heads=12), MODEL["float16"])


def test_gradients_are_those_of_the_operations_that_it_stands_for():
    """Where the kernel is chosen; on another machine XLA stands in for it."""
    arrays = operands(2, 7, 128, 512, 2, "float16")
    x, mask, layers = arrays["x"], arrays["mask"], arrays["layers"]
    floats, cotangent = (x, layers[1]["w_up"]), normal(np.random.default_rng(1), 2, 7, 128, dtype="float16")

    def f(x, w_up, implementation=None):
        changed = [layers[0], layers[1] | {"w_up": w_up}]
        return ops.post_norm_layers(x, changed, num_heads=4, mask=mask, implementation=implementation)

    expected = jax.jit(lambda *floats: jax.vjp(lambda *a: f(*a, "xla"), *floats)[1](cotangent))(*floats)
    with cuda_device(*HOPPER):
        backward = jax.grad(lambda *floats: jnp.sum(f(*floats).astype("float32")), (0, 1))
        assert traces("post_norm_layers", f, *floats) == (jax.__version_info__ >= (0, 11))
        assert not traces("post_norm_layers", backward, *floats)
        assert_gradients_close(f, floats, cotangent, expected, MODEL["float16"])


@needs_inline
def test_a_short_sentence_is_three_kernels():
    config = minilm.MiniLMConfig(num_layers=2)

    def kernels(seq, implementation=None, dtype="float16"):
        params = jax.eval_shape(lambda: minilm.init(jax.random.key(0), config, dtype=dtype))

        def embed(params, ids, mask):
            return minilm.embed(params, ids, mask, config=config, implementation=implementation)

        tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
        return kernel_calls(lowered_for_cuda(embed, params, tokens, tokens))

    with cuda_device(*HOPPER):
        assert kernels(16) == 3
        assert min(kernels(17), kernels(16, "triton"), kernels(16, dtype="float32")) > 12


def test_sequences_are_split_over_devices():
    arrays = operands(2, 8, 128, 512, 2)
    operand = arrays["x"], arrays["mask"], tuple(arrays["layers"])
    static = dict(num_heads=4, activation="gelu", epsilon=1e-12, precision=None)
    layout, _ = _dispatch._layout(_OP, operand, static)
    split = [axes for axes in layout.operands if any(axes)]
    assert split == [("b", None, None), ("b", None)] and layout.results == (("b", None, None),)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq": 9}, "takes up to 16 tokens, not 2 x 9"),
        ({"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
        ({"num_heads": 2}, "takes heads of 32, each for one of up to 12 CTAs, in multiples of 4, not 2 of 64"),
        ({"n": 192}, "not 6 of 32"),
        ({"n": 512}, "not 16 of 32"),
        ({"f": 384}, "takes 512 hidden values, four for each of 128 columns, not 384"),
        ({"count": 13}, "takes up to 12 layers, not 13"),
        ({"vectors": "float16"}, "takes float32 vectors, not bias_qkv of float16"),
    ],
)
@needs_inline
def test_what_the_hopper_kernel_does_not_serve(change, message):
    change = dict(batch=2, seq=8, n=128, count=1, dtype="float16") | change
    num_heads, vectors = change.pop("num_heads", change["n"] // 32), change.pop("vectors", None)
    arrays = operands(**{"f": 4 * change["n"]} | change)
    if vectors:
        arrays["layers"][0]["bias_qkv"] = arrays["layers"][0]["bias_qkv"].astype(vectors)
    assert message in unsupported(arrays["x"], arrays["mask"], arrays["layers"], num_heads=num_heads)
