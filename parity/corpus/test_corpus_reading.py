"""Sentences from files: which files are read, what a sentence is in each format, and what is refused."""

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from pallas_models.corpus.reading import Corpus

SENTENCES = ["a man", "", 'she said "no"', "two\u2028in one", "\u0085 \x0b \x1c", "今日 guitar", "  a  "]


def read(path: Path, content: bytes | str, column: str | None = None, format: str | None = None) -> list[str]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(Corpus([path], column, format))


def quoted(sentence: str) -> str:
    return '"' + sentence.replace('"', '""') + '"'


def written(name: str, sentences: list[str], column: str = "text") -> bytes:
    """A file of this name, with the sentences as the second of three columns where it has columns."""
    if name == "parquet":
        pa, sink = pytest.importorskip("pyarrow"), io.BytesIO()
        pytest.importorskip("pyarrow.parquet").write_table(
            pa.table({"id": range(len(sentences)), column: sentences, "score": [0.5] * len(sentences)}), sink
        )
        return sink.getvalue()
    if name == "txt":
        rows = sentences
    elif name == "jsonl":
        rows = [
            json.dumps({"id": i, column: s, "score": 0.5}, ensure_ascii=i % 2 == 0)
            for i, s in enumerate(sentences)
        ]
    elif name == "csv":
        rows = [f"id,{column},score", *(f"{i},{quoted(s)},0.5" for i, s in enumerate(sentences))]
    else:
        rows = [f"id\t{column}\tscore", *(f"{i}\t{s}\t0.5" for i, s in enumerate(sentences))]
    return "".join(row + "\n" for row in rows).encode()


def compressed(content: bytes, compression: str) -> bytes:
    if compression == ".gz":
        return gzip.compress(content[:20]) + gzip.compress(content[20:])
    if compression == ".zst":
        pa = pytest.importorskip("pyarrow")
        return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:20], content[20:]))
    return content


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("format", ["txt", "csv", "tsv", "jsonl", "parquet"])
def test_formats(tmp_path, monkeypatch, format, compression):
    """From a file, whose name says what it is, and from standard input."""
    content = compressed(written(format, SENTENCES), compression)
    column = None if format == "txt" else "text"
    path = tmp_path / f"x.{format}{compression}"
    assert read(path, content, column) == SENTENCES
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
    corpus = Corpus(["-"], column, format + compression)
    assert list(corpus) == SENTENCES and corpus.size is None


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "parquet"])
def test_a_column_beside_the_sentences(tmp_path, format):
    """Whole numbers as text, as a join by strings takes them; other numbers, and what comes once, are refused."""
    (tmp_path / f"x.{format}").write_bytes(written(format, SENTENCES))
    corpus = Corpus([tmp_path], "text")
    assert list(corpus.kept("id")) == [str(i) for i in range(7)]
    assert list(corpus.kept("text")) == list(corpus) == SENTENCES
    if format in ("jsonl", "parquet"):
        with pytest.raises(ValueError, match=r"expected (a )?string"):
            list(corpus.kept("score"))
    with pytest.raises(ValueError, match="the column 'id' of standard input cannot be kept; expected files"):
        Corpus(["-"], "text", format).kept("id")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("format", ["txt", "csv", "tsv", "jsonl"])
def test_line_ends_and_byte_order_mark(tmp_path, format, ending):
    content = "\ufeff" + written(format, SENTENCES).decode().replace("\n", ending)
    column = None if format == "txt" else "text"
    for cut in (0, len(ending)):  # with and without an end of the last line
        assert read(tmp_path / f"x.{format}", content[: len(content) - cut], column) == SENTENCES


def test_mixed_line_ends(tmp_path):
    assert read(tmp_path / "x.txt", "a\r\n\nb\r\rc\n\r\n\rd") == ["a", "", "b", "", "c", "", "", "d"]


def test_newlines_and_empty_cells_of_csv(tmp_path):
    content = 'id,text\n1,"two\nlines"\n\n2,"and\r\nthree\rmore"\n3,\n4,""\n5, b "c" \n'
    expected = ["two\nlines", "and\r\nthree\rmore", "", "", ' b "c" ']
    assert read(tmp_path / "x.csv", content, "text") == expected


