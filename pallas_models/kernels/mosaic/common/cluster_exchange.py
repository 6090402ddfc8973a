"""Activations of up to 16 tokens in a cluster of CTAs: where they lie, how they are sent, added up and normalised.

Features are rows. For the tensor cores they lie in `x_t`, (N, 32): swizzled rows of 64 bytes, half of which tokens
fill. What is sent are blocks of 32 features, those of a CTA, in two halves of 8 tokens, one for each warpgroup: of
a half every lane has a feature, and every warp two tokens. What a CTA has for itself it does not send.

What is in shared memory is given by its place, where it begins in bytes: for each reference that Mosaic sees, JAX
0.11's inference of layouts has MLIR check and number the whole kernel.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Backend
from pallas_models.kernels.mosaic.common import ptx
from pallas_models.kernels.mosaic.common.ptx import (
    add,
    address,
    asm,
    i32,
    item,
    lane_and_warp,
    thread,
    times,
    utils,
    wait,
    warp_sum,
)

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")
_math = Backend("jax.extend.mlir.dialects.math")
_mma = Backend("jax.experimental.mosaic.gpu.mma_utils")
_wgmma = Backend("jax.experimental.mosaic.gpu.wgmma")

TOKENS = 16
FEATURES = 32  # of a block
HALF = 8  # tokens
ROW_BYTES = 64  # of x_t
HALF_BYTES = 2 * FEATURES * HALF
BLOCK_BYTES = 2 * HALF_BYTES
BARRIER_BYTES = 8
_MEETING = 8  # a barrier of threads; Mosaic uses the first ones, one for each warpgroup

Inline = Callable[..., Any]


def _eight(row: Any, which: Any) -> Any:
    """Where eight tokens of a swizzled row lie, in bytes."""
    arith = utils.arith
    return add(times(row, ROW_BYTES), times(arith.xori(which, arith.andi(arith.shrui(row, i32(1)), i32(3))), 16))


def _place(half: Any) -> Any:
    """Where a thread's two tokens of the first block lie in `x_t`, in bytes."""
    lane, warp = lane_and_warp()
    return add(_eight(lane, half), times(warp, 4))


def _place_sent(row: Any, word: Any) -> Any:
    """Where two tokens of a feature lie in half a block: those that a warp reads lie in different banks."""
    return times(add(times(row, 4), utils.arith.xori(word, utils.arith.shrui(row, i32(3)))), 4)


def _own_sent(half: Any) -> Any:
    """Where a thread's two tokens lie in a block that is sent."""
    return add(_place_sent(*lane_and_warp()), times(half, HALF_BYTES))


def _pair(value: Any) -> Any:
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    value = utils.c(value, ir.F32Type.get()) if isinstance(value, float) else value
    return utils.vector.broadcast(kind, value)


def _each(function: Callable[[Any], Any], pair: Any) -> Any:
    return utils.vector.from_elements(pair.type, [function(item(pair, i)) for i in range(2)])


def _read(place: Any, element: Any) -> Any:
    """Two numbers of 16 bits, in float32."""
    word = asm("ld.shared.b32 $0, [$1];", "=r,r", place, result="i32")
    word = utils.vector.broadcast(ir.VectorType.get((1,), word.type), word)
    pair = utils.vector.bitcast(ir.VectorType.get((2,), element), word)
    return utils.arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair)


def _write(place: Any, offset: int, pair: Any, element: Any) -> None:
    pair = utils.arith.truncf(ir.VectorType.get((2,), element), pair)
    word = utils.vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), pair)
    asm(f"st.shared.b32 [$0 + {offset}], $1;", "r,r", place, item(word, 0))


def _read_vector(vector: Any, block: int) -> Any:
    """The number of a thread's feature in a block, twice."""
    place = add(vector, times(lane_and_warp()[0], 4))
    return _pair(asm(f"ld.shared.f32 $0, [$1 + {4 * FEATURES * block}];", "=f,r", place, result="f32"))


