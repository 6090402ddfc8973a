"""Every op and the encoder under vmap, grad and export, each against its plain-XLA form."""

import functools
import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_models import gpt2, minilm, modernbert, ops, pairformer, qwen3, trimul
from parity.cases import CALLS, OPS, TRANSFORMED, Call
from parity.support.common import (
    KERNEL,
    KERNELS,
    ON_GPU,
    TRITON_CALL,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    kernel_calls,
    normal,
    random_mask,
    random_params,
)
from parity.support.tolerances import CHAIN, DEEP, LONG


@functools.cache
def program(call: Call, implementation: str | None):
    return jax.jit(call(implementation))


every_op = pytest.mark.parametrize("call", TRANSFORMED, ids=lambda call: call.name)


def stacked(arrays, which, copies=3):
    """`arrays` with those in `which` replaced by different ones stacked on a new first axis.

    By NumPy, here and where one of them is taken again: JAX would compile a program for each shape.
    """

    def stack(x):
        if not np.issubdtype(x.dtype, np.floating):
            return np.stack([np.roll(x, i, axis=-1) for i in range(copies)])
        return np.stack([x * (1 + 0.25 * i) for i in range(copies)]).astype(x.dtype)

    return [stack(x) if i in which else x for i, x in enumerate(map(np.asarray, arrays))]


@every_op
@pytest.mark.parametrize("implementation", KERNELS)
def test_vmap_over_inputs_and_over_everything(call: Call, implementation):
    arrays = call.arrays()
    for which in (set(call.batched), set(range(len(arrays)))):
        axes = [0 if i in which else None for i in range(len(arrays))]
        mapped = stacked(arrays, which)
        out = jax.jit(jax.vmap(call(implementation), axes))(*mapped)
        xla = program(call, "xla")
        expected = [xla(*(x[j] if i in which else x for i, x in enumerate(mapped))) for j in range(3)]
        assert_close(out, np.stack(expected), LONG)


@pytest.mark.parametrize("in_axis, out_axis", [(1, 2), (2, 0)])
def test_vmap_over_another_axis(in_axis, out_axis):
    x, _, w, bias = next(call for call in CALLS if call.name == "matmul").arrays()
    x = x[..., None] * jnp.asarray([1.0, -0.5, 2.0])  # (batch, tokens, inputs, 3)
    x = jnp.moveaxis(x, -1, in_axis)

    def f(implementation):
        one = functools.partial(ops.matmul, w=w, bias=bias, implementation=implementation)
        return jax.jit(jax.vmap(one, in_axis, out_axis))

    assert_close(f(KERNEL)(x), f("xla")(x), LONG)


@every_op
def test_grad_of_vmap_under_jit(call: Call):
    arrays = call.arrays()
    which = set(call.batched)
    axes = [0 if i in which else None for i in range(len(arrays))]
    mapped = stacked(arrays, which)
    floats, rest = mapped[: call.floats], mapped[call.floats :]
    weights = normal(np.random.default_rng(30), *jax.eval_shape(call("xla"), *arrays).shape)

    def loss(implementation):
        return lambda *floats: jnp.sum(jax.vmap(call(implementation), axes)(*floats, *rest) * weights)

    argnums = tuple(range(call.floats))
    expected = jax.jit(jax.value_and_grad(loss("xla"), argnums))(*floats)
    for implementation in KERNELS:
        gradients = jax.jit(jax.value_and_grad(loss(implementation), argnums))(*floats)
        for out, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            assert_close(out, wanted, DEEP)


@every_op
def test_gradients_have_the_dtype_of_their_arguments(call: Call):
    for dtype in by_device(cpu=["float16"], gpu=["bfloat16", "float16"]):
        arrays = call.arrays(dtype)
        floats, rest = arrays[: call.floats], arrays[call.floats :]
        out = jax.eval_shape(call(KERNEL), *arrays)
        cotangent = normal(np.random.default_rng(33), *out.shape, dtype=str(out.dtype))

        def pull_back(*floats, rest=rest, cotangent=cotangent):
            return jax.vjp(lambda *floats: call(KERNEL)(*floats, *rest), *floats)[1](cotangent)

        for x, gradient in zip(floats, jax.eval_shape(pull_back, *floats), strict=True):
            assert gradient.dtype == x.dtype
    for gradient in jax.jit(pull_back)(*floats):  # float16: of the two the one with the smaller range
        assert np.all(np.isfinite(gradient.astype("float32")))
        assert np.any(gradient != 0)


def operands_of_products(call: Call, dtype: str, implementation: str | None) -> list[tuple[str, ...]]:
    """The element types of the operands of every product in a gradient that is lowered for an H200."""
    arrays = call.arrays(dtype)
    floats, rest = arrays[: call.floats], arrays[call.floats :]

    def loss(*floats):
        return jnp.sum(call(implementation)(*floats, *rest).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss, tuple(range(call.floats))))
    with cuda_device("NVIDIA H200", 132):
        text = gradient.trace(*floats).lower(lowering_platforms=("cuda",)).as_text()
    types = re.findall(r"stablehlo\.dot_general .* : \((.*)\) ->", text)
    return [tuple(re.findall(r"x(b?f\d+)>", pair)) for pair in types]


@every_op
@pytest.mark.parametrize("implementation", ["xla", None])
def test_gradients_have_products_as_wide_as_their_operands(call: Call, implementation):
    kinds = {"bfloat16": "bf16", "float32": "f32"} | ({} if implementation else {"float16": "f16"})
    for dtype, kind in kinds.items():  # to the reference one half precision is as the other
        found = operands_of_products(call, dtype, implementation)
        assert set(found) <= {(kind, kind)}
        without = OPS[call.op.__name__].products == "none"
        assert found or implementation is None or without  # kernels may leave none to XLA


