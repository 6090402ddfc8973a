"""docs/support.md says what the ops' programs hold."""

import jax
import pytest

from parity import __main__ as check
from parity.cases import OPS
from parity.support import support_matrix
from parity.support.common import without_gpu

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="has no Mosaic GPU for the kernels")


def lines(begin: str = support_matrix.BEGIN, end: str = support_matrix.END) -> dict[str, str]:
    table = support_matrix.PAGE.read_text("utf-8").partition(begin)[2].partition(end)[0]
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}


def lines_without_triton() -> dict[str, str]:
    return lines(support_matrix.BEGIN_WITHOUT, support_matrix.END_WITHOUT)


def test_every_op_has_a_row():
    ops = [name for name, case in OPS.items() if support_matrix.call_of(case, "float32")]
    assert list(lines()) == list(lines_without_triton()) == ops


@without_gpu
@needs_mosaic
@pytest.mark.parametrize("name", lines())
def test_rows_say_what_is_lowered(name):
    (row,) = support_matrix.rows([OPS[name]])
    assert lines()[name] == support_matrix.line(row).rstrip("\n")


@without_gpu
@needs_mosaic
@pytest.mark.parametrize("name", lines_without_triton())
def test_rows_say_what_is_lowered_without_triton(name):
    (row,) = support_matrix.rows_without_triton([OPS[name]])
    assert lines_without_triton()[name] == support_matrix.line(row).rstrip("\n")


def test_the_program_writes_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr(support_matrix, "rows", lambda: iter([("`a`", *"bcdefg", "h")]))
    monkeypatch.setattr(support_matrix, "rows_without_triton", lambda: iter([("`i`", *"jklmno")]))
    assert check.main(["support", "--output", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Support\n") and "split |\n| ---" in text
    assert f" --- |\n| `a` | b | c | d | e | f | g | h |\n{support_matrix.END}" in text
    assert f" --- |\n| `i` | j | k | l | m | n | o |\n{support_matrix.END_WITHOUT}" in text
    assert "| `matmul`" not in text


def test_dtypes_that_differ_are_named():
    assert support_matrix.cell({"float16": "Triton", "float32": "Triton"}) == "Triton"
    assert support_matrix.cell({"float16": "Mosaic", "float32": "Triton"}) == "Mosaic (float16); Triton (float32)"
