"""Tensors of a checkpoint, of one file or many, each read when it is needed: no model is in memory twice."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from weights import checkpoint, pickles
from weights.checkpoint import CheckpointError

TENSOR_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt")
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is still in its file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, LazyTensor]]:
    """Opens a checkpoint for as long as the context lasts.

    Args:
      path: a .safetensors, .bin or .pt file, or a folder: with model.safetensors; with
        model.safetensors.index.json and the files that it names; or with pytorch_model.bin or .pt. The last two
        are read at once.

    Returns:
      Every tensor by its name. PyTorch's bfloat16 comes back as float32, which holds the same values.

    Raises:
      FileNotFoundError: nothing to read, or a file that the index names is missing.
      CheckpointError: a file is truncated, corrupt or not a checkpoint, or the index and the files do not agree.
      ImportError: a .bin or .pt file without torch installed.
    """
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            found = [path / name for name in TENSOR_FILES if (path / name).is_file()]
            if (path / INDEX_FILE).is_file() and path / "model.safetensors" not in found:
                yield _open_indexed(path / INDEX_FILE, stack)
                return
            if not found:
                raise FileNotFoundError(f"{path} holds no checkpoint; expected one of {', '.join(TENSOR_FILES)}")
            path = found[0]
        yield _open(path, stack) if path.suffix == ".safetensors" else in_memory(pickles.read(path))


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a checkpoint; argument and errors as in `open_tensors`."""
    with open_tensors(path) as tensors:
        return {name: tensor.read() for name, tensor in tensors.items()}


def in_memory(tensors: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Wraps tensors that are in memory already: arrays, or tensors of PyTorch."""

    def lazy(tensor: Any) -> LazyTensor:
        if hasattr(tensor, "detach"):
            return LazyTensor(tuple(tensor.shape), pickles.dtype_of(tensor), lambda: pickles.to_numpy(tensor))
        return LazyTensor(tensor.shape, tensor.dtype, lambda: np.asarray(tensor))

    return {name: lazy(tensor) for name, tensor in tensors.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the metadata of a safetensors file, and no tensor. Errors as in `open_tensors`."""
    with _open_safetensors(path) as file:
        return file.metadata() or {}


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    checkpoint.check_content(path)
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise checkpoint.unreadable(path, "safetensors", error) from error


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, LazyTensor]:
    file = stack.enter_context(_open_safetensors(path))

    def lazy(name: str) -> LazyTensor:
        view = file.get_slice(name)
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{path} holds {name} as {view.get_dtype()}, which this library cannot read")
        return LazyTensor(tuple(view.get_shape()), np.dtype(dtype), lambda: file.get_tensor(name))

    return {name: lazy(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _open_indexed(path: Path, stack: contextlib.ExitStack) -> dict[str, LazyTensor]:
    places = checkpoint.read_json(path).get("weight_map")
    if not isinstance(places, Mapping) or not all(isinstance(place, str) for place in places.values()):
        raise CheckpointError(f"{path} has no weight_map from names of tensors to names of files")
    files = sorted(set(places.values()))
    # The files lie beside the index: a name with a folder in it might lead anywhere.
    if strange := [file for file in files if not re.fullmatch(r"(?!\.)[\w.-]{1,200}\.safetensors", file)]:
        raise CheckpointError(
            f"{path} names the file {checkpoint.shown(strange[0])}; expected a .safetensors file beside it"
        )
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{path.parent} lacks {', '.join(missing)}, named in {path.name}")
    tensors: dict[str, LazyTensor] = {}
    wrong = []
    for file in files:
        found = _open(path.parent / file, stack)
        placed = {name for name, place in places.items() if place == file}
        wrong += [f"missing     {name} in {file}" for name in sorted(placed - found.keys())]
        wrong += [f"unexpected  {name} in {file}" for name in sorted(found.keys() - placed)]
        tensors |= found
    if wrong:
        raise CheckpointError(f"{path} does not fit the files that it names:\n  " + "\n  ".join(wrong))
    return tensors
