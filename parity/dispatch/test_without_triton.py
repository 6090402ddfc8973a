"""JAX without Pallas's Triton backend, which it has deprecated: kernels of Mosaic take the place of Triton's."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import gpt2, minilm, ops, qwen3
from parity.ops import test_trimul_backward as trimul
from parity.support.common import (
    HOPPER,
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    array,
    assert_close,
    assert_named_close,
    cuda_device,
    random_params,
    without_gpu,
    without_triton,
)

needs_jax_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="has Triton, and no Mosaic for all GPUs")


def shaped(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def lowered(function: Callable[..., Any], *arrays: Any) -> str:
    with without_triton(), cuda_device(*HOPPER):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def minilm_embed() -> tuple[Callable[..., Any], Any]:
    params = jax.eval_shape(lambda: random_params(minilm.MiniLMConfig(), "float16"))
    return minilm.embed, (params, shaped(64, 128, dtype="int32"), shaped(64, 128, dtype="int32"))


def gpt2_block() -> tuple[Callable[..., Any], Any]:
    params = jax.eval_shape(lambda: gpt2.init_block(jax.random.key(0), dtype=jnp.bfloat16))
    return gpt2.block, (params, shaped(4, 1024, 768))


def qwen3_layer() -> tuple[Callable[..., Any], Any]:
    config = qwen3.Qwen3Config()
    params = jax.eval_shape(lambda: qwen3.init_layer(jax.random.key(0), config, dtype=jnp.bfloat16))
    return qwen3.layer, (params, shaped(1, 2048, config.hidden_size))


def update(operands: dict[str, Any]) -> jax.Array:
    return ops.triangle_update(**operands, direction="outgoing", gate_after=True, compute_dtype="bfloat16")


def triangle_update() -> tuple[Callable[..., Any], Any]:
    operands, _ = trimul.draw(256, 128, 128, gate_after=True, bias=True, mask="factors")
    return update, (operands,)


def triangle_update_gradient() -> tuple[Callable[..., Any], Any]:
    function, (operands,) = triangle_update()

    def gradient(operands: dict[str, Any]) -> Any:
        return jax.grad(lambda moving: jnp.sum(function(operands | moving) ** 2))({"x": operands["x"]})

    return gradient, (operands,)


@without_gpu
@needs_jax_011
@pytest.mark.parametrize("triton", [True, False])
def test_a_post_norm_layer_trains_in_the_kernels_of_products_and_norms(triton):
    """A product with layer norm is differentiated as two ops, each with its best kernel."""
    vectors = 4 * [shaped(384, dtype="float32")]

    def gradient(x, w, scale, offset, bias, residual):
        def loss(*arrays):
            x, w, scale, offset, bias, residual = arrays
            y = ops.matmul_layer_norm(x, w, scale, offset, bias=bias, residual=residual)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, range(6))(x, w, scale, offset, bias, residual)

    arrays = shaped(32768, 384), shaped(384, 384), *vectors[:3], shaped(32768, 384)
    with contextlib.nullcontext() if triton else without_triton(), cuda_device(*HOPPER):
        text = jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert TRITON_CALL not in text
    assert text.count(f"@{MOSAIC_CALL}") == 4  # product, norm, and the gradient of each
    assert text.count("stablehlo.dot_general") == 1  # of the cotangent and w, which XLA multiplies
    assert "stablehlo.rsqrt" not in text


@without_gpu
@needs_jax_011
@pytest.mark.parametrize(
    "call", [minilm_embed, gpt2_block, qwen3_layer, triangle_update, triangle_update_gradient]
)
def test_on_hopper_all_products_and_exponentials_are_in_kernels(call):
    function, arrays = call()
    text = lowered(function, *arrays)
    assert TRITON_CALL not in text and MOSAIC_CALL in text
    assert not re.search(r"stablehlo\.(dot_general|exponential|rsqrt|gather)", text)


@needs_jax_011
@pytest.mark.parametrize("name", ["triton", "interpret"])
def test_names_of_triton_are_refused_in_words(name):
    expected = rf"implementation='{name}' needs jax.experimental.pallas.triton, which JAX .* does not have"
    with without_triton(), pytest.raises(NotImplementedError, match=expected):
        ops.softmax(jnp.ones((2, 8)), implementation=name)


@needs_jax_011
def test_another_name_is_taken():
    x = array(np.linspace(-3.0, 3.0, 64).reshape(4, 16), "float32")
    with without_triton():
        found = ops.softmax(x, implementation=("triton", "xla"))
    assert_close(found, jax.nn.softmax(x), 1e-6)


@needs_jax_011
def test_a_call_on_another_device_needs_no_triton():
    with without_triton():
        found = ops.softmax(jnp.zeros((2, 8)))
    assert_close(found, jnp.full((2, 8), 0.125), 1e-6)


@needs_jax_011
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n, direction", [(5, "outgoing"), *([(129, "incoming")] if ON_GPU else [])])
def test_the_triangle_update_and_its_gradient_in_kernels_of_mosaic_alone(n, direction, dtype):
    operands, cotangent = trimul.draw(n, 64, 64, gate_after=True, bias=True, mask="factors")
    options = dict(direction=direction, gate_after=True, compute_dtype=dtype)
    with without_triton():
        out = ops.triangle_update(**operands, **options, implementation=MOSAIC)
        found = trimul.gradients(operands, cotangent, implementation=MOSAIC, **options)
    assert_close(out, ops.triangle_update(**operands, **options, implementation="xla"), 2e-2)
    assert_named_close(found, trimul.exact(operands, cotangent, **options), trimul.GRADIENTS[dtype])


@without_gpu
@needs_jax_011
def test_the_gradient_in_float16_has_the_kernels_of_bfloat16():
    operands, _ = trimul.draw(256, 128, 128, gate_after=True, bias=True, mask="factors")

    def calls(dtype: str) -> int:
        def loss(x: jax.Array) -> jax.Array:
            options = dict(direction="outgoing", gate_after=True, compute_dtype=dtype)
            return jnp.sum(ops.triangle_update(**operands | {"x": x}, **options))

        return lowered(jax.grad(loss), operands["x"]).count(f"@{MOSAIC_CALL}")

    assert calls("float16") == calls("bfloat16") > 0
