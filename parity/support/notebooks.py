"""Runs the code of a notebook without Jupyter: `python -m parity.support.notebooks PATH [--write]`.

Cells run in turn in one namespace. What they print goes to standard output as a list of JSON, a text for each
code cell; `--write` keeps it in the notebook, where the site shows it.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What the cell printed when it was last written."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(notebook: dict[str, Any]) -> list[str]:
    """Runs the code cells; returns what each printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    for number, cell in enumerate(code_cells(notebook)):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        texts.append(text.getvalue())
    return texts


def main(path: Path, write: bool) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    texts = run(notebook)
    if write:
        for cell, text in zip(code_cells(notebook), texts, strict=True):
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps(texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--write" in sys.argv)
