"""`python -m pallas_models`: what it reads, writes, prints and refuses."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pallas_models.__main__ import EXAMPLES, main
from pallas_models.minilm import Encoder, programs
from parity import checkpoints


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(cache_home, monkeypatch) -> Path:
    """The folder where the program keeps compiled code, the same one for all tests here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    return cache_home / "pallas_models" / "compilation"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "checkpoint")


def test_file_to_npy(folder, tmp_path, capsys):
    text, output = tmp_path / "sentences.txt", tmp_path / "embeddings"
    text.write_text("a man\n\nthe guitar is playing\n", encoding="utf-8")
    assert main(["embed", str(text), "--model", str(folder), "--output", str(output), "--batch-size", "2"]) == 0
    expected = Encoder.from_pretrained(folder).encode(["a man", "", "the guitar is playing"], batch_size=2)
    np.testing.assert_array_equal(np.load(output), expected)
    assert capsys.readouterr().out == f"{output}: 3 x 64 float32\n"


def test_stdin_to_table(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a man [is]\na woman")))
    assert main(["embed", "-", "--model", str(folder)]) == 0
    similarity = np.prod(Encoder.from_pretrained(folder).encode(["a man [is]", "a woman"]), axis=0).sum()
    out = capsys.readouterr().out
    first, second = (line for line in out.splitlines() if "a man" in line or "a woman" in line)
    assert [cell.strip() for cell in first.split("│")[1:-1]] == ["1", "a man [is]", "1.00", f"{similarity:.2f}"]
    assert [cell.strip() for cell in second.split("│")[1:-1]] == ["2", "a woman", f"{similarity:.2f}", "1.00"]


def test_table_and_file_both(folder, tmp_path, capsys):
    output = tmp_path / "out.npy"
    assert main(["embed", "--model", str(folder), "--output", str(output), "--similarities"]) == 0
    out = capsys.readouterr().out
    assert all(sentence in out for sentence in EXAMPLES) and f"{output}: {len(EXAMPLES)} x 64" in out


def test_table_of_many_sentences_is_cut(folder, tmp_path, capsys):
    text = tmp_path / "many.txt"
    text.write_text("\n".join(f"{'guitar ' * i}a man {i}" for i in range(30)))
    assert main(["embed", str(text), "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "first 12 of 30" in out and "a man 0" in out and "a man 29" not in out


@pytest.mark.parametrize("content, rows", [("", 0), ("\n", 1), ("a", 1), ("a\n", 1), ("a\r\nb\r\n", 2)])
def test_lines(folder, tmp_path, content, rows):
    text, output = tmp_path / "sentences.txt", tmp_path / "out.npy"
    text.write_bytes(content.encode())
    assert main(["embed", str(text), "--model", str(folder), "--output", str(output)]) == 0
    assert np.load(output).shape == (rows, 64)


def test_dtype_and_implementation(folder, tmp_path):
    output = tmp_path / "out.npy"
    options = ["--dtype", "bfloat16", "--implementation", "xla"]
    assert main(["embed", "--model", str(folder), "--output", str(output), *options]) == 0
    expected = Encoder.from_pretrained(folder, dtype="bfloat16", implementation="xla").encode(EXAMPLES)
    np.testing.assert_array_equal(np.load(output), expected)


def test_errors(folder, tmp_path, capsys):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfa")
    for arguments, message in [
        ([str(tmp_path / "absent.txt"), "--model", str(folder)], "absent.txt"),
        ([str(binary), "--model", str(folder)], "codec can't decode"),
        (["--model", str(tmp_path)], "config.json is missing"),
        (["--model", "nothing"], "no model name"),
        (["--model", str(folder), "--output", str(tmp_path / "absent" / "out.npy")], "out.npy"),
    ]:
        assert main(["embed", *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error
    for arguments in (
        ["--batch-size", "0"],
        ["--implementation", "cuda"],
        ["--dtype", "int8"],
        ["--no-such-option"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(["embed", *arguments])
        assert stop.value.code == 2


def test_compiled_code_is_kept(folder, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(programs, "_COMPILED", {})
    embed = ["embed", "--model", str(folder), "--implementation", "xla", "--output", str(tmp_path / "out.npy")]
    assert main([*embed, "--no-compilation-cache"]) == 0
    before = set(cache.iterdir()) if cache.exists() else set()
    assert main([*embed, "--compilation-cache", str(tmp_path / "here")]) == 0
    (kept,) = (tmp_path / "here").iterdir()
    assert kept.name not in {path.name for path in before}
    assert main(embed) == 0
    assert set(cache.iterdir()) - before == {cache / kept.name}


def test_a_full_disk_leaves_the_older_file(folder, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out" / "embeddings.npy"
    output.parent.mkdir()
    assert main(["embed", "--model", str(folder), "--output", str(output)]) == 0
    before = output.read_bytes()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert main(["embed", "--model", str(folder), "--output", str(output), "--no-compilation-cache"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert output.read_bytes() == before and list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("path", ["absent/out.npy", "checkpoint", "checkpoint/config.json/out.npy"])
def test_an_impossible_output_is_found_before_the_work(folder, tmp_path, capsys, monkeypatch, path):
    monkeypatch.setattr(Encoder, "from_pretrained", lambda *args, **options: pytest.fail("the model was loaded"))
    assert main(["embed", "--model", str(folder), "--output", str(tmp_path / path)]) == 1
    assert str(tmp_path / path) in capsys.readouterr().err


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_text_that_is_not_utf_8(folder, tmp_path, capsys, monkeypatch, line_end):
    content = line_end.join((b"a man", "Ü".encode(), b"caf\xe9", b"a woman"))
    (tmp_path / "latin.txt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))
    for file in (str(tmp_path / "latin.txt"), "-"):
        assert main(["embed", file, "--model", str(folder)]) == 1
        name = "stdin" if file == "-" else file
        error = capsys.readouterr().err
        assert error.startswith(f"error: {name}, line 3: 'utf-8' codec can't decode byte 0xe9")


def test_stdin_is_utf_8_in_any_locale(folder, tmp_path, monkeypatch):
    sentences = ["Über den Mann", "今日 guitar"]
    stdin = io.TextIOWrapper(io.BytesIO("\n".join(sentences).encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["embed", "-", "--model", str(folder), "--output", str(tmp_path / "out.npy")]) == 0
    expected = Encoder.from_pretrained(folder).encode(sentences)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_a_table_passes_nothing_on_that_a_terminal_obeys(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a \x1b[31mman\x07\na \x9b2Jwoman \u202e\n")
    assert main(["embed", str(tmp_path / "text.txt"), "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "a \ufffd[31mman\ufffd" in out and not set("\x1b\x07\x9b\u202e") & set(out)


def test_help(capsys):
    command = [sys.executable, "-m", "pallas_models", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and "embed" in done.stdout and not done.stderr
    with pytest.raises(SystemExit, match="0"):
        main(["embed", "--help"])
    assert "--no-compilation-cache" in capsys.readouterr().out
