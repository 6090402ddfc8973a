"""`ops.linear_cross_entropy` against torch: values, gradients, weights, labels, chunks, and what is never held."""

import functools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_models import ops
from pallas_models.kernels.forms.linear_cross_entropy import Loss
from pallas_models.kernels.mosaic import linear_cross_entropy as mosaic
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.triton.linear_cross_entropy import Config, configs, cross_entropy, heuristic
from parity.ops.test_lowering import every_device, lowered_for_cuda
from parity.ops.test_rows import ROWS, WAYS
from parity.support import sharing
from parity.support.common import (
    KERNEL,
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    float64,
    gpu,
    interprets_mosaic,
    kernel_calls,
    normal,
    relative_error,
    without_gpu,
)
from parity.support.sharing import GB
from parity.support.tolerances import GRADIENT, LONG, OP, SHORT, products

SHAPES = by_device(
    cpu=[
        (1, 1, 1),
        (7, 33, 50),  # odd
        (5, 16, 64),  # the logits need no padding
        (3, 20, 9001),  # more than one block of a row
    ],
    gpu=[(7, 33, 50), (4096, 768, 50257), (1000, 1024, 32768), (333, 100, 151_936)],
)
FORMS = {
    "plain": dict(),
    "transpose_w": dict(transpose_w=True),
    "smoothing": dict(label_smoothing=0.1),
    "softcap": dict(logit_softcap=3.0),
    "z-loss": dict(z_loss=0.02),
    "all": dict(transpose_w=True, label_smoothing=0.2, logit_softcap=4.0, z_loss=0.01),
}
REDUCTIONS = ["mean", "sum", None]
every_implementation = pytest.mark.parametrize(
    "implementation", ["xla", KERNEL, pytest.param(ROWS, marks=interprets_mosaic)]
)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)


def draw(tokens: int, depth: int, vocab: int, *, dtype: str = "float32", transpose_w: bool = False, seed: int = 0):
    """x, w, bias, weights with zeros, and labels, for logits of about the size of 2."""
    rng = np.random.default_rng(seed)
    shape = (vocab, depth) if transpose_w else (depth, vocab)
    weights = rng.uniform(0.5, 2.0, tokens) * (np.arange(tokens) % 4 != 2)
    return (
        normal(rng, tokens, depth, dtype=dtype),
        normal(rng, *shape, dtype=dtype, scale=2.0 * depth**-0.5),
        normal(rng, vocab, dtype=dtype),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32),
    )


def loss(labels, **options):
    """The op as a function of what can be differentiated."""

    def function(x, w, bias=None, weights=None):
        return ops.linear_cross_entropy(x, w, labels, bias=bias, weights=weights, **options)

    return function


@pytest.fixture
def small_chunks(monkeypatch):
    """The logits of a chunk are few: a vocabulary of 50 is computed 8 tokens at a time."""
    module = sys.modules["pallas_models.ops.linear_cross_entropy"]
    monkeypatch.setattr(module, "_TOKENS", 8)
    monkeypatch.setattr(module, "_LOGITS", 0)


@pytest.mark.covering(2)
@every_implementation
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, dtype, shape, implementation):
    x, w, bias, weights, labels = draw(*shape, dtype=dtype)
    out = compiled.linear_cross_entropy(
        x, w, labels, bias=bias, weights=weights, reduction=None, implementation=implementation
    )
    assert out.dtype == jnp.float32
    expected = reference.compute(
        reference.linear_cross_entropy, x, w, bias, weights, labels=labels, reduction=None
    )
    if np.any(expected):
        assert_close(out, expected, OP[dtype])
    else:  # the only label is certain: its logit less itself, but for the last bit of the logarithm of 1
        assert np.all(np.abs(float64(out)) <= 2.0**-20)
    assert np.all(float64(out)[float64(weights) == 0.0] == 0.0)


