"""`ops.triangle_attention` against torch: both directions, sizes, masks, gradients, and that nothing is copied."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_models import _jax, ops, target
from pallas_models.kernels.forms.triangle_attention import Form
from pallas_models.kernels.mosaic import attention as ring
from pallas_models.kernels.mosaic.attention_plan import Plan
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.shared_memory import num_bytes
from pallas_models.kernels.mosaic.triangle_attention_backward_plan import Side
from pallas_models.kernels.triton import attention, attention_backward
from pallas_models.tuning import Chooser
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    TRITON_CALL,
    array,
    assert_close,
    assert_equal,
    by_device,
    compiled,
    cuda_device,
    float64,
    gpu,
    kernel_calls,
    normal,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, OP, SAME

both = pytest.mark.parametrize("direction", ["starting", "ending"])
kernel = functools.partial(compiled.triangle_attention, implementation=KERNEL)
SHAPES = by_device(  # batch, N, heads, head_dim
    cpu=[(2, 1, 1, 16), (1, 7, 2, 64), (1, 33, 1, 20)],
    gpu=[(2, 1, 1, 16), (1, 7, 2, 64), (2, 129, 4, 32), (1, 256, 4, 32), (1, 130, 8, 16), (1, 70, 2, 128)],
)


class Small(Chooser):
    """Tiles of 16 for all kernels."""

    def choose(self, problem):
        if problem.config not in (attention.Config, attention_backward.Config):
            return None
        return problem.config(block_q=16, block_kv=16, num_warps=1, num_stages=1)


def operands(batch, n, heads, head_dim, dtype="float32", lines=None, direction="starting"):
    """q, k, v, bias, and a mask with holes, of which a row and a column have no pair left."""
    rng = np.random.default_rng(17)
    rows, columns = (lines or n, n) if direction == "starting" else (n, lines or n)
    pairs = [normal(rng, batch, rows, columns, heads, head_dim, dtype=dtype) for _ in range(3)]
    mask = rng.integers(0, 4, (batch, rows, columns)) > 0
    mask[0, -1], mask[0, :, -1] = False, False
    return *pairs, normal(rng, batch, heads, n, n, dtype=dtype), array(mask, "int32")


def attend(*arrays, **options):
    q, k, v, bias, mask = arrays
    return kernel(q, k, v, bias=bias, mask=mask, **options)


@pytest.mark.covering(2)
@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape, direction):
    q, k, v, bias, mask = operands(*shape, dtype)
    options = dict(bias=bias, mask=mask, direction=direction)
    out = compiled.triangle_attention(q, k, v, implementation=implementation, **options)
    assert out.dtype == dtype
    expected = reference.compute(reference.triangle_attention, q, k, v, **options)
    if np.any(expected):
        assert_close(out, expected, tolerance)
    assert np.all(float64(out)[expected == 0.0] == 0.0)  # of pairs in a line without keys


@pytest.mark.covering(2)
@both
@pytest.mark.parametrize("items", [2, 3])
@pytest.mark.parametrize("block_kv", [16, 64])
def test_lines_side_by_side(reference, items, block_kv, direction):
    """A block of the bias serves several; 19 lines are no multiple of either number."""
    q, k, v, bias, mask = operands(2, 19, 2, 32)
    bias = bias.at[0, 0, 3].set(-jnp.inf).at[0, 1, :, 3].set(-2e30)
    config = attention.Config(block_q=16, block_kv=block_kv, num_warps=1, num_stages=2, items=items)
    expected = reference.compute(
        reference.triangle_attention, q, k, v, jnp.where(bias > -1e30, bias, -jnp.inf), mask, direction=direction
    )
    assert_close(attend(q, k, v, bias, mask, direction=direction, config=config), expected, GRADIENT)


@both
def test_weights_add_up_to_1_however_large_scores_are(direction):
    """The maximum is one of the scores that it is subtracted from, rounded as that is."""
    rng = np.random.default_rng(18)
    q, k = (normal(rng, 4, 2, 2, 16, 32, dtype="float16") for _ in range(2))
    q = q.at[..., 9].set(65504 * jnp.sign(q[..., 9])).at[..., 3].set(65504).at[..., 5].set(-65504)
    k, v = k.at[..., 9].set(65504).at[..., 7].set(65504), jnp.ones_like(q)
    assert_close(
        kernel(q, k, v, bias=normal(rng, 4, 16, 2, 2), direction=direction), np.ones(q.shape), OP["float16"]
    )


def test_lines_side_by_side_where_only_some_have_blocks_without_a_mask(reference):
    """Of two lines one has holes: the blocks that need no mask need none in either."""
    q, k, v, bias, _ = operands(1, 300, 1, 16, lines=4)
    mask = np.ones((1, 4, 300), int)
    mask[0, 1, 40:90], mask[0, 2, 200:], mask[0, 3] = 0, 0, 0
    config = attention.Config(block_q=64, block_kv=16, num_warps=4, num_stages=2, items=2)
    expected = reference.compute(reference.triangle_attention, q, k, v, bias, mask, direction="starting")
    assert_close(
        attend(q, k, v, bias, array(mask, "int32"), direction="starting", config=config), expected, GRADIENT
    )


def test_more_lines_side_by_side_than_there_are():
    config = attention.Config(block_q=16, block_kv=16, num_warps=1, num_stages=1, items=8)
    with pytest.raises(ValueError, match="items=8 are more than the 5 that share a bias"):
        attend(*operands(2, 5, 1, 16), direction="ending", config=config)
    with pytest.raises(ValueError, match="items=0 must be positive"):
        attention.Config(block_q=16, block_kv=16, num_warps=1, num_stages=1, items=0)


@both
@pytest.mark.parametrize("n", by_device(cpu=[5], gpu=[1030]))
def test_bias_and_mask_can_be_absent(reference, n, direction):
    q, k, v, bias, mask = operands(1, n, 1, 16, lines=min(n, 24), direction=direction)
    for options in (dict(bias=bias), dict(mask=mask), {}):
        expected = reference.compute(reference.triangle_attention, q, k, v, direction=direction, **options)
        assert_close(kernel(q, k, v, direction=direction, **options), expected, GRADIENT)


def pulled(arrays, mask, cotangent, **options):
    """The gradients of q, k, v and bias."""

    @jax.jit
    def pull(arrays, cotangent):
        def f(q, k, v, bias):
            return ops.triangle_attention(q, k, v, bias=bias, mask=mask, **options)

        return jax.vjp(f, *arrays)[1](cotangent)

    return pull(arrays, cotangent)


@pytest.mark.covering(1)
@both
@pytest.mark.parametrize(
    "shape, lines, config",
    [
        ((2, 19, 2, 32), None, Small()),
        ((1, 35, 1, 16), 3, Small()),
        ((1, 20, 2, 20), None, None),
        *by_device(cpu=[], gpu=[((1, 129, 4, 32), None, None), ((1, 1030, 2, 32), 9, None)]),
    ],
)
def test_gradients(reference, shape, lines, config, direction):
    """Of several blocks of queries and keys, of one block, and of fewer lines than there are pairs in a line."""
    *arrays, mask = operands(*shape, lines=lines, direction=direction)
    cotangent = normal(np.random.default_rng(3), *arrays[0].shape)
    options = dict(mask=reference.tensor(mask), direction=direction)
    function = functools.partial(reference.triangle_attention, **options)
    expected = reference.gradients(function, arrays, cotangent)
    gradients = pulled(arrays, mask, cotangent, implementation=KERNEL, config=config, direction=direction)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert_close(gradient, wanted, GRADIENT)
    for gradient, wanted in zip(gradients[:3], expected, strict=False):
        assert np.all(float64(gradient)[wanted == 0.0] == 0.0)  # of queries without keys, and of masked keys


def test_half_precision_gradients(reference, dtype):
    """No further from float64 than torch's own in the same dtype, but for the order of sums."""
    if dtype == "float32":
        pytest.skip("float32 has a bound of its own")
    *arrays, mask = operands(1, 24, 2, 32, dtype)
    cotangent = normal(np.random.default_rng(3), *arrays[0].shape, dtype=dtype)
    function = functools.partial(reference.triangle_attention, mask=reference.tensor(mask), direction="ending")
    expected = reference.gradients(function, arrays, cotangent)
    gradients = pulled(arrays, mask, cotangent, implementation=KERNEL, direction="ending")
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        assert_close(gradient, wanted, OP[dtype])


