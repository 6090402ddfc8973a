"""The order in which programs take the tiles of a product."""

from typing import Protocol

import jax
import jax.numpy as jnp


class Blocks(Protocol):
    """The tiles of a product, which a config of either backend has."""

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...

    @property
    def block_k(self) -> int: ...


def check_divides(config: Blocks, n: int, pieces: tuple[int, int]) -> None:
    """Raises ValueError unless the tiles of a product divide the pieces of its matrices (n, n)."""
    blocks = config.block_m, config.block_n, config.block_k
    if pieces != (1, 1) and any(n // count % block for count in pieces for block in blocks):
        raise ValueError(
            f"{config} has tiles that do not divide {n // pieces[0]} rows and {n // pieces[1]} columns"
        )


def tile_order(pid: jax.Array, tiles_m: int, tiles_n: int, group_m: int) -> tuple[jax.Array, jax.Array]:
    """Row and column block of program `pid`: column by column within groups of `group_m` row blocks."""
    div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers
    if tiles_m <= group_m:
        return rem(pid, tiles_m), div(pid, tiles_m)
    group, within = div(pid, group_m * tiles_n), rem(pid, group_m * tiles_n)
    i, j = rem(within, group_m), div(within, group_m)
    if height := tiles_m % group_m:  # of the last group: dividing by constants is much cheaper than by a height
        is_last = group == tiles_m // group_m
        i, j = jnp.where(is_last, rem(within, height), i), jnp.where(is_last, div(within, height), j)
    return group * group_m + i, j
