"""Options that command lines share. JAX is not imported here, so that `--help` answers at once."""

import argparse
import os
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors take two lines: the message, and where the options are explained."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nsee {self.prog} --help\n")


def default_folder() -> Path:
    """The folder in which programs keep compiled code unless told otherwise.

    ```
    folder = compilation_cache.default_folder()  # ~/.cache/pallas_models/compilation
    ```
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pallas_models" / "compilation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--compilation-cache DIR` and `--no-compilation-cache`, both as `args.compilation_cache`.

    ```
    import argparse

    parser = argparse.ArgumentParser()
    compilation_cache.add_arguments(parser)
    args = parser.parse_args(["--no-compilation-cache"])
    compilation_cache.enable(args.compilation_cache)
    ```
    """
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--compilation-cache",
        metavar="DIR",
        type=Path,
        default=default_folder(),
        help="keep compiled code here for the next run (%(default)s)",
    )
    choice.add_argument(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_const",
        const=None,
        help="compile anew, and keep nothing",
    )
