"""AlphaFold's triangle multiplicative update of a pair representation, from the Evoformer and the Pairformer.

Algorithms 11 (outgoing edges) and 12 (incoming edges) of
[AlphaFold 2](https://doi.org/10.1038/s41586-021-03819-2); `ops.triangle_update` has the formula.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops
from pallas_models._modules import LayerNorm, Linear, Params, Projection, bind, init_params
from pallas_models.kernels.forms.trimul import Direction, Residuals
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TriMulConfig:
    """Sizes and variant of the update.

    Attributes:
      channels: of x.
      hidden: channels of left and of right.
      gate_after: whether the gate is as wide as x and applied to the output, as in AlphaFold, OpenFold, Boltz and
        Protenix. Otherwise it is applied to the hidden channels, as in lucidrains' module and GPU MODE's TriMul.
      use_bias: whether projections, gate and output have biases.
      epsilon: added to the variances of both layer norms.
    """

    channels: int = 128
    hidden: int = 128
    gate_after: bool = False
    use_bias: bool = False
    epsilon: float = 1e-5


class TriMul(nnx.Module):
    """The update of (B, N, N, C)."""

    def __init__(self, config: TriMulConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        c, h = config.channels, config.hidden
        linear = Linear if config.use_bias else Projection
        self.config = config
        self.norm = LayerNorm(c)
        self.projections = linear(c, 4 * h, dtype=dtype, rngs=rngs)  # left, its gate, right, its gate
        if config.gate_after:
            self.gate_after = linear(c, c, dtype=dtype, rngs=rngs)
        else:
            self.gate_before = linear(c, h, dtype=dtype, rngs=rngs)
        self.out_norm = LayerNorm(h)
        self.out = linear(h, c, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        direction: Direction,
        compute_dtype: DTypeLike = jnp.float16,
        precision: jax.lax.PrecisionLike = None,
        residual: bool = False,
        residuals: Residuals = "save",
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the update of x, with the arguments and errors of `trimul`."""
        config = self.config
        _checks.check_float("x", x)
        if x.shape[-1:] != (config.channels,):
            raise ValueError(f"x has shape {x.shape}; expected {config.channels} channels, as the parameters have")
        gate = self.gate_after if config.gate_after else self.gate_before
        b_in = _bias(self.projections)
        return ops.triangle_update(
            x,
            self.norm.scale[...],
            self.norm.bias[...],
            self.projections.kernel[...].reshape(config.channels, 4, config.hidden),
            self.out_norm.scale[...],
            self.out_norm.bias[...],
            gate.kernel[...],
            self.out.kernel[...],
            direction=direction,
            mask=mask,
            b_in=None if b_in is None else b_in.reshape(4, config.hidden),
            b_gate=_bias(gate),
            b_out=_bias(self.out),
            gate_after=config.gate_after,
            epsilon=config.epsilon,
            compute_dtype=compute_dtype,
            precision=precision,
            residual=residual,
            residuals=residuals,
            implementation=implementation,
        )


def _bias(linear: Projection) -> jax.Array | None:
    return linear.bias[...] if isinstance(linear, Linear) else None


def init(key: jax.Array, config: TriMulConfig = TriMulConfig(), *, dtype: DTypeLike = jnp.float32) -> Params:
    """Draws random parameters: a nested dict of arrays, as `trimul` takes it.

    Args:
      key: of `jax.random.key`.
      config: sizes and variant.
      dtype: of the matrices, float16, bfloat16 or float32. They are (in, out), the four projections
        side by side as `projections`: left, its gate, right, its gate. The gate is `gate_before` or `gate_after`.
        Biases and norm scales are float32.
    """
    return init_params(TriMul, config, key, dtype)


def trimul(
    params: Params,
    x: Array,
    mask: Array | None = None,
    *,
    direction: Direction,
    epsilon: float = 1e-5,
    compute_dtype: DTypeLike = jnp.float16,
    precision: jax.lax.PrecisionLike = None,
    residual: bool = False,
    residuals: Residuals = "save",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the triangle multiplicative update of x, to which it is added with `residual`.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_trimul`. They tell the sizes, the biases
        and the place of the gate. Matrices of `compute_dtype` are not converted at each call.
      x: (B, N, N, C) or (N, N, C), float16, bfloat16 or float32.
      mask: (B, N, N) or (N, N), bool, integer or float: 1 for a pair, 0 for padding; all 1 when None. A masked
        pair has no part in the update of others. With nothing but padding the result is finite.
      direction: `"outgoing"`, sums over left[i, k] right[j, k], or `"incoming"`, over left[k, i] right[k, j].
      epsilon: added to the variances of both layer norms.
      compute_dtype: of the operands of products, whatever the dtype of x: float16, bfloat16, or float32 for
        float32 end to end.
      precision: of products of float32 operands: None is true float32, DEFAULT allows TF32 on a GPU.
      residual: whether x is added to its update, as models do it.
      residuals: whether the gradient keeps left, right, their product and the gate, `"save"`, or computes them
        again, `"recompute"`; `ops.triangle_update` says what each takes.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      The shape and dtype of x.

    Raises:
      TypeError: x or mask have another dtype.
      ValueError: x is not square in N, mask is of another shape, the parameters are for another C, params do not
        fit together (all that do not are listed), or an option is unknown.
    """
    module = bind(TriMul, config_of(params, epsilon), params)
    return module(
        x,
        mask,
        direction=direction,
        compute_dtype=compute_dtype,
        precision=precision,
        residual=residual,
        residuals=residuals,
        implementation=implementation,
    )


def config_of(params: Params, epsilon: float) -> TriMulConfig:
    """The config that `params` were made for.

    Args:
      params: as in `trimul`.
      epsilon: of the config, as parameters do not tell it.

    Raises:
      ValueError: `params` belong to another module.
    """
    try:
        (channels,), (hidden,) = params["norm"]["scale"].shape, params["out_norm"]["scale"].shape
        use_bias = "bias" in params["out"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            "params are not the parameters of a triangle multiplicative update; expected a nested dict as "
            "`trimul.init` or `weights.load_trimul` returns it, with norm.scale (C,), out_norm.scale (H,) and out"
        ) from None
    return TriMulConfig(
        channels=channels, hidden=hidden, gate_after="gate_after" in params, use_bias=use_bias, epsilon=epsilon
    )
