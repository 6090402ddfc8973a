"""Reads PyTorch's own files, .bin and .pt, without running their code or allocating the sizes that they state."""

import mmap
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from weights import checkpoint
from weights.checkpoint import CheckpointError

_ZIP = b"PK\x03\x04"
_PICKLES = 5  # a file that is no ZIP begins with so many


def read(path: Path) -> dict[str, Any]:
    """Reads the state dict of a file of `torch.save`: tensors of PyTorch by name, mapped where the file is a ZIP.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: the file is truncated or corrupt, or holds anything but dense tensors on the CPU.
      ImportError: torch is not installed.
    """
    checkpoint.check_content(path)
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs PyTorch: install torch, or convert the checkpoint to safetensors"
        ) from error
    with path.open("rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP
    try:
        _check_claims(path, zipped)
        # weights_only: a pickle may run any code, this keeps it to tensors and containers.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is corrupt; it was not loaded, as a pickle may run code: {error}"
        ) from error
    except Exception as error:  # torch raises errors of many kinds for a damaged file
        raise checkpoint.unreadable(path, "PyTorch", error) from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise CheckpointError(
            f"{path} holds no state dict: expected tensors by name, as `state_dict()` returns them"
        )
    for name, tensor in content.items():
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        kind = tensor.device.type if tensor.device.type != "cpu" else kind
        if kind != "strided":
            raise CheckpointError(f"{path} holds {name} as a {kind} tensor; expected a dense one, with its values")
        try:
            dtype_of(tensor)
        except TypeError:
            raise CheckpointError(
                f"{path} holds {name} as {tensor.dtype}, which this library cannot read"
            ) from None
    # A tensor may repeat its values, and tensors may share them: a small file can stand for any amount of memory.
    size, total = path.stat().st_size, sum(tensor.numel() * tensor.itemsize for tensor in content.values())
    if total > 2 * size:
        raise CheckpointError(
            f"{path} holds tensors of {total:,} bytes in a file of {size:,}; expected no value more than twice"
        )
    return dict(content)


def dtype_of(tensor: Any) -> np.dtype:
    """The dtype that `to_numpy` gives a tensor of PyTorch; TypeError where NumPy has none for it."""
    name = str(tensor.dtype).removeprefix("torch.")
    return jnp.dtype("float32" if name == "bfloat16" else name)


def to_numpy(tensor: Any) -> np.ndarray:
    """Copies a tensor of PyTorch into a NumPy array; bfloat16 becomes float32, which holds the same values."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return np.array((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())


def _check_claims(path: Path, zipped: bool) -> None:
    """CheckpointError where a number in the pickle, or a record of the ZIP, is larger than the file.

    The number of elements, every size and every offset of a tensor are smaller; torch allocates as much as they
    say.
    """
    size = path.stat().st_size
    for number in _numbers_of_zip(path) if zipped else _numbers_of_pickles(path):
        if number > size:
            raise CheckpointError(
                f"{path} states a size of {number:,} in a file of {size:,} bytes; is it corrupt?"
            )


def _numbers_of_zip(path: Path) -> Iterator[int]:
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{path} is compressed; expected a file as `torch.save` writes it")
            yield record.file_size
        for record in archive.infolist():
            if record.filename.endswith("data.pkl"):
                yield from _numbers(archive.read(record))


def _numbers_of_pickles(path: Path) -> Iterator[int]:
    from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

    if not path.stat().st_size:  # an empty file cannot be mapped; torch raises the error
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for _ in range(_PICKLES):
            if content.tell() < len(content):
                yield from (n for n in _numbers(content) if n not in (MAGIC_NUMBER, PROTOCOL_VERSION))


def _numbers(content: Any) -> Iterator[int]:
    """The integers of a pickle; ValueError where it is cut short, a text or a number in it included."""
    for _, argument, _ in pickletools.genops(content):
        if isinstance(argument, int):
            yield argument
