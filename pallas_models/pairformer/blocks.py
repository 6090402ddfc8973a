"""Blocks of the Pairformer and of the Evoformer, and stacks of them."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops, training
from pallas_models._modules import LayerNorm, run_layers
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.trimul import Residuals
from pallas_models.pairformer._numerics import Options
from pallas_models.pairformer._transition import Transition, TransitionConfig
from pallas_models.pairformer.attention import (
    AttentionConfig,
    AttentionPairBias,
    ColumnAttention,
    EndingBias,
    TriangleAttention,
    check_mask,
    check_pairs,
    check_sequences,
)
from pallas_models.pairformer.msa import OuterProductConfig, OuterProductMean, PairAveraging
from pallas_models.trimul import TriMul, TriMulConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairConfig:
    """Sizes and variant of what a block does to pairs.

    Attributes:
      triangle_update: of both triangle multiplicative updates.
      triangle_attention: of both triangle attentions.
      transition: of the pairs.
      ending_bias: as in `triangle_attention`.
      residuals: of the triangle updates, as in `ops.triangle_update`.
    """

    triangle_update: TriMulConfig = TriMulConfig(gate_after=True)
    triangle_attention: AttentionConfig = AttentionConfig()
    transition: TransitionConfig = TransitionConfig()
    ending_bias: EndingBias = "transposed"
    residuals: Residuals = "save"

    @property
    def channels(self) -> int:
        return self.triangle_attention.channels


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairformerConfig:
    """Sizes and variant of a Pairformer; the defaults are the sizes of AlphaFold 3.

    Attributes:
      pair: of what happens to pairs.
      single_attention: of the attention of the single representation; None for blocks of pairs alone.
      single_transition: of the single representation; None with `single_attention`.
      single_norm: whether a layer norm of the single representation ends a block, as in some of Boltz.
      num_layers: number of blocks.
    """

    pair: PairConfig = PairConfig()
    single_attention: AttentionConfig | None = AttentionConfig(
        channels=384, num_heads=16, head_dim=24, query_bias=True
    )
    single_transition: TransitionConfig | None = TransitionConfig(channels=384, hidden=1536)
    single_norm: bool = False
    num_layers: int = 48

    def __post_init__(self) -> None:
        if (self.single_attention is None) != (self.single_transition is None):
            raise ValueError("single_attention and single_transition: expected both, or None for both")
        if self.single_norm and self.single_attention is None:
            raise ValueError("single_norm=True needs single_attention")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvoformerConfig:
    """Sizes and variant of an Evoformer, or of the MSA module that AlphaFold 3 has in its place.

    The defaults are the sizes of AlphaFold 2.

    Attributes:
      pair: of what happens to pairs.
      outer_product: of the outer product mean.
      row_attention: of the attention along sequences, with pair bias; None for none.
      column_attention: of the attention along columns; None for none.
      pair_averaging: of the averaging that AlphaFold 3 has in place of the row attention; None for none.
      msa_transition: of the alignment; None for none, as in the last block of an MSA module.
      outer_product_first: whether the outer product mean begins a block, as in AlphaFold-Multimer, AlphaFold 3 and
        Protenix; it follows the transition of the alignment else, as in AlphaFold 2 and Boltz.
      num_layers: number of blocks.
    """

    pair: PairConfig = PairConfig(
        triangle_update=TriMulConfig(gate_after=True, use_bias=True),
        triangle_attention=AttentionConfig(gate_bias=True, out_bias=True),
        transition=TransitionConfig(kind="relu"),
    )
    outer_product: OuterProductConfig = OuterProductConfig(channels=256, use_bias=True)
    row_attention: AttentionConfig | None = AttentionConfig(
        channels=256, num_heads=8, gate_bias=True, out_bias=True
    )
    column_attention: AttentionConfig | None = AttentionConfig(
        channels=256, num_heads=8, gate_bias=True, out_bias=True
    )
    pair_averaging: AttentionConfig | None = None
    msa_transition: TransitionConfig | None = TransitionConfig(channels=256, hidden=1024, kind="relu")
    outer_product_first: bool = False
    num_layers: int = 48


# The MSA module of AlphaFold 3, Protenix and OpenFold 3, whose blocks are an Evoformer's in all other parts.
MSA_MODULE = EvoformerConfig(
    pair=PairConfig(),
    outer_product=OuterProductConfig(),
    row_attention=None,
    column_attention=None,
    pair_averaging=AttentionConfig(channels=64, num_heads=8, head_dim=8),
    msa_transition=TransitionConfig(channels=64, hidden=256),
    outer_product_first=True,
    num_layers=4,
)
"""The sizes of AlphaFold 3's MSA module."""


