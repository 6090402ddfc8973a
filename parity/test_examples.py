"""The examples at a small size: what they train gets better, goes on where it stopped, and can be loaded."""

import csv
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from pallas_models import minilm
from parity import checkpoints
from parity.common import assert_close

pytest.importorskip("orbax.checkpoint")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in ("train_gpt2", "finetune_minilm"):
        sys.modules.pop(name, None)


def test_gpt2_learns_and_goes_on_where_it_stopped(tmp_path, capsys):
    import train_gpt2

    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    shape = ["--text", str(text), "--length", "32", "--batch-size", "8", "--layers", "1", "--width", "64"]
    options = [*shape, "--dtype", "float32", "--learning-rate", "3e-3"]
    whole = train_gpt2.main([*options, "--steps", "40", "--sample", "0"])
    assert whole[0] == pytest.approx(np.log(256), rel=0.03)
    assert whole[39] < 2.3  # nats a byte; bytes drawn as often as they occur in the text would cost 3.0

    folder = ["--checkpoints", str(tmp_path / "run"), "--save-every", "8"]
    train_gpt2.main([*options, *folder, "--steps", "11", "--sample", "0"])
    capsys.readouterr()
    rest = train_gpt2.main([*options, *folder, "--steps", "16", "--sample", "5"])
    assert list(rest) == list(range(11, 16))
    assert_close([*rest.values()], [whole[step] for step in rest], 1e-5)
    out = capsys.readouterr().out
    assert "going on after step 11" in out and "\nThe " in out
    with pytest.raises(SystemExit, match="expected at least 20000, ten times --length"):
        train_gpt2.main(["--text", str(text), "--length", "2000"])


def test_minilm_finds_pairs_and_is_saved(tmp_path):
    import finetune_minilm

    source = checkpoints.write(tmp_path / "source", max_length=7)
    words = [word for word in checkpoints.WORDS if word.isalpha()]
    sentences = [" ".join(pair) for pair in itertools.permutations(words[:6], 2)]
    pairs = list(zip(sentences[::2], sentences[1::2], strict=True))
    file = tmp_path / "pairs.tsv"
    with file.open("w", newline="") as rows:
        csv.writer(rows, delimiter="\t").writerows(pairs)
    options = ["--model", str(source), "--batch-size", "15", "--epochs", "30", "--learning-rate", "1e-3"]
    losses = finetune_minilm.main([str(file), str(tmp_path / "tuned"), *options, "--dtype", "float32"])
    assert len(losses) == 30 and losses[-1] < 0.5 * losses[0]

    def found(folder):
        """The share of anchors whose nearest sentence is their own."""
        encoder = minilm.Encoder.from_pretrained(folder)
        first, second = (np.asarray(encoder.encode(list(side))) for side in zip(*pairs, strict=True))
        return np.mean(np.argmax(first @ second.T, axis=1) == np.arange(len(pairs)))

    assert found(tmp_path / "tuned") > found(source)
    assert minilm.Encoder.from_pretrained(tmp_path / "tuned").max_length == 7
    assert (tmp_path / "tuned" / "modules.json").read_text() == (source / "modules.json").read_text()


def test_what_is_no_pair_is_refused(tmp_path):
    import finetune_minilm

    file = tmp_path / "pairs.csv"
    file.write_text("a,b\nc\n")
    with pytest.raises(SystemExit, match=r"pairs\.csv, row 2: expected two sentences, got \['c'\]"):
        finetune_minilm.main([str(file), str(tmp_path / "tuned")])
    file.write_text("a,b\nc,d\n")
    with pytest.raises(SystemExit, match="has 2 pairs; expected at least 64"):
        finetune_minilm.main([str(file), str(tmp_path / "tuned")])
