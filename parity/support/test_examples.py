"""The examples at a small size: what they train gets better, goes on where it stopped, and can be loaded."""

import csv
import itertools
import runpy
import sys

import numpy as np
import pytest

from pallas_models import minilm
from parity import ROOT
from parity.support.common import assert_close
from parity.weights import checkpoints

pytest.importorskip("orbax.checkpoint")

EXAMPLES = ROOT / "examples"


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
    with pytest.raises(SystemExit, match=r"of a model with --layers 1 .*; got --layers 2 "):
        train_gpt2.main([*options, *folder, "--layers", "2"])
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


SIZES = ["--length", "16", "--batch-size", "2", "--layers", "1", "--width", "64", "--steps", "1", "--sample", "0"]


@pytest.mark.parametrize(
    "example, arguments, message",
    [
        ("train_gpt2", ["--text", "nowhere"], "error: [Errno 2] No such file or directory: 'nowhere'"),
        ("train_gpt2", ["--width", "100"], "argument --width: 100; expected a multiple of 64"),
        ("train_gpt2", ["--layers", "0"], "argument --layers: 0; expected at least 1"),
        ("train_gpt2", ["--sample", "-1"], "argument --sample: -1; expected at least 0"),
        (
            "train_gpt2",
            ["--text", "text", *SIZES, "--checkpoints", "text"],
            "[Errno 17] File exists: 'text'",
        ),
        ("finetune_minilm", ["nowhere.csv", "out"], "error: [Errno 2] No such file or directory: 'nowhere.csv'"),
        ("finetune_minilm", [".", "out"], "error: [Errno 21] Is a directory: '.'"),
        ("finetune_minilm", ["pairs.csv", "text"], "text is a file; expected a folder, or nothing there"),
        ("finetune_minilm", ["latin.csv", "out"], "latin.csv is no table of text in UTF-8"),
        ("finetune_minilm", ["pairs.csv", "out", "--batch-size", "0"], "--batch-size: 0; expected at least 1"),
        (
            "finetune_minilm",
            ["pairs.csv", "out", "--batch-size", "2", "--model", "nowhere"],
            "nowhere is no",
        ),
        (
            "finetune_minilm",
            ["pairs.csv", "out", "--batch-size", "2", "--model", "of_gpt2"],
            "of_gpt2/config",
        ),
    ],
)
def test_wrong_arguments_end_in_a_line(tmp_path, monkeypatch, capsys, example, arguments, message):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "pairs.csv").write_text("a,b\nc,d\n")
    (tmp_path / "latin.csv").write_bytes("é,b\n".encode("latin-1"))
    (tmp_path / "of_gpt2").mkdir()
    (tmp_path / "of_gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    said = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in said and "\n" not in said


@pytest.mark.parametrize("change", [["--layers", "2"], ["--width", "128"], ["--length", "18"]], ids=str)
def test_checkpoints_of_another_model(tmp_path, change):
    import train_gpt2

    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.json").write_text('{"--layers": 1, "--width": 64, "--length": 16}')
    options = ["--text", str(tmp_path / "text"), "--checkpoints", str(tmp_path / "run"), *SIZES, *change]
    with pytest.raises(SystemExit, match="of a model with --layers 1 --width 64 --length 16; got"):
        train_gpt2.main(options)


def test_what_is_no_pair_is_refused(tmp_path):
    import finetune_minilm

    file = tmp_path / "pairs.csv"
    file.write_text("a,b\nc\n")
    with pytest.raises(SystemExit, match=r"pairs\.csv, row 2: expected two sentences, got \['c'\]"):
        finetune_minilm.main([str(file), str(tmp_path / "tuned")])
    file.write_text("a,b\nc,d\n")
    with pytest.raises(SystemExit, match="has 2 pairs; expected at least 64"):
        finetune_minilm.main([str(file), str(tmp_path / "tuned")])