@every_implementation
@pytest.mark.parametrize(
    "form, reduction",
    [*((form, "mean") for form in FORMS), *((form, r) for form in ("plain", "all") for r in ("sum", None))],
)
def test_every_form_and_its_gradients(reference, small_chunks, form, reduction, implementation):
    options = dict(FORMS[form], reduction=reduction)
    *arrays, labels = draw(37, 33, 50, transpose_w=options.get("transpose_w", False))
    function = loss(labels, implementation=implementation, **options)
    targets = reference.tensor(labels)

    def expected(*arrays):
        return reference.linear_cross_entropy(*arrays, labels=targets, **options)

    out = jax.jit(function)(*arrays)
    assert_close(out, reference.compute(expected, *arrays), SHORT)
    cotangent = normal(np.random.default_rng(1), *out.shape)
    assert_differentiates(reference, function, expected, arrays, cotangent)


def assert_differentiates(reference, function, expected, arrays, cotangent):
    wanted = reference.gradients(expected, arrays, cotangent)
    if len(arrays) == 4:  # the gradient of a weight of 0 is 0
        wanted[3] = np.where(float64(arrays[3]) == 0.0, 0.0, wanted[3])
    assert_gradients_close(function, arrays, cotangent, wanted, GRADIENT)


@pytest.mark.covering(2)
@every_implementation
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_gradients_of_every_dtype(reference, dtype, tolerance, shape, implementation):
    """In half precision logits and their gradient are rounded as well as the result.

    The cotangent is of a sum over tokens: the cotangent of their mean would make subnormal numbers of float16.
    """
    if shape[2] >= 50_000:
        sharing.needs(9 * GB)
    x, w, _, _, labels = draw(*shape, dtype=dtype)
    targets = reference.tensor(labels)

    def expected(x, w):
        return reference.linear_cross_entropy(x, w, labels=targets)

    cotangent = jnp.asarray(float(shape[0]))
    wanted = reference.gradients(expected, [x, w], np.asarray(cotangent))
    function = loss(labels, implementation=implementation)
    over_vocabulary = products(shape[2])  # what the gradient of x is a sum of
    assert_gradients_close(function, [x, w], cotangent, wanted, max(tolerance, GRADIENT, over_vocabulary))


@every_implementation
def test_no_further_off_than_torch_in_bfloat16(reference, implementation):
    torch = pytest.importorskip("torch")
    x, w, _, _, labels = draw(100, 64, 300, dtype="bfloat16")  # a division by 128 would be exact
    targets = reference.tensor(labels)
    exact = reference.gradients(
        lambda x, w: reference.linear_cross_entropy(x, w, labels=targets), [x, w], np.asarray(1.0)
    )
    halves = [reference.tensor(a, torch.bfloat16).requires_grad_() for a in (x, w)]
    logits = torch.nn.functional.linear(halves[0], halves[1].T)
    theirs = torch.autograd.grad(torch.nn.functional.cross_entropy(logits.float(), targets), halves)
    ours = jax.jit(jax.grad(loss(labels, implementation=implementation), (0, 1)))(x, w)
    for mine, other, expected in zip(ours, theirs, exact, strict=True):
        assert relative_error(mine, expected) <= relative_error(other.float().cpu().numpy(), expected)


@pytest.mark.covering(1)
@every_implementation
@every_reduction
def test_tokens_of_weight_0_have_no_effect(small_chunks, reduction, implementation):
    x, w, bias, weights, labels = draw(37, 33, 50)
    left_out = np.asarray(weights) == 0.0
    garbage = jnp.where(
        left_out[:, None], jnp.asarray([jnp.nan, jnp.inf, -jnp.inf])[jnp.arange(37) % 3][:, None], x
    )
    wrong = jnp.where(left_out, jnp.asarray([-100, 50, 2**31 - 1])[jnp.arange(37) % 3], labels)

    def run(x, labels, rows):
        def total(*arrays):
            return jnp.sum(loss(labels, reduction=reduction, implementation=implementation)(*arrays))

        value, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(x, w, bias, weights[rows])
        return value, gradients

    value, (dx, dw, dbias, dweights) = run(garbage, wrong, slice(None))
    expected, (x_expected, *shared, weights_expected) = run(x[~left_out], labels[~left_out], ~left_out)
    assert_close(value, expected, SHORT)
    for out, wanted in zip((dw, dbias), shared, strict=True):
        assert_close(out, wanted, SHORT)
    assert_close(dx[~left_out], x_expected, SHORT)
    assert_close(dweights[~left_out], weights_expected, SHORT)
    assert np.all(float64(dx)[left_out] == 0.0) and np.all(float64(dweights)[left_out] == 0.0)


