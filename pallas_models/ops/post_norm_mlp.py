"""The projection of attention's result and the MLP of a post-norm layer, each with residual and norm."""

from __future__ import annotations

import math
from typing import Any, NotRequired, TypedDict, Unpack

import jax

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.forms.post_norm_mlp import Form, Weights
from pallas_models.kernels.mosaic import post_norm_mlp as mosaic
from pallas_models.kernels.mosaic.matmul_layer_norm import fills
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import matmul
from pallas_models.ops.matmul_layer_norm import matmul_layer_norm
from pallas_models.target import HOPPER, Target

AXES = "K N, N, N, N, N F, F, F N, N, N, N"  # of each of `Weights`


class PostNormWeights(TypedDict):
    """The weights that `post_norm_mlp` takes by name."""

    w_out: Array
    scale_out: Array
    offset_out: Array
    w_up: Array
    w_down: Array
    scale: Array
    offset: Array
    bias_out: NotRequired[Array | None]
    bias_up: NotRequired[Array | None]
    bias_down: NotRequired[Array | None]


def post_norm_mlp(
    y: Array,
    x: Array,
    *,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
    **weights: Unpack[PostNormWeights],
) -> jax.Array:
    """Computes the part after attention of a layer whose norms come last, such as BERT's:

        z = layer_norm(y @ w_out + bias_out + x) * scale_out + offset_out
        layer_norm(activation(z @ w_up + bias_up) @ w_down + bias_down + z) * scale + offset

    On Hopper, where rows fill its multiprocessors, one kernel keeps `z` and the hidden values on chip; they are
    rounded to the dtype of `x` all the same. Elsewhere, and where it is differentiated, it is `matmul_layer_norm`,
    `matmul` and `matmul_layer_norm` again.

    Beside the operands the gradient keeps for each row 3 N + 2 F numbers of the dtype of `x` and 6 in float32:
    `z`, both products before their norms, the hidden values before and after the activation, and statistics.

    ```
    names = {"w_out": (64, 64), "w_up": (64, 256), "w_down": (256, 64)}
    weights = {name: jnp.ones(shape) for name, shape in names.items()}
    weights |= {name: jnp.ones(64) for name in ("scale_out", "offset_out", "scale", "offset")}
    y = ops.post_norm_mlp(jnp.ones((8, 64)), jnp.ones((8, 64)), **weights)  # (8, 64)
    ```

    Args:
      y: (..., K), the result of attention; float16, bfloat16 or float32.
      x: (..., N), the input of the layer, in the dtype of `y`.
      w_out: (K, N), in the dtype of `y`, as `w_up` and `w_down` are.
      w_up: (N, F).
      w_down: (F, N).
      scale_out: (N,), of the first norm, any float dtype, as all vectors.
      offset_out: (N,), of the first norm.
      scale: (N,), of the second norm.
      offset: (N,), of the second norm.
      bias_out: (N,), or None.
      bias_up: (F,), or None.
      bias_down: (N,), or None.
      activation: as in `matmul`.
      epsilon: added to variances.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves in one kernel
        half precisions, all biases, rows in multiples of 8, K and N of 128, 256 or 384 alike, and F in multiples
        of N. Other calls are served in those that it stands for.

    Returns:
      (..., N) in the dtype of `y`.

    Raises:
      TypeError: an operand is not floating point, dtypes of `y`, `x` and weights differ, or a weight is missing.
      ValueError: shapes do not fit, or `activation` is unknown.
      NotImplementedError: the kernels that `implementation` names do not serve the call.
    """
    _checks.check_float("y", y)
    if y.ndim < 1:
        raise ValueError(f"y has shape {y.shape}; expected (..., K)")
    rows, k = math.prod(y.shape[:-1]), y.shape[-1]
    arrays = checked_weights("y", y, k, x, weights)
    activations.check_activation(activation)
    form = Form(
        y=y.reshape(rows, k),
        x=x.reshape(rows, x.shape[-1]),
        weights=arrays,
        activation=activation,
        epsilon=epsilon,
        precision=_checks.as_precision(precision),
    )
    return run(_OP, form, implementation=implementation).reshape(x.shape)


def checked_weights(name: str, y: Array, k: int, x: Array, weights: PostNormWeights) -> Weights[Array]:
    """Checks weights and the input `x` of a layer, and gives the weights as forms have them.

    Args:
      name: of the argument `y`, whose dtype all matrices have, and whose leading axes `x` has.
      k: columns of the result of attention.
    """
    w = Weights(**dict(bias_out=None, bias_up=None, bias_down=None) | weights)
    matrices = {"w_out": (w.w_out, "(K, N)"), "w_up": (w.w_up, "(N, F)"), "w_down": (w.w_down, "(F, N)")}
    for own, (matrix, axes) in matrices.items():
        if matrix.dtype != y.dtype:
            raise TypeError(f"{name} has dtype {y.dtype} and {own} has dtype {matrix.dtype}; expected the same")
        _checks.check_rank(own, matrix, 2, axes)
    n, f = w.w_up.shape
    _checks.check_shape("w_out", w.w_out, (k, n), f"(K, N) with the K of {name} {y.shape} and the N of w_up")
    _checks.check_shape("w_down", w.w_down, (f, n), f"(F, N) for w_up {w.w_up.shape}")
    _checks.check_shape("x", x, (*y.shape[:-1], n), "the shape of the result")
    if x.dtype != y.dtype:
        raise TypeError(f"{name} has dtype {y.dtype} and x has dtype {x.dtype}; expected the same")
    for own in ("scale_out", "offset_out", "scale", "offset", "bias_out", "bias_up", "bias_down"):
        vector: Array | None = getattr(w, own)
        if vector is not None:
            _checks.check_float(own, vector)
            size, axes = (f, "(F,)") if own == "bias_up" else (n, "(N,)")
            _checks.check_shape(own, vector, (size,), axes)
    return w


def mlp_and_norm(z: jax.Array, form: Any, names: tuple[Name, ...]) -> jax.Array:
    """The MLP of z (..., N) with residual and norm, by the weights and options of a form that has them."""
    w: Weights[jax.Array] = form.weights
    options: dict[str, Any] = dict(precision=form.precision, implementation=names or None)
    hidden = matmul(z, w.w_up, bias=w.bias_up, activation=form.activation, **options)
    norm: dict[str, Any] = dict(epsilon=form.epsilon) | options
    return matmul_layer_norm(hidden, w.w_down, w.scale, w.offset, bias=w.bias_down, residual=z, **norm)


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """A product with norm, a product with an activation, and a product with norm."""
    w = form.weights
    options: dict[str, Any] = dict(epsilon=form.epsilon, precision=form.precision, implementation=names or None)
    vectors = w.scale_out, w.offset_out
    z = matmul_layer_norm(form.y, w.w_out, *vectors, bias=w.bias_out, residual=form.x, **options)
    return mlp_and_norm(z, form, names)


def _pays(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    return fills(form.x.shape[0], target)


_OP: Op[Form[Any]] = Op(
    name="post_norm_mlp",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.post_norm_mlp,
            config=None,
            refuses=mosaic.unsupported,
        ),
    ),
    stands_for=_apart,
    pays=_pays,
    sharding=Sharding(equation=f"m K, m N, {AXES} -> m N"),
)
