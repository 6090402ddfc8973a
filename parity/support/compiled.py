"""`python -m parity compiled`: writes docs/compiled.md, what the kernels take of GPUs that are not here.

Every op is compiled for a GPU of each generation with the configs that it has by default, forward and with its
gradient, in both backends where they serve the GPU: ptxas tells the registers, bytes spilled and shared memory.
No GPU is needed; the CUDA plugin of JAX is: `pip install jax[cuda13]`. Results are kept in a folder. A run that
was cut off goes on there; once kernels have changed, name a new folder. The exit code is 1 if a program does not
compile, a kernel spills registers that the exceptions here do not name, or asks for more shared memory than there
is.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_models import files
from parity import COMPILES_ALONE, ROOT
from parity.support.compiling import GENERATIONS, Program, Resources, programs, read
from parity.support.support_matrix import line, replaced

PAGE = ROOT / "docs" / "compiled.md"
BEGIN, END = "<!-- compiled -->\n", "<!-- /compiled -->\n"
_SPILLING = "\nThese spill registers:\n\n"

Row = tuple[str, str, str, str]  # op, kernel, backend, dtype


@dataclasses.dataclass(frozen=True)
class Spills:
    """A kernel that may spill registers: of which architectures, up to how many bytes a thread, and why."""

    kernel: str
    backend: str
    dtype: str
    generations: tuple[str, ...]
    most: int
    reason: str

    def covers(self, row: Row, generation: str, spills: int) -> bool:
        """Whether a kernel that spills so many bytes is this one."""
        named = row[1:] == (self.kernel, self.backend, self.dtype) and generation in self.generations
        return named and spills <= self.most


_HOPPER = ("sm_90",)
_KEPT = "kept as it runs on an H200: other blocks are to be measured there first"
_HOPPER_SPILLS = (
    ("attention", "triton", "bfloat16", 136),
    ("attention", "triton", "float32", 2788),
    ("attention_backward", "mosaic", "bfloat16", 104),
    ("keys_kernel", "triton", "bfloat16", 832),
    ("keys_kernel", "triton", "float32", 4144),
    ("layer_norm_gated_mlp_backward", "mosaic", "bfloat16", 1016),
    ("layer_norm_projections_backward", "mosaic", "bfloat16", 40),
    ("mean_pool", "triton", "float32", 8448),
    ("queries_kernel", "triton", "float32", 2500),
    ("triangle_attention_backward_keys", "mosaic", "bfloat16", 32),
    ("triangle_attention_backward_queries", "mosaic", "bfloat16", 576),
    ("trimul_output", "triton", "bfloat16", 604),
    ("trimul_output", "triton", "float32", 21392),
    ("trimul_output_backward", "mosaic", "bfloat16", 300),
    ("trimul_output_backward", "triton", "bfloat16", 272),
    ("trimul_output_backward", "triton", "float32", 41712),
    ("trimul_project_backward", "triton", "bfloat16", 2012),
    ("trimul_weights_backward", "mosaic", "bfloat16", 148),
    ("trimul_weights_backward", "triton", "bfloat16", 824),
)
EXCEPTIONS = (
    *(Spills(kernel, backend, dtype, _HOPPER, most, _KEPT) for kernel, backend, dtype, most in _HOPPER_SPILLS),
    Spills(
        "softmax",
        "mosaic",
        "bfloat16",
        ("sm_80", "sm_86", "sm_89", "sm_100"),
        32,
        "only where a call names Mosaic; 1,024 threads have 64 registers each",
    ),
    Spills(
        "trimul_output_backward",
        "triton",
        "bfloat16",
        ("sm_86", "sm_89", "sm_120"),
        44,
        "the fewest positions a step, with the weights and the sums of their gradient in registers",
    ),
    Spills(
        "matmul",
        "triton",
        "float32",
        ("sm_86", "sm_89"),
        32,
        "few rows of many columns, as of biases with the heads first, in float32",
    ),
)


def compile_all(folder: Path, workers: int, only: str) -> None:
    """Compiles in one process for each generation, and in a new one where a compiler ended it."""
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(functools.partial(_compile, folder, only), GENERATIONS))


def _compile(folder: Path, only: str, generation: str) -> None:
    results = folder / f"{generation}.jsonl"
    # A GPU that there is would be the one that kernels are lowered for.
    environment = os.environ | COMPILES_ALONE
    command = [sys.executable, "-m", "parity.support.compiling", generation, str(results), only]
    while True:
        before = len(read(results))
        with (folder / f"{generation}.log").open("a", encoding="utf-8") as log:
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
        if status.returncode == 0:
            return
        if len(read(results)) == before:
            raise RuntimeError(f"nothing was compiled for {generation}; see {folder / generation}.log")


def taken(folder: Path) -> tuple[dict[Row, dict[str, Resources]], list[str]]:
    """The most that each kernel takes in any call, by generation; and a line for each program that has failed."""
    rows: dict[Row, dict[str, Resources]] = collections.defaultdict(dict)
    failed = []
    for generation in GENERATIONS:
        for name, outcome in read(folder / f"{generation}.jsonl").items():
            program = Program(*name.split("/"))
            if "kernels" not in outcome and "refused" not in outcome:
                failed.append(f"{generation}, {name}: {outcome.get('failed', 'the compiler ended the process')}")
            for kernel in (Resources(**x) for x in outcome.get("kernels", ())):
                row = (program.op, kernel.kernel, kernel.backend, program.dtype)
                rows[row][generation] = _most(rows[row].get(generation, kernel), kernel)
    return dict(sorted(rows.items())), failed


def _most(a: Resources, b: Resources) -> Resources:
    numbers = ("registers", "spills", "shared_memory")
    return dataclasses.replace(a, **{name: max(getattr(a, name), getattr(b, name)) for name in numbers})


def problems(rows: Mapping[Row, Mapping[str, Resources]]) -> Iterator[str]:
    """A line for each kernel that spills registers unnamed or does not fit, and each exception that names none."""
    unused = {(one, generation) for one in EXCEPTIONS for generation in one.generations}
    for row, by_generation in rows.items():
        for generation, found in by_generation.items():
            covering = [x for x in EXCEPTIONS if found.spills and x.covers(row, generation, found.spills)]
            unused.difference_update((x, generation) for x in covering)
            if found.spills and not covering:
                yield f"{generation}, {' '.join(row)}: spills {found.spills} bytes"
            most = GENERATIONS[generation].shared_memory
            if found.shared_memory > most:
                yield f"{generation}, {' '.join(row)}: {found.shared_memory} bytes of shared memory, of {most}"
    yield from (f"{generation}: no kernel spills as the exceptions say: {one}" for one, generation in unused)


def cells(row: Row, by_generation: Mapping[str, Resources]) -> Iterator[str]:
    """The cells of a kernel."""
    op, kernel, backend, dtype = row
    yield from (f"`{op}`", f"`{kernel}`", backend, dtype)
    for generation in GENERATIONS:
        found = by_generation.get(generation)
        yield "-" if found is None else f"{found.registers} / {found.spills} / {found.shared_memory}"


def parsed(text: str) -> dict[Row, dict[str, Resources]]:
    """The kernels of the page's table."""
    rows: dict[Row, dict[str, Any]] = {}
    for found in re.findall(r"^\| (`.*) \|$", text.partition(BEGIN)[2].partition(_SPILLING)[0], re.MULTILINE):
        op, kernel, backend, dtype, *taken = (cell.strip("`") for cell in found.split(" | "))
        rows[op, kernel, backend, dtype] = {
            generation: Resources(kernel, backend, *map(int, cell.split(" / ")))
            for generation, cell in zip(GENERATIONS, taken, strict=True)
            if cell != "-"
        }
    return rows


