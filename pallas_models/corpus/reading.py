"""Reads sentences from files: text, CSV, TSV, JSON lines and Parquet, plain or compressed with gzip or zstd."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

# `str.splitlines` would also split at U+2028, which occurs inside of sentences on the web.
_LINE = re.compile("[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_END = re.compile("\r\n?")
# The standard library's limit of a cell, 128 KiB, is less than a long document.
_CELL_LIMIT = 1 << 28
_PARQUET_ROWS = 4096
_BUFFER = 1 << 20
_READ = 1 << 16
# Sentences that a reader takes from a table before it hands them on.
_BLOCK = 1024

# Yields the sentences of a stream, by its name and the column's; or where the last argument is true the values of
# a column that is kept, which may be whole numbers.
Reader = Callable[[IO[bytes], str, str | None, bool], Iterator[list[str]]]


class Corpus:
    """The sentences of files, one after another, read as they are asked for.

    Attributes:
      paths: the files in the order in which they are read; "-" is standard input.
      size: bytes of all files; None where standard input is among them.
      done: bytes that are read so far, in the iteration that was begun last.
    """

    def __init__(self, inputs: Iterable[str | Path], column: str | None = None, format: str | None = None):
        """Finds the files; nothing is read yet.

        Args:
          inputs: files, folders, or "-" for standard input. Of a folder, all files below it are read whose
            suffixes name a format, in the order of their paths; names that begin with . or _ are left out.
          column: the column of a table that holds the sentences; None where it has but one.
          format: of the files, such as "csv" or "jsonl.gz"; when None, each file's suffixes name it. A file with
            another suffix, and standard input, is text.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: a folder holds no file that can be read, or the format is unknown.
        """
        if format is not None and not _is_known(f".{format}"):
            raise ValueError(f"{format=}; expected one of {', '.join(FORMATS)}, with .gz or .zst or without")
        self._column, self._format, self._is_kept = column, format, False
        self.paths = [path for given in inputs for path in _expand(str(given), format)]
        self.size = None if "-" in self.paths else sum(Path(path).stat().st_size for path in self.paths)
        self.done = 0

    def only(self, path: str) -> "Corpus":
        """Returns a corpus of one of the files, read in the same way."""
        return Corpus([path], self._column, self._format)

    def kept(self, column: str) -> "Corpus":
        """Returns another column of the files, one value for each sentence, whole numbers as text.

        Raises:
          ValueError: standard input, which can be read but once, is among the files.
        """
        if "-" in self.paths:
            raise ValueError(f"the column {column!r} of standard input cannot be kept; expected files")
        other = Corpus(self.paths, column, self._format)
        other._is_kept = True
        return other

    def __iter__(self) -> Iterator[str]:
        """Yields the sentences.

        Raises:
          ImportError: Parquet or zstd is to be read, and pyarrow is not installed.
          OSError: a file cannot be read.
          ValueError: a file is damaged or not UTF-8, has no such column, or a row holds no string. The message
            names the file and, but for Parquet's own errors, the line or row.
        """
        return itertools.chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[list[str]]:
        self.done = behind = 0
        for path in self.paths:
            name = "stdin" if path == "-" else path
            format, compression = _kind(f".{self._format}" if self._format else path)
            with contextlib.ExitStack() as stack:
                raw = sys.stdin.buffer if path == "-" else stack.enter_context(Path(path).open("rb"))
                with _named_errors(name):
                    stream = _decompressed(raw, compression)
                    for block in FORMATS[format](stream, name, self._column, self._is_kept):
                        if self.size is not None:
                            self.done = behind + raw.tell()
                        yield block
            if self.size is not None:
                self.done = behind = behind + Path(path).stat().st_size


def _expand(given: str, format: str | None) -> list[str]:
    if given == "-":
        return [given]
    root = Path(given)
    if not root.exists():
        raise FileNotFoundError(f"{given} does not exist; expected a file, a folder, or - for standard input")
    if not root.is_dir():
        return [given]
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    visible = (name for name in found if not any(part.startswith((".", "_")) for part in name.split("/")))
    names = [name for name in visible if format or _is_known(name)]
    if not names:
        raise ValueError(f"{given} holds no file with sentences; expected one of .{', .'.join(FORMATS)}")
    return [str(root / name) for name in names]


def _suffixes(name: str) -> tuple[str, str]:
    suffixes = Path(f"x{name}").suffixes  # so that ".csv" is one too
    compression = suffixes.pop().lower()[1:] if suffixes and suffixes[-1].lower() in (".gz", ".zst") else ""
    return suffixes[-1].lower()[1:] if suffixes else "", compression


def _is_known(name: str) -> bool:
    return _suffixes(name)[0] in FORMATS


def _kind(name: str) -> tuple[str, str]:
    format, compression = _suffixes(name)
    return format if format in FORMATS else "txt", compression


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Adds the name of the file to the errors of libraries, which do not know it."""
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{name} is damaged, or not what its name says: {error}") from error


def _decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    if compression == "gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if compression == "zst":
        # zstandard's own reader takes a file that was cut off for a whole one; pyarrow's raises OSError.
        return io.BufferedReader(pyarrow(".zst").CompressedInputStream(raw, "zstd"), _BUFFER)
    return raw


