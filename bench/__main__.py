"""`python -m bench COMMAND`: a benchmark, or something made from their results.

A command is a module with HELP, `add_arguments(parser)` and `run(args) -> exit code`; `-` in the command's name is
`_` in the module's. A benchmark is a module of `bench.cases`, which is found by itself: `python -m bench all` runs
it and `report` shows it. Modules there whose names begin with `_` have tiles to tune and no benchmark. Any other
command is listed in COMMANDS with its package. How to write a benchmark: `bench.measuring.harness`.

A benchmark takes --output and saves its result after every case. If it has --dtype, --shapes, --quick,
--show-results or --data, `all` passes on what it was given. If its module has a function `table(result)`, that
makes the benchmark's tables on the generated pages; `headline(result)` gives its line in README.md where a ratio
of device times does not say it.
"""

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from bench import cases

# torch and JAX share the GPU's memory in these processes. Must be set before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# The benchmarks that run and are shown first, in this order; others follow by name.
FIRST = ("minilm", "sts", "corpus", "gemm", "softmax", "norm", "attention")
LAST = ("trimul", "pairformer", "gpt2", "qwen3", "train", "startup", "scaling")


def _order(name: str) -> tuple[int, int, str]:
    """First, others by name, last."""
    if name in FIRST:
        return 0, FIRST.index(name), name
    return (2, LAST.index(name), name) if name in LAST else (1, 0, name)


_MODULES = [module.name.replace("_", "-") for module in pkgutil.iter_modules(cases.__path__)]
BENCHMARKS = tuple(sorted((name for name in _MODULES if name[0] != "-"), key=_order))
COMMANDS = dict.fromkeys(BENCHMARKS, "cases")  # name: package
COMMANDS |= {"all": "measuring", "tune": "measuring"}
COMPILING = tuple(COMMANDS)
COMMANDS |= {"compare": "reporting", "report": "reporting"}


def module_of(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"bench.{COMMANDS[name]}.{name.replace('-', '_')}")


def compilation_cache() -> ModuleType:
    """Where compiled programs are kept between runs; imported here, as it imports JAX."""
    return importlib.import_module("pallas_models.compilation_cache")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks against XLA and torch.")
    commands = parser.add_subparsers(dest="command", required=True)
    needed = given[:1] if given and given[0] in COMMANDS else COMMANDS  # none waits for the imports of another
    for name in needed:
        try:
            module = module_of(name)
        except ImportError as error:
            if name in given[:1]:
                raise
            commands.add_parser(name, help=f"cannot be loaded: {error}")
        else:
            command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
            module.add_arguments(command)
            if name in COMPILING:
                compilation_cache().add_arguments(command)
    args = parser.parse_args(given)
    if args.command in COMPILING and arguments is None:  # what is called by a program leaves JAX's settings
        compilation_cache().enable(args.compilation_cache)
        # JAX gives no memory back, and would take three quarters: too much where torch computes the same.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    try:
        return int(module_of(args.command).run(args))
    except KeyboardInterrupt:
        print("interrupted; what was measured before is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    from pallas_models._processes import run_program

    run_program(main)