def _total(terms: Sequence[Any]) -> Any:
    while len(terms) > 1:
        pairs = [utils.arith.addf(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, *terms[2 * len(pairs) :]]
    return terms[0]


def _sent_by(cta: int, own: Any, theirs: Any, rank: Any) -> Any:
    """Where the block of a CTA begins: this one has its own elsewhere."""
    here = utils.arith.cmpi(utils.arith.CmpIPredicate.eq, rank, i32(cta))
    return utils.arith.select(here, own, add(theirs, BLOCK_BYTES * cta))


def _received(ctas: int, own: Any, theirs: Any, rank: Any, half: Any, element: Any) -> list[Any]:
    """What each CTA has sent to a thread."""
    place = _own_sent(half)
    return [_read(add(_sent_by(j, own, theirs, rank), place), element) for j in range(ctas)]


def expect(ctas: int) -> Inline:
    """A warpgroup arrives at a barrier and says what will arrive in this round: half a block of each other CTA."""

    def inline(_: Any, barrier: Any) -> None:
        asm(
            f"""
            {{
                .reg .pred p;
                setp.eq.u32 p, $1, 0;
                @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {(ctas - 1) * HALF_BYTES};
            }}""",
            "r,r",
            barrier,
            thread(),
        )

    return inline


def start(arrivals: Iterable[Sequence[int]]) -> Inline:
    """Makes barriers, of the first references for so many arrivals each; the places of all."""

    def inline(_: Any, *shared: Any) -> list[Any]:
        places = [address(ref) for ref in shared]
        ptx.start(*zip(places, arrivals, strict=False))
        return [_arrays.FragmentedArray.splat(place, (), is_signed=True) for place in places]

    return inline


def wait_for(_: Any, barrier: Any, parity: Any) -> None:
    """Waits for a round of a barrier."""
    wait(barrier, parity)


def _chosen(values: Sequence[Any], index: Any) -> Any:
    """The value of that index."""
    arith, found = utils.arith, values[0]
    for i, value in enumerate(values[1:], start=1):
        found = arith.select(arith.cmpi(arith.CmpIPredicate.eq, index, i32(i)), value, found)
    return found


def fetch_tiles(tile: tuple[int, int], parts: int, apart: int, place: int) -> Inline:
    """A thread copies tiles of one of several matrices, and says at a barrier what will arrive.

    Mosaic's copy is of an array that is known when it is compiled. A copy for each layer's took most of that time.

    Args:
      parts: how many tiles, in a row.
      apart: columns from one to the next.
      place: bytes from one to the next, where they go.
    """

    def inline(context: Any, *given: Any) -> None:
        *matrices, there, barrier, layer, row, column = given
        sources = [context._get_tma_desc(w, (), None, tile, ROW_BYTES, None) for w in matrices]
        copies = "".join(
            f"""
                add.s32 column, $5, {part * apart};
                add.u32 there, $1, {part * place};
                @$0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
                    [there], [$2, {{column, $4}}], [$3];"""
            for part in range(parts)
        )
        asm(
            f"""
            {{
                .reg .b32 column, there;
                @$0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], {parts * 2 * math.prod(tile)};
                {copies}
            }}""",
            "b,r,l,r,r,r",
            utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
            there,
            _chosen(sources, layer),
            barrier,
            row,
            column,
        )

    return inline


def fetch_vectors(layers: int, names: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Inline:
    """A thread copies pieces of vectors of a layer, and says at a barrier what will arrive.

    Args:
      layers: how many there are; of each vector those of all layers are given.
      names: of which vector each piece is.
      offsets, lengths: where it begins in shared memory, and how long it is.
    """

    def inline(_: Any, *given: Any) -> None:
        vectors, (there, barrier, layer, *starts) = given[: -3 - len(names)], given[-3 - len(names) :]
        by_name = [vectors[i : i + layers] for i in range(0, len(vectors), layers)]
        sources = [_chosen([utils.memref_ptr(ref) for ref in refs], layer) for refs in by_name]
        copies = "".join(
            f"""
                mad.wide.u32 from, ${3 + len(sources) + i}, 4, ${3 + name};
                add.u32 to, $1, {4 * offset};
                @$0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                    [to], [from], {4 * length}, [$2];"""
            for i, (name, offset, length) in enumerate(zip(names, offsets, lengths, strict=True))
        )
        asm(
            f"""
            {{
                .reg .b32 to; .reg .b64 from;
                @$0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], {4 * sum(lengths)};
                {copies}
            }}""",
            "b,r,r" + ",l" * len(sources) + ",r" * len(starts),
            utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
            there,
            barrier,
            *sources,
            *starts,
        )

    return inline


def _send(source: Any, there: Any, barrier: Any, first: Any, count: int, rank: Any, size: int, apart: int) -> None:
    """Sends to each of `count` CTAs, but for this one, `size` bytes, at `apart` times its rank in the source.

    A few threads of each warp do it, as a warp issues copies one after another.
    """
    lane, warp = lane_and_warp()
    index = add(warp, times(lane, 4))
    asm(
        f"""
        {{
            .reg .pred p;
            .reg .b32 from, to, bar;
            setp.lt.u32 p, $3, {count};
            setp.ne.and.u32 p, $4, $5, p;
            mad.lo.u32 from, $4, {apart}, $0;
            @p mapa.shared::cluster.u32 to, $1, $4;
            @p mapa.shared::cluster.u32 bar, $2, $4;
            @p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [from], {size}, [bar];
        }}""",
        "r,r,r,r,r,r",
        source,
        there,
        barrier,
        index,
        add(first, index),
        rank,
    )


def send_rows(ctas: int) -> Inline:
    """Sends to all other CTAs half a block."""

    def inline(_: Any, own: Any, there: Any, barrier: Any, rank: Any) -> None:
        _send(own, there, barrier, i32(0), ctas, rank, HALF_BYTES, 0)

    return inline


def fetch_mask(tokens: int) -> Inline:
    """Copies the mask of all tokens, and zeros beside it."""

    def inline(_: Any, mask: Any, there: Any) -> None:
        asm(
            f"""
            {{
                .reg .pred p; .reg .b32 to, w; .reg .b64 from;
                mov.b32 w, 0;
                mad.wide.u32 from, $2, 4, $0;
                mad.lo.u32 to, $2, 4, $1;
                setp.lt.u32 p, $2, {tokens};
                @p ld.global.b32 w, [from];
                setp.lt.u32 p, $2, {2 * TOKENS};
                @p st.shared.b32 [to], w;
            }}""",
            "l,r,r",
            utils.memref_ptr(mask),
            there,
            thread(),
        )

    return inline


def fetch(tokens: int, n: int) -> Inline:
    """Copies x (tokens, n) into `x_t`, and zeros beside it: what products give for those must be finite."""

    def inline(_: Any, x: Any, x_t: Any, half: Any) -> None:
        lane, warp = lane_and_warp()
        token = add(times(half, HALF), times(warp, 2))
        place, beside = (add(x_t, _place(add(half, more))) for more in (0, 2))
        for block in range(n // FEATURES):
            asm(
                f"""
                {{
                    .reg .pred p; .reg .b16 a, b; .reg .b32 w; .reg .b64 from;
                    mad.wide.u32 from, $1, 2, $0;
                    mov.b16 a, 0; mov.b16 b, 0;
                    setp.lt.u32 p, $4, {tokens};
                    @p ld.global.b16 a, [from + {2 * block * FEATURES}];
                    setp.lt.u32 p, $4, {tokens - 1};
                    @p ld.global.b16 b, [from + {2 * (block * FEATURES + n)}];
                    mov.b32 w, {{a, b}};
                    st.shared.b32 [$2 + {block * FEATURES * ROW_BYTES}], w;
                    mov.b32 w, 0;
                    st.shared.b32 [$3 + {block * FEATURES * ROW_BYTES}], w;
                }}""",
                "l,r,r,r,r",
                utils.memref_ptr(x),
                add(times(token, n), lane),
                place,
                beside,
                token,
            )

    return inline


def give(tokens: int, n: int) -> Inline:
    """Copies a block of `x_t` to o (tokens, n)."""

    def inline(_: Any, o: Any, x_t: Any, block: Any, half: Any) -> None:
        lane, warp = lane_and_warp()
        token = add(times(half, HALF), times(warp, 2))
        asm(
            f"""
            {{
                .reg .pred p; .reg .b16 a, b; .reg .b32 w; .reg .b64 to;
                mad.wide.u32 to, $1, 2, $0;
                ld.shared.b32 w, [$2];
                mov.b32 {{a, b}}, w;
                setp.lt.u32 p, $3, {tokens};
                @p st.global.b16 [to], a;
                setp.lt.u32 p, $3, {tokens - 1};
                @p st.global.b16 [to + {2 * n}], b;
            }}""",
            "l,r,r,r",
            utils.memref_ptr(o),
            add(times(token, n), times(block, FEATURES), lane),
            add(x_t, _place(half), times(block, FEATURES * ROW_BYTES)),
            token,
        )

    return inline


def meet(warpgroups: int) -> Inline:
    """Warpgroups wait for one another, and what they have stored is there for copies and tensor cores."""

    def inline(_: Any) -> None:
        asm(f"fence.proxy.async.shared::cta; bar.sync {_MEETING}, {128 * warpgroups};", "")

    return inline


def _add_product(registers: Any, left: Any, right: Any) -> Any:
    """Adds to sums (64, 16) the product of left (64, K) and of the first 16 columns of right (K, 32).

    Pallas would take all columns that lie together, and tensor cores as long as these are.
    """
    columns, kind = ROW_BYTES // 2, ir.MemRefType(right.type).element_type
    (a, (_, (a_step, *_))), (_, a_next), a_fast = _mma.create_descriptor(
        left, swizzle=ROW_BYTES, large_tile=(64, columns), group_size=(64, columns), logical_k_major=False
    )
    (b, (_, (b_step, *_))), (_, b_next), b_fast = _mma.create_descriptor(
        right, swizzle=ROW_BYTES, large_tile=(columns,) * 2, group_size=(columns,) * 2, logical_k_major=True
    )
    (depth, _), _ = _mma.tiled_memref_shape(right)
    for k in range(depth // columns):
        left, right = (
            utils.arith.addi(start, utils.c(_mma.encode_addr(k * step), start.type))
            for start, step in ((a, a_next), (b, b_next))
        )
        registers = _wgmma.wgmma_m64(
            registers,
            left,
            right,
            a_transpose=a_fast != _mma.Dim.K,
            b_transpose=b_fast != _mma.Dim.K,
            a_k_stride=a_step,
            b_k_stride=b_step,
            n=TOKENS,
            swizzle=ROW_BYTES,
            a_element_type=kind,
            b_element_type=kind,
        )
    return registers


def multiply(flipped: bool, height: int, depth: int) -> Inline:
    """Adds to sums (64, 16) the product of the next slots of weights, transposed, and of `right`.

    Pallas cannot say that 64 columns lie in two parts of 32.

    Args:
      flipped: whether `right` is tokens by features.
      height: of a slot.
      depth: slots, which are waited for.
    """

    def inline(_: Any, right: Any, weights: Any, sums: Any, barriers: Any, part: Any, step: Any) -> Any:
        arith, index = utils.arith, ir.IndexType.get()
        part, stages, slots = arith.index_cast(index, part), i32(ir.MemRefType(weights.type).shape[0]), []
        for i in range(depth):
            slot, turn = (f(add(step, i), stages) for f in (arith.remui, arith.divui))
            wait(add(barriers, times(slot, BARRIER_BYTES)), arith.andi(turn, i32(1)))
            slots.append(arith.index_cast(index, slot))
        sums = _wgmma.wgmma_fence(sums.to_layout(_arrays.WGMMA_LAYOUT_ACC_32BIT))
        registers = sums.registers
        for i, slot in enumerate(slots):
            # Tiles of 8 rows: (2, K / 8, 8, 32), and (K / 8, 1, 8, 32) or (32 / 8, 1, 8, 32).
            parts = (slot, utils.ds(part, 2), slice(0, height // 8), 0)
            left = utils.memref_transpose(utils.memref_slice(weights, parts), (0, 1, 3, 2))
            if flipped:
                there = utils.memref_transpose(right, (1, 0, 3, 2))
            else:
                there = utils.memref_slice(right, (utils.ds(utils.c(i * height // 8, index), height // 8),))
            registers = _add_product(registers, left, there)
        utils.nvvm.wgmma_commit_group_sync_aligned()
        utils.nvvm.wgmma_wait_group_sync_aligned(0)
        sums = _arrays.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)
        return sums.to_layout(_arrays.WGMMA_LAYOUT)

    return inline


def _words(values: Any, dtype: DTypeLike) -> Any:
    """Row, token and both numbers of each pair of values (64, 16) that a thread has, in half precision."""
    values, word = values.astype(utils.dtype_to_ir_type(dtype)), ir.IntegerType.get_signless(32)
    for index, register in zip(values.layout.thread_idxs(values.shape), values.registers.flat, strict=True):
        row, token = (utils.arith.index_cast(word, x) for x in index)
        yield row, token, item(utils.vector.bitcast(ir.VectorType.get((1,), word), register), 0)


def put(columns: int, dtype: DTypeLike) -> Inline:
    """Stores values (64, 16) in rows of shared memory (rows, columns), and zeros in the next 16 columns."""

    def inline(_: Any, values: Any, there: Any, first: Any) -> None:
        arith = utils.arith
        base = add(there, times(first, 2 * columns))
        for row, token, word in _words(values, dtype):
            tile, row = (f(row, i32(8)) for f in (arith.divui, arith.remui))
            which, token = (f(token, i32(HALF)) for f in (arith.divui, arith.remui))
            start = add(base, times(tile, 16 * columns), times(token, 2))
            asm(
                "{ .reg .b32 zero; mov.b32 zero, 0; st.shared.b32 [$0], $2; st.shared.b32 [$1], zero; }",
                "r,r,r",
                add(start, _eight(row, which)),
                add(start, _eight(row, add(which, 2))),
                word,
            )

    return inline


def send_share(dtype: DTypeLike) -> Inline:
    """Sends values (64, 16), two blocks, to the CTAs that own these."""

    def inline(_: Any, values: Any, staging: Any, there: Any, barrier: Any, first: Any, rank: Any) -> None:
        arith = utils.arith
        base = add(staging, times(first, BLOCK_BYTES))
        for row, token, word in _words(values, dtype):
            block, row = (f(row, i32(FEATURES)) for f in (arith.divui, arith.remui))
            half, column = (f(token, i32(HALF)) for f in (arith.divui, arith.remui))
            sent = _place_sent(row, arith.divui(column, i32(2)))
            place = add(base, times(block, BLOCK_BYTES), times(half, HALF_BYTES), sent)
            asm("st.shared.b32 [$0], $1;", "r,r", place, word)
        utils.commit_shared()
        _send(staging, there, barrier, first, 2, rank, BLOCK_BYTES, BLOCK_BYTES)

    return inline


def sum_up(ctas: int, dtype: DTypeLike) -> Inline:
    """Adds up what all CTAs have sent, bias and what the layer began with, half a block, to be sent."""

    def inline(_: Any, parts: Any, staging: Any, x_t: Any, bias: Any, own: Any, barrier: Any, *rest: Any) -> None:
        element, (rank, half, parity) = utils.dtype_to_ir_type(dtype), rest
        before = add(x_t, _place(half), times(rank, FEATURES * ROW_BYTES))
        terms = [_read(before, element), _read_vector(bias, 0)]
        here = add(staging, times(rank, BLOCK_BYTES))
        wait(barrier, parity)
        terms += _received(ctas, here, parts, rank, half, element)
        _write(add(own, _own_sent(half)), 0, _total(terms), element)

    return inline


def normalise(ctas: int, epsilon: float, dtype: DTypeLike) -> Inline:
    """Normalises the rows that all CTAs have sent, half of the tokens, into `x_t`."""

    def inline(_: Any, rows: Any, own: Any, scale: Any, offset: Any, x_t: Any, barrier: Any, *rest: Any) -> None:
        arith, element, n = utils.arith, utils.dtype_to_ir_type(dtype), ctas * FEATURES
        rank, half, parity = rest
        scales, offsets = ([_read_vector(vector, j) for j in range(ctas)] for vector in (scale, offset))
        there = add(x_t, _place(half))
        blocks = own, rows, rank
        begin = add(_sent_by(0, *blocks), times(half, HALF_BYTES), _place_sent(i32(0), lane_and_warp()[1]))
        wait(barrier, parity)
        # Sums about the first feature, which is within sqrt(n) standard deviations of the mean: both in one go.
        first = _read(begin, element)
        values = [arith.subf(v, first) for v in _received(ctas, *blocks, half, element)]
        squares = [arith.mulf(v, v) for v in values[:2]]
        for j, v in enumerate(values[2:]):
            squares[j % 2] = _math.fma(v, v, squares[j % 2])
        sums = (_total(values), _total(squares))
        mean, square = (arith.mulf(_each(warp_sum, v), _pair(1.0 / n)) for v in sums)
        variance = arith.addf(arith.subf(square, arith.mulf(mean, mean)), _pair(epsilon))
        factor = _each(lambda v: asm("rsqrt.approx.f32 $0, $1;", "=f,f", v, result="f32"), variance)
        shift = arith.negf(arith.mulf(mean, factor))
        for j, v in enumerate(values):
            value = _math.fma(_math.fma(v, factor, shift), scales[j], offsets[j])
            _write(there, j * FEATURES * ROW_BYTES, value, element)

    return inline
