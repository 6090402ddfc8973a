"""Ops whose operands are spread in any way over CPU devices: the result has to be the same as on one device.

`DRAWS` cases after one another share a call, and differ in mesh, in how each operand is spread, and in what it
holds. Processes that make them have 8 CPU devices, on a machine with a GPU too; kernels are interpreted.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from parity.campaign import ops
from parity.campaign._case import Case
from parity.campaign.ops import Program
from parity.support.bounded import apart
from parity.support.draws import Pick
from parity.support.tolerances import CHAIN, DEEP, OP

DRAWS = 8
IMPLEMENTATIONS = {"interpret": 0.9, None: 0.1}
MESHES = ({"a": 8}, {"a": 4}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2})
# Most axes can be split over 8 devices; some over 2 alone, or not at all.
SIZES = (8, 8, 16, 16, 24, 32, 40, 12, 6, 7)

Specs = dict[str, PartitionSpec]


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A mesh by the sizes of its axes, whether its axes are explicit, and how each array lies on it."""

    mesh: Mapping[str, int]
    explicit: bool
    specs: Specs

    def __str__(self) -> str:
        specs = " ".join(f"{name}=P{tuple(spec)}" for name, spec in self.specs.items())
        return f"{'x'.join(map(str, self.mesh.values()))}{' explicit' if self.explicit else ''}: {specs}"

    def made(self) -> Mesh:
        count = int(np.prod(list(self.mesh.values())))
        kinds = (AxisType.Explicit if self.explicit else AxisType.Auto,) * len(self.mesh)
        return jax.make_mesh(
            tuple(self.mesh.values()), tuple(self.mesh), axis_types=kinds, devices=jax.devices()[:count]
        )


def call(seed: int, index: int) -> tuple[Program, bool]:
    """Call `index` of a campaign, and whether it is differentiated."""
    pick = Pick(np.random.default_rng([seed, index, 3]), sizes=SIZES, times=2)
    # Of two the one with more operands, which can lie in more ways.
    p = max((ops.call(pick, "interpret") for _ in range(2)), key=lambda p: len(p.inputs))
    p = dataclasses.replace(p, implementation=pick.by(IMPLEMENTATIONS))
    return p, ops.differentiable(p) and pick.chance(0.4)


def spread(seed: int, index: int, p: Program) -> Spread:
    """How the operands of case `index` of a campaign lie."""
    pick = Pick(np.random.default_rng([seed, index, 4]))
    mesh = pick.of(MESHES)
    specs = {name: _spec(pick, mesh, given.shape) for name, given in p.inputs.items()}
    return Spread(mesh, pick.chance(0.15), specs)


def _spec(pick: Pick, mesh: Mapping[str, int], shape: tuple[int, ...]) -> PartitionSpec:
    """Each axis of the mesh splits one of an array, or none; one can be split by several, in any order."""
    split: list[list[str]] = [[] for _ in shape]
    for name in pick.rng.permutation(list(mesh)):
        left = [i for i, s in enumerate(shape) if s % (mesh[name] * np.prod([mesh[n] for n in split[i]])) == 0]
        if left and pick.chance(0.7):
            split[pick.of(left)].append(str(name))
    return PartitionSpec(*(tuple(s) if len(s) > 1 else s[0] if s else None for s in split))


def _function(p: Program, differentiated: bool) -> Callable[[dict[str, Any]], Any]:
    """The results, and the gradients for a cotangent that depends on all of them."""

    def function(arrays: dict[str, Any]) -> Any:
        if not differentiated:
            return p.call(arrays)
        rest = {name: x for name, x in arrays.items() if name not in p.floats}
        floats = {name: arrays[name] for name in p.floats}
        out, pull = jax.vjp(lambda floats: p.call(floats | rest), floats)
        return out, pull(tuple(jnp.cos(jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))) for x in out))

    return function


@functools.lru_cache(maxsize=1)
def _alone(seed: int, index: int) -> tuple[Program, bool, Callable[..., Any], Callable[..., Any]]:
    p, differentiated = call(seed, index)
    function = _function(p, differentiated)
    return p, differentiated, function, jax.jit(function)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int
    measured: dict[str, float]

    def __call__(self) -> str | None:
        p, differentiated, function, alone = _alone(self.seed, self.index // DRAWS)
        rng = np.random.default_rng([self.seed, *divmod(self.index, DRAWS), 4])
        arrays = {name: ops.values(rng, given) for name, given in p.inputs.items()}
        found = spread(self.seed, self.index, p)
        mesh = found.made()
        self.measured["cases"] = 1
        expected = alone(arrays)
        spread_out = {
            name: jax.device_put(x, NamedSharding(mesh, found.specs[name])) for name, x in arrays.items()
        }
        with jax.set_mesh(mesh) if found.explicit else contextlib.nullcontext():
            try:
                out = jax.jit(function)(spread_out)
            except Exception as error:  # where axes are explicit, JAX refuses what it cannot split
                if not found.explicit or type(error).__name__ != "ShardingTypeError":
                    raise
                self.measured["refused"] = 1
                return None
        # Sums are added up in another order; where a contraction is split, they are rounded before, too.
        half = [OP[given.dtype] for given in p.inputs.values() if given.dtype in ("float16", "bfloat16")]
        single = DEEP if differentiated else CHAIN
        tolerance = max([single, *(2 * unit * (1 + differentiated) for unit in half)])
        message, part = apart(out, expected, tolerance, tolerance * 0.1)
        self.measured["largest part of its bound"] = part
        return message


def cases(seed: int) -> Iterator[Case]:
    """Calls of ops with spread operands; see the module."""
    for number in itertools.count():
        p, differentiated = call(seed, number)
        kind = "gradient" if differentiated else "value"
        for draw in range(DRAWS):
            index = number * DRAWS + draw
            trial = _Trial(seed, index, {})
            row = (f"spread {p.op}", p.dtype, str(p.implementation), kind)
            yield Case(f"{kind} of {p} on {spread(seed, index, p)}", trial, row, trial.measured)
