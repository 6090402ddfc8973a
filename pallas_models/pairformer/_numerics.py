"""How every module of the pair stack computes norms and products."""

import dataclasses
from typing import Self, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import ops
from pallas_models._modules import GateUp, LayerNorm, Projection
from pallas_models.ops import Implementation
from pallas_models.ops.activations import Activation


class Options(TypedDict, total=False):
    """What every module and every function of the pair stack takes by name.

    compute_dtype: of the operands of products, whatever the dtype of an input: float16, bfloat16, or float32 for
      float32 end to end. None, the default, is the dtype of each input itself.
    precision: of products of float32 operands: None is true float32, DEFAULT allows TF32 on a GPU.
    implementation: as `pallas_models.ops` has it; None for the best available.
    """

    compute_dtype: DTypeLike | None
    precision: jax.lax.PrecisionLike
    implementation: Implementation | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """The options of a call with the epsilon of the module that is called."""

    epsilon: float
    compute_dtype: DTypeLike | None
    precision: jax.lax.PrecisionLike
    implementation: Implementation | None

    @classmethod
    def of(cls, epsilon: float, options: Options) -> Self:
        return cls(
            epsilon=epsilon,
            compute_dtype=options.get("compute_dtype"),
            precision=options.get("precision"),
            implementation=options.get("implementation"),
        )

    def norm(self, x: jax.Array, norm: LayerNorm) -> tuple[jax.Array, jax.Array]:
        """The layer norm of x, an operand of products, and x itself.

        What reads x after the norm takes the second: the norm's kernel then adds both of its gradients.
        """
        y, x = ops.layer_norm(
            x,
            norm.scale[...],
            norm.bias[...],
            return_residual=True,
            epsilon=self.epsilon,
            implementation=self.implementation,
        )
        return self.operand(y), x

    def projections(
        self, x: jax.Array, norm: LayerNorm, w: jax.Array | None, bias: jax.Array | None, w_first: jax.Array
    ) -> tuple[jax.Array, ...]:
        """G projections of the layer norm of pairs x (B, N, N, C), biases (B, H, N, N), and x itself.

        w is (C, G, H, D) or None, its bias (G, H, D); the biases come of w_first, (C, H).
        """
        dtype = self.dtype(x)
        *found, biases, x = ops.layer_norm_projections(
            x,
            norm.scale[...],
            norm.bias[...],
            None if w is None else w.reshape(*w.shape[:2], w.shape[2] * w.shape[3]).astype(dtype),
            bias=None if bias is None else bias.reshape(len(bias), -1),
            w_first=w_first.astype(dtype),
            epsilon=self.epsilon,
            precision=self.precision,
            implementation=self.implementation,
        )
        return *found, jnp.moveaxis(biases, 0, 1), x

    def gated_mlp(
        self, x: jax.Array, norm: LayerNorm, gate_up: GateUp, down: Projection, *, residual: bool
    ) -> jax.Array:
        """The gated MLP of the layer norm of x (..., C), plus x if `residual`."""
        dtype = self.dtype(x)
        return ops.layer_norm_gated_mlp(
            x,
            norm.scale[...],
            norm.bias[...],
            gate_up.kernel[...].astype(dtype),
            down.kernel[...].astype(dtype),
            residual=residual,
            epsilon=self.epsilon,
            precision=self.precision,
            implementation=self.implementation,
        )

    def dtype(self, x: jax.Array) -> jnp.dtype:
        """The dtype of the operands of products of x."""
        return jnp.dtype(x.dtype if self.compute_dtype is None else self.compute_dtype)

    def operand(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype(x))

    def product(
        self,
        x: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        *,
        activation: Activation | None = None,
        residual: jax.Array | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """x (..., K) times a kernel (K, ...), whose other axes are one here, as are the axes of its bias."""
        return ops.matmul(
            x,
            kernel.reshape(len(kernel), -1).astype(x.dtype),
            bias=None if bias is None else bias.reshape(-1),
            activation=activation,
            residual=residual,
            out_dtype=out_dtype,
            precision=self.precision,
            implementation=self.implementation,
        )

    def pair_bias(self, pair: jax.Array, norm: LayerNorm, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The biases (B, H, N, N) of pairs (B, N, N, C), by their layer norm, and the pairs, as in `norm`."""
        bias, pair = self.projections(pair, norm, None, None, kernel)
        return bias, pair

    def gated_product(
        self,
        x: jax.Array,
        gate: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        *,
        residual: jax.Array | None,
        out_dtype: DTypeLike,
    ) -> jax.Array:
        """x (..., H, D), times the sigmoid of gate (..., H * D), times a kernel (H * D, C); plus a residual."""
        return ops.gated_projection(
            x.reshape(gate.shape).astype(gate.dtype),
            gate,
            kernel.astype(gate.dtype),
            bias=bias,
            residual=residual,
            out_dtype=out_dtype,
            precision=self.precision,
            implementation=self.implementation,
        )
