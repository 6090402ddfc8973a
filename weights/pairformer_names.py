"""How each line of models names the tensors of AlphaFold's pair stack."""

from collections.abc import Mapping
from typing import Any

from weights.pairformer_layouts import (
    Attention,
    Averaging,
    Form,
    Layout,
    Linear,
    Module,
    Norm,
    OuterProduct,
    ReLU,
    SwiGLU,
    TriMul,
)


def _norm(name: str) -> Norm:
    return Norm(f"{name}.weight", f"{name}.bias")


def _linear(name: str) -> Linear:
    return Linear(f"{name}.weight", f"{name}.bias", "oi")


def _qkv(name: str) -> dict[str, Any]:
    """The five layers of an attention in torch, which are called q, k, v, g and o."""
    roles = {"q": "q", "k": "k", "v": "v", "gate": "g", "out": "o"}
    return {role: _linear(f"{name}_{letter}") for role, letter in roles.items()}


def _pair_stack(at: str, bias: str = "linear", fused: bool = False) -> dict[str, Module]:
    """The triangle modules of OpenFold and its relatives; `bias` is their name of the bias of pairs."""
    projections = ("ab_p", "ab_g") if fused else ("a_p", "a_g", "b_p", "b_g")

    def update(name: str) -> TriMul:
        return TriMul(
            norm=_norm(f"{name}.layer_norm_in"),
            projections=tuple(_linear(f"{name}.linear_{p}") for p in projections),
            gate=_linear(f"{name}.linear_g"),
            out_norm=_norm(f"{name}.layer_norm_out"),
            out=_linear(f"{name}.linear_z"),
        )

    return {
        "tri_mul_out": update(f"{at}tri_mul_out"),
        "tri_mul_in": update(f"{at}tri_mul_in"),
        "tri_att_start": _triangle_attention(f"{at}tri_att_start", bias),
        "tri_att_end": _triangle_attention(f"{at}tri_att_end", bias),
    }


def _triangle_attention(name: str, bias: str) -> Attention:
    return Attention(
        norm=_norm(f"{name}.layer_norm"), pair_bias=_linear(f"{name}.{bias}"), **_qkv(f"{name}.mha.linear")
    )


def _outer_product(name: str) -> OuterProduct:
    return OuterProduct(
        norm=_norm(f"{name}.layer_norm"),
        left=_linear(f"{name}.linear_1"),
        right=_linear(f"{name}.linear_2"),
        out=_linear(f"{name}.linear_out"),
    )


# Boltz


def _boltz_transition(name: str) -> SwiGLU:
    gate_up = (_linear(f"{name}.fc1"), _linear(f"{name}.fc2"))
    return SwiGLU(norm=_norm(f"{name}.norm"), gate_up=gate_up, down=_linear(f"{name}.fc3"))


def _boltz_pair(at: str, transition: str) -> dict[str, Module]:
    def update(name: str) -> TriMul:
        return TriMul(
            norm=_norm(f"{name}.norm_in"),
            projections=(_linear(f"{name}.p_in"), _linear(f"{name}.g_in")),
            gate=_linear(f"{name}.g_out"),
            out_norm=_norm(f"{name}.norm_out"),
            out=_linear(f"{name}.p_out"),
        )

    return {
        "tri_mul_out": update(f"{at}tri_mul_out"),
        "tri_mul_in": update(f"{at}tri_mul_in"),
        "tri_att_start": _triangle_attention(f"{at}tri_att_start", "linear"),
        "tri_att_end": _triangle_attention(f"{at}tri_att_end", "linear"),
        "pair_transition": _boltz_transition(f"{at}{transition}"),
    }


def _boltz_single(norm: str) -> dict[str, Module]:
    attention = Attention(
        norm=_norm(norm),
        pair_norm=_norm("attention.proj_z.0"),
        pair_bias=_linear("attention.proj_z.1"),
        **_qkv("attention.proj"),
    )
    return {"single_attention": attention, "single_transition": _boltz_transition("transition_s")}


