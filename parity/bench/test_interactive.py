"""The plots that a reader of the site can ask."""

import dataclasses

from bench.reporting import interactive
from parity.bench.test_bench import make_result


def curves(figure, name):
    """Of each family what a plot shows once a figure is chosen."""
    (menu,) = figure.layout.updatemenus
    chosen = next(button for button in menu.buttons if button.label == name)
    shown, labelled = chosen.args
    assert labelled == {"yaxis.title.text": name}
    pairs = zip(figure.data, shown["visible"], strict=True)
    return {curve.name: curve for curve, visible in pairs if visible}


def with_memory(case, peak_bytes):
    entries = [dataclasses.replace(entry, peak_bytes=peak_bytes) for entry in case.entries]
    return dataclasses.replace(case, entries=entries)


def test_a_curve_has_the_best_of_its_kind_from_small_cases_to_large():
    large, small = (with_memory(case, 2e9) for case in make_result().cases[::-1])
    figure = interactive.figure([dataclasses.replace(large, shape={"batch": 1, "seq": 128}), small], "forward")
    found = curves(figure, "device time (us)")
    assert list(found) == ["ours", "XLA", "torch"] and all(curve.visible for curve in found.values())
    assert found["XLA"].x == ("1x16", "1x128") and found["XLA"].y == (20.0, 45.0)
    assert curves(figure, "times slower than ours")["XLA"].y == (2.0, 4.5)
    assert "ours" not in curves(figure, "times slower than ours")
    memory = curves(figure, "memory of a call (GB)")
    assert memory["ours"].y == (2.0, 2.0) and not memory["ours"].visible
    assert figure.layout.yaxis.title.text == "device time (us)" and figure.layout.title.text == "forward"


def test_what_was_not_timed_has_no_curve():
    (case, _) = make_result().cases
    failed = [dataclasses.replace(entry, device=None) for entry in case.entries]
    figure = interactive.figure([dataclasses.replace(case, entries=failed)], "forward")
    assert [button.label for button in figure.layout.updatemenus[0].buttons] == [
        "wall time (us)",
        "times slower than ours",
    ]
    assert interactive.figure([dataclasses.replace(case, entries=[])], "forward") is None


def test_a_page_has_a_plot_for_each_mode_and_loads_nothing_from_elsewhere():
    result = make_result()
    both = dataclasses.replace(result.cases[0], label="1x16+both fp16", shape={"batch": 1, "seq": 16, "both": 1})
    html = interactive.fragment(dataclasses.replace(result, cases=[*result.cases, both]))
    assert 'id="minilm-forward"' in html and 'id="minilm-both"' in html and 'id="minilm-backward"' not in html
    assert "1x16" in html and "1x16+both" not in html and "<script src" not in html
    assert interactive.fragment(dataclasses.replace(result, cases=[])) == ""
    assert interactive.script().stat().st_size > 1e6
