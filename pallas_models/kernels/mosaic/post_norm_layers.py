"""All layers of a post-norm encoder for a few tokens, in one cluster of CTAs of a Hopper GPU.

Each CTA has a head of attention and a share of the hidden values, and streams the weights of these past the
tokens: a layer waits for no launch. Activations are transposed, features by tokens: weights are the left operand
of the tensor cores, which want 64 rows of it. What a CTA adds to all features it sends to those CTAs that own
them; these send the sums to all, and each CTA normalises everything itself. See `_tokens.py`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels._common import Backend, Ref, lowest_score
from pallas_models.kernels.mosaic import _inline, _tokens
from pallas_models.kernels.mosaic._common import activate, load, plgpu, softmax_weights, tiled
from pallas_models.kernels.mosaic._launch import Refs, launch
from pallas_models.kernels.mosaic._ring import Ring
from pallas_models.kernels.mosaic._tokens import FEATURES, HALF, ROW_BYTES, TOKENS
from pallas_models.target import Target, current

_copies = Backend("jax.experimental.mosaic.gpu.launch_context")

Layer = Mapping[str, jax.Array]

_WIDTH = 32  # of rows in shared memory, more than there are tokens
_BLOCK = 64  # rows of weights in a slot of the ring
_COLUMNS = 128  # of weights in a slot, half of which are those of a warpgroup
_PARTS = _COLUMNS // _WIDTH
_STAGES = 8  # of the ring
_CONSUMERS = 2
_MOST_CTAS = 12  # of a cluster, whose shared memory has room for what all of them send
_LEAST_CORES = 132  # of an H100 or H200: a cluster has those of one GPC, which smaller GPUs may not have
_MOST_LAYERS = 12  # whose arrays a kernel takes as arguments
_MATRICES = ("w_qkv", "w_out", "w_up", "w_down")
# Each CTA has its part of the biases.
_VECTORS = ("bias_qkv", "bias_out", "bias_down", "bias_up", "scale_out", "offset_out", "scale", "offset")
_NORMS = (("bias_out", "scale_out", "offset_out"), ("bias_down", "scale", "offset"))  # of both halves of a layer


def unsupported(
    x: jax.Array, mask: jax.Array | None, layers: Sequence[Layer], *, num_heads: int, **_: Any
) -> str | None:
    """Why `post_norm_layers` does not serve a call; None if it does."""
    (batch, seq, n), target = x.shape, current()
    if target.name and target.num_cores < _LEAST_CORES:
        return f"takes GPUs of {_LEAST_CORES} multiprocessors or more, not {target.num_cores}"
    if batch * seq > TOKENS:
        return f"takes up to {TOKENS} tokens, not {batch} x {seq}"
    if jax.__version_info__ < (0, 11):
        return f"needs JAX 0.11 or newer, not {jax.__version__}"
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if n != FEATURES * num_heads or n % _COLUMNS or num_heads > _MOST_CTAS:
        return (
            f"takes heads of {FEATURES}, each for one of up to {_MOST_CTAS} CTAs, in multiples of "
            f"{_COLUMNS // FEATURES}, not {num_heads} of {n // num_heads}"
        )
    if len(layers) > _MOST_LAYERS:
        return f"takes up to {_MOST_LAYERS} layers, not {len(layers)}"
    for layer in layers:
        if layer["w_up"].shape[1] != 4 * n:
            return f"takes {4 * n} hidden values, four for each of {n} columns, not {layer['w_up'].shape[1]}"
        for name in _VECTORS:
            if layer[name].dtype != jnp.float32:
                return f"takes float32 vectors, not {name} of {layer[name].dtype}"
    return None


def post_norm_layers(
    x: jax.Array,
    mask: jax.Array | None,
    layers: Sequence[Layer],
    *,
    num_heads: int,
    activation: str | None,
    epsilon: float,
    precision: jax.lax.Precision,
    config: None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """The layers for x (B, S, N) and mask (B, S); see `pallas_models.ops.post_norm_layers`."""
    del precision, config, target  # see `unsupported`; there are no other tiles
    (batches, seq, n), ctas, dtype, count = x.shape, num_heads, x.dtype, len(layers)
    tokens = batches * seq
    blocks, steps = n // _COLUMNS, n // _BLOCK
    ranks = ctas if interpret else 1  # whose work a CTA does: the interpreter has no clusters
    # The order of the ring: in each layer queries, keys and values and the projection of each head, then hidden
    # values of each CTA and what they add.
    head_steps, hidden_steps = steps + blocks, steps + 2 * blocks
    layer_steps = ranks * (head_steps + hidden_steps)
    batch = max(size for size in (1, 2, 3) if steps % size == 0)
    sizes = dict(zip(_VECTORS, (_COLUMNS, FEATURES, FEATURES, _COLUMNS, n, n, n, n), strict=True))
    places = dict(zip(_VECTORS, itertools.accumulate(sizes.values(), initial=0), strict=False))
    scale = math.log2(math.e) / math.sqrt(FEATURES)
    splat, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    tile = plgpu.RefType((plgpu.TilingTransform((8, _WIDTH)), plgpu.SwizzleTransform(ROW_BYTES)))
    sums_shape, scores_shape = (_BLOCK, TOKENS), (_BLOCK, _WIDTH)

    def body(refs: Refs) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")
        ring = Ring(refs.full, refs.consumed, _STAGES)

        def each_rank(do: Callable[[jax.Array, jax.Array], None]) -> None:
            """Does the work of a CTA, given its rank and how many came before it here."""
            if interpret:
                pl.loop(0, ctas)(lambda rank: do(rank, rank))
            else:
                do(jax.lax.axis_index("rank"), jnp.int32(0))

        def call(inline: Callable[..., Any], kinds: tuple[Any, ...], *arguments: Any, result: Any = None) -> Any:
            return plgpu.inline_mgpu(arg_types=kinds, return_type=result)(inline)(*arguments)

        def produce() -> None:
            def stream(
                w: Ref,
                first: jax.Array,
                steps: int,
                height: int,
                corner: Callable[..., tuple[Any, Any]],
                parts: int = _PARTS,
            ) -> None:
                """Copies tiles of w, those of a step in parts whose upper left corners are given.

                What a slot has beside these parts is left as it is.
                """

                @pl.loop(0, steps)
                def _(k: jax.Array) -> None:
                    slot = ring.acquire(first + k)

                    @pl.loop(0, parts)
                    def _(part: jax.Array) -> None:
                        row, column = corner(k, part)
                        source = w.at[pl.ds(row, height), pl.ds(column, _WIDTH)]
                        there = refs.slots.at[slot, part, pl.ds(0, height)]
                        plgpu.copy_gmem_to_smem(source, there, ring.full_of(slot))

                    for _part in range(parts, _PARTS):
                        plgpu.barrier_arrive(ring.full_of(slot))

            def copy_layer(i: int) -> None:
                w_qkv, w_out, w_up, w_down = (getattr(refs, f"{name}_{i}") for name in _MATRICES)

                def vector(name: str, index: jax.Array, source: Any, offset: int, size: int) -> None:
                    source = getattr(refs, f"{name}_{i}").at[pl.ds(source, size)]
                    there = refs.vectors.at[i % 2, index, pl.ds(places[name] + offset, size)]
                    whole = _copies.OOBFillMode.PROMISE_IN_BOUNDS  # then it is one copy, of any length
                    plgpu.copy_gmem_to_smem(source, there, refs.vectors_full.at[i % 2], oob_mode=whole)

                def vectors(rank: jax.Array, index: jax.Array) -> None:
                    for part in range(3):
                        vector("bias_qkv", index, part * n + rank * FEATURES, part * FEATURES, FEATURES)
                    for name in _VECTORS[1:]:
                        own = rank * sizes[name] if name.startswith("bias") else 0
                        vector(name, index, own, 0, sizes[name])

                def head(rank: jax.Array, index: jax.Array) -> None:
                    own, first = rank * FEATURES, i * layer_steps + index * head_steps
                    stream(
                        *(w_qkv, first, steps, _BLOCK),
                        lambda k, part: (k * _BLOCK, part * n + own),
                        parts=3,  # queries, keys and values
                    )
                    stream(
                        *(w_out, first + steps, blocks, FEATURES),
                        lambda k, part: (own, k * _COLUMNS + part * _WIDTH),
                    )

                def hidden(rank: jax.Array, index: jax.Array) -> None:
                    own, first = rank * _COLUMNS, i * layer_steps + ranks * head_steps + index * hidden_steps
                    stream(w_up, first, steps, _BLOCK, lambda k, part: (k * _BLOCK, own + part * _WIDTH))
                    div, rem = jax.lax.div, jax.lax.rem
                    stream(
                        *(w_down, first + steps, 2 * blocks, _BLOCK),
                        lambda k, part: (own + rem(k, 2) * _BLOCK, div(k, 2) * _COLUMNS + part * _WIDTH),
                    )

                free_vectors(i - 2)
                each_rank(vectors)
                each_rank(head)
                each_rank(hidden)

            def free_vectors(i: int) -> None:
                if i >= 0:
                    plgpu.barrier_wait(refs.vectors_consumed.at[i % 2])

            for i in range(count):
                copy_layer(i)
            for i in (count - 2, count - 1):
                free_vectors(i)
            ring.drain(jnp.int32(count * layer_steps))

        def meet(i: int) -> None:
            """Both wait for one another, and what they have stored is there for copies and tensor cores."""
            if interpret:
                plgpu.barrier_arrive(refs.met.at[i])
                plgpu.barrier_wait(refs.met.at[i])
            else:
                call(_tokens.meet(_CONSUMERS), ())

        def zeros() -> jax.Array:
            value = jnp.zeros(sums_shape, jnp.float32)
            return value if interpret else plgpu.layout_cast(value, plgpu.Layout.WGMMA)

        def multiply(sums: jax.Array, first: jax.Array, depth: int, right: Ref, height: int = _BLOCK) -> jax.Array:
            """Adds to the sums this warpgroup's columns of `depth` slots, transposed, by `right`."""
            slots = [jax.lax.rem(first + i, _STAGES) for i in range(depth)]
            for slot in slots:
                ring.wait(slot)
            flipped = height < _BLOCK
            if interpret:
                there = (right[...].T if flipped else right[...])[:, :TOKENS]
                for i, slot in enumerate(slots):
                    left = jnp.concatenate([refs.slots[slot, 2 * warpgroup + j, :height].T for j in range(2)])
                    rows = there[i * height : (i + 1) * height]
                    sums += jnp.dot(left, rows, preferred_element_type=jnp.float32)
            else:
                acc = plgpu.Layout.WGMMA
                result = plgpu.ShapeDtypeStruct(sums_shape, jnp.float32, layout=acc)
                kinds = (tile, tile, acc, *[splat] * (1 + depth))
                inline = _tokens.multiply(flipped, height)
                sums = call(inline, kinds, right, refs.slots, sums, 2 * warpgroup, *slots, result=result)
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
                    parts, summed = refs.parts.at[rank], refs.arrived.at[0]
                    kinds = (plgpu.Layout.WGMMA, tile, ref, ref, splat, splat)
                    call(_tokens.send_share, kinds, v, refs.qkv_t, parts, summed, block, rank)
                    return
                for j, half in itertools.product(range(2), range(2)):
                    rows, columns = slice(j * FEATURES, (j + 1) * FEATURES), slice(half * HALF, (half + 1) * HALF)
                    refs.parts[block + j, rank, half] = v[rows, columns].astype(dtype)

        def exchange(vectors: Ref, phase: int) -> None:
            """Adds up what CTAs have sent, sends that, and normalises."""
            bias, scale, offset = (vectors.at[:, pl.ds(places[name], sizes[name])] for name in _NORMS[phase])
            if interpret:
                meet(0)

                @pl.when(warpgroup == 0)
                def _() -> None:
                    parts = refs.parts[...].astype(jnp.float32).sum(axis=1)
                    total = parts.transpose(0, 2, 1, 3).reshape(n, TOKENS)
                    total += bias[...].reshape(n, 1) + refs.x_t[:, :TOKENS].astype(jnp.float32)
                    total = total.astype(dtype).astype(jnp.float32)
                    total -= jnp.mean(total, axis=0, keepdims=True)
                    total *= jax.lax.rsqrt(jnp.mean(jnp.square(total), axis=0, keepdims=True) + epsilon)
                    refs.x_t[:, :TOKENS] = (total * scale[0][:, None] + offset[0][:, None]).astype(dtype)

                meet(1)
                return
            rank = jax.lax.axis_index("rank")
            where, splats = (rank, warpgroup, jnp.int32(phase)), (splat,) * 3
            summed, normed = refs.arrived.at[0], refs.arrived.at[1 + warpgroup]
            meet(2)
            for barrier in (summed, normed):
                call(_tokens.expect(ctas), (ref,), barrier)
            given = (refs.parts, refs.qkv_t, refs.x_t, bias.at[0], refs.own, summed)
            call(_tokens.sum_up(ctas), (ref, tile, tile, ref, ref, ref, *splats), *given, *where)
            plgpu.commit_smem()
            own, rows = refs.own.at[warpgroup], refs.rows.at[rank, warpgroup]
            call(_tokens.send_rows(ctas), (ref, ref, ref, splat), own, rows, normed, rank)
            given = (refs.rows, refs.own, scale.at[0], offset.at[0], refs.x_t, normed)
            call(_tokens.normalise(ctas, epsilon), (ref, ref, ref, ref, tile, ref, *splats), *given, *where)
            meet(phase)

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

            def columns(v: jax.Array) -> jax.Array:
                v = jax.lax.broadcast_in_dim(v, scores_shape, [1])
                return v if interpret else plgpu.layout_cast(v, wgmma)

            if interpret:
                s = jnp.dot(refs.qkv_t[:FEATURES].T, keys[...], preferred_element_type=jnp.float32)
            else:
                s = pl.run_scoped(scores, plgpu.ACC(scores_shape, jnp.float32))
            taken = columns(load(refs.taken, wgmma.reduce(0), interpret=interpret))
            if seq < tokens:
                query, key = (
                    jax.lax.broadcasted_iota(jnp.int32, scores_shape, axis)
                    if interpret
                    else plgpu.broadcasted_iota(jnp.int32, scores_shape, axis, layout=wgmma)
                    for axis in range(2)
                )
                taken = jnp.where(jax.lax.div(query, seq) == jax.lax.div(key, seq), taken, 0)
            s = jnp.where(taken != 0, s, -jnp.inf)
            weights = softmax_weights(s, jnp.maximum(jnp.max(s, axis=1), lowest_score(scale)), scale)
            total = jnp.sum(weights, axis=1)
            weights = weights.astype(dtype)
            if interpret:
                out = jnp.dot(weights, v[...].T, preferred_element_type=jnp.float32)
            else:
                out = pl.run_scoped(values, plgpu.ACC((_BLOCK, FEATURES), jnp.float32))
            factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
            refs.y[...] = (out * jax.lax.broadcast_in_dim(factor, out.shape, [0])).astype(dtype)

        def layer(i: jax.Array, _: None) -> None:
            slot = jax.lax.rem(i, 2)
            vectors = refs.vectors.at[slot]

            def store(values: jax.Array, there: Ref) -> None:
                """Stores what this warpgroup has of features (128, 16), and zeros beside it."""
                if interpret:
                    values = jnp.pad(values.astype(dtype), ((0, 0), (0, there.shape[1] - TOKENS)))
                    there[pl.ds(warpgroup * _BLOCK, _BLOCK)] = values
                else:
                    kinds = (plgpu.Layout.WGMMA, tile, splat)
                    call(_tokens.put(there.shape[1]), kinds, values, there, warpgroup * _BLOCK)

            def biased(v: jax.Array, name: str, index: jax.Array) -> jax.Array:
                there = vectors.at[index, pl.ds(places[name] + warpgroup * _BLOCK, _BLOCK)]
                bias = load(there, plgpu.Layout.WGMMA.reduce(1), interpret=interpret)
                bias = jax.lax.broadcast_in_dim(bias, sums_shape, [0])
                return v + (bias if interpret else plgpu.layout_cast(bias, plgpu.Layout.WGMMA))

            def head(rank: jax.Array, index: jax.Array) -> None:
                first = i * layer_steps + index * head_steps
                qkv = biased(product(first), "bias_qkv", index)
                store(qkv, refs.qkv_t)
                meet(2)
                pl.when(warpgroup == 0)(attend)
                meet(3)
                share(rank, first + steps, 1, refs.y.at[pl.ds(0, _WIDTH)], FEATURES)
                if interpret:
                    meet(2)

            def hidden(rank: jax.Array, index: jax.Array) -> None:
                first = i * layer_steps + ranks * head_steps + index * hidden_steps
                values = biased(product(first), "bias_up", index)
                store(activate(activation, values, dtype), refs.h_t)
                meet(2)
                share(rank, first + steps, 2, refs.h_t)
                if interpret:
                    meet(2)

            plgpu.barrier_wait(refs.vectors_full.at[slot])
            each_rank(head)
            exchange(vectors, 0)
            each_rank(hidden)
            exchange(vectors, 1)
            plgpu.barrier_arrive(refs.vectors_consumed.at[slot])

        def consume() -> None:
            if interpret:

                @pl.when(warpgroup == 0)
                def _() -> None:
                    refs.x_t[...] = jnp.zeros((n, _WIDTH), dtype)
                    refs.x_t[:, :tokens] = refs.x[...].T
                    refs.taken[...] = jnp.zeros(_WIDTH, jnp.int32)
                    refs.taken[:tokens] = refs.mask[...]

            else:
                call(_tokens.fetch(tokens, n), (ref, tile, splat), refs.x, refs.x_t, warpgroup)
                call(_tokens.fetch_mask(tokens), (ref, ref), refs.mask, refs.taken)
            meet(2)
            jax.lax.fori_loop(0, count, layer, None)
            if interpret:

                @pl.when(warpgroup == 0)
                def _() -> None:
                    refs.o[...] = refs.x_t[:, :tokens].T

            else:
                rank = jax.lax.axis_index("rank")
                call(_tokens.give(tokens, n), (tile, ref, splat, splat), refs.x_t, refs.o, rank, warpgroup)

        if not interpret:
            call(lambda _, barriers: _inline.start(barriers, _CONSUMERS, 1, 1), (ref,), refs.arrived)
        pl.when(warpgroup == _CONSUMERS)(produce)
        pl.when(warpgroup < _CONSUMERS)(consume)
        if not interpret:
            call(lambda _: _inline.meet(), ())  # a CTA stays while others copy from it

    taken = jnp.ones((tokens,), jnp.int32) if mask is None else mask.reshape(tokens)
    operands = dict(x=x.reshape(tokens, n), mask=taken)
    operands |= {f"{name}_{i}": value for i, layer in enumerate(layers) for name, value in layer.items()}
    block = (2, FEATURES, HALF)
    sent = dict(own=plgpu.SMEM(block, dtype), rows=plgpu.SMEM((ctas, *block), dtype))
    sent["arrived"] = plgpu.SMEM((1 + _CONSUMERS, 2), jnp.int32)
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
            vectors=plgpu.SMEM((2, ranks, sum(sizes.values())), jnp.float32),
            full=plgpu.Barrier(num_arrivals=_PARTS, num_barriers=_STAGES),
            consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
            vectors_full=plgpu.Barrier(num_arrivals=ranks * (len(_VECTORS) + 2), num_barriers=2),
            vectors_consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
            taken=plgpu.SMEM((_WIDTH,), jnp.int32),
            **(dict(met=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=4)) if interpret else sent),
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
