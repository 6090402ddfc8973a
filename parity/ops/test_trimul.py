"""`trimul` and `ops.triangle_update` against torch: sizes, masks, forms of the update, precisions, gradients."""

import functools
import itertools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

import weights
from pallas_models import ops, target, trimul
from pallas_models.kernels.common.channel_exchange import ByChannels
from pallas_models.kernels.forms.trimul import Output, Product, Projection
from pallas_models.kernels.mosaic import trimul_product as mosaic_product
from pallas_models.kernels.schedules import trimul as schedules
from pallas_models.kernels.schedules import trimul_slices
from pallas_models.kernels.schedules.trimul import Config
from pallas_models.kernels.triton import trimul_bounds, trimul_output, trimul_product, trimul_project
from pallas_models.ops import _half_precision, _trimul_reference
from parity.support import sharing
from parity.support.common import (
    KERNEL,
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    array,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    float64,
    normal,
)
from parity.support.sharing import GB
from parity.support.tolerances import CHAIN, DEEP, OP, ROUNDED, SHORT

X, MASK = normal(np.random.default_rng(9), 1, 5, 5, 10), np.ones((1, 5, 5), bool)
both_directions = pytest.mark.parametrize("direction", ["outgoing", "incoming"])
every_form = pytest.mark.parametrize(
    "family, bias",
    [("lucidrains", False), ("lucidrains", True), ("openfold", True), ("boltz", False)],
)


def module_and_params(torch_trimul, family, channels, hidden, direction="outgoing", bias=False, seed=0):
    """A torch module with random parameters in float32, and the same parameters for `trimul`."""
    import torch

    module = torch_trimul.FAMILIES[family](channels, hidden, direction, bias)
    torch_trimul.draw_(module, torch.Generator().manual_seed(seed))
    return module, weights.load_trimul(module.state_dict(), direction=direction)


def random_params(config: trimul.TriMulConfig, seed: int = 0) -> trimul.Params:
    """Parameters as the challenge draws them, without torch."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(trimul.init, config=config), jax.random.key(0))
    return jax.tree.map(lambda p: normal(rng, *p.shape, scale=p.shape[0] ** -0.5 if p.ndim == 2 else 1.0), shapes)


@functools.cache
def update(**options):
    """`trimul` with these options, compiled."""
    return jax.jit(functools.partial(trimul.trimul, **options))


def pairs(*shape: int, distribution: str = "normal", seed: int = 0) -> jax.Array:
    """x in float32; the largest, a billion elements, drawn on the device."""
    rng = np.random.default_rng(seed)
    if distribution == "normal":
        return normal(rng, *shape)
    if math.prod(shape) > 2**24:
        return 2.0 * jax.random.cauchy(jax.random.key(seed), shape)
    return array(2.0 * rng.standard_cauchy(shape), "float32")


def pair_mask(kind: str, *shape: int) -> jax.Array | None:
    if kind == "none":
        return None
    return jnp.asarray(np.random.default_rng(1).integers(0, 2, shape) * (kind == "random"), bool)


def in_torch(module, x, mask=None, dtype="float32"):
    """The output of a torch module on arrays, an array on the same device."""
    import torch

    jax.block_until_ready((x, mask))  # JAX hands over no array that memory was too small for
    with torch.no_grad():
        x = torch.from_dlpack(x).to(getattr(torch, dtype))
        mask = None if mask is None else torch.from_dlpack(mask.astype(jnp.float32)).to(x)
        out = module.to(x)(x, mask)
    return out.cpu().numpy() if dtype == "float64" else jax.dlpack.from_dlpack(out.contiguous())


# The challenge: every element within rtol = atol = 2e-2 of torch in float32, computed in half precision


def challenge_cases() -> list[tuple]:
    """Every N with every C; masks, distributions and batches take turns."""
    sizes, channels = by_device(
        cpu=[(1, 7, 24), (8, 24)], gpu=[(32, 64, 128, 256, 768, 1024), (128, 256, 384, 768)]
    )
    return [
        (
            2 if n <= 256 and (i + j) % 2 else 1,
            n,
            c,
            ("none", "random", "zero")[(i + j) % 3],
            ("normal", "cauchy")[(i + j // 2) % 2],
        )
        for i, n in enumerate(sizes)
        for j, c in enumerate(channels)
    ]


@jax.jit
def errors(out: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest error of an element as a part of its bound, and the error of the whole, in norm."""
    error = jnp.abs(out - expected)
    allowed = 2e-2 + 2e-2 * jnp.abs(expected)
    return jnp.max(error / allowed), jnp.linalg.norm(error) / jnp.linalg.norm(expected)


@pytest.mark.parametrize("batch, n, c, masked, distribution", challenge_cases())
def test_challenge(torch_trimul, record_property, implementation, batch, n, c, masked, distribution):
    if n >= 768:
        sharing.needs(9 * GB)
    module, params = module_and_params(torch_trimul, "lucidrains", c, 128 if ON_GPU else 8)
    x, mask = pairs(batch, n, n, c, distribution=distribution), pair_mask(masked, batch, n, n)
    out = update(direction="outgoing", implementation=implementation)(params, x, mask)
    assert out.dtype == jnp.float32
    worst, relative = errors(out, in_torch(module, x, mask))
    record_property("relative error", f"{relative:.2e}")
    assert worst < 1.0  # so it is not for NaN
    assert relative < 1e-3


# Forms of the update, in float32 end to end


@pytest.mark.covering(1)
@both_directions
@every_form
def test_float32_end_to_end(torch_trimul, implementation, direction, family, bias):
    small = (75, 128, 128) if direction == "outgoing" else (37, 96, 50)
    for n, c, h in by_device(cpu=[(9, 12, 12)], gpu=[small, (256, 384, 128)]):
        module, params = module_and_params(torch_trimul, family, c, h, direction, bias)
        x, mask = pairs(2, n, n, c), pair_mask("random", 2, n, n)
        f = update(direction=direction, compute_dtype="float32", implementation=implementation)
        assert_close(f(params, x, mask), in_torch(module, x, mask, "float64"), DEEP)


