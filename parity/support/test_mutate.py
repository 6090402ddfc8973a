"""Every mutant can be made, and a mutant that lives is found."""

import ast
import shlex

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from parity import __main__ as check
from parity.support import mutate
from parity.support.mutants import MUTANTS, Mutant
from parity.support.mutate import ROOT


def test_every_mutant_applies():
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        broken = mutate.applied(mutant, text)
        assert broken != text
        ast.parse(broken)  # what does not even parse would be killed by any test
        files = [part for part in shlex.split(mutant.tests) if part.endswith(".py")]
        assert files and all((ROOT / file).exists() for file in files)
    assert len({(mutant.file, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 60


def test_every_mutant_names_tests_that_are_there(request):
    """Of the files that this run collects: all, where it is the whole suite."""
    names: dict[str, list[KeywordMatcher]] = {}
    for item in request.session.items:
        names.setdefault(item.path.relative_to(ROOT).as_posix(), []).append(KeywordMatcher.from_item(item))
    for mutant in MUTANTS:
        files, _, chosen = mutant.tests.partition(" -k ")
        expression = Expression.compile("".join(shlex.split(chosen)) or "test")
        for file in names.keys() & set(files.split()):
            assert any(map(expression.evaluate, names[file])), f"{mutant.file}: no test is {mutant.tests}"


def test_a_mutant_that_no_longer_applies_is_refused():
    mutant = Mutant("pallas_models/target.py", "no such text", "", "test_target.py")
    with pytest.raises(ValueError, match=r"pallas_models/target.py has 'no such text' 0 times; expected once"):
        mutate.applied(mutant, "text")


@pytest.mark.parametrize("old, state, code", [("1 + 1", "killed", 0), ("comment", "lives", 1)])
def test_outcomes(monkeypatch, tmp_path, capsys, old, state, code):
    (tmp_path / "parity").mkdir()
    (tmp_path / "two.py").write_text("two = 1 + 1  # comment\n")
    (tmp_path / "parity" / "test_two.py").write_text(
        "from two import two\n\n\ndef test_two():\n    assert two == 2\n"
    )
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "MUTANTS", [Mutant("two.py", old, "1 + 2", "parity/test_two.py")])
    output = tmp_path / "out" / "mutants.json"
    assert check.main(["mutate", "--workers", "1", "--output", str(output)]) == code
    assert capsys.readouterr().out.startswith(state)
    assert f'"state": "{state}"' in output.read_text()
    assert (tmp_path / "two.py").read_text() == "two = 1 + 1  # comment\n"
    assert check.main(["mutate", "--workers", "1", "--but", str(output)]) == code
    left = "0 mutants: \n" if state == "killed" else "1 mutants: 1 lives\n"
    assert capsys.readouterr().out.endswith(left)
    skipped = "import pytest\n\n\n@pytest.mark.skip\ndef test_two():\n    pass\n"
    (tmp_path / "parity" / "test_two.py").write_text(skipped)
    assert check.main(["mutate", "--workers", "1"]) == 0
    assert capsys.readouterr().out.endswith("1 mutants: 1 skipped\n")
    (tmp_path / "parity" / "test_two.py").write_text("def test_two():\n    assert False\n")
    assert check.main(["mutate", "--workers", "1"]) == 2
    assert "do not pass as it is:\nparity/test_two.py" in capsys.readouterr().err