@every_implementation
def test_a_mask_is_weights_of_0_and_1(implementation):
    x, w, _, weights, labels = draw(7, 33, 50)
    kept = weights != 0.0
    ignored = jnp.where(kept, labels, -100)
    out = compiled.linear_cross_entropy(x, w, ignored, weights=ignored != -100, implementation=implementation)
    one_by_one = compiled.linear_cross_entropy(x, w, labels, reduction=None, implementation=implementation)
    assert_close(out, jnp.mean(one_by_one[kept]), SHORT)
    for mask in (kept.astype(jnp.int32), kept.astype(jnp.bfloat16)):
        same = compiled.linear_cross_entropy(x, w, labels, weights=mask, implementation=implementation)
        assert_equal(same, out)


@every_implementation
@every_reduction
def test_no_token_counts(reduction, implementation):
    x, w, _, _, labels = draw(7, 33, 50)
    for chosen, weights in ((slice(None), jnp.zeros(7, bool)), (slice(0, 0), None)):

        def total(x, w, chosen=chosen, weights=weights):
            options = dict(weights=weights, reduction=reduction, implementation=implementation)
            return jnp.sum(ops.linear_cross_entropy(x, w, labels[chosen], **options))

        value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(x[chosen], w)
        for out in (value, *gradients):
            assert np.all(float64(out) == 0.0)


@functools.cache
def loss_and_gradient(implementation):
    """A program of x, w and labels: one for all labels."""

    def step(x, w, labels):
        return jax.value_and_grad(loss(labels, implementation=implementation))(x, w)

    return jax.jit(step)


@every_implementation
@pytest.mark.parametrize("label", [-1, -100, 50, 2**31 - 1])
def test_a_label_out_of_range_is_nan(label, implementation):
    x, w, _, _, labels = draw(7, 33, 50)
    wrong = labels.at[3].set(label)
    right = compiled.linear_cross_entropy(x, w, labels, reduction=None, implementation=implementation)
    out = float64(compiled.linear_cross_entropy(x, w, wrong, reduction=None, implementation=implementation))
    assert np.array_equal(np.isnan(out), np.arange(7) == 3)
    assert_close(np.delete(out, 3), np.delete(float64(right), 3), SHORT)
    value, gradient = loss_and_gradient(implementation)(x, w, wrong)
    assert np.isnan(value)
    assert np.all(np.isnan(float64(gradient[3]))) and np.all(np.isfinite(np.delete(float64(gradient), 3, axis=0)))


@pytest.mark.parametrize("kind, wrong", [("int8", -1), ("uint8", 255), ("uint32", 2**32 - 1), ("int64", 2**32)])
@pytest.mark.parametrize("vocab", [50, 300])  # more than 8 bits count, too
def test_labels_of_every_dtype(kind, wrong, vocab):
    x, w, _, _, labels = draw(7, 33, vocab)
    labels = jnp.minimum(labels, 49)
    expected = float64(ops.linear_cross_entropy(x, w, labels, reduction=None))
    with jax.enable_x64(kind == "int64"):
        given = labels.astype(kind).at[3].set(wrong)
        out = float64(ops.linear_cross_entropy(x, w, given, reduction=None))
    in_range = 0 <= wrong < vocab  # the 255 of 300
    assert np.isnan(out[3]) == (not in_range)
    assert_close(np.delete(out, 3), np.delete(expected, 3), SHORT)


@every_implementation
def test_leading_axes(implementation):
    x, w, bias, weights, labels = draw(24, 33, 50)
    flat = compiled.linear_cross_entropy(
        x, w, labels, bias=bias, weights=weights, reduction=None, implementation=implementation
    )
    for axes in ((2, 3, 4), (24, 1)):
        out = compiled.linear_cross_entropy(
            x.reshape(*axes, 33),
            w,
            labels.reshape(axes),
            bias=bias,
            weights=weights.reshape(axes),
            reduction=None,
            implementation=implementation,
        )
        assert_equal(out, flat.reshape(axes))
    one = compiled.linear_cross_entropy(x[1], w, labels[1], bias=bias, implementation=implementation)
    assert_close(one * weights[1], flat[1], SHORT)


