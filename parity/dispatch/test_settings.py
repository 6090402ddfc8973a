"""Every op and model under JAX's own settings: whatever a user switches on, the values stay the same."""

import contextlib
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import triton

from pallas_models import gpt2, minilm, modernbert, ops, qwen3, training, trimul
from parity import ROOT
from parity.cases import OPS, TRANSFORMED, Call, Case, Empty, Without
from parity.support.common import KERNEL, ON_GPU, TRITON_CALL, assert_close, cuda_device, float64, normal

every_op = pytest.mark.parametrize("call", TRANSFORMED, ids=lambda call: call.name)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """All at once of what refuses something, since each says itself what it refuses."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def strict_and_debugging() -> Iterator[None]:
    with strict(), jax.debug_nans(True), jax.debug_infs(True):
        yield


SETTINGS = {
    "enable_x64": lambda: jax.enable_x64(True),
    "strict": strict,
    "strict_and_debugging": strict_and_debugging,
    "disable_jit": lambda: jax.disable_jit(),
}
every_setting = pytest.mark.parametrize("setting", ["enable_x64", "strict_and_debugging", "disable_jit"])


def model_calls() -> dict[str, Callable[..., jax.Array]]:
    """A small call of every model's entry points, of an implementation."""
    rng = np.random.default_rng(60)
    key = jax.random.key(0)
    ids, mask = jnp.asarray(rng.integers(0, 40, (2, 7)), jnp.int32), jnp.asarray([[1] * 7, [1] * 4 + [0] * 3])
    bert = minilm.MiniLMConfig(
        vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=16
    )
    gpt = gpt2.GPT2Config(
        vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=16
    )
    qwen = qwen3.Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_positions=16,
    )
    mpnet = minilm.MPNetConfig(
        vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=16
    )
    modern = modernbert.ModernBertConfig(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        max_positions=16,
        local_attention=4,
    )
    pair = trimul.TriMulConfig(channels=16, hidden=16, use_bias=True)
    x = normal(rng, 1, 5, 5, 16)
    params = {
        "minilm": minilm.init(key, bert),
        "mpnet": minilm.init(key, mpnet),
        "modernbert": modernbert.init(key, modern),
        "gpt2": gpt2.init(key, gpt),
        "qwen3": qwen3.init(key, qwen),
        "trimul": trimul.init(key, pair),
    }
    return {
        "minilm": lambda i: minilm.embed(params["minilm"], ids, mask == 1, config=bert, implementation=i),
        "mpnet": lambda i: minilm.embed(params["mpnet"], ids, mask, config=mpnet, implementation=i),
        "modernbert": lambda i: modernbert.encode(
            params["modernbert"], ids, mask, config=modern, implementation=i
        ),
        "packed": lambda i: minilm.embed_packed(
            params["minilm"],
            ids,
            jnp.array([[0, 0, 1, 1, 1, -1, -1], [2] * 7]),
            num_segments=3,
            config=bert,
            implementation=i,
        ),
        "gpt2": lambda i: gpt2.logits(
            params["gpt2"], ids, mask == 1, last_only=True, config=gpt, implementation=i
        ),
        "qwen3": lambda i: qwen3.logits(params["qwen3"], ids, mask, config=qwen, implementation=i),
        "trimul": lambda i: trimul.trimul(params["trimul"], x, direction="outgoing", implementation=i),
        "loss": lambda i: gpt2.loss(
            training.stack_layers(params["gpt2"]), ids, mask == 1, config=gpt, remat="block", implementation=i
        ),
        "contrastive": lambda i: minilm.contrastive_loss(
            params["minilm"], (ids, mask), (ids[::-1], mask[::-1]), config=bert, implementation=i
        ),
    }


@pytest.fixture(scope="module")
def models() -> dict[str, Callable[..., jax.Array]]:
    return model_calls()


@pytest.fixture(scope="module")
def plain_model(models) -> Callable[[str], jax.Array]:
    return functools.cache(lambda model: models[model](None))


@functools.cache
def plain(call: Call) -> np.ndarray:
    return np.asarray(jax.jit(call("xla"))(*call.arrays()))


