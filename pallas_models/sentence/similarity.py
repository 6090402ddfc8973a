"""How alike embeddings are: the measures of sentence-transformers, larger where embeddings are more alike."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _distances(a: np.ndarray, b: np.ndarray, order: int) -> np.ndarray:
    # A row at a time: no array of all pairs and dimensions, and no difference of large squares.
    return np.stack([np.linalg.norm(row - b, ord=order, axis=1) for row in a]) if len(a) else np.zeros((0, len(b)))


_ALL: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda a, b: _unit(a) @ _unit(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -_distances(a, b, 2),
    "manhattan": lambda a, b: -_distances(a, b, 1),
}
_PAIRWISE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda a, b: np.sum(_unit(a) * _unit(b), axis=1),
    "dot": lambda a, b: np.sum(a * b, axis=1),
    "euclidean": lambda a, b: -np.linalg.norm(a - b, axis=1),
    "manhattan": lambda a, b: -np.linalg.norm(a - b, ord=1, axis=1),
}


def check(name: str) -> None:
    """Raises ValueError unless there is a measure of this name.

    ```
    similarity.check("manhattan")
    ```
    """
    if name not in _ALL:
        raise ValueError(f"similarity_fn_name={name!r} is unknown; expected one of {tuple(_ALL)}")


def similarity(a: ArrayLike, b: ArrayLike, measure: Similarity = "cosine") -> np.ndarray:
    """The similarity of each embedding of a with each of b.

    Args:
      a: (N, D) or (D,), numbers of any dtype.
      b: (M, D) or (D,).
      measure: `"cosine"`, `"dot"`, or the negative distance, `"euclidean"` or `"manhattan"`.

    Returns:
      (N, M) float32.

    Raises:
      ValueError: embeddings are not of one D.
    """
    return _ALL[measure](*_rows(a, b)).astype(np.float32)


def similarity_pairwise(a: ArrayLike, b: ArrayLike, measure: Similarity = "cosine") -> np.ndarray:
    """The similarity of a[i] with b[i].

    Args:
      a: (N, D) or (D,), numbers of any dtype.
      b: as a.
      measure: as in `similarity`.

    Returns:
      (N,) float32, or () where both are (D,).

    Raises:
      ValueError: embeddings are not of one D.
    """
    found = _PAIRWISE[measure](*_rows(a, b)).astype(np.float32)
    return found[0] if np.ndim(a) == np.ndim(b) == 1 else found


def _rows(*given: ArrayLike) -> list[np.ndarray]:
    rows = [np.atleast_2d(np.asarray(x, np.float32)) for x in given]
    if rows[0].shape[1] != rows[1].shape[1] or any(x.ndim != 2 for x in rows):
        raise ValueError(f"embeddings have shapes {rows[0].shape} and {rows[1].shape}; expected (N, D) and (M, D)")
    return rows