def test_ending_is_starting_of_the_transposed_square():
    arrays = operands(2, 21, 2, 16)
    q, k, v, bias, mask = arrays
    other = (*(x.swapaxes(1, 2) for x in (q, k, v)), bias.swapaxes(-1, -2), mask.swapaxes(1, 2))
    out = attend(*other, direction="starting", config=None)
    assert_close(attend(*arrays, direction="ending").swapaxes(1, 2), out, SAME)


@both
def test_leading_axes(direction):
    arrays = operands(6, 5, 2, 16)
    out = attend(*arrays, direction=direction)
    assert_equal(
        attend(*(x.reshape(2, 3, *x.shape[1:]) for x in arrays), direction=direction),
        out.reshape(2, 3, *out.shape[1:]),
    )
    assert_equal(attend(*(x[4] for x in arrays), direction=direction), out[4])


@pytest.mark.parametrize("kept", [True, 2, -1, 0.25, 1e-30], ids=str)
def test_what_is_not_zero_keeps(implementation, kept):
    q, k, v, bias, mask = operands(1, 6, 1, 16)
    run = functools.partial(compiled.triangle_attention, q, k, v, bias=bias, implementation=implementation)
    other = jnp.where(mask != 0, jnp.asarray(kept), jnp.asarray(0, jnp.asarray(kept).dtype))
    assert_equal(run(mask=other, direction="ending"), run(mask=mask, direction="ending"))


