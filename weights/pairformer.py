"""Pair stacks of other models, by the names of their tensors, to parameters of `pallas_models.pairformer`."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from weights import checkpoint, lazy, tree
from weights.checkpoint import CheckpointError
from weights.families import Shape
from weights.pairformer_layouts import (
    Attention,
    Averaging,
    Layout,
    Linear,
    Module,
    Norm,
    OuterProduct,
    ReLU,
    SwiGLU,
    TriMul,
)
from weights.pairformer_names import LAYOUTS

Tensors = Mapping[str, lazy.LazyTensor]


@dataclasses.dataclass(frozen=True)
class _Made:
    """How one parameter is made: names and shapes of tensors, as they are in a block, and what joins them."""

    tensors: Mapping[str, Shape]
    join: Callable[..., np.ndarray]


def load_pairformer(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    prefix: str | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loads the blocks of a Pairformer, an Evoformer or an MSA module as parameters.

    The names of the tensors tell the line of models: Boltz 1 and 2, Protenix, OpenFold, OpenFold 3 or AlphaFold 3.

    ```
    params, options = weights.load_pairformer("boltz2.safetensors")  # the Pairformer of the trunk
    pair, single = pairformer.stack(params, pair, single, pair_mask=pair_mask, single_mask=mask, **options)
    ```

    Args:
      source: a .safetensors, .bin or .pt file, a folder with one of them, or tensors by name: a state dict, or
        AlphaFold 3's parameters as Haiku has them, dicts of arrays by the names of modules.
      prefix: the beginning of the names of the stack in a larger model, up to `layers.0.` or `blocks.0.`, such as
        `"msa_module."`. A tensor of AlphaFold 3 holds all blocks, and the prefix names them all, such as
        `"diffuser/evoformer/__layer_stack_no_per_layer/msa_stack/"`. None finds the only stack or, of several, the
        Pairformer or Evoformer of the trunk. Tensors without the prefix are not looked at, nor are tensors of no
        block.
      dtype: float16, bfloat16 or float32, of kernels. Biases and norms are float32.

    Returns:
      The parameters, a nested dict of arrays on the default device as `pairformer.init` returns it. And what
      `pairformer.stack`, `pairformer.evoformer_stack` and functions of blocks take with them: arguments by name,
      such as `{"ending_bias": "in_place"}`. The last block of an MSA module may lack what updates the alignment.
      OpenFold's names do not tell `outer_product_first`, which is True for AlphaFold-Multimer's weights.

    Raises:
      FileNotFoundError: the file was not found.
      CheckpointError: a file is truncated or corrupt, there is no such stack, or several and none of them is of a
        trunk, tensors are missing, unexpected or misshapen (all are listed), or a number is beyond what `dtype`
        can hold.
      ImportError: the checkpoint is a .bin or .pt file and torch is not installed.
      TypeError: `dtype` is none of the above.
    """
    target = checkpoint.float_dtype(dtype)
    if isinstance(source, Mapping):
        return _convert(lazy.in_memory(_flat(source)), prefix, target, "the state dict")
    with lazy.open_tensors(Path(source)) as tensors:
        return _convert(tensors, prefix, target, os.fspath(source))