@pytest.mark.parametrize(
    "x_dtype, compute_dtype, tolerance",
    [
        ("float32", "float16", 1e-3),
        ("float32", "bfloat16", 8e-3),
        ("float16", "float32", 4e-4),  # the rounding of x's dtype
        ("bfloat16", "float16", 3e-3),
    ],
)
def test_dtypes(torch_trimul, implementation, x_dtype, compute_dtype, tolerance):
    c, h, n = by_device(cpu=(12, 8, 9), gpu=(128, 128, 96))
    module, params = module_and_params(torch_trimul, "openfold", c, h, bias=True)
    x = pairs(1, n, n, c).astype(x_dtype)
    f = update(direction="outgoing", compute_dtype=compute_dtype, implementation=implementation)
    out = f(params, x)
    assert out.dtype == x_dtype
    assert_close(out, in_torch(module, x.astype("float32"), dtype="float64"), tolerance)


def test_matrices_in_the_dtype_of_the_computation(implementation):
    params, x = random_params(trimul.TriMulConfig(channels=8, hidden=4, use_bias=True)), pairs(1, 5, 5, 8)
    half = jax.tree.map(lambda p: p.astype("float16") if p.ndim == 2 else p, params)
    f = update(direction="outgoing", implementation=implementation)
    assert_equal(f(half, x), f(params, x))


def test_out_dtype(implementation):
    params, x = random_params(trimul.TriMulConfig(channels=8, hidden=4)), pairs(5, 5, 8)
    f = functools.partial(triangle_update, params, x.astype("bfloat16"), implementation=implementation)
    out = f(out_dtype="float32")
    assert out.dtype == jnp.float32
    assert_equal(out.astype("bfloat16"), f())


@pytest.mark.covering(2)
@pytest.mark.parametrize("most", [None, 60_000], ids=["at once", "in slices"])
@both_directions
def test_residual(implementation, direction, most):
    """x is added before the one rounding, in the forward pass of a gradient too."""
    params, x = random_params(trimul.TriMulConfig(channels=16, hidden=32)), pairs(9, 9, 16).astype("bfloat16")
    options = dict(direction=direction, max_temporary_bytes=most, implementation=implementation)
    f = functools.partial(triangle_update, params, compute_dtype="float32", **options)
    apart = f(x, out_dtype="float32") + x.astype("float32")
    added = functools.partial(f, residual=True)
    assert_close(added(x, out_dtype="float32"), apart, DEEP)
    assert_close(added(x), apart, ROUNDED["bfloat16"])
    assert_close(jax.vjp(functools.partial(added, out_dtype="float32"), x)[0], apart, DEEP)


def test_residual_of_the_module(implementation):
    params, x = random_params(trimul.TriMulConfig(channels=8, hidden=4, gate_after=True)), pairs(2, 5, 5, 8)
    plain, added = (update(direction="incoming", residual=r, implementation=implementation) for r in (False, True))
    assert_close(added(params, x), plain(params, x) + x, OP["float16"])


def triangle_update(params, x, *, direction="outgoing", **options):
    """`ops.triangle_update` on parameters of the form without biases and the gate before."""
    norm, out_norm = params["norm"], params["out_norm"]
    return ops.triangle_update(
        x,
        norm["scale"],
        norm["bias"],
        params["projections"]["kernel"].reshape(x.shape[-1], 4, -1),
        out_norm["scale"],
        out_norm["bias"],
        params["gate_before"]["kernel"],
        params["out"]["kernel"],
        direction=direction,
        **options,
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "c, project, product, output",
    [
        # Several steps over k and channels, ragged all; wider blocks than there is work; tiles one after another.
        (40, (16, 16, 16), (16, 32, 16), (16, 16, 1)),
        (40, (64, 64, 32), (64, 16, 32), (32, 64, 4)),
        (64, (32, 32, 16), (32, 64, 64), (64, 16, 2)),
    ],
    ids=["small", "large", "narrow"],
)
@both_directions
def test_tile_configs(direction, c, project, product, output):
    params, x = random_params(trimul.TriMulConfig(channels=c, hidden=21)), pairs(2, 21, 21, c)
    tiles, warps = ("block_m", "block_n", "block_k"), dict(num_warps=4, num_stages=2)
    config = Config(
        project=trimul_project.Config(**dict(zip(tiles, project, strict=True)), **warps),
        product=trimul_product.Config(**dict(zip(tiles, product, strict=True)), **warps),
        output=trimul_output.Config(
            block_m=output[0], block_n=output[1], programs_per_core=output[2], num_warps=4, num_stages=2
        ),
    )
    f = functools.partial(triangle_update, direction=direction, compute_dtype="float32")
    out = jax.jit(functools.partial(f, config=config, implementation=KERNEL))(params, x)
    assert_close(out, jax.jit(functools.partial(f, implementation="xla"))(params, x), CHAIN)


@hypothesis.settings(max_examples=3)
@hypothesis.given(
    st.integers(1, 3), st.integers(1, 12), st.integers(2, 40), st.integers(2, 40), st.booleans(), st.booleans()
)
def test_any_size(batch, n, c, h, gate_after, outgoing):
    config = trimul.TriMulConfig(channels=c, hidden=h, gate_after=gate_after, use_bias=True, epsilon=0.1)
    params, x, mask = random_params(config, seed=n), pairs(batch, n, n, c), pair_mask("random", batch, n, n)
    # A large epsilon keeps two nearly equal channels from amplifying rounding.
    options = dict(epsilon=0.1, direction="outgoing" if outgoing else "incoming", compute_dtype=jnp.float32)
    out = update(implementation=KERNEL, **options)(params, x, mask)
    assert_close(out, update(implementation="xla", **options)(params, x, mask), CHAIN)


def test_leading_axes(implementation):
    params, x = random_params(trimul.TriMulConfig(channels=8, hidden=4)), pairs(2, 3, 5, 5, 8)
    mask = pair_mask("random", 2, 3, 5, 5)
    f = update(direction="incoming", implementation=implementation)
    out = f(params, x, mask)
    assert out.shape == x.shape
    assert_close(f(params, x[1, 2], mask[1, 2]), out[1, 2], 2e-4)


def test_epsilon(torch_trimul, implementation):
    module, params = module_and_params(torch_trimul, "boltz", 12, 12)
    module.norm_in.eps = module.norm_out.eps = 0.5
    x = pairs(1, 7, 7, 12)
    f = update(direction="outgoing", epsilon=0.5, compute_dtype="float32", implementation=implementation)
    assert_close(f(params, x), in_torch(module, x, dtype="float64"), DEEP)


