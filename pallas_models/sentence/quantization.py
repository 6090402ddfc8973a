"""Embeddings in fewer bytes: a byte or a bit a dimension, as sentence-transformers defines them."""

from typing import Literal, get_args

import numpy as np

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
"""The dtypes of embeddings, as sentence-transformers calls them; the last two hold a bit a dimension."""


def check_precision(precision: str) -> None:
    """Raises ValueError unless `precision` is one of `Precision`.

    ```
    quantization.check_precision("ubinary")
    ```
    """
    if precision not in get_args(Precision):
        raise ValueError(f"{precision=} is unknown; expected one of {get_args(Precision)}")


def ranges_of(embeddings: np.ndarray) -> np.ndarray:
    """The smallest and the largest value of each dimension, (2, D), of embeddings.

    Args:
      embeddings: (N, D), floating point, a sample of all.

    Returns:
      (2, D) in their dtype, as `quantize_embeddings` takes it.

    Raises:
      ValueError: there are fewer than two, which span no range.
    """
    if len(embeddings) < 2:
        raise ValueError(
            f"embeddings has {len(embeddings)} rows; expected at least 2 to take ranges from: "
            "to quantize fewer, give `quantize_embeddings` the `ranges` of others"
        )
    return np.stack([embeddings.min(axis=0), embeddings.max(axis=0)])


def quantize_embeddings(
    embeddings: np.ndarray, precision: Precision, *, ranges: np.ndarray | None = None
) -> np.ndarray:
    """Computes embeddings in a smaller type, with the values of sentence-transformers' function of this name.

    - `"float32"`: unchanged.
    - `"uint8"`: each dimension's range in 255 steps, `floor((x - low) / step)`, clipped to [0, 255].
    - `"int8"`: the value of uint8 less 128.
    - `"ubinary"`: a bit a dimension, 1 where it is above 0, eight to a byte, the first in the highest bit.
    - `"binary"`: the bytes of ubinary less 128.

    Args:
      embeddings: (N, D), floating point.
      precision: one of the above.
      ranges: (2, D), of int8 and uint8, as `ranges_of` gives it. None takes the ranges of the embeddings
        themselves, so that the same sentence has other bytes in another call.

    Returns:
      (N, D) of this type; for "binary" int8 and for "ubinary" uint8 of (N, ceil(D / 8)).

    Raises:
      ValueError: `precision` is unknown, ranges have another shape, or there are none and fewer than two
        embeddings to take them from.
    """
    check_precision(precision)
    if precision == "float32":
        return np.asarray(embeddings, np.float32)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(embeddings > 0, axis=-1)
        return bits if precision == "ubinary" else (bits - 128).astype(np.int8)
    if ranges is None:
        if not len(embeddings):
            return np.zeros(embeddings.shape, precision)
        ranges = ranges_of(embeddings)
    if ranges.shape != (2, embeddings.shape[1]):
        raise ValueError(f"ranges has shape {ranges.shape}; expected {(2, embeddings.shape[1])}, (2, D)")
    low, high = ranges.astype(np.float32)
    step = (high - low) / 255
    steps = np.clip(np.floor((embeddings - low) / np.where(step == 0, 1, step)), 0, 255)
    return steps.astype(np.uint8) if precision == "uint8" else (steps - 128).astype(np.int8)
