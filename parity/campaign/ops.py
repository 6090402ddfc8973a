"""Random calls of every op, each against float64 and a bound by error analysis.

Compiling takes most of the time, so that `DRAWS` cases after one another share a program, which is an op, shapes,
dtypes, options, a transformation and an implementation, and differ in the elements of the arrays.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import ops
from parity.campaign._case import Case
from parity.cases import OPS, Without, records
from parity.support.bounded import HALF_ULP, UNIT, Array, Bounded, disagreement
from parity.support.common import ON_GPU, ON_HOPPER
from parity.support.draws import DTYPES, Input, Pick
from parity.support.tolerances import DEEP, OP

DRAWS = 16
# How often each runs, where none is named.
if ON_HOPPER:
    SHARES: dict[str | None, float] = {"triton": 0.5, "mosaic": 0.3, None: 0.15, "xla": 0.05}
elif ON_GPU:
    SHARES = {"triton": 0.8, None: 0.15, "xla": 0.05}
else:
    # Not "mosaic_interpret", a case of which takes up to half a minute.
    SHARES = {"interpret": 0.8, "xla": 0.15, None: 0.05}
TRANSFORMATIONS = {"jit": 0.55, "eager": 0.05, "vmap": 0.12, "vjp": 0.1, "jvp": 0.06, "x64": 0.06, "strict": 0.06}
_COPIES = 3  # that vmap maps over


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program that is compiled once."""

    op: str
    dtype: str
    inputs: dict[str, Input]
    options: dict[str, Any]
    transformation: str
    implementation: str | None

    def __str__(self) -> str:
        shapes = " ".join(f"{name}={i.dtype}{list(i.shape)}" for name, i in self.inputs.items())
        options = " ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.op} {self.implementation} {self.transformation}: {shapes} {options}".rstrip()

    @property
    def floats(self) -> list[str]:
        """The arrays that have gradients."""
        return [name for name, i in self.inputs.items() if i.kind not in ("mask", "ids", "rows", "scale")]

    def call(self, arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        """The results of the op, one or more."""
        out = getattr(ops, self.op)(**arrays, **self.options, implementation=self.implementation)
        return out if isinstance(out, tuple) else (out,)

    def expected(self, arrays: dict[str, Array]) -> tuple[Bounded, ...]:
        """The same by the reference, for arrays in float64."""
        out = OPS[self.op].formula(dtype=self.dtype, **arrays, **self.options)
        return out if isinstance(out, tuple) else (out,)


# How calls of an op are drawn, by its name.
DRAWN = {name: case.draw for name, case in OPS.items() if not isinstance(case.draw, Without)}


def _has_kernel(op: str, backend: str) -> bool:
    """Whether the module of an op has a record of a kernel of that backend."""
    of_module = records().get(getattr(ops, op).__module__.rpartition(".")[2], {})
    return any(kernel.backend == backend for record in of_module.values() for kernel in record.kernels)


# The ops that have kernels for Hopper.
MOSAIC = tuple(op for op in DRAWN if _has_kernel(op, "mosaic"))


def call(pick: Pick, implementation: str | None = None) -> Program:
    """A call of an op, not transformed; `implementation` in place of one that is drawn."""
    name = implementation or pick.by(SHARES)
    mosaic = name is not None and name.startswith("mosaic")
    op = pick.of(MOSAIC if mosaic else tuple(DRAWN))
    dtype = pick.of(DTYPES[1:] if mosaic else DTYPES)
    inputs, options = DRAWN[op](pick, dtype, mosaic)
    return Program(op, dtype, inputs, options, "", name)


def program(seed: int, index: int, implementation: str | None = None) -> Program:
    """Program `index` of a campaign; `implementation` in place of one that is drawn."""
    pick = Pick(np.random.default_rng([seed, index]))
    p = call(pick, implementation)
    inputs = p.inputs
    transformation = pick.by(TRANSFORMATIONS)
    if transformation in ("vjp", "jvp") and not differentiable(p):
        transformation = "jit"
    if transformation == "vmap" and any(i.kind == "scale" for i in inputs.values()):
        transformation = "jit"
    if transformation == "vmap":  # whatever subset of the arrays
        names = [key for key in inputs if pick.chance(0.5)] or [next(iter(inputs))]
        for key in names:
            inputs[key] = dataclasses.replace(inputs[key], shape=(_COPIES, *inputs[key].shape))
        transformation += f" over {' '.join(names)}"
    return dataclasses.replace(p, transformation=transformation)


def differentiable(p: Program) -> bool:
    """Whether the derivative is smooth enough for differences: wide rows, no kinks, no results of 16 bits."""
    inputs, options = p.inputs, p.options
    wide = all(size >= 7 for i in inputs.values() if i.kind != "mask" for size in i.shape[-1:])
    exact = options.get("acc_dtype") is None and options.get("precision") is None
    return (
        wide
        and exact
        and options.get("activation") != "relu"
        and not any(i.kind == "scale" for i in inputs.values())
    )


def values(rng: np.random.Generator, spec: Input, special: bool = False) -> Array:
    """The elements of an array, in its dtype."""
    shape = spec.shape
    if spec.kind == "mask":
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0), p=(0.05, 0.2, 0.4, 0.25, 0.1))
        mask = rng.random(shape) < share
        if rng.random() < 0.3:  # padding at the end
            mask = np.broadcast_to(np.arange(shape[-1]) < rng.integers(0, shape[-1] + 1), shape)
        if spec.dtype in HALF_ULP and rng.random() < 0.5:
            return (mask * rng.normal(1.0, 0.5, shape)).astype(jnp.dtype(spec.dtype))
        return mask.astype(jnp.dtype(spec.dtype))
    if spec.kind == "rows":
        return rng.integers(0, int(spec.scale), shape).astype(spec.dtype)
    if spec.kind == "ids":
        ids = rng.integers(0, int(rng.integers(1, 5)), shape)
        return (ids if rng.random() < 0.3 else np.sort(ids, -1)).astype(spec.dtype)
    if spec.kind == "scale":
        return np.asarray(rng.choice((0.3, 0.05)), spec.dtype)
    x = rng.normal(spec.shift, spec.scale, shape)
    if spec.kind == "cos":
        x = np.cos(rng.normal(0.0, 30.0, shape))
    elif special and spec.kind != "scale":
        x = _special(rng, spec, x)
    limit = min(spec.limit, float(jnp.finfo(spec.dtype).max))
    return np.clip(x, -limit, limit).astype(jnp.dtype(spec.dtype)) if spec.kind != "bias" else _bias(rng, spec, x)


