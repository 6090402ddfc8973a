"""Cross entropy of a linear layer over a large vocabulary, whose logits never exist as a whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding, varying_alike
from pallas_models.kernels.forms.linear_cross_entropy import Form, Loss
from pallas_models.kernels.mosaic import linear_cross_entropy as mosaic
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_on_hopper
from pallas_models.kernels.triton import linear_cross_entropy as triton
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, Target
from pallas_models.tuning import Chooser

Reduction = Literal["mean", "sum"]

# The logits of so many tokens are held at a time, and of more where the vocabulary is small. Each chunk reads and
# writes the float32 gradient of w, so fewer tokens take longer: for 8192 x 151936 x 1024 on an H200, this product
# takes 7.4 ms in chunks of 512, and 3.1 at once.
_TOKENS = 2048
_LOGITS = 2**26


def linear_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    weights: Array | None = None,
    transpose_w: bool = False,
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: Reduction | None = "mean",
    precision: jax.lax.PrecisionLike = None,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `-sum_j target_j log(softmax(y)_j)` for each token, `y = x @ w + bias`, and their mean or sum.

    `target` is 1 at the label, or `1 - label_smoothing` there and `label_smoothing / V` more everywhere, as in
    `torch.nn.functional.cross_entropy`. Logits exist for a chunk of tokens at a time, never as (tokens, V). Where
    the mean or the sum is differentiated, the pass that computes it computes its gradient too, as in
    [Liger](https://arxiv.org/abs/2410.10989), so that no product is computed twice; with `reduction=None` the
    gradient computes the logits again. XLA multiplies, on a GPU by cuBLAS; the kernel turns the logits of a chunk
    into losses and, in their memory, into their gradient.

    In place of the operands the gradient of a mean or a sum keeps the gradients of `x`, `w` and `bias` in float32:
    4 (T D + D V + V) bytes for T tokens. With `reduction=None` it keeps the operands alone.

    ```
    x, w, labels = jnp.ones((8, 64)), jnp.ones((64, 100)), jnp.arange(8)
    loss = ops.linear_cross_entropy(x, w, labels, weights=labels > 2)  # log(100)
    ```

    Args:
      x: (..., D), float16, bfloat16 or float32.
      w: (D, V), the dtype of `x`. V that is no multiple of 8 costs the kernels a padded copy.
      labels: (...), any integer dtype, from 0 to V - 1. The loss of a token with another label is NaN, and so are
        mean and sum, unless its weight is 0: torch's `ignore_index=-100` is `weights=labels != -100` here.
      bias: (V,), any float dtype, or None.
      weights: (...), bool, integer or float; None for 1 everywhere. A token of weight 0 has no effect on results
        and gradients, whatever `x` and `labels` hold there, NaN included, and the gradient of its weight is 0.
      transpose_w: whether `w` is given as (V, D), the layout of embeddings and of torch's linear layers.
      label_smoothing: from 0 to 1.
      logit_softcap: a bound c of the logits, which become `c tanh(y / c)`, as in
        [Gemma 2](https://arxiv.org/abs/2408.00118); None for none.
      z_loss: adds `z_loss * log(sum(exp(y)))**2` to each token's loss, as in
        [PaLM](https://arxiv.org/abs/2204.02311).
      reduction: `"mean"` is `sum(weights * loss) / sum(weights)`, 0 where the weights sum to 0, `"sum"` its
        numerator, None `weights * loss` for each token.
      precision: of float32 products: None and HIGHEST are true float32, DEFAULT and HIGH allow TF32 on
        a GPU. Ignored for the half precisions.
      config: block size of the Triton kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      A float32 scalar, or (...) in float32 if `reduction` is None. Half precisions round the logits, as a linear
      layer does; softmax, losses and sums over tokens, the gradient of `w` among them, are float32.

    Raises:
      TypeError: an operand is not of the kind that it must be, or `x` and `w` differ in dtype.
      ValueError: shapes do not fit, the vocabulary is empty, or an option is out of its range.
    """
    loss = Loss(
        label_smoothing=float(label_smoothing),
        logit_softcap=None if logit_softcap is None else float(logit_softcap),
        z_loss=float(z_loss),
    )
    _check(x, w, labels, bias, weights, transpose_w, loss, reduction)
    shape, vocab = labels.shape, w.shape[0 if transpose_w else 1]
    if labels.dtype.itemsize < 4:  # which may not hold the size of the vocabulary
        labels = labels.astype(jnp.int32)
    labels = jnp.where((labels >= 0) & (labels < vocab), labels.astype(jnp.int32), -1).reshape(-1)
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights.astype(jnp.float32).reshape(-1)
    weights = jnp.where(weights == 0.0, jnp.float32(0.0), weights)  # which has no gradient

    chunk = _chunk(labels.size, vocab)  # not within what follows: a derivative outlives the arrays that it is of

    def call(*arrays: Any, gradient: bool) -> Any:
        form = Form(
            **dict(zip(Form.OPERANDS, arrays, strict=True)),
            transpose_w=transpose_w,
            loss=loss,
            chunk=chunk,
            precision=_checks.as_precision(precision),
            gradient=gradient,
        )
        return run(_OP, form, config=config, implementation=implementation)

    arrays = x.reshape(-1, x.shape[-1]), w, bias, labels
    if reduction is None:
        return (weights * call(*arrays, jax.lax.stop_gradient(weights), gradient=False)).reshape(shape)
    total = _sum(call)(*arrays, weights)
    if reduction == "sum":
        return total
    divisor = jnp.sum(weights)
    is_empty = divisor == 0.0
    return jnp.where(is_empty, jnp.float32(0.0), total / jnp.where(is_empty, jnp.float32(1.0), divisor))


