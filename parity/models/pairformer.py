"""AlphaFold's pair stack in torch.nn.functional, line by line as the supplements have it, of our parameters.

Projections are written one by one, attention with all of its scores, and the outer products of an alignment as one
array. What is masked has no weight; a query whose keys are all masked gives 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-5
Tensors = dict[str, Any]


def norm(x: Tensor, p: Tensors) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], EPSILON)


def linear(x: Tensor, p: Tensors) -> Tensor:
    return F.linear(x, p["kernel"].T, p.get("bias"))


def heads(x: Tensor, p: Tensors, place: int, bias: str = "") -> Tensor:
    """One of the projections to heads: (..., H, D)."""
    y = torch.einsum("...c,chd->...hd", x, p["kernel"][:, place])
    return y + p[bias] if bias in p else y


def softmax(scores: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        return scores.softmax(-1)
    weights = scores.masked_fill(~keep, -1e30).softmax(-1)
    return weights * keep.any(-1, keepdim=True)


def attend(p: Tensors, y: Tensor, bias: Tensor | None, keep: Tensor | None) -> Tensor:
    """Gated attention along the last axis but one of y (..., N, C); bias (..., H, N, N), keep (..., N)."""
    q, k, v = (heads(y, p["projections"], i, name) for i, name in enumerate(("query_bias", "", "")))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    keep = None if keep is None else keep[..., None, None, :].bool().expand(scores.shape)
    out = torch.einsum("...hqk,...khd->...qhd", softmax(scores, keep), v)
    gate = torch.sigmoid(heads(y, p["projections"], 3, "gate_bias"))
    return linear((out * gate).flatten(-2), p["out"])


def triangle_update(p: Tensors, z: Tensor, mask: Tensor | None, direction: str) -> Tensor:
    """Algorithms 11 and 12 of AlphaFold 2."""
    z = norm(z, p["norm"])
    left, gate_left, right, gate_right = linear(z, p["projections"]).chunk(4, -1)
    left, right = left * gate_left.sigmoid(), right * gate_right.sigmoid()
    if mask is not None:
        left, right = left * mask[..., None], right * mask[..., None]
    equation = "bikc,bjkc->bijc" if direction == "outgoing" else "bkic,bkjc->bijc"
    update = linear(norm(torch.einsum(equation, left, right), p["out_norm"]), p["out"])
    return update * torch.sigmoid(linear(z, p["gate_after"]))


def triangle_attention(
    p: Tensors, z: Tensor, mask: Tensor | None, direction: str, ending_bias: str = "transposed"
) -> Tensor:
    """Algorithms 13 and 14 of AlphaFold 2."""
    y = norm(z, p["norm"])
    bias = linear(y, p["pair_bias"]).permute(0, 3, 1, 2)  # of a pair in its place
    if direction == "ending":
        y = y.transpose(1, 2)
        bias = bias.mT if ending_bias == "transposed" else bias
        mask = None if mask is None else mask.mT
    out = attend(p, y, bias[:, None], mask)
    return out.transpose(1, 2) if direction == "ending" else out


def transition(p: Tensors, x: Tensor) -> Tensor:
    """Algorithm 11 of AlphaFold 3, or 9 and 15 of AlphaFold 2."""
    y = norm(x, p["norm"])
    if "up" in p:
        return linear(F.relu(linear(y, p["up"])), p["down"])
    gate, up = p["gate_up"]["kernel"].unbind(1)
    return linear(F.silu(y @ gate) * (y @ up), p["down"])


def attention_pair_bias(p: Tensors, x: Tensor, pair: Tensor, mask: Tensor | None) -> Tensor:
    """Algorithm 24 of AlphaFold 3, or 7 of AlphaFold 2 for an alignment."""
    bias = linear(norm(pair, p["pair_norm"]), p["pair_bias"]).permute(0, 3, 1, 2)
    return attend(p, norm(x, p["norm"]), bias if x.ndim == 3 else bias[:, None], mask)


def column_attention(p: Tensors, msa: Tensor, mask: Tensor | None) -> Tensor:
    """Algorithm 8 of AlphaFold 2."""
    y = norm(msa, p["norm"]).transpose(1, 2)
    return attend(p, y, None, None if mask is None else mask.mT).transpose(1, 2)


def pair_averaging(p: Tensors, msa: Tensor, pair: Tensor, mask: Tensor | None) -> Tensor:
    """Algorithm 10 of AlphaFold 3."""
    y = norm(msa, p["norm"])
    bias = linear(norm(pair, p["pair_norm"]), p["pair_bias"]).permute(0, 3, 1, 2)
    weights = softmax(bias, None if mask is None else mask[:, None].bool().expand(bias.shape))
    out = torch.einsum("bhij,bsjhd->bsihd", weights, heads(y, p["projections"], 0))
    return linear((out * torch.sigmoid(heads(y, p["projections"], 1))).flatten(-2), p["out"])


def outer_product_mean(p: Tensors, msa: Tensor, mask: Tensor | None, normalization: str = "shifted") -> Tensor:
    """Algorithm 10 of AlphaFold 2, 9 of AlphaFold 3."""
    y, projections = norm(msa, p["norm"]), p["projections"]
    mask = msa.new_ones(msa.shape[:-1]) if mask is None else mask.to(msa)
    sides = [y @ projections["kernel"][:, i] + projections.get("bias", msa.new_zeros(2, 1))[i] for i in range(2)]
    left, right = (side * mask[..., None] for side in sides)
    outer = torch.einsum("bsic,bsjd->bijcd", left, right).flatten(-2)
    count = torch.einsum("bsi,bsj->bij", mask, mask)[..., None]
    if normalization == "clamped":
        return linear(outer / count.clamp(min=1), p["out"])
    return linear(outer, p["out"]) / (count + 1e-3)


def update_pair(p: Tensors, z: Tensor, mask: Tensor | None, ending_bias: str) -> Tensor:
    z = z + triangle_update(p["tri_mul_out"], z, mask, "outgoing")
    z = z + triangle_update(p["tri_mul_in"], z, mask, "incoming")
    z = z + triangle_attention(p["tri_att_start"], z, mask, "starting")
    z = z + triangle_attention(p["tri_att_end"], z, mask, "ending", ending_bias)
    return z + transition(p["pair_transition"], z)


def block(
    p: Tensors,
    z: Tensor,
    s: Tensor | None = None,
    pair_mask: Tensor | None = None,
    single_mask: Tensor | None = None,
    ending_bias: str = "transposed",
) -> tuple[Tensor, Tensor | None]:
    """Lines 2 to 8 of Algorithm 17 of AlphaFold 3."""
    z = update_pair(p, z, pair_mask, ending_bias)
    if s is None:
        return z, None
    s = s + attention_pair_bias(p["single_attention"], s, z, single_mask)
    s = s + transition(p["single_transition"], s)
    return z, norm(s, p["single_norm"]) if "single_norm" in p else s


def evoformer_block(
    p: Tensors,
    m: Tensor,
    z: Tensor,
    msa_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    outer_product_first: bool = False,
    normalization: str = "shifted",
) -> tuple[Tensor, Tensor]:
    """Algorithm 6 of AlphaFold 2, lines 6 to 13 of Algorithm 8 of AlphaFold 3."""
    if outer_product_first:
        z = z + outer_product_mean(p["outer_product_mean"], m, msa_mask, normalization)
    if "row_attention" in p:
        m = m + attention_pair_bias(p["row_attention"], m, z, msa_mask)
    if "pair_averaging" in p:
        m = m + pair_averaging(p["pair_averaging"], m, z, pair_mask)
    if "column_attention" in p:
        m = m + column_attention(p["column_attention"], m, msa_mask)
    if "msa_transition" in p:
        m = m + transition(p["msa_transition"], m)
    if not outer_product_first:
        z = z + outer_product_mean(p["outer_product_mean"], m, msa_mask, normalization)
    return m, update_pair(p, z, pair_mask, "transposed")
