"""Tables of measured configs: their entries, how they are read and written, where they are found."""

import dataclasses
import functools
import json
import math
import os
import re
import reprlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import files
from pallas_models.tuning.problem import Chooser, Problem

Config = TypeVar("Config")

FORMAT = "pallas_models.tuning"
VERSION = 1

# The largest values of a config's fields: a CTA has 1024 threads at most, and no kernel gains from more stages.
_MOST = {"num_warps": 32, "num_stages": 16}
_MOST_OTHERS = 1 << 16


class TableError(ValueError):
    """A table cannot be used: the message names the file and its fault."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of measuring the configs of one kernel for one shape.

    Attributes:
      op: the kernel's name.
      backend: the kernel's.
      dtype: the operands'.
      shape: the sizes by name.
      bucketed: names of the sizes of which only the nearest power of two has to match; the others match exactly.
      config: the fields of the fastest config; None where the heuristic's is.
      us: its device time, in microseconds.
      heuristic: the fields of the config that the heuristic chose at the time.
      heuristic_us: its device time, measured by turns with `config`.
      date: ISO 8601.
      versions: of the packages that built the kernels.
    """

    op: str
    dtype: str
    shape: Mapping[str, int]
    bucketed: tuple[str, ...]
    config: Mapping[str, Any] | None
    us: float
    heuristic: Mapping[str, Any]
    heuristic_us: float
    date: str
    versions: str
    backend: str = "triton"  # older tables lack the field

    @property
    def key(self) -> tuple[str, str, str, tuple[tuple[str, int], ...]]:
        """Identifies the entry in a table; the same as `Problem.key`."""
        return self.op, self.backend, self.dtype, tuple(self.shape.items())

    @property
    def speedup(self) -> float:
        """Time of the heuristic's config over the time of the fastest."""
        return self.heuristic_us / self.us

    def distance(self, op: str, shape: Mapping[str, int], dtype: str, backend: str) -> float:
        """How far another shape is, in powers of two: 0 for this one, infinite outside of its bucket."""
        if (self.op, self.backend, self.dtype, self.shape.keys()) != (op, backend, dtype, shape.keys()):
            return math.inf
        total = 0.0
        for name, size in self.shape.items():
            if size == shape[name]:
                continue
            if name not in self.bucketed or bucket(size) != bucket(shape[name]):
                return math.inf
            total += abs(math.log2(size / shape[name]))
        return total


