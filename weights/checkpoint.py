"""Reads checkpoints: config.json and the tensors beside it, each failure naming its file and its cause."""

import contextlib
import json
import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

TENSOR_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt")
_FLOAT_DTYPES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: corrupt, incomplete, or of another model."""


class Described(Protocol):
    """Anything that has a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


def float_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns `dtype` as a NumPy dtype; TypeError unless it is float16, bfloat16 or float32."""
    result = jnp.dtype(dtype)
    if result not in _FLOAT_DTYPES[:3]:
        raise TypeError(f"dtype is {result}; expected float16, bfloat16 or float32")
    return result


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; FileNotFoundError or CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: a checkpoint folder holds a {path.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a checkpoint.

    Args:
      path: a .safetensors, .bin or .pt file, or a folder with one of `TENSOR_FILES`, the first that exists.

    Returns:
      Every tensor by its name. PyTorch's bfloat16 comes back as float32, which holds the same values.

    Raises:
      FileNotFoundError: nothing to read.
      CheckpointError: the file is truncated, corrupt or not a checkpoint.
      ImportError: a .bin or .pt file without torch installed.
    """
    if path.is_dir():
        found = [path / name for name in TENSOR_FILES if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds no checkpoint; expected one of {', '.join(TENSOR_FILES)}")
        path = found[0]
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return _read_torch(path)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a safetensors file by name. Errors as in `read_tensors`."""
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the metadata of a safetensors file, and no tensor. Errors as in `read_tensors`."""
    with open_safetensors(path) as file:
        return file.metadata() or {}


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file as `safetensors.safe_open` does. Errors as in `read_tensors`."""
    _check_content(path)
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise _unreadable(path, "safetensors", error) from error


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    _check_content(path)
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs PyTorch: install torch, or convert the checkpoint to safetensors"
        ) from error
    try:
        # weights_only: a pickle may run any code, this keeps it to tensors and containers.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is corrupt; it was not loaded, as a pickle may run code: {error}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError) as error:
        raise _unreadable(path, "PyTorch", error) from error
    if not isinstance(content, Mapping) or not all(isinstance(t, torch.Tensor) for t in content.values()):
        raise CheckpointError(
            f"{path} holds no state dict: expected tensors by name, as `state_dict()` returns them"
        )
    return {name: to_numpy(tensor) for name, tensor in content.items()}


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor of PyTorch, or an array, as a NumPy array; PyTorch's bfloat16 as float32."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    tensor = tensor.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _check_content(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    with path.open("rb") as file:
        if file.read(42).startswith(b"version https://git-lfs.github.com/spec"):
            raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there")


def _unreadable(path: Path, kind: str, error: Exception) -> CheckpointError:
    size = path.stat().st_size
    return CheckpointError(
        f"{path} is not a readable {kind} file; truncated or corrupt? ({size:,} bytes): {error}"
    )


def check_tensors(
    source: object,
    tensors: Mapping[str, Described],
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str] = (),
    what: str = "its config",
) -> None:
    """Raises one CheckpointError that lists every missing, unexpected or unfit tensor of `source`.

    Args:
      source: where the tensors come from, for the message.
      tensors: the tensors by name.
      expected: the shape of each tensor that must be there.
      ignored: names that may be there and are not used.
      what: what the shapes are those of, for the message.
    """
    wrong = [f"missing     {name} {expected[name]}" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [
        f"unexpected  {name} {tensors[name].shape}"
        for name in sorted(tensors.keys() - expected.keys())
        if name not in ignored
    ]
    for name in sorted(expected.keys() & tensors.keys()):
        tensor = tensors[name]
        if tensor.shape != expected[name]:
            wrong.append(f"misshapen   {name} {tensor.shape}; expected {expected[name]}")
        elif tensor.dtype not in _FLOAT_DTYPES:
            wrong.append(f"not float   {name} {tensor.dtype}")
    if wrong:
        raise CheckpointError(f"{source} does not fit {what}:\n  " + "\n  ".join(wrong))