def pyarrow(what: str) -> Any:
    """Imports pyarrow, which has no types; ImportError names `what` needs it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{what} needs pyarrow: pip install 'pallas-models[files]'") from error
    return pyarrow


def _texts(stream: IO[bytes], name: str) -> Iterator[str]:
    """Yields many lines at a time, with the line ends of Unix, Windows or the old Macintosh."""
    ends = 0
    for first in itertools.chain((True,), itertools.repeat(False)):
        if not (content := stream.read(_READ) + stream.readline()):
            return
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            line = ends + len(_LINE.findall(content[: error.start].decode() + "x"))
            raise ValueError(f"{name}, line {line}: {error}; expected UTF-8") from error
        ends += text.count("\n") + text.count("\r") - text.count("\r\n")
        yield text.removeprefix("\ufeff") if first else text


def _lines(stream: IO[bytes], name: str) -> Iterator[str]:
    """Yields each line with its end."""
    return itertools.chain.from_iterable(map(_LINE.findall, _texts(stream, name)))


def _text(stream: IO[bytes], name: str, column: str | None, _: bool) -> Iterator[list[str]]:
    if column is not None:
        raise ValueError(f"{name} is text, which has no {column=}; expected a table")
    for text in _texts(stream, name):
        text = _END.sub("\n", text) if "\r" in text else text
        yield text.removesuffix("\n").split("\n") if text else []


def _json_lines(stream: IO[bytes], name: str, column: str | None, kept: bool) -> Iterator[list[str]]:
    return _blocks(_json_values(_lines(stream, name), name, column, kept))


def _json_values(lines: Iterator[str], name: str, column: str | None, kept: bool) -> Iterator[str]:
    only = column  # where none is named, all objects have the only key of the first
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no JSON: {error}") from error
        if isinstance(row, dict):
            key = _choose(list(row), column, where)
            only = key if only is None else only
            if key != only:
                raise ValueError(f"{where} has the column {key!r}; expected {only!r} as the rows before it")
            row = row[key]
        elif column is not None:
            raise ValueError(f"{where} holds {short(row)}; expected an object with the key {column!r}")
        yield _check(str(row) if kept and type(row) is int else row, where)


def _csv(stream: IO[bytes], name: str, column: str | None, _: bool) -> Iterator[list[str]]:
    return _blocks(_cells(stream, name, column, delimiter=",", quoted=True))


def _tsv(stream: IO[bytes], name: str, column: str | None, _: bool) -> Iterator[list[str]]:
    return _blocks(_cells(stream, name, column, delimiter="\t", quoted=False))


def _blocks(sentences: Iterator[str]) -> Iterator[list[str]]:
    while block := list(itertools.islice(sentences, _BLOCK)):
        yield block


def _cells(stream: IO[bytes], name: str, column: str | None, *, delimiter: str, quoted: bool) -> Iterator[str]:
    # The standard library's reader is as fast as pyarrow's where rows become strings, and unlike it refuses a
    # quotation mark that is never closed.
    csv.field_size_limit(max(csv.field_size_limit(), _CELL_LIMIT))
    rows = csv.reader(
        _lines(stream, name),
        strict=True,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
    )
    try:
        header = next(rows, None)
        if header is None:
            return
        position = header.index(_choose(header, column, name))
        for row in rows:
            if len(row) == len(header):
                yield row[position]
            elif row:  # an empty line is no row
                raise ValueError(
                    f"{name}, line {rows.line_num} has {len(row)} columns; expected {len(header)} as in the header"
                )
    except csv.Error as error:
        raise ValueError(f"{name}, line {rows.line_num}: {error}") from error


def _parquet(stream: IO[bytes], name: str, column: str | None, kept: bool) -> Iterator[list[str]]:
    pa = pyarrow("Parquet")
    try:
        # Parquet keeps its index at the end, where only a file on a disk can be read first.
        source = (
            stream
            if isinstance(stream, io.BufferedReader) and _is_file(stream)
            else pa.BufferReader(stream.read())
        )
        file = pa.parquet.ParquetFile(source, buffer_size=_BUFFER)
        schema = file.schema_arrow
        chosen = _choose(schema.names, column, name)
        kind = schema.field(chosen).type
        is_number = kept and pa.types.is_integer(kind)
        is_text = any(kind_of(kind) for kind_of in (pa.types.is_string, pa.types.is_large_string, _is_dictionary))
        if not (is_text or is_number):
            raise ValueError(f"{name}: the column {chosen!r} is of type {kind}; expected strings")
        row = 0
        for batch in file.iter_batches(_PARQUET_ROWS, columns=[chosen]):
            values = batch.column(0).to_pylist()
            if None in values:
                _check(None, f"{name}, row {row + values.index(None) + 1}")
            row += len(values)
            yield list(map(str, values)) if is_number else values
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read as Parquet: {error}") from error


def _is_file(stream: io.BufferedReader) -> bool:
    return isinstance(stream.raw, io.FileIO) and stream.seekable()


def _is_dictionary(kind: Any) -> bool:
    types = pyarrow("Parquet").types
    return types.is_dictionary(kind) and types.is_string(kind.value_type)


def _choose(names: list[str], column: str | None, where: str) -> str:
    if column is None and len(names) == 1:
        return names[0]
    listed = ", ".join(map(repr, names)) or "none"
    if column is None:
        raise ValueError(f"{where} has the columns {listed}; expected one of them as the column of the sentences")
    if names.count(column) != 1:
        raise ValueError(f"{where} has the columns {listed}; expected {column!r} once")
    return column


def _check(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} holds {short(value)}; expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = ascii(value[error.start])
            raise ValueError(f"{where} holds {found}, half of a surrogate pair; expected valid Unicode") from error
    return value


def short(value: object) -> str:
    """A value and its type, for a message."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:40] + '...'} of type {type(value).__name__}"


FORMATS: dict[str, Reader] = {"txt": _text, "csv": _csv, "tsv": _tsv, "jsonl": _json_lines, "parquet": _parquet}
