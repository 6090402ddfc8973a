"""What is lowered is compared by its code, not by the lines that it comes from."""

import jax
import jax.numpy as jnp
import pytest

from pallas_models import ops
from parity import __main__ as check
from parity.support import lowered
from parity.support.lowered import Program, differences, write

X = jax.ShapeDtypeStruct((8, 64), jnp.float16)


def scaled(scale):
    return lambda x: ops.softmax(x, scale=scale, implementation="triton")


def test_the_same_code_has_the_same_digests(tmp_path):
    same = lambda x: ops.softmax(x, scale=2.0, implementation="triton")  # noqa: E731 on a line of its own
    before = write(tmp_path / "before", [Program("softmax", scaled(2.0), (X,))])
    assert differences(before, write(tmp_path / "after", [Program("softmax", same, (X,))])) == []
    assert len(before["softmax"]["kernels"]) == 1
    (kernel,) = before["softmax"]["kernels"]
    text = (tmp_path / "before" / f"{kernel}.mlir").read_text()
    assert "tt.func" in text and "softmax.py" not in text


def test_what_differs_is_told(tmp_path):
    before = write(tmp_path / "before", [Program("softmax", scaled(2.0), (X,))])
    after = write(tmp_path / "after", [Program("softmax", scaled(3.0), (X,))])
    (line,) = differences(before, after)
    assert line.startswith("softmax: kernels ['") and after["softmax"]["kernels"][0] in line
    around = write(tmp_path / "around", [Program("softmax", lambda x: scaled(2.0)(x) + 1, (X,))])
    (line,) = differences(before, around)
    assert line.startswith("softmax: the program around the kernels")


def test_a_call_that_is_refused_has_its_reason(tmp_path):
    program = Program("matmul", lambda x: ops.matmul(x, x.T, activation="nope"), (X,))
    assert "activation='nope'" in write(tmp_path, [program])["matmul"]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lowered, "programs", lambda: iter([Program("softmax", scaled(2.0), (X,))]))
    assert check.main(["lowered", str(tmp_path / "before")]) == 0
    assert capsys.readouterr().out == "1 programs, 0 refused\n"
    monkeypatch.setattr(lowered, "programs", lambda: iter([Program("softmax", scaled(3.0), (X,))]))
    assert check.main(["lowered", str(tmp_path / "after"), "--compare", str(tmp_path / "before")]) == 1
    assert capsys.readouterr().out.endswith("\n1 differ\n")


def test_every_kernel_has_a_program():
    names = {program.name.split("/")[1] for program in lowered.programs()}
    assert {"matmul", "attention", "triangle_update", "post_norm_layers"} <= names
    assert len(names) > 30


pytestmark = pytest.mark.filterwarnings("error")
