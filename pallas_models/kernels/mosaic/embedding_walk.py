"""How CTAs walk the tokens of an embedding and its gradient, and what a thread has of each.

What all tokens of a thread share, it loads once: the one type if there are no others and, where CTAs meet the same
position in every sentence, its row. Of each token that leaves a word, whose id is loaded a step before it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.row_config import WARP, WARPGROUP
from pallas_models.kernels.mosaic.common.row_walk import Walk, registers
from pallas_models.kernels.mosaic.common.rows import Blocks, sum_of
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.target import Target

_MOST_THREADS = 512  # of a row
_OTHERS, _EXCHANGE = 22, 8  # registers of a thread for all that is not of a column; to add up with other warps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config(Walk):
    """How CTAs walk the tokens. A warpgroup loads the words of `ahead` steps while it computes the one before."""

    ahead: int = 1

    def __post_init__(self) -> None:
        super(Config, self).__post_init__()
        if self.ahead < 0:
            raise ValueError(f"{self}: ahead must not be negative")


def heuristic(m: int, seq: int, n: int, dtype: DTypeLike, columns: int, column: float, target: Target) -> Config:
    """Chooses up to so many columns a thread, and a CTA of as many threads as a multiprocessor has registers for.

    The size of a CTA is what tells ptxas how many registers a thread may have. Few tokens have
    small CTAs, very few a warp each.

    Args:
      columns: of a row that a thread is given.
      column: registers for each column of a row that a thread has.
    """
    most = min(pl.next_power_of_2(pl.cdiv(n, vector_length(n, dtype))), _MOST_THREADS)
    threads = min(pl.next_power_of_2(pl.cdiv(n, columns)), most)
    if m * WARP <= WARPGROUP * target.num_cores:
        threads = max(threads, min(WARP, most))
    needed = pl.cdiv(n, threads) * column + _OTHERS + (_EXCHANGE if threads > WARP else 0)
    least = max(threads // WARPGROUP, 1)
    sizes = [size for size in (8, 4, 2, 1) if size >= least]  # by which sentences are the likeliest to be divided
    fitting = next((size for size in sizes if needed <= registers(size)), least)
    busy = (size for size in sizes if size <= fitting and m * threads >= size * WARPGROUP * target.num_cores)
    warpgroups = next(busy, least)
    ahead = int(needed <= registers(fitting))
    return config_of(m, seq, threads, warpgroups, fitting // warpgroups, ahead, target)


def config_of(m: int, seq: int, threads: int, warpgroups: int, at_once: int, ahead: int, target: Target) -> Config:
    """A config of so many CTAs a multiprocessor, or fewer where they have no tokens.

    Also where a few fewer meet the same positions in every sentence.
    """
    config = Config(threads=threads, warpgroups=warpgroups, num_ctas=at_once * target.num_cores, ahead=ahead)
    rows = config.rows_at_once
    num_ctas, unit = min(config.num_ctas, pl.cdiv(m, rows)), seq // math.gcd(seq, rows)
    aligned = num_ctas // unit * unit
    if num_ctas * rows < m and 4 * aligned >= 3 * num_ctas:
        num_ctas = aligned
    return dataclasses.replace(config, num_ctas=num_ctas)


def configs(m: int, seq: int, n: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: 8 to 32 columns a thread, 8 to 32 warps a multiprocessor."""
    found = []
    for columns, warpgroups, at_once, ahead in itertools.product(
        (8, 16, 32), (1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 2)
    ):
        threads = pl.next_power_of_2(pl.cdiv(n, columns))
        if warpgroups % max(threads // WARPGROUP, 1) == 0 and 2 <= warpgroups * at_once <= 8:
            found.append(config_of(m, seq, threads, warpgroups, at_once, ahead, target))
    yield from dict.fromkeys(found)  # few tokens have few CTAs


def blocks_of(config: Config, rows: jax.ShapeDtypeStruct) -> Blocks:
    """The blocks of the tokens, in the widest vectors of which no thread goes without one."""
    n = rows.shape[1]
    blocks = Blocks.of(config.rows(n), rows, config.num_ctas)
    whole = (v for v in (8, 4, 2) if v <= blocks.vector and n % (config.threads * v) == 0)
    vector = next(whole, blocks.vector)
    return dataclasses.replace(blocks, vector=vector, columns=pl.cdiv(n, config.threads * vector))


def apart(blocks: Blocks) -> int:
    """Tokens from a step of a warpgroup to the next one."""
    return blocks.num_ctas * blocks.groups * blocks.shape[0]


def operands(form: Form[jax.Array]) -> dict[str, jax.Array | None]:
    """What kernels are given of a call."""
    ids = dict(ids=form.ids, types=form.token_type_ids, positions=form.position_ids)
    tables = dict(word=form.word, position=form.position, token_type=form.token_type, scale=form.scale)
    return {name: None if x is None else x.ravel().astype(jnp.int32) for name, x in ids.items()} | tables


# Which rows the step takes that is loaded next, the rows of those that are loaded, totals.
_Carry = tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]


