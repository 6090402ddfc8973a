"""How fast a case could be: the least time that its work takes at the rates measured in the same run."""

import dataclasses
from collections.abc import Mapping

from bench.measuring.results import Case
from bench.measuring.timing import Timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of a case.

    Attributes:
      us: in microseconds.
      by: which rate sets it: "matmul", of matrix products, or "memory", of copies.
    """

    us: float
    by: str


def floors(case: Case, ceilings: Mapping[str, float]) -> dict[str, float]:
    """The least microseconds that a case takes at the measured rates, by what limits it.

    The rate of matrix products is measured in bfloat16: no floor is known of float32 products.
    """
    found = {}
    matmul, copy = ceilings.get("matmul_bf16_tflop_per_s"), ceilings.get("copy_tb_per_s")
    if case.flop and (case.products or case.dtype) == "fp32":
        return {}
    if case.flop and matmul:
        found["matmul"] = case.flop / matmul / 1e6
    if case.bytes and copy:
        found["memory"] = case.bytes / copy / 1e6
    return found


def floor(case: Case, ceilings: Mapping[str, float]) -> Floor | None:
    """The higher of the floors of a case; None where neither is known."""
    found = floors(case, ceilings)
    by = max(found, key=found.__getitem__, default="")
    return Floor(us=found[by], by=by) if found else None


def intensity(case: Case) -> float | None:
    """Floating-point operations a byte; None where either is not counted."""
    return case.flop / case.bytes if case.flop and case.bytes else None


def share(case: Case, ceilings: Mapping[str, float], time: Timing | None) -> float | None:
    """How much of the ceiling a device time reaches: the floor over it."""
    least = floor(case, ceilings)
    return least.us / time.median_us if least and time else None


def rate(case: Case, ceilings: Mapping[str, float], time: Timing) -> str:
    """The rate of a case that takes `time`: of memory where memory is the limit or alone counted, else of flop."""
    least = floor(case, ceilings)
    if case.bytes and (not case.flop or (least is not None and least.by == "memory")):
        return f"{case.bytes / time.median_us / 1e6:.3g} TB/s"
    return f"{case.flop / time.median_us / 1e6:.3g} TFLOP/s" if case.flop else "-"
