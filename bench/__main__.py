"""`python -m bench COMMAND`: a benchmark, or something made from their results.

A command is a module with HELP, `add_arguments(parser)` and `run(args) -> exit code`, listed in COMMANDS.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# torch and JAX share the GPU's memory in these processes. Must be set before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

COMMANDS = ("minilm", "sts", "compare", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks against XLA and torch.")
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {name: importlib.import_module(f"bench.{name}") for name in COMMANDS}
    for name, module in modules.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))
    args = parser.parse_args(arguments)
    return modules[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
