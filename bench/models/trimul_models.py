"""The triangle multiplicative update as users of torch and of JAX run it today, from the same tensors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models.trimul import Params

State = dict[str, np.ndarray]  # tensors by the names of torch, linear weights (out, in)


def random_state(channels: int, hidden: int, *, gate_after: bool, seed: int = 0) -> State:
    """Random weights, by the names of the competition's module or, with the gate after, of Boltz's."""
    rng = np.random.default_rng(seed)
    widths = {"left_proj": hidden, "right_proj": hidden, "left_gate": hidden, "right_gate": hidden}
    widths |= {"out_gate": hidden}
    norms, out = {"norm": channels, "to_out_norm": hidden}, "to_out"
    if gate_after:
        widths = {"p_in": 2 * hidden, "g_in": 2 * hidden, "g_out": channels}
        norms, out = {"norm_in": channels, "norm_out": hidden}, "p_out"
    shapes = {name: (width, channels) for name, width in widths.items()} | {out: (channels, hidden)}
    state = {f"{name}.weight": rng.normal(0, shape[0] ** -0.5, shape) for name, shape in shapes.items()}
    state |= {f"{name}.{leaf}": rng.normal(size=n) for name, n in norms.items() for leaf in ("weight", "bias")}
    return {name: tensor.astype(np.float32) for name, tensor in state.items()}


def torch_module(state: State, *, gate_after: bool, device: str, precision: str) -> Callable[..., Any]:
    """The competition's reference or, with the gate after, Boltz's module; it computes in float32 whatever x is.

    With `precision` "high" the products are TF32, with "highest" true float32.
    """
    import torch
    from torch.nn import functional

    t = {name: torch.from_numpy(tensor).to(device) for name, tensor in state.items()}

    def norm(x: Any, name: str) -> Any:
        scale, bias = t[f"{name}.weight"], t[f"{name}.bias"]
        return functional.layer_norm(x, scale.shape, scale, bias)

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, t[f"{name}.weight"])

    def competition(x: Any, mask: Any) -> Any:
        x = norm(x, "norm")
        left, right = linear(x, "left_proj") * mask[..., None], linear(x, "right_proj") * mask[..., None]
        left, right = left * linear(x, "left_gate").sigmoid(), right * linear(x, "right_gate").sigmoid()
        out = norm(torch.einsum("...ikd,...jkd->...ijd", left, right), "to_out_norm")
        return linear(out * linear(x, "out_gate").sigmoid(), "to_out")

    def boltz(x: Any, mask: Any) -> Any:
        x = norm(x, "norm_in")
        left, right = (linear(x, "p_in") * linear(x, "g_in").sigmoid() * mask[..., None]).chunk(2, -1)
        out = norm(torch.einsum("...ikd,...jkd->...ijd", left, right), "norm_out")
        return linear(out, "p_out") * linear(x, "g_out").sigmoid()

    def update(x: Any, mask: Any) -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        out = (boltz if gate_after else competition)(x.float(), mask).to(x.dtype)
        torch.set_float32_matmul_precision(before)
        return out

    return update


def torch_fused(state: State, *, masked: bool, device: str) -> Callable[..., Any]:
    """An optimised PyTorch program published for the competition: float16, fused weights, a batched product.

    Two things differ from the published program. It asks the device whether anything is masked, which no CUDA
    graph can capture; here `masked` says it. And it masks left only, which gives another result; here right is
    masked too.
    """
    import torch
    from torch.nn import functional

    t = {name: torch.from_numpy(tensor).to(device) for name, tensor in state.items()}
    names = ("left_proj", "right_proj", "left_gate", "right_gate", "out_gate")
    fused = torch.cat([t[f"{name}.weight"] for name in names]).half()
    w_out = t["to_out.weight"].t().half()
    hidden, channels = w_out.shape

    def update(x: Any, mask: Any) -> Any:
        b, n = x.shape[:2]
        y = functional.layer_norm(x.float(), (channels,), t["norm.weight"], t["norm.bias"])
        p = torch.matmul(fused, y.view(-1, channels).t().half()).view(5, hidden, -1)
        left, right = torch.sigmoid(p[2]) * p[0], torch.sigmoid(p[3]) * p[1]
        if masked:
            left, right = left * mask.view(1, -1).half(), right * mask.view(1, -1).half()
        gate = torch.sigmoid(p[4]).view(hidden, b, n, n).permute(1, 2, 3, 0)
        left, right = (
            half.view(hidden, b, n, n).transpose(0, 1).contiguous().view(-1, n, n) for half in (left, right)
        )
        product = torch.bmm(left, right.transpose(1, 2)).view(b, hidden, n, n).permute(0, 2, 3, 1).contiguous()
        y = functional.layer_norm(product.float(), (hidden,), t["to_out_norm.weight"], t["to_out_norm.bias"])
        out = torch.matmul((y * gate.float()).half().view(-1, hidden), w_out)
        return out.to(x.dtype).view(b, n, n, channels)

    return update


def plain_jax(params: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    """The update as a user of jax.numpy writes it, with everything but the norms in the dtype of the matrices."""
    dtype = params["out"]["kernel"].dtype

    def norm(x: jax.Array, p: Params) -> jax.Array:
        y = x.astype(jnp.float32)
        y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
        return (y * p["scale"] + p["bias"]).astype(dtype)

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ params[name]["kernel"]

    z = norm(x, params["norm"])
    left, left_gate, right, right_gate = jnp.split(linear(z, "projections"), 4, axis=-1)
    left = left * jax.nn.sigmoid(left_gate) * mask[..., None].astype(dtype)
    right = right * jax.nn.sigmoid(right_gate) * mask[..., None].astype(dtype)
    y = norm(jnp.einsum("bikh,bjkh->bijh", left, right), params["out_norm"])
    if "gate_after" in params:
        out = linear(y, "out") * jax.nn.sigmoid(linear(z, "gate_after"))
    else:
        out = linear(y * jax.nn.sigmoid(linear(z, "gate_before")), "out")
    return out.astype(x.dtype)


def cuequivariance(dtype: DTypeLike) -> Callable[..., Any]:
    """cuEquivariance's kernels for JAX, which have the gate after, computing in `dtype`."""
    import cuequivariance_ops_jax  # noqa: F401 (without its kernels it would run plain JAX)
    from cuequivariance_jax import triangle_multiplicative_update

    def update(state: dict[str, jax.Array], x: jax.Array, mask: jax.Array) -> jax.Array:
        weights = {name.replace(".", "_"): tensor.astype(dtype) for name, tensor in state.items()}
        out = triangle_multiplicative_update(x.astype(dtype), mask=mask, fallback=False, **weights)
        return out.astype(x.dtype)

    return update
