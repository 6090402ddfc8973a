"""Instructions of a GPU that copy weights and activations to and from shared memory, and that multiply them.

They are for the primitives of `cluster_exchange.py`, whose activations lie as `cluster_exchange_ptx.py` says.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Backend
from pallas_models.kernels.mosaic.common.cluster_exchange_ptx import (
    BARRIER_BYTES,
    FEATURES,
    HALF,
    ROW_BYTES,
    TOKENS,
    Inline,
    place_of_eight,
    place_of_tokens,
    words,
)
from pallas_models.kernels.mosaic.common.ptx import (
    add,
    asm,
    i32,
    lane_and_warp,
    thread,
    times,
    utils,
    wait,
)

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")
_mma = Backend("jax.experimental.mosaic.gpu.mma_utils")
_wgmma = Backend("jax.experimental.mosaic.gpu.wgmma")

_MEETING = 8  # a barrier of threads; Mosaic uses the first ones, one for each warpgroup


def _chosen(values: Sequence[Any], index: Any) -> Any:
    """The value of that index."""
    arith, found = utils.arith, values[0]
    for i, value in enumerate(values[1:], start=1):
        found = arith.select(arith.cmpi(arith.CmpIPredicate.eq, index, i32(i)), value, found)
    return found


def fetch_tiles(tile: tuple[int, int], parts: int, apart: int, place: int) -> Inline:
    """A thread copies tiles of one of several matrices, and says at a barrier how many bytes will arrive.

    Mosaic's own copies are of arrays that are known when a kernel is compiled: one for each layer took most of the
    time to compile.

    Args:
      parts: how many tiles, in a row.
      apart: columns from one to the next.
      place: bytes from one tile to the next in shared memory.
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
    """A thread copies pieces of vectors of a layer, and says at a barrier how many bytes will arrive.

    Args:
      layers: how many there are: each vector is given for all of them.
      names: the index of the vector of each piece.
      offsets: where each piece begins in shared memory.
      lengths: how long each piece is.
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
    """Copies x (tokens, n) into `x_t`, and zeros beside it, so that products with these are finite."""

    def inline(_: Any, x: Any, x_t: Any, half: Any) -> None:
        lane, warp = lane_and_warp()
        token = add(times(half, HALF), times(warp, 2))
        place, beside = (add(x_t, place_of_tokens(add(half, more))) for more in (0, 2))
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
            add(x_t, place_of_tokens(half), times(block, FEATURES * ROW_BYTES)),
            token,
        )

    return inline


def meet(warpgroups: int) -> Inline:
    """Warpgroups wait for one another; copies and tensor cores then see their stores."""

    def inline(_: Any) -> None:
        asm(f"fence.proxy.async.shared::cta; bar.sync {_MEETING}, {128 * warpgroups};", "")

    return inline


def _add_product(registers: Any, left: Any, right: Any) -> Any:
    """Adds to sums (64, 16) the product of left (64, K) and of the first 16 columns of right (K, 32).

    Pallas would multiply all 32 columns, in twice the time.
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
      depth: how many slots it waits for and multiplies.
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


def put(columns: int, dtype: DTypeLike) -> Inline:
    """Stores values (64, 16) in rows of shared memory (rows, columns), and zeros in the next 16 columns."""

    def inline(_: Any, values: Any, there: Any, first: Any) -> None:
        arith = utils.arith
        base = add(there, times(first, 2 * columns))
        for row, token, word in words(values, dtype):
            tile, row = (f(row, i32(8)) for f in (arith.divui, arith.remui))
            which, token = (f(token, i32(HALF)) for f in (arith.divui, arith.remui))
            start = add(base, times(tile, 16 * columns), times(token, 2))
            asm(
                "{ .reg .b32 zero; mov.b32 zero, 0; st.shared.b32 [$0], $2; st.shared.b32 [$1], zero; }",
                "r,r,r",
                add(start, place_of_eight(row, which)),
                add(start, place_of_eight(row, add(which, 2))),
                word,
            )

    return inline
