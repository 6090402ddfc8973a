"""`python -m pallas_models`: what it reads, writes, prints and refuses."""

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import pallas_models
import weights.__main__
from pallas_models import _processes, files
from pallas_models.__main__ import main
from pallas_models._processes import run_program
from pallas_models.corpus import command
from pallas_models.corpus.command import EXAMPLES
from pallas_models.corpus.writing import convert
from pallas_models.minilm import Encoder
from pallas_models.quantization import ranges_of
from pallas_models.sentence import programs
from parity import ROOT
from parity.weights import checkpoints


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


@pytest.fixture
def examples(tmp_path: Path) -> str:
    """The built-in sentences as a file."""
    (tmp_path / "examples.txt").write_text("\n".join(EXAMPLES))
    return str(tmp_path / "examples.txt")


def test_file_to_npy(folder, tmp_path, capsys):
    text, output = tmp_path / "sentences.txt", tmp_path / "embeddings.npy"
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


def test_table_and_file_both(folder, examples, tmp_path, capsys):
    output = tmp_path / "out.npy"
    assert main(["embed", examples, "--model", str(folder), "--output", str(output), "--similarities"]) == 0
    out = capsys.readouterr().out
    assert all(sentence in out for sentence in EXAMPLES) and f"{output}: {len(EXAMPLES)} x 64" in out


