"""Kernels of the gradient of the triangle update against derivatives in float64: values, masks, sizes, ranges."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops, target
from pallas_models.kernels.common import trimul_output_scales as output_scales
from pallas_models.kernels.forms.trimul import Output, Product, Projection
from pallas_models.kernels.mosaic import trimul_product as mosaic_product
from pallas_models.kernels.schedules import trimul_backward as backward_schedules
from pallas_models.kernels.triton import (
    trimul_output_backward,
    trimul_output_scales,
    trimul_product,
    trimul_project_backward,
    trimul_weights_backward,
)
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    array,
    assert_close,
    assert_equal,
    assert_named_close,
    by_device,
    cuda_device,
    float64,
    gpu,
    kernel_calls,
    normal,
    without_gpu,
)
from parity.support.tolerances import DEEP, OP

HOPPER, ADA = ("NVIDIA H200", 132), ("NVIDIA GeForce RTX 4090", 128)
needs_jax_011 = pytest.mark.skipif(
    MOSAIC != "mosaic" and jax.__version_info__ < (0, 11),
    reason="JAX 0.10 interprets neither what lies past the end of an array nor transposed operands",
)
# A chain of five products whose operands, results between kernels among them, are rounded: as much as the op's own
# rounding for each, and an outlier where the sum is small.
GRADIENTS = {"float32": DEEP, "float16": 3 * OP["float16"], "bfloat16": 3 * OP["bfloat16"]}


def draw(
    n: int, c: int, h: int, *, gate_after: bool, bias: bool, mask: str = "factors", batch: int = 1, seed: int = 0
):
    """The operands by name, float32, and a cotangent."""
    rng = np.random.default_rng(seed)
    g = c if gate_after else h
    operands = dict(
        x=normal(rng, batch, n, n, c),
        norm_scale=normal(rng, c, shift=1, scale=0.3),
        norm_bias=normal(rng, c),
        w_in=normal(rng, c, 4, h, scale=c**-0.5),
        out_norm_scale=normal(rng, h, shift=1, scale=0.3),
        out_norm_bias=normal(rng, h),
        w_gate=normal(rng, c, g, scale=c**-0.5),
        w_out=normal(rng, h, c, scale=h**-0.5),
    )
    if bias:
        operands |= dict(b_in=normal(rng, 4, h), b_gate=normal(rng, g), b_out=normal(rng, c))
    holes = rng.random((batch, n, n)) < 0.7
    if mask == "factors":
        operands["mask"] = array(rng.uniform(0.3, 1.5, holes.shape) * holes, "float32")
    elif mask == "holes":
        operands["mask"] = array(holes)
    return operands, normal(rng, batch, n, n, c)


def gradients(operands: dict[str, jax.Array], cotangent: jax.Array, **options: Any) -> dict[str, jax.Array]:
    """The gradients of the operands that have one."""
    moving = {name: x for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    still = {name: x for name, x in operands.items() if name not in moving}
    replaced = target.current, backward_schedules._triton
    return pulled(moving, still, cotangent, options=tuple(options.items()), replaced=replaced)


@functools.partial(jax.jit, static_argnames=("options", "replaced"))
def pulled(moving: Any, still: Any, cotangent: jax.Array, *, options: tuple[Any, ...], replaced: tuple[Any, ...]):
    """One program for all values of the operands, and one of its own for what a test has `replaced`."""
    del replaced
    out, pull = jax.vjp(lambda moving: ops.triangle_update(**still, **moving, **dict(options)), moving)
    return pull(cotangent.astype(out.dtype))[0]


def exact(operands: dict[str, jax.Array], cotangent: jax.Array, *, direction: str, gate_after: bool, **_: Any):
    """The gradients of the formula in float64, where a mask of 0 is 0 times whatever is there."""
    with jax.enable_x64(True):
        given = {name: jnp.asarray(float64(x)) for name, x in operands.items()}

        def formula(p: dict[str, jax.Array]) -> jax.Array:
            def normed(y: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
                d = y - jnp.mean(y, -1, keepdims=True)
                return d / jnp.sqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5) * scale + bias

            z = normed(p["x"], p["norm_scale"], p["norm_bias"])
            q = jnp.einsum("bijc,cgh->gbijh", z, p["w_in"])
            if "b_in" in p:
                q += p["b_in"][:, None, None, None]
            left, right = q[0] * jax.nn.sigmoid(q[1]), q[2] * jax.nn.sigmoid(q[3])
            if "mask" in p:
                kept = (p["mask"] != 0)[..., None]
                left, right = (jnp.where(kept, p["mask"][..., None] * side, 0.0) for side in (left, right))
            y = jnp.einsum({"outgoing": "bikh,bjkh->bijh", "incoming": "bkih,bkjh->bijh"}[direction], left, right)
            y = normed(y, p["out_norm_scale"], p["out_norm_bias"])
            gate = jax.nn.sigmoid(z @ p["w_gate"] + p.get("b_gate", 0.0))
            if gate_after:
                return (y @ p["w_out"] + p.get("b_out", 0.0)) * gate
            return (y * gate) @ p["w_out"] + p.get("b_out", 0.0)

        found = jax.jit(lambda p, c: jax.vjp(formula, p)[1](c)[0])(given, jnp.asarray(float64(cotangent)))
        return {name: float64(x) for name, x in found.items()}


# Values


@pytest.mark.parametrize(
    "n, c, h, gate_after, bias, mask, direction, dtype",
    [
        (1, 8, 8, False, True, "none", "outgoing", "float32"),
        (7, 10, 6, False, True, "factors", "outgoing", "float32"),
        (7, 10, 6, True, False, "holes", "incoming", "float16"),
        (9, 16, 20, True, True, "factors", "incoming", "float32"),
        (9, 16, 20, True, True, "factors", "outgoing", "bfloat16"),
        (9, 20, 16, False, False, "factors", "incoming", "float16"),
        *by_device(
            cpu=[(17, 40, 33, False, True, "holes", "outgoing", "float16")],
            gpu=[
                (n, c, h, gate_after, bias, mask, direction, dtype)
                for n, c, h in ((33, 64, 128), (129, 128, 128), (200, 96, 50), (256, 128, 64), (129, 384, 128))
                for gate_after, bias, mask, direction, dtype in (
                    (False, True, "factors", "outgoing", "float16"),
                    (True, True, "holes", "incoming", "bfloat16"),
                    (True, False, "none", "outgoing", "bfloat16"),
                )
            ],
        ),
    ],
)
def test_gradients(n, c, h, gate_after, bias, mask, direction, dtype):
    operands, cotangent = draw(n, c, h, gate_after=gate_after, bias=bias, mask=mask)
    options = dict(direction=direction, gate_after=gate_after, compute_dtype=dtype)
    found = gradients(operands, cotangent, implementation=KERNEL, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS[dtype])


@pytest.mark.covering(1)
@pytest.mark.parametrize("implementation", [KERNEL, pytest.param(MOSAIC, marks=needs_jax_011)])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize(
    "c, h, gate_after, bias, mask, direction, dtype",
    [
        (136, 16, False, True, "factors", "outgoing", "float16"),
        (16, 136, True, True, "holes", "incoming", "bfloat16"),
        (160, 24, True, False, "none", "outgoing", "float16"),
    ],
)
def test_more_channels_than_kernels_hold(
    c, h, gate_after, bias, mask, direction, dtype, residuals, implementation
):
    operands, cotangent = draw(9, c, h, gate_after=gate_after, bias=bias, mask=mask, batch=2)
    options = dict(direction=direction, gate_after=gate_after, compute_dtype=dtype)
    found = gradients(operands, cotangent, implementation=implementation, residuals=residuals, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS[dtype])


@pytest.mark.parametrize("implementation", [KERNEL, pytest.param(MOSAIC, marks=needs_jax_011)])
def test_gradient_of_a_residual(implementation):
    """The cotangent, added to the gradient of x; all others stay as they are."""
    operands, cotangent = draw(9, 16, 32, gate_after=True, bias=True, mask="holes")
    options = dict(direction="outgoing", gate_after=True, compute_dtype="bfloat16")
    found = gradients(operands, cotangent, residual=True, implementation=implementation, **options)
    wanted = exact(operands, cotangent, **options)
    assert_named_close(found, wanted | {"x": wanted["x"] + float64(cotangent)}, GRADIENTS["bfloat16"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_programs_that_walk_over_many_blocks(monkeypatch, dtype):
    """As on a GPU at large sizes: here each block would have a program of its own."""
    monkeypatch.setattr(target, "current", lambda: gpu(num_cores=1))
    operands, cotangent = draw(7, 10, 6, gate_after=True, bias=True, batch=2)
    options = dict(direction="outgoing", gate_after=True, compute_dtype=dtype)
    found = gradients(operands, cotangent, implementation=KERNEL, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS[dtype])


@needs_jax_011
@pytest.mark.parametrize(
    "n, c, h, gate_after, direction, dtype",
    [
        (64, 16, 32, True, "outgoing", "bfloat16"),
        (64, 16, 32, False, "incoming", "float16"),
        (13, 64, 32, False, "outgoing", "float16"),  # by Mosaic's projections, too, which fill matrices up
        (5, 64, 32, True, "incoming", "bfloat16"),
        *by_device(
            cpu=[],
            gpu=[
                (n, 128, 128, after, direction, dtype)
                for n, after, direction, dtype in (
                    (70, True, "outgoing", "bfloat16"),
                    (129, False, "incoming", "float16"),
                    (384, True, "incoming", "bfloat16"),
                    (768, True, "outgoing", "bfloat16"),
                )
            ],
        ),
    ],
)
def test_gradients_with_products_for_hopper(n, c, h, gate_after, direction, dtype):
    operands, cotangent = draw(n, c, h, gate_after=gate_after, bias=False, batch=2 if n < 64 else 1)
    options = dict(direction=direction, gate_after=gate_after, compute_dtype=dtype)
    found = gradients(operands, cotangent, implementation=MOSAIC, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS[dtype])


@pytest.mark.covering(2)
@pytest.mark.parametrize("c", [16, 136])
@pytest.mark.parametrize("gate_after, mask, dtype", [(True, "none", "float16"), (False, "factors", "bfloat16")])
@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_gradients_of_matrices_that_are_filled_up(monkeypatch, gate_after, mask, dtype, residuals, c):
    """As who copies whole tiles of them has them: two of 9 rows and columns, with rows of 16 and columns of 64."""
    kernels = backward_schedules._triton(None)
    forward = dataclasses.replace(kernels.forward, tile=(8, 64))
    monkeypatch.setattr(backward_schedules, "_triton", lambda _: dataclasses.replace(kernels, forward=forward))
    operands, cotangent = draw(9, c, 20, gate_after=gate_after, bias=True, mask=mask, batch=2)
    options = dict(direction="incoming", gate_after=gate_after, compute_dtype=dtype)
    found = gradients(operands, cotangent, implementation=KERNEL, residuals=residuals, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS[dtype])


@needs_jax_011
@pytest.mark.parametrize("n, gate_after", [(13, True), (5, False)])
def test_gradients_for_hopper_after_a_forward_pass_in_triton(n, gate_after):
    """Which keeps what Mosaic's kernels read: whole tiles."""
    operands, cotangent = draw(n, 64, 32, gate_after=gate_after, bias=True, batch=2)
    options = dict(direction="outgoing", gate_after=gate_after, compute_dtype="float16")
    found = gradients(operands, cotangent, implementation=(KERNEL, MOSAIC), **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS["float16"])


