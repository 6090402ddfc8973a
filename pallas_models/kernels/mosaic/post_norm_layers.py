"""All layers of a post-norm encoder for a few tokens, in one cluster of CTAs of a Hopper GPU.

Each CTA has a head of attention and a share of the hidden values, and streams the weights of these past the
tokens: a layer waits for no launch. Activations are transposed, features by tokens: weights are the left operand
of the tensor cores, which want 64 rows of it. What a CTA adds to all features it sends to those CTAs that own
them; these send the sums to all, and each CTA normalises everything itself. See `cluster_exchange.py`.
"""

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.scores import exponents, lowest_score
from pallas_models.kernels.forms.post_norm_layers import Form
from pallas_models.kernels.mosaic.common import cluster_exchange, ptx
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_exchange import (
    BARRIER_BYTES,
    BLOCK_BYTES,
    FEATURES,
    HALF,
    HALF_BYTES,
    ROW_BYTES,
    TOKENS,
)
from pallas_models.kernels.mosaic.common.elementwise import elementwise, load_vector
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.target import Target

_WIDTH = 32  # of rows in shared memory, more than there are tokens
_MOST_PIECES = 6  # of the vectors of half a layer: those of queries, keys and values apart
_BLOCK = 64  # rows of weights in a slot of the ring
_COLUMNS = 128  # of weights in a slot, half of which are those of a warpgroup
_PARTS = _COLUMNS // _WIDTH
_STAGES = 8  # of the ring
_CONSUMERS = 2
_MOST_CTAS = 12  # of a cluster, whose shared memory has room for what all of them send
_LEAST_CORES = 132  # of an H100 or H200: a cluster has those of one GPC, which smaller GPUs may not have
_MOST_LAYERS = 12  # whose arrays a kernel takes as arguments
# Each CTA has its part of the biases.
_VECTORS = (  # of both halves of a layer
    ("bias_qkv", "bias_out", "scale_out", "offset_out"),
    ("bias_up", "bias_down", "scale", "offset"),
)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `post_norm_layers` does not serve a call; None if it does."""
    (batch, seq, n), num_heads = form.x.shape, form.num_heads
    if form.bias is not None or form.segment_ids is not None:
        return "takes a mask at most, no bias of scores and no segment ids"
    if target.name and target.num_cores < _LEAST_CORES:
        return f"takes GPUs of {_LEAST_CORES} multiprocessors or more, not {target.num_cores}"
    if batch * seq > TOKENS:
        return f"takes up to {TOKENS} tokens, not {batch} x {seq}"
    if jax.__version_info__ < (0, 11):
        return f"needs JAX 0.11 or newer, not {jax.__version__}"
    if form.x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.x.dtype}"
    if n != FEATURES * num_heads or n % _COLUMNS or num_heads > _MOST_CTAS:
        return (
            f"takes heads of {FEATURES}, each for one of up to {_MOST_CTAS} CTAs, in multiples of "
            f"{_COLUMNS // FEATURES}, not {num_heads} of {n // num_heads}"
        )
    if len(form.layers) > _MOST_LAYERS:
        return f"takes up to {_MOST_LAYERS} layers, not {len(form.layers)}"
    for layer in form.layers:
        if layer.w_up.shape[1] != 4 * n:
            return f"takes {4 * n} hidden values, four for each of {n} columns, not {layer.w_up.shape[1]}"
        for name in itertools.chain(*_VECTORS):
            if getattr(layer, name).dtype != jnp.float32:
                return f"takes float32 vectors, not {name} of {getattr(layer, name).dtype}"
    return None


def post_norm_layers(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """The layers for x (B, S, N) and mask (B, S); see `pallas_models.ops.post_norm_layers`."""
    del config, target  # see `unsupported`; there are no other tiles
    x, mask, num_heads, activation, epsilon = form.x, form.mask, form.num_heads, form.activation, form.epsilon
    layers = [layer._asdict() for layer in form.layers]
    (batches, seq, n), ctas, dtype, count = x.shape, num_heads, x.dtype, len(layers)
    tokens = batches * seq
    blocks, steps = n // _COLUMNS, n // _BLOCK
    ranks = ctas if interpret else 1  # whose work a CTA does: the interpreter has no clusters
    # The order of the ring: in each layer queries, keys and values and the projection of each head, then hidden
    # values of each CTA and what they add.
    head_steps, hidden_steps = steps + blocks, steps + 2 * blocks
    layer_steps = ranks * (head_steps + hidden_steps)
    batch = max(size for size in (1, 2, 3) if steps % size == 0)
    sizes = (_COLUMNS, FEATURES, n, n)  # of vectors of half a layer, what a CTA has of them
    places = [*itertools.accumulate(sizes, initial=0)]
    scale = math.log2(math.e) / math.sqrt(FEATURES)
    splat, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    tile = plgpu.RefType((plgpu.TilingTransform((8, _WIDTH)), plgpu.SwizzleTransform(ROW_BYTES)))
    sums_shape, scores_shape = (_BLOCK, TOKENS), (_BLOCK, _WIDTH)

    # Barriers that copies arrive at, of 64 bits, and how many threads do.
    barriers = dict(full=[1] * _STAGES, vectors_full=[1, 1], arrived=[_CONSUMERS, *[1] * _CONSUMERS])

    def body(refs: Refs) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")
        ring = Ring(refs.full, refs.consumed, _STAGES)
        div, rem = jax.lax.div, jax.lax.rem

        def each_rank(do: Callable[[jax.Array, jax.Array], None]) -> None:
            """Does the work of a CTA, given its rank and how many came before it here."""
            if interpret:
                pl.loop(0, ctas)(lambda rank: do(rank, rank))
            else:
                do(jax.lax.axis_index("rank"), jnp.int32(0))

        def call(
            inline: Callable[..., Any], *numbers: Any, given: Sequence[tuple[Any, Any]] = (), result: Any = None
        ) -> Any:
            """What `inline` gives, for references and arrays with what they are, and for numbers."""

            def emit(context: Any, *operands: Any) -> Any:
                values = [x.registers.item() for x in operands[len(given) :]]
                return inline(context, *operands[: len(given)], *values)

            kinds, arrays = zip(*given, strict=True) if given else ((), ())
            kinds += (splat,) * len(numbers)
            return plgpu.inline_mgpu(arg_types=kinds, return_type=result)(emit)(*arrays, *numbers)

        at = types.SimpleNamespace()  # where what is in shared memory begins
        if not interpret:
            swizzled = ("slots", "x_t", "h_t", "qkv_t")
            plain = (*barriers, "vectors", "taken", "parts", "own", "rows")
            given = [
                (kind, getattr(refs, name)) for kind, names in ((ref, plain), (tile, swizzled)) for name in names
            ]
            kinds = [plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)] * len(given)
            found = call(cluster_exchange.start(barriers.values()), given=given, result=kinds)
            at = types.SimpleNamespace(**dict(zip((*plain, *swizzled), found, strict=True)))

        def vectors_of(half: Any) -> Any:
            """Where those of half a layer begin."""
            return at.vectors + half * (4 * sum(sizes))

        def of_layers(name: str) -> list[Ref]:
            return [getattr(refs, f"{name}_{i}") for i in range(count)]

        def produce() -> None:
            def stream(
                name: str,
                i: Any,
                first: jax.Array,
                steps: int,
                height: int,
                corner: Callable[[jax.Array], tuple[Any, Any]],
                parts: int = _PARTS,
                apart: int = _WIDTH,
            ) -> None:
                """Copies tiles of a matrix of layer i, in each step parts whose columns are so far apart.

                What a slot has beside these parts is left as it is.

                Args:
                  corner: where the first part of a step begins, row and column.
                """

                @pl.loop(0, steps)
                def _(k: jax.Array) -> None:
                    slot, (row, column) = ring.acquire(first + k), corner(k)
                    if not interpret:
                        inline = cluster_exchange.fetch_tiles((height, _WIDTH), parts, apart, _BLOCK * ROW_BYTES)
                        there = at.slots + slot * (_PARTS * _BLOCK * ROW_BYTES)
                        barrier = at.full + slot * BARRIER_BYTES
                        call(inline, there, barrier, i, row, column, given=[(ref, w) for w in of_layers(name)])
                        return

                    @pl.loop(0, parts)
                    def _(part: jax.Array) -> None:
                        source = of_layers(name)[i].at[pl.ds(row, height), pl.ds(column + part * apart, _WIDTH)]
                        there = refs.slots.at[slot, part, pl.ds(0, height)]
                        plgpu.copy_gmem_to_smem(source, there, ring.full_of(slot))

                    for _part in range(parts, _PARTS):
                        plgpu.barrier_arrive(ring.full_of(slot))

            def copy_layer(i: Any) -> None:
                def vectors(half: int, rank: jax.Array, index: jax.Array) -> None:
                    begins = (rank * _COLUMNS, rank * FEATURES, 0, 0)
                    pieces: list[tuple[int, Any, int, int]] = [*zip(range(4), begins, places, sizes, strict=False)]
                    if half == 0:
                        of_heads = [(part * n + rank * FEATURES, part * FEATURES, FEATURES) for part in range(3)]
                        pieces[:1] = [(0, *piece) for piece in of_heads]
                    which, begins, offsets, lengths = zip(*pieces, strict=True)
                    vectors = [of_layers(name) for name in _VECTORS[half]]
                    if not interpret:
                        inline = cluster_exchange.fetch_vectors(count, which, offsets, lengths)
                        given = [(ref, v) for vector in vectors for v in vector]
                        barrier = at.vectors_full + half * BARRIER_BYTES
                        call(inline, vectors_of(half), barrier, i, *begins, given=given)
                        return
                    for j, begin, offset, size in pieces:
                        source = vectors[j][i].at[pl.ds(begin, size)]
                        there = refs.vectors.at[half, index, pl.ds(offset, size)]
                        plgpu.copy_gmem_to_smem(source, there, refs.vectors_full.at[half])
                    for _piece in range(len(pieces), _MOST_PIECES):
                        plgpu.barrier_arrive(refs.vectors_full.at[half])

                def head(rank: jax.Array, index: jax.Array) -> None:
                    own, first = rank * FEATURES, i * layer_steps + index * head_steps
                    # Queries, keys and values.
                    stream("w_qkv", i, first, steps, _BLOCK, lambda k: (k * _BLOCK, own), parts=3, apart=n)
                    stream("w_out", i, first + steps, blocks, FEATURES, lambda k: (own, k * _COLUMNS))

                def hidden(rank: jax.Array, index: jax.Array) -> None:
                    own, first = rank * _COLUMNS, i * layer_steps + ranks * head_steps + index * hidden_steps
                    stream("w_up", i, first, steps, _BLOCK, lambda k: (k * _BLOCK, own))
                    stream(
                        *("w_down", i, first + steps, 2 * blocks, _BLOCK),
                        lambda k: (own + rem(k, 2) * _BLOCK, div(k, 2) * _COLUMNS),
                    )

                for half, copy in enumerate((head, hidden)):
                    pl.when(i > 0)(functools.partial(free_vectors, half))
                    each_rank(functools.partial(vectors, half))
                    each_rank(copy)

            def free_vectors(half: int) -> None:
                plgpu.barrier_wait(refs.vectors_consumed.at[half])

            if interpret:
                for i in range(count):
                    copy_layer(i)
            else:
                pl.loop(0, count)(copy_layer)
            for half in range(2):
                free_vectors(half)
            ring.drain(jnp.int32(count * layer_steps))

        def meet(i: int) -> None:
            """Both wait for one another, and what they have stored is there for copies and tensor cores."""
            if interpret:
                plgpu.barrier_arrive(refs.met.at[i])
                plgpu.barrier_wait(refs.met.at[i])
            else:
                call(cluster_exchange.meet(_CONSUMERS))

        def zeros() -> jax.Array:
            value = jnp.zeros(sums_shape, jnp.float32)
            return value if interpret else plgpu.layout_cast(value, plgpu.Layout.WGMMA)

        def multiply(sums: jax.Array, first: jax.Array, depth: int, right: Ref, height: int = _BLOCK) -> jax.Array:
            """Adds to the sums this warpgroup's columns of `depth` slots, transposed, by `right`."""
            slots = [rem(first + i, _STAGES) for i in range(depth)]
            flipped = height < _BLOCK
            if interpret:
                for slot in slots:
                    ring.wait(slot)
                there = (right[...].T if flipped else right[...])[:, :TOKENS]
                for i, slot in enumerate(slots):
                    left = jnp.concatenate([refs.slots[slot, 2 * warpgroup + j, :height].T for j in range(2)])
                    rows = there[i * height : (i + 1) * height]
                    sums += jnp.dot(left, rows, preferred_element_type=jnp.float32)
            else:
                acc = plgpu.Layout.WGMMA
                result = plgpu.ShapeDtypeStruct(sums_shape, jnp.float32, layout=acc)
                inline = cluster_exchange.multiply(flipped, height, depth)
                given = [(tile, right), (tile, refs.slots), (acc, sums)]
                sums = call(inline, at.full, 2 * warpgroup, first, given=given, result=result)
            for slot in slots:
                ring.release(slot)
            return sums

        def product(first: jax.Array) -> jax.Array:
            """This warpgroup's columns of the next slots, transposed, by the activations."""

            def step(k: jax.Array, sums: jax.Array) -> jax.Array:
                right = refs.x_t.at[pl.ds(k * batch * _BLOCK, batch * _BLOCK)]
                return multiply(sums, first + k * batch, batch, right)

            return jax.lax.fori_loop(0, steps // batch, step, zeros())

        def share(rank: jax.Array, first: jax.Array, depth: int, right: Ref, height: int = _BLOCK) -> None:
            """Sends what this CTA adds to all features, block by block under the products of the next."""

            @pl.loop(0, blocks)
            def _(i: jax.Array) -> None:
                v, block = multiply(zeros(), first + i * depth, depth, right, height), 4 * i + 2 * warpgroup
                if not interpret:
                    there, given = at.parts + rank * BLOCK_BYTES, [(plgpu.Layout.WGMMA, v)]
                    call(cluster_exchange.send_share(dtype), at.qkv_t, there, at.arrived, block, rank, given=given)
                    return
                for j, half in itertools.product(range(2), range(2)):
                    rows, columns = slice(j * FEATURES, (j + 1) * FEATURES), slice(half * HALF, (half + 1) * HALF)
                    refs.parts[block + j, rank, half] = v[rows, columns].astype(dtype)

        def exchange(half: jax.Array) -> None:
            """Adds up what CTAs have sent, sends that, and normalises."""
            if interpret:
                bias, scale, offset = (refs.vectors[half, :, pl.ds(places[j], sizes[j])] for j in range(1, 4))
                meet(0)

                @pl.when(warpgroup == 0)
                def _() -> None:
                    parts = refs.parts[...].astype(jnp.float32).sum(axis=1)
                    total = parts.transpose(0, 2, 1, 3).reshape(n, TOKENS)
                    total += bias.reshape(n, 1) + refs.x_t[:, :TOKENS].astype(jnp.float32)
                    total = total.astype(dtype).astype(jnp.float32)
                    total -= jnp.mean(total, axis=0, keepdims=True)
                    total *= jax.lax.rsqrt(jnp.mean(jnp.square(total), axis=0, keepdims=True) + epsilon)
                    refs.x_t[:, :TOKENS] = (total * scale[0][:, None] + offset[0][:, None]).astype(dtype)

                meet(1)
                return
            bias, scale, offset = (vectors_of(half) + 4 * place for place in places[1:4])
            rank = jax.lax.axis_index("rank")
            where, tokens_of_half = (rank, warpgroup, half), warpgroup * HALF_BYTES
            summed, normed = at.arrived, at.arrived + (1 + warpgroup) * BARRIER_BYTES
            meet(2)
            for barrier in (summed, normed):
                call(cluster_exchange.expect(ctas), barrier)
            call(cluster_exchange.sum_up(ctas, dtype), at.parts, at.qkv_t, at.x_t, bias, at.own, summed, *where)
            plgpu.commit_smem()
            call(
                cluster_exchange.send_rows(ctas),
                at.own + tokens_of_half,
                at.rows + rank * BLOCK_BYTES + tokens_of_half,
                normed,
                rank,
            )
            inline = cluster_exchange.normalise(ctas, epsilon, dtype)
            call(inline, at.rows, at.own, scale, offset, at.x_t, normed, *where)
            meet(0)

        def attend() -> None:
            """Attention of a head, whose queries, keys and values are in `qkv_t`, into `y`."""
            wgmma = plgpu.Layout.WGMMA
            keys, v = (refs.qkv_t.at[pl.ds(i * FEATURES, FEATURES), pl.ds(0, _WIDTH)] for i in (1, 2))

            def scores(sums: Ref) -> jax.Array:
                plgpu.wgmma(sums, refs.qkv_t.at[pl.ds(0, FEATURES)].transpose((1, 0)), keys)
                return sums[...]

            def values(sums: Ref) -> jax.Array:
                plgpu.wgmma(sums, weights, v.transpose((1, 0)))
                return sums[...]

            if interpret:
                s = jnp.dot(refs.qkv_t[:FEATURES].T, keys[...], preferred_element_type=jnp.float32)
            else:
                s = pl.run_scoped(scores, plgpu.ACC(scores_shape, jnp.float32))
            apply = elementwise
            taken = load_vector(refs.taken, 1)
            s = apply(lambda s, taken: jnp.where(taken == 0, -jnp.inf, s), s, columns=[taken])
            if seq < tokens:
                query, key = (
                    jax.lax.broadcasted_iota(jnp.int32, scores_shape, axis)
                    if interpret
                    else plgpu.broadcasted_iota(jnp.int32, scores_shape, axis, layout=wgmma)
                    for axis in range(2)
                )
                s = jnp.where(jax.lax.div(query, seq) == jax.lax.div(key, seq), s, -jnp.inf)

            def weight(score: jax.Array, factor: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
                value = jnp.exp2(score * factor - shift)
                return value.astype(dtype), value

            peak = jnp.maximum(jnp.max(s, axis=1), lowest_score(scale))
            rows = [jnp.broadcast_to(x, peak.shape) for x in exponents(peak, scale)]
            weights, unrounded = apply(weight, s, rows=rows)
            total = jnp.sum(unrounded, axis=1)
            if interpret:
                out = jnp.dot(weights, v[...].T, preferred_element_type=jnp.float32)
            else:
                out = pl.run_scoped(values, plgpu.ACC((_BLOCK, FEATURES), jnp.float32))
            factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
            refs.y[...] = apply(lambda value, factor: (value * factor).astype(dtype), out, rows=[factor])

        def compute(k: jax.Array, _: None) -> None:
            """Half a layer."""
            i, half = div(k, 2), rem(k, 2)

            def store(values: jax.Array, name: str) -> None:
                """Stores what this warpgroup has of features (128, 16), and zeros beside it."""
                there = getattr(refs, name)
                if interpret:
                    values = jnp.pad(values.astype(dtype), ((0, 0), (0, there.shape[1] - TOKENS)))
                    there[pl.ds(warpgroup * _BLOCK, _BLOCK)] = values
                else:
                    inline, given = cluster_exchange.put(there.shape[1], dtype), [(plgpu.Layout.WGMMA, values)]
                    call(inline, getattr(at, name), warpgroup * _BLOCK, given=given)

            def head(values: jax.Array, rank: jax.Array, then: jax.Array) -> None:
                store(values, "qkv_t")
                meet(2)
                pl.when(warpgroup == 0)(attend)
                meet(3)
                share(rank, then, 1, refs.y.at[pl.ds(0, _WIDTH)], FEATURES)

            def hidden(values: jax.Array, rank: jax.Array, then: jax.Array) -> None:
                apply = elementwise
                store(apply(lambda x: activate(activation, x, dtype), values), "h_t")
                meet(2)
                share(rank, then, 2, refs.h_t)

            def work(rank: jax.Array, index: jax.Array) -> None:
                first = i * layer_steps + half * (ranks * head_steps)
                first += index * jnp.where(half == 0, head_steps, hidden_steps)
                bias = load_vector(refs.vectors.at[half, index, pl.ds(warpgroup * _BLOCK, _BLOCK)], 0)
                values = elementwise(operator.add, product(first), rows=[bias])
                pl.when(half == 0)(lambda: head(values, rank, first + steps))
                pl.when(half == 1)(lambda: hidden(values, rank, first + steps))
                if interpret:
                    meet(2)

            if interpret:
                plgpu.barrier_wait(refs.vectors_full.at[half])
            else:
                call(cluster_exchange.wait_for, at.vectors_full + half * BARRIER_BYTES, rem(i, 2))
            each_rank(work)
            exchange(half)
            plgpu.barrier_arrive(refs.vectors_consumed.at[half])

        def consume() -> None:
            if interpret:

                @pl.when(warpgroup == 0)
                def _() -> None:
                    refs.x_t[...] = jnp.zeros((n, _WIDTH), dtype)
                    refs.x_t[:, :tokens] = refs.x[...].T
                    refs.taken[...] = jnp.zeros(_WIDTH, jnp.int32)
                    refs.taken[:tokens] = refs.mask[...]

            else:
                call(cluster_exchange.fetch(tokens, n), at.x_t, warpgroup, given=[(ref, refs.x)])
                call(cluster_exchange.fetch_mask(tokens), at.taken, given=[(ref, refs.mask)])
            meet(2)
            jax.lax.fori_loop(0, 2 * count, compute, None)
            if interpret:

                @pl.when(warpgroup == 0)
                def _() -> None:
                    refs.o[...] = refs.x_t[:, :tokens].T

            else:
                rank = jax.lax.axis_index("rank")
                call(cluster_exchange.give(tokens, n), at.x_t, rank, warpgroup, given=[(ref, refs.o)])

        pl.when(warpgroup == _CONSUMERS)(produce)
        pl.when(warpgroup < _CONSUMERS)(consume)
        if not interpret:
            call(lambda _: ptx.meet())  # a CTA stays while others copy from it

    taken = jnp.ones((tokens,), jnp.int32) if mask is None else mask.reshape(tokens)
    operands = dict(x=x.reshape(tokens, n), mask=taken)
    operands |= {f"{name}_{i}": value for i, layer in enumerate(layers) for name, value in layer.items()}
    block = (2, FEATURES, HALF)
    sent = dict(own=plgpu.SMEM(block, dtype), rows=plgpu.SMEM((ctas, *block), dtype))
    sent |= {name: plgpu.SMEM((len(arrivals), 2), jnp.int32) for name, arrivals in barriers.items()}
    arrivals = dict(full=(_PARTS, _STAGES), vectors_full=(ranks * _MOST_PIECES, 2), met=(_CONSUMERS, 4))
    interpreted = {name: plgpu.Barrier(num_arrivals=a, num_barriers=b) for name, (a, b) in arrivals.items()}
    (out,) = launch(
        body,
        operands,
        dict(o=jax.ShapeDtypeStruct((tokens, n), dtype)),
        dict(
            slots=tiled((_STAGES, _PARTS, _BLOCK, _WIDTH), dtype, ROW_BYTES),
            x_t=tiled((n, _WIDTH), dtype, ROW_BYTES),
            h_t=tiled((_COLUMNS, _WIDTH), dtype, ROW_BYTES),
            qkv_t=tiled((_COLUMNS, _BLOCK), dtype, ROW_BYTES),  # and after attention what is to be sent
            y=tiled((_BLOCK, FEATURES), dtype, ROW_BYTES),
            parts=plgpu.SMEM((ctas, ctas, *block) if interpret else (ctas, *block), dtype),
            vectors=plgpu.SMEM((2, ranks, sum(sizes)), jnp.float32),
            consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
            vectors_consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
            taken=plgpu.SMEM((_WIDTH,), jnp.int32),
            **(interpreted if interpret else sent),
        ),
        name="post_norm_layers",
        num_ctas=1,
        cluster=1 if interpret else ctas,
        num_warpgroups=_CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
    )
    return out.reshape(x.shape)
