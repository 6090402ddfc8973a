"""Sums and maxima of the columns of a CTA's rows, which its threads then hold."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import memory, rows_ptx
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.row_config import WARPGROUP
from pallas_models.kernels.mosaic.common.rows import Blocks, Kind


def columns_of(blocks: Blocks) -> Blocks:
    """Blocks of one row for each CTA: a number for each column that it holds, in all its threads."""
    return Blocks(
        m=blocks.num_ctas,
        n=blocks.row_warpgroups * blocks.shape[1],
        threads=blocks.warpgroups * WARPGROUP,
        vector=1,
        rows=1,
        columns=pl.cdiv(blocks.row_warpgroups * blocks.shape[1], blocks.warpgroups * WARPGROUP),
        warpgroups=blocks.warpgroups,
        keep=False,
    )


def scratch_types(blocks: Blocks, arrays: int, interpret: bool) -> dict[str, Any]:
    """Shared memory for `reduce_rows` of so many arrays."""
    parts = blocks.groups if interpret else blocks.row_groups
    columns = plgpu.SMEM((arrays * parts, columns_of(blocks).n), jnp.float32)
    return dict(columns=columns) | memory.meeting(blocks.warpgroups, interpret)


def _interpreted_reduce_rows(
    blocks: Blocks, refs: Refs, kinds: Sequence[Kind], *arrays: jax.Array
) -> list[jax.Array]:
    """In the order of a GPU: the rows of a warpgroup, and then the warpgroups."""
    warpgroup, groups, (_, width) = jax.lax.axis_index("warpgroup"), blocks.groups, blocks.shape
    group, piece = jax.lax.div(warpgroup, blocks.row_warpgroups), jax.lax.rem(warpgroup, blocks.row_warpgroups)
    reductions = [jnp.sum if kind == "add" else jnp.max for kind in kinds]
    memory.meet(refs)
    for k, (reduce, x) in enumerate(zip(reductions, arrays, strict=True)):
        refs.columns[k * groups + group, pl.ds(piece * width, width)] = reduce(x, axis=0)
    memory.meet(refs)
    found, (_, own) = [], columns_of(blocks).shape
    for k, reduce in enumerate(reductions):
        total = reduce(refs.columns[pl.ds(k * groups, groups)], axis=0)
        total = jnp.pad(total, (0, own * blocks.warpgroups - total.size))
        found.append(jax.lax.dynamic_slice_in_dim(total, warpgroup * own, own).reshape(1, own))
    return found


@meaning(_interpreted_reduce_rows)
def reduce_rows(blocks: Blocks, refs: Refs, kinds: Sequence[Kind], *arrays: jax.Array) -> list[jax.Array]:
    """The sum or the maximum of every column, over all rows of a CTA, as blocks `columns_of`; 0 past the end.

    Args:
      kinds: what is asked of each array.
      arrays: blocks, float32: rows, or sums or maxima of rows.
    """
    columns = columns_of(blocks)
    result = plgpu.ShapeDtypeStruct(columns.shape, jnp.float32, layout=columns.layout)
    types = plgpu.RefType(), *[blocks.layout] * len(arrays)
    reduce = plgpu.inline_mgpu(arg_types=types, return_type=[result] * len(arrays))
    emit = functools.partial(rows_ptx.reduce_rows, blocks, columns, kinds)
    found: list[jax.Array] = reduce(emit)(refs.columns, *arrays)
    return found