_BOLTZ_AVERAGING = Averaging(
    norm=_norm("pair_weighted_averaging.norm_m"),
    pair_norm=_norm("pair_weighted_averaging.norm_z"),
    pair_bias=_linear("pair_weighted_averaging.proj_z"),
    v=_linear("pair_weighted_averaging.proj_m"),
    gate=_linear("pair_weighted_averaging.proj_g"),
    out=_linear("pair_weighted_averaging.proj_o"),
)
_BOLTZ_MSA: tuple[Mapping[str, Module], ...] = (
    {
        "outer_product_mean": OuterProduct(
            norm=_norm("outer_product_mean.norm"),
            left=_linear("outer_product_mean.proj_a"),
            right=_linear("outer_product_mean.proj_b"),
            out=_linear("outer_product_mean.proj_o"),
        )
    },
    {"pair_averaging": _BOLTZ_AVERAGING, "msa_transition": _boltz_transition("msa_transition")},
)
_BOLTZ_OPTIONS = {"outer_product_first": False, "normalization": "clamped"}


# Protenix


def _protenix_transition(name: str) -> SwiGLU:
    gate_up = (_linear(f"{name}.linear_no_bias_a"), _linear(f"{name}.linear_no_bias_b"))
    return SwiGLU(norm=_norm(f"{name}.layernorm1"), gate_up=gate_up, down=_linear(f"{name}.linear_no_bias"))


def _protenix_pair(at: str) -> dict[str, Module]:
    return _pair_stack(at) | {"pair_transition": _protenix_transition(f"{at}pair_transition")}


_PROTENIX_ATTENTION = Attention(
    norm=_norm("attention_pair_bias.layernorm_a"),
    pair_norm=_norm("attention_pair_bias.layernorm_z"),
    pair_bias=_linear("attention_pair_bias.linear_nobias_z"),
    **_qkv("attention_pair_bias.attention.linear"),
)
_AVERAGED = "msa_stack.msa_pair_weighted_averaging"
_PROTENIX_AVERAGING = Averaging(
    norm=_norm(f"{_AVERAGED}.layernorm_m"),
    pair_norm=_norm(f"{_AVERAGED}.layernorm_z"),
    pair_bias=_linear(f"{_AVERAGED}.linear_no_bias_z"),
    v=_linear(f"{_AVERAGED}.linear_no_bias_mv"),
    gate=_linear(f"{_AVERAGED}.linear_no_bias_mg"),
    out=_linear(f"{_AVERAGED}.linear_no_bias_out"),
)


# OpenFold and OpenFold 3


def _openfold_transition(name: str) -> ReLU:
    return ReLU(norm=_norm(f"{name}.layer_norm"), up=_linear(f"{name}.linear_1"), down=_linear(f"{name}.linear_2"))


def _evoformer(at: str, msa: str, fused: bool = False) -> Layout:
    """OpenFold's Evoformer; before its version 2, `core.` was before all but the attentions."""
    row = Attention(
        norm=_norm("msa_att_row.layer_norm_m"),
        pair_norm=_norm("msa_att_row.layer_norm_z"),
        pair_bias=_linear("msa_att_row.linear_z"),
        **_qkv("msa_att_row.mha.linear"),
    )
    column = Attention(norm=_norm("msa_att_col._msa_att.layer_norm_m"), **_qkv("msa_att_col._msa_att.mha.linear"))
    return Layout(
        name="OpenFold's Evoformer",
        trunk="evoformer.",
        blocks="blocks.",
        pair=_pair_stack(at, fused=fused) | {"pair_transition": _openfold_transition(f"{at}pair_transition")},
        parts=(
            {"outer_product_mean": _outer_product(f"{msa}outer_product_mean")},
            {"row_attention": row, "msa_transition": _openfold_transition(f"{msa}msa_transition")},
            {"column_attention": column},
        ),
    )


