"""Cross entropy of a linear layer over a large vocabulary, whose logits never exist as a whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from pallas_models._implementation import Implementation
from pallas_models.dispatch.legacy import Op, run
from pallas_models.dispatch.records import Backward, Kernel
from pallas_models.dispatch.sharding import Sharding, varying_alike
from pallas_models.kernels.triton import linear_cross_entropy as triton
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, Target
from pallas_models.tuning import Chooser

Reduction = Literal["mean", "sum"]

# The logits of so many tokens are held at a time, and of more where the vocabulary is small. Each chunk reads and
# writes the float32 gradient of the kernel, so fewer tokens take longer: for 8192 x 151936 x 1024 on an H200, this
# product takes 7.4 ms in chunks of 512, and 3.1 at once.
_TOKENS = 2048
_LOGITS = 2**26


def linear_cross_entropy(
    x: Array,
    kernel: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    weights: Array | None = None,
    transposed: bool = False,
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: Reduction | None = "mean",
    precision: jax.lax.PrecisionLike = None,
    config: triton.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `-sum_j target_j log(softmax(y)_j)` for each token, `y = x @ kernel + bias`, and their mean or sum.

    `target` is 1 at the label, or `1 - label_smoothing` there and `label_smoothing / V` more everywhere, as in
    `torch.nn.functional.cross_entropy`. Logits exist for a chunk of tokens at a time, never as (tokens, V). Where
    the mean or the sum is differentiated, the pass that computes it computes its gradient too, as in
    [Liger](https://arxiv.org/abs/2410.10989), so that no product is computed twice; with `reduction=None` the
    gradient computes the logits again. XLA multiplies, on a GPU by cuBLAS; the kernel turns the logits of a chunk
    into losses and, in their memory, into their gradient.

    Args:
      x: (..., D), float16, bfloat16 or float32.
      kernel: (D, V), the dtype of `x`. V that is no multiple of 8 costs the kernels a padded copy.
      labels: (...), any integer dtype, from 0 to V - 1. The loss of a token with another label is NaN, and so are
        mean and sum, unless its weight is 0: torch's `ignore_index=-100` is `weights=labels != -100` here.
      bias: (V,), any float dtype, or None.
      weights: (...), bool, integer or float; None for 1 everywhere. A token of weight 0 has no effect on results
        and gradients, whatever `x` and `labels` hold there, NaN included, and the gradient of its weight is 0.
      transposed: whether `kernel` is given as (V, D), the layout of embeddings and of torch's linear layers.
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
      layer does; softmax, losses and sums over tokens, the gradient of `kernel` among them, are float32.

    Raises:
      TypeError: an operand is not of the kind that it must be, or `x` and `kernel` differ in dtype.
      ValueError: shapes do not fit, the vocabulary is empty, or an option is out of its range.
    """
    _check(x, kernel, labels, bias, weights, transposed, label_smoothing, logit_softcap, z_loss, reduction)
    shape, vocab = labels.shape, kernel.shape[0 if transposed else 1]
    if labels.dtype.itemsize < 4:  # which may not hold the size of the vocabulary
        labels = labels.astype(jnp.int32)
    labels = jnp.where((labels >= 0) & (labels < vocab), labels.astype(jnp.int32), -1).reshape(-1)
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights.astype(jnp.float32).reshape(-1)
    weights = jnp.where(weights == 0.0, jnp.float32(0.0), weights)  # which has no gradient

    chunk = _chunk(labels.size, vocab)  # not within what follows: a derivative outlives the arrays that it is of

    def call(*arrays: Any, gradient: bool) -> Any:
        return run(
            _OP,
            *arrays,
            config=config,
            implementation=implementation,
            gradient=gradient,
            transposed=transposed,
            label_smoothing=float(label_smoothing),
            logit_softcap=None if logit_softcap is None else float(logit_softcap),
            z_loss=float(z_loss),
            chunk=chunk,
            precision=_checks.as_precision(precision),
        )

    arrays = x.reshape(-1, x.shape[-1]), kernel, bias, labels
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
    kernel: Array,
    labels: Array,
    bias: Array | None,
    weights: Array | None,
    transposed: bool,
    label_smoothing: float,
    logit_softcap: float | None,
    z_loss: float,
    reduction: str | None,
) -> None:
    _checks.check_float("x", x)
    _checks.check_float("kernel", kernel)
    if x.dtype != kernel.dtype:
        raise TypeError(f"x has dtype {x.dtype} and kernel has dtype {kernel.dtype}; expected the same")
    axes = "(V, D)" if transposed else "(D, V)"
    _checks.check_rank("kernel", kernel, 2, axes)
    depth, vocab = kernel.shape[::-1] if transposed else kernel.shape
    if x.ndim < 1 or x.shape[-1] != depth:
        raise ValueError(
            f"x has shape {x.shape} and kernel has shape {kernel.shape}; expected (..., D) and {axes}"
        )
    if vocab == 0:
        raise ValueError(f"kernel has shape {kernel.shape}; expected at least one label in {axes}")
    _checks.check_integer("labels", labels)
    _checks.check_shape("labels", labels, x.shape[:-1], "that of x but its last axis")
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (vocab,), "(V,)")
    if weights is not None:
        if not hasattr(weights, "dtype") or jnp.issubdtype(weights.dtype, jnp.inexact):
            _checks.check_float("weights", weights)
        _checks.check_shape("weights", weights, x.shape[:-1], "that of x but its last axis")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{label_smoothing=} is out of range; expected 0 to 1")
    if logit_softcap is not None and not 0.0 < logit_softcap < math.inf:
        raise ValueError(f"{logit_softcap=} is out of range; expected None or a positive number")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"{z_loss=} is out of range; expected 0 or a positive number")
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
        losses, dx, dkernel, dbias = call(*primals, gradient=True)
        moving = [
            jnp.sum(gradient.astype(jnp.float32) * tangent.astype(jnp.float32))
            for gradient, tangent in zip((dx, dkernel, dbias, None, losses), tangents, strict=True)
            if gradient is not None and not isinstance(tangent, SymbolicZero)
        ]
        return jnp.sum(weights * losses), sum(moving, jnp.float32(0.0))

    total.defjvp(rule, symbolic_zeros=True)
    return total


