"""Measures the tile configs of an op for given shapes and keeps the fastest in a table, or shows such a table.

What is found goes to the user's own table, which every op looks into (`pallas_models.tuning`), or to --output. A
config is kept only where it beats that of the heuristic by more than the noise; if it does not hold for three
quarters of the rows as well, then for its own shape only.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import environment
from bench.measuring.harness import DTYPES, parse_dtypes, shape_text
from bench.reporting import tables
from pallas_models import ops, tuning

HELP = "find the fastest tile configs of an op, or show a table of them"

Sizes = tuple[int, ...]
Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]  # op, operands, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunable:
    """An op that can be tuned.

    Attributes:
      axes: names of the sizes of a shape.
      shapes: those that are tuned where none are given.
      call: `call(dtype, *shape)` gives the call to tune.
      dtypes: those that are tuned where none are given.
      nearby: which size is made smaller, and how much, to see whether a config holds in its bucket.
      kernel: which kernel of the call is tuned, where it has several.
    """

    axes: str
    shapes: Sequence[Sizes]
    call: Callable[..., Call]
    dtypes: Sequence[str] = ("bf16",)
    nearby: tuple[int, float] = (0, 0.75)
    kernel: str | None = None

    def parse(self, text: str) -> Sizes:
        """Parses `8192x1152x384`.

        Raises:
          ValueError: it is no shape of this op.
        """
        sizes = text.strip().split("x")
        if len(sizes) != len(self.axes.split("x")) or not all(s.isdecimal() and int(s) for s in sizes):
            raise ValueError(f"{text!r} is no shape; expected {self.axes}, such as {shape_text(self.shapes[0])}")
        return tuple(map(int, sizes))

    def smaller(self, shape: Sizes) -> Sizes:
        """A shape nearby, whose config that of `shape` would be."""
        axis, factor = self.nearby
        return tuple(max(round(factor * size), 1) if i == axis else size for i, size in enumerate(shape))


@functools.cache
def _numbers(dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(4_194_301, np.float32).astype(DTYPES[dtype])


def operands(dtype: str, *shapes: Sizes) -> list[jax.Array]:
    """Arrays of normal random numbers, repeated to fill large ones, as new ones for each shape take seconds."""
    return [jax.device_put(np.resize(np.roll(_numbers(dtype), i << 16), s)) for i, s in enumerate(shapes)]


def _matmul(dtype: str, m: int, n: int, k: int) -> Call:
    return ops.matmul, operands(dtype, (m, k), (k, n)), {}


def _gated_matmul(dtype: str, m: int, n: int, k: int) -> Call:
    return ops.gated_matmul, operands(dtype, (m, k), (k, 2, n)), {}


def _matmul_layer_norm(dtype: str, m: int, n: int, k: int) -> Call:
    x, w, scale, offset, bias, residual = operands(dtype, (m, k), (k, n), (n,), (n,), (n,), (m, n))
    return ops.matmul_layer_norm, (x, w, scale, offset), {"bias": bias, "residual": residual}


def _attention(dtype: str, b: int, s: int, h: int, g: int, d: int, *, causal: bool) -> Call:
    return ops.attention, operands(dtype, (b, s, h, d), (b, s, g, d), (b, s, g, d)), {"causal": causal}


def _attention_padded(dtype: str, b: int, s: int, h: int, d: int) -> Call:
    lengths = np.random.default_rng(1).integers(s // 2, s + 1, b)
    mask = jnp.asarray(np.arange(s) < lengths[:, None], jnp.int32)
    return ops.attention_qkv, operands(dtype, (b, s, 3 * h * d)), {"num_heads": h, "mask": mask}


def _softmax(dtype: str, m: int, n: int) -> Call:
    return ops.softmax, operands(dtype, (m, n)), {}


def _layer_norm(dtype: str, m: int, n: int) -> Call:
    return ops.layer_norm, operands(dtype, (m, n), (n,), (n,)), {}


def _rms_norm(dtype: str, m: int, n: int) -> Call:
    return ops.rms_norm, operands(dtype, (m, n), (n,)), {}


def _linear_cross_entropy(dtype: str, tokens: int, vocab: int, width: int) -> Call:
    x, kernel = operands(dtype, (tokens, width), (vocab, width))
    labels = jnp.asarray(np.random.default_rng(0).integers(0, vocab, tokens), jnp.int32)
    return ops.linear_cross_entropy, (x, kernel, labels), {"transpose_w": True}


def _rotary(dtype: str, b: int, s: int, h: int, g: int) -> Call:
    d = 128  # of Qwen3 and of most others
    qkv, q_scale, k_scale = operands(dtype, (b, s, (h + 2 * g) * d), (d,), (d,))
    options = {"num_heads": h, "num_kv_heads": g, "q_scale": q_scale, "k_scale": k_scale}
    return ops.rotary, (qkv, *ops.rotary_table(jnp.arange(s), d)), options


def _triangle_update(dtype: str, b: int, n: int, c: int, **implementation: str) -> Call:
    h = 128  # hidden channels in all published models
    (x,) = operands("fp32", (b, n, n, c))
    vectors = operands("fp32", (c,), (c,), (h,), (h,))
    w_in, w_gate, w_out = (w * c**-0.5 for w in operands(dtype, (c, 4, h), (c, h), (h, c)))
    arrays = (x, *vectors[:2], w_in, *vectors[2:], w_gate, w_out)
    options = {"direction": "outgoing", "compute_dtype": DTYPES[dtype]} | implementation
    return ops.triangle_update, arrays, options


_ROWS = ((8192, 4096), (32768, 1024), (65536, 4096), (8192, 768), (8192, 384), (2048, 65536))
_PRODUCTS = (
    *((8192, 8192, 8192), (4096, 4096, 4096), (8192, 24576, 4096)),
    *((8192, 1152, 384), (8192, 1536, 384), (8192, 384, 1536)),
    *((1024, 2304, 768), (1024, 3072, 768), (1024, 768, 3072)),
)
_PAIRS = (
    *((2, 256, 128), (1, 512, 128), (1, 768, 128), (1, 1024, 128)),
    *((2, 256, 384), (1, 768, 384), (1, 1024, 384)),
)
TUNABLES = {
    "matmul": Tunable(axes="MxNxK", shapes=_PRODUCTS, call=_matmul),
    "gated_matmul": Tunable(
        axes="MxNxK", shapes=((8192, 12288, 4096), (2048, 12288, 4096), (8192, 3072, 1024)), call=_gated_matmul
    ),
    "matmul_layer_norm": Tunable(
        axes="MxNxK",
        shapes=tuple((m, 384, k) for m in (16, 128, 1024, 8192, 32768) for k in (384, 1536)),
        call=_matmul_layer_norm,
        dtypes=("fp16",),
    ),
    "attention": Tunable(
        axes="BxSxHxGxD",
        shapes=((4, 2048, 16, 16, 64), (4, 2048, 16, 16, 128), (64, 128, 12, 12, 32)),
        call=functools.partial(_attention, causal=False),
        nearby=(1, 0.75),
    ),
    "attention_causal": Tunable(
        axes="BxSxHxGxD",
        shapes=(
            *((4, 2048, 16, 16, 128), (1, 8192, 16, 16, 128)),
            *((1, 128, 12, 12, 64), (1, 1024, 12, 12, 64), (8, 1024, 12, 12, 64), (32, 1024, 12, 12, 64)),
            *((1, 4096, 32, 8, 128), (8, 2048, 32, 8, 128)),
        ),
        call=functools.partial(_attention, causal=True),
        nearby=(1, 0.75),
    ),
    "attention_padded": Tunable(
        axes="BxSxHxD",
        shapes=((64, 16, 12, 32), (64, 128, 12, 32), (256, 32, 12, 32), (512, 16, 12, 32), (32, 512, 12, 32)),
        call=_attention_padded,
        dtypes=("fp16",),
        nearby=(0, 0.75),
    ),
    "softmax": Tunable(axes="MxN", shapes=_ROWS, call=_softmax),
    "layer_norm": Tunable(axes="MxN", shapes=_ROWS, call=_layer_norm),
    "rms_norm": Tunable(axes="MxN", shapes=_ROWS, call=_rms_norm),
    "linear_cross_entropy": Tunable(
        axes="TxVxD",
        shapes=((2048, 50257, 768), (1024, 151_936, 1024), (4096, 32_000, 4096)),
        call=_linear_cross_entropy,
        nearby=(1, 0.75),
    ),
    "rotary": Tunable(axes="BxSxHxG", shapes=((1, 4096, 32, 8), (8, 2048, 32, 8)), call=_rotary, nearby=(1, 0.75)),
} | {
    kernel: Tunable(
        axes="BxNxC",
        shapes=_PAIRS,
        call=functools.partial(_triangle_update, **implementation),
        dtypes=("fp16",),
        nearby=(1, 0.875),
        kernel=kernel,
    )
    for kernel, implementation in {
        "trimul_project": {"implementation": "triton"},  # Mosaic's has no tiles to choose
        "trimul_product": {},
        "trimul_output": {},
    }.items()
}


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