@every_implementation
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_logits(reference, smoothing, implementation):
    """Logits of +-1e4 and, from a bias, words that cannot be."""
    x, w, _, _, labels = draw(7, 33, 50)
    w = 1e4 * w
    labels = jnp.minimum(labels, 39)
    options = dict(label_smoothing=smoothing, reduction=None)
    out = compiled.linear_cross_entropy(x, w, labels, implementation=implementation, **options)
    expected = reference.compute(reference.linear_cross_entropy, x, w, labels=labels, **options)
    assert_close(out, expected, SHORT)
    gradient = jax.jit(jax.grad(loss(labels, implementation=implementation)))(x, w)
    assert np.all(np.isfinite(gradient))
    cannot_be = jnp.where(jnp.arange(50) < 40, 0.0, -jnp.inf)
    value, gradients = jax.jit(jax.value_and_grad(loss(labels, implementation=implementation), (0, 1)))(
        x, w / 1e4, cannot_be
    )
    expected, wanted = jax.value_and_grad(loss(labels, implementation="xla"), (0, 1))(x, w[:, :40] / 1e4)
    assert_close(value, expected, SHORT)
    assert_close(gradients[0], wanted[0], SHORT)
    assert_close(gradients[1], jnp.pad(wanted[1], ((0, 0), (0, 10))), SHORT)


@every_implementation
def test_scaled_losses_in_float16(reference, implementation):
    """The gradient is scaled before it is rounded, so that scaling a loss keeps it from underflow."""
    x, w, _, _, labels = draw(500, 33, 50, dtype="float16")
    targets = reference.tensor(labels)
    scale = 2.0**12
    wanted = reference.gradients(
        lambda x, w: reference.linear_cross_entropy(x, w, labels=targets), [x, w], np.asarray(scale)
    )

    def scaled(x, w):
        return scale * loss(labels, implementation=implementation)(x, w)

    assert_gradients_close(scaled, [x, w], jnp.asarray(1.0), wanted, OP["float16"])


def largest_array(text: str) -> int:
    """The number of elements of the largest array that a lowered program names."""
    shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    return max(math.prod(map(int, shape.rstrip("x").split("x"))) for shape in shapes)


@pytest.mark.covering(1)
@every_implementation
@every_reduction
def test_logits_are_never_held(small_chunks, reduction, implementation):
    """Not in the loss, nor in derivatives of any mode and order."""
    tokens, depth, vocab = 320, 16, 50
    x, w, _, _, labels = draw(tokens, depth, vocab)

    def total(x, w):
        return jnp.sum(loss(labels, reduction=reduction, implementation=implementation)(x, w) ** 2)

    def forward(x, w):
        return jax.jvp(total, (x, w), (x, w))

    def second(x, w):
        return jax.grad(lambda x: jnp.sum(jax.grad(total)(x, w) ** 2))(x)

    for function in (total, jax.grad(total, (0, 1)), forward, second):
        text = jax.jit(function).lower(x, w).as_text()
        assert largest_array(text) <= tokens * depth + depth * vocab < tokens * vocab / 2
    whole = jax.jit(lambda x, w: jax.nn.log_softmax(x @ w)).lower(x, w).as_text()
    assert largest_array(whole) == tokens * vocab


@every_implementation
@pytest.mark.parametrize("argnums, products", [((0, 1), 3), (0, 2), (1, 2)], ids=str)
def test_nothing_is_computed_twice_or_in_vain(argnums, products, implementation):
    """Logits once; of the gradients of x and w those that are wanted."""
    x, w, bias, weights, labels = draw(37, 33, 50)
    gradient = jax.jit(jax.value_and_grad(loss(labels, implementation=implementation), argnums))
    text = gradient.lower(x, w, bias, weights).as_text()
    assert text.count("stablehlo.dot_general") == products
    value = jax.jit(loss(labels, implementation=implementation)).lower(x, w, bias, weights).as_text()
    assert value.count("stablehlo.dot_general") == 1