def test_nothing_is_embedded_in_place_of_what_is_piped(folder, tmp_path, capsys, monkeypatch):
    """The `-` or the file's name is forgotten."""
    for options, message in [
        (["--output", "out.npy"], "error: --output is given but no FILE; expected files or folders, or - for"),
        (["--column", "text"], "error: --column is given but no FILE"),
        (["--input-format", "csv"], "error: --input-format is given but no FILE"),
    ]:
        assert embed(folder, *options) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("a man\n")
    with (tmp_path / "text.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert embed(folder) == 1
        assert "error: standard input is a pipe or a file but no FILE" in capsys.readouterr().err
        assert embed(folder, "-") == 0
        assert "a man" in capsys.readouterr().out
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert embed(folder) == 0
        assert EXAMPLES[0] in capsys.readouterr().out


def test_to_standard_output(folder, examples, tmp_path, capsysbinary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert embed(folder, examples, "--output", "-") == 0
    out, err = capsysbinary.readouterr()
    np.testing.assert_array_equal(np.load(io.BytesIO(out)), Encoder.from_pretrained(folder).encode(EXAMPLES))
    assert err == b"-: 5 x 64 float32\n" and not Path("-").exists()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert embed(folder, examples, "--output", "-") == 1
    assert b"standard output, a terminal; expected a pipe" in capsysbinary.readouterr().err


def test_table_of_many_sentences_is_cut(folder, tmp_path, capsys):
    text = tmp_path / "many.txt"
    text.write_text("\n".join(f"{'guitar ' * i}a man {i}" for i in range(30)))
    assert main(["embed", str(text), "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "first 12 of 30" in out and "a man 0" in out and "a man 29" not in out


def test_a_narrow_terminal_cuts_sentences_and_no_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    monkeypatch.setenv("NO_COLOR", "1")
    angles = np.arange(len(EXAMPLES)) * 0.7
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    command._print_similarities(EXAMPLES, embeddings)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    for i, (number, sentence, *values) in enumerate(rows):
        assert number.strip() == str(i + 1) and EXAMPLES[i].startswith(sentence.strip().rstrip("…"))
        assert [float(value) for value in values] == [round(x, 2) for x in (embeddings @ embeddings[i]).tolist()]
    assert len(rows) == len(EXAMPLES)


@pytest.mark.parametrize("content, rows", [("", 0), ("\n", 1), ("a", 1), ("a\n", 1), ("a\r\nb\r\n", 2)])
def test_lines(folder, tmp_path, content, rows):
    text, output = tmp_path / "sentences.txt", tmp_path / "out.npy"
    text.write_bytes(content.encode())
    assert main(["embed", str(text), "--model", str(folder), "--output", str(output)]) == 0
    assert np.load(output).shape == (rows, 64)


@pytest.mark.parametrize("program", [main, weights.__main__.main])
def test_version(capsys, program):
    with pytest.raises(SystemExit, match=r"^0$"):
        program(["--version"])
    assert capsys.readouterr().out == f"pallas_models {pallas_models.__version__}\n"


def test_dtype_and_implementation(folder, examples, tmp_path):
    output = tmp_path / "out.npy"
    options = ["--dtype", "bfloat16", "--implementation", "xla"]
    assert main(["embed", examples, "--model", str(folder), "--output", str(output), *options]) == 0
    expected = Encoder.from_pretrained(folder, dtype="bfloat16", implementation="xla").encode(EXAMPLES)
    np.testing.assert_array_equal(np.load(output), expected)


def test_errors(folder, examples, tmp_path, capsys):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfa")
    for arguments, message in [
        ([str(tmp_path / "absent.txt"), "--model", str(folder)], "absent.txt"),
        ([str(binary), "--model", str(folder)], "codec can't decode"),
        (["--model", str(tmp_path)], "config.json is missing"),
        (["--model", "nothing"], "no model name"),
        ([examples, "--model", str(folder), "--output", str(tmp_path / "absent" / "out.npy")], "out.npy"),
    ]:
        assert main(["embed", *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error
    for arguments in (
        ["--batch-size", "0"],
        ["--implementation", "cuda"],
        ["--dtype", "float64"],
        ["--no-such-option"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(["embed", *arguments])
        assert stop.value.code == 2
        error, where = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and arguments[0] in error
        assert where.startswith("see python -m pallas_models") and where.endswith("--help")


@pytest.mark.usefixtures("without_jax_cache")
def test_compiled_code_is_kept(folder, examples, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(programs, "_COMPILED", {})
    embed = [
        "embed",
        examples,
        "--model",
        str(folder),
        "--implementation",
        "xla",
        "--output",
        str(tmp_path / "out.npy"),
    ]
    assert main([*embed, "--no-compilation-cache"]) == 0
    before = set(cache.iterdir()) if cache.exists() else set()
    assert main([*embed, "--compilation-cache", str(tmp_path / "here")]) == 0
    (kept,) = (tmp_path / "here").iterdir()
    assert kept.name not in {path.name for path in before}
    assert main(embed) == 0
    assert set(cache.iterdir()) - before == {cache / kept.name}


def test_a_full_disk_leaves_the_older_file(folder, examples, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out" / "embeddings.npy"
    output.parent.mkdir()
    command = ["embed", examples, "--model", str(folder), "--output", str(output)]
    assert main(command) == 0
    before = output.read_bytes()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert main([*command, "--no-compilation-cache"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert output.read_bytes() == before and list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("path", ["absent/out.npy", "checkpoint", "checkpoint/config.json/out.npy"])
def test_an_impossible_output_is_found_before_the_work(folder, examples, tmp_path, capsys, monkeypatch, path):
    monkeypatch.setattr(Encoder, "from_pretrained", lambda *args, **options: pytest.fail("the model was loaded"))
    assert main(["embed", examples, "--model", str(folder), "--output", str(tmp_path / path)]) == 1
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


def embed(folder: Path, *arguments: object) -> int:
    return main(["embed", "--model", str(folder), *map(str, arguments)])


@pytest.fixture
def table(tmp_path) -> Path:
    """A folder with a table in two files, the sentences in the column `text`."""
    (tmp_path / "table").mkdir()
    rows = [f"{i},{checkpoints.WORDS[i % 12]} man {'slowly ' * (i % 5)}" for i in range(50)]
    (tmp_path / "table" / "a.csv").write_text("id,text\n" + "\n".join(rows[:31]))
    (tmp_path / "table" / "b.csv").write_text("id,text\n" + "\n".join(rows[31:]))
    return tmp_path / "table"


def sentences_of(table: Path) -> list[str]:
    return [row.split(",")[1] for name in "ab" for row in (table / f"{name}.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(
    "options, dtype",
    [
        ([], "float32"),
        (["--dtype", "float16"], "float16"),
        (["--dtype", "float16", "--compute-dtype", "float32", "--truncate-dim", "24"], "float16"),
        (["--dtype", "int8", "--compute-dtype", "bfloat16"], "int8"),
        (["--dtype", "ubinary"], "ubinary"),
    ],
)
def test_one_file_of_a_table(folder, table, tmp_path, options, dtype):
    """The dtype that is written and the one that is computed in, and fewer values, which have unit norm again."""
    inputs = (table / "a.csv", table / "b.csv", "--column", "text")
    assert embed(folder, *inputs, "--output", tmp_path / "out.npz", *options) == 0
    compute = options[3] if "--compute-dtype" in options else dtype if dtype == "float16" else "float32"
    encoder = Encoder.from_pretrained(folder, dtype=compute)
    expected = np.concatenate(list(encoder.encode_iter(sentences_of(table))))
    if "--truncate-dim" in options:
        expected = expected[:, :24] / np.linalg.norm(expected[:, :24], axis=1, keepdims=True)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["embeddings"], convert(expected, dtype))


def test_prompts(folder, table, tmp_path, capsys):
    inputs = (table, "--column", "text", "--output", tmp_path / "out.npy")
    assert embed(folder, *inputs, "--prompt", "the guitar ") == 0
    expected = list(Encoder.from_pretrained(folder).encode_iter(sentences_of(table), prompt="the guitar "))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.concatenate(expected))
    assert embed(folder, *inputs, "--prompt-name", "haiku") == 1
    assert "haiku" in capsys.readouterr().err


def test_folder_to_folder(folder, table, tmp_path, capsys, monkeypatch):
    """Shards that together are what one file holds; a second run embeds nothing, and does not load the model."""
    options = ("--column", "text", "--shard-size", 20, "--format", "safetensors", "--batch-size", 1)
    assert embed(folder, table, "--output", f"{tmp_path}/out/", *options) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out: 50 x 64 float32 in 3 files\n"
    encoder, sentences = Encoder.from_pretrained(folder), sentences_of(table)
    for i, start in enumerate((0, 20, 40)):
        expected = np.concatenate(list(encoder.encode_iter(sentences[start : start + 20], batch_size=1)))
        np.testing.assert_array_equal(
            load_file(tmp_path / "out" / f"00000{i}.safetensors")["embeddings"], expected
        )
    held = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert held["complete"] and held["model"]["name"] == str(folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert held["model"]["files"]["model.safetensors"] == digest
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(Encoder, "from_pretrained", lambda *args, **options: pytest.fail("the model was loaded"))
    assert (
        embed(folder, table, "--output", tmp_path / "out", *options) == 0
    )  # a folder that is there needs no slash
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_a_column_is_kept_to_join_by(folder, table, tmp_path, output):
    parquet = pytest.importorskip("pyarrow.parquet")
    options = ("--format", "parquet", "--shard-size", 20) if output == "out/" else ()
    command = (table, "--column", "text", "--keep", "id", "--output", f"{tmp_path}/{output}", *options)
    assert embed(folder, *command) == 0
    files = sorted((tmp_path / "out").glob("*.parquet")) if options else [tmp_path / output]
    tables = [parquet.read_table(path) for path in files]
    assert [len(table) for table in tables] == ([20, 20, 10] if options else [50])
    assert [id for table in tables for id in table["id"].to_pylist()] == [str(i) for i in range(50)]
    found = np.array([row for table in tables for row in table["embedding"].to_pylist()], np.float32)
    expected = Encoder.from_pretrained(folder).encode(sentences_of(table))
    assert np.all(np.sum(found * expected, axis=1) > 1 - 1e-6)  # other batches, other rounding


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_a_column_that_is_not_there_is_found_before_the_work(folder, table, tmp_path, capsys, monkeypatch, output):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(Encoder, "from_pretrained", lambda *args, **options: pytest.fail("the model was loaded"))
    options = ("--format", "parquet") if output == "out/" else ()
    command = (table, "--column", "text", "--keep", "key", "--output", f"{tmp_path}/{output}", *options)
    assert embed(folder, *command) == 1
    assert "a.csv has the columns 'id', 'text'; expected 'key' once" in capsys.readouterr().err
    assert not (tmp_path / output).exists()


def test_ranges_of_a_sample(folder, table, tmp_path):
    sample = (table / "b.csv", "--column", "text", "--dtype", "int8", "--output", f"{tmp_path}/sample/")
    assert embed(folder, *sample) == 0
    whole = (table, "--column", "text", "--dtype", "uint8", "--ranges", tmp_path / "sample")
    assert embed(folder, *whole, "--output", tmp_path / "out.npy") == 0
    assert embed(folder, *whole, "--output", f"{tmp_path}/out/") == 0
    ranges = json.loads((tmp_path / "sample" / "manifest.json").read_text())["ranges"]
    expected = np.concatenate(list(Encoder.from_pretrained(folder).encode_iter(sentences_of(table))))
    for found in ("out.npy", "out/000000.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / found), convert(expected, "uint8", ranges))


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "parquet"])
def test_a_file_holds_its_ranges(folder, table, tmp_path, capsys, suffix):
    """What a query is to be quantized by; few sentences are no good measure, which is said."""
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    corpus, queries = tmp_path / f"corpus.{suffix}", tmp_path / "queries.npy"
    assert embed(folder, table, "--column", "text", "--dtype", "int8", "--output", corpus) == 0
    assert "warning: the ranges of int8 come from 50 sentences" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("the guitar\n")
    options = ("--dtype", "int8", "--ranges", corpus, "--output", queries)
    assert embed(folder, tmp_path / "text.txt", *options) == 0
    assert capsys.readouterr().err == ""
    encoder = Encoder.from_pretrained(folder)
    ranges = ranges_of(np.concatenate(list(encoder.encode_iter(sentences_of(table)))))
    np.testing.assert_array_equal(
        np.load(queries), convert(encoder.encode(["the guitar"]), "int8", ranges.tolist())
    )


def test_ranges_that_are_none(folder, examples, tmp_path, capsys):
    np.savez(tmp_path / "none.npz", embeddings=np.eye(3))
    np.savez(tmp_path / "odd.npz", ranges=[[0.0, 1.0], [1.0, np.inf]])
    np.savez(tmp_path / "objects.npz", ranges=np.array([{}, []], object))
    np.save(tmp_path / "bare.npy", np.eye(3))
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    for name, message in [
        ("none.npz", "none.npz holds no ranges"),
        ("odd.npz", "odd.npz: ranges is [[0.0, 1.0], [1.0, inf]] of type list; expected two lists"),
        ("objects.npz", "objects.npz cannot be read"),
        ("bare.npy", "bare.npy holds no ranges; expected .npz, .safetensors or .parquet"),
        ("broken.safetensors", "broken.safetensors cannot be read"),
    ]:
        options = ("--dtype", "int8", "--ranges", tmp_path / name, "--output", tmp_path / "out.npy")
        assert embed(folder, examples, *options) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_two_jobs_in_one_folder(folder, table, tmp_path, capsys):
    run = (table, "--column", "text", "--output", f"{tmp_path}/out/")
    (tmp_path / "out").mkdir()
    with files.locked(tmp_path / "out"):
        assert embed(folder, *run) == 1
    other = f"process {os.getpid()} on {socket.gethostname()}"
    expected = (
        f"error: {tmp_path}/out is being written by {other}; expected a folder that no other job writes to\n"
    )
    assert capsys.readouterr().err == expected
    assert not any((tmp_path / "out").iterdir())
    assert embed(folder, *run) == 0
    assert capsys.readouterr().out.endswith(" in 1 file\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000000.npy", "manifest.json"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--output", "out.npy", "--shard-size", "5"],
            "--shard-size expects a folder as --output, such as embeddings/; --output out.npy names one file",
        ),
        (["--output", "out.npy", "--format", "npz"], "--format expects a folder as --output"),
        (["--output", "out.npy", "--ray"], "--ray expects a folder as --output"),
        (["--shard-size", "5"], "--shard-size expects a folder as --output, such as embeddings/\n"),
        (["--ray"], "--ray expects a folder as --output, such as embeddings/\n"),
        (["--workers", "2", "--output", "out/"], "--workers is an option of --ray; expected both"),
        (["--output", "out/", "--ray", "--dtype", "int8"], "--dtype int8 with --ray expects --ranges"),
        (
            ["--output", "out.npy", "--ranges", "table"],
            "--ranges is an option of --dtype int8 and uint8, not float32",
        ),
        (["--output", "out.npy", "--dtype", "uint8"], "--output out.npy has no place for them; expected .npz"),
        (["--output", "-", "--dtype", "int8"], "--output - has no place for them"),
        (["--output", "out.npz", "--keep", "id"], "--keep expects Parquet: an --output of .parquet, or --format"),
        (
            ["--output", "out/", "--format", "parquet", "--keep", "embedding"],
            "--keep embedding names the column of",
        ),
        (["--output", "-", "--similarities"], "--similarities goes without --output -"),
        (
            ["--output", "x.csv"],
            "--output x.csv ends in .csv; expected one of .npy, .npz, .parquet, .safetensors, or",
        ),
        (["--output", "x.npz.gz"], "--output x.npz.gz ends in .gz; expected one of .npy"),
        (["--output", "new"], "--output new is no folder and has no suffix; expected one of .npy, .npz, "),
        (["--output", "out/", "--ray", "--shard-size", "5"], "--shard-size goes without --ray"),
        (["--output", "out/", "--similarities"], "--similarities is for one file as --output; out/ is a folder"),
        (["--output", "table/out/"], "--output table/out lies in table, which is read"),
        (["--output", "table"], "--output table lies in table, which is read"),
        (["--output", "checkpoint/"], "checkpoint holds files and no manifest.json"),
        (["--output", "absent/out/"], "absent/out"),
        (["--output", "out/", "--dtype", "int8", "--ranges", "table"], "table holds files and no manifest.json"),
        (["--output", "out/", "--column", "body"], "a.csv has the columns 'id', 'text'; expected 'body' once"),
        (["--output", "out/", "--input-format", "xml"], "format='xml'; expected one of txt, csv"),
        (["--output", "out.npy", "--truncate-dim", "65"], "truncate_dim=65; expected 1 to 64"),
    ],
)
def test_what_does_not_go_together(folder, table, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    column = [] if "--column" in options else ["--column", "text"]
    assert embed(folder, "table", *column, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_a_folder_of_other_settings_is_refused(folder, table, tmp_path, capsys):
    run = (table, "--column", "text", "--output", f"{tmp_path}/out/")
    assert embed(folder, *run) == 0
    other = checkpoints.write(tmp_path / "other", checkpoints.bert_tensors(seed=1))
    for arguments, message in [
        ((folder, *run, "--dtype", "float16"), "compute_dtype was 'float32' and is now 'float16'; dtype was"),
        ((folder, *run, "--shard-size", 7), "shard_size was 131072 and is now 7"),
        ((folder, *run, "--implementation", "xla"), "implementation was [] and is now ['xla']"),
        ((other, *run), "model.safetensors was "),
    ]:
        assert embed(*arguments) == 1
        assert message in capsys.readouterr().err


def test_progress(folder, table, capsys):
    assert embed(folder, table, "--column", "text", "--progress") == 0
    assert "50 sentences, " in capsys.readouterr().err
    assert embed(folder, table, "--column", "text") == 0
    assert capsys.readouterr().err == ""  # no terminal


def test_interrupted(folder, table, capsys, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Encoder, "from_pretrained", interrupt)
    assert embed(folder, table, "--column", "text") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_killed_it_continues_to_the_same_bytes(folder, tmp_path):
    """The whole program, killed twice while it writes shards."""
    (tmp_path / "text.txt").write_text("".join(f"{checkpoints.WORDS[i % 13]} man {i % 7}\n" for i in range(6000)))
    options = ["--model", str(folder), "--shard-size", "100", "--format", "npz", "--dtype", "int8"]
    program = [sys.executable, "-m", "pallas_models", "embed", str(tmp_path / "text.txt"), *options, "--output"]
    killed = tmp_path / "killed"
    for shards in (3, 20):
        with subprocess.Popen([*program, f"{killed}/"], cwd=ROOT) as process:
            while len(list(killed.glob("*.npz"))) < shards:
                assert process.poll() is None
                time.sleep(1e-3)
            process.kill()
        assert not json.loads((killed / "manifest.json").read_text())["complete"]
    assert subprocess.run([*program, f"{killed}/"], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    assert main([*program[3:], f"{tmp_path / 'whole'}/"]) == 0
    contents = [
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (killed, tmp_path / "whole")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 61


def test_help(capsys):
    """At once: JAX is imported when there is work to do."""
    command = [sys.executable, "-X", "importtime", "-m", "pallas_models", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "embed" in done.stdout
    assert "pallas_models" in imported and not {"jax", "flax", "weights"} & imported
    with pytest.raises(SystemExit, match="0"):
        main(["embed", "--help"])
    assert "--no-compilation-cache" in capsys.readouterr().out


def test_ray_that_is_not_installed(folder, table, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert embed(folder, table, "--column", "text", "--output", f"{tmp_path}/out/", "--ray") == 1
    assert "needs Ray: pip install 'pallas-models[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("cuda, message", [("99", "CUDA=99; expected 12 or 13"), ("13", "")])
def test_make_knows_the_versions_of_cuda(cuda, message):
    command = ["make", "--dry-run", "help", f"CUDA={cuda}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert bool(done.returncode) == bool(message) and message in done.stderr


@pytest.mark.parametrize("lines", [1, 10**5])  # written when the program ends; while it runs
def test_who_does_not_read_on_sees_no_error(lines):
    code = f"input(); run_program(lambda: len([print(i) for i in range({lines})]))"
    command = [sys.executable, "-c", f"from pallas_models._processes import run_program\n{code}"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as child:
        child.stdout.close()
        assert child.communicate(b"\n")[1] == b""
    assert child.returncode == 141


def test_an_interrupt_is_not_passed_over():
    """Python passes over an exception in what garbage collection calls, as JAX has it call something."""
    code = f"""
import gc, os, runpy, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
def main():
    gc.callbacks.append(lambda *_: gc.callbacks.clear() or os.kill(os.getpid(), signal.SIGINT))
    gc.collect()
    time.sleep(60)
runpy.run_path({_processes.__file__!r})["run_program"](main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("ends", ["raise KeyboardInterrupt", "return 130"])
def test_an_interrupted_program_waits_for_no_thread(ends):
    """Python would join what compiles, and abort where a second signal ends that."""
    code = f"""
import runpy, sys, threading, time
def main():
    print("begun")
    {ends}
threading.Thread(target=time.sleep, args=(60,)).start()
runpy.run_path({_processes.__file__!r})["run_program"](main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (130, "begun\n")
    assert done.stderr == ("interrupted\n" if "raise" in ends else "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    def embed(args):
        raise BrokenPipeError

    monkeypatch.setattr("pallas_models.__main__._embed", embed)
    with pytest.raises(BrokenPipeError):
        run_program(lambda: main(["embed"]))