def test_scale(reference):
    q, k, v, bias, _ = operands(1, 9, 2, 16)
    expected = reference.compute(reference.triangle_attention, q, k, v, bias, direction="ending", scale=0.7)
    for scale in (0.7, jnp.asarray(0.7), np.float32([0.7])):
        out = ops.triangle_attention(q, k, v, bias=bias, direction="ending", scale=scale, implementation=KERNEL)
        assert_close(out, expected, GRADIENT)


def test_a_bias_of_another_dtype(reference):
    q, k, v, bias, _ = operands(1, 9, 2, 16, "float16")
    out = kernel(q, k, v, bias=bias.astype(jnp.float32), direction="ending")
    expected = reference.compute(reference.triangle_attention, q, k, v, bias, direction="ending")
    assert_close(out, expected, OP["float16"])


@both
def test_nan_in_a_masked_key_reaches_nothing(direction):
    q, k, v, bias, mask = operands(1, 20, 2, 16)
    spoilt = jnp.where(mask[..., None, None] != 0, k, jnp.nan)
    cotangent = normal(np.random.default_rng(3), *q.shape)
    options = dict(implementation=KERNEL, direction=direction)
    assert_equal(
        attend(q, spoilt, v, bias, mask, direction=direction), attend(q, k, v, bias, mask, direction=direction)
    )
    for implementation in (KERNEL, "xla"):
        options["implementation"] = implementation
        found = pulled((q, spoilt, v, bias), mask, cotangent, **options)
        for gradient, wanted in zip(found, pulled((q, k, v, bias), mask, cotangent, **options), strict=True):
            assert_close(gradient, wanted, SAME)


@both
def test_layers_in_a_scan_with_remat(direction):
    """As a stack of blocks has them; the gradient is of the same kernels, computed again."""
    q, k, v, bias, mask = operands(1, 9, 2, 16)
    weights = normal(np.random.default_rng(4), 3, 16, 16, scale=0.25)

    def loss(q, weights, implementation, remat):
        def layer(x, w):
            q = jnp.matmul(x, w, precision="highest")  # a GPU's default rounds x to 10 bits, differences to steps
            y = x + ops.triangle_attention(
                q, k, v, bias=bias, mask=mask, direction=direction, implementation=implementation
            )
            return y, None

        layer = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jax.lax.scan(layer, q, weights)[0] ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=(2, 3))
    expected = gradient(q, weights, "xla", False)
    for remat in (True, False):
        for found, wanted in zip(gradient(q, weights, KERNEL, remat), expected, strict=True):
            assert_close(found, wanted, 4 * GRADIENT)  # three layers


