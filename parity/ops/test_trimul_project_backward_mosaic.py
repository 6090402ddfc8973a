"""The gradient of the projections of the triangle update, for Hopper GPUs, against derivatives in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import target
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.forms.trimul_backward import GATED, Given, OfPositions
from pallas_models.kernels.mosaic import trimul_project_backward as kernel
from parity.support.common import (
    MOSAIC,
    MOSAIC_CALL,
    array,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    float64,
    gpu,
    normal,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
needs_jax_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 is refused")
Operands = tuple[Projection[jax.Array], Given]


def draw(
    items: int,
    size: int,
    c: int,
    h: int,
    g: int,
    dtype: str,
    x_dtype: str = "float32",
    *,
    rows: int = 1,
    padded_rows: int = 1,
    mask: bool = True,
    biased: bool = True,
) -> Operands:
    """A call: cotangents of items in whole tiles, NaN in the items that fill matrices of `rows` items up.

    Scales differ, and leave the three sums that dz is made of at about the same size. bfloat16 has two scales.
    """
    rng, width = np.random.default_rng(size + c), size + -size % 64
    is_half = dtype == "float16"
    scales = 2.0**-8, 2.0**-9 / GATED, 2.0**-9 if is_half else 1.0, 0.25 if is_half else 1.0

    def cotangent(channels: int, scale: float) -> jax.Array:
        d = np.full((items // rows, padded_rows, channels, width), np.nan)
        d[:, :rows] = 0.0
        d[:, :rows, :, :size] = scale * rng.normal(size=(items // rows, rows, channels, size))
        return array(d.reshape(-1, channels, width), dtype)

    factors = rng.uniform(0.5, 1.5, (items, size)) * (rng.random((items, size)) < 0.7)
    factors[-1] = 0.0 if items > 1 else factors[-1]  # all of a row
    form = Projection(
        x=normal(rng, items, size, c, dtype=x_dtype, scale=2.0, shift=1.0),
        mask=array(factors, "float32") if mask else None,
        norm_scale=normal(rng, c, shift=1.0),
        norm_bias=normal(rng, c),
        w=normal(rng, c, 4, h, dtype=dtype, scale=c**-0.5),
        bias=normal(rng, 4, h) if biased else None,
        w_gate=normal(rng, c, g, dtype=dtype, scale=c**-0.5),
        b_gate=None,
        epsilon=1e-5,
        precision=jax.lax.Precision.DEFAULT,
        rows=rows,
        padded=(padded_rows, width),
    )
    sides = (cotangent(h, 1 / scales[0] / scales[3]) for _ in range(2))
    return form, Given(*sides, cotangent(g, 1 / scales[2]), array(scales, "float32"))


def abstract(*sizes: Any, **options: Any) -> tuple[Projection[jax.ShapeDtypeStruct], Given]:
    """A call of shapes."""
    forms = []

    def operands() -> Any:
        form, given = draw(*sizes, **options)
        forms.append(form)
        return form.operands, given

    operands, given = jax.eval_shape(operands)
    return forms[0].of(operands), given


def program(form: Any, of_mask: bool, interpret: bool = INTERPRET) -> Callable[[Any, Given], OfPositions]:
    """The kernel for calls like one."""
    where = dict(of_mask=of_mask, target=target.current(), interpret=interpret)
    run = jax.jit(lambda operands, given: kernel.project_backward(form.of(operands), given, **where))
    return lambda form, given: run(form.operands, given)


def exact(form: Projection[jax.Array], given: Given) -> OfPositions:
    """The gradient in float64."""
    x, w, w_gate = float64(form.x), float64(form.w), float64(form.w_gate)
    (items, size, _), filled = x.shape, np.arange(form.result[0]).reshape(-1, form.padded_rows)[:, : form.rows]
    left, right, gate = (float64(d)[filled.reshape(-1), :, :size].swapaxes(1, 2) for d in given[:3])
    of_projections, of_gates, of_gate, shrink = (float(scale) for scale in given.scales)
    factor = np.ones((items, size)) if form.mask is None else float64(form.mask)
    factor = factor[..., None]
    deviation = x - x.mean(-1, keepdims=True)
    inverse = 1.0 / np.sqrt(np.mean(deviation**2, -1, keepdims=True) + form.epsilon)
    unit, scale = deviation * inverse, float64(form.norm_scale)
    z = unit * scale + float64(form.norm_bias)
    biases = np.zeros(w.shape[1:]) if form.bias is None else float64(form.bias)
    dz, dmask = of_gate * gate @ w_gate.T, 0.0
    for i, d in ((0, left), (2, right)):
        p, g = (z @ w[:, i + k] + biases[i + k] for k in range(2))
        s = 1.0 / (1.0 + np.exp(-g))
        dz += (of_projections * shrink * factor * d * s) @ w[:, i].T
        dz += (of_gates * GATED * factor * d * p * s * (1.0 - s)) @ w[:, i + 1].T
        dmask += of_projections * shrink * (d * p * s).sum(-1)
    du = dz * scale
    dx = (du - du.mean(-1, keepdims=True) - unit * np.mean(du * unit, -1, keepdims=True)) * inverse
    return OfPositions(
        x=dx,
        mask=np.where(factor[..., 0] == 0.0, 0.0, dmask),
        scale=np.sum(dz * unit, (0, 1)),
        shift=np.sum(dz, (0, 1)),
        z=z,
    )


def assert_gradient(found: OfPositions, form: Projection[jax.Array], given: Given) -> None:
    wanted, tolerance = exact(form, given), OP[str(form.w.dtype)]
    assert found.x.dtype == form.x.dtype and found.z.dtype == form.w.dtype
    assert found.scale.dtype == found.shift.dtype == jnp.float32
    for name in ("scale", "shift", "z"):
        assert_close(getattr(found, name), getattr(wanted, name), tolerance)
    assert_close(found.x, wanted.x, max(tolerance, OP[str(form.x.dtype)]))
    if found.mask is not None:
        assert found.mask.dtype == jnp.float32
        assert_close(found.mask, wanted.mask, tolerance)
        assert not np.any(np.asarray(found.mask)[np.asarray(form.mask) == 0.0])


# Operands of products are rounded: normalised positions and the cotangents of projections and of their gates. On
# a GPU tanh is good to 11 bits.
@needs_jax_011
@pytest.mark.parametrize(
    "items, size, c, h, g, dtype, x_dtype, options",
    [
        (2, 72, 64, 64, 64, "float16", "float32", {}),
        (1, 192, 128, 128, 128, "bfloat16", "bfloat16", dict(mask=False, biased=False)),
        (1, 64, 128, 64, 64, "float16", "float16", dict(biased=False)),
        (3, 70, 64, 128, 128, "bfloat16", "float32", dict(mask=False)),
        (6, 13, 128, 64, 128, "float16", "bfloat16", dict(rows=3, padded_rows=8)),
        (1, 5, 64, 128, 64, "bfloat16", "float16", {}),
        *by_device(
            cpu=[],
            gpu=[
                (n, n, c, h, g, dtype, x_dtype, dict(mask=mask, biased=mask, rows=n, padded_rows=n + -n % 8))
                for n, c, h, g, dtype, x_dtype, mask in (
                    (512, 128, 128, 128, "float16", "bfloat16", False),
                    (384, 128, 128, 128, "bfloat16", "float32", True),
                    (200, 128, 64, 128, "float16", "float16", True),
                    (131, 64, 128, 64, "bfloat16", "float32", False),
                    (131, 128, 128, 128, "float16", "float32", True),
                )
            ],
        ),
    ],
)
def test_gradient(items, size, c, h, g, dtype, x_dtype, options):
    operands = draw(items, size, c, h, g, dtype, x_dtype, **options)
    of_mask = operands[0].mask is not None and operands[0].bias is not None
    found = program(operands[0], of_mask)(*operands)
    assert (found.mask is not None) == of_mask
    assert_gradient(found, *operands)


@needs_jax_011
def test_warpgroups_with_several_tiles(monkeypatch):
    """Seven tiles for four warpgroups; and the same bits once more."""
    monkeypatch.setattr(kernel, "num_cores", lambda target, interpret: 2)
    operands = draw(1, 448, 64, 64, 64, "float16")
    f = program(operands[0], of_mask=True)
    found = f(*operands)
    assert_gradient(found, *operands)
    for x, y in zip(found, f(*operands), strict=True):
        assert_equal(x, y)


@needs_jax_011
def test_what_is_masked_adds_nothing():
    """Not even 0 times what is not finite: cotangents of sides, and positions that have no norm."""
    form, given = draw(1, 64, 64, 64, 64, "float16")
    masked = np.asarray(form.mask[0] == 0.0)
    infinite, zero = (form.replace(x=jnp.where(masked[:, None], by, form.x)) for by in (jnp.inf, 0.0))
    left, right = (jnp.where(masked, by, d) for d, by in ((given.left, jnp.inf), (given.right, jnp.nan)))
    f = program(form, of_mask=True)
    found, wanted = f(infinite, given._replace(left=left, right=right)), f(zero, given)
    for name in ("mask", "scale", "shift", "z"):
        assert_equal(getattr(found, name), getattr(wanted, name))
    assert_equal(found.x[0, ~masked], wanted.x[0, ~masked])
    assert not np.any(np.asarray(found.x)[0, masked])


@finds_races
def test_has_no_races():
    operands = draw(1, 320, 64, 64, 64, "float16", "bfloat16")
    with no_races():
        program(operands[0], of_mask=True)(*operands)


@without_gpu
@needs_jax_011
@pytest.mark.parametrize("size", [1024, 200, 13])
@pytest.mark.parametrize(
    "c, h, g, dtype, x_dtype, mask",
    [(128, 128, 128, "float16", "bfloat16", False), (128, 64, 64, "bfloat16", "float32", True)],
)
def test_lowers(c, h, g, dtype, x_dtype, mask, size):
    form, given = abstract(8, size, c, h, g, dtype, x_dtype, mask=mask, biased=mask)
    assert kernel.unsupported(form, gpu()) is None
    with cuda_device("NVIDIA H200", 132):
        traced = jax.jit(lambda ops, given: program(form, mask, interpret=False)(form.of(ops), given)).trace
        text = traced(form.operands, given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{MOSAIC_CALL}") == 1


@pytest.mark.parametrize(
    "c, x_dtype, kib, count",
    [
        (128, "float32", 227, 1),  # 160 KiB of weights, and 48 for a warpgroup
        (128, "bfloat16", 227, 2),
        (128, "bfloat16", 192, 0),
        (64, "float32", 227, 2),
    ],
)
def test_warpgroups_that_fit(c, x_dtype, kib, count):
    form, _ = abstract(1, 64, c, c, c, "float16", x_dtype)
    hopper = gpu(shared_memory=kib * 1024)
    assert kernel._warpgroups(form, hopper) == count
    if jax.__version_info__ >= (0, 11):
        assert ("does not fit" in (kernel.unsupported(form, hopper) or "")) == (count == 0)


@needs_jax_011
@pytest.mark.parametrize(
    "c, h, g, dtype, message",
    [
        (128, 128, 128, "float32", "takes weights in float16 and bfloat16, not float32"),
        (96, 128, 128, "float16", "not 96, 128 and 128"),
        (128, 32, 128, "float16", "not 128, 32 and 128"),
        (128, 64, 192, "float16", "takes 64 or 128 channels, hidden channels and channels of the gate"),
    ],
)
def test_refuses(c, h, g, dtype, message):
    form, _ = abstract(1, 64, c, h, g, dtype)
    assert message in kernel.unsupported(form, gpu())


def test_refuses_old_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs JAX 0.11 or newer" in kernel.unsupported(abstract(1, 64, 64, 64, 64, "float16")[0], gpu())