def counts(done: Mapping[str, int]) -> str:
    """How many of the programs the table is of, in words, from how many each generation has."""
    each = ", ".join(f"{number} for {generation}" for generation, number in done.items())
    return f"Of {sum(1 for _ in programs())} programs the table has {each}."


def page(rows: Mapping[Row, Mapping[str, Resources]], failed: Sequence[str] = (), counted: str = "") -> str:
    """The text of docs/compiled.md with a table, what did not compile and what the table is of."""
    heads = [f"{generation}, {gpu.name.removeprefix('NVIDIA ')}" for generation, gpu in GENERATIONS.items()]
    table = [("operation", "kernel", "backend", "dtype", *heads), ("---",) * (len(heads) + 4)]
    table += [tuple(cells(row, by_generation)) for row, by_generation in rows.items()]
    exceptions = [("kernel", "backend", "dtype", "for", "bytes at most", "why"), ("---",) * 6]
    exceptions += [
        (f"`{x.kernel}`", x.backend, x.dtype, ", ".join(x.generations), str(x.most), x.reason) for x in EXCEPTIONS
    ]
    text = f"{_lines(table)}{_SPILLING}{_lines(exceptions)}"
    if failed:
        text += "\nThese do not compile:\n\n" + "".join(f"- {one}\n" for one in failed)
    text += f"\n{counted}\n" if counted else ""
    return replaced(PAGE.read_text("utf-8"), (BEGIN, END), text)


def _lines(table: Iterable[Sequence[str]]) -> str:
    return "".join(line(cell.replace("|", "\\|") for cell in row) for row in table)


def main(arguments: Sequence[str]) -> int:
    """Compiles and writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m parity compiled", description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="the page")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "compiled", metavar="FOLDER", help="kept between runs"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes at a time (2)")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="programs whose names have it; with --output"
    )
    args = parser.parse_args(arguments)
    if args.only and args.output == PAGE:
        parser.error(f"--only needs --output: {PAGE.relative_to(ROOT)} is of all programs")
    compile_all(args.results, args.workers, args.only)
    rows, failed = taken(args.results)
    done = {generation: len(read(args.results / f"{generation}.jsonl")) for generation in GENERATIONS}
    files.write(args.output, page(rows, failed, counts(done)))
    found = [*failed, *problems(rows)]
    print(*found, f"{len(rows)} kernels, {len(found)} problems", sep="\n")
    return int(bool(found))
