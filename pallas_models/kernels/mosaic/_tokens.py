"""Activations of up to 16 tokens in a cluster of CTAs: where they lie, how they are sent, added up and normalised.

Features are rows. For the tensor cores they lie in `x_t`, (N, 32): swizzled rows of 64 bytes, half of which tokens
fill. What is sent are blocks of 32 features, those of a CTA, in two halves of 8 tokens, one for each warpgroup: of
a half every lane has a feature, and every warp two tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir import ir

from pallas_models.kernels._common import Backend
from pallas_models.kernels.mosaic._inline import (
    add,
    address,
    asm,
    i32,
    item,
    lane_and_warp,
    times,
    utils,
    wait,
    warp_sum,
)

_wgmma = Backend("jax.experimental.mosaic.gpu.wgmma")

TOKENS = 16
FEATURES = 32  # of a block
HALF = 8  # tokens
PITCH = 10  # numbers between rows of 8 tokens: as many rows as a warp has lanes lie in different banks
ROW_BYTES = 64  # of x_t
HALF_BYTES = 2 * FEATURES * PITCH
BLOCK_BYTES = 2 * HALF_BYTES

Inline = Callable[..., Any]


def _place(half: Any) -> Any:
    """Where a thread's two tokens of the first block lie in `x_t`, in bytes."""
    arith, (lane, warp) = utils.arith, lane_and_warp()
    chunk = arith.xori(half, arith.andi(arith.shrui(lane, i32(1)), i32(3)))
    return add(times(lane, ROW_BYTES), times(chunk, 16), times(warp, 4))


def _place_sent(half: Any) -> Any:
    """Where they lie in a block that is sent."""
    lane, warp = lane_and_warp()
    return add(times(lane, 2 * PITCH), times(warp, 4), times(half, HALF_BYTES))


def _pair(value: Any) -> Any:
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    value = utils.c(value, ir.F32Type.get()) if isinstance(value, float) else value
    return utils.vector.broadcast(kind, value)


def _each(function: Callable[[Any], Any], pair: Any) -> Any:
    return utils.vector.from_elements(pair.type, [function(item(pair, i)) for i in range(2)])


def _read(place: Any, offset: int, element: Any) -> Any:
    """Two numbers of 16 bits, in float32."""
    word = asm(f"ld.shared.b32 $0, [$1 + {offset}];", "=r,r", place, result="i32")
    word = utils.vector.broadcast(ir.VectorType.get((1,), word.type), word)
    pair = utils.vector.bitcast(ir.VectorType.get((2,), element), word)
    return utils.arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair)


def _write(place: Any, offset: int, pair: Any, element: Any) -> None:
    pair = utils.arith.truncf(ir.VectorType.get((2,), element), pair)
    word = utils.vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), pair)
    asm(f"st.shared.b32 [$0 + {offset}], $1;", "r,r", place, item(word, 0))


def _read_vector(vector: Any, block: int) -> Any:
    """The number of a thread's feature in a block, twice."""
    place = add(address(vector), times(lane_and_warp()[0], 4))
    return _pair(asm(f"ld.shared.f32 $0, [$1 + {4 * FEATURES * block}];", "=f,r", place, result="f32"))


def _total(terms: Sequence[Any]) -> Any:
    while len(terms) > 1:
        pairs = [utils.arith.addf(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, *terms[2 * len(pairs) :]]
    return terms[0]


def expect(size: int) -> Inline:
    """Says how many bytes will arrive in a round of a barrier."""

    def inline(_: Any, barrier: Any) -> None:
        asm(
            f"""
            {{
                .reg .pred p;
                setp.eq.u32 p, $1, 0;
                @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};
            }}""",
            "r,r",
            utils.memref_ptr(barrier),
            utils.thread_idx(),
        )

    return inline


def send(count: int, size: int, stride: int) -> Inline:
    """Sends `size` bytes each to `count` CTAs: `first` and the next, those `step` further, and so on.

    To CTA i goes what lies `i * stride` bytes from the source. A few threads of each warp do it, as a warp issues
    copies one after another.
    """

    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"

    def inline(_: Any, source: Any, there: Any, barrier: Any, first: Any, step: Any) -> None:
        lane, warp = lane_and_warp()
        index = add(warp, times(lane, 4))
        pairs = utils.arith.muli(utils.arith.divui(index, i32(2)), step.registers.item())
        peer = add(first.registers.item(), pairs, utils.arith.remui(index, i32(2)))
        asm(
            f"""
            {{
                .reg .pred p;
                .reg .b32 from, to, bar;
                setp.lt.u32 p, $3, {count};
                mad.lo.u32 from, $4, {stride}, $0;
                @p mapa.shared::cluster.u32 to, $1, $4;
                @p mapa.shared::cluster.u32 bar, $2, $4;
                @p {copy} [to], [from], {size}, [bar];
            }}""",
            "r,r,r,r,r",
            utils.memref_ptr(source),
            utils.memref_ptr(there),
            utils.memref_ptr(barrier),
            index,
            peer,
        )

    return inline


def fetch(tokens: int, n: int) -> Inline:
    """Copies x (tokens, n) into `x_t`, and zeros beside it: what products give for those must be finite."""

    def inline(_: Any, x: Any, x_t: Any, half: Any) -> None:
        half, (lane, warp) = half.registers.item(), lane_and_warp()
        token = add(times(half, HALF), times(warp, 2))
        place, beside = (add(address(x_t), _place(add(half, more))) for more in (0, 2))
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

    def inline(_: Any, x_t: Any, o: Any, block: Any, half: Any) -> None:
        block, half, (lane, warp) = block.registers.item(), half.registers.item(), lane_and_warp()
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
            add(address(x_t), _place(half), times(block, FEATURES * ROW_BYTES)),
            token,
        )

    return inline


