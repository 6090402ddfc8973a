"""`post_norm_mlp` and `attention_post_norm_mlp` against torch: in one kernel, and in those that they stand for."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from pallas_models import ops
from pallas_models import target as targets
from pallas_models.kernels.forms import attention_matmul_layer_norm, post_norm_mlp
from pallas_models.kernels.mosaic.post_norm_mlp import unsupported
from pallas_models.kernels.triton import attention_matmul_layer_norm as few_tokens
from parity.cases.post_norm_mlp import NAMES as POST_NORM_MLP
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.ops.test_matmul import edges
from parity.support.common import (
    KERNEL,
    MOSAIC,
    assert_close,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    kernel_calls,
    normal,
    traces,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, LONG, MODEL, OP

OLD_JAX = jax.__version_info__ < (0, 11)  # which has attention in a kernel of its own
ARRAYS = ("y", "x", "w_out", "w_up", "w_down")
VECTORS = ("bias_out", "scale_out", "offset_out", "bias_up", "bias_down", "scale", "offset")


def operands(m: int, n: int, f: int, dtype: str = "float32", *, k: int | None = None) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"y": (m, k or n), "x": (m, n), "w_out": (k or n, n), "w_up": (n, f), "w_down": (f, n)}
    arrays = {
        name: normal(rng, *shape, dtype=dtype, scale=shape[0] ** -0.5 if name[0] == "w" else 1.0)
        for name, shape in shapes.items()
    }
    vectors = {
        name: normal(rng, f if name == "bias_up" else n, shift=float("scale" in name), scale=0.3)
        for name in VECTORS
    }
    return arrays | vectors


def call(arrays: dict[str, jax.Array], **options) -> jax.Array:
    return compiled.post_norm_mlp(**arrays, **options)


def of_torch(reference, arrays: dict[str, jax.Array], **options) -> np.ndarray:
    others = {name: value for name, value in arrays.items() if name not in ARRAYS}
    return reference.compute(reference.post_norm_mlp, *(arrays[name] for name in ARRAYS), **others, **options)


def test_against_torch(reference, implementation, dtype, tolerance):
    arrays = operands(11, 24, 50, dtype, k=40)
    out = call(arrays, implementation=implementation)
    assert out.dtype == dtype
    assert_close(out, of_torch(reference, arrays), tolerance)


def test_without_biases_and_with_leading_axes(reference, implementation):
    arrays = operands(12, 24, 50)
    for name in ("bias_out", "bias_up", "bias_down"):
        del arrays[name]
    options = dict(activation="relu", epsilon=0.1)
    expected = of_torch(reference, arrays, **options)
    arrays |= {name: arrays[name].reshape(3, 4, -1) for name in ("y", "x")}
    out = call(arrays, implementation=implementation, **options)
    assert out.shape == (3, 4, 24)
    assert_close(out.reshape(12, 24), expected, LONG)


# The interpreter runs two CTAs.
@pytest.mark.parametrize(
    "m, n, f, dtype",
    [
        (256, 128, 256, "float16"),  # several tiles for a CTA
        (64, 128, 256, "bfloat16"),
        (64, 128, 384, "float16"),  # several rounds
        pytest.param(72, 128, 128, "float16", marks=edges),  # ragged
        *by_device(cpu=[], gpu=[(8192, 384, 1536, "float16"), (24568, 384, 1536, "bfloat16")]),
    ],
)
def test_hopper_kernel(reference, m, n, f, dtype):
    arrays = operands(m, n, f, dtype)
    out = call(arrays, implementation=MOSAIC)
    assert out.dtype == dtype
    assert_close(out, of_torch(reference, arrays), OP[dtype])


def test_a_traced_epsilon_has_gradients_and_no_kernel():
    arrays = operands(64 * 132, 128, 128, "float16")

    def loss(epsilon):
        return jnp.sum(ops.post_norm_mlp(**arrays, epsilon=epsilon).astype("float32") ** 2)

    with cuda_device(*HOPPER):
        assert traces("post_norm_mlp", lambda: loss(0.1))
        assert not traces("post_norm_mlp", loss, jnp.float32(0.1))
        (gradient,) = jax.make_jaxpr(jax.grad(loss))(0.1).jaxpr.outvars
    assert isinstance(gradient, Var)


def call_attending(arrays: dict[str, Any], **options) -> jax.Array:
    f = functools.partial(ops.attention_post_norm_mlp, num_heads=arrays["x"].shape[-1] // 32, **options)
    return jax.jit(f)(**arrays)


def attending(batch: int, seq: int, n: int, dtype: str, *tokens: str) -> tuple[dict[str, Any], np.ndarray]:
    """Operands, some that say which tokens are seen, and which tokens have a result."""
    arrays: dict[str, Any] = operands(batch * seq, n, n, dtype)
    del arrays["y"]
    arrays["qkv"] = normal(np.random.default_rng(5), batch, seq, 3 * n, dtype=dtype)
    arrays["x"] = arrays["x"].reshape(batch, seq, n)
    valid = np.arange(seq) < np.linspace(seq, seq // 3, batch)[:, None]
    masks = {
        "mask": valid,
        "segment_ids": np.arange(seq) // 7 + np.arange(batch)[:, None],
        "bias": np.random.default_rng(6).normal(size=(1, n // 32, seq, seq)).astype("float32"),
    }
    arrays |= {name: jnp.asarray(masks[name]) for name in tokens}
    return arrays, valid if "mask" in tokens else np.ones_like(valid)


@pytest.mark.skipif(OLD_JAX, reason="the kernel needs JAX 0.11")
@pytest.mark.parametrize(
    "batch, seq, n, tokens",
    [(2, 128, 384, ()), (2, 128, 384, ("mask",)), (5, 64, 256, ("mask",)), (2, 64, 256, ("segment_ids",))],
)
def test_attention_in_the_kernel(batch, seq, n, tokens):
    arrays, valid = attending(batch, seq, n, "float16", *tokens)
    out, expected = (call_attending(arrays, implementation=name) for name in (MOSAIC, "xla"))
    assert_close(out[valid], expected[valid], OP["float16"])


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "batch, seq, n, tokens",
    [(1, 128, 384, ()), (3, 40, 96, ("mask",)), (2, 19, 160, ("segment_ids",)), (7, 16, 64, ("mask",))],
)
def test_attention_with_the_projection(dtype, tolerance, batch, seq, n, tokens):
    arrays, valid = attending(batch, seq, n, dtype, *tokens)

    def f(arrays):
        return ops.attention_post_norm_mlp(**arrays, num_heads=n // 32, implementation=KERNEL)

    assert traces("attention_matmul", f, arrays)
    out, expected = jax.jit(f)(arrays), call_attending(arrays, implementation="xla")
    assert_close(out[valid], expected[valid], tolerance)


def test_gradients_of_attention_with_the_projection():
    arrays, valid = attending(2, 12, 64, "float32", "mask")
    cotangent = jnp.where(valid[..., None], normal(np.random.default_rng(1), 2, 12, 64), 0.0)

    def gradients(implementation):
        def f(some):
            return call_attending(arrays | some, implementation=implementation)

        return jax.vjp(f, {name: arrays[name] for name in ("qkv", "x", "w_out", "scale_out")})[1](cotangent)[0]

    mine, expected = gradients(KERNEL), gradients("xla")
    for name in mine:
        assert_close(mine[name], expected[name], GRADIENT)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"batch": 9},
            "up to 128 rows, heads of 32 and up to 512 columns in multiples of 32, not 144, 2 heads of 64",
        ),
        ({"k": 128}, "2 heads of 128 columns and 64"),
        ({"n": 544}, "columns and 544"),
        ({"masks": ("mask", "segment_ids")}, "takes a mask or segment ids, not both"),
        ({"n": 48}, "columns and 48"),
    ],
)
def test_what_attention_with_the_projection_does_not_serve(change, message):
    size = dict(batch=8, seq=16, k=64, n=64) | change
    tokens = size["batch"], size["seq"]
    vector = jax.ShapeDtypeStruct((size["n"],), "float32")
    masks = {name: jax.ShapeDtypeStruct(tokens, "int32") for name in size.get("masks", ())}
    form = attention_matmul_layer_norm.Form(
        qkv=jax.ShapeDtypeStruct((*tokens, 3 * size["k"]), "float16"),
        residual=jax.ShapeDtypeStruct((*tokens, size["n"]), "float16"),
        w=jax.ShapeDtypeStruct((size["k"], size["n"]), "float16"),
        **{"bias": None, "scale": vector, "offset": vector},
        **{"mask": None, "segment_ids": None} | masks,
        **{"num_heads": 2, "epsilon": 0.1, "precision": jax.lax.Precision.HIGHEST},
    )
    assert message in few_tokens.unsupported(form, targets.ANY)


@pytest.mark.parametrize("tokens", [("mask",), ("segment_ids",), ("bias",), ("mask", "segment_ids", "bias")])
def test_after_attention(reference, implementation, tokens):
    arrays, valid = attending(3, 20, 64, "float32", *tokens)
    out = call_attending(arrays, implementation=implementation)
    masks = {name: arrays.pop(name) for name in tokens}
    y = compiled.attention_qkv(arrays.pop("qkv"), implementation="xla", num_heads=2, **masks)
    assert_close(out[valid], of_torch(reference, arrays | {"y": y})[valid], LONG)


def test_a_bool_mask_where_dtypes_are_not_promoted():
    arrays, _ = attending(2, 20, 64, "float32", "mask")
    assert arrays["mask"].dtype == bool
    with jax.numpy_dtype_promotion("strict"):
        call_attending(arrays, implementation="xla")


@finds_races
def test_hopper_kernel_has_no_races():
    arrays = operands(192, 128, 256, "float16")
    with no_races():
        out = ops.post_norm_mlp(**arrays, implementation=MOSAIC)
    assert_close(out, call(arrays, implementation="xla"), OP["float16"])


@pytest.mark.parametrize(
    "rows, y, kernels",
    [
        ((8192,), 384, 1),
        ((1024,), 384, 3),
        ((128,), 384, 5),
        ((5632,), 384, 3),
        ((64, 128), 1152, 1 + OLD_JAX),
        ((128, 64), 1152, 1 + OLD_JAX),
        ((16, 512), 1152, 2),
        ((1, 128), 1152, 5),
        ((1, 136), 1152, 6),
    ],
)
def test_one_kernel_where_rows_fill_the_multiprocessors(rows, y, kernels):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands(8, 384, 1536, "float16"))
    del shapes["y"]
    shapes["x"] = jax.ShapeDtypeStruct((*rows, 384), "float16")
    given = jax.ShapeDtypeStruct((*rows, y), "float16")

    def f(arrays, y, mask):
        if y.shape[-1] == 384:
            return ops.post_norm_mlp(y, **arrays)
        return ops.attention_post_norm_mlp(y, **arrays, num_heads=12, mask=mask)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(f, shapes, given, jax.ShapeDtypeStruct(rows, bool))
    assert kernel_calls(text) == kernels


def test_gradients(reference):
    arrays = operands(9, 24, 50)
    x, others = arrays.pop("x"), arrays
    cotangent = normal(np.random.default_rng(1), 9, 24)

    def f(x):
        return ops.post_norm_mlp(x=x, **others, implementation="xla")

    def expected(x):
        return reference.post_norm_mlp(x=x, **{name: reference.tensor(value) for name, value in others.items()})

    assert_gradients_close(f, (x,), cotangent, reference.gradients(expected, (x,), cotangent), GRADIENT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_far_from_zero(reference, dtype):
    arrays = operands(9, 24, 50, dtype)
    arrays["x"] = normal(np.random.default_rng(2), 9, 24, dtype=dtype, shift=1000.0)
    cotangent = normal(np.random.default_rng(1), 9, 24, dtype=dtype)

    def f(*values):
        return ops.post_norm_mlp(**dict(zip(arrays, values, strict=True)), implementation=KERNEL)

    def torch_function(*values):
        return reference.post_norm_mlp(**dict(zip(arrays, values, strict=True)))

    values = list(arrays.values())
    expected = reference.gradients(torch_function, values, cotangent)
    assert_gradients_close(f, values, cotangent, expected, MODEL[dtype])


def test_gradients_of_the_hopper_kernel():
    arrays = operands(64, 128, 128, "bfloat16")
    names = "y", "bias_up"

    def gradients(implementation):
        def loss(*some):
            out = ops.post_norm_mlp(**arrays | dict(zip(names, some, strict=True)), implementation=implementation)
            return jnp.sum(jnp.square(out.astype("float32")))

        return jax.grad(loss, (0, 1))(*(arrays[name] for name in names))

    for mine, expected in zip(gradients(MOSAIC), gradients("xla"), strict=True):
        assert_close(mine, expected, MODEL["bfloat16"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
        ({"n": 512, "f": 512}, "in multiples of 128 up to 384, and of those a multiple of hidden values"),
        ({"f": 192}, "not 128, 128 and 192"),
        ({"k": 256}, "not 256, 128 and 256"),
        ({"m": 12}, "in multiples of 64, not x of shape (12, 128)"),
        ({"f": 65536}, "does not fit 65536 hidden values beside 128 columns"),
        ({"without": "bias_up"}, "takes all biases"),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(change, message):
    change = dict(change)
    without = change.pop("without", None)
    a = operands(**dict(m=64, n=128, f=256, dtype="float16") | change) | {without: None}
    weights = post_norm_mlp.Weights(*(a[name] for name in POST_NORM_MLP[2:]))
    options = {"activation": "gelu", "epsilon": 0.1, "precision": jax.lax.Precision.HIGHEST}
    form = post_norm_mlp.Form(y=a["y"], x=a["x"], weights=weights, **options)
    with cuda_device(*HOPPER):
        assert message in unsupported(form.abstract(), targets.current())
