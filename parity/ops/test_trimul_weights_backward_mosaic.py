"""The gradient of the weights of the triangle update, for Hopper GPUs, against derivatives in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import target
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.forms.trimul_backward import GATED, Given, OfWeights
from pallas_models.kernels.mosaic import trimul_weights_backward as kernel
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
Operands = tuple[Projection[jax.Array], jax.Array, Given]


def draw(
    items: int, size: int, c: int, h: int, g: int, dtype: str, *, rows=1, padded_rows=1, mask=True, biased=True
) -> Operands:
    """A call: cotangents of items in whole tiles, 0 where matrices of `rows` items are filled up.

    They are as large as their scales make them: float16 holds the gates', times `GATED`, at full precision.
    """
    rng, width = np.random.default_rng(size + c), size + -size % 64

    def cotangent(channels: int) -> jax.Array:
        d = np.zeros((items // rows, padded_rows, channels, width))
        d[:, :rows, :, :size] = 1024 * rng.normal(size=(items // rows, rows, channels, size))
        return array(d.reshape(-1, channels, width), dtype)

    factors = rng.uniform(0.5, 1.5, (items, size)) * (rng.random((items, size)) < 0.7)
    form = Projection(
        x=normal(rng, items, size, c),
        mask=array(factors, "float32") if mask else None,
        norm_scale=normal(rng, c),
        norm_bias=normal(rng, c),
        w=normal(rng, c, 4, h, dtype=dtype, scale=c**-0.5),
        bias=normal(rng, 4, h) if biased else None,
        w_gate=normal(rng, c, g, dtype=dtype, scale=c**-0.5),
        b_gate=normal(rng, g) if biased else None,
        epsilon=1e-5,
        precision=jax.lax.Precision.DEFAULT,
        rows=rows,
        padded=(padded_rows, width),
    )
    scales = array([2.0, 4.0, 8.0, 0.25], "float32")
    return form, normal(rng, items, size, c, dtype=dtype), Given(cotangent(h), cotangent(h), cotangent(g), scales)


def abstract(*sizes: Any, **options: Any) -> tuple[Projection[jax.ShapeDtypeStruct], Any, Any]:
    """A call of shapes."""
    forms = []

    def operands() -> Any:
        form, z, given = draw(*sizes, **options)
        forms.append(form)
        return form.operands, z, given

    operands, z, given = jax.eval_shape(operands)
    return forms[0].of(operands), z, given


def gradient(form: Projection[jax.Array], z: jax.Array, given: Given, interpret: bool = INTERPRET) -> OfWeights:
    @jax.jit
    def f(operands: Any, z: jax.Array, given: Given) -> OfWeights:
        where = dict(target=target.current(), interpret=interpret)
        return kernel.weights_backward(form.of(operands), z, given, **where)

    return f(form.operands, z, given)


def exact(form: Projection[jax.Array], z: jax.Array, given: Given) -> OfWeights:
    """The gradient in float64, with its scales."""
    z, w = float64(z), float64(form.w)
    (items, size, _), filled = z.shape, np.arange(form.result[0]).reshape(-1, form.padded_rows)[:, : form.rows]
    left, right, gate = (float64(d)[filled.reshape(-1), :, :size].swapaxes(1, 2) for d in given[:3])
    factor = np.ones((items, size)) if form.mask is None else float64(form.mask)
    biases = np.zeros(w.shape[1:]) if form.bias is None else float64(form.bias)
    of = []
    for side, d in enumerate((left, right)):
        p, g = (z @ w[:, 2 * side + k] + biases[2 * side + k] for k in range(2))
        s = 1.0 / (1.0 + np.exp(-g))
        d = np.where(factor[..., None] == 0.0, 0.0, d * factor[..., None])
        of += [d * s * float(given.scales[3]), d * p * s * (1.0 - s) * GATED]
    dw, db = np.stack([np.einsum("bmc,bmh->ch", z, d) for d in of], 1), np.stack([d.sum((0, 1)) for d in of])
    no_bias = form.bias is None and form.b_gate is None
    dgate = np.einsum("bmc,bmg->cg", z, gate)
    return OfWeights(dw, None if no_bias else db, dgate, None if no_bias else gate.sum((0, 1)))


def assert_gradient(found: OfWeights, wanted: OfWeights, tolerance: float) -> None:
    """Of projections and of their gates apart, whose scales differ."""
    for name, x, y in zip(OfWeights._fields, found, wanted, strict=True):
        if y is None:
            assert x is None, name
            continue
        assert x.dtype == jnp.float32 and x.shape == y.shape, name
        if name in ("w", "bias"):
            for i in range(4):
                assert_close(x[..., i, :], y[..., i, :], tolerance)
        else:
            assert_close(x, y, tolerance)


# Products and their sums are exact but for float32's roundings; the operands that were rounded are cotangents of
# projections and of their gates. On a GPU tanh is good to 11 bits.
@needs_jax_011
@pytest.mark.parametrize(
    "items, size, c, h, g, dtype, options",
    [
        (2, 72, 64, 64, 64, "float16", {}),
        (1, 128, 128, 128, 128, "bfloat16", dict(mask=False, biased=False)),
        (1, 128, 128, 64, 64, "float16", dict(biased=False)),
        (3, 70, 64, 128, 128, "bfloat16", dict(mask=False)),
        (6, 13, 128, 64, 128, "float16", dict(rows=3, padded_rows=8)),
        (1, 5, 64, 128, 64, "bfloat16", {}),
        *by_device(
            cpu=[],
            gpu=[
                (n, n, c, h, g, dtype, dict(mask=mask, biased=mask, rows=n, padded_rows=n + -n % 8))
                for n, c, h, g, dtype, mask in (
                    (512, 128, 128, 128, "float16", False),
                    (384, 128, 128, 128, "bfloat16", True),
                    (200, 128, 64, 128, "float16", True),
                    (131, 64, 128, 64, "bfloat16", False),
                )
            ],
        ),
    ],
)
def test_gradient(items, size, c, h, g, dtype, options):
    operands = draw(items, size, c, h, g, dtype, **options)
    assert_gradient(gradient(*operands), exact(*operands), OP[dtype])


@needs_jax_011
def test_ctas_that_share_positions(monkeypatch):
    """Three of a chunk with seven tiles, where the interpreter has one otherwise; and the same bits once more."""
    monkeypatch.setattr(kernel, "num_cores", lambda target, interpret: 4)
    operands = draw(1, 440, 64, 64, 64, "float16")
    assert [chunk.num_ctas for chunk in kernel._Plan.of(operands[0], 4).chunks] == [3, 1]
    found = gradient(*operands)
    assert_gradient(found, exact(*operands), OP["float16"])
    for x, y in zip(found, gradient(*operands), strict=True):
        assert_equal(x, y)


@needs_jax_011
def test_what_is_masked_adds_nothing():
    """Not even 0 times what is not finite."""
    form, z, given = draw(1, 64, 64, 64, 64, "float16")
    masked = (form.mask == 0.0)[:, None]
    left, right = (jnp.where(masked, by, d) for d, by in ((given.left, jnp.inf), (given.right, jnp.nan)))
    found = gradient(form, z, given._replace(left=left, right=right))
    for x, y in zip(found, gradient(form, z, given), strict=True):
        assert_equal(x, y)


@pytest.mark.parametrize("size", [1024, 77, 8])
@pytest.mark.parametrize("h", [64, 128])
def test_chunks_have_all_columns_and_tiles(h, size):
    form, *_ = abstract(8, size, 128, h, 128, "float16")
    plan = kernel._Plan.of(form, 132)
    sources = [source for chunk in plan.chunks for source in chunk.sources]
    sides = [(side, i) for side in ("left", "right") for i in range(0, h, 64)]
    assert sorted(sources) == sorted([*sides, ("gate", 0), ("gate", 64)])
    firsts = np.cumsum([0, *(chunk.num_ctas for chunk in plan.chunks)])
    assert [chunk.first_cta for chunk in plan.chunks] == list(firsts[:-1]) and firsts[-1] == plan.num_ctas <= 132
    assert all(1 <= chunk.num_ctas <= 8 * plan.tiles_of_item for chunk in plan.chunks)


@finds_races
def test_has_no_races():
    with no_races():
        gradient(*draw(1, 640, 64, 64, 64, "float16"))


@without_gpu
@needs_jax_011
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1024, 200, 13])
@pytest.mark.parametrize("c, h, g", [(128, 128, 128), (64, 128, 64), (128, 64, 64)])
@pytest.mark.parametrize("mask", [False, True])
def test_lowers(c, h, g, size, dtype, mask):
    form, *others = abstract(8, size, c, h, g, dtype, mask=mask, biased=mask)
    assert kernel.unsupported(form, gpu()) is None
    with cuda_device("NVIDIA H200", 132):
        traced = jax.jit(lambda *args: gradient(form.of(args[0]), *args[1:], interpret=False)).trace
        text = traced(form.operands, *others).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{MOSAIC_CALL}") == 1


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
    form, *_ = abstract(1, 64, c, h, g, dtype)
    assert message in kernel.unsupported(form, gpu())


def test_refuses_old_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs JAX 0.11 or newer" in kernel.unsupported(abstract(1, 64, 64, 64, 64, "float16")[0], gpu())
