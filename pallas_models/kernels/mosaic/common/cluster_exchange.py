"""Activations of up to 16 tokens in a cluster of CTAs: how they are multiplied, sent, added up and normalised.

Features are rows. Each CTA has all activations, `x_t`, and computes a part of the sums of all features. It sends
the parts to the CTAs that own these features, a block of 32 each. Each CTA adds up the parts of its block, sends
the sums to all others, and normalises everything itself. In all of this a warpgroup has half of the tokens.

The instructions of a GPU for it are in `cluster_memory_ptx.py` and `cluster_exchange_ptx.py`. The interpreter runs
the meaning of each primitive, which is beside it. It has the CTAs of a cluster too, but they cannot reach one
another's shared memory: they send by way of device memory, and barriers of the cluster count what has been sent.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import cluster_exchange_ptx as sending
from pallas_models.kernels.mosaic.common import cluster_memory_ptx as memory
from pallas_models.kernels.mosaic.common import ptx
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_exchange_ptx import (
    BARRIER_BYTES,
    BLOCK_BYTES,
    FEATURES,
    HALF,
    HALF_BYTES,
    ROW_BYTES,
    TOKENS,
)
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import tiled

WIDTH = 32  # of rows in shared memory, more than there are tokens
BLOCK = 64  # rows of weights in a slot of the ring
COLUMNS = 128  # of weights in a slot, half of them for each warpgroup
PARTS = COLUMNS // WIDTH  # tiles of a slot, side by side
STAGES = 8  # of the ring
CONSUMERS = 2  # warpgroups that compute
SUMS = (BLOCK, TOKENS)  # of a warpgroup: as many columns of weights, by tokens


# The barriers of a GPU that copies arrive at, and how many threads do: for slots of the ring, for vectors of half
# a layer, for the parts of sums that other CTAs send, and for their sums, a barrier for each warpgroup.
ARRIVALS = dict(full=[1] * STAGES, vectors_full=[1, 1], arrived=[CONSUMERS, *[1] * CONSUMERS])


class Piece(NamedTuple):
    """A piece of a vector of a layer: `size` numbers from `begin` on, for the place `offset` in shared memory."""

    name: str
    begin: jax.Array | int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of a call.

    Attributes:
      ctas: of the cluster, one for each head.
      tokens: of all sequences.
      layers: how many there are.
      dtype: of activations and weights.
    """

    ctas: int
    tokens: int
    layers: int
    dtype: jnp.dtype

    @property
    def n(self) -> int:
        """Features."""
        return FEATURES * self.ctas

    @property
    def steps(self) -> int:
        """Slots of weights that all features are multiplied by."""
        return self.n // BLOCK

    @property
    def blocks(self) -> int:
        """Slots with columns for all features."""
        return self.n // COLUMNS

    @property
    def vectors(self) -> tuple[int, ...]:
        """Lengths of the four vectors of half a layer, as far as a CTA needs them."""
        return COLUMNS, FEATURES, self.n, self.n

    @property
    def places(self) -> tuple[int, ...]:
        """Where these vectors begin."""
        return tuple(itertools.accumulate(self.vectors[:-1], initial=0))

    def scratch_types(self, interpret: bool) -> dict[str, Any]:
        """Shared memory and barriers of a CTA; on a GPU barriers that copies arrive at are 64 bits each."""
        shared = dict(
            slots=tiled((STAGES, PARTS, BLOCK, WIDTH), self.dtype, ROW_BYTES),
            x_t=tiled((self.n, WIDTH), self.dtype, ROW_BYTES),
            h_t=tiled((COLUMNS, WIDTH), self.dtype, ROW_BYTES),
            qkv_t=tiled((COLUMNS, BLOCK), self.dtype, ROW_BYTES),  # and after attention what is to be sent
            y=tiled((BLOCK, FEATURES), self.dtype, ROW_BYTES),
            parts=plgpu.SMEM((self.ctas, 2, FEATURES, HALF), self.dtype),
            vectors=plgpu.SMEM((2, 1, sum(self.vectors)), jnp.float32),
            consumed=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            vectors_consumed=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            taken=plgpu.SMEM((WIDTH,), jnp.int32),
            own=plgpu.SMEM((2, FEATURES, HALF), self.dtype),
            rows=plgpu.SMEM((self.ctas, 2, FEATURES, HALF), self.dtype),
        )
        if not interpret:
            return shared | {name: plgpu.SMEM((len(a), 2), jnp.int32) for name, a in ARRIVALS.items()}
        cluster = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",))
        del shared["parts"], shared["rows"]
        return shared | dict(
            full=plgpu.Barrier(num_barriers=STAGES),
            vectors_full=plgpu.Barrier(num_barriers=2),
            met=plgpu.Barrier(num_arrivals=CONSUMERS),
            summed=cluster(num_arrivals=CONSUMERS * self.blocks),
            normed=cluster(num_barriers=CONSUMERS),
        )

    def mail_types(self, interpret: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Device memory by way of which the interpreter's CTAs send: results that nobody reads."""
        rows = self.ctas, 2, FEATURES, HALF
        shapes = dict(parts=(self.ctas, *rows), rows=rows) if interpret else {}
        return {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}


def _call(
    inline: Callable[..., Any], *numbers: Any, given: Sequence[tuple[Any, Any]] = (), result: Any = None
) -> Any:
    """The result of `inline` for references and arrays, `given` with their types, and for numbers."""

    def emit(context: Any, *operands: Any) -> Any:
        values = [x.registers.item() for x in operands[len(given) :]]
        return inline(context, *operands[: len(given)], *values)

    kinds, arrays = zip(*given, strict=True) if given else ((), ())
    kinds += (plgpu.Layout.WG_SPLAT,) * len(numbers)
    return plgpu.inline_mgpu(arg_types=kinds, return_type=result)(emit)(*arrays, *numbers)


def _plain() -> Any:
    return plgpu.RefType()


def _swizzled() -> Any:
    return plgpu.RefType((plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(ROW_BYTES)))


def _with(value: jax.Array) -> tuple[Any, jax.Array]:
    return plgpu.Layout.WGMMA, value


class Cluster:
    """A CTA of a cluster as one of its warpgroups sees it: shared memory, and primitives.

    Attributes:
      at: where each array of shared memory begins, in bytes, on a GPU.
    """

    def __init__(self, sizes: Sizes, refs: Refs) -> None:
        self.sizes, self.refs = sizes, refs
        self.warpgroup = jax.lax.axis_index("warpgroup")
        self.at = self.start()

    @property
    def rank(self) -> jax.Array:
        """The number of this CTA: of its head, and of the block of features that it owns."""
        return jax.lax.axis_index("rank")

    def of_layers(self, name: str) -> list[Ref]:
        """The arrays of that name in device memory, of all layers."""
        return [getattr(self.refs, f"{name}_{i}") for i in range(self.sizes.layers)]

    def _nowhere(self) -> Any:
        return types.SimpleNamespace()

    @meaning(_nowhere)
    def start(self) -> Any:
        """Makes barriers, and finds the places in shared memory; all threads of the cluster meet."""
        swizzled = ("slots", "x_t", "h_t", "qkv_t")
        plain = (*ARRIVALS, "vectors", "taken", "parts", "own", "rows")
        given = [
            (kind, getattr(self.refs, name))
            for kind, names in ((_plain(), plain), (_swizzled(), swizzled))
            for name in names
        ]
        kinds = [plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)] * len(given)
        found = _call(sending.start(ARRIVALS.values()), given=given, result=kinds)
        return types.SimpleNamespace(**dict(zip((*plain, *swizzled), found, strict=True)))

    @meaning(lambda self: None)
    def end(self) -> None:
        """A CTA stays while others copy from it: all threads of the cluster meet."""
        _call(lambda _: ptx.meet())

    def _meet_by_barrier(self) -> None:
        plgpu.barrier_arrive(self.refs.met)
        plgpu.barrier_wait(self.refs.met)

    @meaning(_meet_by_barrier)
    def meet(self) -> None:
        """Both warpgroups that compute wait for one another; copies and tensor cores then see their stores."""
        _call(memory.meet(CONSUMERS))

    def _copy_tiles(
        self,
        name: str,
        layer: jax.Array,
        slot: jax.Array,
        row: jax.Array,
        column: jax.Array,
        *,
        height: int,
        parts: int,
        apart: int,
    ) -> None:
        for i, w in enumerate(self.of_layers(name)):

            @pl.when(layer == i)
            def _(w: Ref = w) -> None:
                for part in range(parts):
                    there = self.refs.slots.at[slot, part, pl.ds(0, height)]
                    there[...] = w[pl.ds(row, height), pl.ds(column + part * apart, WIDTH)]

        plgpu.barrier_arrive(self.refs.full.at[slot])

    @meaning(_copy_tiles)
    def fetch_tiles(
        self,
        name: str,
        layer: jax.Array,
        slot: jax.Array,
        row: jax.Array,
        column: jax.Array,
        *,
        height: int,
        parts: int,
        apart: int,
    ) -> None:
        """Copies tiles (height, 32) of a matrix of a layer to a slot of the ring; the rest of the slot stays.

        Args:
          row: of all tiles.
          column: of the first tile.
          parts: how many tiles.
          apart: columns from one tile to the next.
        """
        inline = memory.fetch_tiles((height, WIDTH), parts, apart, BLOCK * ROW_BYTES)
        there = self.at.slots + slot * (PARTS * BLOCK * ROW_BYTES)
        barrier = self.at.full + slot * BARRIER_BYTES
        given = [(_plain(), w) for w in self.of_layers(name)]
        _call(inline, there, barrier, layer, row, column, given=given)

    def _copy_vectors(self, half: int, layer: jax.Array, pieces: Sequence[Piece]) -> None:
        for i in range(self.sizes.layers):

            @pl.when(layer == i)
            def _(i: int = i) -> None:
                for name, begin, offset, size in pieces:
                    there = self.refs.vectors.at[half, 0, pl.ds(offset, size)]
                    there[...] = self.of_layers(name)[i][pl.ds(begin, size)]

        plgpu.barrier_arrive(self.refs.vectors_full.at[half])

    @meaning(_copy_vectors)
    def fetch_vectors(self, half: int, layer: jax.Array, pieces: Sequence[Piece]) -> None:
        """Copies pieces of vectors of a layer, for half of it."""
        names, begins, offsets, lengths = zip(*pieces, strict=True)
        known = list(dict.fromkeys(names))
        which = [known.index(name) for name in names]
        inline = memory.fetch_vectors(self.sizes.layers, which, offsets, lengths)
        given = [(_plain(), v) for name in known for v in self.of_layers(name)]
        barrier, there = self.at.vectors_full + half * BARRIER_BYTES, self.vectors_of(half)
        _call(inline, there, barrier, layer, *begins, given=given)

    def vectors_of(self, half: jax.Array | int) -> jax.Array:
        """Where the vectors of half a layer begin."""
        place: jax.Array = self.at.vectors + half * (4 * sum(self.sizes.vectors))
        return place

    @meaning(lambda self, half, layer: plgpu.barrier_wait(self.refs.vectors_full.at[half]))
    def wait_vectors(self, half: jax.Array, layer: jax.Array) -> None:
        """Waits for the vectors of half a layer."""
        _call(sending.wait_for, self.at.vectors_full + half * BARRIER_BYTES, jax.lax.rem(layer, 2))

    def _copy_tokens(self) -> None:
        refs, tokens = self.refs, self.sizes.tokens
        x_t, first = jnp.pad(refs.x[...].T, ((0, 0), (0, TOKENS - tokens))), self.warpgroup * HALF
        own = jax.lax.dynamic_slice_in_dim(x_t, first, HALF, 1)
        refs.x_t.at[:, pl.ds(first, HALF)][...] = own
        refs.x_t.at[:, pl.ds(TOKENS + first, HALF)][...] = jnp.zeros_like(own)
        refs.taken[...] = jnp.pad(refs.mask[...], (0, WIDTH - tokens))

    @meaning(_copy_tokens)
    def fetch_tokens(self) -> None:
        """Copies x into `x_t`, this warpgroup's half of the tokens, and the mask; beside both there are zeros."""
        sizes, refs = self.sizes, self.refs
        _call(memory.fetch(sizes.tokens, sizes.n), self.at.x_t, self.warpgroup, given=[(_plain(), refs.x)])
        _call(memory.fetch_mask(sizes.tokens), self.at.taken, given=[(_plain(), refs.mask)])

    def _store_tokens(self, rank: jax.Array) -> None:
        block = pl.ds(rank * FEATURES, FEATURES)
        for token in range(self.sizes.tokens):

            @pl.when(self.warpgroup == token // HALF)
            def _(token: int = token) -> None:
                self.refs.o.at[token, block][...] = self.refs.x_t[block, token]

    @meaning(_store_tokens)
    def give(self, rank: jax.Array) -> None:
        """Copies this CTA's block of features to the result, this warpgroup's half of the tokens."""
        sizes = self.sizes
        given = [(_plain(), self.refs.o)]
        _call(memory.give(sizes.tokens, sizes.n), self.at.x_t, rank, self.warpgroup, given=given)

    def _multiply(self, sums: jax.Array, first: jax.Array, depth: int, right: Ref, height: int) -> jax.Array:
        there = (right[...].T if height < BLOCK else right[...])[:, :TOKENS]
        for i in range(depth):
            slot = jax.lax.rem(first + i, STAGES)
            plgpu.barrier_wait(self.refs.full.at[slot])
            parts = (self.refs.slots[slot, 2 * self.warpgroup + j, :height] for j in range(2))
            left = jnp.concatenate([part.T for part in parts])
            rows = there[i * height : (i + 1) * height]
            sums += jnp.dot(left, rows, preferred_element_type=jnp.float32)
        return sums

    @meaning(_multiply)
    def multiply(self, sums: jax.Array, first: jax.Array, depth: int, right: Ref, height: int) -> jax.Array:
        """Waits for slots of the ring, and adds this warpgroup's columns of them, transposed, by `right`.

        Args:
          sums: (64, 16).
          first: the step of the ring of the first slot.
          depth: how many slots.
          right: features by tokens, or tokens by features where slots have fewer than 64 rows.
          height: rows of a slot.
        """
        layout = plgpu.Layout.WGMMA
        result = plgpu.ShapeDtypeStruct(SUMS, jnp.float32, layout=layout)
        inline = memory.multiply(height < BLOCK, height, depth)
        given = [(_swizzled(), right), (_swizzled(), self.refs.slots), _with(sums)]
        product: jax.Array = _call(inline, self.at.full, 2 * self.warpgroup, first, given=given, result=result)
        return product

    def _store(self, name: str, values: jax.Array) -> None:
        there = getattr(self.refs, name).at[pl.ds(self.warpgroup * BLOCK, BLOCK), pl.ds(0, 2 * TOKENS)]
        there[...] = jnp.pad(values.astype(self.sizes.dtype), ((0, 0), (0, TOKENS)))

    @meaning(_store)
    def store(self, name: str, values: jax.Array) -> None:
        """Stores values (64, 16), this warpgroup's half of the rows of `name`, and zeros beside them."""
        columns = getattr(self.refs, name).shape[1]
        inline = memory.put(columns, self.sizes.dtype)
        _call(inline, getattr(self.at, name), self.warpgroup * BLOCK, given=[_with(values)])

    def _post(self, values: jax.Array, block: jax.Array, rank: jax.Array) -> None:
        for j, half in itertools.product(range(2), range(2)):
            rows, columns = slice(j * FEATURES, (j + 1) * FEATURES), slice(half * HALF, (half + 1) * HALF)
            self.refs.parts[block + j, rank, half] = values[rows, columns].astype(self.sizes.dtype)
        plgpu.barrier_arrive(self.refs.summed)

    @meaning(_post)
    def send_share(self, values: jax.Array, block: jax.Array, rank: jax.Array) -> None:
        """Sends values (64, 16), which this CTA adds to two blocks of features, to the CTAs that own these."""
        there = self.at.parts + rank * BLOCK_BYTES
        inline = sending.send_share(self.sizes.dtype)
        _call(inline, self.at.qkv_t, there, self.at.arrived, block, rank, given=[_with(values)])

    def exchange(self, half: jax.Array, epsilon: float) -> None:
        """Adds up what CTAs have sent, with bias and residual, sends the sums, and normalises all into `x_t`.

        Args:
          half: of a layer. It is 0 in the first exchange, 1 in the next, and so on in turn: barriers count by it.
        """
        round_ = Round(self, half)
        self.meet()
        round_.expect()
        round_.add_up()
        plgpu.commit_smem()
        round_.send()
        round_.normalise(epsilon)
        self.meet()


class Round:
    """An exchange of half a layer: each CTA adds up its own block of features, and normalises all of them.

    Attributes:
      at: where the vectors and barriers of the round and this warpgroup's half of the tokens are.
    """

    def __init__(self, cluster: Cluster, half: jax.Array) -> None:
        self.cluster, self.sizes, self.refs = cluster, cluster.sizes, cluster.refs
        self.half, self.warpgroup = half, cluster.warpgroup
        self.at = self.find()
        self.rank: jax.Array = self.at.rank

    def _only_rank(self) -> Any:
        return types.SimpleNamespace(rank=self.cluster.rank)

    @meaning(_only_rank)
    def find(self) -> Any:
        """Finds the places of the round in shared memory."""
        at = self.cluster.at
        bias, scale, offset = (self.cluster.vectors_of(self.half) + 4 * place for place in self.sizes.places[1:])
        return types.SimpleNamespace(
            bias=bias,
            scale=scale,
            offset=offset,
            rank=self.cluster.rank,
            tokens=self.warpgroup * HALF_BYTES,
            summed=at.arrived,
            normed=at.arrived + (1 + self.warpgroup) * BARRIER_BYTES,
        )

    @meaning(lambda self: None)  # its barriers count what is sent, not bytes
    def expect(self) -> None:
        """Says how many bytes will arrive: parts of this CTA's sums, and the sums of others."""
        for barrier in (self.at.summed, self.at.normed):
            _call(sending.expect(self.sizes.ctas), barrier)

    def _vector(self, which: int, size: int) -> jax.Array:
        vector: jax.Array = self.refs.vectors[self.half, 0, pl.ds(self.sizes.places[which], size)]
        return vector.reshape(size, 1)

    def _own_tokens(self) -> Any:
        return pl.ds(self.warpgroup * HALF, HALF)

    def _add_up(self) -> None:
        refs, own = self.refs, pl.ds(self.rank * FEATURES, FEATURES)
        plgpu.barrier_wait(refs.summed)
        total = refs.parts[self.rank, :, self.warpgroup].astype(jnp.float32).sum(axis=0)
        total += self._vector(1, FEATURES) + refs.x_t[own, self._own_tokens()].astype(jnp.float32)
        refs.own[self.warpgroup] = total.astype(self.sizes.dtype)

    @meaning(_add_up)
    def add_up(self) -> None:
        """Waits for the parts of this CTA's sums, and adds them up, the bias and the residual."""
        at, sizes = self.cluster.at, self.sizes
        where = self.rank, self.warpgroup, self.half
        inline = sending.sum_up(sizes.ctas, sizes.dtype)
        _call(inline, at.parts, at.qkv_t, at.x_t, self.at.bias, at.own, self.at.summed, *where)

    def _post(self) -> None:
        self.refs.rows[self.rank, self.warpgroup] = self.refs.own[self.warpgroup]
        plgpu.barrier_arrive(self.refs.normed.at[self.warpgroup])

    @meaning(_post)
    def send(self) -> None:
        """Sends this CTA's sums to all others."""
        at, tokens = self.cluster.at, self.at.tokens
        own, there = at.own + tokens, at.rows + self.rank * BLOCK_BYTES + tokens
        _call(sending.send_rows(self.sizes.ctas), own, there, self.at.normed, self.rank)

    def _normalise(self, epsilon: float) -> None:
        refs, n = self.refs, self.sizes.n
        plgpu.barrier_wait(refs.normed.at[self.warpgroup])
        y = refs.rows[:, self.warpgroup].astype(jnp.float32).reshape(n, HALF)
        y -= jnp.mean(y, axis=0, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=0, keepdims=True) + epsilon)
        y = y * self._vector(2, n) + self._vector(3, n)
        refs.x_t.at[:, self._own_tokens()][...] = y.astype(self.sizes.dtype)

    @meaning(_normalise)
    def normalise(self, epsilon: float) -> None:
        """Waits for the sums of all CTAs, and normalises them into `x_t`."""
        at, sizes = self.cluster.at, self.sizes
        where = self.rank, self.warpgroup, self.half
        inline = sending.normalise(sizes.ctas, epsilon, sizes.dtype)
        _call(inline, at.rows, at.own, self.at.scale, self.at.offset, at.x_t, self.at.normed, *where)
