"""`bench.measuring.sources`: which code a result times, and whether it has changed since."""

import dataclasses
import gzip
import re
from pathlib import Path

import pytest

import bench.cases
from bench.__main__ import BENCHMARKS
from bench.measuring import results, sources
from bench.reporting import readme, report, sheet
from parity.bench.test_bench import make_result

CODE = '''"""A module."""


def f(x):
    """Doubles."""
    y = 2 * x  # twice
    return f"{ y } {{y}}"
'''


@pytest.mark.parametrize(
    "old, new",
    [
        ('"""A module."""\n', ""),
        ('    """Doubles."""\n', ""),
        ("  # twice", ""),
        ("2 * x", "2*x"),
        ("\n\ndef", "\ndef"),
    ],
)
def test_words_do_not_count(old, new):
    assert old in CODE and sources.digest(CODE.replace(old, new)) == sources.digest(CODE)


@pytest.mark.parametrize(
    "old, new",
    [("2 *", "3 *"), ("{{y}}", "{{z}}"), ("    return", "return"), ("f(x)", "f(y)"), ('"""A', 'a = """A')],
)
def test_code_counts(old, new):
    assert old in CODE and sources.digest(CODE.replace(old, new)) != sources.digest(CODE)


def test_digest_is_the_same_in_every_version_of_python():
    assert sources.digest(CODE) == "ae931a5df5d4"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_times_kernels_of_both_backends(name):
    found = sources.timed(name)
    for backend in ("kernels.mosaic.", "kernels.triton.", "ops."):
        assert any(module.startswith(backend) for module in found)


def test_a_benchmark_times_no_other_kernels():
    kernels = {name for name in sources.timed("norm") if "mosaic" in name and ".common." not in name}
    assert kernels == {f"kernels.mosaic.{name}" for name in ("norm", "norm_backward", "norm_backward_rows")}
    assert "kernels.mosaic.common.rows" in sources.timed("norm")
    assert "kernels.mosaic.trimul_output_backward_kernel" in sources.timed("trimul")
    assert "kernels.mosaic.post_norm_layers_kernel" in sources.timed("minilm")


def saved(result, folder):
    results.save(result, folder)
    return result


def test_a_whole_result_records_them(tmp_path):
    draft = make_result(benchmark="norm", partial=True)
    results.save(draft, tmp_path)
    whole = results.complete(draft, tmp_path)
    assert whole.sources == sources.timed("norm")
    assert results.load(results.path_of(whole, tmp_path)) == whole


def test_modes_of_one_commit_are_one_result(tmp_path):
    first = results.complete(saved(make_result(benchmark="norm", partial=True), tmp_path), tmp_path)
    again = dataclasses.replace(first.cases[0], flop=1.0)
    both = dataclasses.replace(first.cases[0], label="1x16+both fp16", shape={"rows": 1, "both": 1})
    second = dataclasses.replace(first, cases=[again, both], partial=True, sources={})
    whole = results.complete(saved(second, tmp_path), tmp_path)
    assert whole.cases == [*first.cases[1:], again, both] and [case.mode for case in whole.cases][-1] == "both"
    stale = dataclasses.replace(whole, sources=whole.sources | {"kernels.mosaic.norm": "0" * 12})
    results.save(stale, tmp_path)
    assert results.kept(second, tmp_path) == []  # of other code, under the same name of a commit
    later = dataclasses.replace(second, environment=second.environment | {"commit": "later"})
    assert results.complete(saved(later, tmp_path), tmp_path).cases == later.cases


def stored(result, folder):
    """The compressed file of a result."""
    path = results.save(result, folder)
    compressed = path.with_name(f"{path.name}.gz")
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return compressed


def test_results_of_a_commit_are_confirmed_where_its_programs_are_those_of_today(tmp_path, monkeypatch):
    old = make_result(benchmark="norm", sources={"kernels.mosaic.norm": "0" * 12})
    other = dataclasses.replace(old, benchmark="softmax", environment=old.environment | {"commit": "other"})
    path, kept = stored(old, tmp_path), stored(other, tmp_path)
    monkeypatch.setattr(results.environment, "commit", lambda: "today")
    assert results.confirm(tmp_path, "abc") == [path]
    found = results.load(path)
    assert found == dataclasses.replace(old, sources=sources.timed("norm"), confirmed="today")
    assert readme.stale(found) == "" and results.stored(tmp_path) == [path, kept]
    assert results.load(kept) == other
    assert "at commit abc123, whose programs are those of today." in readme.section(found, {})
    with pytest.raises(ValueError, match="no results of nothing"):
        results.confirm(tmp_path, "nothing")
    monkeypatch.setattr(results.environment, "commit", lambda: "today+changes")
    with pytest.raises(ValueError, match=r"today\+changes: commit the changes first"):
        results.confirm(tmp_path, "abc")


def test_a_report_marks_what_is_older_than_its_kernels():
    now = make_result(benchmark="norm", sources=sources.timed("norm"))
    assert readme.stale(now) == "" and readme.MARK not in readme.summary([now], "")
    older = dataclasses.replace(now, sources=now.sources | {"kernels.mosaic.norm": "0" * 12})
    assert readme.stale(older) == "Changed since: kernels.mosaic.norm."
    page = readme.page([older], [], {})
    assert f"[Layer norm and RMS norm of rows](#norm){readme.MARK}|" in page and readme.stale(older) in page
    fewer = {name: value for name, value in now.sources.items() if name != "ops.norm"}
    assert readme.stale(dataclasses.replace(now, sources=fewer)) == "Changed since: ops.norm."
    assert "does not record" in readme.stale(dataclasses.replace(now, sources={}))
    assert readme.stale(make_result(benchmark="unknown")) == ""


def test_one_sheet_has_every_figure():
    result = make_result()
    header, *rows = sheet.text([result, result]).splitlines()
    assert header.split(",") == list(sheet.COLUMNS)
    assert len(rows) == 2 * sum(len(case.entries) for case in result.cases)
    case = result.cases[0]
    timed = next(entry for entry in case.entries if entry.device)
    row = dict(zip(sheet.COLUMNS, rows[case.entries.index(timed)].split(","), strict=True))
    assert row["gpu"] == "NVIDIA H200" and row["candidate"] == timed.name
    assert float(row["device_us"]) == timed.device.median_us and float(row["wall_us"]) == timed.wall.median_us


def test_the_committed_sheet_is_of_the_committed_results():
    gpus = sorted({path.parent for path in results.stored(results.DEFAULT_FOLDER)})
    found = [result for folder in gpus for result in report.load_all(folder)[0] if not result.partial]
    assert sheet.text(found) == (results.DEFAULT_FOLDER / sheet.NAME).read_text("utf-8")


def test_benchmarks_make_their_results_whole_by_what_records_the_sources():
    begun = 0
    for path in Path(bench.cases.__path__[0]).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "results.begun(" in text:
            begun += 1
            assert "results.complete(" in text and not re.search(r"\bpartial=", text), path.name
    assert begun >= 5
