"""Matrix product with a fused epilogue."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import _jax
from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding, Total
from pallas_models.kernels.forms.matmul import ALGORITHMS, Activation, Algorithm, Form
from pallas_models.kernels.mosaic import activation_backward as mosaic_activation
from pallas_models.kernels.mosaic import matmul as mosaic
from pallas_models.kernels.mosaic import matmul_mma as mma
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_nowhere, prefer_on_hopper
from pallas_models.kernels.mosaic.common.interpreter import interprets_transposed
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.matmul_backward import unsupported as weight_gradient_unsupported
from pallas_models.kernels.mosaic.matmul_backward import weight_gradient
from pallas_models.kernels.mosaic.peer_reduction import sum_of_parts
from pallas_models.kernels.triton import activation_backward as triton_activation
from pallas_models.kernels.triton import matmul as triton
from pallas_models.ops import _checks, _half_precision, activations
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, HOPPER, Target
from pallas_models.tuning import Chooser

_STORED_FROM = 2**25  # sums; on four H200s half as many take 17% longer than by NCCL, so many take 20% less
EQUATIONS = {False: "mk,kn->mn", True: "mk,nk->mn"}  # by transpose_w


def matmul(
    x: Array,
    w: Array,
    *,
    transpose_w: bool = False,
    bias: Array | None = None,
    activation: Activation | None = None,
    residual: Array | None = None,
    acc_dtype: DTypeLike = jnp.float32,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm | None = None,
    config: triton.Config | mosaic.Config | mma.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `activation(x @ w + bias) + residual`.

    The product is accumulated in `acc_dtype`; bias, activation and residual are applied in float32
    before the single rounding to `out_dtype`.

    With an activation the gradient keeps its argument beside the operands: (..., N) in the dtype of `x`.

    ```
    x, w, bias = jnp.ones((8, 64)), jnp.ones((64, 128)), jnp.zeros(128)
    y = ops.matmul(x, w, bias=bias, activation="gelu")  # (8, 128)
    ```

    Args:
      x: (..., K), or (..., M, K) if `w` has batch axes, float16, bfloat16 or float32.
      w: (K, N), the dtype of `x`; or (..., K, N), whose leading axes are broadcast against the axes of `x`, as in
        `jnp.matmul`.
      transpose_w: whether `w` is given as (..., N, K), the layout of torch's linear layers. It is not copied.
      bias: (N,), any float dtype, or None.
      activation: `"gelu"` (exact, with erf), `"gelu_tanh"`, `"relu"`, `"sigmoid"`, `"silu"` or None.
      residual: the shape of the result, any float dtype, or None.
      acc_dtype: float32, or float16 for float16 operands: on GeForce GPUs twice the tensor-core rate,
        at an error that grows with K.
      precision: of float32 products: None and HIGHEST are true float32, DEFAULT and HIGH allow TF32 on
        a GPU. Ignored for the half precisions.
      out_dtype: dtype of the result; the dtype of `x` when None.
      algorithm: None is the fastest for the shape. The others are rungs of a ladder: `"naive"` multiplies and
        adds strips of one row element by element; `"tiled"` gives each program a tile of 64 x 64 and the tensor
        cores, and loads nothing ahead; `"pipelined"` sizes the tiles for the shape, walks them in an order that
        suits the L2 cache and loads ahead of the products; `"split_k"` also splits the contraction between
        programs, for few outputs of long contractions. XLA has only its own.
      config: tile sizes of the Triton or a Mosaic kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves half
        precisions and no batch: with `wgmma` on Hopper rows in multiples of 8, N and K in multiples of 64, a
        residual of the dtype of the result; with `mma`, from JAX 0.11 on, any rows, N and K in multiples of 32 on
        GPUs from Ampere on.

    Returns:
      (..., N), or (..., M, N) if `w` has batch axes, in `out_dtype`.

    Raises:
      TypeError: an operand is not floating point, or `x` and `w` differ in dtype.
      ValueError: shapes do not fit, or an option is unknown.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    shape = check(x, w, bias, activation, residual, acc_dtype, transpose_w=transpose_w, batched=True)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm=} is unknown; expected None or one of {ALGORITHMS}")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if math.prod(w.shape[:-2]) == 1:  # it is shared by the rows of all the batch
        rows = math.prod(shape[:-1])
        x, w = x.reshape(rows, x.shape[-1]), w.reshape(w.shape[-2:])
        residual = None if residual is None else residual.reshape(rows, shape[-1])
    batch = math.prod(shape[:-2]) if w.ndim > 2 else 1

    def one(x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
        form = Form(
            x=x,
            w=w,
            bias=bias,
            residual=residual,
            transpose_w=transpose_w,
            activation=activation,
            acc_dtype=jnp.dtype(acc_dtype),
            precision=_checks.as_precision(precision),
            out_dtype=out_dtype,
            algorithm=algorithm,
            batch=batch,
        )
        return run(_OP, form, config=config, implementation=implementation if batch else "xla")

    return _over_batch(one, x, w, bias, residual).reshape(shape)


def backward(
    form: Form[jax.Array],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
    epilogue: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients as XLA's products of x, w and the cotangent, each read as it lies in memory.

    Args:
      kept: what the activation was applied to, if there is one.
      epilogue: `activation_backward` of a backend, if a kernel is to compute the cotangent of what the activation
        was applied to.
    """
    dout = cotangents[0]
    assert dout is not None
    dresidual = None if form.residual is None else dout.astype(form.residual.dtype)
    if form.activation is not None and epilogue is not None:
        dy, dbias = epilogue(
            kept[0], dout, activation=form.activation, config=config, target=target, interpret=interpret
        )
        dy = dy.astype(jnp.float32)
    else:
        dy = dout.astype(jnp.float32)
        if form.activation is not None:
            apply = functools.partial(activations.apply, form.activation)
            (dy,) = jax.vjp(apply, kept[0].astype(jnp.float32))[1](dy)
        dbias = jnp.sum(dy, axis=0)
    product = functools.partial(_half_precision.einsum, EQUATIONS[form.transpose_w], precision=form.precision)
    dx, dw = jax.vjp(product, form.x, form.w)[1](dy)
    return dx, dw, None if form.bias is None else dbias.astype(form.bias.dtype), dresidual