@pytest.mark.parametrize("transpose", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("backend", ["triton", pytest.param("mosaic", marks=needs_jax_011)])
def test_products_of_two_arrays(backend, transpose):
    """With each transpose, of channels that lie anywhere in their arrays."""
    n, rng = by_device(cpu=64, gpu=320), np.random.default_rng(3)
    left, right = (normal(rng, 2, n, channels, n, dtype="bfloat16") for channels in (5, 4))
    module, interpret = {
        "triton": (trimul_product, not ON_GPU),
        "mosaic": (mosaic_product, MOSAIC != "mosaic"),
    }[backend]

    @jax.jit
    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        form = Product(
            sides=left,
            right=right,
            channels=2,
            left_from=3,
            right_from=1,
            transpose_left=transpose[0],
            transpose_right=transpose[1],
            factor=0.5,
            precision=jax.lax.Precision.DEFAULT,
            by_rows=True,
        )
        return module.product(form, config=None, target=target.current(), interpret=interpret)

    a, b = (float64(x).transpose(0, 2, 1, 3) for x in (left[:, :, 3:5], right[:, :, 1:3]))
    a, b = (x.swapaxes(2, 3) if t else x for x, t in zip((a, b), transpose, strict=True))
    assert_close(product(left, right), 0.5 * (a @ b).transpose(0, 2, 1, 3), OP["bfloat16"])


# What is kept, and what is not


@pytest.mark.parametrize("dtype, gate_after", [("float16", False), ("bfloat16", True)])
def test_saved_and_computed_again_are_the_same(dtype, gate_after):
    n, c, h = by_device(cpu=(7, 10, 6), gpu=(129, 128, 128))
    operands, cotangent = draw(n, c, h, gate_after=gate_after, bias=True)
    options = dict(direction="outgoing", gate_after=gate_after, compute_dtype=dtype, implementation=KERNEL)
    saved, again, twice = (
        gradients(operands, cotangent, residuals=residuals, **options)
        for residuals in ("save", "recompute", "recompute")
    )
    for name in saved:
        assert_equal(saved[name], again[name])
        assert_equal(again[name], twice[name])


@pytest.mark.parametrize("gate_after", [False, True])
@pytest.mark.parametrize(
    "residuals, implementation, n, pairs",
    [
        ("save", "triton", 64, 64 * 64),
        ("save", "triton", 70, 70 * 70),
        ("save", "mosaic", 64, 64 * 64),
        ("save", "mosaic", 70, 72 * 128),  # whole tiles of 8 rows and 64 columns
        ("recompute", "mosaic", 64, 0),
    ],
)
def test_what_is_kept(residuals, implementation, n, pairs, gate_after, c=64, h=32):
    """Left, right, y and the gate in the compute dtype, or nothing: besides the operands and the result."""
    operands, _ = draw(n, c, h, gate_after=gate_after, bias=False, mask="none")
    options = dict(direction="outgoing", gate_after=gate_after, compute_dtype="bfloat16", residuals=residuals)
    f = functools.partial(ops.triangle_update, implementation=implementation, **options)
    with cuda_device(*HOPPER):
        out, pull = jax.eval_shape(lambda operands: jax.vjp(lambda o: f(**o), operands), operands)
    arrays = [x for x in jax.tree.leaves(pull) if x.dtype == jnp.bfloat16]
    g = c if gate_after else h
    assert sum(x.size for x in arrays) == (3 * h + g) * pairs
    assert out.dtype == jnp.float32


@needs_jax_011
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_what_is_kept_is_neither_cut_nor_filled_up(direction, n=70, c=128):
    """From the forward pass to the gradient it has the sizes that kernels write and read."""
    operands, cotangent = draw(n, c, c, gate_after=True, bias=False, mask="none")
    f = functools.partial(ops.triangle_update, direction=direction, gate_after=True, compute_dtype="bfloat16")

    def pulled(operands: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        out, pull = jax.vjp(lambda operands: f(**operands), operands)
        return out, pull(cotangent)

    with cuda_device(*HOPPER):
        lowered = jax.jit(pulled).trace(operands, cotangent).lower(lowering_platforms=("cuda",))
    lines = [line for line in lowered.as_text().splitlines() if re.search(r"tensor<(\d+x){4}bf16>", line)]
    assert any("optimization_barrier" in line for line in lines)
    assert not [line for line in lines if re.search(r"stablehlo\.(dynamic_)?(slice|pad|concatenate)\b", line)]


@pytest.mark.parametrize("implementation", [KERNEL, "xla"])
def test_of_a_bounded_forward_pass(implementation):
    """It keeps nothing, and is the gradient of an update that is not bounded."""
    operands, cotangent = draw(24, 64, 64, gate_after=False, bias=False)
    options = dict(direction="outgoing", compute_dtype="float16", implementation=implementation)
    wanted = gradients(operands, cotangent, residuals="recompute", **options)
    found = gradients(operands, cotangent, max_temporary_bytes=200_000, **options)
    for name, x in found.items():
        if implementation == "xla":
            assert_close(x, wanted[name], 3 * OP["float16"])
        else:
            assert_equal(x, wanted[name])


def test_an_unknown_residuals():
    operands, _ = draw(3, 4, 4, gate_after=False, bias=False)
    with pytest.raises(ValueError, match=r"residuals='keep' is unknown; expected one of \('save', 'recompute'\)"):
        ops.triangle_update(**operands, direction="outgoing", residuals="keep")


# Ranges

in_kernels_and_xla = pytest.mark.parametrize("c", [10, 130])


@pytest.mark.covering(1)
@in_kernels_and_xla
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("by", [2.0**-60, 2.0**60])
def test_cotangents_of_any_size(dtype, by, c):
    n, c, h = by_device(cpu=(7, c, 6), gpu=(64, 6 * c, 64))
    operands, cotangent = draw(n, c, h, gate_after=True, bias=True)
    options = dict(direction="incoming", gate_after=True, compute_dtype=dtype, implementation=KERNEL)
    found, wanted = (gradients(operands, c, **options) for c in (cotangent * by, cotangent))
    for name in wanted:
        assert_close(found[name] / by, wanted[name], 2.0**-20)


def test_largest_in_xla_are_those_of_the_kernel():
    n, padded, width, c, h = 5, 8, 16, 10, 6  # rows and columns past the end hold what must not count
    rng = np.random.default_rng(2)
    y, dout = normal(rng, 2 * padded, h, width, dtype="float16"), normal(rng, 2 * n, n, c, dtype="float32")
    of_result = np.zeros((2 * padded, 1, width), bool).reshape(2, padded, 1, width)
    of_result[:, :n, :, :n] = True
    y = jnp.where(of_result.reshape(y.shape[0], 1, width), y, jnp.arange(h, dtype="float16")[:, None] * 1e-4)
    form = Output(
        ys=(y,),
        gate=None,
        bounds=array(rng.uniform(1.0, 3.0, (4, 5)), "float32"),
        scale=normal(rng, h),
        shift=normal(rng, h),
        w=normal(rng, h, c, dtype="float16"),
        bias=None,
        gate_after=False,
        factor=2.0**-17,
        epsilon=1e-5,
        precision=jax.lax.Precision.HIGHEST,
        out_dtype=jnp.dtype("float32"),
        size=n,
        rows=(n, padded),
    )
    dout = dout.at[3, 2, 1].set(jnp.inf).at[0, 0, 0].set(1e30)
    in_xla = output_scales.find_largest(form, dout)
    kernel = trimul_output_scales.find_largest(form, dout, target=target.current(), interpret=not ON_GPU)
    assert_close(jnp.stack(in_xla) / jnp.stack(kernel), np.ones(3), 1e-5)


@in_kernels_and_xla
def test_factors_of_a_mask_beyond_half_precision(c, n=7):
    operands, cotangent = draw(n, c, 6, gate_after=False, bias=False, mask="none")
    operands["mask"] = array(np.random.default_rng(1).uniform(3e3, 9e3, (1, n, n)), "float32")
    options = dict(direction="outgoing", gate_after=False, compute_dtype="float16")
    found = gradients(operands, cotangent, implementation=KERNEL, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS["float16"])


@pytest.mark.covering(1)
@in_kernels_and_xla
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_x_and_weights_of_any_size(scale, c):
    operands, cotangent = draw(7, c, 6, gate_after=False, bias=False, mask="holes")
    operands["x"] = operands["x"] * 1e4 + 3e4
    operands["w_in"] = operands["w_in"].at[:, ::2].multiply(scale)
    options = dict(direction="outgoing", gate_after=False, compute_dtype="float16")
    found = gradients(operands, cotangent, implementation=KERNEL, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS["float16"])


@pytest.mark.covering(2)
@in_kernels_and_xla
@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("gate_after", [False, True])
def test_what_is_masked_adds_nothing(padding, gate_after, c):
    """Where its result has no cotangent: not even 0 times what is not finite."""
    operands, cotangent = draw(7, c, 6, gate_after=gate_after, bias=True, mask="holes")
    kept = operands["mask"][..., None]
    cotangent = jnp.where(kept, cotangent, 0.0)
    options = dict(direction="outgoing", gate_after=gate_after, compute_dtype="float16", implementation=KERNEL)
    wanted = gradients(operands, cotangent, **options)
    found = gradients(operands | {"x": jnp.where(kept, operands["x"], padding)}, cotangent, **options)
    for name in wanted:
        if name == "x":
            assert_equal(jnp.where(kept, found[name], 0.0), jnp.where(kept, wanted[name], 0.0))
        else:
            assert_equal(found[name], wanted[name])


# Transformations


def test_under_vmap_remat_and_scan():
    operands, cotangent = draw(5, 8, 6, gate_after=True, bias=False, batch=2)
    x, mask = operands.pop("x"), operands.pop("mask")
    options = dict(direction="incoming", gate_after=True, compute_dtype="float32", implementation=KERNEL)

    def loss(operands, x, mask, cotangent, wrap=lambda f: f):
        f = wrap(lambda x: ops.triangle_update(x, mask=mask, **operands, **options))
        return jnp.sum(f(x) * cotangent)

    wanted = jax.jit(jax.grad(loss, (0, 1)))(operands, x, mask, cotangent)
    each = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, 0, 0, 0)))(operands, x, mask, cotangent)
    again = jax.jit(jax.grad(functools.partial(loss, wrap=jax.checkpoint), (0, 1)))(operands, x, mask, cotangent)

    @jax.jit
    def scanned(operands, x):
        total, _ = jax.lax.scan(
            lambda total, given: (total + loss(operands, *given), None), 0.0, (x, mask, cotangent)
        )
        return total

    in_turn = jax.grad(scanned, (0, 1))(operands, x)
    summed = jax.tree.map(lambda a: jnp.sum(a, axis=0), each[0])
    for found in ((summed, each[1]), again, in_turn):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert_close(a, b, DEEP)


