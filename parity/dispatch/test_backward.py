"""How a gradient of its own serves an op: when it is called, for what, and under which transformations."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels import forms
from pallas_models.target import AMPERE_ON, HOPPER
from parity.support.common import array, assert_close, normal
from parity.support.tolerances import GRADIENT

ROWS, WIDTH, OUTPUTS = 5, 4, 3


@pytest.fixture(autouse=True)
def no_tf32():
    """The products of this file are jnp's, which a GPU computes in TF32 by default."""
    with jax.default_matmul_precision("highest"):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form):
    """`tanh(x * scale) @ w` in the rows that are kept."""

    OPERANDS = ("x", "keep", "w")

    x: Any
    keep: Any
    w: Any
    scale: float
    return_sum: bool = False


def reference(form):
    y = jnp.tanh(form.x * form.scale) @ form.w * form.keep[:, None]
    return (y, jnp.sum(form.x * form.x, -1)) if form.return_sum else y


SHARDING = Sharding(equation="m K, m, K N -> m N, m")


class Recorder:
    """An op whose kernel and gradient are jnp, and which notes what its gradient was called with."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        backward = Backward(
            backend="triton", call=self.backward, keeps=2, options={"return_sum": True}, refuses=self.refuses
        )
        kernel = Kernel(backend="triton", architectures=AMPERE_ON, call=self.forward, config=None)
        self.op = Op(
            name="recorder", reference=reference, kernels=(kernel,), backward=(backward,), sharding=SHARDING
        )
        self.reason: str | None = None

    def refuses(self, form, target) -> str | None:
        return self.reason

    def forward(self, form, *, config, target, interpret):
        return reference(form)

    def backward(self, form, kept, cotangents, *, wanted, config, target, interpret):
        dy, dtotal = cotangents
        self.calls.append(dict(wanted=wanted, interpret=interpret, dtotal=dtotal, return_sum=form.return_sum))
        t = jnp.tanh(form.x * form.scale)
        dy = dy * form.keep[:, None]
        dx = dy @ form.w.T * (1 - t * t) * form.scale
        if dtotal is not None:
            dx += 2 * form.x * dtotal[:, None]
        return dx, None, t.T @ dy

    def __call__(self, implementation, return_sum=False) -> Callable[..., Any]:
        def call(x, w):
            form = Form(x=x, keep=KEEP, w=w, scale=2.0, return_sum=return_sum)
            return run(self.op, form, implementation=implementation)

        return call


rng = np.random.default_rng(70)
KEEP = array([1, 0, 1, 1, 0], "int32")
X, W = normal(rng, ROWS, WIDTH), normal(rng, WIDTH, OUTPUTS)
XS, WS = normal(rng, 6, ROWS, WIDTH), normal(rng, 6, WIDTH, OUTPUTS)
WEIGHTS, SUM_WEIGHTS = normal(rng, ROWS, OUTPUTS), normal(rng, ROWS)


def loss_of_result(call):
    return lambda x, w: jnp.sum(jnp.sin(call(x, w)) * WEIGHTS)


def loss_of_both(call):
    def loss(x, w):
        y, total = call(x, w)
        return jnp.sum(jnp.sin(y) * WEIGHTS) + jnp.sum(jnp.square(total) * SUM_WEIGHTS)

    return loss


def loss_of_second(call):
    return lambda x, w: jnp.sum(jnp.square(call(x, w)[1]) * SUM_WEIGHTS)


LOSSES = {"result": (loss_of_result, False), "both": (loss_of_both, True), "second": (loss_of_second, True)}
BOTH = (0, 1)


def of_gradient(loss, argnums=1):
    return lambda x, w: jnp.sum(jnp.square(jax.grad(loss, argnums)(x, w)))


def scanned(loss):
    def total(x, w):
        return jnp.sum(jax.lax.scan(lambda x, _: (0.9 * x, loss(x, w)), x, None, length=3)[1])

    return total


def without_jit(loss):
    with jax.disable_jit():
        return jax.grad(loss, BOTH)(X, W)


def wide(loss):
    with jax.enable_x64(True):
        return jax.grad(loss, BOTH)(X, W)


def mapped(loss, axes):
    return lambda x, w: jnp.sum(jax.vmap(loss, axes)(x, w))


# Each of a loss; and whether a gradient of its own is to be called for it.
TRANSFORMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "grad": (lambda f: jax.grad(f, BOTH)(X, W), True),
    "jit_of_grad": (lambda f: jax.jit(jax.grad(f, BOTH))(X, W), True),
    "jvp": (lambda f: jax.jvp(f, (X, W), (X, W)), False),
    "linearize": (lambda f: jax.linearize(f, X, W)[1](X, W), False),
    "hessian": (lambda f: jax.hessian(f, BOTH)(X, W), True),
    "jacrev_of_jacfwd": (lambda f: jax.jacrev(jax.jacfwd(f))(X, W), True),
    "grad_of_grad": (lambda f: jax.grad(of_gradient(f), BOTH)(X, W), True),
    "grad_of_grad_of_grad": (lambda f: jax.grad(of_gradient(of_gradient(f), 0), BOTH)(X, W), True),
    "vmap_of_grad": (lambda f: jax.vmap(jax.grad(f, BOTH), (0, None))(XS, W), True),
    "grad_of_vmap": (lambda f: jax.grad(mapped(f, (0, None)), BOTH)(XS, W), True),
    "grad_of_vmap_over_both": (lambda f: jax.grad(mapped(f, (0, 0)), BOTH)(XS, WS), True),
    "vmap_of_grad_of_grad": (lambda f: jax.vmap(jax.grad(of_gradient(f), BOTH), (0, None))(XS, W), True),
    "checkpoint": (lambda f: jax.jit(jax.grad(jax.checkpoint(f), BOTH))(X, W), True),
    "scan": (lambda f: jax.grad(scanned(f), BOTH)(X, W), True),
    "checkpointed_scan": (lambda f: jax.grad(scanned(jax.checkpoint(f)), BOTH)(X, W), True),
    "jvp_of_grad_of_scan": (lambda f: jax.jvp(jax.grad(scanned(f), BOTH), (X, W), (X, W)), True),
    "hessian_of_scan": (lambda f: jax.hessian(scanned(f), BOTH)(X, W), True),
    "grad_of_grad_of_scan": (lambda f: jax.grad(of_gradient(scanned(f)), BOTH)(X, W), True),
    "jvp_of_grad_of_scan_of_vmap": (
        lambda f: jax.jvp(
            jax.grad(scanned(lambda x, w: mapped(f, (0, None))(jnp.stack([x, 0.5 * x]), w)), BOTH), (X, W), (X, W)
        ),
        True,
    ),
    "disable_jit": (without_jit, True),
    "enable_x64": (wide, True),
}


# The others are one program each: operations one by one would all be.
EAGER = ("grad", "disable_jit", "enable_x64")


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "loss, implementation", [("result", None), ("both", "interpret"), ("second", "interpret")]
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_agree_with_those_of_the_reference(transform, loss, implementation):
    recorder = Recorder()
    make, both = LOSSES[loss]
    apply, is_called = TRANSFORMS[transform]

    def result(implementation):
        program = lambda: apply(make(recorder(implementation, both)))  # noqa: E731
        return program() if transform in EAGER else jax.jit(program)()

    out = result(implementation)
    assert bool(recorder.calls) == is_called
    expected = result("xla")
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert_near(a, b)


def _norm(x, w, name):
    return ops.rms_norm(x, w[0], implementation=name)


def _descent(x, w, name):
    return x - jax.grad(lambda x: jnp.sum(jnp.sin(_norm(x, w, name))))(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("call", [_norm, _descent])
def test_a_gradient_of_kernels_in_a_loop_is_differentiated_again(call, mapped):
    def found(implementation):
        f = functools.partial(call, name=implementation)
        step = (lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 0.5 * x]), w)[1]) if mapped else f

        def loss(x, w):
            return jnp.sum(jnp.sin(jax.lax.scan(lambda x, _: (step(x, w), None), x, None, length=2)[0]))

        pushed = jax.jvp(jax.grad(loss, BOTH), (X, W.T), (X, W.T))[1]
        return pushed, jax.grad(of_gradient(loss, 0), BOTH)(X, W.T)

    out, expected = (jax.jit(found, static_argnums=0)(name) for name in ("interpret", "xla"))
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert_near(a, b)


def assert_near(out, expected):
    if np.any(expected):
        assert_close(out, expected, 4 * GRADIENT)  # of third order at most, each a product of the one before
    else:
        assert not np.any(out)


def test_what_a_scan_stores_of_a_kernel_is_apart_from_it():
    # XLA would have the kernel run twice: for what is stored and for what is used.
    f = jax.grad(scanned(loss_of_both(Recorder()("interpret", True))), BOTH)
    text = jax.jit(f).lower(X, W).as_text()
    assert len(re.findall("stablehlo.optimization_barrier", text)) == 1


def test_a_gradient_is_told_what_is_wanted():
    recorder = Recorder()
    jax.grad(loss_of_result(recorder("interpret")), 1)(X, W)
    jax.grad(loss_of_both(recorder("interpret", return_sum=True)), 0)(X, W)
    first, second = recorder.calls
    assert first["wanted"] == (False, False, True) and first["dtotal"] is None and first["interpret"]
    assert second["wanted"] == (True, False, False) and second["dtotal"].shape == (ROWS,)
    assert (first["return_sum"], second["return_sum"]) == (False, True)


def test_a_gradient_that_refuses_leaves_the_call_to_the_reference():
    recorder = Recorder()
    recorder.reason = "takes no such thing"
    out = jax.grad(loss_of_result(recorder("interpret")), BOTH)(X, W)
    assert not recorder.calls
    for a, b in zip(out, jax.grad(loss_of_result(recorder("xla")), BOTH)(X, W), strict=True):
        assert_close(a, b, GRADIENT)


def test_a_gradient_of_a_backend_that_is_not_named_is_not_called():
    recorder = Recorder()
    other = Kernel(backend="mosaic", architectures=HOPPER, call=recorder.forward, config=None)
    op = dataclasses.replace(recorder.op, kernels=(other, *recorder.op.kernels))

    def gradient(*names):
        def loss(x):
            return jnp.sum(run(op, Form(x=x, keep=KEEP, w=W, scale=2.0), implementation=names))

        return jax.grad(loss)(X)

    assert_close(gradient("mosaic_interpret"), gradient("xla"), GRADIENT)
    assert not recorder.calls
    assert_close(gradient("mosaic_interpret", "interpret"), gradient("xla"), GRADIENT)
    assert recorder.calls
