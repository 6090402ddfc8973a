"""What the benchmarks of decoder layers share: limits of the error, the reference, torch's choice of attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.4e-2}  # of an op, times the square root of their number
HALF_ONLY = "cuDNN attention takes fp16 and bf16"


def one_by_one(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`layer` of (x, *parameters) in float32, one sequence of x after another."""

    @jax.jit
    def reference(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        weights = [leaf.astype(jnp.float32) for leaf in leaves]
        of_one = jax.checkpoint(lambda row: layer(row[None].astype(jnp.float32), *weights)[0])
        return jax.lax.map(of_one, x)  # what all sequences keep for their gradients would not fit in memory

    return reference


def in_torch(layer: Callable[..., Any], *, cudnn: bool) -> Callable[..., Any]:
    """`layer` of torch tensors, with the attention that torch chooses or cuDNN's; with gradients if they ask."""
    import torch
    from torch.nn import attention

    def by_cudnn(*arrays: Any) -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return layer(*arrays)

    chosen = by_cudnn if cudnn else layer
    without_gradients = torch.inference_mode()(chosen)
    return lambda *arrays: (chosen if any(a.requires_grad for a in arrays) else without_gradients)(*arrays)