def bucket(size: int) -> int:
    """The power of two that is nearest to a size, by its ratio."""
    return 1 << round(math.log2(size)) if size > 0 else 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table(Chooser):
    """The measured configs of one GPU.

    Given to an op as its `config`, it is asked before all other tables, even if it was made for another GPU.

    Attributes:
      gpu: the GPU's name, as JAX has it.
      entries: one per kernel, backend, dtype and shape.
      path: the file that it was read from.
    """

    gpu: str
    entries: tuple[Entry, ...] = ()
    path: Path | None = None

    def find(
        self, op: str, shape: Mapping[str, int], dtype: DTypeLike, *, backend: str = "triton"
    ) -> Entry | None:
        """The entry for a shape: its own if there is one, else the nearest whose bucket it is in, else None."""
        name = jnp.dtype(dtype).name
        found = min(self.entries, key=lambda entry: entry.distance(op, shape, name, backend), default=None)
        return found if found and found.distance(op, shape, name, backend) < math.inf else None

    def choose(self, problem: Problem[Config]) -> Config | None:
        """The config of a problem, the heuristic's where that was measured to be best; None without an entry.

        Raises:
          TableError: the entry does not fit the kernel, as can happen to one from another version.
        """
        entry = self.find(problem.op, problem.shape, problem.dtype, backend=problem.backend)
        if entry is None:
            return None
        if entry.config is None:
            return problem.heuristic()
        try:
            _check_fields(problem.config, entry.config)
            return problem.config(**entry.config)
        except (TypeError, ValueError) as error:
            raise TableError(f"{self.path or 'table'}: the config of {problem} does not fit ({error})") from error

    def updated(self, *entries: Entry) -> "Table":
        """The table with entries added, each in place of an older one of the same kernel, dtype and shape."""
        merged = {entry.key: entry for entry in (*self.entries, *entries)}
        return dataclasses.replace(self, entries=tuple(merged[key] for key in sorted(merged)))

    def save(self, path: Path) -> None:
        """Writes the table, an entry a line, replacing an older file only once it is complete."""
        rows = ",\n  ".join(json.dumps(dataclasses.asdict(entry)) for entry in self.entries)
        head = {"format": FORMAT, "version": VERSION, "gpu": self.gpu}
        text = f'{json.dumps(head)[:-1]}, "entries": [\n  {rows}\n]}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)
        _read.cache_clear()

    @staticmethod
    def load(path: Path | str) -> "Table":
        """Reads a table.

        Raises:
          TableError: it cannot be read, is cut short, or is something else than a table of this version.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TableError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
            raise TableError(f"{path}: is not a JSON file, or was cut short ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TableError(f'{path}: is not a table of tuned configs (no "format": "{FORMAT}")')
        if data.get("version") != VERSION:
            raise TableError(
                f"{path}: has version {reprlib.repr(data.get('version'))}; this program reads version {VERSION}"
            )
        if not isinstance(data.get("gpu"), str) or not isinstance(data.get("entries"), list):
            raise TableError(f"{path}: lacks the name of its GPU or its entries")
        entries = []
        for number, row in enumerate(data["entries"], start=1):
            try:
                entries.append(_entry(row))
            except (TypeError, ValueError) as error:
                raise TableError(f"{path}: entry {number} is not valid ({error})") from error
        return Table(gpu=data["gpu"], entries=tuple(entries), path=path)


def _check_fields(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Raises ValueError where the field of a kernel's config class cannot have a value."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, value in values.items():
        if fields.get(name) is int:
            most = _MOST.get(name, _MOST_OTHERS)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {reprlib.repr(value)}; expected an integer from 1 to {most}")
        elif fields.get(name) is bool and type(value) is not bool:
            raise ValueError(f"{name} is {reprlib.repr(value)}; expected true or false")


def _entry(row: Any) -> Entry:
    """Builds an entry from parsed JSON; raises TypeError or ValueError if it is none."""
    if not isinstance(row, dict):
        raise TypeError(f"expected an object, got {reprlib.repr(row)}")
    entry = Entry(**row)
    if not all(
        isinstance(text, str) for text in (entry.op, entry.backend, entry.dtype, entry.date, entry.versions)
    ):
        raise TypeError("op, backend, dtype, date and versions must be strings")
    if not isinstance(entry.shape, dict) or not all(type(size) is int for size in entry.shape.values()):
        raise TypeError(f"shape must hold integers, got {reprlib.repr(entry.shape)}")
    if not isinstance(entry.bucketed, list) or not set(entry.bucketed) <= set(entry.shape):
        raise ValueError(f"bucketed must name sizes of the shape, got {reprlib.repr(entry.bucketed)}")
    if not isinstance(entry.heuristic, dict) or not isinstance(entry.config, dict | None):
        raise TypeError("config and heuristic must be objects")
    if not all(type(us) in (int, float) and 0 < us < 1e12 for us in (entry.us, entry.heuristic_us)):
        raise ValueError("us and heuristic_us must be positive numbers")
    return dataclasses.replace(entry, bucketed=tuple(entry.bucketed))


def file_name(gpu: str) -> str:
    """`NVIDIA H200` becomes nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def shipped_path(gpu: str) -> Path:
    """Where this package keeps the table of a GPU, if it ships one.

    Args:
      gpu: the GPU's name as JAX has it, e.g. `"NVIDIA H200"`.
    """
    return Path(__file__).parent / "tables" / file_name(gpu)


def cache_path(gpu: str) -> Path:
    """Where a user's own table of a GPU is looked for.

    `$XDG_CACHE_HOME/pallas_models/tuning/<gpu>.json`, with `~/.cache` where XDG_CACHE_HOME is not set.

    Args:
      gpu: as in `shipped_path`.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pallas_models" / "tuning" / file_name(gpu)


def installed(gpu: str) -> tuple[Table, ...]:
    """The tables of a GPU that apply by default: the user's, then the shipped one; none where its name is empty.

    Each is read once in a process. One that cannot be used is left out, with a warning.
    """
    if not gpu:
        return ()
    return tuple(table for path in (cache_path(gpu), shipped_path(gpu)) if (table := _read(path, gpu)))


@functools.cache
def _read(path: Path, gpu: str) -> Table | None:
    try:
        if not path.exists():
            return None
        table = Table.load(path)
    except (TableError, OSError) as error:
        warnings.warn(f"left out a table of tuned configs: {error}", stacklevel=2)
        return None
    if table.gpu != gpu:
        warnings.warn(
            f"left out a table of tuned configs: {path}: is for {reprlib.repr(table.gpu)}, not {gpu}", stacklevel=2
        )
        return None
    return table
