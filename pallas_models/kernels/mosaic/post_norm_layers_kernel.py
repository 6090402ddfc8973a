"""The body of the kernel of `post_norm_layers`: a warpgroup that copies weights, and two that compute."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.scores import exponents, lowest_score
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_exchange import (
    BLOCK,
    COLUMNS,
    CONSUMERS,
    PARTS,
    STAGES,
    SUMS,
    WIDTH,
    Cluster,
    Piece,
    Sizes,
)
from pallas_models.kernels.mosaic.common.cluster_exchange_ptx import FEATURES
from pallas_models.kernels.mosaic.common.elementwise import elementwise, load_vector
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import iota, layout_cast
from pallas_models.kernels.mosaic.common.products import products
from pallas_models.kernels.mosaic.common.ring import Ring

# The vectors of both halves of a layer, attention and MLP. Each CTA has its part of the biases.
VECTORS = (
    ("bias_qkv", "bias_out", "scale_out", "offset_out"),
    ("bias_up", "bias_down", "scale", "offset"),
)
_SCALE = math.log2(math.e) / math.sqrt(FEATURES)  # base-2 exponentials are the GPU's own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """The body of the kernel.

    In each layer come through the ring of weights: queries, keys and values of a head, and the head's rows of the
    output projection; then a CTA's share of the hidden values, and its rows of the down projection.

    Attributes:
      seq: tokens of a sequence.
    """

    sizes: Sizes
    seq: int
    activation: Activation | None
    epsilon: float

    @property
    def head_steps(self) -> int:
        """Steps of the ring for the first half of a layer."""
        return self.sizes.steps + self.sizes.blocks

    @property
    def hidden_steps(self) -> int:
        """Steps of the ring for the second half of a layer."""
        return self.sizes.steps + 2 * self.sizes.blocks

    @property
    def layer_steps(self) -> int:
        return self.head_steps + self.hidden_steps

    def __call__(self, refs: Refs) -> None:
        cluster = Cluster(self.sizes, refs)
        ring = Ring(refs.full, refs.consumed, STAGES)
        pl.when(cluster.warpgroup == CONSUMERS)(lambda: _Producer(self, cluster, ring).run())
        pl.when(cluster.warpgroup < CONSUMERS)(lambda: _Consumer(self, cluster, ring).run())
        cluster.end()


class _Producer:
    """The warpgroup that copies weights and vectors of all layers ahead of the other two."""

    def __init__(self, kernel: Kernel, cluster: Cluster, ring: Ring) -> None:
        self.kernel, self.cluster, self.ring, self.sizes = kernel, cluster, ring, cluster.sizes

    def run(self) -> None:
        pl.loop(0, self.sizes.layers)(self.copy_layer)
        for half in range(2):
            self.free_vectors(half)
        self.ring.drain(jnp.int32(self.sizes.layers * self.kernel.layer_steps))

    def free_vectors(self, half: int) -> None:
        """Waits until the vectors of half a layer have been read."""
        plgpu.barrier_wait(self.cluster.refs.vectors_consumed.at[half])

    def copy_layer(self, i: jax.Array) -> None:
        for half, copy in enumerate((self.copy_head, self.copy_hidden)):
            pl.when(i > 0)(functools.partial(self.free_vectors, half))
            self.copy_vectors(half, i, self.cluster.rank)
            copy(i, self.cluster.rank)

    def copy_vectors(self, half: int, i: jax.Array, rank: jax.Array) -> None:
        """Copies the vectors of half of layer i, as far as this CTA needs them."""
        n = self.sizes.n
        begins: tuple[jax.Array | int, ...] = (rank * COLUMNS, rank * FEATURES, 0, 0)
        pieces = [*map(Piece, VECTORS[half], begins, self.sizes.places, self.sizes.vectors)]
        if half == 0:  # a head's biases of queries, of keys and of values
            name = VECTORS[half][0]
            pieces[:1] = [Piece(name, part * n + rank * FEATURES, part * FEATURES, FEATURES) for part in range(3)]
        self.cluster.fetch_vectors(half, i, pieces)

    def copy_head(self, i: jax.Array, rank: jax.Array) -> None:
        """Copies the weights of a head: its queries, keys and values, and its rows of the output projection."""
        steps, own, first = self.sizes.steps, rank * FEATURES, i * self.kernel.layer_steps
        self.copy("w_qkv", i, first, steps, lambda k: (k * BLOCK, own), parts=3, apart=self.sizes.n)
        self.copy("w_out", i, first + steps, self.sizes.blocks, lambda k: (own, k * COLUMNS), height=FEATURES)

    def copy_hidden(self, i: jax.Array, rank: jax.Array) -> None:
        """Copies the weights of this CTA's hidden values, and their rows of the down projection."""
        steps, own = self.sizes.steps, rank * COLUMNS
        first = i * self.kernel.layer_steps + self.kernel.head_steps
        self.copy("w_up", i, first, steps, lambda k: (k * BLOCK, own))

        def down(k: jax.Array) -> tuple[jax.Array, jax.Array]:
            return own + jax.lax.rem(k, 2) * BLOCK, jax.lax.div(k, 2) * COLUMNS

        self.copy("w_down", i, first + steps, 2 * self.sizes.blocks, down)

    def copy(
        self,
        name: str,
        i: jax.Array,
        first: jax.Array,
        steps: int,
        corner: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
        *,
        height: int = BLOCK,
        parts: int = PARTS,
        apart: int = WIDTH,
    ) -> None:
        """Copies tiles of a matrix of layer i from step `first` of the ring on; see `fetch_tiles`.

        Args:
          corner: row and column of the first tile of a step.
        """

        @pl.loop(0, steps)
        def _(k: jax.Array) -> None:
            slot, (row, column) = self.ring.acquire(first + k), corner(k)
            self.cluster.fetch_tiles(name, i, slot, row, column, height=height, parts=parts, apart=apart)


