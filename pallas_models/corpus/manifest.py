"""manifest.json, which describes a folder of embeddings and lists its shards."""

import bisect
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

import pallas_models
from pallas_models import files
from pallas_models.corpus import writing
from pallas_models.corpus.reading import short

NAME = "manifest.json"


class Model(TypedDict):
    """The name of a model, and the sha256 of each of its files."""

    name: str
    files: dict[str, str]


@dataclasses.dataclass
class Shard:
    """One file of embeddings.

    Attributes:
      file: its name in the folder.
      sentences: the number of its rows.
      dimension: values of an embedding, before they are packed into bits.
      bytes, sha256: of the file.
      source: the sha256 of its sentences, as `Digest` forms it.
    """

    file: str
    sentences: int
    dimension: int
    bytes: int
    sha256: str
    source: str


@dataclasses.dataclass
class Manifest:
    """The content of manifest.json, which does not depend on when or in how many runs a folder was written.

    Attributes:
      model: its name and the sha256 of each of its files.
      settings: decide the values and the shape of the files.
      ranges: (2, dimension), to which int8 and uint8 are relative, or None.
      environment: versions and devices, on which the last bits of the values depend.
      shards: the files, in the order of their names and so of the sentences.
      complete: whether all sentences are embedded.
    """

    model: Model
    settings: dict[str, object]
    ranges: list[list[float]] | None = None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    shards: list[Shard] = dataclasses.field(default_factory=list)
    complete: bool = False

    @property
    def sentences(self) -> int:
        return sum(shard.sentences for shard in self.shards)

    @property
    def dimension(self) -> int:
        return self.shards[0].dimension if self.shards else 0

    def add(self, shard: Shard, folder: Path) -> None:
        """Lists one more file, by its name as files may be written in another order; in the folder too."""
        bisect.insort(self.shards, shard, key=lambda shard: shard.file)
        self.write(folder)

    def write(self, folder: Path) -> None:
        files.write(folder / NAME, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def check_continues(self, earlier: "Manifest", folder: Path) -> None:
        """Raises ValueError, and lists the differences, unless both manifests stand for the same values."""
        compared: list[tuple[Mapping[str, object], Mapping[str, object]]] = [
            (earlier.model["files"], self.model["files"]),
            (earlier.settings, self.settings),
            (earlier.environment, self.environment),
        ]
        differences = [
            f"{name} was {then.get(name)!r} and is now {now.get(name)!r}"
            for then, now in compared
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]
        if self.ranges is not None and self.ranges != earlier.ranges:
            differences.append("its ranges are others than those that are given")
        if differences:
            raise ValueError(
                f"{folder} was begun otherwise: {'; '.join(differences)}; expected the same, or another folder"
            )


def read(folder: Path) -> Manifest | None:
    """Returns the manifest of a folder, or None where the folder is empty or absent.

    Raises:
      ValueError: the folder holds files and no manifest, or a manifest that cannot be read or was not written by
        this package; the message names the field.
    """
    path = folder / NAME
    try:
        fields = _checked(json.loads(path.read_bytes()), _MANIFEST, "")
        _checked(fields["model"], _MODEL, "model.")
        shards = [Shard(**_checked(x, _SHARD, f"shards[{i}].")) for i, x in enumerate(fields["shards"])]
        if wrong := [x.file for x, y in itertools.pairwise(shards) if x.file >= y.file]:
            raise ValueError(f"shards has another file after {wrong[0]!r} than one of a later name")
        return Manifest(**fields | {"shards": shards})
    except FileNotFoundError:
        if folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir()):
            raise ValueError(
                f"{folder} holds files and no {NAME}; expected an empty folder, or one to continue"
            ) from None
        return None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is no manifest: {error}") from error


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_shard(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9]{6,}[.][a-z]+", value) is not None


def _are_ranges(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(row, list) for row in value):
        return False
    if not all(type(x) in (int, float) and abs(x) <= _LARGEST for row in value for x in row):  # so no NaN
        return False
    low, high = value
    return 0 < len(low) == len(high) and all(a <= b for a, b in zip(low, high, strict=True))


