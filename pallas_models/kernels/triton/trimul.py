"""Triangle multiplicative update in three kernels, with half-precision tensors between them.

`project` normalises x and writes left, right and the gate, each once; `product` sums over third positions;
`output` normalises the sums, gates and projects them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.triton import trimul_output, trimul_product, trimul_project
from pallas_models.tuning import Chooser


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configs of the three kernels, or what chooses them; None for the tables and the heuristic."""

    project: trimul_project.Config | Chooser | None = None
    product: trimul_product.Config | Chooser | None = None
    output: trimul_output.Config | Chooser | None = None


def triangle_update(
    x: jax.Array,
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w_in: jax.Array,
    b_in: jax.Array | None,
    out_norm_scale: jax.Array,
    out_norm_bias: jax.Array,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    w_out: jax.Array,
    b_out: jax.Array | None,
    *,
    direction: str,
    gate_after: bool,
    epsilon: float,
    compute_dtype: DTypeLike,
    precision: jax.lax.Precision,
    out_dtype: DTypeLike,
    config: Config | Chooser | None,
    interpret: bool,
    by_rows: bool = False,
    project: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
    product: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """The update of x (B, N, N, C); matrices of `compute_dtype`, vectors float32. See `pallas_models.ops`.

    Another backend's `project` and `product`, where given, take the place of those here. `by_rows` says that its
    product takes and gives the channels of a row (B, N, channels, N), where the one here has (B, channels, N, N).
    """
    b, n, _, c = x.shape
    lead, size = (b * n, n) if by_rows else (b, n * n)
    configs = config if isinstance(config, Config) else Config(project=config, product=config, output=config)
    project = project or functools.partial(
        trimul_project.project, precision=precision, config=configs.project, interpret=interpret
    )
    product = product or functools.partial(
        trimul_product.product, precision=precision, config=configs.product, interpret=interpret
    )
    sides, gate = project(
        x.reshape(lead, size, c),
        None if mask is None else mask.reshape(lead, size),
        norm_scale,
        norm_bias,
        w_in,
        b_in,
        w_gate,
        b_gate,
        epsilon=epsilon,
    )
    # y grows as the square root of N: scaled by a power of two near it, it stays within float16. What scales y
    # leaves its layer norm as it was once epsilon is scaled too.
    factor = 1.0 if jnp.dtype(compute_dtype) == jnp.float32 else 2.0 ** -round(math.log2(n) / 2)
    y = product(
        sides.reshape((b, n, -1, n) if by_rows else (b, -1, n, n)),
        channels=w_in.shape[2],
        incoming=direction == "incoming",
        factor=factor,
    )
    out = trimul_output.output(
        y.reshape(lead, -1, size),
        gate,
        out_norm_scale,
        out_norm_bias,
        w_out,
        b_out,
        gate_after=gate_after,
        epsilon=epsilon * factor**2,
        precision=precision,
        out_dtype=out_dtype,
        config=configs.output,
        interpret=interpret,
    )
    return out.reshape(b, n, n, c)