class _PairBlock(nnx.Module):
    """What the blocks of Pairformer and Evoformer do to pairs."""

    def __init__(self, config: PairConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.pair_config = config
        self.tri_mul_out = TriMul(config.triangle_update, dtype=dtype, rngs=rngs)
        self.tri_mul_in = TriMul(config.triangle_update, dtype=dtype, rngs=rngs)
        self.tri_att_start = TriangleAttention(config.triangle_attention, dtype=dtype, rngs=rngs)
        self.tri_att_end = TriangleAttention(config.triangle_attention, dtype=dtype, rngs=rngs)
        self.pair_transition = Transition(config.transition, dtype=dtype, rngs=rngs)

    def update_pair(self, pair: jax.Array, mask: Array | None, options: Options) -> jax.Array:
        """The pairs after both updates, both attentions and the transition, each added."""
        of_update: Any = options | {
            "compute_dtype": options.get("compute_dtype") or pair.dtype,
            "residual": True,
            "residuals": self.pair_config.residuals,
        }
        pair = self.tri_mul_out(pair, mask, direction="outgoing", **of_update)
        pair = self.tri_mul_in(pair, mask, direction="incoming", **of_update)
        pair = self.tri_att_start(pair, mask, direction="starting", residual=True, **options)
        ending_bias = self.pair_config.ending_bias
        pair = self.tri_att_end(pair, mask, direction="ending", ending_bias=ending_bias, residual=True, **options)
        return self.pair_transition(pair, residual=True, **options)


class Block(_PairBlock):
    """One block of a Pairformer: Algorithm 17 of AlphaFold 3 without dropout."""

    def __init__(self, config: PairformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config.pair, dtype=dtype, rngs=rngs)
        self.config = config
        attention, transition = config.single_attention, config.single_transition
        if attention is None or transition is None:
            return
        self.single_attention = AttentionPairBias(attention, dtype=dtype, rngs=rngs)
        self.single_transition = Transition(transition, dtype=dtype, rngs=rngs)
        if config.single_norm:
            self.single_norm = LayerNorm(attention.channels)

    def __call__(
        self,
        pair: Array,
        single: Array | None = None,
        pair_mask: Array | None = None,
        single_mask: Array | None = None,
        **options: Unpack[Options],
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes the block, with the arguments and errors of `block`."""
        config, attention = self.config, self.config.single_attention
        _check_pairs(pair, config.pair.channels, pair_mask)
        if (single is None) != (attention is None):
            raise ValueError(
                f"single is {'' if single is None else 'not '}None; the parameters are of a block "
                f"{'without' if attention is None else 'with'} a single representation"
            )
        pair = self.update_pair(jnp.asarray(pair), pair_mask, options)
        if single is None or attention is None:
            return pair, None
        _check_single(single, pair, attention.channels, single_mask)
        mask = None if single_mask is None else single_mask[:, None]
        row, pair = self.single_attention.with_pair(
            jnp.asarray(single)[:, None], pair, mask, residual=True, **options
        )
        single = self.single_transition(row[:, 0], residual=True, **options)
        if config.single_norm:
            single = ops.layer_norm(
                single,
                self.single_norm.scale[...],
                self.single_norm.bias[...],
                epsilon=attention.epsilon,
                implementation=options.get("implementation"),
            )
        return pair, single


class EvoformerBlock(_PairBlock):
    """One block of an Evoformer or of an MSA module, without dropout."""

    def __init__(self, config: EvoformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config.pair, dtype=dtype, rngs=rngs)
        self.config = config
        self.outer_product_mean = OuterProductMean(config.outer_product, dtype=dtype, rngs=rngs)
        if config.row_attention is not None:
            self.row_attention = AttentionPairBias(config.row_attention, dtype=dtype, rngs=rngs)
        if config.pair_averaging is not None:
            self.pair_averaging = PairAveraging(config.pair_averaging, dtype=dtype, rngs=rngs)
        if config.column_attention is not None:
            self.column_attention = ColumnAttention(config.column_attention, dtype=dtype, rngs=rngs)
        if config.msa_transition is not None:
            self.msa_transition = Transition(config.msa_transition, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        msa: Array,
        pair: Array,
        msa_mask: Array | None = None,
        pair_mask: Array | None = None,
        **options: Unpack[Options],
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the block, with the arguments and errors of `evoformer_block`."""
        config = self.config
        check_sequences("msa", msa, config.outer_product.channels)
        check_mask("msa_mask", msa_mask, msa.shape[:3], "(B, S, N)")
        _check_pairs(pair, config.pair.channels, pair_mask)
        if (msa.shape[0], msa.shape[2]) != pair.shape[:2]:
            raise ValueError(f"msa has shape {msa.shape} and pair {pair.shape}; expected the same B and N")
        msa, pair = jnp.asarray(msa), jnp.asarray(pair)
        if config.outer_product_first:
            pair = self.outer_product_mean(msa, msa_mask, pair=pair, **options)
        if config.row_attention is not None:
            msa, pair = self.row_attention.with_pair(msa, pair, msa_mask, residual=True, **options)
        if config.pair_averaging is not None:
            msa = self.pair_averaging(msa, pair, pair_mask, residual=True, **options)
        if config.column_attention is not None:
            msa = self.column_attention(msa, msa_mask, residual=True, **options)
        if config.msa_transition is not None:
            msa = self.msa_transition(msa, residual=True, **options)
        if not config.outer_product_first:
            pair = self.outer_product_mean(msa, msa_mask, pair=pair, **options)
        return msa, self.update_pair(pair, pair_mask, options)


class Pairformer(nnx.Module):
    """Blocks one after another."""

    def __init__(self, config: PairformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(
        self,
        pair: Array,
        single: Array | None = None,
        pair_mask: Array | None = None,
        single_mask: Array | None = None,
        *,
        remat: training.Remat = "none",
        **options: Unpack[Options],
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes the blocks, with the arguments and errors of `stack`."""
        return _run(self.layers, (pair, single), (pair_mask, single_mask), remat, options)


class Evoformer(nnx.Module):
    """Blocks one after another."""

    def __init__(self, config: EvoformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.layers = nnx.List([EvoformerBlock(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(
        self,
        msa: Array,
        pair: Array,
        msa_mask: Array | None = None,
        pair_mask: Array | None = None,
        *,
        remat: training.Remat = "none",
        **options: Unpack[Options],
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the blocks, with the arguments and errors of `evoformer_stack`."""
        return _run(self.layers, (msa, pair), (msa_mask, pair_mask), remat, options)


def _run(
    layers: nnx.Module,
    carried: tuple[Array | None, Array | None],
    masks: tuple[Array | None, Array | None],
    remat: training.Remat,
    options: Options,
) -> tuple[Any, Any]:
    """The blocks of a stack; arrays of NumPy become JAX's, as a scan takes them."""
    carried = jax.tree.map(jnp.asarray, carried)
    given: dict[str, Any] = {"implementation": None} | dict(options)
    first, second = run_layers(layers, carried, *masks, remat=remat, **given)
    return first, second


def _check_pairs(pair: Array, channels: int, mask: Array | None) -> None:
    check_pairs(pair, channels)
    check_mask("pair_mask", mask, pair.shape[:3], "(B, N, N)")


def _check_single(single: Array, pair: jax.Array, channels: int, mask: Array | None) -> None:
    _checks.check_float("single", single)
    _checks.check_shape("single", single, (*pair.shape[:2], channels), "(B, N, C) as pair and the parameters have")
    check_mask("single_mask", mask, single.shape[:2], "(B, N)")
