"""The triangle multiplicative update at the shapes of GPU MODE's TriMul competition: ours, XLA, torch and others.

Weights and inputs have the competition's distributions: normal, or Cauchy(0, 2) for x with +cauchy; a mask of
ones, or of zeros and ones with +masked. Every element must be within 2e-2 + 2e-2 |expected| of torch in float32,
as there. Three kinds of case are added to its seven shapes: +after gates after the output projection, as AlphaFold
does and cuEquivariance computes; +bf16 has x and the result in bfloat16; the others show how time and memory grow
with N.
"""

import dataclasses
import functools
import math
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp

import weights
from bench.measuring import environment, timing, tunable
from bench.measuring.contenders import NOT_FINITE
from bench.measuring.harness import DTYPES, Benchmark, Contender, Gradient, Measure, Shape, Workload, shape_text
from bench.measuring.results import Case, Result
from bench.measuring.tunable import Call, Tunable
from bench.models import trimul_models
from bench.reporting import tables
from pallas_models import ops, trimul

HELP = "triangle multiplicative update: ours, XLA, torch, cuEquivariance"
SHOWN = "1x1024x128+cauchy fp32"  # the case in README.md

HIDDEN = 128
SEVEN: tuple[Shape, ...] = (
    (2, 256, 128),
    (1, 768, 128, "cauchy"),
    (2, 256, 384, "masked"),
    (1, 512, 128),
    (1, 1024, 128, "cauchy"),
    (1, 768, 384, "masked"),
    (1, 1024, 384),
)
SEVEN_LABELS = [f"{shape_text(shape)} fp32" for shape in SEVEN]
TOLERANCE = 2e-2  # relative and absolute
LIMIT_GRADIENT = 3e-2  # relative: the limit for bfloat16 operands, twice as deep as an op
LIMIT_AFTER = 3.0  # times that: cuEquivariance is fastest in bfloat16, which keeps to the former hardly ever


def itemsize(flags: Container[str]) -> int:
    """Bytes of an element of x, given the flags of a shape."""
    return 2 if "bf16" in flags else 4


@jax.jit
def _worst(out: jax.Array, expected: jax.Array) -> jax.Array:
    error = jnp.abs(out.astype(jnp.float32) - expected)
    return jnp.max(error / (TOLERANCE + TOLERANCE * jnp.abs(expected)))


