"""Writes embeddings as .npy, .npz, .parquet or .safetensors: the same bytes for the same values."""

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast, get_args

import numpy as np

from pallas_models import files
from pallas_models.corpus.reading import pyarrow
from pallas_models.sentence import quantization

DTYPES = (*get_args(quantization.Precision), "float16")
# Types that are relative to ranges, as `quantization.ranges_of` finds them.
RANGED = ("int8", "uint8")
Ranges = list[list[float]] | None
EMBEDDING = "embedding"  # the column of a .parquet file
Parts = list[np.ndarray]  # (n, D) each, at least one: embeddings one after another


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """The content of a file beside its embeddings.

    Attributes:
      ranges: to which the embeddings are relative, for all formats but .npy.
      kept: the name of a column and a text for each embedding, for .parquet.
    """

    ranges: Ranges = None
    kept: tuple[str, list[str]] | None = None


_NOTHING = Beside()
# Sentences of a file in a folder: whole chunks of the encoder's pipeline, 200 MB of float32 with 384 values.
SHARD_SIZE = 8 * 16384
# Rows that Parquet holds in memory until it writes them, with more memory beside them than they take.
_ROW_GROUP = 16384


def convert(embeddings: np.ndarray, dtype: str, ranges: Ranges = None) -> np.ndarray:
    """Returns (N, D) float32 embeddings in one of `DTYPES`, as `quantization.quantize_embeddings` defines them."""
    if dtype == "float16":
        return embeddings.astype(np.float16)
    given = None if ranges is None else np.asarray(ranges, np.float32)
    return quantization.quantize_embeddings(embeddings, cast(quantization.Precision, dtype), ranges=given)


def write(path: Path, parts: Parts, format: str, beside: Beside = _NOTHING) -> str:
    """Writes embeddings to a file, whole or not at all, and returns its sha256. The list may be empty afterwards.

    The file does not depend on how they are divided, as long as all parts but the last have a multiple of 16,384
    rows. The array is called `embeddings` in .npz and .safetensors. A .parquet file has the column `embedding`, of
    lists with a fixed length, after the column that is kept.
    """
    with files.replacing(path) as file:
        FORMATS[format](file, parts, beside)
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def _taken(parts: Parts) -> Iterator[np.ndarray]:
    """Yields the parts and keeps none: a shard gives its memory back piece by piece, as the next one takes it."""
    while parts:
        yield parts.pop(0)


def check_available(format: str) -> None:
    """Raises ImportError unless the package that writes this format is installed."""
    if format == "parquet":
        pyarrow("Parquet")


def read_ranges(path: Path) -> Ranges:
    """Returns the ranges that a file holds beside its embeddings, or None.

    Raises:
      ValueError: the file is damaged, or its format has no place for ranges.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return arrays["ranges"].tolist() if "ranges" in arrays else None
        if path.suffix == ".safetensors":
            import safetensors.numpy

            ranges = safetensors.numpy.load_file(path).get("ranges")
            return None if ranges is None else ranges.tolist()
        if path.suffix == ".parquet":
            metadata = pyarrow("Parquet").parquet.read_schema(path).metadata or {}
            return json.loads(metadata[b"ranges"]) if b"ranges" in metadata else None
    except (ImportError, OSError):
        raise
    except Exception as error:  # libraries raise errors of many kinds for a damaged file
        raise ValueError(f"{path} cannot be read: {error}") from error
    raise ValueError(f"{path} holds no ranges; expected .npz, .safetensors or .parquet")


def _npy(file: IO[bytes], parts: Parts, _: Beside = _NOTHING) -> None:
    descr = np.lib.format.dtype_to_descr(parts[0].dtype)
    shape = sum(map(len, parts)), parts[0].shape[1]
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    for part in _taken(parts):
        file.write(np.ascontiguousarray(part).data)


def _npz(file: IO[bytes], parts: Parts, beside: Beside) -> None:
    arrays = _arrays(parts, beside)
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _npy(member, array)


def _safetensors(file: IO[bytes], parts: Parts, beside: Beside) -> None:
    import safetensors.numpy

    arrays = _arrays(parts, beside)
    file.write(safetensors.numpy.save({name: np.concatenate(array) for name, array in arrays.items()}))


def _arrays(parts: Parts, beside: Beside) -> dict[str, Parts]:
    ranges = {} if beside.ranges is None else {"ranges": [np.asarray(beside.ranges, np.float32)]}
    return {"embeddings": parts} | ranges


def _parquet(file: IO[bytes], parts: Parts, beside: Beside) -> None:
    pa = pyarrow("Parquet")
    kind = pa.list_(pa.from_numpy_dtype(parts[0].dtype), parts[0].shape[1])
    metadata = None if beside.ranges is None else {"ranges": json.dumps(beside.ranges)}
    name, texts = beside.kept or ("", [])
    fields = [pa.field(name, pa.string())] if beside.kept else []
    schema = pa.schema([*fields, pa.field(EMBEDDING, kind)], metadata)
    # Embeddings do not compress, and nobody searches for one by its values.
    options = dict(compression="none", use_dictionary=False, write_statistics=False)
    with pa.parquet.ParquetWriter(file, schema, **options) as writer:
        start = 0
        for part in _taken(parts):
            lists = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), part.shape[1])
            kept = [pa.array(texts[start : start + len(part)], pa.string())] if beside.kept else []
            writer.write_table(pa.table([*kept, lists], schema), row_group_size=_ROW_GROUP)
            start += len(part)


FORMATS: dict[str, Callable[[IO[bytes], Parts, Beside], None]] = {
    "npy": _npy,
    "npz": _npz,
    "parquet": _parquet,
    "safetensors": _safetensors,
}
