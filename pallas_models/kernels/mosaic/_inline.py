"""What Pallas has no words for: instructions of the GPU, threads, and barriers of a cluster of CTAs."""

from typing import Any

from jax.extend.mlir import ir

from pallas_models.kernels._common import Backend

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


def thread() -> Any:
    """The thread's number in its warpgroup."""
    return utils.arith.remui(utils.thread_idx(), i32(128))


def lane_and_warp() -> tuple[Any, Any]:
    """The thread's number in its warp, and that of the warp in its warpgroup."""
    return utils.arith.remui(thread(), i32(32)), utils.arith.divui(thread(), i32(32))


def warp_sum(value: Any) -> Any:
    """The sum over the threads of a warp."""
    for distance in (16, 8, 4, 2, 1):
        value = utils.arith.addf(value, utils.shfl_bfly(value, distance))
    return value


# All threads of the cluster wait for one another.
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def start(barriers: Any, *arrivals: int) -> None:
    """Makes barriers of 64 bits for so many arrivals each; all threads of the cluster wait for one another."""
    inits = "\n".join(f"@p mbarrier.init.shared::cta.b64 [$0 + {8 * i}], {n};" for i, n in enumerate(arrivals))
    asm(
        f"""
        {{
            .reg .pred p;
            setp.eq.u32 p, $1, 0;
            {inits}
            @p fence.mbarrier_init.release.cluster;
            {MEET}
        }}""",
        "r,r",
        utils.memref_ptr(barriers),
        utils.thread_idx(),
    )


def meet() -> None:
    """All threads of the cluster wait for one another."""
    asm(MEET, "")


def wait(barrier: Any, parity: Any) -> None:
    """Waits for a round of a barrier."""
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
        utils.memref_ptr(barrier),
        parity.registers.item(),
    )