def test_tsv_knows_no_quotation_marks(tmp_path):
    assert read(tmp_path / "x.tsv", 'a\tb\n"x\t1\ny"\t2\n', "a") == ['"x', 'y"']


def test_the_only_column_needs_no_name(tmp_path):
    assert read(tmp_path / "x.csv", 'any\na man\n\n""\n') == ["a man", ""]
    assert read(tmp_path / "x.jsonl", '{"any": "a man"}\n\n \n"a woman"\n') == ["a man", "a woman"]


@pytest.mark.parametrize("name", ["x.txt", "x.csv", "x.tsv", "x.jsonl", "x.txt.gz", "x", "x.log"])
@pytest.mark.parametrize("content", [b"", "\ufeff".encode()])
def test_empty_files(tmp_path, name, content):
    assert read(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content) == []


def test_no_rows(tmp_path):
    assert read(tmp_path / "x.csv", "id,text\n", "text") == []


def test_long_lines(tmp_path):
    """Longer than every buffer and than the limit that the standard library sets to a cell."""
    long = ["ab " * 1_000_000, "x", "yz " * 700_000]
    for format in ("txt", "csv", "jsonl"):
        assert read(tmp_path / f"x.{format}", written(format, long), None if format == "txt" else "text") == long


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_strings(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    kinds = {
        "string": pa.string(),
        "large_string": pa.large_string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }
    table = pa.table({"text": pa.array(SENTENCES * 3).cast(kinds[kind])})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "x.parquet", row_group_size=5)
    assert list(Corpus([tmp_path / "x.parquet"])) == SENTENCES * 3


