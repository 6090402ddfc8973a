"""What an alignment tells of pairs, and pairs of an alignment, without attention."""

import dataclasses
import math
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops
from pallas_models._modules import LayerNorm, Linear, Projection, random_param
from pallas_models.ops import _checks, _half_precision
from pallas_models.ops._checks import Array
from pallas_models.pairformer._numerics import Numerics, Options
from pallas_models.pairformer.attention import (
    AttentionConfig,
    HeadProjections,
    as_bool,
    check_pairs,
    check_sequences,
)

Normalization = Literal["shifted", "clamped"]
_OUTER = 2**27  # elements of the outer products that exist at once
_SHIFT = 1e-3  # added to the number of sequences that a pair has


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OuterProductConfig:
    """Sizes and variant of an outer product mean.

    Attributes:
      channels: of the alignment.
      hidden: channels of either side of the product.
      pair_channels: of the result.
      use_bias: whether the projections of either side have biases, as in AlphaFold 2; the output always has one.
      normalization: as in `outer_product_mean`.
      epsilon: added to the variance of the layer norm.
    """

    channels: int = 64
    hidden: int = 32
    pair_channels: int = 128
    use_bias: bool = False
    normalization: Normalization = "shifted"
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.normalization not in ("shifted", "clamped"):
            raise ValueError(f"normalization={self.normalization!r} is unknown; expected 'shifted' or 'clamped'")


class Sides(nnx.Module):
    """Kernel (C, 2, H) of the projections of both sides of a product, left then right, and a bias (2, H)."""

    def __init__(self, config: OuterProductConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = random_param(rngs, (config.channels, 2, config.hidden), dtype)
        if config.use_bias:
            self.bias = nnx.Param(jnp.zeros((2, config.hidden), jnp.float32))


class OuterProductMean(nnx.Module):
    """Pairs (B, N, N, P) of an alignment (B, S, N, C): means over its sequences of products of positions."""

    def __init__(self, config: OuterProductConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.norm = LayerNorm(config.channels)
        self.projections = Sides(config, dtype=dtype, rngs=rngs)
        self.out = Linear(config.hidden**2, config.pair_channels, dtype=dtype, rngs=rngs)

    def __call__(
        self, msa: Array, mask: Array | None = None, *, pair: Array | None = None, **options: Unpack[Options]
    ) -> jax.Array:
        """Computes the mean, with the arguments and errors of `outer_product_mean`."""
        config, numerics = self.config, Numerics.of(self.config.epsilon, options)
        check_sequences("msa", msa, config.channels, mask)
        if pair is not None:
            check_pairs(pair, config.pair_channels)
        y, x = numerics.norm(jnp.asarray(msa), self.norm)
        bias = self.projections.bias[...] if config.use_bias else None
        sides = numerics.product(y, self.projections.kernel[...], bias)
        rows = x.shape[1]
        # Powers of two that make sums over all sequences no larger than one of them, so that float16 holds them.
        scale = 2.0 ** -math.ceil(math.log2(max(rows, 1)) / 2)
        sides = sides * jnp.asarray(scale, sides.dtype)
        keep = as_bool(mask)
        if keep is None:
            count = jnp.full((1, 1, 1), rows, jnp.float32)
        else:
            sides = jnp.where(keep[..., None], sides, jnp.zeros((), sides.dtype))
            kept = keep.astype(sides.dtype)
            count = _half_precision.einsum("bsi,bsj->bij", kept, kept, precision=jax.lax.Precision.HIGHEST)
        out = self._products(numerics, *jnp.split(sides, 2, axis=-1)) * scale**-2
        count, bias = count[..., None], self.out.bias[...].astype(jnp.float32)
        if config.normalization == "clamped":
            out = out / jnp.maximum(count, 1.0) + bias
        else:
            out = (out + bias) / (count + _SHIFT)
        return out.astype(x.dtype) if pair is None else (jnp.asarray(pair, jnp.float32) + out).astype(pair.dtype)

    def _products(self, numerics: Numerics, left: jax.Array, right: jax.Array) -> jax.Array:
        """Projects the sums over S of products of left and right (B, S, N, H) to (B, N, N, P), in float32.

        Positions of the left are taken a block at a time, forward and, computed again, backward.
        """
        batch, _, n, hidden = left.shape

        def project(left: jax.Array) -> jax.Array:
            outer = _half_precision.einsum(
                "bsic,bsjd->bijcd",
                left,
                right,
                precision=_checks.as_precision(numerics.precision),
                acc_dtype=left.dtype,
            )
            outer = outer.reshape(*outer.shape[:3], hidden**2)
            return numerics.product(outer, self.out.kernel[...], out_dtype=jnp.float32)

        if not all(isinstance(size, int) for size in (batch, n)):  # symbolic sizes
            return project(left)
        block = max(_OUTER // max(batch * n * hidden**2, 1), 1)
        if n <= block:
            return project(left)
        count = -(-n // block)
        left = jnp.pad(left, ((0, 0), (0, 0), (0, count * block - n), (0, 0)))
        blocks = jnp.moveaxis(left.reshape(*left.shape[:2], count, block, hidden), 2, 0)
        out = jnp.moveaxis(jax.lax.map(jax.checkpoint(project), blocks), 0, 1)
        return out.reshape(batch, count * block, n, -1)[:, :n]


class PairAveraging(nnx.Module):
    """Means of the values of an alignment (B, S, N, C) over its positions, with weights of pairs (B, N, N, P)."""

    def __init__(self, config: AttentionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.norm, self.pair_norm = LayerNorm(config.channels), LayerNorm(config.pair_channels)
        self.pair_bias = Projection(config.pair_channels, config.num_heads, dtype=dtype, rngs=rngs)
        self.projections = HeadProjections(config, 2, dtype=dtype, rngs=rngs)  # values, gates
        self.out = Projection(config.num_heads * config.head_dim, config.channels, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        msa: Array,
        pair: Array,
        mask: Array | None = None,
        *,
        residual: bool = False,
        **options: Unpack[Options],
    ) -> jax.Array:
        """Computes the means, with the arguments and errors of `pair_averaging`."""
        config, numerics = self.config, Numerics.of(self.config.epsilon, options)
        check_sequences("msa", msa, config.channels)
        check_pairs(pair, config.pair_channels, mask)
        y, x = numerics.norm(jnp.asarray(msa), self.norm)
        bias, _ = numerics.pair_bias(jnp.asarray(pair), self.pair_norm, self.pair_bias.kernel[...])
        where = None if mask is None else as_bool(mask)[:, None]
        weights = ops.softmax(bias, where=where, implementation=numerics.implementation).astype(y.dtype)
        values, gate = (numerics.product(y, self.projections.kernel[:, i]) for i in range(2))
        values = values.reshape(*y.shape[:-1], config.num_heads, config.head_dim)
        out = _half_precision.einsum(
            "bhij,bsjhd->bsihd", weights, values, precision=_checks.as_precision(numerics.precision)
        )
        return numerics.gated_product(
            out, gate, self.out.kernel[...], residual=x if residual else None, out_dtype=x.dtype
        )
