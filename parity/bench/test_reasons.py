"""Where ours is the slower, the pages say so and why, and nothing is explained that is not so."""

import dataclasses

import pytest

from bench import __main__ as cli
from bench.cases import startup, sts
from bench.measuring import results
from bench.reporting import readme, reasons, report, tables
from parity.bench.test_bench import COMMITTED, entry, make_result

FOLDERS = sorted({path.parent for path in COMMITTED})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_row_that_is_slower_has_a_reason_and_no_other(folder):
    found, failed = report.load_all(folder)
    why = reasons.load(folder)
    slower = {result.benchmark: readme.slower(result) for result in found}
    assert not failed and sum(map(len, slower.values())) > 10
    unknown = [
        (r.benchmark, row)
        for r in found
        for row in slower[r.benchmark]
        if reasons.of(r, row, why) is reasons.UNKNOWN
    ]
    assert not unknown and not reasons.unused(why, slower)
    assert all(
        text.endswith(".") and "\n" not in text and ". " not in text for text in why.values()
    )  # one sentence


def slower_result():
    """Of two cases one is slower than torch by device and wall time, and one too close to tell."""
    one, two = make_result().cases
    far = dataclasses.replace(one, entries=[entry("ours", 10.0), entry("torch", 5.0)])
    near = dataclasses.replace(two, entries=[entry("ours", 10.0), entry("torch", 9.9)])
    return make_result(cases=[far, near])


REASON = '[[reason]]\nclock = "device time"\nwhy = "it <waits>."\nrows.minilm = ["1x16 fp16"{more}]\n'


def run(tmp_path, text, capsys):
    """The exit code, the page, and what is said of errors."""
    path = results.save(slower_result(), tmp_path)
    (path.parent / reasons.NAME).write_text(text)
    code = cli.main(["report", "--results", str(tmp_path), "--no-readme", "--no-html"])
    return code, (path.parent / readme.NAME).read_text(), capsys.readouterr().err


def test_reasons_stand_below_the_table(tmp_path, capsys):
    code, page, said = run(tmp_path, REASON.format(more=""), capsys)
    assert code == 0 and said == ""
    table, listed = page.split("Where ours is the slower:\n\n")
    assert "|1x16 fp16|10|-|5|-|0.50|" in table
    assert listed.splitlines()[:4] == [
        "- Device time, 1x16 fp16 (torch / ours 0.50): it &lt;waits&gt;.",
        f"- Device time, 1x128 fp16 (torch / ours 0.99): {reasons.NOISE}",
        f"- Wall time, 1x16 fp16 (torch / ours 0.50): {reasons.UNKNOWN}",
        f"- Wall time, 1x128 fp16 (torch / ours 0.99): {reasons.NOISE}",
    ]


def test_what_is_out_of_date_or_unreadable_is_said(tmp_path, capsys):
    code, _, said = run(tmp_path, REASON.format(more=', "2x2 fp16"'), capsys)
    assert code == 0 and "ours is not the slower in minilm, device time, 2x2 fp16" in said
    for text in ("[[reason]", "[[reason]]\nclock = 3", "reason = 3", ""):
        code, page, said = run(tmp_path, text, capsys)
        assert code == 1 and str(tmp_path / "nvidia-h200" / reasons.NAME) in said and reasons.UNKNOWN in page


def test_a_row_that_is_shown_as_equal_is_not_slower():
    found = [tables.Comparison(clock="c", case="c", rival="r", ratio=ratio) for ratio in (0.994, 0.996, 1.0)]
    assert [row.is_slower for row in found] == [True, False, False]


def test_means_by_both_clocks():
    assert tables.means(make_result()) == (
        "Geometric means: 3.00 over XLA, 4.00 over torch by device time; "
        "3.00 over XLA, 4.00 over torch by wall time, in which a call's dispatch counts."
    )
    bare = [dataclasses.replace(case, entries=[]) for case in make_result().cases]
    assert tables.means(make_result(cases=bare)) == ""


def test_benchmarks_that_compare_other_figures():
    bare = dict(device=None, wall=None)
    of = {"ours": {sts.TEXT_IN: 30.0, sts.IDS_IN: 50.0}, "peer": {sts.TEXT_IN: 60.0}, "torch": {sts.IDS_IN: 25.0}}
    case = dataclasses.replace(
        make_result().cases[0], label="fp16", entries=[entry(f, 1, metrics=m, **bare) for f, m in of.items()]
    )
    result = make_result(benchmark="sts", cases=[case])
    assert [(row.clock, row.rival, row.ratio) for row in sts.comparisons(result)] == [
        ("text in", "sentence-transformers", 0.5),
        ("ids in", "torch eager", 2.0),
    ]
    found = readme.headline(result)
    assert (found.ours, found.baseline) == ("30 sentences/s, text in", "sentence-transformers, 60 sentences/s")
    of = {"pallas": {"total_s": 4.0}, "xla": {"total_s": 3.0}, "triton": {"total_s": 1.0}}
    entries = [
        entry("ours" if name == "pallas" else "xla", 1, name=name, metrics=m, **bare) for name, m in of.items()
    ]
    result = make_result(benchmark="startup", cases=[dataclasses.replace(case, entries=entries)])
    assert [(row.clock, row.rival, row.ratio) for row in readme.slower(result)] == [("first call", "XLA", 0.75)]
    assert readme.slower(result) == startup.comparisons(result)