def test_a_gradient_of_the_gradient():
    operands, cotangent = draw(3, 4, 4, gate_after=False, bias=False)
    x = operands.pop("x")

    def of_gradient(implementation):
        f = lambda x: ops.triangle_update(  # noqa: E731
            x, **operands, direction="outgoing", compute_dtype="float32", implementation=implementation
        )
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(jax.vjp(f, x)[1](cotangent)[0]))))(x)

    assert_close(of_gradient(KERNEL), of_gradient("xla"), DEEP)


@pytest.mark.parametrize("c", [4, 130])
def test_with_integers_of_64_bits(c):
    """Kernels are lowered where a number of Python's has 64 bits."""
    operands, cotangent = draw(7, c, 6, gate_after=False, bias=True)
    options = dict(direction="outgoing", gate_after=False, compute_dtype="float16")
    with jax.enable_x64(True):
        found = gradients(operands, cotangent, implementation=KERNEL, **options)
    assert_named_close(found, exact(operands, cotangent, **options), GRADIENTS["float16"])


# Lowering


@pytest.mark.covering(1)
@without_gpu
@pytest.mark.parametrize(
    "device, implementation",
    [(HOPPER, "mosaic"), (HOPPER, "triton"), (ADA, "triton")],
    ids=["mosaic", "h200", "ada"],
)
@pytest.mark.parametrize(
    "n, c, h, gate_after, direction, dtype",
    [
        (768, 128, 128, True, "outgoing", "bfloat16"),
        (77, 50, 33, False, "incoming", "float16"),
    ],
)
def test_lowers_to_kernels(device, implementation, n, c, h, gate_after, direction, dtype):
    options = dict(direction=direction, gate_after=gate_after, compute_dtype=dtype, implementation=implementation)
    text = lowered(device, n, c, h, **options)
    assert "stablehlo.dot_general" not in text
    assert kernel_calls(text) >= 8
    assert (text.count(f"@{MOSAIC_CALL}") > 0) == (implementation == "mosaic")