def multiply(flipped: bool, depth: int, height: int, width: int) -> Inline:
    """Adds to each of `width` sums (64, 32) products of `depth` slots of weights, transposed, by `right`.

    Pallas cannot say that 64 columns lie in two parts of 32.

    Args:
      flipped: whether `right` is tokens by features.
      height: of a slot.
    """

    def inline(_: Any, right: Any, weights: Any, part: Any, *rest: Any) -> Any:
        index, results = ir.IndexType.get(), []
        first, *slots = (utils.arith.index_cast(index, x.registers.item()) for x in (part, *rest[: depth * width]))
        for j in range(width):
            accumulator = _wgmma.WGMMAAccumulator.from_registers(rest[depth * width + j])
            for i in range(depth):
                # Tiles of 8 rows: (2, K / 8, 8, 32), and (K / 8, 1, 8, 32) or (32 / 8, 1, 8, 32).
                parts = (slots[j * depth + i], utils.ds(first, 2), slice(0, height // 8), 0)
                left = utils.memref_transpose(utils.memref_slice(weights, parts), (0, 1, 3, 2))
                if flipped:
                    there = utils.memref_transpose(right, (1, 0, 3, 2))
                else:
                    there = utils.memref_slice(right, (utils.ds(utils.c(i * height // 8, index), height // 8),))
                accumulator = _wgmma.wgmma(accumulator, left, there, swizzle=ROW_BYTES)
            results.append(accumulator)
        utils.nvvm.wgmma_commit_group_sync_aligned()
        utils.nvvm.wgmma_wait_group_sync_aligned(0)
        values = [accumulator.value for accumulator in results]
        return values if width > 1 else values[0]

    return inline


def stage(_: Any, values: Any, staging: Any, block: Any) -> None:
    """Stores values (64, 32), those of 16 tokens, in two blocks to be sent."""
    arith, word_type = utils.arith, ir.IntegerType.get_signless(32)
    values = values.astype(staging.type.element_type)
    base = add(address(staging), times(block.registers.item(), BLOCK_BYTES))
    for index, register in zip(values.layout.thread_idxs(values.shape), values.registers.flat, strict=True):
        row, token = (arith.index_cast(word_type, x) for x in index)
        block, row = arith.divui(row, i32(FEATURES)), arith.remui(row, i32(FEATURES))
        half, column = arith.divui(token, i32(HALF)), arith.remui(token, i32(HALF))
        place = add(
            base, times(block, BLOCK_BYTES), times(half, HALF_BYTES), times(row, 2 * PITCH), times(column, 2)
        )
        word = item(utils.vector.bitcast(ir.VectorType.get((1,), word_type), register), 0)
        asm(
            f"{{ .reg .pred p; setp.lt.u32 p, $2, {TOKENS}; @p st.shared.b32 [$0], $1; }}",
            "r,r,r",
            place,
            word,
            token,
        )


def sum_up(ctas: int) -> Inline:
    """Adds up what all CTAs have sent, bias and what the layer began with, half a block, to be sent."""

    def inline(
        _: Any, parts: Any, x_t: Any, bias: Any, own: Any, barrier: Any, rank: Any, half: Any, parity: Any
    ) -> None:
        element, rank, half = x_t.type.element_type, rank.registers.item(), half.registers.item()
        before = add(address(x_t), _place(half), times(rank, FEATURES * ROW_BYTES))
        terms = [_read(before, 0, element), _read_vector(bias, 0)]
        wait(barrier, parity)
        place = add(address(parts), _place_sent(half))
        terms += [_read(place, BLOCK_BYTES * j, element) for j in range(ctas)]
        _write(add(address(own), _place_sent(half)), 0, _total(terms), element)

    return inline


def normalise(ctas: int, epsilon: float) -> Inline:
    """Normalises the rows that all CTAs have sent, half of the tokens, into `x_t`."""

    def inline(_: Any, rows: Any, scale: Any, offset: Any, x_t: Any, barrier: Any, half: Any, parity: Any) -> None:
        arith, element, n, half = utils.arith, x_t.type.element_type, ctas * FEATURES, half.registers.item()
        scales, offsets = ([_read_vector(vector, j) for j in range(ctas)] for vector in (scale, offset))
        place, there = add(address(rows), _place_sent(half)), add(address(x_t), _place(half))
        wait(barrier, parity)
        values = [_read(place, BLOCK_BYTES * j, element) for j in range(ctas)]
        # Squares about what is near the mean, that of the first lane's features: both sums in one go.
        near = arith.mulf(_total(values), _pair(1.0 / ctas))
        near = _each(lambda v: asm("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=f,f", v, result="f32"), near)
        values = [arith.subf(v, near) for v in values]
        sums = (_total(values), _total([arith.mulf(v, v) for v in values]))
        mean, square = (arith.mulf(_each(warp_sum, v), _pair(1.0 / n)) for v in sums)
        variance = arith.addf(arith.subf(square, arith.mulf(mean, mean)), _pair(epsilon))
        factor = _each(lambda v: asm("rsqrt.approx.f32 $0, $1;", "=f,f", v, result="f32"), variance)
        for j, value in enumerate(values):
            value = arith.mulf(arith.mulf(arith.subf(value, mean), factor), scales[j])
            _write(there, j * FEATURES * ROW_BYTES, arith.addf(value, offsets[j]), element)

    return inline
