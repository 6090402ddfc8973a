"""`python -m parity support`: writes the tables of docs/support.md, which kernels serve which op on which GPUs.

Each op is called at a size of real use and lowered for a GPU of each generation, as its records choose: the tables
say what the lowered programs hold, forward and with the gradient. The second is of a JAX without Triton.
"""

import argparse
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import files
from parity import ROOT
from parity.cases import OPS, Case, Without
from parity.support.common import MOSAIC_CALL, TRITON_CALL, cuda_device, without_triton
from parity.support.lowered import squares

PAGE = ROOT / "docs" / "support.md"
GENERATIONS = {
    "Hopper": ("NVIDIA H200", 132),
    "Ampere, Ada": ("NVIDIA A100-SXM4-80GB", 108),
    "Blackwell": ("NVIDIA B200", 148),
}
DTYPES = ("bfloat16", "float16", "float32")

BEGIN, END = "<!-- support -->\n", "<!-- /support -->\n"
BEGIN_WITHOUT, END_WITHOUT = "<!-- without triton -->\n", "<!-- /without triton -->\n"


def call_of(case: Case, dtype: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A function of the arrays of a call at a size of real use, or of a small one, and the arrays."""
    if not isinstance(case.large, Without):
        arguments: Mapping[str, Any] = next(iter(case.large.values()))(dtype)
        arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape")}
        static = {name: x for name, x in arguments.items() if name not in arrays}
        return lambda *given: case.op(**dict(zip(arrays, given, strict=True)), **static), tuple(arrays.values())
    if isinstance(case.calls, Without):
        return None
    call = case.calls[0]
    return call(None), call.arrays(dtype, 16)


def gradient(function: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
    """The gradient of a function by its floating arrays."""
    return jax.grad(
        squares(function), tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    )


def kernels(function: Callable[..., Any], arrays: Sequence[Any], device: tuple[str, int]) -> str:
    """Whose kernels the program of a call holds on a GPU."""
    with cuda_device(*device):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    found = [name for name, target in (("Mosaic", MOSAIC_CALL), ("Triton", TRITON_CALL)) if target in text]
    return ", ".join(found) or "XLA"


def cell(by_dtype: Mapping[str, str]) -> str:
    """The kernels of all dtypes in one cell."""
    groups = collections.defaultdict(list)
    for dtype, found in by_dtype.items():
        groups[found].append(dtype)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{found} ({', '.join(dtypes)})" for found, dtypes in groups.items())


def split(case: Case) -> str:
    """The axes over which an op can be split, as the suite's calls over devices name them."""
    if isinstance(case.spread, Without):
        return "-"
    return ", ".join(dict.fromkeys(call.call.name for call in case.spread(np.random.default_rng(0))))


def rows(cases: Iterable[Case] = OPS.values()) -> Iterator[tuple[str, ...]]:
    """The cells of each op: its name, forward and gradient by generation, and the axes that can be split."""
    for case in cases:
        if found := cells(case):
            yield f"`{case.name}`", *found, split(case)


def rows_without_triton(cases: Iterable[Case] = OPS.values()) -> Iterator[tuple[str, ...]]:
    """The cells of each op where JAX has no Triton: its name, forward and gradient by generation."""
    for case in cases:
        with without_triton():
            found = cells(case)
        if found:
            yield f"`{case.name}`", *found


def cells(case: Case) -> list[str]:
    """Whose kernels an op has by generation, forward and with the gradient; none for one that cannot be called."""
    calls = {dtype: call for dtype in DTYPES if (call := call_of(case, dtype))}
    found = []
    for device in GENERATIONS.values() if calls else ():
        for of in (lambda function, _: function, gradient):
            found.append(cell({dtype: kernels(of(*call), call[1], device) for dtype, call in calls.items()}))
    return found


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """The text of docs/support.md with the tables of now."""
    columns = ["operation", *(f"{name}, {way}" for name in GENERATIONS for way in ("forward", "with gradient"))]
    text = replaced(PAGE.read_text("utf-8"), (BEGIN, END), _table([*columns, "split"], rows()))
    return replaced(text, (BEGIN_WITHOUT, END_WITHOUT), _table(columns, rows_without_triton()))


def _table(columns: Sequence[str], found: Iterable[Sequence[str]]) -> str:
    return "".join(map(line, [columns, ["---"] * len(columns), *found]))


def replaced(text: str, marks: tuple[str, str], inside: str) -> str:
    """A text with something else between two marks."""
    begin, end = marks
    before, _, rest = text.partition(begin)
    return before + begin + inside + end + rest.partition(end)[2]


def main(arguments: Sequence[str]) -> int:
    """Writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m parity support", description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="the page")
    args = parser.parse_args(arguments)
    files.write(args.output, page())
    return 0