# No value of an embedding is larger: models compute in float16 too.
_LARGEST = float(np.finfo(np.float16).max)
# The kind of value that a field holds, in words and as a test.
_Kind = tuple[str, Callable[[object], bool]]
_TEXT: _Kind = "a string", lambda value: isinstance(value, str)
_OBJECT: _Kind = "an object", lambda value: isinstance(value, dict)
_COUNT: _Kind = "a whole number from 0 on", _is_count
_DIGEST: _Kind = "64 hexadecimal digits", _is_digest
_RANGES: _Kind = (
    f"two lists, the smallest and the largest value of each dimension, finite and within {_LARGEST:.0f}",
    _are_ranges,
)
_MANIFEST: dict[str, _Kind] = {
    "model": _OBJECT,
    "settings": _OBJECT,
    "ranges": (f"null or {_RANGES[0]}", lambda value: value is None or _are_ranges(value)),
    "environment": _OBJECT,
    "shards": ("a list", lambda value: isinstance(value, list)),
    "complete": ("true or false", lambda value: isinstance(value, bool)),
}
_MODEL: dict[str, _Kind] = {"name": _TEXT, "files": ("an object of strings", _are_texts)}
_SHARD: dict[str, _Kind] = {
    "file": ("the name of a shard, such as 000000.npy", _is_shard),
    "sentences": _COUNT,
    "dimension": _COUNT,
    "bytes": _COUNT,
    "sha256": _DIGEST,
    "source": _DIGEST,
}


def _checked(value: object, kinds: Mapping[str, _Kind], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where.removesuffix('.') or 'it'} is {short(value)}; expected an object")
    for name in (*kinds, *value):
        if name not in value:
            raise ValueError(f"{where}{name} is missing")
        if name not in kinds:
            raise ValueError(f"{where}{name} is unknown; expected {', '.join(kinds)}")
        expected, holds = kinds[name]
        if not holds(value[name]):
            raise ValueError(f"{where}{name} is {short(value[name])}; expected {expected}")
    return value


def read_ranges(path: Path) -> list[list[float]]:
    """Returns the ranges that the embeddings in a folder, or in a file that holds its own, are relative to.

    Raises:
      ImportError: it is a Parquet file, and pyarrow is not installed.
      OSError: it cannot be read.
      ValueError: there are none, or they are no ranges.
    """
    if path.is_file():
        ranges = writing.read_ranges(path)
        if ranges is not None and not _are_ranges(ranges):
            raise ValueError(f"{path}: ranges is {short(ranges)}; expected {_RANGES[0]}")
    else:
        found = read(path)
        ranges = None if found is None else found.ranges
    if ranges is None:
        raise ValueError(f"{path} holds no ranges; expected a folder or a file of int8 or uint8 embeddings")
    return ranges


class Digest:
    """The sha256 and the number of the sentences that were taken from `of`.

    Of every 4096 sentences, the lengths are hashed as int64 and then the text in UTF-8; after all sentences the
    texts that are kept beside them are hashed likewise.
    """

    def __init__(self) -> None:
        self._hash, self.count = hashlib.sha256(), 0

    def of(self, sentences: Iterable[str]) -> Iterator[str]:
        """Yields the sentences."""
        sentences = iter(sentences)
        while block := list(itertools.islice(sentences, 4096)):
            self._update(block)
            self.count += len(block)
            yield from block

    def keep(self, texts: list[str]) -> None:
        """Hashes the texts that are kept beside the sentences, once all sentences are taken.

        Raises:
          ValueError: there is not one text for each sentence.
        """
        if len(texts) != self.count:
            raise ValueError(f"the column that is kept has {len(texts)} rows beside {self.count} sentences")
        for start in range(0, len(texts), 4096):
            self._update(texts[start : start + 4096])

    def _update(self, block: list[str]) -> None:
        # The lengths keep "ab", "c" apart from "a", "bc".
        self._hash.update(np.fromiter(map(len, block), "<i8", len(block)).tobytes())
        self._hash.update("".join(block).encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def describe_model(name: str, folder: Path) -> Model:
    """Returns the name of a model and the sha256 of each file in `folder` and its folders, or of a single file."""
    paths = sorted([*folder.glob("*"), *folder.glob("*/*")]) if folder.is_dir() else [folder]
    root = folder if folder.is_dir() else folder.parent
    found = {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    return {"name": name, "files": {file: _sha256(path) for file, path in found.items() if not _is_hidden(file)}}


def describe_environment() -> dict[str, str]:
    """Returns the versions and devices on which the last bits of embeddings depend."""
    import jax

    devices = sorted({device.device_kind for device in jax.devices()})
    return {"pallas_models": pallas_models.__version__, "jax": jax.__version__, "device": ", ".join(devices)}


def _is_hidden(file: str) -> bool:
    return any(part.startswith(".") for part in file.split("/"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
