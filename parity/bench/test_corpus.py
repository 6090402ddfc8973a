"""The benchmark from files to files: what it writes, measures and shows."""

import concurrent.futures
import subprocess
import sys

import pytest

from bench import __main__ as cli
from bench.cases import corpus, startup
from bench.measuring import environment, results
from pallas_models.corpus import reading
from parity.weights import checkpoints


@pytest.mark.parametrize("suffix", ["txt", "parquet"])
def test_a_corpus_is_as_long_as_asked(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    corpus.write(path, ["a  man", "is\nplaying"], 5)
    assert list(reading.Corpus([path])) == ["a man", "is playing"] * 2 + ["a man"]


def test_memory_counts_from_the_second_part_on():
    samples = [(0, 90.0), (9, 10.0), (10, 20.0), (12, 30.0), (25, 40.0), (40, 28.0), (41, 26.0)]
    assert corpus.memory(samples, per=10) == {
        "resident_second_mib": 25.0,
        "resident_last_mib": 27.0,
        "resident_lowest_mean_mib": 25.0,
        "resident_highest_mean_mib": 40.0,
        "resident_least_mib": 20.0,
        "resident_most_mib": 40.0,
    }
    assert corpus.memory(samples[:2], per=10) == {}


def test_memory_is_that_of_the_children_too():
    before = corpus.resident_mib()
    hold = "held = bytearray(2**27); print(flush=True); input()"  # 128 MiB
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert corpus.resident_mib() > before + 100
        child.communicate(b"\n")
    assert corpus.resident_mib() < before + 50


def test_what_ends_while_it_is_looked_at_counts_nothing(tmp_path):
    (tmp_path / "statm").write_text("12 34\n")
    assert corpus.words(tmp_path / "statm") == ["12", "34"]
    assert corpus.words(tmp_path / "children") == []


def test_a_run(tmp_path, monkeypatch, capsys):
    """In this process, where a case has one of its own otherwise."""
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(startup, "read_corpus", lambda folder: ["a man is playing", "the guitar"])
    monkeypatch.setattr(corpus, "PER", 20)
    monkeypatch.setattr(corpus, "INTERVAL_S", 1e-4)
    monkeypatch.setattr(
        corpus.concurrent.futures,
        "ProcessPoolExecutor",
        lambda workers, mp_context: concurrent.futures.ThreadPoolExecutor(workers),
    )
    folder = checkpoints.write(tmp_path / "model")
    options = ["--data", str(tmp_path), "--weights", str(folder), "--output", str(tmp_path)]
    assert cli.main(["corpus", *options, "--sentences", "50", "--long", "60", "--show-results"]) == 0
    (path,) = tmp_path.glob("*/corpus.partial.json")
    found = results.load(path)
    assert found.settings["weights"] == "model"  # no path of this machine
    assert [case.label for case in found.cases] == [f"{a} to {b}" for a, b in corpus.KINDS] + [
        "txt to parquet, long"
    ]
    assert all(case.entries[0].metrics["sentences_per_s"] > 0 for case in found.cases)
    assert "| txt to parquet, long" in capsys.readouterr().out


def test_what_cannot_be_read(tmp_path, capsys):
    assert cli.main(["corpus", "--data", str(tmp_path)]) == 2
    assert "stsb-en-test.csv" in capsys.readouterr().out
