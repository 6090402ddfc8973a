"""Gated attention over pairs, over a single representation and over an alignment."""

import dataclasses
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops
from pallas_models._modules import LayerNorm, Linear, Projection, random_param
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.triangle_attention import Direction
from pallas_models.pairformer._numerics import Numerics, Options

EndingBias = Literal["transposed", "in_place"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Sizes and variant of an attention with a gate.

    Attributes:
      channels: of what attends: pairs, single representation or alignment.
      num_heads: number of heads.
      head_dim: channels of a head.
      pair_channels: of the pairs that biases come from, in attention with pair bias.
      query_bias: whether queries have a bias, as in the single attention of AlphaFold 3.
      gate_bias: whether gates have a bias, as in AlphaFold 2.
      out_bias: whether the output projection has a bias, as in AlphaFold 2.
      epsilon: added to the variances of layer norms.
    """

    channels: int = 128
    num_heads: int = 4
    head_dim: int = 32
    pair_channels: int = 128
    query_bias: bool = False
    gate_bias: bool = False
    out_bias: bool = False
    epsilon: float = 1e-5


class HeadProjections(nnx.Module):
    """Kernel (C, G, H, D) of G projections of one input to heads, and the biases (H, D) that some have."""

    def __init__(self, config: AttentionConfig, count: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        heads = config.num_heads, config.head_dim
        self.kernel = random_param(rngs, (config.channels, count, *heads), dtype)
        if config.query_bias:
            self.query_bias = nnx.Param(jnp.zeros(heads, jnp.float32))
        if config.gate_bias:
            self.gate_bias = nnx.Param(jnp.zeros(heads, jnp.float32))


class _Attention(nnx.Module):
    """What all attentions have: a norm, projections to queries, keys, values and gates, and the output's."""

    def __init__(self, config: AttentionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.norm = LayerNorm(config.channels)
        self.projections = HeadProjections(config, 4, dtype=dtype, rngs=rngs)  # queries, keys, values, gates
        linear = Linear if config.out_bias else Projection
        self.out = linear(config.num_heads * config.head_dim, config.channels, dtype=dtype, rngs=rngs)

    @property
    def biases(self) -> jax.Array | None:
        """The biases (4, H, D) of all projections, zeros for those that have none; None where none has one."""
        own = self.projections
        if not (self.config.query_bias or self.config.gate_bias):
            return None
        zeros = jnp.zeros(own.kernel.shape[2:], jnp.float32)
        query = own.query_bias[...] if self.config.query_bias else zeros
        return jnp.stack([query, zeros, zeros, own.gate_bias[...] if self.config.gate_bias else zeros])

    def project(self, numerics: Numerics, y: jax.Array, first: int, last: int) -> jax.Array:
        """Projections `first` to `last` of y (..., C), side by side: (..., (last - first) * H * D)."""
        biased = (first == 0 and self.config.query_bias) or (last == 4 and self.config.gate_bias)
        biases = self.biases if biased else None
        bias = None if biases is None else biases[first:last]
        return numerics.product(y, self.projections.kernel[:, first:last], bias)

    def project_all(self, numerics: Numerics, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries, keys and values side by side, and gates, of y (B, S, N, C).

        A single sequence has one product for them: it is so small that a second one costs more than the copy which
        parts the gates from the others.
        """
        if y.shape[1] > 1:
            return self.project(numerics, y, 0, 3), self.project(numerics, y, 3, 4)
        found = self.project(numerics, y, 0, 4)
        width = found.shape[-1] // 4
        return found[..., : 3 * width], found[..., 3 * width :]

    def finish(
        self, numerics: Numerics, out: jax.Array, gate: jax.Array, x: jax.Array, *, residual: bool
    ) -> jax.Array:
        """The output projection of out (..., H, D), gated, in the dtype of x; plus x with `residual`."""
        return numerics.gated_product(
            out,
            gate,
            self.out.kernel[...],
            self.out.bias[...] if isinstance(self.out, Linear) else None,
            residual=x if residual else None,
            out_dtype=x.dtype,
        )


class TriangleAttention(_Attention):
    """Attention of pairs (B, N, N, C) that share a node, biased by the pairs of the other two."""

    def __init__(self, config: AttentionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.pair_bias = Projection(config.channels, config.num_heads, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        pair: Array,
        mask: Array | None = None,
        *,
        direction: Direction,
        ending_bias: EndingBias = "transposed",
        residual: bool = False,
        **options: Unpack[Options],
    ) -> jax.Array:
        """Computes the attention, with the arguments and errors of `triangle_attention`."""
        config, numerics = self.config, Numerics.of(self.config.epsilon, options)
        check_pairs(pair, config.channels, mask)
        if ending_bias not in ("transposed", "in_place"):
            raise ValueError(f"{ending_bias=} is unknown; expected 'transposed' or 'in_place'")
        *qkv, gate, bias, x = numerics.projections(
            jnp.asarray(pair), self.norm, self.projections.kernel[...], self.biases, self.pair_bias.kernel[...]
        )
        if direction == "ending" and ending_bias == "in_place":
            bias = bias.mT
        heads = (*x.shape[:-1], config.num_heads, config.head_dim)
        out = ops.triangle_attention(
            *(y.reshape(heads) for y in qkv),
            bias=bias,
            mask=mask,
            direction=direction,
            precision=numerics.precision,
            implementation=numerics.implementation,
        )
        return self.finish(numerics, out, gate, x, residual=residual)


class AttentionPairBias(_Attention):
    """Attention along sequences x (B, S, N, C), biased by the pairs (B, N, N, P) of their positions."""

    def __init__(self, config: AttentionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.pair_norm = LayerNorm(config.pair_channels)
        self.pair_bias = Projection(config.pair_channels, config.num_heads, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        pair: Array,
        mask: Array | None = None,
        *,
        residual: bool = False,
        **options: Unpack[Options],
    ) -> jax.Array:
        """Computes the attention of x (B, S, N, C), with the other arguments and errors of `msa_row_attention`."""
        return self.with_pair(x, pair, mask, residual=residual, **options)[0]

    def with_pair(
        self, x: Array, pair: Array, mask: Array | None, *, residual: bool, **options: Unpack[Options]
    ) -> tuple[jax.Array, jax.Array]:
        """The attention, and the pairs: who reads these afterwards has their gradients added up in a kernel."""
        numerics = Numerics.of(self.config.epsilon, options)
        check_sequences("msa", x, self.config.channels, mask)
        check_pairs(pair, self.config.pair_channels)
        y, x = numerics.norm(jnp.asarray(x), self.norm)
        bias, pair = numerics.pair_bias(jnp.asarray(pair), self.pair_norm, self.pair_bias.kernel[...])
        qkv, gate = self.project_all(numerics, y)
        out = _by_rows(qkv, bias, as_bool(mask), numerics)
        return self.finish(numerics, out, gate, x, residual=residual), pair


class ColumnAttention(_Attention):
    """Attention along the columns of an alignment (B, S, N, C): of each position, over all sequences."""

    def __call__(
        self, msa: Array, mask: Array | None = None, *, residual: bool = False, **options: Unpack[Options]
    ) -> jax.Array:
        """Computes the attention, with the arguments and errors of `msa_column_attention`."""
        config, numerics = self.config, Numerics.of(self.config.epsilon, options)
        check_sequences("msa", msa, config.channels, mask)
        y, x = numerics.norm(jnp.asarray(msa), self.norm)
        columns = self.project(numerics, y, 0, 3).swapaxes(1, 2)
        batch, n, rows, width = columns.shape
        keep = None if mask is None else as_bool(mask).mT.reshape(batch * n, rows)
        out = ops.attention_qkv(
            columns.reshape(batch * n, rows, width),
            num_heads=config.num_heads,
            mask=keep,
            precision=numerics.precision,
            implementation=numerics.implementation,
        )
        out = out.reshape(batch, n, rows, width // 3).swapaxes(1, 2)
        return self.finish(numerics, out, self.project(numerics, y, 3, 4), x, residual=residual)


def _by_rows(qkv: jax.Array, bias: jax.Array, mask: jax.Array | None, numerics: Numerics) -> jax.Array:
    """Attention along the third axis of qkv (B, S, N, 3 * H * D), with biases (B, H, N, N) that all S share."""
    batch, rows, n, width = qkv.shape

    def attend(qkv: jax.Array, bias: jax.Array, mask: jax.Array | None) -> jax.Array:
        return ops.attention_qkv(
            qkv,
            num_heads=bias.shape[1],
            bias=bias,
            mask=mask,
            precision=numerics.precision,
            implementation=numerics.implementation,
        )

    if 1 in (batch, rows):  # one bias for all, or one for each
        keep = None if mask is None else mask.reshape(batch * rows, n)
        return attend(qkv.reshape(batch * rows, n, width), bias, keep).reshape(batch, rows, n, width // 3)
    return jax.vmap(attend)(qkv, bias[:, None], mask)


@overload
def as_bool(mask: Array) -> jax.Array: ...


@overload
def as_bool(mask: None) -> None: ...


def as_bool(mask: Array | None) -> jax.Array | None:
    """A mask of any dtype as bool: True where it is not 0."""
    return None if mask is None else jnp.asarray(mask).astype(bool)


def check_mask(name: str, mask: Array | None, shape: tuple[int, ...], axes: str) -> None:
    """Raises TypeError or ValueError unless a mask is bool, integer or float, of a shape."""
    if mask is None:
        return
    floating = getattr(mask, "dtype", None) in _checks.FLOAT_DTYPES
    check = _checks.check_shape if floating else _checks.check_mask
    check(name, mask, shape, axes)


def check_pairs(pair: Array, channels: int, mask: Array | None = None) -> None:
    """Raises TypeError or ValueError unless pairs, and their mask, are as the parameters have them."""
    _checks.check_float("pair", pair)
    if pair.ndim != 4 or pair.shape[1] != pair.shape[2] or pair.shape[3] != channels:
        raise ValueError(f"pair has shape {pair.shape}; expected (B, N, N, {channels}), as the parameters have")
    check_mask("mask", mask, pair.shape[:3], "(B, N, N)")


def check_sequences(name: str, x: Array, channels: int, mask: Array | None = None) -> None:
    """The same of sequences (B, S, N, C)."""
    _checks.check_float(name, x)
    if x.ndim != 4 or x.shape[3] != channels:
        raise ValueError(f"{name} has shape {x.shape}; expected (B, S, N, {channels}), as the parameters have")
    check_mask("mask", mask, x.shape[:3], "(B, S, N)")