@both
@pytest.mark.parametrize("n", [448, 443])  # so few that the mask is not searched
def test_no_pairs_are_copied_and_none_of_them_are_cubed(n, direction):
    """Forward only the bias is laid out anew; of the gradient no array is larger than q in float32."""
    pairs, bias, mask = (1, n, n, 2, 16), (1, 2, n, n), (1, n, n)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (*[pairs] * 3, bias)]

    def f(q, k, v, bias, mask):
        options = dict(direction=direction, implementation="triton")
        return ops.triangle_attention(q, k, v, bias=bias, mask=mask, **options)

    def pull(*arrays):
        return jax.vjp(functools.partial(f, mask=arrays[4]), *arrays[:4])[1](arrays[0])

    arrays.append(jax.ShapeDtypeStruct(mask, jnp.int32))
    with cuda_device(*HOPPER):
        text, gradient = lowered_for_cuda(f, *arrays), lowered_for_cuda(pull, *arrays)
    assert (kernel_calls(text), kernel_calls(gradient)) == (1, 4)
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {
        *("constant", "convert", "reshape", "transpose", "pad", "custom_call")
    }
    copied = re.findall(r"stablehlo\.(?:transpose|pad).*-> tensor<([\dx]+)x[a-z]", text)
    assert len(copied) == (direction == "ending") + (n % 8 > 0)
    assert all(math.prod(map(int, shape.split("x"))) <= n * (n + 8) * 2 for shape in copied)
    tensors = re.findall(r"tensor<([\dx]+)x[a-z]", gradient)
    assert max(math.prod(map(int, shape.split("x"))) for shape in tensors) == math.prod(pairs)
    transposed = re.findall(r"stablehlo\.transpose.*-> tensor<([\dx]+)x[a-z]", gradient)
    assert transposed  # a number for each pair and head
    assert all(math.prod(map(int, shape.split("x"))) <= n * (n + 8) * 2 for shape in transposed)


@both
def test_the_gradient_of_the_bias_adds_up_in_one_order(direction):
    *arrays, mask = operands(2, 19, 2, 16)
    cotangent = normal(np.random.default_rng(3), *arrays[0].shape)
    runs = [
        pulled(arrays, mask, cotangent, implementation=KERNEL, config=Small(), direction=direction)
        for _ in range(2)
    ]
    for a, b in zip(*runs, strict=True):
        assert_equal(a, b)


RESIDENT = {  # lines, N, heads, dtype, dtype of the bias
    "tiles of two, blocks of 128": (2, 256, 1, "bfloat16", "bfloat16"),
    "one tile, blocks of 64": (3, 192, 2, "float16", "float32"),
    "one block": (2, 64, 1, "float16", "float16"),
}
resident = pytest.mark.parametrize("name", RESIDENT)
newer = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 does not load the transpose of shared memory"
)
on_mosaic = pytest.mark.parametrize("direction", ["starting", pytest.param("ending", marks=newer)])