def lowered(device: tuple[str, int], n: int, c: int, h: int, *, gate_after: bool, **options: Any) -> str:
    """The program of an update and its gradient."""
    shapes = jax.eval_shape(lambda: draw(4, c, h, gate_after=gate_after, bias=True, mask="none"))
    operands, x = shapes[0], jax.ShapeDtypeStruct((1, n, n, c), "bfloat16")

    def pulled(operands, cotangent):
        call = functools.partial(ops.triangle_update, gate_after=gate_after, **options)
        return jax.vjp(lambda o: call(**o), operands)[1](cotangent)

    with cuda_device(*device):
        program = jax.jit(pulled).trace(operands | {"x": x}, x).lower(lowering_platforms=("cuda",))
    return str(program.as_text())


@without_gpu
@pytest.mark.parametrize("device", [HOPPER, ADA], ids=["h200", "ada"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_with_more_channels_sums_over_third_positions_are_kernels(device, implementation):
    """The products with weights alone are XLA's: these have no axes in common but the one that is summed."""
    text = lowered(device, 256, 384, 128, gate_after=False, direction="outgoing", implementation=implementation)
    assert "stablehlo.dot_general" in text
    assert ("batching_dims" in text) == (implementation == "xla")
    assert (kernel_calls(text) >= 5) == (implementation is None)


def projection_of(n: int, c: int, h: int, g: int, *, dtype: str, x_dtype: str) -> Projection[Any]:
    """Shapes and dtypes of the operands of the projections."""
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    return Projection(
        x=jax.ShapeDtypeStruct((n, n, c), jnp.dtype(x_dtype)),
        mask=None,
        norm_scale=abstract((c,)),
        norm_bias=abstract((c,)),
        w=abstract((c, 4, h)),
        bias=None,
        w_gate=abstract((c, g)),
        b_gate=None,
        epsilon=1e-5,
        precision=jax.lax.Precision.DEFAULT,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("device", [HOPPER, ADA], ids=["h200", "ada"])
def test_blocks_fit_into_shared_memory(device, dtype, n=768, c=128, h=128):
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    precision = jax.lax.Precision.DEFAULT
    projection = projection_of(n, c, h, c, dtype=dtype, x_dtype=dtype)
    end = Output(
        ys=(abstract((n, h, n)),),
        gate=abstract((n, c, n)),
        bounds=abstract((8, 5)),
        scale=abstract((h,)),
        shift=abstract((h,)),
        w=abstract((h, c)),
        bias=None,
        gate_after=True,
        factor=1.0,
        epsilon=1e-5,
        precision=precision,
        out_dtype=jnp.dtype("float32"),
        size=n,
    )
    with cuda_device(*device):
        of = target.current()
    for module, form, options in (
        (trimul_output_backward, end, {}),
        (trimul_project_backward, projection, dict(target=of)),
        (trimul_weights_backward, projection, {}),
    ):
        assert module.shared_memory(module.heuristic(form, of), form, **options) <= of.shared_memory


@pytest.mark.parametrize(
    "device, c, h, g, dtype, x_dtype, block_m, num_stages, taken",
    [
        (HOPPER, 128, 128, 128, "float16", "float32", 64, 2, 90112),
        (HOPPER, 128, 64, 128, "bfloat16", "float32", 128, 2, 81920),
        (HOPPER, 128, 64, 64, "float16", "float32", 64, 1, 49152),
        (HOPPER, 128, 64, 64, "float16", "float32", 64, 2, 262656),
        (HOPPER, 96, 50, 50, "float16", "float32", 64, 2, 262656),
        (HOPPER, 128, 64, 64, "bfloat16", "float32", 128, 2, 361472),
        (HOPPER, 128, 64, 64, "float16", "float32", 64, 3, 402432),
        (HOPPER, 128, 64, 64, "float16", "float16", 64, 2, 229888),
        (HOPPER, 98, 64, 64, "float16", "float16", 64, 2, 246272),
        (HOPPER, 50, 64, 64, "bfloat16", "bfloat16", 128, 2, 197632),
        (HOPPER, 64, 64, 64, "bfloat16", "float32", 128, 2, 214016),
        (ADA, 64, 64, 64, "float16", "float32", 64, 2, 98816),
        (ADA, 128, 64, 64, "float16", "float32", 64, 3, 295936),
    ],
)
def test_projections_take_no_more_shared_memory_than_thought(
    device, c, h, g, dtype, x_dtype, block_m, num_stages, taken
):
    # What Triton took for a mask of float factors and biases, compiled with JAX 0.11.2.
    config = trimul_project_backward.Config(
        block_m=block_m, block_n=64, programs_per_core=1, num_warps=8, num_stages=num_stages
    )
    with cuda_device(*device):
        of = target.current()
    form = projection_of(256, c, h, g, dtype=dtype, x_dtype=x_dtype)
    assert trimul_project_backward.shared_memory(config, form, of) >= taken


@pytest.mark.parametrize(
    "device, c, h, g, dtype, x_dtype, block_m, num_stages",
    [
        (HOPPER, 128, 128, 128, "float16", "float32", 64, 2),
        (HOPPER, 128, 128, 128, "bfloat16", "bfloat16", 128, 2),
        (HOPPER, 128, 64, 128, "bfloat16", "float32", 128, 2),
        (HOPPER, 128, 64, 64, "float16", "float32", 64, 1),
        (HOPPER, 128, 64, 64, "float16", "float16", 64, 2),
        (HOPPER, 98, 64, 64, "float16", "float16", 64, 1),
        (HOPPER, 64, 64, 64, "bfloat16", "float32", 128, 2),
        (HOPPER, 50, 50, 50, "bfloat16", "float32", 128, 2),
        (ADA, 64, 64, 64, "float16", "float32", 32, 2),
    ],
)
def test_projections_load_ahead_where_it_fits(device, c, h, g, dtype, x_dtype, block_m, num_stages):
    with cuda_device(*device):
        of = target.current()
    config = trimul_project_backward.heuristic(projection_of(256, c, h, g, dtype=dtype, x_dtype=x_dtype), of)
    assert (config.block_m, config.num_stages) == (block_m, num_stages)