def _special(rng: np.random.Generator, spec: Input, x: Array) -> Array:
    """Values that are rare: large, small, constant, far from 0, on the edge of a dtype's range."""
    largest = min(spec.limit, float(jnp.finfo(spec.dtype).max))
    match rng.integers(0, 9 if spec.kind != "weight" else 5):
        case 0:
            return np.zeros_like(x)
        case 1:  # rows that are constant
            return np.broadcast_to(x[..., :1], x.shape)
        case 2:  # one element of many
            return np.where(rng.random(x.shape) < 1 / max(x.shape[-1], 1), x, 0.0)
        case 3:  # powers of two of either sign
            return np.sign(x) * 2.0 ** rng.integers(-8, 5, x.shape)
        case 4:
            return x * 1e-3
        case 5:
            return x + rng.choice((10.0, 100.0, 1000.0))
        case 6:  # subnormal in float16
            return x * rng.choice((1e-5, 1e-7, 1e-20))
        case 7:
            return x * largest * 0.1
        case _:  # a few at the edge
            return np.where(rng.random(x.shape) < 0.05, np.sign(x) * largest, x)


def _bias(rng: np.random.Generator, spec: Input, x: Array) -> Array:
    lowest = -np.inf if rng.random() < 0.5 or spec.dtype == "float16" else -2e30
    return np.where(rng.random(x.shape) < rng.choice((0.0, 0.3)), lowest, x).astype(jnp.dtype(spec.dtype))


