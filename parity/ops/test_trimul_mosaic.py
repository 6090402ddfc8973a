"""Kernels of the triangle update for Hopper GPUs against numpy and XLA, and what all such kernels share."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops, target, trimul
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.mosaic import trimul_project, trimul_project_wide
from pallas_models.kernels.mosaic import trimul_project_parts as parts
from pallas_models.kernels.mosaic.common import interpreter
from pallas_models.kernels.schedules import trimul as schedules
from parity.support import sharing
from parity.support.common import (
    HOPPER,
    MOSAIC,
    MOSAIC_CALL,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    gpu,
    lowered_calls,
    normal,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.sharing import GB
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
both_directions = pytest.mark.parametrize("incoming", [False, True])
needs_jax_011 = pytest.mark.skipif(
    INTERPRET and jax.__version_info__ < (0, 11),
    reason="JAX 0.10 interprets neither what lies past the end of an array nor transposed operands",
)


# The whole update, of sizes that are no whole tiles


@needs_jax_011
@both_directions
@pytest.mark.parametrize(
    "n, c, masked",
    by_device(
        # By Mosaic's projections of few and of many channels and by Triton's, which Mosaic's product follows, too.
        cpu=[(72, 64, False), (70, 64, True), (7, 128, False), (1, 96, True), (67, 192, True), (65, 48, False)],
        gpu=[(n, c, masked) for n in (1, 7, 24, 129, 1000, 1030) for c, masked in ((128, False), (256, True))]
        + [(129, 50, True), (2049, 128, False)],
    ),
)
def test_update_of_any_size(n, c, masked, incoming):
    if n > 2048:
        sharing.needs(9 * GB)
    params = trimul.init(jax.random.key(0), trimul.TriMulConfig(channels=c, hidden=32, gate_after=masked))
    rng = np.random.default_rng(n)
    params["norm"]["bias"] = normal(rng, c)  # of which positions past the end are made, if anything is
    batch = 1 if n >= 1000 else 2
    x, mask = normal(rng, batch, n, n, c), jnp.asarray(rng.integers(0, 2, (batch, n, n)), bool) if masked else None
    f = functools.partial(trimul.trimul, direction="incoming" if incoming else "outgoing")
    out = jax.jit(functools.partial(f, implementation=MOSAIC))(params, x, mask)
    expected = jax.jit(functools.partial(f, implementation="xla", compute_dtype="float32"))(params, x, mask)
    assert_close(out, expected, 1.5e-3)  # four tensors between kernels, rounded to float16


@needs_jax_011
def test_directions_share_the_steps_that_are_alike():
    """A program of both, with its gradient, lowers each such step once."""
    params = trimul.init(jax.random.key(0), trimul.TriMulConfig(channels=64, hidden=64, gate_after=True))

    def both(params, x):
        for direction in ("outgoing", "incoming"):
            x = trimul.trimul(params, x, direction=direction, compute_dtype="bfloat16", implementation=MOSAIC)
        return x.sum()

    x = jnp.ones((1, 64, 64, 64), jnp.bfloat16)
    text = jax.jit(jax.grad(both, argnums=(0, 1))).lower(params, x).as_text()
    found = collections.Counter(re.findall(r"func private @(\w+?)(?:_\d+)?\(", text))
    steps = ("bounds", "project", "output_backward", "project_backward", "weights_backward")
    assert {name: found[name] for name in steps} == dict.fromkeys(steps, 1)


@needs_jax_011
@both_directions
def test_update_channel_by_channel(monkeypatch, incoming):
    """As it is for large N."""
    monkeypatch.setattr(schedules, "_BY_ROWS", 0)
    n = by_device(cpu=64, gpu=1024)
    params = trimul.init(jax.random.key(0), trimul.TriMulConfig(channels=64, hidden=32))
    x = normal(np.random.default_rng(n), 1, n, n, 64)
    f = functools.partial(trimul.trimul, direction="incoming" if incoming else "outgoing")
    out = jax.jit(functools.partial(f, implementation=MOSAIC))(params, x)
    assert_close(
        out, jax.jit(functools.partial(f, implementation="xla", compute_dtype="float32"))(params, x), 1.5e-3
    )


@needs_jax_011
@both_directions
@pytest.mark.parametrize("n, c, by_rows", [(64, 64, False), (13, 64, True), (13, 192, True)])
def test_slices_change_no_bit(monkeypatch, n, c, by_rows, incoming):
    """Groups of hidden channels, and rows, of which the last are computed twice."""
    monkeypatch.setattr(schedules, "_BY_ROWS", n if by_rows else 0)
    h, batch, rng = 64, 2 if by_rows else 1, np.random.default_rng(n)
    shapes = ((c,), (c,), (c, 4, h), (h,), (h,), (c, c), (h, c))
    x = normal(rng, batch, n, n, c, dtype="bfloat16")
    weights = [normal(rng, *shape, scale=shape[0] ** -0.5) for shape in shapes]
    options = dict(direction="incoming" if incoming else "outgoing", gate_after=True, implementation=MOSAIC)
    f = functools.partial(ops.triangle_update, **options)
    # y, left, right and y of 32 channels, the mask, 5 rows of the end
    pairs = batch * ((n + -n % 8) * (n + -n % 64) if by_rows else n * n)
    row = batch * (n + -n % 64) * 2 * (256 + h) + batch * n * c * 4
    low = functools.partial(f, max_temporary_bytes=pairs * 2 * (h + 1) + max(pairs * 2 * 96, 5 * row))
    out, expected = jax.jit(low)(x, *weights), jax.jit(f)(x, *weights)
    if INTERPRET:  # XLA compiles what the interpreter does once more, and rounds a few norms otherwise
        assert_close(out, expected, OP["bfloat16"])
        assert np.mean(np.asarray(out != expected)) < 0.01
    else:
        assert_equal(out, expected)


@needs_jax_011
@pytest.mark.parametrize("module, c", [(trimul_project, 128), (trimul_project, 96), (trimul_project_wide, 192)])
@pytest.mark.parametrize("n", [3, 13, 61, 69])
def test_project_fills_tiles_up_with_zeros(module, c, n):
    """Rows of 8 and columns of 64: what lies beyond N is 0, though a layer norm has a bias."""
    x, mask, *weights = project_operands(2 * n, n, c, 32, c, dtype="float16", biased=False)
    rows, columns = n + -n % 8, n + -n % 64
    form = projection(x, mask, *weights).replace(rows=n, padded=(rows, columns))
    sides, gate = jax.jit(lambda: module.project(form, target=target.current(), interpret=INTERPRET))()
    assert sides.shape == (2 * rows, 64, columns) and gate.shape[::2] == (2 * rows, columns)
    expected, expected_gate = projections(x, mask, *weights)
    sides, gate = (y.reshape(2, rows, -1, columns) for y in (sides, gate))
    filled = jnp.pad(expected.reshape(2, n, -1, n), ((0, 0), (0, rows - n), (0, 0), (0, columns - n)))
    assert_close(sides, filled, 2 * OP["float16"])
    assert not np.any(np.asarray(sides)[np.broadcast_to(np.asarray(filled) == 0, filled.shape)])
    assert_close(gate[:, :n, :c, :n], expected_gate.reshape(2, n, -1, n), 2 * OP["float16"])


PAIR = ((0, None), (0, 0), (None, 0))


@pytest.mark.parametrize("weights", [None, 0], ids=["same-weights", "many-weights"])
@pytest.mark.parametrize("x, mask", PAIR, ids=["x", "x-and-mask", "mask"])
def test_vmap_makes_a_batch_or_several_calls(x, mask, weights):
    shapes = []

    def sums(x, mask, scale, bias):
        shapes.append(x.shape)
        assert bias is None
        return jnp.einsum("bijc,bij,c->bij", x, mask, scale)

    rng = np.random.default_rng(5)
    axes = (x, mask, weights, None)
    sizes = ((2, 4, 4, 3), (2, 4, 4), (3,))
    operands = [
        normal(rng, *(() if axis is None else (5,)), *size) for size, axis in zip(sizes, axes, strict=False)
    ]
    out = jax.vmap(schedules.batchable(sums), axes)(*operands, None)
    assert shapes[-1][0] == (10 if weights is None else 2)
    for i in range(5):
        one = [y if axis is None else y[i] for y, axis in zip(operands, axes, strict=False)]
        assert_close(out[i], sums(*one, None), OP["float32"])


@without_gpu
@pytest.mark.parametrize("axes, loops", [((None, 0), 0), ((0, None), 1), ((0, 0), 1)], ids=["x", "params", "both"])
def test_update_lowers_under_vmap(axes, loops):
    params = trimul.init(jax.random.key(0), trimul.TriMulConfig(channels=128, hidden=128))
    x = jax.ShapeDtypeStruct((1, 128, 128, 128), "float32")
    f = functools.partial(trimul.trimul, direction="outgoing", implementation="mosaic")
    one = lowered_calls(f, params, x)
    several = [
        jax.tree.map(lambda w, axis=axis: jax.ShapeDtypeStruct((3, *w.shape)[axis is None :], w.dtype), y)
        for axis, y in zip(axes, (params, x), strict=True)
    ]
    with cuda_device(*HOPPER):
        text = jax.jit(jax.vmap(f, axes)).trace(*several).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{MOSAIC_CALL}") == one and text.count("stablehlo.while") == loops


# Projections: all weights in shared memory, or in turns, where they do not fit

both_projects = pytest.mark.parametrize("module", [trimul_project, trimul_project_wide], ids=["narrow", "wide"])


@jax.jit
def projections(x, mask, scale, shift, w, bias, w_gate, b_gate):
    """As the kernel's, in float32 but for what it rounds: the normalised x."""
    x = x.astype(jnp.float32)
    d = x - x.mean(-1, keepdims=True)
    z = (d * jax.lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5) * scale + shift).astype(w.dtype)
    z, w, w_gate = (a.astype(jnp.float32) for a in (z, w, w_gate))
    y = jnp.einsum("bmc,cih->bihm", z, w, precision="highest")
    gate = jnp.einsum("bmc,cg->bgm", z, w_gate, precision="highest")
    if bias is not None:
        y, gate = y + bias[..., None], gate + b_gate[:, None]
    sides = y[:, ::2] * jax.nn.sigmoid(y[:, 1::2])
    if mask is not None:
        factor = mask.astype(jnp.float32)[:, None, None]
        sides = jnp.where(factor == 0.0, 0.0, factor * sides)
    return sides.reshape(len(x), -1, x.shape[1]), jax.nn.sigmoid(gate)