_Rows = Callable[..., tuple[jax.Array, ...]]


def _over_chunks(
    rows: _Rows,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    *,
    transposed: bool,
    precision: jax.lax.Precision,
    chunk: int,
    gradient: bool,
) -> Any:
    """The losses of all tokens and, if `gradient`, that of their weighted sum: (losses, dx, dkernel, dbias).

    Args:
      rows: `rows(logits, bias, labels, weights)` gives the losses of a chunk, and the gradient of its logits.
    """
    tokens, vocab = x.shape[0], kernel.shape[0 if transposed else 1]
    chunk = min(chunk, _chunk(tokens, vocab))  # these may be a device's part of the tokens
    steps = pl.cdiv(tokens, chunk)
    padding = steps * chunk - tokens
    dot = functools.partial(jax.lax.dot_general, precision=precision)
    inputs, outputs = (1, 0) if transposed else (0, 1)

    @jax.checkpoint  # the gradient of this, where it is taken, holds the logits of no other chunk either
    def step(carry: Any, part: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        x, labels, weights = part
        x = jnp.where(weights[:, None] == 0.0, 0.0, x)  # 0 times a NaN would be one
        logits = dot(x, kernel, (((1,), (inputs,)), ((), ())), preferred_element_type=x.dtype)
        losses, *gradients = rows(logits, bias, labels, weights)
        if not gradient:
            return carry, losses
        (g,) = gradients
        # In float32 too: the scalar that it is still to be multiplied by would round it a second time.
        dx = dot(g, kernel, (((1,), (outputs,)), ((), ())), preferred_element_type=jnp.float32)
        pair = (g, x) if transposed else (x, g)
        dkernel, dbias = carry
        dkernel += dot(*pair, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        if dbias is not None:
            dbias += jnp.sum(g.astype(jnp.float32), axis=0)
        return (dkernel, dbias), (losses, dx)

    zeros: Any = None
    if gradient:
        zeros = jnp.zeros(kernel.shape, jnp.float32), None if bias is None else jnp.zeros(vocab, jnp.float32)
    zeros, *_ = varying_alike((zeros, x, kernel, labels, weights))  # as what is added to them
    # What fills the last chunk has weight 0.
    parts = [
        jnp.pad(a, [(0, padding), *[(0, 0)] * (a.ndim - 1)]).reshape(steps, chunk, *a.shape[1:])
        for a in (x, labels, weights)
    ]
    carry, out = jax.lax.scan(step, zeros, parts)
    out = jax.tree.map(lambda a: a.reshape(steps * chunk, *a.shape[2:])[:tokens], out)
    if not gradient:
        return out
    (losses, dx), (dkernel, dbias) = out, carry
    return losses, dx, dkernel, dbias


def _plain_rows(
    logits: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    *,
    gradient: bool,
    label_smoothing: float,
    logit_softcap: float | None,
    z_loss: float,
) -> tuple[jax.Array, ...]:
    """The losses of rows of logits (M, V) and, if `gradient`, that of `sum(weights * losses)`, in plain XLA."""

    def losses(logits: jax.Array) -> jax.Array:
        y = logits.astype(jnp.float32)
        if bias is not None:
            y += bias.astype(jnp.float32)
        if logit_softcap is not None:
            y = logit_softcap * jnp.tanh(y / logit_softcap)
        chosen = jnp.sum(jnp.where(labels[:, None] == jnp.arange(y.shape[1]), y, 0.0), axis=1)
        lse = jax.nn.logsumexp(y, axis=1)
        loss = lse - (1.0 - label_smoothing) * chosen
        if label_smoothing:
            loss -= label_smoothing * jnp.mean(y, axis=1)
        if z_loss:
            loss += z_loss * jnp.square(lse)
        loss *= jnp.where((labels < 0) & counts, jnp.nan, 1.0)  # a product, for it to reach the gradient
        return jnp.where(counts, loss, 0.0)

    counts = weights != 0.0
    if not gradient:
        return (losses(logits),)
    loss, pullback = jax.vjp(losses, logits)
    return loss, *pullback(weights)


def reference(
    *arrays: Any,
    transposed: bool,
    precision: jax.lax.Precision,
    chunk: int,
    gradient: bool,
    **form: Any,
) -> Any:
    """The same in plain XLA, for x (T, D), labels (T,), -1 where out of range, and weights (T,).

    It gives the losses (T,) and, if `gradient`, that of `sum(weights * losses)` with it: (losses, dx, dkernel,
    dbias), all in float32.
    """
    rows = functools.partial(_plain_rows, gradient=gradient, **form)
    return _over_chunks(rows, *arrays, transposed=transposed, precision=precision, chunk=chunk, gradient=gradient)


def _with_kernel(
    x: jax.Array,
    kernel: jax.Array,
    *arrays: Any,
    transposed: bool,
    precision: jax.lax.Precision,
    chunk: int,
    gradient: bool,
    config: triton.Config | Chooser | None,
    target: Target,
    interpret: bool,
    **form: Any,
) -> Any:
    """`reference`, with the Triton kernel for what follows the logits."""
    axis = 0 if transposed else 1
    vocab = kernel.shape[axis]
    if vocab % 8:  # rows of logits that begin at multiples of 16 bytes are read in whole vectors
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, -vocab % 128)
        kernel = jnp.pad(kernel, widths)
    rows = functools.partial(
        triton.cross_entropy,
        vocab=vocab,
        gradient=gradient,
        config=config,
        target=target,
        interpret=interpret,
        **form,
    )
    out = _over_chunks(
        rows, x, kernel, *arrays, transposed=transposed, precision=precision, chunk=chunk, gradient=gradient
    )
    if not gradient:
        return out
    losses, dx, dkernel, dbias = out
    dkernel = jax.lax.slice_in_dim(dkernel, 0, vocab, axis=axis)
    return losses, dx, dkernel, None if dbias is None else dbias[:vocab]


def _backward(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    cotangent: jax.Array,
    *,
    wanted: tuple[bool, ...],
    **options: Any,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of x, kernel and bias, for that of the losses: the gradient of a sum with other weights."""
    del wanted  # XLA leaves out the products that nothing needs
    weights = jnp.where(weights == 0.0, 0.0, cotangent)
    _, dx, dkernel, dbias = _with_kernel(x, kernel, bias, labels, weights, **(options | {"gradient": True}))
    return (
        dx.astype(x.dtype),
        dkernel.astype(kernel.dtype),
        None if bias is None else dbias.astype(bias.dtype),
        None,
        None,
    )


def _refuses_backward(*_: Any, gradient: bool, **__: Any) -> str | None:
    return "has no kernel for the gradient of a gradient" if gradient else None


_OP = Op(
    name="linear_cross_entropy",
    reference=reference,
    kernels=(Kernel(backend="triton", architectures=AMPERE_ON, call=_with_kernel, config=triton.Config),),
    backward=(Backward(backend="triton", call=_backward, refuses=_refuses_backward),),
    sharding=Sharding(equation="t D, D V, V, t, t -> t, t D, D V, V"),
    derivative=reference,  # whose gradient then keeps its operands alone, where XLA computes it too
)