def test_constants_and_numpy_arrays_under_jit():
    # Values that are known while a function is traced are still constants of it.
    rng = np.random.default_rng(31)
    x, mask = normal(rng, 2, 7, 33), random_mask(rng, 2, 7)
    out = jax.jit(lambda x: ops.mean_pool(x, np.asarray(mask), implementation=KERNEL))(x)
    assert_equal(out, ops.mean_pool(np.asarray(x), mask, implementation=KERNEL))
    assert_equal(jax.jit(lambda x: ops.mean_pool(x, mask, implementation=KERNEL))(x), out)


@every_op
def test_numpy_arrays(call: Call):
    arrays = call.arrays()
    out = call(None)(*map(np.asarray, arrays))
    assert isinstance(out, jax.Array)
    assert_equal(out, call(None)(*arrays))


MODELS = {
    gpt2: ("block", "logits", "loss"),
    minilm: ("contrastive_loss", "embed", "embed_packed", "encode"),
    modernbert: ("encode",),
    pairformer: (
        "attention_pair_bias",
        "block",
        "evoformer_block",
        "evoformer_stack",
        "msa_column_attention",
        "msa_row_attention",
        "outer_product_mean",
        "pair_averaging",
        "stack",
        "transition",
        "triangle_attention",
    ),
    qwen3: ("encode", "layer", "logits", "loss"),
    trimul: ("trimul",),
}
OPERATIONS = [f for name in ops.__all__ if inspect.isfunction(f := getattr(ops, name))]
FUNCTIONS = OPERATIONS + [getattr(module, name) for module, names in MODELS.items() for name in names]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_annotations(function):
    """What takes arrays takes NumPy's, and `help` of an operation begins with a signature to be read."""

    def parts(hint):
        return {hint}.union(*map(parts, typing.get_args(hint)))

    hints = {name: parts(hint) for name, hint in typing.get_type_hints(function).items() if name != "return"}
    assert not [name for name, found in hints.items() if jax.Array in found and np.ndarray not in found]
    assert len(str(inspect.signature(function))) < 800 or function not in OPERATIONS


@every_op
def test_an_empty_batch_gives_an_empty_result(call: Call):
    arrays = [x[:0] if i in call.batched else x for i, x in enumerate(call.arrays())]
    out = call(KERNEL)(*arrays)
    assert out.shape == jax.eval_shape(call("xla"), *arrays).shape
    assert out.shape[0] == 0


def encoder():
    """`embed` of a small encoder by implementation, and arguments for it."""
    config = minilm.MiniLMConfig(
        vocab_size=50, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=20
    )
    rng = np.random.default_rng(32)
    ids, mask = jnp.asarray(rng.integers(0, 50, (3, 9)), jnp.int32), random_mask(rng, 3, 9)

    def embed(implementation):
        return functools.partial(_embed, config=config, implementation=implementation)

    return embed, (random_params(config), ids, mask)


def _embed(params, ids, mask, **options):  # vmap and export count arguments by position
    return minilm.embed(params, ids, mask, **options)


@pytest.mark.parametrize("implementation", [KERNEL, None])
def test_encoder_under_vmap(implementation):
    embed, (params, ids, mask) = encoder()
    several, masks = jnp.stack([ids, ids[::-1]]), jnp.stack([mask, mask])
    out = jax.jit(jax.vmap(embed(implementation), (None, 0, 0)))(params, several, masks)
    xla = jax.jit(embed("xla"))
    expected = [xla(params, several[i], mask) for i in range(2)]
    assert_close(out, jnp.stack(expected), CHAIN)
    # An ensemble: the same sentences through several sets of parameters.
    ensemble = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
    out = jax.jit(jax.vmap(embed(implementation), (0, None, None)))(ensemble, ids, mask)
    expected = [xla(jax.tree.map(lambda x, i=i: x[i], ensemble), ids, mask) for i in range(2)]
    assert_close(out, jnp.stack(expected), CHAIN)


def round_trip(function, arrays, platform: str, **options) -> export.Exported:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: jax.export serialises with it")
    exported = export.export(jax.jit(function), platforms=[platform], **options)(*arrays)
    restored = export.deserialize(exported.serialize())
    assert restored.platforms == (platform,)
    assert [a.shape for a in restored.out_avals] == [a.shape for a in exported.out_avals]
    return restored


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_export_for_cpu(implementation):
    embed, arrays = encoder()
    restored = round_trip(embed(implementation), arrays, "cpu")
    assert kernel_calls(restored.mlir_module()) == 0
    on_cpu = jax.device_put(arrays, jax.devices("cpu")[0])
    assert_close(restored.call(*on_cpu), jax.jit(embed("xla"))(*arrays), CHAIN)


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_export_for_cuda(implementation):
    embed, arrays = encoder()
    allowed = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
    with cuda_device("NVIDIA H200", 132):
        restored = round_trip(embed(implementation), arrays, "cuda", disabled_checks=allowed)
        kernels = kernel_calls(restored.mlir_module())
    assert 7 <= kernels <= 9
    if ON_GPU:
        assert_close(restored.call(*arrays), jax.jit(embed("xla"))(*arrays), CHAIN)


def test_mapped_kernels_count_in_32_bits():
    """JAX traces a Mosaic kernel anew to map over it: under the settings of whoever does."""
    x, w_up, w_down = (jnp.ones(shape, "float16") for shape in ((3, 8, 512), (3, 512, 192), (3, 192, 448)))
    mapped = jax.vmap(lambda *arrays: ops.mlp(*arrays, implementation="mosaic"))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), cuda_device("NVIDIA H200", 132):
        text = jax.jit(mapped).trace(x, w_up, w_down).lower(lowering_platforms=("cuda",)).as_text()
    assert kernel_calls(text) >= 2