# Masks


def test_masks_of_every_kind(torch_trimul, implementation):
    module, params = module_and_params(torch_trimul, "lucidrains", 12, 8, "incoming")
    x, mask = pairs(2, 9, 9, 12), pair_mask("random", 2, 9, 9)
    f = update(direction="incoming", implementation=implementation)
    out = f(params, x, mask)
    assert_close(out, in_torch(module, x, mask), 1e-3)
    for dtype in ("int32", "float16"):
        assert_equal(f(params, x, mask.astype(dtype)), out)
    factors = np.random.default_rng(5).uniform(size=mask.shape).astype(np.float32)
    weighted = jnp.asarray(factors * np.asarray(mask))  # other than 0 and 1
    assert_close(f(params, x, weighted), in_torch(module, x, weighted), 1e-3)
    assert_equal(f(params, x, jnp.ones_like(mask)), f(params, x))


@both_directions
def test_what_is_masked_does_not_matter(implementation, direction):
    # A masked pair has an update of its own, and no part in the updates of others: not even by 0 times infinity.
    params = random_params(trimul.TriMulConfig(channels=12, hidden=8, gate_after=True))
    x, mask = pairs(1, 9, 9, 12), pair_mask("random", 1, 9, 9)
    f = update(direction=direction, implementation=implementation)
    expected = f(params, x, mask)[mask]
    for padding in (jnp.nan, jnp.inf, 1e30):
        assert_equal(f(params, jnp.where(mask[..., None], x, padding), mask)[mask], expected)


@pytest.mark.parametrize("gate_after", [False, True])
def test_nothing_but_padding(implementation, gate_after):
    params = random_params(trimul.TriMulConfig(channels=12, hidden=8, gate_after=gate_after))
    x, mask = pairs(2, 7, 7, 12), jnp.asarray([False, True])[:, None, None] & jnp.ones((7, 7), bool)
    f = update(direction="outgoing", implementation=implementation)
    out = f(params, x, jnp.zeros_like(mask))
    assert np.all(np.isfinite(out))
    # An item of a batch that is all padding is as it is in one that is nothing else, and leaves others alone.
    assert_equal(f(params, x, mask)[0], out[0])
    assert_equal(f(params, x.at[0].set(3.0), mask)[1], f(params, x, mask)[1])


# Range: sums over k leave float16's


def test_range(implementation):
    c, h, n = by_device(cpu=(16, 8, 20), gpu=(128, 128, 512))
    params, x = random_params(trimul.TriMulConfig(channels=c, hidden=h)), pairs(1, n, n, c, distribution="cauchy")
    params["norm"]["bias"] += 3.0  # left and right of one sign, mostly: y grows with N, not with its root
    f = update(direction="outgoing", implementation=implementation)
    exact = update(direction="outgoing", implementation=implementation, compute_dtype="float32")
    kernel = params["projections"]["kernel"]
    for scale in (1e-4, 1e-2, 1.0, 8.0):
        params["projections"]["kernel"] = kernel * scale
        assert_close(f(params, x), exact(params, x), 3e-3)


def large_sides(norm, mask=None):
    """Parameters, x and mask that make left and right as large as is wanted.

    The norm of x is `norm` times as large; its gates are not, or they would be 0 or 1 by the last bit of a weight.
    The mask is 0 and `mask`.
    """
    params = random_params(trimul.TriMulConfig(channels=16, hidden=16))
    kernel = params["projections"]["kernel"].reshape(16, 4, 16)
    params["projections"]["kernel"] = kernel.at[:, 1::2].set(0.0).reshape(16, 64)
    params["gate_before"]["kernel"] *= 0.0
    params["norm"] = {name: p * norm for name, p in params["norm"].items()}
    return params, pairs(1, 16, 16, 16), None if mask is None else mask * pair_mask("random", 1, 16, 16)


HALF_PRECISION = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": CHAIN}


@pytest.mark.covering(2)
@pytest.mark.parametrize("norm, mask", [(200.0, None), (1000.0, None), (1.0, 300.0), (1e-3, 1e-3)])
@pytest.mark.parametrize(
    "direction, compute_dtype", [("outgoing", "float16"), ("incoming", "bfloat16"), ("incoming", "float32")]
)
def test_sums_beyond_half_precision(implementation, direction, compute_dtype, norm, mask):
    # Left and right grow with the scale of the norm and with the mask, their products with the square of both.
    operands = large_sides(norm, mask)
    out = update(direction=direction, implementation=implementation, compute_dtype=compute_dtype)(*operands)
    exact = update(direction=direction, implementation="xla", compute_dtype="float32")(*operands)
    assert_close(out, exact, HALF_PRECISION[compute_dtype])


@pytest.mark.parametrize("norm, mask", [(1000.0, 300.0), (30.0, 5000.0), (1.0, 1e-12), (0.0, 1.0)])
@pytest.mark.parametrize("compute_dtype", HALF_PRECISION)
def test_left_and_right_beyond_half_precision(compute_dtype, norm, mask):
    # Epsilon is nothing beside the larger sums, all beside the least: then the norm of the sums is its bias.
    operands = large_sides(norm, mask)
    out = update(direction="outgoing", implementation=KERNEL, compute_dtype=compute_dtype)(*operands)
    exact = update(direction="outgoing", implementation="xla", compute_dtype="float32")(*operands)
    assert_close(out, exact, HALF_PRECISION[compute_dtype])


def test_weights_that_the_norm_leaves_out(implementation):
    # What a norm takes by 0 makes no sum larger, whatever its weights: none is scaled down for it.
    params, x, mask = large_sides(1.0, 1.0)
    x = x.at[..., 3].add(9.0)  # of one sign once normalised: no sum is a small difference
    params["norm"] = {"scale": jnp.zeros(16).at[3].set(0.5), "bias": jnp.zeros(16)}
    kernel = params["projections"]["kernel"]
    params["projections"]["kernel"] = (kernel * 4096.0).at[3].set(kernel[3])
    out = update(direction="outgoing", implementation=implementation, epsilon=1e-12)(params, x, mask)
    exact = update(direction="outgoing", implementation="xla", compute_dtype="float32", epsilon=1e-12)
    assert_close(out, exact(params, x, mask), HALF_PRECISION["float16"])


