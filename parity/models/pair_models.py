"""The pair stacks of Boltz, Protenix, OpenFold, OpenFold 3 and AlphaFold 3, each with its tensors and formulas.

Written in torch from what each model computes, and from nothing of ours. A checkpoint is drawn while it is
computed with: a layer draws its tensors the first time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

INF = 1e9


class Checkpoint:
    """Random tensors by name, in float64 with the values of float32."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def draw(self, name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        if name not in self.tensors:
            x = shift + scale * torch.randn(shape, generator=self.generator)
            self.tensors[name] = x.float().double()
        assert self.tensors[name].shape == shape
        return self.tensors[name]

    def norm(self, name: str, x: Tensor, scale: str = ".weight", bias: str = ".bias") -> Tensor:
        weight = self.draw(name + scale, x.shape[-1], scale=0.2, shift=1.0)
        return F.layer_norm(x, x.shape[-1:], weight, self.draw(name + bias, x.shape[-1], scale=0.2), 1e-5)

    def linear(self, name: str, x: Tensor, out: int, bias: bool = False) -> Tensor:
        weight = self.draw(f"{name}.weight", out, x.shape[-1], scale=x.shape[-1] ** -0.5)
        return F.linear(x, weight, self.draw(f"{name}.bias", out, scale=0.3) if bias else None)

    def haiku(self, name: str, x: Tensor, *out: int, transposed: bool = False, bias: bool = False) -> Tensor:
        """Haiku's layer, whose weights have the axes of the outputs."""
        c = x.shape[-1]
        weight = self.draw(f"{name}/weights", *((*out, c) if transposed else (c, *out)), scale=c**-0.5)
        y = x @ (weight.reshape(-1, c).T if transposed else weight.reshape(c, -1))
        y = y.unflatten(-1, out)
        return y + self.draw(f"{name}/bias", *out, scale=0.3) if bias else y

    def haiku_norm(self, name: str, x: Tensor) -> Tensor:
        return self.norm(name, x, "/scale", "/offset")