def test_the_gradient_of_every_loss_is_a_kernel_too():
    x, w, bias, weights, labels = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in draw(37, 33, 50))

    def pull_back(x, w, bias, weights, labels, cotangent):
        return jax.vjp(loss(labels, reduction=None), x, w, bias, weights)[1](cotangent)

    with cuda_device("NVIDIA H200", 132):
        arrays = (x, w, bias, weights, labels, weights)
        text = jax.jit(pull_back).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert kernel_calls(text) == 2  # of the losses, which the gradient of the weights is made of, and of x and w
    assert text.count("stablehlo.dot_general") == 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("implementation", [None, KERNEL])
@every_reduction
def test_second_order(small_chunks, reduction, implementation):
    x, w, _, _, labels = draw(11, 6, 50)

    def whole(x, w):
        y = jnp.matmul(x, w, precision="highest")
        losses = jax.nn.logsumexp(y, -1) - jnp.take_along_axis(y, labels[:, None], 1)[:, 0]
        return losses if reduction is None else {"mean": jnp.mean, "sum": jnp.sum}[reduction](losses)

    def hessian(function):
        return jax.jit(jax.hessian(lambda x: jnp.sum(function(x, w) ** 2)))(x)

    ours = loss(labels, reduction=reduction, implementation=implementation)
    assert_close(hessian(ours), hessian(whole), 1e-5)


def test_symbolic_sizes():
    """Of tokens: exported once, for any number of chunks."""
    (batch,) = export.symbolic_shape("batch")
    x, w, _, _, labels = draw(4 * 700, 6, 9)

    def step(x, w, labels):
        return jax.value_and_grad(loss(labels), (0, 1))(x, w)

    shapes = [((batch, 4, 6), x.dtype), (w.shape, w.dtype), ((batch, 4), labels.dtype)]
    exported = export.export(jax.jit(step))(*(jax.ShapeDtypeStruct(*a) for a in shapes))
    arrays = x.reshape(700, 4, 6), w, labels.reshape(700, 4)
    for out, wanted in zip(jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(step(*arrays)), strict=True):
        assert_close(out, wanted, SHORT)


@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize("block_v", [16, 64, 256])
def test_every_tile_config(reference, block_v, num_warps):
    x, w, bias, weights, labels = draw(9, 33, 150)
    config = Config(block_v=block_v, num_warps=num_warps)
    function = loss(labels, config=config, implementation=KERNEL, label_smoothing=0.1)
    targets = reference.tensor(labels)

    def expected(*arrays):
        return reference.linear_cross_entropy(*arrays, labels=targets, label_smoothing=0.1)

    assert_close(jax.jit(function)(x, w, bias, weights), reference.compute(expected, x, w, bias, weights), LONG)
    assert_differentiates(reference, function, expected, [x, w, bias, weights], jnp.asarray(1.0))


@pytest.mark.parametrize("vocab", [1, 50, 1000, 8192, 50304, 151_936, 10**6])
@pytest.mark.parametrize("gradient", [False, True])
def test_heuristic(vocab, gradient):
    config = heuristic(vocab, gradient)
    assert config.block_v < 2 * max(vocab, 16)
    assert config.block_v <= 256 * config.num_warps
    assert vocab < 1000 or config in configs(vocab)