def _swiglu(name: str) -> SwiGLU:
    gate_up = (_linear(f"{name}.swiglu.linear_a"), _linear(f"{name}.swiglu.linear_b"))
    return SwiGLU(norm=_norm(f"{name}.layer_norm"), gate_up=gate_up, down=_linear(f"{name}.linear_out"))


_OF3_PAIR = _pair_stack("pair_stack.", "linear_z") | {"pair_transition": _swiglu("pair_stack.pair_transition")}
_OF3_ATTENTION = Attention(
    norm=_norm("attn_pair_bias.layer_norm_a"),
    pair_norm=_norm("attn_pair_bias.layer_norm_z"),
    pair_bias=_linear("attn_pair_bias.linear_z"),
    **_qkv("attn_pair_bias.mha.linear"),
)
_OF3_AVERAGING = Averaging(
    norm=_norm("msa_att_row.layer_norm_m"),
    pair_norm=_norm("msa_att_row.layer_norm_z"),
    pair_bias=_linear("msa_att_row.linear_z"),
    v=_linear("msa_att_row.linear_v"),
    gate=_linear("msa_att_row.linear_g"),
    out=_linear("msa_att_row.linear_o"),
)


# AlphaFold 3


def _haiku_norm(name: str) -> Norm:
    return Norm(f"{name}/scale", f"{name}/offset")


def _haiku(name: str, form: Form = "io") -> Linear:
    return Linear(f"{name}/weights", f"{name}/bias", form)


def _haiku_transition(name: str) -> SwiGLU:
    return SwiGLU(
        norm=_haiku_norm(f"{name}/input_layer_norm"),
        gate_up=(_haiku(f"{name}/transition1"),),
        down=_haiku(f"{name}/transition2"),
    )


def _haiku_pair() -> dict[str, Module]:
    def update(name: str, *, swapped: bool) -> TriMul:
        return TriMul(
            norm=_haiku_norm(f"{name}/left_norm_input"),
            projections=(_haiku(f"{name}/projection"), _haiku(f"{name}/gate")),
            gate=_haiku(f"{name}/gating_linear"),
            out_norm=_haiku_norm(f"{name}/center_norm"),
            out=_haiku(f"{name}/output_projection"),
            interleaved=True,
            swapped=swapped,
        )

    def attention(name: str) -> Attention:
        return Attention(
            norm=_haiku_norm(f"{name}/act_norm"),
            pair_bias=_haiku(f"{name}/pair_bias_projection"),
            q=_haiku(f"{name}/q_projection", "hdi"),
            k=_haiku(f"{name}/k_projection", "hdi"),
            v=_haiku(f"{name}/v_projection", "ihd"),
            gate=_haiku(f"{name}/gating_query", "oi"),
            out=_haiku(f"{name}/output_projection"),
        )

    return {
        "tri_mul_out": update("triangle_multiplication_outgoing", swapped=False),
        "tri_mul_in": update("triangle_multiplication_incoming", swapped=True),  # 'kjc,kic->ijc'
        "tri_att_start": attention("pair_attention1"),
        "tri_att_end": attention("pair_attention2"),
        "pair_transition": _haiku_transition("pair_transition"),
    }


