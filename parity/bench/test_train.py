"""`python -m bench train` on a CPU: all contenders learn the same, what is wrong is not timed, figures add up."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as cli
from bench.cases import train
from bench.measuring import results
from bench.models import train_programs as programs
from bench.reporting import readme
from pallas_models.gpt2 import GPT2Config
from parity.bench.test_bench import FAST, checkpoint, entry, make_result

__all__ = ["checkpoint"]  # a fixture: a small encoder, and no GPU

CONFIG = GPT2Config(vocab_size=64, hidden_size=192, num_layers=1, num_heads=12, intermediate_size=64)


def test_everybody_learns_the_same(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "CPU_GPT2", CONFIG)
    monkeypatch.setattr(train.timing, "STANDARD", FAST)
    assert cli.main(["train", "--output", str(tmp_path), "--show-results"]) == 0
    result = results.load(tmp_path / "cpu" / "train.partial.json")
    assert [case.label for case in result.cases] == ["gpt2 2x16 bf16", "minilm 4x12 bf16"]
    for case in result.cases:
        status = {e.name: e.status for e in case.entries}
        assert status.pop("torch-compile") == "skipped"
        assert set(status.values()) <= {"ok", "skipped"} and status["pallas"] == "ok"
        found = {e.name: e for e in case.entries if e.status == "ok"}
        assert all(e.wall and e.accuracy.value <= train.LIMIT for e in found.values())
    assert "gpt2 2x16 bf16, pallas " in capsys.readouterr().out


def test_what_does_not_learn_is_not_timed():
    def trainer(losses):
        return programs.Trainer(
            step=lambda i: np.float32(losses[min(i, 5)]), wait=lambda _: None, peak_bytes=lambda: 5e9
        )

    def absent():
        raise ImportError("No module named 'torch'", name="torch")

    right = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    makes = {
        "right": lambda: trainer(right),
        "still": lambda: trainer([5.0] * 6),
        "nan": lambda: trainer([5.0, 4.0, 3.0, 2.0, 1.0, np.nan]),
        "absent": absent,
        "broken": lambda: trainer([]),
    }
    contenders = [train.Contender(name=name, family="ours", make=make) for name, make in makes.items()]
    workload = train.Workload(batches=[], contenders=contenders, reference=makes["right"], flop=1.0)
    entries = {e.name: e for e in train.measure(workload, FAST, gpu=False)}
    assert {name: e.status for name, e in entries.items()} == {
        "right": "ok",
        "still": "wrong",
        "nan": "wrong",
        "absent": "skipped",
        "broken": "failed",
    }
    assert entries["right"].wall and entries["right"].peak_bytes == 5e9
    assert entries["absent"].message == "torch is not installed"
    assert entries["still"].message.startswith("losses [5. 5.")


def test_rates_and_headline():
    ours, theirs = entry("ours", 50_000.0, peak_bytes=12e9), entry("torch", 60_000.0)
    case = results.Case(
        label=train.SHOWN, dtype="bf16", shape={"batch": 32, "seq": 1024}, flop=1.0, entries=[ours, theirs]
    )
    other = dataclasses.replace(case, label="minilm 256x64 bf16", shape={"batch": 256, "seq": 64})
    result = make_result(benchmark="train", cases=[other, case])
    found = readme.headline(result)
    assert (found.case, found.ours, found.baseline) == (train.SHOWN, "655,360 tokens/s", "torch, 546,133 tokens/s")
    assert found.ratio == pytest.approx(1.2) and found.mean == pytest.approx(1.2)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in train.table(result).splitlines()]
    assert rows[2] == ["minilm 256x64 bf16, ours-50000", "50.00", "5,120 pairs/s", "12.00", "50.00", "1.00"]
    assert rows[5][1:] == ["60.00", "546,133 tokens/s", "-", "60.00", "1.20"]
    assert train.headline(make_result(benchmark="train", cases=[])) is None
    assert train.table(make_result(benchmark="train", cases=[])) == ""


def test_masks_and_ids_are_those_of_text():
    first, mask, second, _ = programs.pairs(train.minilm_models.MiniLMConfig(), 64, 32, 0)
    assert mask.sum(1).min() >= 16 and mask.sum(1).max() <= 32
    assert np.mean(first == second) == pytest.approx(0.125, rel=0.3)
    (ids,) = programs.text(CONFIG, 4, 256, 0)
    assert ids.max() < 64 and np.bincount(ids.ravel())[0] > 10 * np.bincount(ids.ravel(), minlength=64)[40:].mean()
    assert jnp.asarray(ids).dtype == jnp.int32
