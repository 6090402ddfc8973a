"""Random calls of ops, compiled for GPUs that are not here: all that a kernel may be asked for has to compile.

The calls and their transformations are drawn as in `ops`, with small sizes. Nothing runs. JAX's CUDA plugin has
the compilers: without it this part is left out. A process compiles for one GPU, so that the seed says for which: 0
is the first of `GENERATIONS`, 3 an H200, 6 the first again.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax_plugins.xla_cuda13  # noqa: F401
import numpy as np

from pallas_models.target import lowering_for
from parity.campaign import ops
from parity.campaign._case import Case
from parity.support.compiling import GENERATIONS, Lowering
from parity.support.draws import Pick

_SHARES = {"mosaic": 0.6, "triton": 0.3, None: 0.1}


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    lowering: Lowering
    program: ops.Program

    def __call__(self) -> None:
        p, given = self.program, []
        arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in p.inputs.items()}
        with contextlib.suppress(NotImplementedError):  # what no kernel serves is refused in words
            if p.transformation == "vjp":
                with lowering_for(self.lowering.gpu):
                    given.append(jax.eval_shape(p.call, arrays))
            elif p.transformation == "jvp":
                given.append({name: arrays[name] for name in p.floats})
            self.lowering.lower(ops.transformed(p), (arrays, *given)).compile()


_lowering = functools.cache(Lowering)


def cases(seed: int, implementation: str | None = None) -> Iterator[Case]:
    """Calls of ops; see the module."""
    generation = tuple(GENERATIONS)[seed % len(GENERATIONS)]
    for number in itertools.count():
        name = implementation or Pick(np.random.default_rng([seed, number, 1])).by(_SHARES)
        program = ops.program(seed, number, name)
        trial = _Trial(_lowering(GENERATIONS[generation]), program)
        yield Case(f"{generation}: {program}", trial, (program.op, generation, str(name)), {"cases": 1})