_AF3_ATTENTION = Attention(
    norm=_haiku_norm("single_attention_layer_norm"),
    pair_norm=_haiku_norm("single_pair_logits_norm"),
    pair_bias=_haiku("single_pair_logits_projection"),
    q=_haiku("single_attention_q_projection", "ihd"),
    k=_haiku("single_attention_k_projection", "ihd"),
    v=_haiku("single_attention_v_projection", "ihd"),
    gate=_haiku("single_attention_gating_query"),
    out=_haiku("single_attention_transition2"),
)
_AF3_MSA: tuple[Mapping[str, Module], ...] = (
    {
        "outer_product_mean": OuterProduct(
            norm=_haiku_norm("outer_product_mean/layer_norm_input"),
            left=_haiku("outer_product_mean/left_projection"),
            right=_haiku("outer_product_mean/right_projection"),
            out=Linear("outer_product_mean/output_w", "outer_product_mean/output_b", "cco"),
        )
    },
    {
        "pair_averaging": Averaging(
            norm=_haiku_norm("msa_attention1/act_norm"),
            pair_norm=_haiku_norm("msa_attention1/pair_norm"),
            pair_bias=_haiku("msa_attention1/pair_logits"),
            v=_haiku("msa_attention1/v_projection", "ihd"),
            gate=_haiku("msa_attention1/gating_query"),
            out=_haiku("msa_attention1/output_projection"),
        ),
        "msa_transition": _haiku_transition("msa_transition"),
    },
)

LAYOUTS = (
    *(
        Layout(
            name=f"Boltz's Pairformer, version {version}",
            trunk="pairformer_module.",
            blocks="layers.",
            pair=_boltz_pair("", "transition_z"),
            parts=(_boltz_single(norm), {"single_norm": _norm("s_post_norm")}),
        )
        for version, norm in ((1, "attention.norm_s"), (2, "pre_norm_s"))
    ),
    *(
        Layout(
            name=f"Boltz's MSA module, version {version}",
            trunk=None,
            blocks="layers.",
            pair=pair,
            parts=_BOLTZ_MSA,
            options=_BOLTZ_OPTIONS,
        )
        for version, pair in (
            (1, _boltz_pair("", "z_transition")),
            (2, _boltz_pair("pairformer_layer.", "transition_z")),
        )
    ),
    Layout(
        name="Protenix's Pairformer",
        trunk="pairformer_stack.",
        blocks="blocks.",
        pair=_protenix_pair(""),
        parts=(
            {
                "single_attention": _PROTENIX_ATTENTION,
                "single_transition": _protenix_transition("single_transition"),
            },
        ),
    ),
    Layout(
        name="Protenix's MSA module",
        trunk=None,
        blocks="blocks.",
        pair=_protenix_pair("pair_stack."),
        parts=(
            {"outer_product_mean": _outer_product("outer_product_mean_msa")},
            {
                "pair_averaging": _PROTENIX_AVERAGING,
                "msa_transition": _protenix_transition("msa_stack.transition_m"),
            },
        ),
        options={"outer_product_first": True},
    ),
    Layout(
        name="OpenFold 3's Pairformer",
        trunk="pairformer_stack.",
        blocks="blocks.",
        pair=_OF3_PAIR,
        parts=({"single_attention": _OF3_ATTENTION, "single_transition": _swiglu("single_transition")},),
    ),
    Layout(
        name="OpenFold 3's MSA module",
        trunk=None,
        blocks="blocks.",
        pair=_OF3_PAIR,
        parts=(
            {"outer_product_mean": _outer_product("outer_product_mean")},
            {"pair_averaging": _OF3_AVERAGING, "msa_transition": _swiglu("msa_transition")},
        ),
        options={"outer_product_first": True},
    ),
    _evoformer("pair_stack.", ""),
    _evoformer("pair_stack.", "", fused=True),
    _evoformer("core.", "core."),
    Layout(
        name="AlphaFold 3's Pairformer",
        trunk="trunk_pairformer/",
        blocks=None,
        pair=_haiku_pair(),
        parts=({"single_attention": _AF3_ATTENTION, "single_transition": _haiku_transition("single_transition")},),
        options={"ending_bias": "in_place"},
    ),
    Layout(
        name="AlphaFold 3's MSA module",
        trunk=None,
        blocks=None,
        pair=_haiku_pair(),
        parts=_AF3_MSA,
        options={"ending_bias": "in_place", "outer_product_first": True},
    ),
)