def projection(*operands):
    return Projection(
        **dict(zip(Projection.OPERANDS, operands, strict=True)), epsilon=1e-5, precision=jax.lax.Precision.DEFAULT
    )


def project_operands(batch, m, c, h, g, *, dtype, x_dtype="float32", masked=True, biased=True):
    rng = np.random.default_rng(m + c)
    mask = rng.uniform(size=(batch, m)) * rng.integers(0, 2, (batch, m))
    return (
        normal(rng, batch, m, c, dtype=x_dtype, scale=2.0, shift=1.0),
        jnp.asarray(mask, jnp.float32) if masked else None,
        normal(rng, c, shift=1.0),
        normal(rng, c),
        normal(rng, c, 4, h, dtype=dtype, scale=c**-0.5),
        normal(rng, 4, h) if biased else None,
        normal(rng, c, g, dtype=dtype, scale=c**-0.5),
        normal(rng, g) if biased else None,
    )


def program(module, interpret=INTERPRET):
    runs = dict(target=target.current(), interpret=interpret)
    return jax.jit(lambda *operands: module.project(projection(*operands), **runs))


def project(module, *operands, interpret=INTERPRET):
    return program(module, interpret)(*operands)


SIZES = {
    trimul_project: by_device(
        cpu=[(2, 192, 64, 32, 64), (1, 64, 128, 128, 128), (1, 128, 96, 32, 96)],
        gpu=[(2, 4096, 64, 32, 64), (1, 147456, 128, 128, 128), (1, 65536, 96, 64, 96)],
    ),
    trimul_project_wide: by_device(
        cpu=[(2, 128, 192, 32, 64), (1, 384, 64, 64, 128), (1, 128, 128, 64, 32)],
        gpu=[(2, 4096, 192, 32, 64), (1, 147456, 384, 128, 384), (1, 65536, 256, 128, 128)],
    ),
}


