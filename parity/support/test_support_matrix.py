"""docs/support.md says what the ops' programs hold."""

import jax
import pytest

from parity import __main__ as check
from parity.cases import OPS
from parity.support import support_matrix
from parity.support.common import without_gpu

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="has no Mosaic GPU for the kernels")


def lines() -> dict[str, str]:
    found = support_matrix.PAGE.read_text("utf-8").splitlines()
    return {line.split("`")[1]: line for line in found if line.startswith("| `")}


def test_every_op_has_a_row():
    assert list(lines()) == [name for name, case in OPS.items() if support_matrix.call_of(case, "float32")]


@without_gpu
@needs_mosaic
@pytest.mark.parametrize("name", lines())
def test_rows_say_what_is_lowered(name):
    (row,) = support_matrix.rows([OPS[name]])
    assert lines()[name] == support_matrix.line(row).rstrip("\n")


def test_the_program_writes_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr(support_matrix, "rows", lambda: iter([("`a`", *"bcdefg", "h")]))
    assert check.main(["support", "--output", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Support\n") and "split |\n| ---" in text
    assert f" --- |\n| `a` | b | c | d | e | f | g | h |\n{support_matrix.END}" in text and "`matmul`" not in text


def test_dtypes_that_differ_are_named():
    assert support_matrix.cell({"float16": "Triton", "float32": "Triton"}) == "Triton"
    assert support_matrix.cell({"float16": "Mosaic", "float32": "Triton"}) == "Mosaic (float16); Triton (float32)"
