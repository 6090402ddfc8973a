"""The configs that parameters were made for: sizes, biases and parts can be read off them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from pallas_models import training
from pallas_models.ops.trimul import Residuals
from pallas_models.pairformer._transition import TransitionConfig
from pallas_models.pairformer.attention import AttentionConfig, EndingBias
from pallas_models.pairformer.blocks import EvoformerConfig, PairConfig, PairformerConfig
from pallas_models.pairformer.msa import Normalization, OuterProductConfig
from pallas_models.trimul import config_of as trimul_config

T = TypeVar("T")
Params = Mapping[str, Any]


def found(what: str, read: Callable[[], T]) -> T:
    """The result of reading parameters; ValueError where they are something else."""
    try:
        return read()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"params are not the parameters of {what}; expected a nested dict as `pairformer.init`, "
            "`pairformer.init_block` or a loader of `weights` has it"
        ) from None


def as_dict(params: Any) -> Any:
    """The parameters of `nnx.split` as nested dicts; any others as they are."""
    return nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params


def attention(params: Params, epsilon: float) -> AttentionConfig:
    projections = params["projections"]
    channels, _, num_heads, head_dim = projections["kernel"].shape
    return AttentionConfig(
        channels=channels,
        num_heads=num_heads,
        head_dim=head_dim,
        pair_channels=params["pair_bias"]["kernel"].shape[0] if "pair_bias" in params else channels,
        query_bias="query_bias" in projections,
        gate_bias="gate_bias" in projections,
        out_bias="bias" in params["out"],
        epsilon=epsilon,
    )


def transition(params: Params, epsilon: float) -> TransitionConfig:
    hidden, channels = params["down"]["kernel"].shape
    return TransitionConfig(
        channels=channels, hidden=hidden, kind="swiglu" if "gate_up" in params else "relu", epsilon=epsilon
    )


def outer_product(params: Params, normalization: Normalization, epsilon: float) -> OuterProductConfig:
    projections = params["projections"]
    channels, _, hidden = projections["kernel"].shape
    return OuterProductConfig(
        channels=channels,
        hidden=hidden,
        pair_channels=params["out"]["kernel"].shape[1],
        use_bias="bias" in projections,
        normalization=normalization,
        epsilon=epsilon,
    )


def _pair(params: Params, ending_bias: EndingBias, residuals: Residuals, epsilon: float) -> PairConfig:
    return PairConfig(
        triangle_update=trimul_config(params["tri_mul_out"], epsilon),
        triangle_attention=attention(params["tri_att_start"], epsilon),
        transition=transition(params["pair_transition"], epsilon),
        ending_bias=ending_bias,
        residuals=residuals,
    )


def pairformer(
    params: Params, ending_bias: EndingBias, residuals: Residuals, epsilon: float, num_layers: int = 1
) -> PairformerConfig:
    """The config of a block, and of a stack of so many."""
    single = "single_attention" in params
    return PairformerConfig(
        pair=_pair(params, ending_bias, residuals, epsilon),
        single_attention=attention(params["single_attention"], epsilon) if single else None,
        single_transition=transition(params["single_transition"], epsilon) if single else None,
        single_norm="single_norm" in params,
        num_layers=num_layers,
    )


def evoformer(
    params: Params,
    ending_bias: EndingBias,
    residuals: Residuals,
    normalization: Normalization,
    outer_product_first: bool,
    epsilon: float,
    num_layers: int = 1,
) -> EvoformerConfig:
    """The config of a block, and of a stack of so many."""

    def of(name: str) -> AttentionConfig | None:
        return attention(params[name], epsilon) if name in params else None

    has_transition = "msa_transition" in params
    return EvoformerConfig(
        pair=_pair(params, ending_bias, residuals, epsilon),
        outer_product=outer_product(params["outer_product_mean"], normalization, epsilon),
        row_attention=of("row_attention"),
        column_attention=of("column_attention"),
        pair_averaging=of("pair_averaging"),
        msa_transition=transition(params["msa_transition"], epsilon) if has_transition else None,
        outer_product_first=outer_product_first,
        num_layers=num_layers,
    )


def layers(params: Params) -> tuple[Params, int]:
    """The shapes of a block of a stack, whether its layers are stacked or not, and the number of blocks."""
    blocks = params["layers"]
    if training.is_stacked(params):
        count = len(jax.tree.leaves(blocks)[0])
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks), count
    return next(iter(blocks.values())), len(blocks)
