"""Attention and all that follows it in a post-norm transformer layer."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Kernel, Op, Others
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels import forms
from pallas_models.kernels.forms.attention_post_norm_mlp import Form
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.mosaic import post_norm_mlp as mosaic
from pallas_models.kernels.mosaic.matmul_layer_norm import fills
from pallas_models.ops import _checks, activations, attention_matmul_layer_norm
from pallas_models.ops._checks import Array
from pallas_models.ops.attention import attention_qkv
from pallas_models.ops.post_norm_mlp import AXES, PostNormWeights, checked_weights, mlp_and_norm, post_norm_mlp
from pallas_models.target import HOPPER, Target


def attention_post_norm_mlp(
    qkv: Array,
    x: Array,
    *,
    num_heads: int,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | None = None,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
    **weights: Unpack[PostNormWeights],
) -> jax.Array:
    """Computes a layer whose norms come last, such as BERT's, from its queries, keys and values on:

        post_norm_mlp(attention_qkv(qkv), x)

    On Hopper, where rows fill its multiprocessors, attention of heads of 32 within 64 or 128 tokens is in the
    kernel of `post_norm_mlp` if it has a mask or segments at most. For up to 128 tokens in all, one of Triton's
    kernels has attention and the product with `w_out`. Elsewhere, and where it is differentiated, it is
    `attention_qkv` and `post_norm_mlp`.

    Beside the operands the gradient keeps for each token what `post_norm_mlp` says, the result of attention, K
    numbers of the dtype of `qkv`, and its log-sum-exp, `num_heads` numbers in float32.

    ```
    names = {"w_out": (64, 64), "w_up": (64, 256), "w_down": (256, 64)}
    weights = {name: jnp.ones(shape) for name, shape in names.items()}
    weights |= {name: jnp.ones(64) for name in ("scale_out", "offset_out", "scale", "offset")}
    x, qkv = jnp.ones((2, 8, 64)), jnp.ones((2, 8, 192))
    y = ops.attention_post_norm_mlp(qkv, x, num_heads=2, **weights)  # (2, 8, 64)
    ```

    Args:
      qkv: (B, S, 3 K), the queries, keys and values of all heads, as in `attention_qkv`; float16, bfloat16 or
        float32.
      x: (B, S, N), the input of the layer, in the dtype of `qkv`.
      num_heads: of attention; divides K.
      mask: (B, S), bool or integers, 0 for tokens that no query sees; or None. Results at these tokens have no
        meaning.
      bias: as in `attention_qkv`.
      segment_ids: as in `attention_qkv`.
      activation: as in `post_norm_mlp`.
      epsilon: as in `post_norm_mlp`.
      precision: as in `post_norm_mlp`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves in one kernel
        what it serves of `post_norm_mlp`, with JAX 0.11 or newer, N from 256 on for 64 tokens, and of 384 for 128.
        Other calls are served in those that it stands for.
      **weights: as in `post_norm_mlp`.

    Returns:
      (B, S, N) in the dtype of `qkv`.

    Raises:
      TypeError: an operand is not floating point, dtypes of `qkv`, `x` and weights differ, or a weight is missing.
      ValueError: shapes do not fit, or `activation` is unknown.
      NotImplementedError: the kernels that `implementation` names do not serve the call.
    """
    _checks.check_float("qkv", qkv)
    _checks.check_rank("qkv", qkv, 3, "(B, S, 3 * K)")
    arrays = checked_weights("qkv", qkv, qkv.shape[-1] // 3, x, weights)
    if mask is not None:
        _checks.check_mask("mask", mask, x.shape[:2], "(B, S)")
        mask = jnp.asarray(mask, bool).astype(jnp.int32)
    if segment_ids is not None:
        _checks.check_integer("segment_ids", segment_ids)
        _checks.check_shape("segment_ids", segment_ids, x.shape[:2], "(B, S)")
    activations.check_activation(activation)
    form = Form(
        qkv=qkv,
        mask=mask,
        bias=bias,
        segment_ids=segment_ids,
        x=x,
        weights=arrays,
        num_heads=num_heads,
        activation=activation,
        epsilon=epsilon,
        precision=_checks.as_precision(precision),
    )
    out: jax.Array = run(_OP, form, implementation=implementation)
    return out


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """Attention, and all that follows."""
    options: dict[str, Any] = dict(precision=form.precision, implementation=names or None)
    masks: dict[str, Any] = dict(mask=form.mask, bias=form.bias, segment_ids=form.segment_ids)
    y = attention_qkv(form.qkv, num_heads=form.num_heads, **masks, **options)
    norms: dict[str, Any] = dict(activation=form.activation, epsilon=form.epsilon)
    return post_norm_mlp(y, form.x, **norms, **options, **form.weights._asdict())


def _projected(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """Attention with its projection and norm, and the MLP."""
    z = run(attention_matmul_layer_norm.OP, form.projected, implementation=names or None)
    return mlp_and_norm(z, form, names)


def _with_projection(form: Form[jax.ShapeDtypeStruct]) -> list[tuple[Op[Any], forms.Form]]:
    return [] if form.bias is not None else [(attention_matmul_layer_norm.OP, form.projected)]


def _pays(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    return fills(form.x.shape[0] * form.x.shape[1], target)


_OP: Op[Form[Any]] = Op(
    name="attention_post_norm_mlp",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.attention_post_norm_mlp,
            config=None,
            refuses=mosaic.unsupported_attention,
        ),
    ),
    stands_for=_apart,
    fewer=Others(parts=_with_projection, call=_projected),
    pays=_pays,
    sharding=Sharding(equation=f"b S Q, b S, b H S S, b S, b S N, {AXES} -> b S N"),
)
