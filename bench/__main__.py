"""`python -m bench COMMAND`: a benchmark, or something made from their results.

A command is a module with HELP, `add_arguments(parser)` and `run(args) -> exit code`; `-` in its name is `_` in
the module's. A benchmark is listed in BENCHMARKS, which is all that it takes for `python -m bench all` to run it
and for `report` to show it; any other command in COMMANDS. How to write one: `bench.harness`.

A benchmark takes --output and saves what it has after every case; if it has --dtype, --shapes, --quick,
--show-results or --data, `all` hands on what was given. If its module has a function `table(result)`, that makes
its table in README.md.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

# torch and JAX share the GPU's memory in these processes. Must be set before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

BENCHMARKS = ("minilm", "sts", "gemm", "softmax", "norm", "attention", "gated-mlp", "trimul", "gpt2", "qwen3")
COMMANDS = (*BENCHMARKS, "all", "compare", "report", "tune")


def module_of(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"bench.{name.replace('-', '_')}")


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
    args = parser.parse_args(given)
    try:
        return int(module_of(args.command).run(args))
    except KeyboardInterrupt:
        print("interrupted; what was measured before is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
