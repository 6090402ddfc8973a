"""Shared by all readers of checkpoints: the error, JSON, and the checks of tensors against a config."""

import json
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_FLOAT_DTYPES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


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


def shown(value: object) -> str:
    """The value for a message: in one line, and short however large or deep it is."""
    return _SHORT.repr(value)


def read_json(path: Path, kind: type = dict) -> Any:
    """Reads a JSON object, or an array if `kind` is list; FileNotFoundError or CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: a checkpoint folder holds a {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "an array"
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected {expected}")
    return value


def check_content(path: Path) -> None:
    """FileNotFoundError where there is no such file, CheckpointError where a pointer stands in its place."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    with path.open("rb") as file:
        if file.read(42).startswith(b"version https://git-lfs.github.com/spec"):
            raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there")


def unreadable(path: Path, kind: str, error: Exception) -> CheckpointError:
    """The error about a file that its format's library cannot read."""
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
      what: the source of the shapes, for the message.
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


def check_range(source: object, tensors: Mapping[str, np.ndarray], dtype: DTypeLike) -> None:
    """Raises a CheckpointError where a number of `tensors` would become infinite in `dtype`.

    Vectors are kept in float32 (`tree.astype`), and are exempt unless they are wider.
    """
    for name, tensor in tensors.items():
        target = jnp.dtype(np.float32 if tensor.ndim == 1 else dtype)
        most = jnp.finfo(target).max
        if not tensor.size or jnp.finfo(tensor.dtype).max <= most:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            if max(tensor.max(), -tensor.min()) <= most:  # quick, and False where something is no number
                continue
            lost = tensor[np.isfinite(tensor) & np.isinf(tensor.astype(target))]
        if lost.size:
            raise CheckpointError(
                f"{source} holds {name} with values up to {float(np.abs(lost).max()):g}; "
                f"expected at most {float(most):g}, what {target} can hold"
            )
