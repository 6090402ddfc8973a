"""`ops.post_norm_layers` against torch: in one kernel, and in those that it stands for; MiniLM, which calls it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import minilm, ops
from pallas_models import target as targets
from pallas_models.dispatch.axes import CallAxes
from pallas_models.kernels.forms.post_norm_layers import Form, Layer
from pallas_models.kernels.mosaic.post_norm_layers import unsupported
from pallas_models.ops.post_norm_layers import _OP
from parity.cases.post_norm_layers import layer
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.support.common import (
    MOSAIC,
    ON_HOPPER,
    array,
    assert_close,
    assert_gradients_close,
    by_device,
    cuda_device,
    kernel_calls,
    normal,
    traces,
)
from parity.support.tolerances import MODEL, SAME

needs_inline = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs JAX 0.11")


def operands(batch: int, seq: int, n: int, f: int, count: int, dtype="float32", spread=1.0) -> dict[str, Any]:
    """Sizes of x and of weights vary by `spread`; masks have holes, padding at the end, nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, seq, n)) * spread ** rng.integers(-1, 2, (batch, seq, 1))
    kinds = [rng.integers(0, 4, seq) > 0, np.arange(seq) < 2 * seq // 3, np.zeros(seq)]
    layers = [layer(rng, n, f, dtype, spread ** (i % 3 - 1)) for i in range(count)]
    return {"x": array(x, dtype), "layers": layers, "mask": array([kinds[i % 3] for i in range(batch)], "int32")}


def form_of(x: jax.Array, mask: jax.Array, layers: list[dict[str, jax.Array]], num_heads: int) -> Form[jax.Array]:
    options = dict(activation="gelu", epsilon=1e-12, precision=jax.lax.Precision.HIGHEST)
    given = tuple(Layer(**layer) for layer in layers)
    return Form(x=x, mask=mask, bias=None, segment_ids=None, layers=given, num_heads=num_heads, **options)


def call(arrays: dict[str, Any], **options: Any) -> jax.Array:
    return jax.jit(lambda arrays: ops.post_norm_layers(**arrays, **options))(arrays)


def in_float32(arrays: dict[str, Any], **options: Any) -> jax.Array:
    """What is exact, as errors of half precisions go."""
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype.itemsize == 2 else x, arrays)
    return call(wide, implementation="xla", **options)


def test_against_torch(reference, implementation, dtype):
    arrays = operands(3, 7, 32, 48, 2, dtype)
    out = call(arrays, num_heads=2, implementation=implementation)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.post_norm_layers, **arrays, num_heads=2), MODEL[dtype])


def test_a_traced_epsilon():
    arrays = operands(2, 7, 32, 48, 1)
    out = jax.jit(lambda epsilon: ops.post_norm_layers(**arrays, num_heads=2, epsilon=epsilon))(0.1)
    assert_close(out, call(arrays, num_heads=2, epsilon=0.1), SAME)


def test_a_traced_epsilon_is_not_for_the_kernel():
    arrays = operands(2, 7, 128, 512, 1, "float16")
    with cuda_device(*HOPPER):
        assert not traces(
            "post_norm_layers",
            lambda epsilon: ops.post_norm_layers(**arrays, num_heads=4, epsilon=epsilon),
            jnp.float32(0.1),
        )


