"""A block of the Pairformer as users of torch run it today, of the parameters of `pallas_models.pairformer`."""

from collections.abc import Callable
from typing import Any

EPSILON = 1e-5


def block(*, fused: bool) -> Callable[..., tuple[Any, Any]]:
    """The block of (params, pair, single, pair_mask, single_mask), tensors of one dtype and masks of bool.

    Args:
      fused: whether triangle updates and triangle attentions run in cuEquivariance's kernels. Else they are
        products, and torch's scaled_dot_product_attention of rows with bias and mask in one array.
    """
    import torch
    from torch.nn import functional as F

    if fused:
        import cuequivariance_ops_torch  # noqa: F401 (without its kernels it would run plain torch)
        from cuequivariance_torch import triangle_attention, triangle_multiplicative_update

    def norm(x: Any, p: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], EPSILON)

    def linear(x: Any, kernel: Any) -> Any:
        return F.linear(x, kernel.flatten(1).t())

    def update(p: Any, z: Any, mask: Any, direction: str) -> Any:
        left, gate_left, right, gate_right = p["projections"]["kernel"].chunk(4, 1)
        kernels = {"g_out": p["gate_after"]["kernel"], "p_out": p["out"]["kernel"]}
        kernels |= {"p_in": torch.cat([left, right], 1), "g_in": torch.cat([gate_left, gate_right], 1)}
        if fused:
            # (out, in) in memory, as users have them.
            weights = {f"{name}_weight": kernel.t().contiguous() for name, kernel in kernels.items()}
            weights |= {"norm_in_weight": p["norm"]["scale"], "norm_in_bias": p["norm"]["bias"]}
            weights |= {"norm_out_weight": p["out_norm"]["scale"], "norm_out_bias": p["out_norm"]["bias"]}
            return triangle_multiplicative_update(
                z, direction=direction, mask=mask.to(z.dtype), eps=EPSILON, **weights
            )
        z = norm(z, p["norm"])
        sides = linear(z, kernels["p_in"]) * linear(z, kernels["g_in"]).sigmoid() * mask[..., None]
        a, b = sides.permute(0, 3, 1, 2).chunk(2, 1)  # (B, H, N, N)
        y = (a @ b.mT if direction == "outgoing" else a.mT @ b).permute(0, 2, 3, 1)
        return linear(norm(y, p["out_norm"]), kernels["p_out"]) * linear(z, kernels["g_out"]).sigmoid()

    def heads(y: Any, p: Any) -> list[Any]:
        """Queries, keys, values (..., H, N, D) and gates (..., N, H * D)."""
        kernel = p["projections"]["kernel"]
        *qkv, gate = linear(y, kernel).unflatten(-1, kernel.shape[1:]).unbind(-3)
        return [*(x.transpose(-2, -3) for x in qkv), gate.flatten(-2)]

    def finish(out: Any, gate: Any, p: Any) -> Any:
        return linear(out.transpose(-2, -3).flatten(-2) * gate.sigmoid(), p["out"]["kernel"])

    def attention(p: Any, z: Any, mask: Any) -> Any:
        """Of the starting node."""
        y = norm(z, p["norm"])
        bias = linear(y, p["pair_bias"]["kernel"]).permute(0, 3, 1, 2)[:, None]
        q, k, v, gate = heads(y, p)
        keep = mask[:, :, None, None]
        if fused:
            out = triangle_attention(q, k, v, bias, mask=keep)
        else:
            # Of four axes: torch.compile takes more for another pattern, and fails.
            q, k, v, scores = (x.flatten(0, 1) for x in (q, k, v, bias.masked_fill(~keep, -1e9)))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=scores).unflatten(0, z.shape[:2])
        return finish(out, gate, p)

    def transition(p: Any, x: Any) -> Any:
        gate, up = linear(norm(x, p["norm"]), p["gate_up"]["kernel"]).chunk(2, -1)
        return linear(F.silu(gate) * up, p["down"]["kernel"])

    def single_attention(p: Any, s: Any, z: Any, mask: Any) -> Any:
        bias = linear(norm(z, p["pair_norm"]), p["pair_bias"]["kernel"]).permute(0, 3, 1, 2)
        q, k, v, gate = heads(norm(s, p["norm"]), p)
        q = q + p["projections"]["query_bias"][:, None]
        keep = mask[:, None, None]
        return finish(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~keep, -1e9)), gate, p)

    def run(p: Any, z: Any, s: Any, pair_mask: Any, single_mask: Any) -> tuple[Any, Any]:
        z = z + update(p["tri_mul_out"], z, pair_mask, "outgoing")
        z = z + update(p["tri_mul_in"], z, pair_mask, "incoming")
        z = z + attention(p["tri_att_start"], z, pair_mask)
        z = z + attention(p["tri_att_end"], z.transpose(1, 2), pair_mask.mT).transpose(1, 2)
        z = z + transition(p["pair_transition"], z)
        s = s + single_attention(p["single_attention"], s, z, single_mask)
        return z, s + transition(p["single_transition"], s)

    return run