def resident_operands(name, direction):
    """Of the first element the first line keeps its first keys, the last none; others have holes."""
    lines, n, heads, dtype, bias_dtype = RESIDENT[name]
    q, k, v, bias, mask = operands(2, n, heads, 32, dtype, lines=lines, direction=direction)
    mask = np.array(mask if direction == "starting" else mask.swapaxes(1, 2))
    mask[0, 0], mask[0, 0, n // 3 :], mask[0, -1] = 1, 0, 0
    mask = array(mask if direction == "starting" else mask.swapaxes(1, 2), "int32")
    return q, k, v, bias.astype(bias_dtype), mask


@pytest.mark.covering(1)
@on_mosaic
@resident
def test_mosaic_kernel(name, direction):
    """As XLA in float32, which the tests above hold to torch: where JAX is new enough there may be no torch."""
    q, k, v, bias, mask = resident_operands(name, direction)
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    plain = functools.partial(compiled.triangle_attention, *exact, direction=direction, implementation="xla")
    for options in (dict(bias=bias, mask=mask), dict(bias=bias), {}):
        out = compiled.triangle_attention(q, k, v, direction=direction, implementation=MOSAIC, **options)
        expected = float64(plain(**options))
        assert_close(out, expected, OP[str(q.dtype)])
        assert np.all(float64(out)[expected == 0.0] == 0.0)


RINGS = {  # elements, lines, N, heads, dtype, dtype of the bias, config
    "consumers with parts of a line": (1, 2, 192, 1, "bfloat16", "bfloat16", dict(block_q=192, block_kv=64)),
    "four consumers, and few keys": (1, 2, 256, 2, "bfloat16", "bfloat16", dict(block_q=256, block_kv=64)),
    "more queries than there are": (2, 1, 128, 1, "float16", "float16", dict(block_q=192, block_kv=128)),
    "lines of their own": (1, 3, 256, 1, "bfloat16", "float32", dict(block_q=64, block_kv=64, lines=3)),
    "a line past the last": (2, 4, 128, 1, "float16", "float16", dict(block_q=64, block_kv=64, lines=3)),
}
rings = pytest.mark.parametrize("name", RINGS)
takes_pairs = pytest.mark.skipif(not _jax.since(0, 11), reason="the ring kernel takes pairs from JAX 0.11 on")


def ring_operands(name, direction):
    """Of an element the first line has all keys, the second some of them at its end, the last none."""
    elements, lines, n, heads, dtype, bias_dtype, config = RINGS[name]
    q, k, v, bias, mask = operands(elements, n, heads, 32, dtype, lines=lines, direction=direction)
    mask = np.array(mask if direction == "starting" else mask.swapaxes(1, 2))
    mask[:, 0], mask[:, 1:2, : 2 * n // 3] = 1, 0
    mask = array(mask if direction == "starting" else mask.swapaxes(1, 2), "int32")
    bias = bias.astype(bias_dtype).at[0, 0, 5].set(-jnp.inf).at[-1, -1, 3:70, 9].set(-jnp.inf)
    return (q, k, v, bias, mask), ring.Config(num_stages=2, **config)


@both
@rings
@takes_pairs
def test_ring(name, direction):
    (q, k, v, bias, mask), config = ring_operands(name, direction)
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    plain = functools.partial(compiled.triangle_attention, *exact, direction=direction, implementation="xla")
    for options in (dict(bias=bias, mask=mask), dict(bias=bias), {}):
        run = functools.partial(ops.triangle_attention, direction=direction, implementation=MOSAIC, config=config)
        out = run(q, k, v, **options)
        expected = float64(plain(**options))
        assert_close(out, expected, OP[str(q.dtype)])
        assert np.all(float64(out)[expected == 0.0] == 0.0)


@takes_pairs
@pytest.mark.parametrize("name, is_searched", [("four consumers, and few keys", False), ("more keys", True)])
def test_masks_of_few_keys_are_not_searched(name, is_searched, monkeypatch):
    """A search takes kernels of its own, longer than to mask four blocks of keys."""
    rings = RINGS | {"more keys": (1, 1, 320, 1, "float16", "float16", dict(block_q=64, block_kv=64))}
    monkeypatch.setitem(RINGS, name, rings[name])
    (q, k, v, bias, mask), config = ring_operands(name, "starting")
    searches = []
    monkeypatch.setattr(ring, "searched", lambda *args, **blocks: searches.append(blocks))
    run = functools.partial(ops.triangle_attention, direction="starting", implementation=MOSAIC, config=config)
    jax.eval_shape(functools.partial(run, bias=bias, mask=mask), q, k, v)
    assert bool(searches) == is_searched


HOPPERS_BLOCKS = {  # of a bias in bfloat16
    192: dict(block_q=64, block_kv=64, num_stages=3, lines=3),
    256: dict(block_q=256, block_kv=64, num_stages=3),
    768: dict(block_q=192, block_kv=128, num_stages=2),  # four tiles of queries, none of them in part
    1024: dict(block_q=64, block_kv=128, num_stages=3, lines=3),
}


@pytest.mark.parametrize("n", HOPPERS_BLOCKS)
def test_blocks_and_their_shared_memory_on_hopper(n):
    pairs, pair = (jax.ShapeDtypeStruct((1, n, n, *x), "bfloat16") for x in ((128,), ()))
    form = Form(
        qkv=(pairs,) * 3,
        mask=pair.update(dtype="int32"),
        bias=jax.ShapeDtypeStruct((1, 4, n, n), "bfloat16"),
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        sm_scale=1.0,
        return_lse=True,
        precision=jax.lax.Precision.DEFAULT,
        direction="starting",
    )
    hopper = gpu()
    config = ring.heuristic(form, hopper)
    assert config == ring.Config(**HOPPERS_BLOCKS[n])
    types = Plan.of(form, num_cores=hopper.num_cores, **dataclasses.asdict(config)).scratch_types().values()
    stored = sum(
        math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in types if not isinstance(x, plgpu.Barrier)
    )
    assert stored < ring.shared_memory(config, 32, 2) <= hopper.shared_memory


@finds_races
@pytest.mark.parametrize(
    "name", ["consumers with parts of a line", "four consumers, and few keys", "a line past the last"]
)
def test_ring_has_no_races(name):
    (q, k, v, bias, mask), config = ring_operands(name, "starting")
    with no_races():
        ops.triangle_attention(
            q, k, v, bias=bias, mask=mask, direction="starting", implementation=MOSAIC, config=config
        )


BACKWARD = {  # elements, lines, N, heads, dtype, dtype of the bias
    "a tile in part, fewer lines than a group has": (1, 2, 192, 1, "bfloat16", "float32"),
    "groups of lines one after another, the last in part": (2, 7, 128, 1, "float16", "float16"),
    "blocks without a mask among others": (1, 6, 256, 2, "bfloat16", "bfloat16"),
}


def backward_operands(name, direction):
    """Of an element the first line has all keys, the second some at its end, the third holes, the last none."""
    elements, lines, n, heads, dtype, bias_dtype = BACKWARD[name]
    q, k, v, bias, mask = operands(elements, n, heads, 32, dtype, lines=lines, direction=direction)
    mask = np.array(mask if direction == "starting" else mask.swapaxes(1, 2))
    mask[:, 0], mask[:, 1, : 2 * n // 3], mask[:, 1, 2 * n // 3 :], mask[:, -1] = 1, 0, 1, 0
    mask = array(mask if direction == "starting" else mask.swapaxes(1, 2), "int32")
    bias = bias.astype(bias_dtype).at[0, 0, 5].set(-jnp.inf).at[-1, -1, 3:70, 9].set(-jnp.inf)
    return (q, k, v, bias), mask, normal(np.random.default_rng(3), *q.shape, dtype=dtype)


@takes_pairs
@both
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("masks", [True, False])
def test_mosaic_gradients(name, masks, direction):
    """No further from XLA's in float32 than products of rounded weights are; what it has as 0 is 0."""
    arrays, mask, cotangent = backward_operands(name, direction)
    mask = mask if masks else None
    gradients = pulled(arrays, mask, cotangent, implementation=MOSAIC, direction=direction)
    exact = [x.astype(jnp.float32) for x in (*arrays, cotangent)]
    wanted = pulled(exact[:4], mask, exact[4], implementation="xla", direction=direction)
    dtype = str(cotangent.dtype)
    for gradient, array_, expected in zip(gradients, arrays, wanted, strict=True):
        assert gradient.dtype == array_.dtype and np.all(np.isfinite(float64(gradient)))
        assert_close(gradient, float64(expected), 2 * OP[dtype])  # weights from rounded scores
        assert np.all(float64(gradient)[float64(expected) == 0.0] == 0.0)


@takes_pairs
@without_gpu
@both
@pytest.mark.parametrize("name", list(BACKWARD)[1:])
def test_mosaic_gradients_of_few_ctas(name, direction, monkeypatch):
    """A CTA has several tiles, and several groups of lines to add to one part of the bias's gradient."""
    monkeypatch.setattr(target, "_local", lambda: gpu(1))
    test_mosaic_gradients(name, True, direction)


@takes_pairs
def test_mosaic_gradient_of_a_bias_whose_blocks_no_line_needs():
    arrays, mask, cotangent = backward_operands("blocks without a mask among others", "starting")
    mask = mask.at[:, :, 64:].set(0)
    gradients = pulled(arrays, mask, cotangent, implementation=MOSAIC, direction="starting")
    assert np.any(float64(gradients[3])[..., :64]) and not np.any(float64(gradients[3])[..., 64:])


@takes_pairs
@both
def test_mosaic_gradients_where_masked_keys_are_nan(direction):
    arrays, mask, cotangent = backward_operands("groups of lines one after another, the last in part", direction)
    q, k, v, bias = arrays
    pull = functools.partial(pulled, mask=mask, cotangent=cotangent, implementation=MOSAIC, direction=direction)
    hidden = jnp.where(mask[..., None, None] != 0, k, jnp.nan)
    for found, wanted in zip(pull((q, hidden, v, bias)), pull((q, k, v, bias)), strict=True):
        assert_equal(found, wanted)


@takes_pairs
def test_mosaic_gradients_without_the_gradient_of_the_bias():
    arrays, mask, cotangent = backward_operands("blocks without a mask among others", "starting")
    *qkv, bias = arrays

    def attended(*qkv):
        return ops.triangle_attention(*qkv, bias=bias, mask=mask, direction="starting", implementation=MOSAIC)

    found = jax.jit(lambda *qkv: jax.vjp(attended, *qkv)[1](cotangent))(*qkv)
    wanted = pulled(arrays, mask, cotangent, implementation=MOSAIC, direction="starting")
    for gradient, expected in zip(found, wanted[:3], strict=True):
        assert_equal(gradient, expected)


@takes_pairs
@finds_races
@both
def test_mosaic_gradients_have_no_races(direction):
    arrays, mask, cotangent = backward_operands("a tile in part, fewer lines than a group has", direction)
    with no_races():
        pulled(arrays, mask, cotangent, implementation=MOSAIC, direction=direction)


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("lines, n", [(1024, 1024), (512, 512), (3, 192), (1, 128)])
def test_blocks_and_parts_of_the_gradient_on_hopper(lines, n, of_keys, bias_dtype):
    """What shared memory holds; every part has lines, and no CTA much more to do than others."""
    pairs = jax.ShapeDtypeStruct((1, lines, n, 128), "bfloat16")
    form = Form(
        qkv=(pairs,) * 3,
        mask=jax.ShapeDtypeStruct((1, lines, n), "int32"),
        bias=jax.ShapeDtypeStruct((1, 4, n, n), bias_dtype),
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        sm_scale=1.0,
        precision=jax.lax.Precision.DEFAULT,
        direction="starting",
    )
    hopper = gpu()
    side = Side.of(form, hopper, of_keys=of_keys, adds_bias=not of_keys)
    assert num_bytes(side.buffers().values()) <= hopper.shared_memory - 1024
    assert side.line_stages >= side.lines and side.num_stages >= 2
    assert (side.parts - 1) * side.groups_of_part < side.groups <= side.parts * side.groups_of_part
    assert side.num_ctas == min(side.units, hopper.num_cores)
    if lines == n:
        least = side.tiles * side.owners * side.groups / hopper.num_cores
        assert pl.cdiv(side.units, side.num_ctas) * side.groups_of_part <= 1.25 * least


def test_blocks_of_no_pairs():
    x = jnp.ones((1, 128, 1, 64), "float16")
    config = ring.Config(block_q=64, block_kv=64, num_stages=2, lines=2)
    with pytest.raises(ValueError, match="lines=2 are for pairs, whose lines share a bias"):
        ops.attention(x, x, x, implementation=MOSAIC, config=config)
    with pytest.raises(ValueError, match="lines=4 must be 1, or with blocks of 64 queries up to 3"):
        ring.Config(block_q=64, block_kv=64, num_stages=2, lines=4)
    config = ring.Config(block_q=256, block_kv=64, num_stages=2)
    with pytest.raises(ValueError, match="block_q=256 is for pairs, whose heads are of 32"):
        ops.attention(x, x, x, implementation=MOSAIC, config=config)
    with pytest.raises(ValueError, match="block_kv=128 must be 64 or, below 256 queries, 128"):
        ring.Config(block_q=256, block_kv=128, num_stages=2)


@finds_races
@on_mosaic
def test_mosaic_kernel_has_no_races(direction):
    q, k, v, bias, mask = resident_operands("one tile, blocks of 64", direction)
    with no_races():
        ops.triangle_attention(q, k, v, bias=bias, mask=mask, direction=direction, implementation=MOSAIC)


def test_mosaic_kernel_with_gradients_of_triton(reference):
    *arrays, mask = resident_operands("one block", "starting")
    cotangent = normal(np.random.default_rng(3), *arrays[0].shape, dtype="float16")
    function = functools.partial(reference.triangle_attention, mask=reference.tensor(mask), direction="starting")
    expected = reference.gradients(function, arrays, cotangent)
    for names in ((MOSAIC, KERNEL), MOSAIC):
        gradients = pulled(arrays, mask, cotangent, implementation=names, direction="starting")
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert_close(gradient, wanted, 2 * OP["float16"])  # weights from rounded scores


@without_gpu
@on_mosaic
@pytest.mark.parametrize("n, bias_dtype", [(512, "bfloat16"), (192, "float32"), (256, None)])
def test_mosaic_kernel_lowers_and_is_the_default_with_a_bias(n, bias_dtype, direction):
    pairs = [jax.ShapeDtypeStruct((1, n, n, 4, 32), jnp.bfloat16)] * 3
    bias = None if bias_dtype is None else jax.ShapeDtypeStruct((1, 4, n, n), bias_dtype)
    mask = jax.ShapeDtypeStruct((1, n, n), jnp.int32)

    def f(implementation):
        return lambda q, k, v, bias, mask: ops.triangle_attention(
            q, k, v, bias=bias, mask=mask, direction=direction, implementation=implementation
        )

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(f("mosaic"), *pairs, bias, mask)
        default = lowered_for_cuda(f(None), *pairs, bias, mask)
    assert text.count(f"@{MOSAIC_CALL}") == 1 and TRITON_CALL not in text
    mosaic_first = bias is not None and _jax.since(0, 11)
    chosen, other = (MOSAIC_CALL, TRITON_CALL) if mosaic_first else (TRITON_CALL, MOSAIC_CALL)
    assert default.count(chosen) == 1 and other not in default


@without_gpu
@takes_pairs
@both
def test_mosaic_gradients_lower_and_are_the_default_with_a_bias(direction):
    pairs = [jax.ShapeDtypeStruct((1, 256, 256, 4, 32), jnp.bfloat16)] * 3
    bias = jax.ShapeDtypeStruct((1, 4, 256, 256), jnp.bfloat16)

    def gradients(q, k, v, bias):
        attend = functools.partial(ops.triangle_attention, direction=direction)
        out, pull = jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias=bias), q, k, v, bias)
        return pull(out)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(gradients, *pairs, bias)
    assert text.count(f"@{MOSAIC_CALL}") == 3 and TRITON_CALL not in text  # one of them is the forward pass


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        ((1, 128, 128, 1, 64), "float16", "heads of 32 in multiples of 64 from 128 on, not head_dim=64 and 128"),
        ((1, 65, 65, 1, 32), "float16", "heads of 32 in multiples of 64 from 128 on, not head_dim=32 and 65"),
        ((1, 64, 64, 1, 32), "float32", "takes float16 and bfloat16, not float32"),
    ],
)
def test_what_the_mosaic_kernel_does_not_serve(shape, dtype, message):
    pairs = jax.ShapeDtypeStruct(shape, dtype)
    run = functools.partial(ops.triangle_attention, direction="starting", implementation=MOSAIC)
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.eval_shape(run, *[pairs] * 3)