def _check(
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None,
    weights: Array | None,
    transpose_w: bool,
    loss: Loss,
    reduction: str | None,
) -> None:
    _checks.check_float("x", x)
    _checks.check_float("w", w)
    if x.dtype != w.dtype:
        raise TypeError(f"x has dtype {x.dtype} and w has dtype {w.dtype}; expected the same")
    axes = "(V, D)" if transpose_w else "(D, V)"
    _checks.check_rank("w", w, 2, axes)
    depth, vocab = w.shape[::-1] if transpose_w else w.shape
    if x.ndim < 1 or x.shape[-1] != depth:
        raise ValueError(f"x has shape {x.shape} and w has shape {w.shape}; expected (..., D) and {axes}")
    if vocab == 0:
        raise ValueError(f"w has shape {w.shape}; expected at least one label in {axes}")
    _checks.check_integer("labels", labels)
    _checks.check_shape("labels", labels, x.shape[:-1], "the shape of x without its last axis")
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (vocab,), "(V,)")
    if weights is not None:
        if not hasattr(weights, "dtype") or jnp.issubdtype(weights.dtype, jnp.inexact):
            _checks.check_float("weights", weights)
        _checks.check_shape("weights", weights, x.shape[:-1], "the shape of x without its last axis")
    if not 0.0 <= loss.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={loss.label_smoothing!r} is out of range; expected 0 to 1")
    if loss.logit_softcap is not None and not 0.0 < loss.logit_softcap < math.inf:
        raise ValueError(
            f"logit_softcap={loss.logit_softcap!r} is out of range; expected None or a positive number"
        )
    if not 0.0 <= loss.z_loss < math.inf:
        raise ValueError(f"z_loss={loss.z_loss!r} is out of range; expected 0 or a positive number")
    if reduction not in (None, "mean", "sum"):
        raise ValueError(f"{reduction=} is unknown; expected 'mean', 'sum' or None")