@every_op
@every_setting
def test_ops_compute_the_same(call: Call, setting):
    arrays, expected = call.arrays(), plain(call)
    for implementation in (None, KERNEL):
        with SETTINGS[setting]():
            out = jax.jit(call(implementation))(*arrays)
        assert out.dtype == expected.dtype
        assert_close(out, expected, 2e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX warns of no deprecation")
def test_kernels_are_lowered_without_warnings():
    """However late: JAX keeps what it has traced, and warns where it lowers that."""

    def theirs(x):
        def double(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        parameters = triton.CompilerParams(num_warps=4)
        return pallas.pallas_call(double, out_shape=x, compiler_params=parameters)(x)

    def lower(traced):
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    filters = warnings.filters.copy()
    with cuda_device("NVIDIA H200", 132):
        ours = jax.jit(lambda x: ops.softmax(x, implementation="triton")).trace(x)
        assert warnings.filters == filters
        with strict():
            assert TRITON_CALL in lower(ours)
            with pytest.raises(DeprecationWarning, match="Triton backend is deprecated"):
                lower(jax.jit(theirs).trace(x))


@pytest.mark.covering(1)
@every_setting
@pytest.mark.parametrize("model", ["minilm", "packed", "gpt2", "qwen3", "trimul", "loss", "contrastive"])
def test_models_compute_the_same(models, plain_model, model, setting):
    """As without the setting: other tests compare models with references."""
    expected = plain_model(model)
    with SETTINGS[setting]():
        out = models[model](None)
    assert out.dtype == expected.dtype
    assert_close(out, expected, 2e-6)


def gradient_of(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    rest = call.arrays()[call.floats :]
    return jax.grad(lambda *floats: jnp.sum(call(None)(*floats, *rest)), tuple(range(call.floats)))


@functools.cache
def plain_gradient(call: Call) -> tuple[jax.Array, ...]:
    return jax.jit(gradient_of(call))(*call.arrays()[: call.floats])


@pytest.mark.covering(1)
@every_op
@pytest.mark.parametrize("setting", ["enable_x64", "strict"])
def test_ops_lower_for_cuda_and_have_gradients(call: Call, setting):
    arrays = call.arrays()
    expected = plain_gradient(call)
    with SETTINGS[setting]():
        if not ON_GPU:  # which compiles the kernels, too
            with cuda_device("NVIDIA H200", 132):
                text = jax.jit(call(None)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
            assert "custom_call" in text
        gradients = jax.jit(gradient_of(call))(*arrays[: call.floats])
    for out, wanted in zip(gradients, expected, strict=True):
        assert out.dtype == wanted.dtype
        assert_close(out, wanted, 1e-5)


@pytest.mark.parametrize("implementation", ["xla", None, KERNEL])
def test_sentences_that_are_all_padding_have_no_infinity(implementation):
    """Gradients keep none of queries without keys, which `jax_debug_infs` would find where arrays are concrete."""
    rng = np.random.default_rng(66)
    q, k, v = (normal(rng, 2, 5, 2, 16) for _ in range(3))
    mask = jnp.asarray([[1, 1, 0, 1, 1], [0] * 5])

    def gradients(q, k, v):
        return jax.grad(
            lambda *qkv: jnp.sum(ops.attention(*qkv, mask=mask, implementation=implementation) ** 2), (0, 1, 2)
        )(q, k, v)

    with strict_and_debugging():
        found = gradients(q, k, v)
    for out, expected in zip(found, jax.jit(gradients)(q, k, v), strict=True):
        assert_close(out, expected, 2e-6)
        assert np.all(out[1] == 0.0)


LEAKS = """
import jax
import jax.numpy as jnp

from parity.cases import CALLS

for call in CALLS:
    if call.name in {names!r}:
        floats, rest = call.arrays()[: call.floats], call.arrays()[call.floats :]
        loss = jax.jit(lambda *floats: jnp.sum(call({implementation!r})(*floats, *rest)))
        with jax.checking_leaks():
            jax.make_jaxpr(jax.grad(loss, tuple(range(call.floats))))(*floats)
        print(call.name)
"""


def test_nothing_outlives_a_trace():
    """`jax.checking_leaks` raises where what is differentiated later holds arrays of a trace that has ended.

    In a process of its own, as it looks through all objects of the process again and again.
    """
    names = ["matmul", "matmul_layer_norm", "attention", "linear_cross_entropy_mean"]
    program = [sys.executable, "-c", LEAKS.format(names=names, implementation=KERNEL)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert sorted(done.stdout.split()) == sorted(names), done.stderr


def test_64_bit_segments_stay_apart():
    rng = np.random.default_rng(61)
    q = normal(rng, 1, 6, 1, 16)
    near = jnp.asarray([[0, 0, 0, 1, 1, 1]], jnp.int32)
    expected = ops.attention(q, q, q, segment_ids=near, implementation="xla")
    with jax.enable_x64(True):
        far = jnp.asarray([[0, 0, 0, 2**32, 2**32, 2**32]], jnp.int64)
        out = ops.attention(q, q, q, segment_ids=far)
    assert_close(out, expected, 2e-6)


@pytest.mark.parametrize("implementation", [None, KERNEL])
def test_second_order(implementation):
    rng = np.random.default_rng(63)
    x, scale = normal(rng, 5), normal(rng, 5, shift=1.0)

    def loss(implementation):
        def function(x):
            y = ops.rms_norm(x[None], scale, implementation=implementation)
            return jnp.sum(ops.softmax(y, implementation=implementation) ** 2)

        return function

    assert_close(jax.hessian(loss(implementation))(x), jax.hessian(loss("xla"))(x), 1e-4)
    out, linear = jax.linearize(loss(implementation), x)
    direction = normal(rng, 5)
    assert_close(linear(direction), jax.grad(loss("xla"))(x) @ direction, 1e-5)
    assert_close(out, loss("xla")(x), 1e-6)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradient_of_a_gradient(name):
    """Reverse mode twice: what a kernel keeps for its gradient has cotangents then, which are of no result."""
    rng = np.random.default_rng(66)
    x, vectors = normal(rng, 3, 16), [normal(rng, 16, shift=1.0) for _ in range(2 if name == "layer_norm" else 1)]

    def slope(implementation):
        def gradient(x):
            out = functools.partial(getattr(ops, name), implementation=implementation)
            return jax.grad(lambda x: jnp.sum(jnp.sin(out(x, *vectors))))(x)

        return jax.grad(lambda x: jnp.sum(jnp.sin(gradient(x))))

    assert_close(slope(KERNEL)(x), slope("xla")(x), 1e-4)


EMPTY = [
    pytest.param(case, empty, id=f"{case.name}-{i}")
    for case in OPS.values()
    if not isinstance(case.empty, Without)
    for i, empty in enumerate(case.empty)
]


@pytest.mark.parametrize("implementation", ["xla", None, KERNEL])
@pytest.mark.parametrize("case, empty", EMPTY)
def test_axes_of_size_0(case: Case, empty: Empty, implementation):
    out = jax.jit(lambda: case.op(**empty.arguments, implementation=implementation))()
    assert out.shape == empty.shape
    assert np.all(float64(out) == empty.value)


Z = jnp.zeros


def test_an_empty_vocabulary_has_nothing_to_look_up():
    with pytest.raises(ValueError, match=r"word has shape \(0, 4\); expected at least one row"):
        ops.embed_tokens(Z((2, 3), jnp.int32), Z((0, 4)), Z((3, 4)), Z((2, 4)), Z(4), Z(4))


def test_an_empty_vocabulary_has_no_label():
    with pytest.raises(ValueError, match=r"w has shape \(3, 0\); expected at least one label in \(D, V\)"):
        ops.linear_cross_entropy(Z((2, 3)), Z((3, 0)), Z(2, jnp.int32))


@pytest.mark.parametrize("implementation", ["xla", None, KERNEL])
def test_traced_scales(implementation):
    rng = np.random.default_rng(64)
    x, qkv = normal(rng, 3, 8), normal(rng, 2, 5, 6 * 16)

    def softmax(scale):
        return ops.softmax(x, scale=scale, implementation=implementation)

    def attend(scale):
        return ops.attention_qkv(qkv, num_heads=2, sm_scale=scale, implementation=implementation)

    for function in (softmax, attend):
        out, slope = jax.jit(jax.value_and_grad(lambda s, f=function: jnp.sum(f(s) ** 2)))(0.3)
        assert_close(out, jnp.sum(function(0.3) ** 2), 2e-6)
        with strict():
            for given in (jnp.asarray([0.3]), np.asarray([0.3]), jnp.asarray(0.3, jnp.bfloat16)):
                assert_close(function(given), function(float(given.reshape(()))), 2e-6)
        step = 1e-2
        expected = (jnp.sum(function(0.3 + step) ** 2) - jnp.sum(function(0.3 - step) ** 2)) / (2 * step)
        assert_close(slope, expected, 1e-2)


def test_a_traced_epsilon():
    rng = np.random.default_rng(65)
    x, scale = normal(rng, 3, 8), normal(rng, 8)
    out = jax.jit(lambda epsilon: ops.rms_norm(x, scale, epsilon=epsilon))(0.1)
    assert_close(out, ops.rms_norm(x, scale, epsilon=0.1), 2e-6)
    with pytest.raises(NotImplementedError, match="takes epsilon as a number, not as an array"):
        jax.jit(lambda epsilon: ops.rms_norm(x, scale, epsilon=epsilon, implementation=KERNEL))(0.1)