def test_folders(tmp_path):
    """In the order of the paths, below the folder at any depth; what is hidden or of another kind is left out."""
    files = {
        "b.txt": "b1\nb2\n",
        "a/z.csv": "t\naz\n",
        "a/y.jsonl": '"ay"\n',
        "c.md": "c",
        "_d.txt": "d",
        ".e/f.txt": "f",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    corpus = Corpus([tmp_path, tmp_path / "c.md"])
    assert [Path(path).name for path in corpus.paths] == ["y.jsonl", "z.csv", "b.txt", "c.md"]
    for _ in range(2):
        assert list(corpus) == ["ay", "az", "b1", "b2", "c"]
    assert corpus.done == corpus.size == sum(Path(path).stat().st_size for path in corpus.paths)


def test_how_far_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("a man\n" * 50_000)
    (tmp_path / "b.txt").write_text("a man\n" * 50_000)
    corpus = Corpus([tmp_path])
    behind = [6 * (i + 1) - corpus.done for i, _ in enumerate(corpus)]  # 6 bytes a sentence
    assert min(behind) >= -(1 << 16) - 6 and max(behind) <= 0
    assert corpus.done == corpus.size == 600_000


@pytest.mark.parametrize(
    "name, content, column, message",
    [
        ("x.csv", "id,text\n1,a\n", "body", "x.csv has the columns 'id', 'text'; expected 'body' once"),
        ("x.csv", "id,text\n1,a\n", None, "x.csv has the columns 'id', 'text'; expected one of them"),
        ("x.csv", "a,a\n1,2\n", "a", "expected 'a' once"),
        ("x.csv", "id,text\n1,a\n2\n", "text", "x.csv, line 3 has 1 columns; expected 2"),
        ("x.csv", 'id,text\n1,"a\nb"\n2,3,4\n', "text", "x.csv, line 4 has 3 columns; expected 2"),
        ("x.csv", 'id,text\n1,"a\n2,b\n', "text", "x.csv, line 3: unexpected end of data"),
        ("x.tsv", "id\ttext\n1\n", "id", "x.tsv, line 2 has 1 columns"),
        ("x.jsonl", '{"a": 1, "b": "x"}\n', "c", "x.jsonl, line 1 has the columns 'a', 'b'; expected 'c' once"),
        ("x.jsonl", '{"a": "x"}\n{"a": 5}\n', "a", "x.jsonl, line 2 holds 5 of type int; expected a string"),
        ("x.jsonl", '{"a": null}\n', "a", "line 1 holds None of type NoneType; expected a string"),
        ("x.jsonl", '["a"]\n', None, "line 1 holds ['a'] of type list; expected a string"),
        ("x.jsonl", '"a"\n', "text", "line 1 holds 'a' of type str; expected an object with the key 'text'"),
        ("x.jsonl", '"a"\n\n{"a": \n', None, "x.jsonl, line 3 is no JSON"),
        ("x.jsonl", "[" * 100_000 + "\n", None, "x.jsonl, line 1 is no JSON"),
        ("x.jsonl", '"ok"\n"\\ud800"\n', None, "line 2 holds '\\ud800', half of a surrogate pair"),
        (
            "x.jsonl",
            '{"a": "x"}\n{"b": "y"}\n',
            None,
            "line 2 has the column 'b'; expected 'a' as the rows before it",
        ),
        ("x.jsonl", '{"": "x"}\n"y"\n{"b": "y"}\n', None, "line 3 has the column 'b'; expected ''"),
        ("x.jsonl", "{}\n", None, "line 1 has the columns none"),
        ("x.txt", "a\n", "text", "x.txt is text, which has no column='text'"),
        ("x.txt", b"a\r\nb\rcaf\xe9\n", None, "x.txt, line 3: 'utf-8' codec can't decode byte 0xe9"),
        ("x.csv", b"text\na\ncaf\xe9\n", "text", "x.csv, line 3: 'utf-8' codec can't decode byte 0xe9"),
        ("x.txt", "a man\n".encode("utf-16"), None, "x.txt, line 1: 'utf-8' codec can't decode byte 0xff"),
        ("x.txt.gz", b"a man\n", None, "x.txt.gz is damaged, or not what its name says"),
        ("x.txt.gz", gzip.compress(b"a man\n" * 1000, mtime=0)[:-12], None, "x.txt.gz is damaged"),
    ],
)
def test_refused(tmp_path, name, content, column, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path / name, content, column)
    assert message in str(error.value)


@pytest.mark.parametrize("cut", ["short", "nonsense"])
def test_damaged_zstd(tmp_path, cut):
    content = compressed(b"".join(b"a man %d\n" % i for i in range(1000)), ".zst")
    with pytest.raises(ValueError, match=r"x\.txt\.zst is damaged, or not what its name says"):
        read(tmp_path / "x.txt.zst", content[:-5] if cut == "short" else b"no" + content)


def test_refused_parquet(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"id": [1, 2], "text": ["a", None]}), path)
    content = path.read_bytes()
    for column, message in [
        ("body", "has the columns 'id', 'text'; expected 'body' once"),
        ("id", "the column 'id' is of type int64; expected strings"),
        ("text", "row 2 holds None of type NoneType; expected a string"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(Corpus([path], column))
    for broken in (b"", b"PAR1", content[:-20], content[:8] + bytes(64) + content[72:]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"x\.parquet"):
            list(Corpus([path], "text"))
    # Parquet does not check what it is told to be UTF-8.
    text = pa.array([b"a", b"\xff"]).view(pa.string())
    parquet.write_table(pa.table({"text": text}), path)
    with pytest.raises(ValueError, match=r"x\.parquet"):
        list(Corpus([path], "text"))


def test_impossible_inputs_are_found_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        Corpus([tmp_path / "absent"])
    with pytest.raises(ValueError, match="holds no file with sentences"):
        Corpus([tmp_path / "empty"])
    with pytest.raises(ValueError, match="format='docx'; expected one of txt, csv"):
        Corpus(["-"], None, "docx")


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in ("x.parquet", "x.txt.zst"):
        with pytest.raises(ImportError, match=r"pyarrow: pip install 'pallas-models\[files\]'"):
            read(tmp_path / name, b"")


@pytest.mark.parametrize("lines", ["a\nb\n", "a\r\nb\r\n", "a\rb\r", "a\rb\n"])
def test_lines_of_a_file_that_is_read_in_parts(tmp_path, lines):
    path = tmp_path / "a.txt"
    path.write_bytes(lines.encode() * 40_000)
    assert list(Corpus([path])) == ["a", "b"] * 40_000
    path.write_bytes(lines.encode() * 40_000 + b"\xff")
    with pytest.raises(ValueError, match=r"a\.txt, line 80001: .* expected UTF-8"):
        list(Corpus([path]))
