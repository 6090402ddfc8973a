"""The benchmark of several GPUs: what it measures, shows and plots."""

import dataclasses

import pytest

from bench import __main__ as cli
from bench.cases import scaling
from bench.measuring import results
from bench.reporting import plots


def test_scaling_is_measured(tmp_path, capsys):
    assert cli.main(["scaling", "--models=block", "--quick", "--show-results", f"--output={tmp_path}"]) == 0
    (path,) = tmp_path.glob("*/scaling.partial.json")
    result = results.load(path)
    (case,) = result.cases
    (entry,) = case.entries
    assert entry.wall.median_us > 0 and entry.accuracy.value == 0.0 and entry.metrics == {}
    assert "| gpt2 block 64x1024 bf16 |       1 |" in capsys.readouterr().out
    assert plots.scaling(result, "scaling") is None
    half = dataclasses.replace(entry.wall, median_us=entry.wall.median_us / 2)
    other = dataclasses.replace(entry, wall=half, metrics={"all-reduce": 2.0})
    on_two = dataclasses.replace(case, label=f"{case.label[:-1]}2", shape={"devices": 2}, entries=[other])
    both = dataclasses.replace(result, cases=[case, on_two])
    memory = f"{entry.peak_bytes / 1e9:>11.2f}"
    assert scaling.table(both).endswith(f"|      2.00 | 2 all-reduce | {memory} |")
    assert scaling.headline(both) is None
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: plots are drawn with it")
    assert plots.scaling(both, "scaling").alt == "bars: gpt2 block 64x1024 2.00 on 2"