class _Consumer:
    """One of the two warpgroups that compute: it has half of the columns of weights, or half of the tokens."""

    def __init__(self, kernel: Kernel, cluster: Cluster, ring: Ring) -> None:
        self.kernel, self.cluster, self.ring, self.sizes = kernel, cluster, ring, cluster.sizes
        self.refs, self.warpgroup, self.dtype = cluster.refs, cluster.warpgroup, cluster.sizes.dtype

    def run(self) -> None:
        self.cluster.fetch_tokens()
        self.cluster.meet()
        jax.lax.fori_loop(0, 2 * self.sizes.layers, self.compute_half, None)
        self.cluster.give(self.cluster.rank)

    def compute_half(self, k: jax.Array, _: None) -> None:
        """Half a layer: attention or MLP, and residual and norm."""
        i, half = jax.lax.div(k, 2), jax.lax.rem(k, 2)
        self.cluster.wait_vectors(half, i)
        self.add(i, half, self.cluster.rank)
        self.cluster.exchange(half, self.kernel.epsilon)
        plgpu.barrier_arrive(self.refs.vectors_consumed.at[half])

    def add(self, i: jax.Array, half: jax.Array, rank: jax.Array) -> None:
        """Computes this CTA's head or hidden values, and sends its part of the sums of all features."""
        kernel, steps = self.kernel, self.sizes.steps
        first = i * kernel.layer_steps + half * kernel.head_steps
        bias = load_vector(self.refs.vectors.at[half, 0, pl.ds(self.warpgroup * BLOCK, BLOCK)], 0)
        values = elementwise(operator.add, self.product(first), rows=[bias])
        pl.when(half == 0)(lambda: self.add_head(values, rank, first + steps))
        pl.when(half == 1)(lambda: self.add_hidden(values, rank, first + steps))

    def add_head(self, values: jax.Array, rank: jax.Array, then: jax.Array) -> None:
        """Attention, from queries, keys and values, and its part of the output projection."""
        self.cluster.store("qkv_t", values)
        self.cluster.meet()
        pl.when(self.warpgroup == 0)(self.attend)
        self.cluster.meet()
        self.share(rank, then, 1, self.refs.y.at[pl.ds(0, WIDTH)], FEATURES)

    def add_hidden(self, values: jax.Array, rank: jax.Array, then: jax.Array) -> None:
        """Hidden values, and their part of the down projection."""
        hidden = elementwise(lambda x: activate(self.kernel.activation, x, self.dtype), values)
        self.cluster.store("h_t", hidden)
        self.cluster.meet()
        self.share(rank, then, 2, self.refs.h_t)

    def product(self, first: jax.Array) -> jax.Array:
        """This warpgroup's columns of the next slots, transposed, by all activations."""
        steps = self.sizes.steps
        depth = max(size for size in (1, 2, 3) if steps % size == 0)

        def step(k: jax.Array, sums: jax.Array) -> jax.Array:
            right = self.refs.x_t.at[pl.ds(k * depth * BLOCK, depth * BLOCK)]
            return self.multiply(sums, first + k * depth, depth, right)

        return jax.lax.fori_loop(0, steps // depth, step, self.zeros())

    def share(self, rank: jax.Array, first: jax.Array, depth: int, right: Ref, height: int = BLOCK) -> None:
        """Sends this CTA's part of the sums of all features, block by block under the products of the next."""

        @pl.loop(0, self.sizes.blocks)
        def _(i: jax.Array) -> None:
            values = self.multiply(self.zeros(), first + i * depth, depth, right, height)
            self.cluster.send_share(values, 4 * i + 2 * self.warpgroup, rank)

    def zeros(self) -> jax.Array:
        return layout_cast(jnp.zeros(SUMS, jnp.float32), plgpu.Layout.WGMMA)

    def multiply(
        self, sums: jax.Array, first: jax.Array, depth: int, right: Ref, height: int = BLOCK
    ) -> jax.Array:
        """Adds this warpgroup's columns of `depth` slots, transposed, by `right`, and releases the slots."""
        slots = [jax.lax.rem(first + i, STAGES) for i in range(depth)]
        sums = self.cluster.multiply(sums, first, depth, right, height)
        for slot in slots:
            self.ring.release(slot)
        return sums

    def attend(self) -> None:
        """Attention of a head, whose queries, keys and values are in `qkv_t`, into `y`."""
        tokens, dtype = self.sizes.tokens, self.dtype
        keys, v = (self.refs.qkv_t.at[pl.ds(i * FEATURES, FEATURES), pl.ds(0, WIDTH)] for i in (1, 2))
        queries = self.refs.qkv_t.at[pl.ds(0, FEATURES)].transpose((1, 0))
        (s,) = products((queries, keys, False))
        taken = load_vector(self.refs.taken, 1)
        s = elementwise(lambda s, taken: jnp.where(taken == 0, -jnp.inf, s), s, columns=[taken])
        if self.kernel.seq < tokens:
            query, key = (iota(s.shape, axis, plgpu.Layout.WGMMA) for axis in range(2))
            seq = self.kernel.seq
            s = jnp.where(jax.lax.div(query, seq) == jax.lax.div(key, seq), s, -jnp.inf)

        def weight(score: jax.Array, factor: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = jnp.exp2(score * factor - shift)
            return value.astype(dtype), value

        peak = jnp.maximum(jnp.max(s, axis=1), lowest_score(_SCALE))
        rows = [jnp.broadcast_to(x, peak.shape) for x in exponents(peak, _SCALE)]
        weights, unrounded = elementwise(weight, s, rows=rows)
        total = jnp.sum(unrounded, axis=1)
        (out,) = products((weights, v, True))
        factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
        self.refs.y[...] = elementwise(lambda value, factor: (value * factor).astype(dtype), out, rows=[factor])