def _flat(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by name; Haiku's have the name of a module and their own."""
    flat: dict[str, Any] = {}
    for name, value in tensors.items():
        flat |= {f"{name}/{leaf}": x for leaf, x in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _convert(
    stored: Tensors, prefix: str | None, dtype: np.dtype, source: object
) -> tuple[dict[str, Any], dict[str, Any]]:
    stack = _find(stored, prefix, source)
    modules = {name: module for part in (stack.layout.pair, *stack.layout.parts) for name, module in part.items()}
    needed = {name for block in range(stack.count) for name in stack.modules_of(block)}
    made = {name: dict(_parts(modules[name], modules, stack)) for name in needed}
    expected: dict[str, Shape] = {}
    parameters: dict[str, tuple[int, _Made]] = {}
    for block in range(stack.count):
        for name in stack.modules_of(block):
            for leaf, one in made[name].items():
                parameters[f"layers.{block}.{name}.{leaf}"] = block, one
                expected |= {stack.full(block, n): stack.whole(shape) for n, shape in one.tensors.items()}
    what = f"{stack.layout.name} of {stack.count} blocks under prefix={stack.prefix!r}"
    checkpoint.check_tensors(source, stack.tensors, expected, what=what)

    def parameter(name: str, block: int, one: _Made) -> jax.Array:
        read = {stack.full(block, n): stack.read(block, n) for n in one.tensors}
        checkpoint.check_range(source, read, dtype)
        joined = one.join(*read.values()).astype(dtype if name.endswith("kernel") else np.float32)
        return jax.block_until_ready(jax.device_put(joined, may_alias=False))

    made_of = {name: parameter(name, block, one) for name, (block, one) in parameters.items()}
    return tree.unflatten(made_of), dict(stack.layout.options)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """The tensors of the blocks of a stack.

    Attributes:
      layout: their names and axes.
      prefix: the beginning of all names.
      tensors: by their full names.
      count: the number of blocks.
      source: where they come from, for messages.
    """

    layout: Layout
    prefix: str
    tensors: Tensors
    count: int
    source: object

    def full(self, block: int, name: str) -> str:
        """The name in the checkpoint of a tensor of a block."""
        return self.prefix + (name if self.layout.blocks is None else f"{self.layout.blocks}{block}.{name}")

    def whole(self, shape: Shape) -> Shape:
        """The shape in the checkpoint of a tensor that has this shape in a block."""
        return (self.count, *shape) if self.layout.blocks is None else shape

    def read(self, block: int, name: str) -> np.ndarray:
        tensor = self.tensors[self.full(block, name)].read()
        return tensor[block] if self.layout.blocks is None else tensor

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor in the first block that has it."""
        found = (self.tensors.get(self.full(block, name)) for block in range(self.count))
        shapes = (tensor.shape for tensor in found if tensor is not None)
        first = next(shapes, None)
        return first if first is None or self.layout.blocks else first[1:]

    def has(self, *modules: Module, block: int | None = None) -> bool:
        """Whether a block, or any, has a tensor of the modules."""
        blocks = range(self.count) if block is None else (block,)
        names = [name for module in modules for name in _names(module)]
        return any(self.full(i, name) in self.tensors for i in blocks for name in names)

    def modules_of(self, block: int) -> Iterator[str]:
        """Our names of the modules that the block has to have."""
        yield from self.layout.pair
        for part in self.layout.parts:
            if self.has(*part.values(), block=block if block == self.count - 1 else None):
                yield from part

    def size(self, *places: Norm | tuple[Linear, int]) -> int:
        """The size of a norm, or the inputs (0) or outputs (1) of a layer: the first that is there counts."""
        for place in places:
            layer, axis = place if isinstance(place, tuple) else (place, 0)
            shape = self.shape(layer.weight if isinstance(layer, Linear) else layer.scale)
            if shape is not None and len(shape) == (len(layer.form) if isinstance(layer, Linear) else 1):
                return layer.sizes(shape)[axis] if isinstance(layer, Linear) else shape[0]
        layers = [place[0].weight if isinstance(place, tuple) else place.scale for place in places]
        names = ", ".join(self.full(0, name) for name in layers)
        raise CheckpointError(f"{self.source} has none of {names}, which tell its sizes, or not with their axes")


def _names(module: Module) -> Iterator[str]:
    """The names of the norms and weights of a module."""
    layers = (
        [module] if isinstance(module, Norm) else [getattr(module, f.name) for f in dataclasses.fields(module)]
    )
    for layer in layers:
        for one in layer if isinstance(layer, tuple) else (layer,):
            if isinstance(one, Norm):
                yield one.scale
            elif isinstance(one, Linear):
                yield one.weight


# Which stack, and of which line


def _find(stored: Tensors, prefix: str | None, source: object) -> _Stack:
    """The stack under a prefix, or the only one, or the one of the trunk."""
    places = _places(stored)
    if prefix is None:
        found = {place: _under(stored, place, source) for place in places}
        stacks = {place: stack for place, stack in found.items() if stack is not None}
        trunks = [p for p, s in stacks.items() if s.layout.trunk is not None and p.endswith(s.layout.trunk)]
        if len(stacks) == 1:
            return next(iter(stacks.values()))
        if trunks:  # a confidence module may have another, under a longer name
            return stacks[min(trunks, key=len)]
        message = f"{source} holds {'several stacks' if stacks else 'no stack'} of blocks of pairs"
    else:
        stack = _under(stored, prefix, source)
        if stack is not None:
            return stack
        message = f"{source} holds no stack of blocks of pairs under {prefix=}"
    if places:
        shown = ", ".join(map(repr, places[:6])) + (", ..." if len(places) > 6 else "")
        raise CheckpointError(f"{message}; expected prefix to be one of {shown}")
    lines = "\n  ".join(
        f"{x.name}: {(x.blocks or '') + ('0.' if x.blocks else '')}{_signature(x)}" for x in LAYOUTS
    )
    raise CheckpointError(
        f"{message}; expected names such as\n  {lines}\n"
        f"It holds {', '.join(sorted(stored)[:8]) or 'nothing'}{', ...' if len(stored) > 8 else ''}"
    )


def _signature(layout: Layout) -> str:
    start = layout.pair["tri_att_start"]
    assert isinstance(start, Attention)
    return start.norm.scale


def _places(stored: Tensors) -> list[str]:
    """The prefixes of all stacks."""
    places = set()
    for layout in LAYOUTS:
        block = "" if layout.blocks is None else rf"{re.escape(layout.blocks)}\d{{1,6}}\."
        pattern = re.compile(rf"((?:.*[./])?){block}{re.escape(_signature(layout))}")
        places |= {match[1] for match in map(pattern.fullmatch, stored) if match}
    return sorted(places)


def _under(stored: Tensors, prefix: str, source: object) -> _Stack | None:
    """The stack of the layout that most of its names are in; None where there is none."""
    candidates = [stack for layout in LAYOUTS if (stack := _as(layout, stored, prefix, source)) is not None]

    def known(stack: _Stack) -> int:
        layout = stack.layout
        modules = [*layout.pair.values(), *(module for part in layout.parts for module in part.values())]
        return sum(stack.full(0, name) in stack.tensors for module in modules for name in _names(module))

    best = max(candidates, key=known, default=None)
    needed = 0 if best is None else sum(1 for module in best.layout.pair.values() for _ in _names(module))
    return best if best is not None and known(best) > needed // 2 else None


def _as(layout: Layout, stored: Tensors, prefix: str, source: object) -> _Stack | None:
    """The tensors under the prefix by a layout's names; None where they do not have them."""
    if layout.blocks is None:
        tensors = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
        shape = tensors[prefix + _signature(layout)].shape if prefix + _signature(layout) in tensors else ()
        if len(shape) != 2:
            return None
        kept = {n: dataclasses.replace(tensor, read=functools.cache(tensor.read)) for n, tensor in tensors.items()}
        return _Stack(layout, prefix, kept, shape[0], source)
    pattern = re.compile(rf"{re.escape(prefix + layout.blocks)}(\d{{1,6}})\..*")
    matches = {name: match for name in stored if (match := pattern.fullmatch(name))}
    numbers = sorted({int(match[1]) for match in matches.values()})
    if not numbers:
        return None
    if numbers != list(range(len(numbers))):
        shown = ", ".join(map(str, numbers[:12]))
        raise CheckpointError(
            f"{source} has the blocks {shown} under prefix={prefix!r}; expected 0 to {len(numbers) - 1}"
        )
    return _Stack(layout, prefix, {name: stored[name] for name in matches}, len(numbers), source)


# How parameters are made


def _parts(module: Module, modules: Mapping[str, Module], stack: _Stack) -> Iterator[tuple[str, _Made]]:
    """The parameters of a module of a block, by their dotted names."""
    size, bias = stack.size, functools.partial(_bias, stack)
    if isinstance(module, Norm):
        yield from _norm("", module, size(module))
        return
    c = size(module.norm)
    yield from _norm("norm.", module.norm, c)
    if isinstance(module, TriMul):
        h = size(module.out_norm, (module.out, 0))
        projections = module.projections
        outputs = [4 * h // len(projections)] * len(projections)
        columns = _sides(module, h)
        layers = (*projections, module.gate, module.out)
        biased = any(stack.shape(layer.bias) is not None for layer in layers)
        yield "projections.kernel", _kernel(projections, c, outputs, (c, 4 * h), columns=columns)
        yield "gate_after.kernel", _kernel([module.gate], c, [c], (c, c))
        yield from _norm("out_norm.", module.out_norm, h)
        yield "out.kernel", _kernel([module.out], h, [c], (h, c))
        if biased:
            yield "projections.bias", _vectors([p.bias for p in projections], outputs, (4 * h,), columns=columns)
            yield "gate_after.bias", _vectors([module.gate.bias], [c], (c,))
            yield "out.bias", _vectors([module.out.bias], [c], (c,))
    elif isinstance(module, SwiGLU):
        f = size((module.down, 0))
        outputs = [2 * f // len(module.gate_up)] * len(module.gate_up)
        yield "gate_up.kernel", _kernel(module.gate_up, c, outputs, (c, 2, f))
        yield "down.kernel", _kernel([module.down], f, [c], (f, c))
    elif isinstance(module, ReLU):
        f = size((module.up, 1), (module.down, 0))
        yield "up.kernel", _kernel([module.up], c, [f], (c, f))
        yield "up.bias", _vectors([module.up.bias], [f], (f,))
        yield "down.kernel", _kernel([module.down], f, [c], (f, c))
        yield "down.bias", _vectors([module.down.bias], [c], (c,))
    elif isinstance(module, OuterProduct):
        h, c_out = size((module.left, 1), (module.right, 1)), size((module.out, 1))
        yield "projections.kernel", _kernel([module.left, module.right], c, [h, h], (c, 2, h))
        yield from bias("projections.bias", [module.left, module.right], [h, h], (2, h))
        yield "out.kernel", _kernel([module.out], h * h, [c_out], (h * h, c_out))
        yield "out.bias", _vectors([module.out.bias], [c_out], (c_out,))
    else:
        yield from _attention(module, modules, c, stack)


def _attention(
    module: Attention | Averaging, modules: Mapping[str, Module], c: int, stack: _Stack
) -> Iterator[tuple[str, _Made]]:
    """The parameters of an attention, or of an averaging, but for its norm."""
    wide = stack.size((module.out, 0), (module.v, 1))
    if module.pair_bias is not None:
        h, c_pair = stack.size((module.pair_bias, 1)), stack.size((module.pair_bias, 0))
        yield "pair_bias.kernel", _kernel([module.pair_bias], c_pair, [h], (c_pair, h))
        if module.pair_norm is not None:
            yield from _norm("pair_norm.", module.pair_norm, c_pair)
    else:  # columns are attended with as many heads as rows, which have a bias that tells them
        row = modules["row_attention"]
        assert isinstance(row, Attention) and row.pair_bias is not None
        h = stack.size((row.pair_bias, 1))
    heads = (h, wide // max(h, 1))
    layers = [module.v, module.gate]
    if isinstance(module, Attention):
        layers = [module.q, module.k, *layers]
    outputs = [wide] * len(layers)
    yield "projections.kernel", _kernel(layers, c, outputs, (c, len(layers), *heads), heads=h)
    if isinstance(module, Attention):
        yield from _bias(stack, "projections.query_bias", [module.q], [wide], heads)
        yield from _bias(stack, "projections.gate_bias", [module.gate], [wide], heads)
    yield "out.kernel", _kernel([module.out], wide, [c], (wide, c), heads=h)
    yield from _bias(stack, "out.bias", [module.out], [c], (c,))


def _norm(at: str, norm: Norm, c: int) -> Iterator[tuple[str, _Made]]:
    yield f"{at}scale", _Made({norm.scale: (c,)}, np.asarray)
    yield f"{at}bias", _Made({norm.bias: (c,)}, np.asarray)


def _kernel(
    layers: Any,
    inputs: int,
    outputs: list[int],
    shape: Shape,
    *,
    columns: np.ndarray | None = None,
    heads: int = 1,
) -> _Made:
    """The weights of layers as (inputs, outputs) side by side, their columns in another order, in a shape."""
    tensors = {x.weight: x.shape(inputs, n, heads) for x, n in zip(layers, outputs, strict=True)}

    def join(*weights: np.ndarray) -> np.ndarray:
        flat = [
            w.reshape(-1, inputs).T if layer.form in ("oi", "hdi") else w.reshape(inputs, -1)
            for layer, w in zip(layers, weights, strict=True)
        ]
        return _ordered(np.concatenate(flat, axis=1), columns).reshape(shape)

    return _Made(tensors, join)


def _bias(
    stack: _Stack, name: str, layers: list[Linear], outputs: list[int], shape: Shape
) -> Iterator[tuple[str, _Made]]:
    """The biases of layers, if one of them has any."""
    if any(stack.shape(layer.bias) is not None for layer in layers):
        by_heads = shape if layers[0].form in ("ihd", "hdi") else None
        yield name, _vectors([layer.bias for layer in layers], outputs, shape, given=by_heads)


def _vectors(
    names: list[str],
    sizes: list[int],
    shape: Shape,
    *,
    columns: np.ndarray | None = None,
    given: Shape | None = None,
) -> _Made:
    """Vectors one after another, in another order, in a shape; they have the shape `given` where it is there."""
    tensors = {name: given or (size,) for name, size in zip(names, sizes, strict=True)}
    return _Made(tensors, lambda *xs: _ordered(np.concatenate([x.ravel() for x in xs]), columns).reshape(shape))


def _ordered(x: np.ndarray, columns: np.ndarray | None) -> np.ndarray:
    return x if columns is None else x[..., columns]


def _sides(module: TriMul, h: int) -> np.ndarray | None:
    """Where left, its gate, right and its gate are among the outputs of the projections."""
    if len(module.projections) == 4:
        return None
    both = (
        np.arange(4 * h).reshape(2, h, 2).swapaxes(1, 2)
        if module.interleaved
        else np.arange(4 * h).reshape(2, 2, h)
    )
    sides = both.swapaxes(0, 1)  # (left and right, projection and gate, H)
    return (sides[::-1] if module.swapped else sides).ravel()