class Tokens:
    """The tokens of a warpgroup, in steps; `compute` says what is done with the rows of one."""

    def __init__(self, refs: Refs, blocks: Blocks, config: Config, form: Form[Any]) -> None:
        self.refs, self.blocks, self.epsilon = refs, blocks, form.epsilon
        self.seq = form.ids.shape[1]
        self.first, self.column = blocks.place(), blocks.column(0)
        self.steps = pl.cdiv(blocks.m, apart(blocks))
        self.ahead = min(config.ahead, self.steps - 1)
        self.scale = self.vector(refs.scale)
        # Tables with what says which row of them a token takes: an array, or nothing for positions in order.
        self.tables: list[tuple[Ref, Ref | None]] = [(refs.word, refs.ids)]
        shared = []
        if refs.types is None:
            shared.append(self.vector(refs.token_type.at[0]))
        else:
            self.tables.append((refs.token_type, refs.types))
        if refs.positions is None and self.seq == 1:
            shared.append(self.vector(refs.position.at[0]))
        elif refs.positions is None and (self.steps == 1 or apart(blocks) % self.seq == 0):
            shared.append(self.look_up(0, refs.position, self.find(0, refs.position, None)))
        else:
            self.tables.append((refs.position, refs.positions))
        self.shared = [x.astype(jnp.float32) for x in shared]

    def vector(self, ref: Ref) -> jax.Array:
        """A vector that all rows share."""
        return self.blocks.load(ref, self.first, self.column)

    def place(self, step: jax.Array | int) -> jax.Array:
        """The block of a step, which may lie past the last one."""
        return self.first + step * (self.blocks.num_ctas * self.blocks.groups)

    def find(self, step: jax.Array | int, table: Ref, ids: Ref | None) -> jax.Array:
        """Which row of a table each token of a step takes."""
        i = self.place(step)
        index = jax.lax.rem(self.blocks.index(i), self.seq) if ids is None else self.blocks.load_numbers(ids, i)
        return jnp.clip(index, 0, table.shape[0] - 1)

    def find_all(self, step: jax.Array | int) -> list[jax.Array]:
        """`find` in each table of which tokens take rows of their own."""
        return [self.find(step, table, ids) for table, ids in self.tables]

    def look_up(self, step: jax.Array | int, table: Ref, index: jax.Array) -> jax.Array:
        return self.blocks.look_up(table, self.place(step), self.column, index)

    def read(self, step: jax.Array | int, found: list[jax.Array]) -> list[jax.Array]:
        """The rows of a step, which `find_all` found."""
        return [self.look_up(step, table, index) for (table, _), index in zip(self.tables, found, strict=True)]

    def normalise(self, rows: list[jax.Array], counts: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The normalised sums of rows, and the factor of each; both are 0 for rows that do not count."""
        blocks, n = self.blocks, self.blocks.n
        y = sum_of([*(x.astype(jnp.float32) for x in rows), *self.shared])
        mean = blocks.rounded(blocks.reduce(self.refs, 0, "add", y) * (1.0 / n))
        d = y - blocks.spread(mean)
        inside = blocks.inside(self.column)
        if inside is not None:
            d = jnp.where(inside, d, 0.0)
        # The rest is the error of the rounded mean: it counts in rows that vary less.
        rest, squares = (x * (1.0 / n) for x in blocks.reduce_all(self.refs, 1, "add", d, d * d))
        factor = jax.lax.rsqrt(jnp.maximum(squares - rest * rest, 0.0) + self.epsilon)
        if counts is not None:
            factor = jnp.where(counts, factor, 0.0)
        return d * blocks.spread(factor) + blocks.spread(-rest * factor), factor

    def compute(self, step: jax.Array | int, rows: list[jax.Array], totals: list[jax.Array]) -> list[jax.Array]:
        """Computes a step of the rows that `read` gave; gives the totals over steps."""
        raise NotImplementedError

    def walk(self, totals: list[jax.Array]) -> list[jax.Array]:
        """Computes all steps; gives the totals."""

        def step(k: jax.Array | int, carry: _Carry) -> _Carry:
            found, waiting, totals = carry
            if not self.ahead:
                return [], [], self.compute(k, self.read(k, self.find_all(k)), totals)
            waiting = [*waiting, self.read(k + self.ahead, found)]
            found = self.find_all(k + self.ahead + 1)
            return found, waiting[1:], self.compute(k, waiting[0], totals)

        carry: _Carry = [], [], totals
        if self.ahead:
            *first, found = (self.find_all(k) for k in range(self.ahead + 1))
            carry = found, [self.read(k, rows) for k, rows in enumerate(first)], totals
        carry = step(0, carry) if self.steps == 1 else jax.lax.fori_loop(0, self.steps, step, carry)
        return carry[-1]
