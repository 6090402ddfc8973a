"""`python -m bench compare`: which changes count, and what it says about files that cannot be compared."""

import dataclasses
from pathlib import Path

import pytest

from bench import __main__ as cli
from bench.measuring import results
from bench.measuring.results import Case, Entry, Result
from bench.measuring.timing import Timing
from bench.reporting import compare
from parity.bench.test_bench import entry, make_result


def timing(median: float, spread: float) -> Timing:
    low, high = median * (1 - spread), median * (1 + spread)
    return Timing(median_us=median, p20_us=low, p80_us=high, samples=24, method="cupti")


def scaled(result: Result, family: str, factor: float, spread: float = 0.001) -> Result:
    """The result with the times of one family multiplied by `factor`, all of them with that spread."""

    def change(e: Entry) -> Entry:
        if e.wall is None:
            return e
        time = timing(e.wall.median_us * (factor if e.family == family else 1), spread)
        return dataclasses.replace(e, device=time, wall=time)

    cases = [dataclasses.replace(c, entries=[change(e) for e in c.entries]) for c in result.cases]
    return dataclasses.replace(result, cases=cases)


def save(result: Result, path: Path) -> str:
    path.mkdir()
    return str(results.save(result, path))


@pytest.mark.parametrize(
    ("before", "after", "spread", "expected"),
    [
        (100, 90, 0.01, compare.FASTER),
        (100, 110, 0.01, compare.SLOWER),
        (100, 102, 0.001, compare.SAME),  # apart, but less than the threshold
        (100, 110, 0.08, compare.SAME),  # the ranges overlap
        (100, 100, 0.0, compare.SAME),
    ],
)
def test_verdict(before, after, spread, expected):
    assert compare.verdict(timing(before, spread), timing(after, spread), 0.03) == expected


def test_table(tmp_path, capsys):
    a = save(scaled(make_result(), "ours", 1.0), tmp_path / "a")
    b = save(scaled(make_result(), "ours", 0.8), tmp_path / "b")
    assert cli.main(["compare", a, b, "--check"]) == 0
    out = capsys.readouterr().out
    assert out.count("| 0.800 |  faster |") == 4  # two cases, two clocks
    assert "Device time:" in out and "Wall time:" in out and "commit abc123" in out
    assert "2 faster, 0 SLOWER, 6 same." in out
    assert "Geometric mean of B / A: ours 0.800, xla 1.000, torch 1.000." in out
    assert cli.main(["compare", b, a, "--changed", "--clock", "wall"]) == 0
    out = capsys.readouterr().out
    assert out.count("SLOWER |") == 2 and "same |" not in out and "Device time" not in out
    assert cli.main(["compare", b, a, "--check"]) == 1
    assert cli.main(["compare", b, a, "--check", "--threshold", "30"]) == 0


def test_check_looks_at_ours_only(tmp_path):
    a = save(scaled(make_result(), "xla", 1.0), tmp_path / "a")
    b = save(scaled(make_result(), "xla", 2.0), tmp_path / "b")
    assert cli.main(["compare", a, b, "--check"]) == 0


def test_differing_conditions_and_statuses(tmp_path, capsys):
    a = make_result()
    first, second = a.cases
    lost = dict(status="failed", message="out of memory", device=None, wall=None)
    broken = [dataclasses.replace(first.entries[0], **lost), *first.entries[1:4]]
    more = dataclasses.replace(second, label="2x16 fp16")
    b = make_result(
        environment=a.environment | {"driver": "590.2"},
        settings={"weights": "real"},
        ceilings={"copy_tb_per_s": 2.1},
        cases=[dataclasses.replace(first, entries=broken), more],
    )
    a, b = save(a, tmp_path / "a"), save(b, tmp_path / "b")
    assert cli.main(["compare", a, b]) == 0
    assert cli.main(["compare", a, b, "--check"]) == 1
    out = capsys.readouterr().out
    for line in (
        "driver: 580.1 in A, 590.2 in B",
        "setting weights: random in A, real in B",
        "measured ceiling copy_tb_per_s: B has 0.500 times A's",
        "only in A: 1x128 fp16, 1x16 fp16 torch-graph",
        "only in B: 2x16 fp16",
        "1x16 fp16 ours-10: ok in A, failed in B (out of memory)",
    ):
        assert f"- {line}\n" in out


def test_metrics(tmp_path, capsys):
    def result(rate: float) -> Result:
        metrics = {"spearman": 82.0, "sentences_per_s": rate, "compile_s": 10 - rate / 1000}
        ours = entry("ours", 1, device=None, wall=None, metrics=metrics)
        cases = [Case(label="fp16", dtype="fp16", shape={}, flop=None, entries=[ours])]
        return make_result(benchmark="sts", cases=cases)

    a, b = save(result(1000), tmp_path / "a"), save(result(900), tmp_path / "b")
    assert cli.main(["compare", a, b, "--check"]) == 1
    rows = [line.split("|")[3:-1] for line in capsys.readouterr().out.splitlines() if "ours-1" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["spearman", "82", "82", "1", ""],
        ["sentences_per_s", "1000", "900", "0.9", "SLOWER"],
        ["compile_s", "9", "9.1", "1.011", "same"],
    ]
    a, b = save(result(5000), tmp_path / "c"), save(result(1000), tmp_path / "d")
    assert cli.main(["compare", b, a]) == 0
    assert "compile_s |    9 |    5 | 0.5556 |  faster |" in capsys.readouterr().out


def test_another_method_gives_no_verdict(tmp_path, capsys):
    def other(e: Entry) -> Entry:
        return dataclasses.replace(e, device=e.device and dataclasses.replace(e.device, method="cuda_events"))

    a = scaled(make_result(), "ours", 3.0)
    cases = [dataclasses.replace(c, entries=[other(e) for e in c.entries]) for c in make_result().cases]
    a, b = save(a, tmp_path / "a"), save(make_result(cases=cases), tmp_path / "b")
    assert cli.main(["compare", a, b, "--clock", "device"]) == 0
    out = capsys.readouterr().out
    assert "measured by cupti in A, cuda_events in B" in out and "0 faster, 0 SLOWER, 0 same" in out


def first_case(**changes: object) -> Result:
    result = make_result()
    return dataclasses.replace(result, cases=[dataclasses.replace(result.cases[0], **changes)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_result(benchmark="sts"), "A is a result of 'minilm', B of 'sts'"),
        (make_result(cases=[]), "no case in common: A has 1x16 fp16, 1x128 fp16; B has none"),
        (first_case(shape={"batch": 2}), "case 1x16 fp16 is fp16 {'batch': 1, 'seq': 16} in A"),
    ],
)
def test_mismatched_files(tmp_path, capsys, other, message):
    a, b = save(make_result(), tmp_path / "a"), save(other, tmp_path / "b")
    assert cli.main(["compare", a, b]) == 2
    err = capsys.readouterr().err
    assert f"{a} and {b} cannot be compared" in err and message in err


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"format": "pallas_models.bench", "version": 7}'])
def test_unusable_files(tmp_path, capsys, content):
    a, b = save(make_result(), tmp_path / "a"), tmp_path / "b.json"
    if content is not None:
        b.write_bytes(content)
    assert cli.main(["compare", a, str(b)]) == 2
    assert f"{b}: " in capsys.readouterr().err


@pytest.mark.parametrize("threshold", ["-1", "nan", "few"])
def test_threshold_that_is_none(capsys, threshold):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", "a", "b", f"--threshold={threshold}"])
    assert f"{threshold!r} is no percentage" in capsys.readouterr().err