def mosaic_backward(
    form: Form[jax.Array],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradients without an activation. One kernel reads the cotangent for the weights' and the bias's."""
    kernel: dict[str, Any] = dict(config=config, target=target, interpret=interpret)
    dx, dw, dbias, dresidual = backward(form, kept, cotangents, wanted=wanted, **kernel)
    serves = not interpret or interprets_transposed()
    dout = cotangents[0]
    if serves and dout is not None and form.bias is not None and wanted[1] and wanted[2]:
        dw, sums = weight_gradient(form.x, dout, **kernel)
        dbias = sums.astype(form.bias.dtype)
    return dx, dw, dbias, dresidual


def refuses_mosaic_backward(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `mosaic_backward` does not serve the gradient of a call; None if it does."""
    if form.out_dtype != form.x.dtype:
        return f"takes results of the dtype of the operands, {form.x.dtype}, not {form.out_dtype}"
    return _has_activation(form, target) or weight_gradient_unsupported(form)


def many_rows(rows: int) -> bool:
    """Whether Mosaic's gradients of a product of so many rows pay."""
    return rows >= 2048


def _prefer_mosaic_backward(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    return form.bias is not None and many_rows(form.x.shape[0])


def _prefer_mosaic_activation(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether Mosaic's kernel for an activation's gradient is as fast as Triton's, by the results' columns."""
    return form.w.shape[0 if form.transpose_w else 1] % 8 == 0 and prefer_on_hopper(form, target)


def _over_batch(
    one: Callable[..., jax.Array], x: Array, w: Array, bias: Array | None, residual: Array | None
) -> jax.Array:
    """`one(x, w, bias, residual)` of the matrices of a batch; a batch axis of 1 is broadcast, and not copied."""
    rank = max(x.ndim, w.ndim)
    if rank == 2:
        return one(x, w, bias, residual)
    x, w = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, w))
    size = w.shape[0] if x.shape[0] == 1 else x.shape[0]
    axes = [0 if a.shape[0] == size else None for a in (x, w)]
    x, w = (a if axis == 0 else a[0] for a, axis in zip((x, w), axes, strict=True))
    over_rest = functools.partial(_over_batch, one)
    return jax.vmap(over_rest, (*axes, None, None if residual is None else 0))(x, w, bias, residual)


def reference(form: Form[jax.Array]) -> Any:
    """The product with epilogue in plain XLA; with `return_preactivation` a pair."""
    equation = EQUATIONS[form.transpose_w]
    y = _half_precision.einsum(equation, form.x, form.w, precision=form.precision, acc_dtype=form.acc_dtype)
    out, y = finish(y.astype(jnp.float32), form.bias, form.residual, form.activation)
    out = out.astype(form.out_dtype)
    return (out, y.astype(form.dtype)) if form.return_preactivation else out


def finish(
    y: jax.Array, bias: jax.Array | None, residual: jax.Array | None, activation: Activation | None
) -> tuple[jax.Array, jax.Array]:
    """The epilogue of a product in float32, and the sums that its activation is applied to."""
    if bias is not None:
        y += bias.astype(jnp.float32)
    out = activations.apply(activation, y)
    return out if residual is None else out + residual.astype(jnp.float32), y


def _has_activation(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    return None if form.activation is None else "needs what the activation was applied to"


def _contracted(call: Callable[[Form[jax.Array]], jax.Array], total: Total, form: Form[jax.Array]) -> Any:
    """The products of each device's part of K, added up in the dtype of the result; then the epilogue."""
    if not form.return_preactivation and _can_store(total, form):
        peers = Peers(axis=total.over[0], count=jax.lax.axis_size(total.over[0]))
        product = form.replace(residual=None)
        parts = mosaic.matmul(product, config=None, target=total.target, interpret=False, peers=peers)
        return sum_of_parts(parts, form.residual, peers=peers, target=total.target, interpret=False)
    product = form.replace(bias=None, residual=None, activation=None, return_preactivation=False)
    out, y = finish(total(call(product)).astype(jnp.float32), form.bias, form.residual, form.activation)
    out = out.astype(form.out_dtype)
    return (out, y.astype(form.dtype)) if form.return_preactivation else out


def _can_store(total: Total, form: Form[jax.Array]) -> bool:
    """Whether it is faster that kernels store parts on the GPU that adds them up, and the sums on all GPUs."""
    if not total.target.has_peers or form.bias is not None or form.activation is not None:
        return False
    m, n, _ = form.sizes
    return (
        m % (256 * jax.lax.axis_size(total.over[0])) == 0
        and m * n >= _STORED_FROM
        and form.out_dtype == form.x.dtype
        and mosaic.unsupported(form.abstract(), total.target) is None
    )


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    return Sharding(equation=f"m k, {'n k' if form.transpose_w else 'k n'}, n, m n -> m n, m n")


# It comes before Hopper's kernel, which counts where both serve a call and none is preferred.
_MMA = (
    Kernel(
        backend="mosaic",
        architectures=AMPERE_ON,
        call=mma.matmul,
        config=mma.Config,
        refuses=mma.unsupported,
        preferred=prefer_nowhere,
    ),
)
_PREACTIVATION = {"return_preactivation": True}
_OP: Op[Form[Any]] = Op(
    name="matmul",
    reference=reference,
    kernels=(
        *(_MMA if _jax.since(0, 11) else ()),  # JAX 0.10 has no `mma`
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.matmul,
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=mosaic.prefer,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.matmul, config=triton.Config),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic_backward,
            refuses=refuses_mosaic_backward,
            preferred=_prefer_mosaic_backward,
        ),
        Backward(backend="xla", call=backward, refuses=_has_activation),
        Backward(
            backend="mosaic",
            architectures=PORTABLE,
            call=functools.partial(backward, epilogue=mosaic_activation.activation_backward),
            keeps=-1,
            options=_PREACTIVATION,
            preferred=_prefer_mosaic_activation,
        ),
        Backward(
            backend="triton",
            call=functools.partial(backward, epilogue=triton_activation.activation_backward),
            keeps=-1,
            options=_PREACTIVATION,
        ),
        Backward(backend="xla", call=backward, keeps=-1, options=_PREACTIVATION),
    ),
    sharding=_sharding,
    contracted=_contracted,
)


def check(
    x: Array,
    w: Array,
    bias: Array | None,
    activation: str | None,
    residual: Array | None,
    acc_dtype: DTypeLike,
    *,
    transpose_w: bool = False,
    batched: bool = False,
) -> tuple[int, ...]:
    """The shape of a product with epilogue. Raises TypeError or ValueError where its operands do not fit.

    Args:
      batched: whether `w` may have batch axes; the others are as in `matmul`.
    """
    _checks.check_float("x", x)
    _checks.check_float("w", w)
    if x.dtype != w.dtype:
        raise TypeError(f"x has dtype {x.dtype} and w has dtype {w.dtype}; expected the same")
    w_axes = "(N, K)" if transpose_w else "(K, N)"
    if w.ndim < 2 or not batched:
        _checks.check_rank("w", w, 2, w_axes)
    axes = "(..., M, K)" if w.ndim > 2 else "(..., K)"
    if x.ndim < min(w.ndim, 3) - 1:
        raise ValueError(f"x has shape {x.shape}; expected {axes}")
    k, n = w.shape[:-3:-1] if transpose_w else w.shape[-2:]
    if x.shape[-1] != k:
        raise ValueError(f"x has shape {x.shape} and w has shape {w.shape}; expected {axes} and {w_axes}")
    try:
        rows = (*jnp.broadcast_shapes(x.shape[:-2], w.shape[:-2]), *x.shape[-2:-1])
    except ValueError:
        raise ValueError(
            f"x has shape {x.shape} and w has shape {w.shape}; expected batch axes that can be broadcast"
        ) from None
    activations.check_activation(activation)
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (n,), "(N,)")
    if residual is not None:
        _checks.check_float("residual", residual)
        _checks.check_shape("residual", residual, (*rows, n), "the shape of the result")
    if jnp.dtype(acc_dtype) not in (jnp.float32, jnp.float16):
        raise ValueError(f"{acc_dtype=} is not supported; expected float32 or float16")
    if jnp.dtype(acc_dtype) == jnp.float16 and x.dtype != jnp.float16:
        raise ValueError(f"acc_dtype float16 needs float16 operands, got {x.dtype}")
    return (*rows, n)