def attend(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
    """Attention of (..., N, H, D); biases are broadcast to (..., H, N, N)."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("...hqk,...khd->...qhd", sum(biases, scores).softmax(-1), v)


def outer_products(a: Tensor, b: Tensor) -> Tensor:
    """Sums over sequences of a[s, i, c] b[s, j, d], as (i, j, c d)."""
    return torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2)


# OpenFold's modules, which Protenix, OpenFold 3 and, in part, Boltz have too


def mha(t: Checkpoint, at: str, x: Tensor, heads: int, *biases: Tensor, q_bias=False, g_bias=False) -> Tensor:
    width = x.shape[-1] * 2
    q = t.linear(f"{at}.linear_q", x, width, q_bias).unflatten(-1, (heads, -1))
    k, v = (t.linear(f"{at}.linear_{y}", x, width).unflatten(-1, (heads, -1)) for y in "kv")
    gate = t.linear(f"{at}.linear_g", x, width, g_bias).sigmoid()
    return t.linear(f"{at}.linear_o", attend(q, k, v, *biases).flatten(-2) * gate, x.shape[-1], g_bias)


def triangle_attention(t, at, z, mask, ending=False, bias="linear", biased=False):
    if ending:
        z, mask = z.transpose(1, 2), mask.transpose(1, 2)
    x = t.norm(f"{at}.layer_norm", z)
    triangle = t.linear(f"{at}.{bias}", x, 3).permute(0, 3, 1, 2)[:, None]
    out = mha(t, f"{at}.mha", x, 3, INF * (mask - 1)[:, :, None, None], triangle, g_bias=biased)
    return out.transpose(1, 2) if ending else out


def openfold_update(t, at, z, mask, incoming, biased=False, fused=False):
    x, h = t.norm(f"{at}.layer_norm_in", z), 10
    if fused:
        ab = t.linear(f"{at}.linear_ab_g", x, 2 * h, biased).sigmoid() * t.linear(
            f"{at}.linear_ab_p", x, 2 * h, biased
        )
        a, b = (ab * mask[..., None]).chunk(2, -1)
    else:
        a, b = (
            mask[..., None]
            * t.linear(f"{at}.linear_{y}_g", x, h, biased).sigmoid()
            * t.linear(f"{at}.linear_{y}_p", x, h, biased)
            for y in "ab"
        )
    y = torch.einsum("bkic,bkjc->bijc" if incoming else "bikc,bjkc->bijc", a, b)
    y = t.linear(f"{at}.linear_z", t.norm(f"{at}.layer_norm_out", y), z.shape[-1], biased)
    return y * t.linear(f"{at}.linear_g", x, z.shape[-1], biased).sigmoid()


def openfold_outer_product(t, at, m, mask, biased=False):
    x = t.norm(f"{at}.layer_norm", m)
    a, b = (t.linear(f"{at}.linear_{i}", x, 5, biased) * mask[..., None] for i in (1, 2))
    count = torch.einsum("bsi,bsj->bij", mask, mask)
    return t.linear(f"{at}.linear_out", outer_products(a, b), 12, True) / (count[..., None] + 1e-3)


def openfold_pairs(t, at, z, mask, transition, bias="linear", biased=False, fused=False):
    z = z + openfold_update(t, f"{at}tri_mul_out", z, mask, False, biased, fused)
    z = z + openfold_update(t, f"{at}tri_mul_in", z, mask, True, biased, fused)
    z = z + triangle_attention(t, f"{at}tri_att_start", z, mask, False, bias, biased)
    z = z + triangle_attention(t, f"{at}tri_att_end", z, mask, True, bias, biased)
    return z + transition(t, f"{at}pair_transition", z)


def relu_transition(t, at, x):
    y = t.linear(f"{at}.linear_1", t.norm(f"{at}.layer_norm", x), 2 * x.shape[-1], True).relu()
    return t.linear(f"{at}.linear_2", y, x.shape[-1], True)


def openfold_evoformer(t, at, m, z, msa_mask, mask, *, core=False, fused=False):
    """OpenFold's EvoformerBlock; before its version 2, what `core.` is before."""
    pairs, msa = ("core.", "core.") if core else ("pair_stack.", "")
    x, row = t.norm(f"{at}msa_att_row.layer_norm_m", m), f"{at}msa_att_row"
    bias = t.linear(f"{row}.linear_z", t.norm(f"{row}.layer_norm_z", z), 4).permute(0, 3, 1, 2)[:, None]
    m = m + mha(t, f"{row}.mha", x, 4, INF * (msa_mask - 1)[:, :, None, None], bias, g_bias=True)
    x, kept = m.transpose(1, 2), msa_mask.transpose(1, 2)
    x = t.norm(f"{at}msa_att_col._msa_att.layer_norm_m", x)
    column = mha(t, f"{at}msa_att_col._msa_att.mha", x, 4, INF * (kept - 1)[:, :, None, None], g_bias=True)
    m = m + column.transpose(1, 2)
    m = m + relu_transition(t, f"{at}{msa}msa_transition", m)
    z = z + openfold_outer_product(t, f"{at}{msa}outer_product_mean", m, msa_mask, True)
    return m, openfold_pairs(t, f"{at}{pairs}", z, mask, relu_transition, biased=True, fused=fused)


# OpenFold 3


def swiglu(t, at, x):
    y = t.norm(f"{at}.layer_norm", x)
    a, b = (t.linear(f"{at}.swiglu.linear_{name}", y, 2 * x.shape[-1]) for name in "ab")
    return t.linear(f"{at}.linear_out", F.silu(a) * b, x.shape[-1])


def of3_pairformer(t, at, s, z, single_mask, mask):
    z = openfold_pairs(t, f"{at}pair_stack.", z, mask, swiglu, "linear_z")
    apb = f"{at}attn_pair_bias"
    bias = t.linear(f"{apb}.linear_z", t.norm(f"{apb}.layer_norm_z", z), 4).permute(0, 3, 1, 2)
    a = t.norm(f"{apb}.layer_norm_a", s)
    s = s + mha(t, f"{apb}.mha", a, 4, INF * (single_mask - 1)[:, None, None], bias, q_bias=True)
    return s + swiglu(t, f"{at}single_transition", s), z


def of3_msa(t, at, m, z, msa_mask, mask, *, last=False):
    z = z + openfold_outer_product(t, f"{at}outer_product_mean", m, msa_mask)
    if not last:
        row = f"{at}msa_att_row"
        x = t.norm(f"{row}.layer_norm_m", m)
        w = t.linear(f"{row}.linear_z", t.norm(f"{row}.layer_norm_z", z), 4) + INF * (mask - 1)[..., None]
        m = m + averaged(
            w, t.linear(f"{row}.linear_v", x, 20), t.linear(f"{row}.linear_g", x, 20), t, f"{row}.linear_o"
        )
        m = m + swiglu(t, f"{at}msa_transition", m)
    return m, openfold_pairs(t, f"{at}pair_stack.", z, mask, swiglu, "linear_z")


def averaged(w, v, g, t, out):
    """Means of values over positions j, by softmax over j of w[i, j, h], gated and projected."""
    o = torch.einsum("bijh,bsjhc->bsihc", w.softmax(2), v.unflatten(-1, (w.shape[-1], -1)))
    return t.linear(out, g.sigmoid() * o.flatten(-2), 8)


# Protenix


def protenix_transition(t, at, x):
    y = t.norm(f"{at}.layernorm1", x)
    a, b = (t.linear(f"{at}.linear_no_bias_{name}", y, 2 * x.shape[-1]) for name in "ab")
    return t.linear(f"{at}.linear_no_bias", F.silu(a) * b, x.shape[-1])


def protenix_pairformer(t, at, s, z, single_mask, mask):
    """Its single attention has no mask."""
    del single_mask
    z = openfold_pairs(t, at, z, mask, protenix_transition)
    apb = f"{at}attention_pair_bias"
    bias = t.linear(f"{apb}.linear_nobias_z", t.norm(f"{apb}.layernorm_z", z), 4).permute(0, 3, 1, 2)
    s = s + mha(t, f"{apb}.attention", t.norm(f"{apb}.layernorm_a", s), 4, bias, q_bias=True)
    return s + protenix_transition(t, f"{at}single_transition", s), z


def protenix_msa(t, at, m, z, msa_mask, mask, *, last=False):
    """Its outer product and its averaging have no masks."""
    z = z + openfold_outer_product(t, f"{at}outer_product_mean_msa", m, torch.ones_like(msa_mask))
    if not last:
        pwa = f"{at}msa_stack.msa_pair_weighted_averaging"
        x = t.norm(f"{pwa}.layernorm_m", m)
        w = t.linear(f"{pwa}.linear_no_bias_z", t.norm(f"{pwa}.layernorm_z", z), 4)
        v, g = (t.linear(f"{pwa}.linear_no_bias_{name}", x, 20) for name in ("mv", "mg"))
        m = m + averaged(w, v, g, t, f"{pwa}.linear_no_bias_out")
        m = m + protenix_transition(t, f"{at}msa_stack.transition_m", m)
    return m, openfold_pairs(t, f"{at}pair_stack.", z, mask, protenix_transition)


# Boltz


def boltz_transition(t, at, x):
    y = t.norm(f"{at}.norm", x)
    y = F.silu(t.linear(f"{at}.fc1", y, 2 * x.shape[-1])) * t.linear(f"{at}.fc2", y, 2 * x.shape[-1])
    return t.linear(f"{at}.fc3", y, x.shape[-1])


def boltz_update(t, at, z, mask, incoming):
    x = t.norm(f"{at}.norm_in", z)
    c = x.shape[-1]
    y = t.linear(f"{at}.p_in", x, 2 * c) * t.linear(f"{at}.g_in", x, 2 * c).sigmoid() * mask[..., None]
    y = torch.einsum("bkid,bkjd->bijd" if incoming else "bikd,bjkd->bijd", *y.chunk(2, -1))
    return t.linear(f"{at}.p_out", t.norm(f"{at}.norm_out", y), c) * t.linear(f"{at}.g_out", x, c).sigmoid()


def boltz_pairs(t, at, z, mask, transition):
    z = z + boltz_update(t, f"{at}tri_mul_out", z, mask, False)
    z = z + boltz_update(t, f"{at}tri_mul_in", z, mask, True)
    z = z + triangle_attention(t, f"{at}tri_att_start", z, mask)
    z = z + triangle_attention(t, f"{at}tri_att_end", z, mask, True)
    return z + boltz_transition(t, f"{at}{transition}", z)


def boltz_pairformer(t, at, s, z, single_mask, mask, *, version=2, post_norm=False):
    z = boltz_pairs(t, at, z, mask, "transition_z")
    x, attention = t.norm(f"{at}attention.norm_s" if version == 1 else f"{at}pre_norm_s", s), f"{at}attention"
    q = t.linear(f"{attention}.proj_q", x, 8, True)
    k, v, g = (t.linear(f"{attention}.proj_{name}", x, 8) for name in "kvg")
    bias = t.linear(f"{attention}.proj_z.1", t.norm(f"{attention}.proj_z.0", z), 4).permute(0, 3, 1, 2)
    q, k, v = (y.unflatten(-1, (4, -1)) for y in (q, k, v))
    o = attend(q, k, v, bias, -1e6 * (1 - single_mask)[:, None, None]).flatten(-2)
    s = s + t.linear(f"{attention}.proj_o", g.sigmoid() * o, 8)
    s = s + boltz_transition(t, f"{at}transition_s", s)
    return t.norm(f"{at}s_post_norm", s) if post_norm else s, z


def boltz_msa(t, at, m, z, msa_mask, mask, *, version=2):
    pwa, opm = f"{at}pair_weighted_averaging", f"{at}outer_product_mean"
    x = t.norm(f"{pwa}.norm_m", m)
    w = t.linear(f"{pwa}.proj_z", t.norm(f"{pwa}.norm_z", z), 4) - 1e6 * (1 - mask)[..., None]
    m = m + averaged(w, t.linear(f"{pwa}.proj_m", x, 20), t.linear(f"{pwa}.proj_g", x, 20), t, f"{pwa}.proj_o")
    m = m + boltz_transition(t, f"{at}msa_transition", m)
    x = t.norm(f"{opm}.norm", m)
    a, b = (t.linear(f"{opm}.proj_{name}", x, 5) * msa_mask[..., None] for name in "ab")
    count = torch.einsum("bsi,bsj->bij", msa_mask, msa_mask).clamp(min=1)
    z = z + t.linear(f"{opm}.proj_o", outer_products(a, b) / count[..., None], 12, True)
    if version == 1:
        return m, boltz_pairs(t, at, z, mask, "z_transition")
    return m, boltz_pairs(t, f"{at}pairformer_layer.", z, mask, "transition_z")


# AlphaFold 3, of one block: Haiku stacks the blocks


def af3_update(t, at, z, mask, incoming):
    x, c = t.haiku_norm(f"{at}/left_norm_input", z), z.shape[-1]
    both = t.haiku(f"{at}/projection", x, 2 * c) * mask[..., None] * t.haiku(f"{at}/gate", x, 2 * c).sigmoid()
    a, b = both.unflatten(-1, (c, 2)).unbind(-1)
    y = torch.einsum("bkjc,bkic->bijc" if incoming else "bikc,bjkc->bijc", a, b)
    y = t.haiku(f"{at}/output_projection", t.haiku_norm(f"{at}/center_norm", y), c)
    return y * t.haiku(f"{at}/gating_linear", x, c).sigmoid()


def af3_grid_attention(t, at, z, mask, transpose):
    x = t.haiku_norm(f"{at}/act_norm", z)
    bias = t.haiku(f"{at}/pair_bias_projection", x, 3).permute(0, 3, 1, 2)[:, None]
    x = x.transpose(1, 2) if transpose else x
    q, k = (t.haiku(f"{at}/{name}_projection", x, 3, 4, transposed=True) for name in "qk")
    v = t.haiku(f"{at}/v_projection", x, 3, 4)
    o = attend(q, k, v, bias, INF * (mask.transpose(1, 2) - 1)[:, :, None, None]).flatten(-2)
    o = o * t.haiku(f"{at}/gating_query", x, 12, transposed=True).sigmoid()
    o = t.haiku(f"{at}/output_projection", o, z.shape[-1])
    return o.transpose(1, 2) if transpose else o


def af3_transition(t, at, x):
    a, b = t.haiku(f"{at}/transition1", t.haiku_norm(f"{at}/input_layer_norm", x), 4 * x.shape[-1]).chunk(2, -1)
    return t.haiku(f"{at}/transition2", F.silu(a) * b, x.shape[-1])


def af3_pairs(t, at, z, mask):
    z = z + af3_update(t, f"{at}triangle_multiplication_outgoing", z, mask, False)
    z = z + af3_update(t, f"{at}triangle_multiplication_incoming", z, mask, True)
    z = z + af3_grid_attention(t, f"{at}pair_attention1", z, mask, False)
    z = z + af3_grid_attention(t, f"{at}pair_attention2", z, mask, True)
    return z + af3_transition(t, f"{at}pair_transition", z)


def af3_pairformer(t, at, s, z, single_mask, mask):
    z = af3_pairs(t, at, z, mask)
    logits = t.haiku(f"{at}single_pair_logits_projection", t.haiku_norm(f"{at}single_pair_logits_norm", z), 4)
    x = t.haiku_norm(f"{at}single_attention_layer_norm", s)
    q = t.haiku(f"{at}single_attention_q_projection", x, 4, 2, bias=True)
    k, v = (t.haiku(f"{at}single_attention_{name}_projection", x, 4, 2) for name in "kv")
    o = attend(q, k, v, logits.permute(0, 3, 1, 2), INF * (single_mask - 1)[:, None, None]).flatten(-2)
    o = o * t.haiku(f"{at}single_attention_gating_query", x, 8).sigmoid()
    s = s + t.haiku(f"{at}single_attention_transition2", o, 8)
    return s + af3_transition(t, f"{at}single_transition", s), z


def af3_msa(t, at, m, z, msa_mask, mask):
    opm, x = f"{at}outer_product_mean", t.haiku_norm(f"{at}outer_product_mean/layer_norm_input", m)
    left, right = (t.haiku(f"{opm}/{side}_projection", x, 5) * msa_mask[..., None] for side in ("left", "right"))
    out = torch.einsum("zabc,zade,cef->zbdf", left, right, t.draw(f"{opm}/output_w", 5, 5, 12, scale=0.2))
    count = torch.einsum("zab,zad->zbd", msa_mask, msa_mask)[..., None]
    z = z + (out + t.draw(f"{opm}/output_b", 12)) / (1e-3 + count)
    att, x = f"{at}msa_attention1", t.haiku_norm(f"{at}msa_attention1/act_norm", m)
    logits = t.haiku(f"{att}/pair_logits", t.haiku_norm(f"{att}/pair_norm", z), 4).permute(0, 3, 1, 2)
    logits = logits + INF * (msa_mask.amax(1) - 1)[:, None, None]
    v = t.haiku(f"{att}/v_projection", x, 4, 2)
    o = torch.einsum("zhqk,zbkhc->zbqhc", logits.softmax(-1), v).flatten(-2)
    o = o * t.haiku(f"{att}/gating_query", x, 8).sigmoid()
    m = m + t.haiku(f"{att}/output_projection", o, 8)
    m = m + af3_transition(t, f"{at}msa_transition", m)
    return m, af3_pairs(t, at, z, mask)


def numpy(tensors: dict[str, Tensor], dtype: Any = "float32") -> dict[str, Any]:
    return {name: tensor.numpy().astype(dtype) for name, tensor in tensors.items()}