def worst(out: jax.Array, expected: jax.Array) -> float:
    """The largest error of an element, over what the competition allows."""
    if out.shape != expected.shape:
        raise ValueError(f"the output has shape {out.shape}, the reference {expected.shape}")
    value = float(_worst(out, expected))
    return value if math.isfinite(value) else NOT_FINITE


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_inputs(seed: Any, sizes: tuple[int, int, int], flags: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Random x (B, N, N, C) and mask (B, N, N), float32."""
    batch, n, channels = sizes
    keys = jax.random.split(jax.random.key(seed))
    draw = jax.random.cauchy if "cauchy" in flags else jax.random.normal
    x = draw(keys[0], (batch, n, n, channels), jnp.float32) * (2.0 if "cauchy" in flags else 1.0)
    mask = jax.random.bernoulli(keys[1], 0.5 if "masked" in flags else 1.0, (batch, n, n))
    return x.astype(jnp.bfloat16 if "bf16" in flags else jnp.float32), mask.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One of the three kernels of the update: its flop, and its bytes with 16-bit intermediates."""

    flop: float
    bytes: float


def phases(batch: int, n: int, channels: int, flags: Container[str]) -> dict[str, Phase]:
    """The three kernels: norm, projections and gates; products over k; norm, gate and output projection."""
    pairs, gates = batch * n * n, channels if "after" in flags else HIDDEN
    x, side, gate = channels * itemsize(flags), 2 * HIDDEN, 2 * gates  # bytes of a pair
    return {
        "project": Phase(
            flop=2.0 * pairs * channels * (4 * HIDDEN + gates), bytes=float(pairs * (x + 2 * side + gate))
        ),
        "product": Phase(flop=2.0 * pairs * n * HIDDEN, bytes=float(pairs * 3 * side)),
        "out": Phase(flop=2.0 * pairs * HIDDEN * channels, bytes=float(pairs * (side + gate + x))),
    }


def workload(dtype: str, shape: Shape) -> Workload:
    """The update of (B, N, N, C)."""
    sizes, flags = tuple(map(int, shape[:3])), tuple(map(str, shape[3:]))
    if dtype != "fp32":
        raise ValueError(f"{shape_text(shape)} {dtype}: x is fp32, or bf16 with +bf16; matrices are fp16 in ours")
    batch, n, channels = sizes
    gate_after, masked = "after" in flags, "masked" in flags
    device = "cuda" if environment.has_gpu() else "cpu"
    state = trimul_models.random_state(channels, HIDDEN, gate_after=gate_after)
    params = weights.load_trimul(state, direction="outgoing", dtype=jnp.float16)
    module = functools.partial(trimul_models.torch_module, state, gate_after=gate_after, device=device)
    exact = functools.cache(functools.partial(module, precision="highest"))
    update = functools.partial(trimul.trimul, direction="outgoing")

    plain = functools.partial(update, compute_dtype="float32", implementation="xla")

    def reference(x: jax.Array, mask: jax.Array) -> jax.Array:
        try:
            run = exact()
        except ImportError:
            return jax.jit(plain)(params, x.astype(jnp.float32), mask)
        import torch

        out = run(*(torch.from_dlpack(tensor).float() for tensor in jax.block_until_ready((x, mask))))
        if device == "cuda":
            torch.cuda.synchronize()
        return jax.dlpack.from_dlpack(out.contiguous())

    triton = functools.partial(update, implementation="triton")
    contenders = [
        Contender("pallas", "ours", lambda: update, params=(params,), gpu=True),
        Contender("triton", "ladder", lambda: triton, params=(params,), gpu=True),
        Contender("xla", "xla", lambda: trimul_models.plain_jax, params=(params,)),
        Contender(
            "torch", "torch", functools.partial(module, precision="high"), ways=("eager",), differentiable=False
        ),
    ]
    if gate_after:
        tensors = jax.device_put(state)
        contenders += [
            Contender(f"cuequivariance-{name}", "peer", load, params=(tensors,), gpu=True)
            for name in ("float32", "bfloat16")
            for load in [functools.partial(trimul_models.cuequivariance, name)]
        ]
    else:
        fused = functools.partial(trimul_models.torch_fused, state, masked=masked, device=device)
        ways = ("eager", "graph", "compile", "compile-graph") if shape in SEVEN else ("eager",)
        contenders.append(
            Contender("article", "torch", fused, ways=ways, differentiable=False)
        )  # the name in older results
    flop = sum(kernel.flop for kernel in phases(batch, n, channels, flags).values())
    return Workload(
        inputs=lambda seed: random_inputs(seed, sizes, flags),
        reference=reference,
        contenders=contenders,
        flop=flop,
        products="fp16",
        bytes=float(batch * n * n * (2 * channels * itemsize(flags) + 4)),  # x, the result, the mask
        measure=Measure("error of an element / (0.02 + 0.02 |expected|)", worst),
        limit=LIMIT_AFTER if gate_after else 1.0,
        gradient=Gradient(inputs=1, exact=functools.partial(plain, params), flop=2.0 * flop, limit=LIMIT_GRADIENT),
    )


def phases_of(case: Case) -> dict[str, Phase]:
    """The three kernels of a case, by name."""
    return phases(*(case.shape[axis] for axis in BENCHMARK.axes), case.shape)


def floors(result: Result, case: Case) -> dict[str, float]:
    """The least microseconds of each of the three kernels at the measured ceilings; empty without these."""
    matmul, copy = (result.ceilings.get(name) for name in ("matmul_bf16_tflop_per_s", "copy_tb_per_s"))
    if not matmul or not copy:
        return {}
    found = phases_of(case).items()
    return {name: max(phase.flop / matmul, phase.bytes / copy) / 1e6 for name, phase in found}


COLUMNS = {
    "pallas": "ours",
    "xla": "XLA",
    "torch-eager": "torch, TF32",
    "article-eager": "torch, fp16",
    "article-graph": "torch, fp16",
    "article-compile": "torch, fp16, compiled",
    "article-compile-graph": "torch, fp16, compiled",
}


def milliseconds(case: Case) -> dict[str, float]:
    """The best time of the candidates of a column, on the device or else on the wall."""
    found: dict[str, float] = {}
    for entry in case.entries:
        if time := entry.device or entry.wall:
            name = COLUMNS.get(entry.name, entry.name)
            found[name] = min(found.get(name, math.inf), time.median_us / 1e3)
    return found


def gigabytes(case: Case) -> dict[str, float]:
    """The least peak memory of the candidates of a column."""
    found: dict[str, float] = {}
    for entry in case.entries:
        if entry.status == "ok" and entry.peak_bytes:
            name = COLUMNS.get(entry.name, entry.name)
            found[name] = min(found.get(name, math.inf), entry.peak_bytes / 1e9)
    return found


def cell(value: float | None) -> str:
    """A figure with three decimals."""
    return "-" if value is None else f"{value:.3f}"


def comparison(result: Result, cases: list[Case]) -> str:
    """Milliseconds of every column and the floor of three kernels; of all seven shapes the geometric means."""
    rows: list[dict[str, float]] = []
    for case in cases:
        least = sum(floors(result, case).values()) / 1e3
        rows.append(milliseconds(case) | ({"floor of three kernels": least} if least else {}))
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [[row.get(name) for row in rows] for name in names]
    lines = [[case.label, *map(cell, row)] for case, row in zip(cases, zip(*columns, strict=True), strict=True)]
    whole = [[value for value in column if value] for column in columns]
    means = [tables.geometric_mean(values) if len(values) == len(cases) else None for values in whole]
    mean = [["geometric mean", *map(cell, means)]] if {case.label for case in cases} >= set(SEVEN_LABELS) else []
    return tables.markdown(["ms", *names], lines + mean) if names else ""


def growth(cases: list[Case]) -> str:
    """Time and peak memory as N grows, and what x, the result and three half-precision tensors of H take."""
    names = ("ours", "XLA", "torch, TF32", "torch, fp16")
    lines = []
    for case in sorted(cases, key=lambda case: case.shape["n"]):
        n, (times, memory) = case.shape["n"], (milliseconds(case), gigabytes(case))
        tensors = n * n * (2 * case.shape["channels"] * itemsize(case.shape) + 3 * 2 * HIDDEN) / 1e9
        figures = [found.get(name) for found in (times, memory) for name in names]
        lines.append([str(n), *map(cell, figures), cell(tensors)])
    header = ["N", *(f"{name}, {unit}" for unit in ("ms", "GB") for name in names), "tensors, GB"]
    return tables.markdown(header, lines) if lines else ""


def kernel_table(result: Result) -> str:
    """The kernels of ours: the time of each phase, what it moves and computes, and its share of its floor."""
    lines = []
    for case in result.cases:
        kernels = next((entry.kernels for entry in case.entries if entry.family == "ours"), [])
        middle = next((i for i, kernel in enumerate(kernels) if "product" in kernel.name), None)
        if middle is None:
            continue
        launches = (kernels[:middle], kernels[middle : middle + 1], kernels[middle + 1 :])
        least = floors(result, case)
        for launched, (name, phase) in zip(launches, phases_of(case).items(), strict=True):
            us, calls = sum(kernel.us for kernel in launched), sum(kernel.calls for kernel in launched)
            figures = [f"{us:.0f}", f"{phase.bytes / 1e6:.0f}", f"{phase.bytes / us / 1e6:.2f}"]
            share = tables.format_share(least[name] / us if least else None)
            lines.append([case.label, name, str(calls), *figures, f"{phase.flop / us / 1e6:.0f}", share])
    header = ["case", "phase", "launches", "us", "MB", "TB/s", "TFLOP/s", "of its floor"]
    return tables.markdown(header, lines) if lines else ""


def table(result: Result) -> str:
    """Every table of the benchmark: the seven shapes, the others, growth, and the kernels."""
    others = [case for case in result.cases if case.label not in SEVEN_LABELS]
    forward = tables.forward(result.cases)
    square = [case for case in forward if (case.shape["batch"], case.shape["channels"]) == (1, 128)]
    sections = {
        "The seven shapes of the competition": comparison(
            result, [case for case in result.cases if case.label in SEVEN_LABELS]
        ),
        "Others": comparison(result, others),
        "Growth with N, one item of 128 channels": growth(
            [case for case in square if not {"bf16", "after"} & case.shape.keys()]
        ),
        "Kernels of ours": kernel_table(dataclasses.replace(result, cases=forward)),
    }
    notes = "`torch, TF32` is the competition's reference, `torch, fp16` an optimised program published for it."
    return notes + "\n\n" + "\n\n".join(f"{title}:\n\n{text}" for title, text in sections.items() if text)


BENCHMARK = Benchmark(
    name="trimul",
    axes=("batch", "n", "channels"),
    flags=("masked", "cauchy", "bf16", "after"),
    shapes=(
        *SEVEN,
        (1, 1024, 128, "bf16"),
        (1, 512, 128, "after"),
        (1, 1024, 128, "after"),
        (1, 256, 128),
        (1, 2048, 128),
    ),
    quick_shapes=(SEVEN[0], SEVEN[2], SEVEN[4]),
    cpu_shapes=((1, 32, 64), (1, 24, 48, "masked", "cauchy"), (1, 16, 128, "after"), (1, 16, 128, "bf16")),
    dtypes=("fp32",),
    workload=workload,
    budget=timing.Budget(warmup_s=0.02, queue_s=0.005, wall_samples=8, device_groups=3, device_calls=5),
    compile_budget=60.0,
    table=table,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, b: int, n: int, c: int, **implementation: str) -> Call:
    """The update with 128 hidden channels, as all published models have, to tune its tiles."""
    h = HIDDEN
    (x,) = tunable.operands("fp32", (b, n, n, c))
    vectors = tunable.operands("fp32", (c,), (c,), (h,), (h,))
    w_in, w_gate, w_out = (w * c**-0.5 for w in tunable.operands(dtype, (c, 4, h), (c, h), (h, c)))
    arrays = (x, *vectors[:2], w_in, *vectors[2:], w_gate, w_out)
    options = {"direction": "outgoing", "compute_dtype": DTYPES[dtype]} | implementation
    return ops.triangle_update, arrays, options


@functools.wraps(ops.triangle_update)
def gradients(*arrays: jax.Array, **options: Any) -> list[jax.Array]:
    """The gradients of all operands, the result being its own cotangent."""
    out, pull = jax.vjp(functools.partial(ops.triangle_update, **options), *arrays)
    return jax.tree.leaves(pull(out))


def tuned_gradient(dtype: str, b: int, n: int, c: int) -> Call:
    """The gradient of the update, whose kernels are Triton's."""
    _, arrays, options = tuned(dtype, b, n, c, implementation="triton")
    return gradients, arrays, options


TUNABLES = {
    kernel: Tunable(
        axes="BxNxC",
        shapes=(
            *((2, 256, 128), (1, 512, 128), (1, 768, 128), (1, 1024, 128)),
            *((2, 256, 384), (1, 768, 384), (1, 1024, 384)),
        ),
        call=functools.partial(tuned, **implementation),
        dtypes=("fp16",),
        nearby=(1, 0.875),
        kernel=kernel,
    )
    for kernel, implementation in {
        "trimul_project": {"implementation": "triton"},  # Mosaic's has no tiles to choose
        "trimul_product": {},
        "trimul_output": {"implementation": "triton"},  # nor has Mosaic's
    }.items()
} | {
    kernel: Tunable(
        axes="BxNxC",
        shapes=((2, 256, 128), (1, 512, 128), (1, 768, 128), (1, 1024, 128)),
        call=tuned_gradient,
        dtypes=("fp16", "bf16"),
        nearby=(1, 0.875),
        kernel=kernel,
    )
    for kernel in ("trimul_output_backward", "trimul_project_backward", "trimul_weights_backward")
}
