"""Writes embeddings as .npy, .npz, .parquet or .safetensors: the same bytes for the same values."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast, get_args

import numpy as np

from pallas_models import files, quantization
from pallas_models.corpus.reading import pyarrow

DTYPES = (*get_args(quantization.Precision), "float16")
# Those that are relative to ranges, as `quantization.ranges_of` finds them.
RANGED = ("int8", "uint8")
Ranges = list[list[float]] | None
# Rows that Parquet holds in memory until it writes them, with more beside than they take themselves.
_ROW_GROUP = 16384


def convert(embeddings: np.ndarray, dtype: str, ranges: Ranges = None) -> np.ndarray:
    """Returns (N, D) float32 embeddings in one of `DTYPES`, as `quantization.quantize_embeddings` defines them."""
    if dtype == "float16":
        return embeddings.astype(np.float16)
    given = None if ranges is None else np.asarray(ranges, np.float32)
    return quantization.quantize_embeddings(embeddings, cast(quantization.Precision, dtype), ranges=given)


def write(path: Path, embeddings: np.ndarray, format: str) -> str:
    """Writes (N, D) embeddings to a file, whole or not at all; returns its sha256.

    The array is called `embeddings` in .npz and .safetensors. A .parquet file has one column, `embedding`, of
    lists with a fixed length.
    """
    with files.replacing(path) as file:
        FORMATS[format](file, embeddings)
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def check_available(format: str) -> None:
    """Raises ImportError unless what writes this format is installed."""
    if format == "parquet":
        pyarrow("Parquet")


def _npy(file: IO[bytes], embeddings: np.ndarray) -> None:
    np.save(file, embeddings)


def _npz(file: IO[bytes], embeddings: np.ndarray) -> None:
    np.savez(file, embeddings=embeddings)


def _safetensors(file: IO[bytes], embeddings: np.ndarray) -> None:
    import safetensors.numpy

    file.write(safetensors.numpy.save({"embeddings": embeddings}))


def _parquet(file: IO[bytes], embeddings: np.ndarray) -> None:
    pa = pyarrow("Parquet")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.reshape(-1)), embeddings.shape[1])
    # Embeddings do not compress, and nobody searches for one by its values.
    options = dict(compression="none", use_dictionary=False, write_statistics=False)
    pa.parquet.write_table(pa.table({"embedding": lists}), file, row_group_size=_ROW_GROUP, **options)


FORMATS: dict[str, Callable[[IO[bytes], np.ndarray], None]] = {
    "npy": _npy,
    "npz": _npz,
    "parquet": _parquet,
    "safetensors": _safetensors,
}