SQUARE = (2, 5, 5, 2, 16)
Q = normal(np.random.default_rng(1), *SQUARE)
ERRORS = [
    (dict(direction="outgoing"), ValueError, "direction='outgoing' is unknown; expected one of ('starting', 'end"),
    (dict(q=[1.0]), TypeError, "q must be an array, got list"),
    (dict(k=Q.astype("float16")), TypeError, "k has dtype float16 and q has dtype float32; expected the same"),
    (dict(v=Q[:1]), ValueError, "v has shape (1, 5, 5, 2, 16); expected (2, 5, 5, 2, 16), the shape of q"),
    (dict(q=Q[0, 0]), ValueError, "q has shape (5, 2, 16); expected (..., N, N, H, D) with positive H and D"),
    (dict(bias=Q[:, 0]), ValueError, "bias has shape (2, 5, 2, 16); expected (2, 2, 5, 5), (..., H, N, N)"),
    (dict(bias=jnp.ones((2, 2, 5, 5), int)), TypeError, "bias has dtype int32; expected float16, bfloat16 or"),
    (dict(mask=[1]), TypeError, "mask must be an array, got list"),
    (dict(mask=jnp.ones((2, 5))), ValueError, "mask has shape (2, 5); expected (2, 5, 5), (..., N, N), the pairs"),
    (dict(mask=np.array(["a"])), TypeError, "mask has dtype <U1; expected bool, an integer or a float dtype"),
    (dict(scale=np.ones(2)), ValueError, "scale has shape (2,); expected one number"),
    (dict(config=1, implementation="interpret"), TypeError, "config is a int; expected"),
]


@pytest.mark.parametrize("arguments, error, message", ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.triangle_attention(**(dict(q=Q, k=Q, v=Q, direction="starting") | arguments))


def test_heads_too_wide_for_the_kernel():
    wide = jax.ShapeDtypeStruct((1, 4, 4, 1, 300), jnp.float32)
    with pytest.raises(NotImplementedError, match="takes heads of up to 256, not head_dim=300"):
        jax.eval_shape(
            functools.partial(ops.triangle_attention, direction="ending", implementation="triton"), *[wide] * 3
        )
