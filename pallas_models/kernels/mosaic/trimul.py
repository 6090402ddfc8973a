"""Triangle multiplicative update for Hopper GPUs: its projections and its product, with Triton's last kernel."""

import functools
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic import trimul_product, trimul_project, trimul_project_wide
from pallas_models.kernels.triton import trimul as triton


def unsupported(x: jax.Array, *, compute_dtype: DTypeLike, config: Any) -> str | None:
    """Why `triangle_update` does not serve a call; None if it does."""
    if config is not None:
        return f"takes no config, not {type(config)}"
    return trimul_product.unsupported(x.shape[1], compute_dtype)


def triangle_update(x: jax.Array, *arrays: Any, interpret: bool, **options: Any) -> jax.Array:
    """As `triton.triangle_update`, for calls that `unsupported` does not refuse."""
    w_in, w_gate = arrays[3], arrays[7]
    b, n, _, c = x.shape
    rows = jax.ShapeDtypeStruct((b * n, n, c), x.dtype)
    project = None  # that of Triton
    for module in (trimul_project_wide, trimul_project):  # the second where both can
        if module.unsupported(rows, w_in, w_gate) is None:
            project = functools.partial(module.project, interpret=interpret)
    product = functools.partial(trimul_product.product, config=None, interpret=interpret)
    return triton.triangle_update(
        x,
        *arrays,
        config=None,
        interpret=interpret,
        by_rows=True,
        project=project,
        product=product,
        **options,
    )