def _chunk(tokens: int, vocab: int) -> int:
    """How many of `tokens` are computed at a time: as many in each chunk, in eights, as cuBLAS wants them."""
    if not isinstance(tokens, int):  # a symbolic size
        return _TOKENS
    most = max(_TOKENS, 1 << (_LOGITS // vocab).bit_length() >> 1)
    return 8 * pl.cdiv(max(tokens, 1), 8 * max(pl.cdiv(tokens, most), 1))


def _sum(call: Callable[..., Any]) -> Callable[..., jax.Array]:
    """`sum(weights * losses)` of what `call` computes, with the gradient that it computes along with the losses.

    In the forward pass the gradient is known but for a scalar. A rule of forward mode, linear in tangents, serves
    all modes: reverse mode keeps the gradient and multiplies it by that scalar.
    """

    @jax.custom_jvp
    def total(*arrays: Any) -> jax.Array:
        return jnp.sum(arrays[-1] * call(*arrays, gradient=False))

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        *_, weights = primals
        losses, dx, dw, dbias = call(*primals, gradient=True)
        moving = [
            jnp.sum(gradient.astype(jnp.float32) * tangent.astype(jnp.float32))
            for gradient, tangent in zip((dx, dw, dbias, None, losses), tangents, strict=True)
            if gradient is not None and not isinstance(tangent, SymbolicZero)
        ]
        return jnp.sum(weights * losses), sum(moving, jnp.float32(0.0))

    total.defjvp(rule, symbolic_zeros=True)
    return total


# `rows(logits, bias, labels, weights)` gives the losses of rows of logits (M, V) and, where the form asks for it,
# the gradient of `sum(weights * losses)` by the logits.
_Rows = Callable[[jax.Array, jax.Array | None, jax.Array, jax.Array], tuple[jax.Array, ...]]


def _over_chunks(rows: _Rows, form: Form[jax.Array]) -> Any:
    """The losses of all tokens; with the gradient of their weighted sum, (losses, dx, dw, dbias)."""
    x, w, bias, labels, weights = form.operands
    tokens, vocab, gradient = x.shape[0], form.vocab, form.gradient
    chunk = min(form.chunk, _chunk(tokens, vocab))  # these may be a device's part of the tokens
    steps = pl.cdiv(tokens, chunk)
    padding = steps * chunk - tokens
    dot = functools.partial(jax.lax.dot_general, precision=form.precision)
    inputs, outputs = (1, 0) if form.transpose_w else (0, 1)

    @jax.checkpoint  # the gradient of this, where it is taken, holds the logits of no other chunk either
    def step(carry: Any, part: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        x, labels, weights = part
        x = jnp.where(weights[:, None] == 0.0, 0.0, x)  # 0 times a NaN would be one
        logits = dot(x, w, (((1,), (inputs,)), ((), ())), preferred_element_type=x.dtype)
        losses, *gradients = rows(logits, bias, labels, weights)
        if not gradient:
            return carry, losses
        (g,) = gradients
        # In float32 too: the scalar that it is still to be multiplied by would round it a second time.
        dx = dot(g, w, (((1,), (outputs,)), ((), ())), preferred_element_type=jnp.float32)
        pair = (g, x) if form.transpose_w else (x, g)
        dw, dbias = carry
        dw += dot(*pair, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        if dbias is not None:
            dbias += jnp.sum(g.astype(jnp.float32), axis=0)
        return (dw, dbias), (losses, dx)

    zeros: Any = None
    if gradient:
        zeros = jnp.zeros(w.shape, jnp.float32), None if bias is None else jnp.zeros(vocab, jnp.float32)
    zeros, *_ = varying_alike((zeros, x, w, labels, weights))  # as the terms that are added to them
    # What fills the last chunk has weight 0.
    parts = [
        jnp.pad(a, [(0, padding), *[(0, 0)] * (a.ndim - 1)]).reshape(steps, chunk, *a.shape[1:])
        for a in (x, labels, weights)
    ]
    carry, out = jax.lax.scan(step, zeros, parts)
    out = jax.tree.map(lambda a: a.reshape(steps * chunk, *a.shape[2:])[:tokens], out)
    if not gradient:
        return out
    (losses, dx), (dw, dbias) = out, carry
    return losses, dx, dw, dbias


def _plain_rows(
    logits: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    *,
    loss: Loss,
    gradient: bool,
) -> tuple[jax.Array, ...]:
    """The losses of rows of logits (M, V) in plain XLA, and the gradient of `sum(weights * losses)`, if asked."""

    def losses_of(logits: jax.Array) -> jax.Array:
        y = logits.astype(jnp.float32)
        if bias is not None:
            y += bias.astype(jnp.float32)
        if loss.logit_softcap is not None:
            y = loss.logit_softcap * jnp.tanh(y / loss.logit_softcap)
        chosen = jnp.sum(jnp.where(labels[:, None] == jnp.arange(y.shape[1]), y, 0.0), axis=1)
        lse = jax.nn.logsumexp(y, axis=1)
        losses = lse - (1.0 - loss.label_smoothing) * chosen
        if loss.label_smoothing:
            losses -= loss.label_smoothing * jnp.mean(y, axis=1)
        if loss.z_loss:
            losses += loss.z_loss * jnp.square(lse)
        losses *= jnp.where((labels < 0) & counts, jnp.nan, 1.0)  # a product, for it to reach the gradient
        return jnp.where(counts, losses, 0.0)

    counts = weights != 0.0
    if not gradient:
        return (losses_of(logits),)
    losses, pullback = jax.vjp(losses_of, logits)
    return losses, *pullback(weights)


def reference(form: Form[jax.Array]) -> Any:
    """The losses (T,) in plain XLA, and all gradients in float32 where the form asks for them."""
    return _over_chunks(functools.partial(_plain_rows, loss=form.loss, gradient=form.gradient), form)


def _with_kernel(
    cross_entropy: Callable[..., Any], form: Form[jax.Array], *, config: Any, target: Target, interpret: bool
) -> Any:
    """`reference`, with the kernel of a backend for what follows the logits."""
    axis, vocab = 0 if form.transpose_w else 1, form.vocab
    padded = form
    if vocab % 8:  # rows of logits that begin at multiples of 16 bytes are read in whole vectors
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, -vocab % 128)
        padded = form.replace(w=jnp.pad(form.w, widths))
    rows = functools.partial(
        cross_entropy,
        vocab=vocab,
        loss=form.loss,
        gradient=form.gradient,
        config=config,
        target=target,
        interpret=interpret,
    )
    out = _over_chunks(rows, padded)
    if not form.gradient:
        return out
    losses, dx, dw, dbias = out
    dw = jax.lax.slice_in_dim(dw, 0, vocab, axis=axis)
    return losses, dx, dw, None if dbias is None else dbias[:vocab]


def _backward(
    cross_entropy: Callable[..., Any],
    form: Form[jax.Array],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of x, w and bias, given the losses' cotangent: the gradient of a sum with other weights.

    XLA leaves out the products of cotangents that are not wanted.
    """
    weights = jnp.where(form.weights == 0.0, 0.0, cotangents[0])
    gradient = form.replace(weights=weights, gradient=True)
    _, dx, dw, dbias = _with_kernel(cross_entropy, gradient, config=config, target=target, interpret=interpret)
    return (
        dx.astype(form.x.dtype),
        dw.astype(form.w.dtype),
        None if form.bias is None else dbias.astype(form.bias.dtype),
        None,
        None,
    )


def _refuses_backward(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    return "has no kernel for the gradient of a gradient" if form.gradient else None


_OP: Op[Form[Any]] = Op(
    name="linear_cross_entropy",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=functools.partial(_with_kernel, mosaic.cross_entropy),
            config=mosaic.Config,
            preferred=prefer_on_hopper,
        ),
        Kernel(
            backend="triton",
            architectures=AMPERE_ON,
            call=functools.partial(_with_kernel, triton.cross_entropy),
            config=triton.Config,
        ),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=PORTABLE,
            call=functools.partial(_backward, mosaic.cross_entropy),
            refuses=_refuses_backward,
            preferred=prefer_on_hopper,
        ),
        Backward(
            backend="triton", call=functools.partial(_backward, triton.cross_entropy), refuses=_refuses_backward
        ),
    ),
    sharding=Sharding(equation="t D, D V, V, t, t -> t, t D, D V, V"),
    derivative=reference,  # whose gradient then keeps its operands alone, where XLA computes it too
)