@needs_inline
@pytest.mark.parametrize("dtype", by_device(cpu=["float16"], gpu=["float16", "bfloat16"]))
@pytest.mark.parametrize(
    "batch, seq, n, count, spread",
    [
        (3, 5, 128, 2, 1.0),  # fewer tokens, of lengths that divide nothing
        *by_device(
            cpu=[],
            # Of more layers at that spread results change with the last bit of the first.
            gpu=[(1, 16, 384, 6, 1.0), (2, 8, 256, 3, 1.0), (16, 1, 384, 12, 1.0), (3, 4, 384, 2, 16.0)],
        ),
    ],
)
def test_hopper_kernel(batch, seq, n, count, spread, dtype):
    arrays = operands(batch, seq, n, 4 * n, count, dtype, spread)
    for mask in by_device(cpu=[arrays["mask"]], gpu=[arrays["mask"], None]):
        arrays["mask"] = mask
        out = call(arrays, num_heads=n // 32, implementation=MOSAIC)
        assert out.dtype == dtype
        assert_close(out, in_float32(arrays, num_heads=n // 32), MODEL[dtype])


@pytest.mark.skipif(not ON_HOPPER, reason="one kernel takes the interpreter a while")
def test_hopper_kernel_under_vmap():
    arrays = operands(3, 16, 384, 1536, 6, "float16")
    options = dict(layers=arrays["layers"], num_heads=12, implementation=MOSAIC)
    one = jax.vmap(lambda x, mask: ops.post_norm_layers(x[None], mask=mask[None], **options)[0])
    assert_close(jax.jit(one)(arrays["x"], arrays["mask"]), in_float32(arrays, num_heads=12), MODEL["float16"])


def test_sentences_under_vmap_are_not_for_the_kernel_unless_it_is_named():
    x, layers, mask = operands(3, 7, 128, 512, 2, "float16").values()

    def one(x, mask, layers, implementation=None):
        out = ops.post_norm_layers(x[None], layers, mask=mask[None], num_heads=4, implementation=implementation)
        return out[0]

    def each(*arrays, implementation=None):
        return jax.vmap(lambda x, mask: one(x, mask, arrays[2], implementation))(*arrays[:2])

    expected = in_float32({"x": x, "layers": layers, "mask": mask}, num_heads=4)
    assert_close(jax.jit(each)(x, mask, layers), expected, MODEL["float16"])
    with cuda_device(*HOPPER):
        named = functools.partial(each, implementation="mosaic")
        assert kernel_calls(lowered_for_cuda(each, x, mask, layers)) > 2
        newer = jax.__version_info__ >= (0, 11)
        assert traces("post_norm_layers", one, x[0], mask[0], layers) == newer
        assert not newer or kernel_calls(lowered_for_cuda(named, x, mask, layers)) == 1


def test_gradients_are_those_of_the_operations_that_it_stands_for():
    """Where the kernel is chosen; on another machine XLA stands in for it."""
    x, layers, mask = operands(2, 7, 128, 512, 2, "float16").values()
    floats, cotangent = (x, layers[1]["w_up"]), normal(np.random.default_rng(1), 2, 7, 128, dtype="float16")

    def f(x, w_up, implementation=None):
        changed = [layers[0], layers[1] | {"w_up": w_up}]
        return ops.post_norm_layers(x, changed, num_heads=4, mask=mask, implementation=implementation)

    expected = jax.jit(lambda *floats: jax.vjp(lambda *a: f(*a, "xla"), *floats)[1](cotangent))(*floats)
    with cuda_device(*HOPPER):
        backward = jax.grad(lambda *floats: jnp.sum(f(*floats).astype("float32")), (0, 1))
        assert traces("post_norm_layers", f, *floats) == (jax.__version_info__ >= (0, 11))
        assert not traces("post_norm_layers", backward, *floats)
        assert_gradients_close(f, floats, cotangent, expected, MODEL["float16"])


@needs_inline
def test_a_short_sentence_is_three_kernels():
    config = minilm.MiniLMConfig(num_layers=2)

    def kernels(seq, implementation=None, dtype="float16"):
        params = jax.eval_shape(lambda: minilm.init(jax.random.key(0), config, dtype=dtype))

        def embed(params, ids, mask):
            return minilm.embed(params, ids, mask, config=config, implementation=implementation)

        tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
        return kernel_calls(lowered_for_cuda(embed, params, tokens, tokens))

    with cuda_device(*HOPPER):
        assert kernels(16) == 3
        assert min(kernels(17), kernels(16, "triton"), kernels(16, dtype="float32")) > 12


@needs_inline
def test_more_layers_make_no_longer_kernel():
    """Each layer beyond the first adds where its arrays are: the first call does not wait for more than that."""

    def length(count):
        arrays = jax.eval_shape(functools.partial(operands, 1, 16, 128, 512, count, "float16"))
        return len(lowered_for_cuda(lambda a: ops.post_norm_layers(**a, num_heads=4), arrays))

    with cuda_device(*HOPPER):
        assert length(6) < 1.45 * length(1)


def test_sequences_are_split_over_devices():
    x, layers, mask = operands(2, 8, 128, 512, 2).values()
    form = form_of(x, mask, layers, 4)
    layout = CallAxes.of(_OP.sharding(form.abstract()), form.operands, 1)
    split = [axes for axes in (*layout.operands, *layout.results) if any(axes)]
    assert split == [("b", None, None), ("b", None), ("b", None, None)]


@needs_inline
@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq": 9}, "takes up to 16 tokens, not 2 x 9"),
        ({"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
        ({"num_heads": 2}, "takes heads of 32, each for one of up to 12 CTAs, in multiples of 4, not 2 of 64"),
        ({"n": 512}, "not 16 of 32"),
        ({"f": 384}, "takes 512 hidden values, four for each of 128 columns, not 384"),
        ({"count": 13}, "takes up to 12 layers, not 13"),
        ({"scale": jnp.ones(128, "float16")}, "takes float32 vectors, not scale of float16"),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(change, message):
    change = dict(batch=2, seq=8, n=128, count=1, dtype="float16") | change
    num_heads = change.pop("num_heads", change["n"] // 32)
    scale = {name: change.pop(name) for name in ("scale",) if name in change}
    x, layers, mask = operands(**{"f": 4 * change["n"]} | change).values()
    form = form_of(x, mask, [one | scale for one in layers], num_heads)
    with cuda_device(*HOPPER):
        assert message in unsupported(form.abstract(), targets.current())


@needs_inline
def test_clusters_that_the_interpreter_would_wait_for_are_refused():
    arrays = operands(1, 16, 384, 1536, 1, "float16")
    with pytest.raises(NotImplementedError, match=r"all warpgroups of a cluster at once, .* not 36"):
        call(arrays, num_heads=12, implementation="mosaic_interpret")


@needs_inline
def test_smaller_gpus_have_no_room_for_a_cluster():
    arrays = operands(1, 16, 384, 1536, 1, "float16")

    def f(x):
        return ops.post_norm_layers(x, arrays["layers"], num_heads=12)

    for num_cores in (132, 114):
        with cuda_device("NVIDIA H100", num_cores):
            assert traces("post_norm_layers", f, arrays["x"]) == (num_cores == 132)