@pytest.mark.parametrize("c, h, largest, programs", [(16, 8, 0, 32), (200, 70, 65537, 8), (130, 300, 200000, 8)])
@pytest.mark.parametrize("masked", [True, False])
def test_bounds_are_those_of_the_reference(monkeypatch, c, h, largest, programs, masked):
    monkeypatch.setattr(trimul_bounds, "_MASK_PROGRAMS", programs)
    rng = np.random.default_rng(c)
    mask = normal(rng, 200001).at[largest].set(-7.0) if masked else None
    operands = mask, *(normal(rng, *shape) for shape in ((c,), (c,), (c, 4, h), (4, h)))
    bounds = jax.jit(functools.partial(trimul_bounds.bounds, interpret=not ON_GPU))(*operands)
    assert_close(jnp.max(bounds, axis=0) / _trimul_reference.bounds(*operands), np.ones(5), SHORT)


def sums_over_k(direction, sides, *, pieces=(1, 1), factor=1.0, config=None):
    """The Triton kernel's, for two channels of each side."""
    form = Product(
        sides=sides,
        channels=2,
        transpose_left=direction == "incoming",
        transpose_right=direction == "outgoing",
        factor=factor,
        precision=jax.lax.Precision.DEFAULT,
        pieces=pieces,
    )
    return trimul_product.product(form, config=config, target=target.current(), interpret=not ON_GPU)


@both_directions
def test_product_of_pieces(direction):
    """Matrices in pieces, as they come from other devices, and tiles that have to divide those."""
    pieces, tiles = (2, 4), dict(block_m=16, block_n=16, num_warps=4, num_stages=2)
    f = functools.partial(sums_over_k, direction, config=trimul_product.Config(**tiles, block_k=16))
    in_pieces = ByChannels(names=(), grid=pieces).pieces
    sides = normal(np.random.default_rng(0), 2, 6, 64, 64, dtype="float16")
    out = jax.jit(functools.partial(f, pieces=pieces))(in_pieces(sides))
    assert_equal(out, in_pieces(jax.jit(f)(sides)))
    with pytest.raises(ValueError, match=r"block_k=32.* has tiles that do not divide 32 rows and 16 columns"):
        f(in_pieces(sides), pieces=pieces, config=trimul_product.Config(**tiles, block_k=32))


@both_directions
def test_product_has_no_bounds_of_its_own(direction):
    sides = jnp.full((1, 4, 16, 16), 100.0, "float16").at[0, 1].set(-100.0)
    f = functools.partial(sums_over_k, direction)
    out = jax.jit(f)(sides)
    assert np.all(out[0, 0] == jnp.inf) and np.all(out[0, 1] == -jnp.inf)
    out = jax.jit(functools.partial(f, factor=2.0**-4))(sides)
    assert np.all(out[0, 0] == 1e4) and np.all(out[0, 1] == -1e4)


@pytest.mark.parametrize("compute_dtype", HALF_PRECISION)
@pytest.mark.parametrize("norm", [3e3, 1e5, 1e10, 1e19, 1e30, 3e38, jnp.nan])
def test_no_number_is_wrong(compute_dtype, norm):
    # Beside large sums epsilon is nothing: the norm takes out what they have grown by.
    exact = float64(update(direction="outgoing", implementation="xla", compute_dtype="float32")(*large_sides(1e3)))
    operands = large_sides(norm)
    out = update(direction="outgoing", implementation=KERNEL, compute_dtype=compute_dtype)(*operands)
    out = float64(out)
    finite = np.isfinite(out)
    assert np.all(np.abs(out - exact)[finite] <= 0.05 * np.std(exact))
    if norm <= (3e3 if compute_dtype == "float16" else 1e10):
        assert np.all(finite)
    if norm != norm or norm >= 3e38:
        assert not np.any(finite)


def test_a_mask_that_is_not_finite_spoils_its_own_sums_alone(implementation):
    params, x, mask = large_sides(1.0, 1.0)
    f = update(direction="outgoing", implementation=implementation)
    out, expected = f(params, x, mask.at[0, 3, 5].set(jnp.inf)), f(params, x, mask)
    untouched = np.ones((16, 16), bool)
    untouched[3] = untouched[:, 3] = False
    assert_equal(out[0][untouched], expected[0][untouched])
    assert not np.any(np.isfinite(out[0][~untouched]))


# Sizes beyond 2^31 elements


@functools.partial(jax.jit, static_argnames="piece")
def rows_in_float32(params, x, rows, piece):
    """Some rows i of the outgoing update of x (N, N, C) for all j, `piece` of them at a time."""
    hidden = params["out_norm"]["scale"].shape[0]
    kernel = params["projections"]["kernel"].reshape(x.shape[-1], 4, hidden)
    dot = functools.partial(jnp.matmul, precision="highest")

    def normed(y, norm):
        d = y.astype(jnp.float32) - jnp.mean(y.astype(jnp.float32), axis=-1, keepdims=True)
        return d * jax.lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]

    def side(x, first):
        z = normed(x, params["norm"])
        return dot(z, kernel[:, first]) * jax.nn.sigmoid(dot(z, kernel[:, first + 1]))

    left = side(x[rows], 0)

    def sums(x):
        return jnp.einsum("rkh,jkh->rjh", left, side(x, 2), precision="highest")

    y = jax.lax.map(sums, x.reshape(-1, piece, *x.shape[1:])).swapaxes(0, 1).reshape(*x[rows].shape[:2], hidden)
    gate = jax.nn.sigmoid(dot(normed(x[rows], params["norm"]), params["gate_before"]["kernel"]))
    return dot(normed(y, params["out_norm"]) * gate, params["out"]["kernel"])


