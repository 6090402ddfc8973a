"""What a folder of embeddings holds: manifest.json, beside the shards that it lists."""

import bisect
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pallas_models
from pallas_models import files

NAME = "manifest.json"


@dataclasses.dataclass
class Shard:
    """One file of embeddings.

    Attributes:
      file: its name in the folder.
      sentences: rows of it.
      dimension: values of an embedding, before they are packed into bits.
      bytes, sha256: of the file.
      source: what it was made from, the sha256 of its sentences as `Digest` forms it.
    """

    file: str
    sentences: int
    dimension: int
    bytes: int
    sha256: str
    source: str


@dataclasses.dataclass
class Manifest:
    """The contents of manifest.json; nothing in it depends on when or in how many runs a folder was written.

    Attributes:
      model: its name and the sha256 of each of its files.
      settings: what decides the values and the shape of the files.
      ranges: (2, dimension), what int8 and uint8 are relative to, or None.
      environment: versions and devices, on which the last bits of the values depend.
      shards: the files, in the order of their names, which is that of the sentences.
      complete: whether all sentences are embedded.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    ranges: list[list[float]] | None = None
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    shards: list[Shard] = dataclasses.field(default_factory=list)
    complete: bool = False

    @property
    def sentences(self) -> int:
        return sum(shard.sentences for shard in self.shards)

    @property
    def dimension(self) -> int:
        return self.shards[0].dimension if self.shards else 0

    def add(self, shard: Shard, folder: Path) -> None:
        """Lists one more file, by its name as files are not always written in that order, in the folder too."""
        bisect.insort(self.shards, shard, key=lambda shard: shard.file)
        self.write(folder)

    def write(self, folder: Path) -> None:
        files.write(folder / NAME, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def check_continues(self, earlier: "Manifest", folder: Path) -> None:
        """Raises ValueError, with what differs, unless the two would give the same values."""
        differences = [
            f"{name} was {then.get(name)!r} and is now {now.get(name)!r}"
            for then, now in (
                (earlier.model["files"], self.model["files"]),
                (earlier.settings, self.settings),
                (earlier.environment, self.environment),
            )
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
    """Returns the manifest of a folder, None where the folder is empty or absent.

    Raises:
      ValueError: the folder holds files and no manifest, or one that cannot be read.
    """
    path = folder / NAME
    try:
        fields = json.loads(path.read_bytes())
        return Manifest(**fields | {"shards": [Shard(**shard) for shard in fields["shards"]]})
    except FileNotFoundError:
        if folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir()):
            raise ValueError(
                f"{folder} holds files and no {NAME}; expected an empty folder, or one to continue"
            ) from None
        return None
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no manifest: {error}") from error


def read_ranges(folder: Path) -> list[list[float]]:
    """Returns the ranges that the embeddings in a folder are relative to.

    Raises:
      ValueError: there are none.
    """
    found = read(folder)
    if found is None or found.ranges is None:
        raise ValueError(f"{folder} holds no ranges; expected a folder of int8 or uint8 embeddings")
    return found.ranges


class Digest:
    """The sha256 of sentences and how many there were, both of those that were taken from `of`.

    Of every 4096 sentences, the lengths are hashed as int64 and then the text in UTF-8.
    """

    def __init__(self) -> None:
        self._hash, self.count = hashlib.sha256(), 0

    def of(self, sentences: Iterable[str]) -> Iterator[str]:
        """Yields the sentences."""
        sentences = iter(sentences)
        while block := list(itertools.islice(sentences, 4096)):
            # The lengths keep "ab", "c" apart from "a", "bc".
            self._hash.update(np.fromiter(map(len, block), "<i8", len(block)).tobytes())
            self._hash.update("".join(block).encode())
            self.count += len(block)
            yield from block

    def __str__(self) -> str:
        return self._hash.hexdigest()


def describe_model(name: str, folder: Path) -> dict[str, Any]:
    """Returns the name of a model and the sha256 of each file in `folder` and its folders, or of a single file."""
    paths = sorted([*folder.glob("*"), *folder.glob("*/*")]) if folder.is_dir() else [folder]
    root = folder if folder.is_dir() else folder.parent
    found = {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    return {"name": name, "files": {file: _sha256(path) for file, path in found.items() if not _is_hidden(file)}}


def describe_environment() -> dict[str, Any]:
    import jax

    devices = sorted({device.device_kind for device in jax.devices()})
    return {"pallas_models": pallas_models.__version__, "jax": jax.__version__, "device": ", ".join(devices)}


def _is_hidden(file: str) -> bool:
    return any(part.startswith(".") for part in file.split("/"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