@pytest.mark.covering(1)
@both_projects
@pytest.mark.parametrize(
    "case, options",
    [
        (0, dict(dtype="float16")),
        (1, dict(dtype="bfloat16", x_dtype="bfloat16", biased=False)),
        (1, dict(dtype="float16")),
        (2, dict(dtype="float16", masked=False)),
    ],
)
def test_project(module, case, options):
    sizes = SIZES[module][case]
    operands = project_operands(*sizes, **options)
    sides, gate = project(module, *operands)
    expected_sides, expected_gate = projections(*operands)
    dtype = options["dtype"]
    assert sides.dtype == gate.dtype == dtype
    # The GPU's tanh is good to 11 bits.
    assert_close(sides, expected_sides, 2 * OP[dtype])
    assert_close(gate[:, : sizes[-1]], expected_gate, 2 * OP[dtype])


@needs_jax_011
def test_wide_project_of_a_ragged_size():
    operands = project_operands(1, 192, 64, 32, 64, dtype="float16")
    for out, expected in zip(project(trimul_project_wide, *operands), projections(*operands), strict=True):
        assert_close(out[:, : expected.shape[1]], expected, 2 * OP["float16"])


def test_items_and_mask_of_filled_up_rows():
    """Two matrices of 3 rows of 5 pairs, of which results have 8 rows: the last ones are masked."""
    x, mask, *weights = project_operands(6, 5, 64, 32, 64, dtype="float16")
    mask = mask + 1.0
    form = projection(x, mask, *weights).replace(rows=3, padded=(8, 64))
    tiles = parts.Tiles.of(form)
    assert (tiles.count, tiles.per_item) == (16, 1)
    sources = [int(tiles.source(jnp.int32(i))) for i in range(16)]
    assert sources == [0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    for given, expected in ((mask, mask), (None, np.ones((6, 5)))):
        filled = np.zeros((2, 8, 64))
        filled[:, :3, :5] = np.asarray(expected).reshape(2, 3, 5)
        assert_equal(parts.whole_mask(form.replace(mask=given)), filled.reshape(16, 64))


@both_projects
def test_project_of_what_is_masked(module):
    x, mask, *weights = project_operands(1, 128, 64, 32, 64, dtype="float16")
    infinite = jnp.where(mask[..., None] == 0.0, jnp.inf, x)
    f = program(module)
    assert_equal(f(infinite, mask, *weights)[0], f(x, mask, *weights)[0])


@both_projects
@finds_races
def test_project_has_no_races(module):
    with no_races():
        project(module, *project_operands(1, 512, 128, 32, 64, dtype="float16"))


@without_gpu
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 does not store what it transposes")
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m", [4096, 1030, 5])
@pytest.mark.parametrize(
    "module, c, h",
    [(trimul_project, 128, 128), (trimul_project, 96, 32), (trimul_project_wide, 384, 96)],
)
def test_project_lowers(module, c, h, m, x_dtype):
    operands = jax.eval_shape(lambda: project_operands(2, m, c, h, c, dtype="float16", x_dtype=x_dtype))
    assert module.unsupported(projection(*operands), gpu()) is None
    f = functools.partial(project, module, interpret=False)
    assert lowered_calls(f, *operands) == 1


@pytest.mark.parametrize("kib, columns", [(224, None), (227, 32), (237, 64)])
def test_narrow_project_has_the_memory_of_its_target(kib, columns):
    """Weights and positions take 213 KiB, and each column that leaves three warpgroups 384 bytes."""
    operands = jax.eval_shape(lambda: project_operands(1, 128, 128, 128, 128, dtype="float16"))
    form, hopper = projection(*operands), gpu(shared_memory=kib * 1024)
    buffers = trimul_project._buffers(form, hopper)
    assert (buffers and buffers["out_smem"].shape[1]) == columns
    if jax.__version_info__ >= (0, 11):
        assert ("does not fit" in (trimul_project.unsupported(form, hopper) or "")) == (columns is None)
    assert trimul_project._buffers(form, target.ANY)["out_smem"].shape[1] == 32  # as Hopper GPUs have


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 does not store what it transposes")
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("c", [64, 96, 128])
def test_narrow_project_takes_what_fits(c, x_dtype):
    def lowers(h):
        operands = jax.eval_shape(lambda: project_operands(2, 128, c, h, 64, dtype="float16", x_dtype=x_dtype))
        if trimul_project.unsupported(projection(*operands), gpu()):
            return False
        return lowered_calls(functools.partial(project, trimul_project, interpret=False), *operands) == 1

    fitting = [lowers(h) for h in range(32, 480, 32)]
    assert fitting[0] and not fitting[-1] and fitting == sorted(fitting, reverse=True)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 is refused first")
@pytest.mark.parametrize(
    "module, m, c, h, dtype, message",
    [
        (trimul_project, 128, 128, 64, "float32", "takes weights in float16 and bfloat16, not float32"),
        (trimul_project, 128, 160, 64, "float16", "takes 64, 96 or 128 channels"),
        (trimul_project, 128, 128, 48, "float16", "hidden channels in multiples of 32, not 128 and 48"),
        (trimul_project, 128, 128, 256, "float16", "does not fit weights of 128 channels for 512 projections"),
        (trimul_project_wide, 128, 256, 64, "float32", "takes weights in float16 and bfloat16, not float32"),
        (trimul_project_wide, 128, 448, 64, "float16", "takes up to 384 channels in multiples of 64"),
        (trimul_project_wide, 128, 160, 64, "float16", "not 160 and 64"),
        (trimul_project_wide, 128, 256, 48, "float16", "hidden channels in multiples of 32, not 256 and 48"),
    ],
)
def test_project_refuses(module, m, c, h, dtype, message):
    operands = jax.eval_shape(lambda: project_operands(1, m, c, h, 128, dtype=dtype))
    assert message in module.unsupported(projection(*operands), gpu())


# What all kernels share


def test_interpreter_wants_threads(monkeypatch):
    monkeypatch.setattr(interpreter, "cores", lambda: 2)
    interpreter.interpreter_params()  # the suite has set PJRT_NPROC
    monkeypatch.delenv("PJRT_NPROC")
    with pytest.raises(RuntimeError, match=r"with 2 cores .* PJRT_NPROC to 16 or more"):
        interpreter.interpreter_params()
    monkeypatch.setattr(interpreter, "cores", lambda: 16)
    interpreter.interpreter_params()


def test_interpreter_of_jax_010_wants_whole_tiles(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    interpreter.check_interpreted_sizes(m=(128, 64))
    with pytest.raises(NotImplementedError, match=r"m=72 must be a multiple of the tile of 64; JAX 0\.11"):
        interpreter.check_interpreted_sizes(n=(64, 64), m=(72, 64))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    interpreter.check_interpreted_sizes(m=(72, 64))