def arrays_of(program: Program, rng: np.random.Generator) -> tuple[dict[str, Array], bool]:
    """The arrays of a call, and whether there are rare values in them.

    These are in masked places too, and so are infinities and NaN where it is documented what becomes of them.
    """
    derived = program.transformation in ("vjp", "jvp")
    special = not derived and bool(rng.random() < 0.6)
    out = {name: values(rng, spec, special and rng.random() < 0.6) for name, spec in program.inputs.items()}
    if derived:
        return out, False
    for name, spec in program.inputs.items():
        if spec.masked is not None and "vmap" not in program.transformation and rng.random() < 0.5:
            mask, shape = spec.masked
            fill = -100 if out[name].dtype.kind == "i" else rng.choice((np.nan, np.inf, -np.inf, 1e4))
            out[name] = np.where((out[mask] == 0).reshape(shape), fill, out[name]).astype(out[name].dtype)
        if spec.infinite and rng.random() < 0.2:
            out[name] = np.where(rng.random(spec.shape) < 0.1, -np.inf, out[name]).astype(out[name].dtype)
    return out, special


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def transformed(p: Program) -> Callable[..., Any]:
    """The function of a program: of the arrays and, for derivatives, of cotangents or tangents."""
    match p.transformation.split()[0]:
        case "vmap":
            names = p.transformation.split()[2:]
            return jax.vmap(p.call, ({key: 0 if key in names else None for key in p.inputs},))
        case "vjp":
            return functools.partial(_pull_back, p)
        case "jvp":
            return functools.partial(_push_forward, p)
        case _:
            return p.call


@functools.lru_cache(maxsize=1)
def _compiled(seed: int, index: int, implementation: str | None) -> tuple[Program, Callable[..., Any]]:
    """A program and its function of all arrays, compiled once for the cases that share it."""
    p = program(seed, index, implementation)
    return p, transformed(p) if p.transformation == "eager" else jax.jit(transformed(p))


def _pull_back(p: Program, arrays: dict[str, Any], cotangents: tuple[Any, ...]) -> dict[str, jax.Array]:
    rest = {key: x for key, x in arrays.items() if key not in p.floats}
    _, pullback = jax.vjp(lambda floats: p.call(floats | rest), {key: arrays[key] for key in p.floats})
    return pullback(cotangents)[0]


def _push_forward(p: Program, arrays: dict[str, Any], tangents: dict[str, Any]) -> tuple[jax.Array, ...]:
    rest = {key: x for key, x in arrays.items() if key not in p.floats}
    floats = {key: arrays[key] for key in p.floats}
    return jax.jvp(lambda floats: p.call(floats | rest), (floats,), (tangents,))[1]


def _slope(p: Program, arrays: dict[str, Array], along: dict[str, Array], cotangents: Sequence[Array]) -> float:
    """The derivative of the sum of `cotangents` times results along a direction, by central differences."""
    step = 1e-5

    def at(t: float) -> float:
        moved = {key: x + t * along[key] if key in along else x for key, x in arrays.items()}
        return sum(
            float(np.sum(np.where(np.isfinite(out.value), out.value, 0.0) * ct))
            for out, ct in zip(p.expected(moved), cotangents, strict=True)
        )

    return (at(step) - at(-step)) / (2 * step)


