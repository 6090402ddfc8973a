"""What Pallas has no words for: instructions of the GPU, threads, and barriers of a cluster of CTAs."""

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from pallas_models.kernels.common.backend import Backend

utils = Backend("jax.experimental.mosaic.gpu.utils")


def asm(code: str, constraints: str, *operands: Any, result: str = "void") -> Any:
    kind = ir.Type.parse(f"!llvm.{result}" if result == "void" else result)
    return utils.llvm.inline_asm(kind, list(operands), code, constraints, has_side_effects=True)


def i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def add(first: Any, *others: Any) -> Any:
    """The sum of integers."""
    for other in others:
        first = utils.arith.addi(first, i32(other) if isinstance(other, int) else other)
    return first


def times(value: Any, factor: int) -> Any:
    return utils.arith.muli(value, i32(factor))


def item(vector: Any, i: int) -> Any:
    return utils.vector.extract(vector, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def address(ref: Any) -> Any:
    """Where shared memory begins, in bytes."""
    return utils.llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def thread_of_cta() -> Any:
    """The thread's number in its CTA, whose threads are counted along one axis."""
    number = utils.gpu.thread_id(utils.gpu.Dimension.x)
    return utils.arith.index_cast(ir.IntegerType.get_signless(32), number)


def thread() -> Any:
    """The thread's number in its warpgroup."""
    return utils.arith.remui(thread_of_cta(), i32(128))


def lane_and_warp() -> tuple[Any, Any]:
    """The number of the thread in its warp, and of the warp in its warpgroup."""
    number = thread()
    return utils.arith.remui(number, i32(32)), utils.arith.divui(number, i32(32))


def warp_sum(value: Any) -> Any:
    """The sum over the threads of a warp."""
    for distance in (16, 8, 4, 2, 1):
        value = utils.arith.addf(value, utils.shfl_bfly(value, distance))
    return value


# All threads of the cluster wait for one another.
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def start(*barriers: tuple[Any, Sequence[int]]) -> None:
    """Makes barriers of 64 bits; all threads of the cluster wait for one another.

    Args:
      barriers: where arrays of barriers begin, and for how many arrivals each of one is.
    """
    places = [(j, 8 * i, n) for j, (_, arrivals) in enumerate(barriers, start=1) for i, n in enumerate(arrivals)]
    inits = "\n".join(f"@p mbarrier.init.shared::cta.b64 [${j} + {offset}], {n};" for j, offset, n in places)
    asm(
        f"""
        {{
            .reg .pred p;
            setp.eq.u32 p, $0, 0;
            {inits}
            @p fence.mbarrier_init.release.cluster;
            {MEET}
        }}""",
        "r" + ",r" * len(barriers),
        thread_of_cta(),
        *(place for place, _ in barriers),
    )


def meet() -> None:
    """All threads of the cluster wait for one another."""
    asm(MEET, "")


def wait(place: Any, parity: Any) -> None:
    """Waits for a round of the barrier that lies there."""
    asm(
        """
        {
            .reg .pred p;
            WAIT:
            mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
            @p bra DONE;
            bra WAIT;
            DONE:
        }""",
        "r,r",
        place,
        parity,
    )
