"""Embeddings in fewer bytes, as version 6 of [sentence-transformers](https://sbert.net) defines them.

`int8` and `uint8` divide what a dimension spans into 255 steps; `binary` and `ubinary` keep one bit of a value,
its sign, eight to a byte.
"""

from collections.abc import Sequence

import numpy as np

# What `quantize` makes, by name; binary and ubinary hold the same bits as signed and as unsigned bytes.
PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
# Those that need the ranges of the dimensions.
RANGED = ("int8", "uint8")


def find_ranges(embeddings: np.ndarray) -> np.ndarray:
    """Returns what each dimension spans: (2, D) float32, the least values and the greatest ones.

    Raises:
      ValueError: there are no embeddings.
    """
    if not len(embeddings):
        raise ValueError(f"embeddings have shape {embeddings.shape}; expected at least one row")
    return np.stack([embeddings.min(0), embeddings.max(0)])


def quantize(
    embeddings: np.ndarray, precision: str, ranges: np.ndarray | Sequence[Sequence[float]] | None = None
) -> np.ndarray:
    """Returns embeddings in another precision.

    uint8 is floor(255 (x - least) / (greatest - least)), int8 the same less 128. What lies beyond the ranges takes
    the nearest value, and a dimension that spans nothing the least one.

    Args:
      embeddings: (N, D) float32.
      precision: one of `PRECISIONS`.
      ranges: (2, D), as `find_ranges` returns them; when None, those of the embeddings themselves. The same for
        all that are to be compared. Only int8 and uint8 use them.

    Returns:
      (N, D); (N, ceil(D / 8)) for binary, which is int8, and ubinary, which is uint8. The highest bit is the
      first; int8 is the unsigned byte less 128.

    Raises:
      ValueError: the precision is unknown, or ranges do not fit.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"{precision=}; expected one of {', '.join(PRECISIONS)}")
    count, dimension = embeddings.shape
    if precision in RANGED:
        if ranges is None:
            ranges = find_ranges(embeddings) if count else np.zeros((2, dimension))
        least, greatest = _check_ranges(ranges, dimension)
        step = (greatest - least) / 255
        unsigned = np.clip((embeddings - least) / np.where(step > 0, step, 1), 0, 255).astype(np.uint8)
    elif precision in ("binary", "ubinary"):
        unsigned = np.packbits(embeddings > 0, axis=1)
    else:
        return embeddings.astype(precision)
    return unsigned if precision.startswith("u") else (unsigned ^ 0x80).view(np.int8)  # less 128, mod 256


def _check_ranges(ranges: np.ndarray | Sequence[Sequence[float]], dimension: int) -> np.ndarray:
    found = np.asarray(ranges, np.float32)
    if found.shape != (2, dimension):
        raise ValueError(f"ranges have shape {found.shape}; expected {(2, dimension)}")
    return found