def _check_derivative(
    p: Program, function: Callable[..., Any], arrays: dict[str, Array], rng: np.random.Generator
) -> tuple[str | None, float, float]:
    """Projections of derivatives on random directions, against differences in float64.

    Normal directions see the error of every element: the projection of an error is normal with its norm as the
    standard deviation, of which 6 are never passed. A tangent may be small as its terms cancel, and its error is
    not: the norm is the root of the mean square of tangents along several directions.
    """
    wide = {key: _wide(x) for key, x in arrays.items()}
    values = [out.value for out in p.expected(wide)]
    cotangents = [rng.normal(size=value.shape) for value in values]
    used = {p.dtype, p.options.get("compute_dtype", p.dtype)}
    tolerance = max(DEEP if dtype == "float32" else 2 * OP[dtype] for dtype in used)  # one product after another
    along = {key: rng.normal(size=wide[key].shape) for key in p.floats}
    dtypes = [x.dtype for x in jax.eval_shape(p.call, arrays)]
    cotangents = [_wide(ct.astype(d)) for ct, d in zip(cotangents, dtypes, strict=True)]
    along = {key: _wide(t.astype(arrays[key].dtype)) for key, t in along.items()}
    if p.transformation == "jvp":
        tangents = {key: t.astype(arrays[key].dtype) for key, t in along.items()}
        directions = [tangents] + [
            {key: rng.normal(size=t.shape).astype(arrays[key].dtype) for key, t in along.items()} for _ in range(7)
        ]
        every = [[_wide(np.asarray(x)) for x in function(arrays, given)] for given in directions]
        every = [[np.where(np.isfinite(x), x, 0.0) for x in moved] for moved in every]
        found = sum(float(np.sum(x * ct)) for x, ct in zip(every[0], cotangents, strict=True))
        pairs = [(found, along, [x / math.sqrt(len(every)) for moved in every for x in moved])]
        names = ["the tangent"]
        tolerance += max(HALF_ULP[str(d)] for d in dtypes)
    else:
        gradients = function(arrays, tuple(ct.astype(d) for ct, d in zip(cotangents, dtypes, strict=True)))
        pairs = []
        for key in p.floats:
            gradient = _wide(np.asarray(gradients[key]))
            pairs.append((float(np.sum(gradient * along[key])), {key: along[key]}, [gradient]))
        names = [f"the gradient of {key}" for key in p.floats]
        tolerance += max(HALF_ULP[p.inputs[key].dtype] for key in p.floats)
    # A derivative that is 0, as for a softmax of one score, is a difference of float32 sums of this size.
    cancelled = UNIT * sum(
        float(np.sum(np.abs(np.nan_to_num(ct * value, posinf=0.0, neginf=0.0))))
        for ct, value in zip(cotangents, values, strict=True)
    )
    worst = 0.0
    for name, (found, direction, parts) in zip(names, pairs, strict=True):
        norm = float(np.sqrt(sum(np.sum(np.square(part)) for part in parts)))
        expected = _slope(p, wide, direction, cotangents)
        length = math.sqrt(sum(float(np.sum(np.square(t))) for t in direction.values()))
        bound = 6 * tolerance * norm + cancelled * length + 1e-6
        if not abs(found - expected) <= bound:
            return (
                f"{name} along a direction is {found:.9g}, expected {expected:.9g} +- {bound:.2g}",
                np.inf,
                np.inf,
            )
        worst = max(worst, abs(found - expected) / bound)
    return None, worst, worst * 6 * tolerance


def _check(
    p: Program, function: Callable[..., Any], arrays: dict[str, Array], rng: np.random.Generator
) -> tuple[str | None, float, float]:
    """What is wrong with a call, and its largest error, as a part of the bound and in relation to the norm."""
    kind = p.transformation.split()[0]
    if kind in ("vjp", "jvp"):
        return _check_derivative(p, function, arrays, rng)
    if kind == "x64":
        with jax.enable_x64(True):
            outs = function(arrays)
    elif kind == "strict":
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            outs = function(jax.tree.map(jnp.asarray, arrays))
    else:
        outs = function(jax.tree.map(jnp.asarray, arrays))
    mapped = p.transformation.split()[2:] if kind == "vmap" else []
    results = []
    for i in range(_COPIES if mapped else 1):
        wide = {key: _wide(x[i] if key in mapped else x) for key, x in arrays.items()}
        for out, expected in zip(outs, p.expected(wide), strict=True):
            results.append(disagreement(out[i] if mapped else out, expected, str(out.dtype)))
    wrong = next((message for message, *_ in results if message), None)
    return wrong, max(part for _, part, _ in results), max(relative for _, _, relative in results)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int
    implementation: str | None
    measured: dict[str, float]

    def __call__(self) -> str | None:
        p, function = _compiled(self.seed, self.index // DRAWS, self.implementation)
        rng = np.random.default_rng([self.seed, *divmod(self.index, DRAWS)])
        arrays, special = arrays_of(p, rng)
        self.measured["cases"] = 1
        try:
            with np.errstate(all="ignore"):  # infinities and NaN are among the values
                message, part, relative = _check(p, function, arrays, rng)
        except NotImplementedError:
            if self.implementation is None and "mosaic" not in str(p.implementation):
                raise  # every other one serves every call
            self.measured["refused"] = 1
            return None
        self.measured["largest part of its bound"] = part
        if not special:  # of others it says little: most of the norm may be a value that is far from the rest
            self.measured["largest relative error"] = relative
        return message


def cases(seed: int, implementation: str | None = None) -> Iterator[Case]:
    """Calls of ops; see the module."""
    for number in itertools.count():
        p = program(seed, number, implementation)
        for draw in range(DRAWS):
            trial = _Trial(seed, number * DRAWS + draw, implementation, {})
            kind = "gradient" if p.transformation in ("vjp", "jvp") else "value"
            yield Case(str(p), trial, (p.op, p.dtype, str(p.implementation), kind), trial.measured)
