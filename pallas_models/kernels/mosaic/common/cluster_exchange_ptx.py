"""Instructions of a GPU for the primitives of `cluster_exchange.py`, and where activations lie in shared memory.

Features are rows. For the tensor cores they lie in `x_t`, (N, 32): swizzled rows of 64 bytes, half of which tokens
fill. CTAs send blocks of 32 features, in two halves of 8 tokens, one for each warpgroup: every lane has a feature
of a half, and every warp two tokens. A CTA sends nothing to itself.

Arrays in shared memory are given by their places, where they begin in bytes: for each reference that Mosaic sees,
JAX 0.11's inference of layouts has MLIR check and number the whole kernel.
"""

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

TOKENS = 16
FEATURES = 32  # of a block
HALF = 8  # tokens
ROW_BYTES = 64  # of x_t
HALF_BYTES = 2 * FEATURES * HALF
BLOCK_BYTES = 2 * HALF_BYTES
BARRIER_BYTES = 8

Inline = Callable[..., Any]


def place_of_eight(row: Any, which: Any) -> Any:
    """Where eight tokens of a swizzled row lie, in bytes."""
    arith = utils.arith
    return add(times(row, ROW_BYTES), times(arith.xori(which, arith.andi(arith.shrui(row, i32(1)), i32(3))), 16))


def place_of_tokens(half: Any) -> Any:
    """Where a thread's two tokens of the first block lie in `x_t`, in bytes."""
    lane, warp = lane_and_warp()
    return add(place_of_eight(lane, half), times(warp, 4))


def _place_sent(row: Any, word: Any) -> Any:
    """Where two tokens of a feature lie in half a block: the words that a warp reads are in different banks."""
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
    """The numbers that a thread has received, of each CTA."""
    place = _own_sent(half)
    return [_read(add(_sent_by(j, own, theirs, rank), place), element) for j in range(ctas)]


def expect(ctas: int) -> Inline:
    """A warpgroup arrives at a barrier and says that half a block of each other CTA will arrive in this round."""

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
    """Makes barriers of the first references, for so many arrivals each; gives the places of all references."""

    def inline(_: Any, *shared: Any) -> list[Any]:
        places = [address(ref) for ref in shared]
        ptx.start(*zip(places, arrivals, strict=False))
        return [_arrays.FragmentedArray.splat(place, (), is_signed=True) for place in places]

    return inline


def wait_for(_: Any, barrier: Any, parity: Any) -> None:
    """Waits for a round of a barrier."""
    wait(barrier, parity)


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


def words(values: Any, dtype: DTypeLike) -> Any:
    """Row, token and both numbers of each pair of values (64, 16) that a thread has, in half precision."""
    values, word = values.astype(utils.dtype_to_ir_type(dtype)), ir.IntegerType.get_signless(32)
    for index, register in zip(values.layout.thread_idxs(values.shape), values.registers.flat, strict=True):
        row, token = (utils.arith.index_cast(word, x) for x in index)
        yield row, token, item(utils.vector.bitcast(ir.VectorType.get((1,), word), register), 0)


def send_share(dtype: DTypeLike) -> Inline:
    """Sends values (64, 16), two blocks, to the CTAs that own these."""

    def inline(_: Any, values: Any, staging: Any, there: Any, barrier: Any, first: Any, rank: Any) -> None:
        arith = utils.arith
        base = add(staging, times(first, BLOCK_BYTES))
        for row, token, word in words(values, dtype):
            block, row = (f(row, i32(FEATURES)) for f in (arith.divui, arith.remui))
            half, column = (f(token, i32(HALF)) for f in (arith.divui, arith.remui))
            sent = _place_sent(row, arith.divui(column, i32(2)))
            place = add(base, times(block, BLOCK_BYTES), times(half, HALF_BYTES), sent)
            asm("st.shared.b32 [$0], $1;", "r,r", place, word)
        utils.commit_shared()
        _send(staging, there, barrier, first, 2, rank, BLOCK_BYTES, BLOCK_BYTES)

    return inline


def sum_up(ctas: int, dtype: DTypeLike) -> Inline:
    """Adds up the parts that all CTAs have sent, bias and residual, half a block, for `send_rows`."""

    def inline(_: Any, parts: Any, staging: Any, x_t: Any, bias: Any, own: Any, barrier: Any, *rest: Any) -> None:
        element, (rank, half, parity) = utils.dtype_to_ir_type(dtype), rest
        before = add(x_t, place_of_tokens(half), times(rank, FEATURES * ROW_BYTES))
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
        there = add(x_t, place_of_tokens(half))
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
