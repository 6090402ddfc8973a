"""Triangle multiplicative updates of PyTorch models to parameters of `pallas_models.trimul`."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models.ops.trimul import Direction
from weights import checkpoint, lazy
from weights.checkpoint import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """The names that a line of models gives to the modules of the update, and the order of its projections.

    The rows of `projections`, one after another, are four groups of H. `outgoing` and `incoming` are the places of
    left, its gate, right and its gate among them.
    """

    name: str
    norm: str
    projections: tuple[str, ...]
    gate: str
    out_norm: str
    out: str
    gate_after: bool = True
    outgoing: tuple[int, ...] = (0, 1, 2, 3)
    incoming: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.norm, *self.projections, self.gate, self.out_norm, self.out)


_FAMILIES = (
    _Family(
        name="lucidrains and GPU MODE",
        norm="norm",
        projections=("left_proj", "left_gate", "right_proj", "right_gate"),
        gate="out_gate",
        out_norm="to_out_norm",
        out="to_out",
        gate_after=False,
        incoming=(2, 3, 0, 1),  # '... k j d, ... k i d -> ... i j d': the first operand is the others' right
    ),
    _Family(
        name="OpenFold and Protenix",
        norm="layer_norm_in",
        projections=("linear_a_p", "linear_a_g", "linear_b_p", "linear_b_g"),
        gate="linear_g",
        out_norm="layer_norm_out",
        out="linear_z",
    ),
    _Family(
        name="Boltz",
        norm="norm_in",
        projections=("p_in", "g_in"),  # each left and right
        gate="g_out",
        out_norm="norm_out",
        out="p_out",
        outgoing=(0, 2, 1, 3),
        incoming=(0, 2, 1, 3),
    ),
)


def load_trimul(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    direction: Direction,
    prefix: str = "",
    dtype: DTypeLike = jnp.float32,
) -> dict[str, Any]:
    """Loads the weights of one triangle multiplicative update as parameters.

    The names tell which line of models they come from: lucidrains and GPU MODE (`left_proj`), OpenFold and
    Protenix (`linear_a_p`), or Boltz (`p_in`). Biases of the linear layers may be there or not.

    Args:
      source: a .safetensors, .bin or .pt file, a folder with one of them, or a state dict, tensors by name.
      direction: `"outgoing"` or `"incoming"`, of the module: lucidrains' incoming module has left and right the
        other way round.
      prefix: the beginning of the module's names in a larger model, e.g.
        `"pairformer_module.layers.0.tri_mul_out."`. Tensors without it are not looked at.
      dtype: float16, bfloat16 or float32, of the matrices; `trimul` computes in float16 unless told otherwise,
        and converts matrices of another dtype at each call. Biases and norm scales are float32.

    Returns:
      Nested dict of arrays on the default device, as `trimul.init` returns it and `trimul.trimul` takes it.

    Raises:
      FileNotFoundError: the file was not found.
      CheckpointError: a file is truncated or corrupt, the names are of none of these, tensors are missing,
        unexpected or misshapen (all are listed), or a number is beyond what `dtype` can hold.
      ImportError: the checkpoint is a .bin or .pt file and torch is not installed.
      TypeError: `dtype` is none of the above.
      ValueError: `direction` is unknown.
    """
    target = checkpoint.float_dtype(dtype)
    if isinstance(source, Mapping):
        return jax.device_put(convert(source, direction=direction, prefix=prefix, dtype=target))
    with lazy.open_tensors(Path(source)) as tensors:
        return jax.device_put(_convert(tensors, direction, prefix, target, os.fspath(source)))


def convert(
    tensors: Mapping[str, Any],
    *,
    direction: Direction,
    prefix: str = "",
    dtype: DTypeLike = jnp.float32,
    source: object = "the state dict",
) -> dict[str, Any]:
    """Converts the tensors of one triangle multiplicative update; see `load_trimul`.

    Returns:
      Nested dict of NumPy arrays: kernels (in, out), the four projections in one, (C, 4H).
    """
    return _convert(lazy.in_memory(tensors), direction, prefix, dtype, source)


def _convert(
    stored: Mapping[str, lazy.LazyTensor], direction: Direction, prefix: str, dtype: DTypeLike, source: object
) -> dict[str, Any]:
    if direction not in get_args(Direction):
        raise ValueError(f"{direction=} is unknown; expected one of {get_args(Direction)}")
    family = _detect(stored, prefix, source)
    lazily = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    c = _size(lazily, source, (f"{family.norm}.weight", 0), (f"{family.out}.weight", 0))
    h = _size(lazily, source, (f"{family.out_norm}.weight", 0), (f"{family.out}.weight", 1))
    rows = dict.fromkeys(family.projections, 4 * h // len(family.projections))
    rows |= {family.gate: c if family.gate_after else h, family.out: c}
    expected: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (size, h if name == family.out else c) for name, size in rows.items()
    }
    expected |= {f"{family.norm}.{leaf}": (c,) for leaf in ("weight", "bias")}
    expected |= {f"{family.out_norm}.{leaf}": (h,) for leaf in ("weight", "bias")}
    biases = {f"{name}.bias": (size,) for name, size in rows.items() if f"{name}.bias" in lazily}
    what = f"a triangle multiplicative update of {family.name} with C={c} and H={h}"
    checkpoint.check_tensors(source, lazily, expected | biases, what=what)
    tensors = {name: tensor.read() for name, tensor in lazily.items()}
    checkpoint.check_range(source, tensors, dtype)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            "scale": tensors[f"{name}.weight"].astype(np.float32),
            "bias": tensors[f"{name}.bias"].astype(np.float32),
        }

    def linear(names: tuple[str, ...], order: Any = slice(None)) -> dict[str, np.ndarray]:
        weight = np.concatenate([tensors[f"{name}.weight"] for name in names])[order]
        params = {"kernel": weight.T.astype(jnp.dtype(dtype))}
        if biases:  # of some of them, perhaps; the parameters have all or none
            found = [tensors.get(f"{name}.bias", np.zeros(rows[name])) for name in names]
            params["bias"] = np.concatenate(found)[order].astype(np.float32)
        return params

    order = np.arange(4 * h).reshape(4, h)[list(getattr(family, direction))].ravel()
    return {
        "norm": norm(family.norm),
        "projections": linear(family.projections, order),
        "gate_after" if family.gate_after else "gate_before": linear((family.gate,)),
        "out_norm": norm(family.out_norm),
        "out": linear((family.out,)),
    }


def _detect(tensors: Collection[str], prefix: str, source: object) -> _Family:
    """The family that most of the names under `prefix` belong to."""
    present = {family: sum(f"{prefix}{name}.weight" in tensors for name in family.modules) for family in _FAMILIES}
    family = max(_FAMILIES, key=lambda family: present[family])
    if present[family] > len(family.modules) // 2:
        return family
    known = "\n  ".join(f"{family.name}: {', '.join(family.modules)}" for family in _FAMILIES)
    message = f"{source} holds no triangle multiplicative update under {prefix=}; expected the names of\n  {known}"
    outs = tuple(f".{family.out_norm}.weight" for family in _FAMILIES)
    places = sorted({name[: -len(out) + 1] for name in tensors for out in outs if name.endswith(out)})
    if places:
        message += (
            f"\nThere may be one under prefix={' or '.join(map(repr, places[:4]))}{', ...' if places[4:] else ''}"
        )
    else:
        message += f"\nIt holds {', '.join(sorted(tensors)[:8]) or 'nothing'}{', ...' if len(tensors) > 8 else ''}"
    raise CheckpointError(message)


def _size(tensors: Mapping[str, checkpoint.Described], source: object, *places: tuple[str, int]) -> int:
    """The length of an axis of a tensor: of these places, the first that is there counts."""
    for name, axis in places:
        if name in tensors and len(tensors[name].shape) > axis:
            return tensors[name].shape[axis]
    raise CheckpointError(f"{source} has none of {', '.join(name for name, _ in places)}, which tell its sizes")
