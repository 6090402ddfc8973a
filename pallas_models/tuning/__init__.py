"""Tile configs measured per GPU: tables, how a kernel finds its config in them, and the autotuner that makes them.

A kernel, Triton's or Mosaic's, gets the first config of these:

1. `config` given to the op: a config of its kernel, or a `Table` (`Table.load("mine.json")`) that is asked first;
2. the user's table, `$XDG_CACHE_HOME/pallas_models/tuning/<gpu>.json` (XDG_CACHE_HOME is ~/.cache if not set);
3. the table that ships with this package, for the GPUs that it was tuned on;
4. the kernel's heuristic. `config=HEURISTIC` asks for it alone.

The GPU is the target of the compilation; where that is unknown, or none, no table applies. Configs are chosen when
a call is traced, and a file is read once in a process: traced programs keep their configs, and a change of
a file takes effect in the next process (a result that `Result.save` writes in the next trace). Results of two
configs can differ in rounding: to fix them to the last bit over machines, give `config`.

A table has an entry per kernel, backend, dtype and shape. An entry holds for its own shape and, unless one is
nearer, for all in its bucket: those whose bucketed sizes (numbers of rows, mostly) have the same nearest power of
two and whose other sizes are the same.
"""

from pallas_models.tuning.autotuner import Result, Trial, autotune
from pallas_models.tuning.choice import choose, lookup
from pallas_models.tuning.problem import HEURISTIC, Chooser, Problem
from pallas_models.tuning.table import Entry, Table, TableError, cache_path, shipped_path

__all__ = [
    "HEURISTIC",
    "Chooser",
    "Entry",
    "Problem",
    "Result",
    "Table",
    "TableError",
    "Trial",
    "autotune",
    "cache_path",
    "choose",
    "lookup",
    "shipped_path",
]
