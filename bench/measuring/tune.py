"""Measures the tile configs of an op for given shapes and keeps the fastest in a table, or shows such a table.

Configs go to the user's own table, which every op looks into (`pallas_models.tuning`), or to --output. A config is
kept only where it beats the heuristic's config by more than the noise; if it does not hold for three
quarters of the rows as well, then for its own shape only.
"""

import argparse
import dataclasses
import importlib
import pkgutil
import sys
import time
from pathlib import Path

import jax

from bench import cases
from bench.measuring import environment
from bench.measuring.harness import parse_dtypes, shape_text
from bench.measuring.tunable import Sizes, Tunable
from bench.reporting import tables
from pallas_models import tuning

HELP = "find the fastest tile configs of an op, or show a table of them"


def found() -> dict[str, Tunable]:
    """The `TUNABLES` of all modules of `bench.cases`, by name."""
    tunables: dict[str, Tunable] = {}
    for module in pkgutil.iter_modules(cases.__path__):
        tunables |= getattr(importlib.import_module(f"{cases.__name__}.{module.name}"), "TUNABLES", {})
    return dict(sorted(tunables.items()))


TUNABLES = found()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench tune`."""
    parser.add_argument("op", nargs="?", metavar="OP", help=f"some of {','.join(TUNABLES)}, or all")
    parser.add_argument("--shape", help="e.g. 8192x1152x384,1024x2304x768; some that are common if not given")
    parser.add_argument("--dtype", type=parse_dtypes, help="fp32, fp16, bf16 or all; the usual one of the op")
    parser.add_argument("--output", type=Path, help="the table to add to; your own, which every op looks into")
    parser.add_argument("--seconds", type=float, metavar="S", help="limit of the search for one shape")
    parser.add_argument("--trials", action="store_true", help="print the fastest configs of each shape")
    parser.add_argument(
        "--show", nargs="?", const="", metavar="TABLE", help="only show a table; those that ship if not named"
    )


def show(table: tuning.Table) -> str:
    """A table for people: how far the heuristic is from the fastest config, shape by shape."""
    header = [
        "kernel",
        "backend",
        "dtype",
        "shape",
        "heuristic, us",
        "tuned, us",
        "heuristic / tuned",
        "tuned config",
    ]
    rows = []
    for entry in table.entries:
        config = "heuristic's" if entry.config is None else ", ".join(f"{k} {v}" for k, v in entry.config.items())
        shape = " ".join(f"{axis}{size}" for axis, size in entry.shape.items())
        times = f"{entry.heuristic_us:.2f}", f"{entry.us:.2f}", f"{entry.speedup:.3f}"
        rows.append([entry.op, entry.backend, entry.dtype, shape, *times, config])
    if not rows:
        return f"{table.path}: no entries"
    mean = tables.geometric_mean([entry.speedup for entry in table.entries])
    return f"{tables.markdown(header, rows)}\n\n{table.gpu}, geometric mean {mean:.3f}, from {table.path}"


def tune(tunable: Tunable, shape: Sizes, dtype: str, seconds: float | None) -> tuple[tuning.Result, tuning.Entry]:
    """Tunes an op for a shape; the entry is for this shape only if the config does not hold for a smaller one."""
    fn, args, options = tunable.call(dtype, *shape)
    result = tuning.autotune(fn, *args, op=tunable.kernel, seconds=seconds, **options)
    entry = result.entry
    if entry.config is None:
        return result, entry
    fn, args, options = tunable.call(dtype, *tunable.smaller(shape))
    near = tuning.autotune(fn, *args, op=tunable.kernel, candidates=[result.config], **options)
    if any(trial.failure or near.heuristic.is_faster(trial) for trial in near.trials):
        entry = dataclasses.replace(entry, bucketed=())
    return result, entry


def run(args: argparse.Namespace) -> int:
    """Tunes or shows; returns 1 if tuning failed for a shape, 2 if there is nothing that can be done."""
    try:
        if args.show is not None:
            shipped = sorted(tuning.shipped_path("").parent.glob("*.json"))
            print("\n\n".join(show(tuning.Table.load(path)) for path in ([args.show] if args.show else shipped)))
            return 0
        work = plan(args)
        if not environment.has_gpu():
            raise ValueError("tuning times kernels on an NVIDIA GPU; JAX finds none (--show works without)")
        gpu = jax.devices("cuda")[0].device_kind
        path = args.output or tuning.cache_path(gpu)
        table = tuning.Table.load(path) if path.exists() else tuning.Table(gpu=gpu)
        if table.gpu != gpu:
            raise ValueError(f"{path} is for {table.gpu}; this is {gpu}")
    except ValueError as error:  # a TableError among others
        print(error, file=sys.stderr)
        return 2
    failed = []
    started = time.monotonic()
    for number, (op, shape, dtype) in enumerate(work, start=1):
        label = f"{op} {shape_text(shape)} {dtype}"
        print(f"[{number}/{len(work)}] {label}: ", end="", flush=True)
        try:
            result, entry = tune(TUNABLES[op], shape, dtype, args.seconds)
        except Exception as error:  # one shape that fails stops no other
            failed.append(label)
            print(f"FAILED: {type(error).__name__}: {error}")
            continue
        table = table.updated(entry)
        table.save(path)
        left = (time.monotonic() - started) / number * (len(work) - number)
        print(f"{outcome(result, entry)}; about {left:.0f} s left", flush=True)
        if args.trials:
            print(result.summary())
    print(f"{time.monotonic() - started:.0f} s in all" + (f"; written: {path}" if len(failed) < len(work) else ""))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def plan(args: argparse.Namespace) -> list[tuple[str, Sizes, str]]:
    """What is to be tuned: op, shape, dtype.

    Raises:
      ValueError: an unknown op, or a shape that is none of the op's.
    """
    names = list(TUNABLES) if args.op == "all" else (args.op or "").split(",")
    if unknown := [op for op in names if op not in TUNABLES]:
        raise ValueError(
            f"unknown op {', '.join(map(repr, unknown))}; expected some of {', '.join(TUNABLES)}, or all"
        )
    if len(names) > 1 and args.shape:
        raise ValueError(f"--shape needs one op, not {args.op}")
    work = []
    for op in names:
        shapes = map(TUNABLES[op].parse, args.shape.split(",")) if args.shape else TUNABLES[op].shapes
        work += [(op, shape, dtype) for shape in shapes for dtype in args.dtype or TUNABLES[op].dtypes]
    return work


def outcome(result: tuning.Result, entry: tuning.Entry) -> str:
    """A line about what tuning a shape gave."""
    timed = sum(not trial.failure for trial in result.trials)
    line = f"heuristic {entry.heuristic_us:.2f} us, tuned {entry.us:.2f} us, {entry.speedup:.3f} times as fast"
    if entry.config is None:
        line = f"heuristic {entry.heuristic_us:.2f} us, which nothing beats"
    elif not entry.bucketed:
        line += " (this shape only)"
    failed = len(result.trials) - timed
    return f"{line}; {timed} configs timed, {failed} failed, {result.pruned} left out, {result.seconds:.1f} s"