@interprets_mosaic
@pytest.mark.parametrize("config", [*WAYS, mosaic.Config(threads=256, block_n=2048, warpgroups=2)], ids=str)
@pytest.mark.parametrize("form", ["plain", "all"])
def test_every_config_in_mosaic(form, config):
    """Rows that are held and walked, of a part of a warp and of several warpgroups, against plain XLA."""
    options, vocab = FORMS[form], 150 if config.threads <= 128 else 2500
    x, w, bias, weights, labels = draw(9, 33, vocab, transpose_w=options.get("transpose_w", False))

    def derived(implementation, config=None):
        function = loss(labels, config=config, implementation=implementation, **options)
        return jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))(x, w, bias, weights)

    found, wanted = derived(ROWS, config), derived("xla")
    assert_close(found[0], wanted[0], SHORT)
    for gradient, expected in zip(found[1], wanted[1], strict=True):
        assert_close(gradient, expected, GRADIENT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("width", [50, 1000, 8192, 50304, 151_936, 10**6])
def test_heuristic_of_mosaic(width, gradient, dtype):
    """Up to 32 elements at a time are in a thread, and rows that are walked again have more threads."""
    config = mosaic.heuristic(2048, width, dtype, gradient=gradient)
    assert config in mosaic.configs(2048, width, dtype)
    blocks = Blocks.of(config, jax.ShapeDtypeStruct((2048, width), dtype))
    assert blocks.columns * blocks.vector <= 32
    assert blocks.are_held == (width <= 16384)
    if width > 16384:
        assert config.threads == (256 if not gradient else 512 if width == 50304 else 1024)


@without_gpu
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="has Mosaic for Hopper alone")
@every_device
@pytest.mark.parametrize("form, vocab, dtype", [("all", 50257, "bfloat16"), ("plain", 32768, "float32")])
def test_lowers_to_mosaic_on_every_generation(form, vocab, dtype, device):
    shape = (vocab, 768) if FORMS[form].get("transpose_w") else (768, vocab)
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in ((8192, 768), shape, (vocab,))]
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)

    def step(x, w, bias, labels):
        function = loss(labels, implementation="mosaic", **FORMS[form])
        return jax.value_and_grad(function, (0, 1, 2))(x, w, bias)

    with cuda_device(*device):
        text = lowered_for_cuda(step, *arrays, labels)
    assert text.count(f"@{MOSAIC_CALL}") == 1 and TRITON_CALL not in text


@pytest.mark.parametrize(
    "tokens, vocab, chunk",
    [
        (0, 50, 8),
        (7, 50, 8),
        (32768, 50257, 2048),
        (5000, 50257, 1672),  # three chunks
        (8192, 10**6, 2048),
        (10**6, 1000, 62504),  # no more than 2**26 logits, and little padding
    ],
)
def test_chunks(tokens, vocab, chunk):
    assert sys.modules["pallas_models.ops.linear_cross_entropy"]._chunk(tokens, vocab) == chunk


@without_gpu
@pytest.mark.parametrize(
    "form, vocab, dtype",
    [
        *((form, 50257, "bfloat16") for form in FORMS),
        *(("plain", vocab, d) for vocab in (32768, 50257) for d in ("float16", "float32")),
    ],
)
def test_lowers_to_triton(form, vocab, dtype):
    shape = (vocab, 768) if FORMS[form].get("transpose_w") else (768, vocab)
    x, w, bias = (jax.ShapeDtypeStruct(s, dtype) for s in ((8192, 768), shape, (vocab,)))
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)

    def step(x, w, labels, bias):
        function = loss(labels, **FORMS[form])
        return jax.value_and_grad(function, (0, 1, 2))(x, w, bias)

    with cuda_device("NVIDIA H200", 132):
        text = jax.jit(step).trace(x, w, labels, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert kernel_calls(text) == 1


@pytest.mark.parametrize(
    "cross_entropy", [cross_entropy, pytest.param(mosaic.cross_entropy, marks=interprets_mosaic)]
)
def test_padding_of_logits_does_not_count(cross_entropy):
    logits = normal(np.random.default_rng(0), 5, 64)
    labels, weights = jnp.asarray([0, 49, 50, 63, 7]), jnp.ones(5)
    options = dict(vocab=50, loss=Loss(label_smoothing=0.1, logit_softcap=None, z_loss=0.0), config=None)
    run = dict(target=gpu(), interpret=not ON_GPU, gradient=True)
    losses, gradient = cross_entropy(logits, None, labels, weights, **options, **run)
    assert np.array_equal(np.isnan(losses), [False, False, True, True, False])
    garbage = logits.at[:, 50:].set(jnp.nan)
    same, same_gradient = cross_entropy(garbage, None, labels, weights, **options, **run)
    rows = np.asarray([0, 1, 4])
    assert_equal(same[rows], losses[rows])
    assert_equal(same_gradient[rows], gradient[rows])
    assert np.all(gradient[:, 50:] == 0.0)


def test_blocks_that_are_no_powers_of_two_are_refused():
    for field, value in (("block_v", 48), ("num_warps", 0)):
        with pytest.raises(ValueError, match=f"{field}={value} must be a power of two"):
            Config(**{**dict(block_v=64, num_warps=2), field: value})
