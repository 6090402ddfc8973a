"""Blocks of `ops.rotary`, which the benchmark of Qwen3 measures."""

import jax.numpy as jnp

from bench.measuring import tunable
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops


def tuned(dtype: str, b: int, s: int, h: int, g: int) -> Call:
    """Heads of 128, as Qwen3 and most others have."""
    d = 128
    qkv, q_scale, k_scale = tunable.operands(dtype, (b, s, (h + 2 * g) * d), (d,), (d,))
    options = {"num_heads": h, "num_kv_heads": g, "q_scale": q_scale, "k_scale": k_scale}
    return ops.rotary, (qkv, *ops.rotary_table(jnp.arange(s), d)), options


TUNABLES = {
    "rotary": Tunable(axes="BxSxHxG", shapes=((1, 4096, 32, 8), (8, 2048, 32, 8)), call=tuned, nearby=(1, 0.75)),
}