def test_sampled_rows(implementation):
    if ON_GPU and implementation == "xla":
        pytest.skip("XLA holds all projections in float32")
    n, c, piece = by_device(cpu=(24, 8, 8), gpu=(3072, 128, 64))  # takes 12 GB
    params = random_params(trimul.TriMulConfig(channels=c, hidden=c))
    x = jax.random.normal(jax.random.key(0), (n, n, c), jnp.bfloat16)
    out = update(direction="outgoing", compute_dtype="bfloat16", implementation=implementation)(params, x)
    rows = jnp.asarray([0, 1, n // 2 - 1, n // 2, n - 1])
    assert_close(out[rows], rows_in_float32(params, x, rows, piece), 1.5e-2)


# Compiled by ptxas for sm_80 and sm_89: channels, hidden channels, gate after the product, stages, bytes.
SHARED_MEMORY = [
    (128, 128, True, 1, 49_152),
    (128, 128, True, 3, 81_920),
    (128, 128, False, 1, 49_152),
    (128, 128, False, 2, 81_920),
    (128, 128, False, 3, 114_688),
    (64, 64, True, 3, 32_768),
    (64, 64, False, 3, 49_152),
]


@pytest.mark.parametrize("c, h, gate_after, num_stages, taken", SHARED_MEMORY)
def test_the_end_takes_the_shared_memory_that_was_thought(c, h, gate_after, num_stages, taken):
    config = trimul_output.Config(block_m=64, block_n=64, programs_per_core=2, num_warps=4, num_stages=num_stages)
    assert trimul_output.shared_memory(config, h, c, "bfloat16", gate_after=gate_after) == taken


# Projections in several blocks of columns


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("c, kernels", [(16, 2), (32, 2), (64, 1), (128, 1)])
def test_project_every_block_of_columns(c, kernels, num_warps, num_stages):
    """4 blocks of left and right: of few channels each is a program's own, as ptxas mixes up a loop's."""
    b, m, h, rng = 2, 576, 64, np.random.default_rng(c)
    form = Projection(
        x=normal(rng, b, m, c),
        mask=jnp.asarray(rng.integers(0, 2, (b, m)), jnp.float16),
        norm_scale=normal(rng, c),
        norm_bias=normal(rng, c),
        w=normal(rng, c, 4, h, scale=c**-0.5, dtype="float16"),
        bias=None,
        w_gate=normal(rng, c, h, scale=c**-0.5, dtype="float16"),
        b_gate=None,
        epsilon=1e-5,
        precision=jax.lax.Precision.DEFAULT,
    )
    config = trimul_project.Config(block_m=64, block_n=64, block_k=64, num_warps=num_warps, num_stages=num_stages)
    f = jax.jit(lambda: trimul_project.project(form, config=config, target=target.current(), interpret=not ON_GPU))
    assert str(jax.make_jaxpr(f)()).count("pallas_call[") == kernels
    x = float64(form.x)
    d = x - x.mean(-1, keepdims=True)
    z = d / np.sqrt((d * d).mean(-1, keepdims=True) + form.epsilon) * form.norm_scale + form.norm_bias
    p, g = (np.einsum("bmc,c...->b...m", z, float64(w)) for w in (form.w, form.w_gate))
    expected = p[:, ::2] / (1 + np.exp(-p[:, 1::2])) * float64(form.mask)[:, None, None]
    sides, gate = f()
    assert_close(sides.reshape(b, 2, h, m), expected, OP["float16"])
    assert_close(gate, 1 / (1 + np.exp(-g)), OP["float16"])


# Matrices that are filled up for who copies whole tiles of them


@pytest.mark.parametrize("c", [64, 24], ids=["normed-here", "normed-before"])
@pytest.mark.parametrize("masked", [True, False])
def test_project_fills_up_with_zeros(c, masked):
    """Rows of 8 and columns of 64: what lies beyond N is 0, though a layer norm has a bias."""
    n, h, rng = 5, 16, np.random.default_rng(c)
    form = Projection(
        x=normal(rng, 2 * n, n, c),
        mask=normal(rng, 2 * n, n) if masked else None,
        norm_scale=normal(rng, c),
        norm_bias=normal(rng, c),
        w=normal(rng, c, 4, h),
        bias=normal(rng, 4, h),
        w_gate=normal(rng, c, h),
        b_gate=normal(rng, h),
        epsilon=1e-5,
        precision=jax.lax.Precision.HIGHEST,
    )

    def project(form):
        f = jax.jit(
            lambda: trimul_project.project(form, config=None, target=target.current(), interpret=not ON_GPU)
        )
        return [y.reshape(2, -1, *y.shape[1:]) for y in f()]

    sides, gate = project(form)
    filled, filled_gate = project(form.replace(rows=n, padded=(8, 64)))
    assert filled.shape == (2, 8, *sides.shape[2:3], 64)
    assert_close(filled, jnp.pad(sides, ((0, 0), (0, 3), (0, 0), (0, 59))), SHORT)
    assert not np.any(filled[:, n:]) and not np.any(filled[..., n:])
    assert_close(filled_gate[:, :n, :, :n], gate, SHORT)


@pytest.mark.parametrize("gate_after", [True, False])
def test_output_of_what_is_filled_up(gate_after):
    n, h, c, rng = 5, 16, 24, np.random.default_rng(3)
    y, gate = normal(rng, 2, 8, h, 64), normal(rng, 2, 8, c if gate_after else h, 64)
    form = Output(
        ys=(y.reshape(16, h, 64),),
        gate=gate.reshape(16, -1, 64),
        bounds=jnp.ones((1, 5)),
        scale=normal(rng, h),
        shift=normal(rng, h),
        w=normal(rng, h, c),
        bias=normal(rng, c),
        gate_after=gate_after,
        factor=1.0,
        epsilon=1e-5,
        precision=jax.lax.Precision.HIGHEST,
        out_dtype=jnp.dtype("float32"),
        size=n,
        rows=(n, 8),
    )

    def output(form):
        options = dict(config=None, target=target.current(), interpret=not ON_GPU)
        return jax.jit(lambda: trimul_output.output(form, **options))()

    cut = [a[:, :n, :, :n].reshape(2 * n, -1, n) for a in (y, gate)]
    out = output(form)
    assert out.shape == (2 * n, n, c)
    assert_close(out, output(form.replace(ys=(cut[0],), gate=cut[1], rows=(1, 1))), SHORT)


# Bounded memory


@pytest.mark.covering(1)
@both_directions
@pytest.mark.parametrize(
    "n, c, h, gate_after", [(24, 16, 64, False), (24, 48, 96, True), (24, 64, 64, True), (32, 64, 32, False)]
)
def test_slices_change_no_bit(direction, n, c, h, gate_after):
    config = trimul.TriMulConfig(channels=c, hidden=h, gate_after=gate_after)
    params, x, mask = random_params(config), pairs(2, n, n, c), pair_mask("random", 2, n, n)
    f = functools.partial(op_of(params, gate_after), direction=direction, implementation=KERNEL)
    expected = jax.jit(f)(x, mask)
    with pytest.raises(ValueError, match=r"max_temporary_bytes=\d+ is less than \d+: what kernels") as error:
        of_row = 16 * 2 * n * (2 * c + 4 * h + (c if gate_after else h))
        jax.eval_shape(functools.partial(f, max_temporary_bytes=of_row), x, mask)
    smallest = int(re.search(r"less than (\d+)", str(error.value))[1])
    for most in (smallest, smallest + 12_000):
        low = jax.jit(functools.partial(f, max_temporary_bytes=most))
        assert_equal(low(x, mask), expected)
        # Loops over groups of hidden channels, where there are several, and over rows.
        assert str(jax.make_jaxpr(low)(x, mask)) != str(jax.make_jaxpr(jax.jit(f))(x, mask))
    plenty = functools.partial(f, max_temporary_bytes=2**30)
    assert jax.jit(plenty).lower(x, mask).as_text() == jax.jit(f).lower(x, mask).as_text()


def test_parts_of_arrays_that_go_on():
    """The last part begins earlier in all arrays, in those with more elements, too."""
    a, b = jnp.arange(7), jnp.arange(10)
    expected = a + b[:7]
    assert_equal(trimul_slices.in_parts(7, 3, 0, lambda take: take(a, 0) + take(b, 0)), expected)


def op_of(params, gate_after):
    """`ops.triangle_update` of x and mask with these parameters, without biases."""

    def f(x, mask=None, **options):
        gate = params["gate_after" if gate_after else "gate_before"]["kernel"]
        return ops.triangle_update(
            x,
            params["norm"]["scale"],
            params["norm"]["bias"],
            params["projections"]["kernel"].reshape(x.shape[-1], 4, -1),
            params["out_norm"]["scale"],
            params["out_norm"]["bias"],
            gate,
            params["out"]["kernel"],
            mask=mask,
            gate_after=gate_after,
            **options,
        )

    return f


def temporaries(f, *args) -> int:
    """Bytes of the temporaries of `f` compiled for this device."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.covering(1)
@both_directions
@pytest.mark.parametrize("compute_dtype", ["float16", "float32"])
def test_xla_in_slices(direction, compute_dtype):
    n, c, h = 96, 16, 24
    params, x, mask = random_params(trimul.TriMulConfig(channels=c, hidden=h)), pairs(n, n, c), None
    options = dict(direction=direction, compute_dtype=compute_dtype, implementation="xla")
    f = functools.partial(op_of(params, gate_after=False), **options)
    of_row = 16 * n * (2 * c + 4 * h + h)
    expected = jax.jit(f)(x, mask)
    for rows in (1, 7, n + 1):
        low = functools.partial(f, max_temporary_bytes=rows * of_row + 1)
        assert_close(jax.jit(low)(x), expected, CHAIN if compute_dtype == "float32" else 1e-3)
        if not ON_GPU:
            weights_of_half = 64 * 1024
            assert temporaries(low, x) < rows * of_row + weights_of_half
    with pytest.raises(
        ValueError, match=f"max_temporary_bytes={of_row - 1} is less than {of_row}: what a row of all"
    ):
        f(x, max_temporary_bytes=of_row - 1)


@pytest.fixture
def opaque_kernels(monkeypatch):
    """Kernels that cannot be seen through and compute nothing, of which XLA plans the memory on a CPU, too."""

    def call(shapes, *arrays):
        like = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes if 0 not in shape]
        results = iter(jax.pure_callback(lambda *_: None, like, *arrays))
        return [None if 0 in shape else next(results) for shape, _ in shapes]

    def project(form, **_):
        items, size = form.result
        shapes = [((items, channels, size), form.w.dtype) for channels in (2 * form.hidden, form.gates)]
        return call(shapes, form.x, form.w, form.w_gate)

    def product(form, **_):
        return call([(form.out_shape(), form.sides.dtype)], form.sides)[0]

    def output(form, **_):
        return call([((form.batch, form.size, form.w.shape[1]), form.out_dtype)], *form.ys, form.gate, form.w)[0]

    monkeypatch.setattr(trimul_project, "project", project)
    monkeypatch.setattr(trimul_output, "output", output)
    for module in (trimul_product, mosaic_product):
        monkeypatch.setattr(module, "product", product)
    monkeypatch.setattr(schedules, "mosaic_projection", lambda *_: project)


@pytest.mark.skipif(ON_GPU, reason="kernels that do nothing are of the CPU")
@pytest.mark.usefixtures("opaque_kernels")
@pytest.mark.parametrize("n", [256, 130])
@pytest.mark.parametrize("implementation", ["interpret", "mosaic_interpret"])
def test_temporaries_are_bounded(implementation, n):
    """From the smallest slices on, the program takes what it may take, and little less."""
    c, h = 64, 128
    padded = n if implementation == "interpret" else (n + -n % 8) * (n + -n % 64) / n
    tensor, weight = 2 * n * padded * h, 2**18
    params, x = random_params(trimul.TriMulConfig(channels=c, hidden=h)), pairs(n, n, c)
    f = functools.partial(op_of(params, gate_after=False), direction="outgoing", implementation=implementation)
    computed_again = implementation == "mosaic_interpret" and jax.__version_info__ >= (0, 11)
    tensors = 3 if computed_again else 4  # left, right, their product, and the gate
    assert abs(temporaries(f, x) - tensors * tensor) < 0.1 * tensor + weight
    # y; and beside it left, right and y of 32 channels, or of 64, or left and right of all
    for most, least in ((1.8, 1.7), (2.55, 2.45), (3.1, 2.9)):
        taken = temporaries(functools.partial(f, max_temporary_bytes=int(most * tensor)), x)
        assert least * tensor < taken < most * tensor + weight, (most, taken / tensor)
    with pytest.raises(ValueError, match="what kernels for 1 x"):
        jax.eval_shape(functools.partial(f, max_temporary_bytes=int(1.7 * tensor)), x)


def test_bounds_that_do_not_fit():
    params, x = random_params(trimul.TriMulConfig(channels=8, hidden=4)), pairs(5, 5, 8)
    f = functools.partial(op_of(params, gate_after=False), direction="outgoing")
    for most in (1e9, "1", True):
        with pytest.raises(TypeError, match=re.escape(f"max_temporary_bytes={most!r} must be a number of bytes")):
            f(x, max_temporary_bytes=most)
    with pytest.raises(
        ValueError, match=r"max_temporary_bytes=0 is less than \d+: what a row of all matrices takes"
    ):
        f(x, max_temporary_bytes=0)


# Gradients


def torch_gradients(module, direction, x, mask, cotangent):
    """Gradients of the parameters, of x and of the mask by torch's autograd, the former as `trimul` has them."""
    import torch

    module = module.double()
    x, mask, cotangent = (torch.tensor(np.asarray(a), dtype=torch.float64) for a in (x, mask, cotangent))
    leaves = dict(module.named_parameters()) | {"x": x.requires_grad_(), "mask": mask.requires_grad_()}
    grads = torch.autograd.grad(module(x, mask), list(leaves.values()), cotangent)
    grads = dict(zip(leaves, grads, strict=True))
    dx, dmask = grads.pop("x"), grads.pop("mask")
    return weights.load_trimul(grads, direction=direction), dx.numpy(), dmask.numpy()


@pytest.mark.parametrize(
    "implementation, family, bias, direction, compute_dtype",
    [
        ("xla", "lucidrains", True, "outgoing", "float32"),
        ("xla", "lucidrains", False, "incoming", "float16"),
        ("xla", "openfold", False, "outgoing", "bfloat16"),
        ("xla", "boltz", True, "incoming", "float32"),
        (KERNEL, "lucidrains", False, "outgoing", "float32"),
        (KERNEL, "openfold", True, "incoming", "float16"),
        (KERNEL, "lucidrains", True, "incoming", "bfloat16"),
    ],
)
def test_gradients(torch_trimul, implementation, family, bias, direction, compute_dtype):
    module, params = module_and_params(torch_trimul, family, 10, 10, direction, bias)
    x = pairs(2, 6, 6, 10)
    mask = jnp.asarray(np.random.default_rng(2).uniform(0.5, 1.0, (2, 6, 6)), jnp.float32)
    cotangent = pairs(2, 6, 6, 10, seed=3)
    f = update(direction=direction, implementation=implementation, compute_dtype=compute_dtype)
    gradients = jax.vjp(f, params, x, mask)[1](cotangent)
    expected = torch_gradients(module, direction, x, mask, cotangent)
    for out, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert_close(out, wanted, HALF_PRECISION[compute_dtype])


def test_cotangents_beyond_half_precision(implementation):
    params, x = random_params(trimul.TriMulConfig(channels=10, hidden=6)), pairs(1, 6, 6, 10)
    cotangent = pairs(1, 6, 6, 10, seed=3)
    pullback = jax.vjp(update(direction="outgoing", implementation=implementation), params, x)[1]
    expected = pullback(cotangent)
    for scale in (2.0**-40, 2.0**40):
        for out, wanted in zip(
            jax.tree.leaves(pullback(cotangent * scale)), jax.tree.leaves(expected), strict=True
        ):
            assert_close(out / scale, wanted, SHORT)


@pytest.mark.parametrize("exponent", [-60, 0, 60])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_tangents_and_cotangents_of_any_size(dtype, exponent):
    """In 16 bits, in both modes and of second order: what float32 gives for operands that 16 bits hold exactly."""
    rng = np.random.default_rng(4)
    a, b, c = (jnp.asarray(rng.integers(-7, 8, shape), jnp.float32) for shape in ((3, 5), (4, 5), (3, 4)))
    da, db, c = a[::-1] * 2.0**exponent, b[::-1] * 2.0**exponent, c * 2.0**-exponent
    exact = functools.partial(jnp.einsum, "ik,jk->ij", precision=jax.lax.Precision.HIGHEST)
    product = functools.partial(_half_precision.rounded_einsum, "ik,jk->ij", jnp.dtype(dtype))

    def results(f):
        out, pull = jax.vjp(f, a, b)
        moved = jax.jvp(f, (a, b), (da, db))
        second = jax.jvp(lambda a, b: jax.vjp(f, a, b)[1](c), (a, b), (da, db))
        of_gradient = jax.vjp(lambda a, c: jax.vjp(f, a, b)[1](c), a, c)[1]((da, db))
        return out, pull(c), moved, second, of_gradient

    for out, wanted in zip(jax.tree.leaves(results(product)), jax.tree.leaves(results(exact)), strict=True):
        assert_equal(out, wanted)


def test_products_of_what_is_zero_or_not_finite():
    a = jnp.asarray([[0.0, 0.0], [1.0, jnp.inf]])
    product = functools.partial(
        _half_precision.rounded_einsum, "ik,kj->ij", jnp.dtype("float16"), any_size=(True, True)
    )
    assert_equal(product(jnp.zeros((2, 2)), jnp.ones((2, 2))), np.zeros((2, 2)))
    np.testing.assert_array_equal(product(a, jnp.ones((2, 2))), [[0.0, 0.0], [jnp.inf, jnp.inf]])


# Module and parameters


def test_module_and_function_are_the_same():
    config = trimul.TriMulConfig(channels=10, hidden=6, gate_after=True, use_bias=True)
    module = trimul.TriMul(config, rngs=nnx.Rngs(3))
    state, x = nnx.state(module), pairs(1, 5, 5, 10)
    options = dict(direction="incoming", implementation="xla")
    out = nnx.jit(lambda module, x: module(x, **options))(module, x)
    assert out.shape == x.shape
    for params in (state, nnx.to_pure_dict(state)):
        assert_equal(update(**options)(params, x), out)


@pytest.mark.parametrize("gate_after, use_bias", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_init(gate_after, use_bias, dtype):
    config = trimul.TriMulConfig(channels=10, hidden=6, gate_after=gate_after, use_bias=use_bias)
    params = trimul.init(jax.random.key(0), config, dtype=dtype)
    width = 10 if gate_after else 6
    gate = "gate_after" if gate_after else "gate_before"
    shapes = {"projections": (10, 24), gate: (10, width), "out": (6, 10)}
    expected = {
        name: {"kernel": (shape, dtype)} | ({"bias": (shape[1:], "float32")} if use_bias else {})
        for name, shape in shapes.items()
    } | {
        name: dict.fromkeys(("scale", "bias"), ((size,), "float32"))
        for name, size in (("norm", 10), ("out_norm", 6))
    }
    assert jax.tree.map(lambda p: (p.shape, str(p.dtype)), params) == expected


# Errors


@pytest.mark.parametrize(
    "x, mask, options, error, message",
    [
        ([1.0], None, {}, TypeError, "x must be an array, got list"),
        (
            np.ones((5, 5, 10), int),
            None,
            {},
            TypeError,
            "x has dtype int64; expected float16, bfloat16 or float32",
        ),
        (X[0, 0], None, {}, ValueError, "x has shape (5, 10); expected (..., N, N, C)"),
        (X[:, 1:], None, {}, ValueError, "x has shape (1, 4, 5, 10); expected (..., N, N, C)"),
        (
            X[..., 1:],
            None,
            {},
            ValueError,
            "x has shape (1, 5, 5, 9); expected 10 channels, as the parameters have",
        ),
        (X, MASK[0], {}, ValueError, "mask has shape (5, 5); expected (1, 5, 5), (..., N, N)"),
        (X, MASK[:, 1:], {}, ValueError, "mask has shape (1, 4, 5); expected (1, 5, 5), (..., N, N)"),
        (X, MASK * 3, {}, ValueError, "mask has values from 3 to 3; expected only 0 (padding) and 1"),
        (X, MASK.tolist(), {}, TypeError, "mask must be an array, got list"),
        (
            X,
            MASK,
            {"direction": "ingoing"},
            ValueError,
            "direction='ingoing' is unknown; expected one of ('outgoing'",
        ),
        (X, MASK, {"compute_dtype": "float64"}, ValueError, "compute_dtype='float64' is not supported; expected"),
        (X, MASK, {"implementation": "cudnn"}, ValueError, "implementation='cudnn' is unknown; expected None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_that_do_not_fit(x, mask, options, error, message):
    params = random_params(trimul.TriMulConfig(channels=10, hidden=6))
    with pytest.raises(error, match=re.escape(message)):
        trimul.trimul(params, x, mask, **{"direction": "outgoing"} | options)


def test_shapes_are_checked_under_jit():
    params = random_params(trimul.TriMulConfig(channels=10, hidden=6))
    with pytest.raises(ValueError, match=re.escape("x has shape (1, 4, 5, 10); expected (..., N, N, C)")):
        update(direction="outgoing")(params, X[:, 1:])


def test_params_that_do_not_fit_are_listed():
    params = random_params(trimul.TriMulConfig(channels=10, hidden=6, use_bias=True))
    del params["projections"]["bias"]
    params["out"]["kernel"] = params["out"]["kernel"].T
    params["gate"] = params.pop("gate_before")
    with pytest.raises(ValueError) as error:
        trimul.trimul(params, X, direction="outgoing")
    for line in (
        "['projections']['bias']: expected (24,), got nothing",
        "['out']['kernel']: expected (6, 10), got (10, 6)",
        "['gate_before']['kernel']: expected (10, 6), got nothing",
        "['gate']['kernel']: expected nothing, got (10, 6)",
    ):
        assert line in str(error.value)
    for wrong in ({}, [1.0], {"norm": {}}, {"params": params}):
        with pytest.raises(
            ValueError, match="params are not the parameters of a triangle multiplicative update; expected"
        ):
            trimul.trimul(wrong, X, direction="outgoing")


# Lowering


def most_elements(line: str) -> int:
    """How many elements the largest tensor in a line of StableHLO has."""
    shapes = re.findall(r"tensor<((?:\d+x)+)", line)
    return max((math.prod(map(int, shape.split("x")[:-1])) for shape in shapes), default=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "n, c, h, direction, gate_after",
    [
        (1024, 128, 128, "outgoing", False),
        (768, 384, 128, "incoming", True),
        (128, 768, 256, "outgoing", True),
        (77, 50, 33, "incoming", False),
        (1030, 128, 128, "incoming", True),
        (2047, 256, 128, "outgoing", True),
        (4100, 128, 128, "outgoing", False),
    ],
)
@pytest.mark.parametrize(
    "device, implementation",
    [
        (("NVIDIA H200", 132), "mosaic"),
        (("NVIDIA H200", 132), "triton"),
        (("NVIDIA A100-SXM4-80GB", 108), None if not ON_GPU else "triton"),
    ],
    ids=["hopper-mosaic", "hopper-triton", "ampere"],
)
def test_nothing_but_kernels_of_ours(device, implementation, n, c, h, direction, gate_after):
    config = trimul.TriMulConfig(channels=c, hidden=h, gate_after=gate_after, use_bias=gate_after)
    params = jax.eval_shape(functools.partial(trimul.init, config=config, dtype="float16"), jax.random.key(0))
    x, mask = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, n, n, c), (1, n, n)))
    with cuda_device(*device):
        f = update(direction=direction, implementation=implementation)
        text = f.trace(params, x, mask if gate_after else None).lower(lowering_platforms=("cuda",)).as_text()
    calls = [text.count(f"@{call}") for call in (TRITON_CALL, MOSAIC_CALL)]
    assert 4 <= sum(calls) <= 5
    assert (calls[1] > 0) == (implementation == "mosaic")
    assert "stablehlo.dot_general" not in text
    # Weights may be laid out anew; what has the size of x passes from kernel to kernel.
    of_pairs = [line for line in text.splitlines() if most_elements(line) >= n * n * min(c, h)]
    operations = {operation for line in of_pairs for operation in re.findall(r"stablehlo\.(\w+)", line)}
    assert "custom_call" in operations
    assert operations <= {"custom_call", "reshape", "case", "return"}


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: its compiler plans the memory")
@pytest.mark.parametrize("n, c", [(1024, 128), (768, 384)])
def test_memory(n, c, h=128):
    config = trimul.TriMulConfig(channels=c, hidden=h)
    params = jax.eval_shape(functools.partial(trimul.init, config=config, dtype="float16"), jax.random.key(0))
    f = update(direction="outgoing")
    plan = f.lower(params, jax.ShapeDtypeStruct((1, n, n, c), jnp.float32)).compile().memory_analysis()
    normed = c if c > 128 else 0  # where the layer norm of x is a kernel of its own
    assert plan.temp_size_in_bytes <= 1.1 * (3 * h + normed) * n * n * 2
