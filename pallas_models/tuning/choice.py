"""Which config a kernel gets: decided here for every kernel."""

import warnings
from collections.abc import Mapping
from typing import TypeVar

from jax.typing import DTypeLike

from pallas_models.target import Target
from pallas_models.tuning.problem import Chooser, Problem
from pallas_models.tuning.table import Entry, TableError, installed

Config = TypeVar("Config")


def choose(config: Config | Chooser | None, problem: Problem[Config], target: Target) -> Config:
    """The config to build a kernel with.

    In this order: `config` itself, or its choice if it is a table; the user's table in the cache folder; the table
    that ships with the package; the heuristic. Both tables are for the target.

    ```
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Config:
        block_m: int

    problem = tuning.Problem(
        backend="triton",
        op="own_kernel",
        shape={"m": 8192},
        bucketed=("m",),
        dtype=jnp.float16,
        config=Config,
        heuristic=lambda: Config(64),
        candidates=lambda: [Config(32), Config(64), Config(128)],
    )
    config = tuning.choose(None, problem, target.current())
    ```

    Args:
      config: the user's: a config, a table, or None.
      problem: the kernel and the shape that it is built for.
      target: the GPU.

    Raises:
      TypeError: `config` is something else.
      TableError: `config` is a table whose entry for the problem cannot be used.
    """
    if isinstance(config, Chooser):
        chosen = _from(config, problem, target)
        if chosen is not None:
            return chosen
    elif config is not None:
        if not isinstance(config, problem.config):
            expected = f"{problem.config.__module__}.{problem.config.__qualname__}"
            raise TypeError(f"config is a {type(config).__name__}; expected {expected}, a tuning.Table or None")
        return config
    for table in installed(target.name):
        try:
            chosen = _from(table, problem, target)
        except TableError as error:  # from another version: no reason for an op to fail
            warnings.warn(f"left out a tuned config: {error}", stacklevel=2)
        else:
            if chosen is not None:
                return chosen
    return problem.heuristic()


def _from(table: Chooser, problem: Problem[Config], target: Target) -> Config | None:
    """A table's choice; TableError where the target has not the shared memory for it."""
    chosen = table.choose(problem)
    if chosen is not None and problem.shared_memory is not None:
        size = problem.shared_memory(chosen)
        if size > target.shared_memory and chosen != problem.heuristic():
            raise TableError(
                f"{chosen} of {problem} takes {size} bytes of shared memory; {target.name or 'the GPU'} has "
                f"{target.shared_memory}"
            )
    return chosen


def lookup(
    op: str, shape: Mapping[str, int], dtype: DTypeLike, *, backend: str = "triton", gpu: str
) -> Entry | None:
    """The entry that a kernel gets its config from where no config is given by hand; None where there is none.

    Args:
      op: the kernel's name, e.g. `"matmul"`.
      shape: its sizes by name, e.g. `{"m": 8192, "n": 1152, "k": 384}`.
      dtype: of its operands.
      backend: the kernel's, `"mosaic"` or `"triton"`.
      gpu: the GPU's name as JAX has it, e.g. `"NVIDIA H200"`; this process's is `target.current().name`.
    """
    found = (table.find(op, shape, dtype, backend=backend) for table in installed(gpu))
    return next((entry for entry in found if entry is not None), None)
