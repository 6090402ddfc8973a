"""Functions of numbers, applied to arrays in registers, and vectors beside these arrays.

JAX lowers each operation on an array to several operations for each register, and infers the layout of each
result. Here a function of many operations is one instruction for LLVM, PTX for all registers, and layouts
are stated: the machine code is much the same, lowered and compiled in less time. Arrays, (64, N), lie as the
tensor cores leave sums, two numbers of a row to a register.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.mlir import ir

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")

_HALVES = {jnp.dtype(jnp.float16): "f16", jnp.dtype(jnp.bfloat16): "bf16"}  # a register of PTX holds two
_INSTRUCTIONS = {  # without a rounding: a product and a sum that it is part of are rounded once
    "abs": "abs.f32",
    "add": "add.f32",
    "div": "div.full.f32",
    "exp2": "ex2.approx.ftz.f32",
    "max": "max.NaN.f32",
    "min": "min.NaN.f32",
    "mul": "mul.f32",
    "neg": "neg.f32",
    "rsqrt": "rsqrt.approx.f32",
    "sub": "sub.f32",
    "tanh": "tanh.approx.f32",
}


def _interpreted(
    function: Callable[..., Any],
    *arrays: jax.Array,
    rows: Sequence[jax.Array] = (),
    columns: Sequence[jax.Array] = (),
) -> jax.Array | Any:
    shape = arrays[0].shape
    along_rows, along_columns = (
        [jax.lax.broadcast_in_dim(x, shape, [axis]) for x in vectors]
        for axis, vectors in enumerate((rows, columns))
    )
    return function(*arrays, *along_rows, *along_columns)


@meaning(_interpreted)
def elementwise(
    function: Callable[..., Any],
    *arrays: jax.Array,
    rows: Sequence[jax.Array] = (),
    columns: Sequence[jax.Array] = (),
) -> jax.Array | Any:
    """The results of `function` of the numbers in each place.

    Args:
      function: of a number of each operand, in their order. It computes in float32, rounds a product and the sum
        that it is part of once, and gives a number of float32, float16 or bfloat16, or a tuple of some.
      arrays: (64, N), float32, float16 or bfloat16.
      rows: (64,), a number for each row; float32 or int32.
      columns: (N,), a number for each column; float32 or int32.
    """
    operands, axes = (*arrays, *rows, *columns), (None,) * len(arrays) + (0,) * len(rows) + (1,) * len(columns)
    numbers = (jax.ShapeDtypeStruct((), x.dtype) for x in operands)
    traced, result = jax.make_jaxpr(function, return_shape=True)(*numbers)
    wgmma = plgpu.Layout.WGMMA
    kinds = tuple(wgmma if i is None else wgmma.reduce(1 - i) for i in axes)
    types = jax.tree.map(lambda x: plgpu.ShapeDtypeStruct(arrays[0].shape, x.dtype, layout=wgmma), result)
    apply = functools.partial(_apply, traced, jax.tree.structure(result), axes)
    return plgpu.inline_mgpu(arg_types=kinds, return_type=types)(apply)(*operands)


def _apply(traced: ClosedJaxpr, result: Any, axes: Sequence[int | None], _: Any, *operands: Any) -> Any:
    shape, wgmma = operands[0].shape, plgpu.Layout.WGMMA.to_mgpu()
    pairs = zip(operands, axes, strict=True)
    spread = (x if i is None else x.broadcast_in_dim(shape, (i,), wgmma) for x, i in pairs)
    registers = _Code(traced.jaxpr).call([list(x.registers.flat) for x in spread])
    places = jax.tree.structure(operands[0])
    return jax.tree.unflatten(result, [jax.tree.unflatten(places, x) for x in registers])


@meaning(lambda ref, axis: ref[...])
def load_vector(ref: Ref, axis: int) -> jax.Array:
    """(n,) in shared memory, float32 or int32, as a number for each row (axis 0) or column (axis 1)."""
    result = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=plgpu.Layout.WGMMA.reduce(1 - axis))
    load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    vector: jax.Array = load(functools.partial(_load_vector, axis))(ref)
    return vector


def _load_vector(axis: int, _: Any, ref: Any) -> Any:
    """A thread has the rows `lane / 4` of the first and of the last eight of its warp, and columns in pairs."""
    kind, layout = ir.MemRefType(ref.type), plgpu.Layout.WGMMA.reduce(1 - axis).to_mgpu()
    shape = layout.registers_shape(tuple(kind.shape))
    count, bits = int(np.prod(shape)), 64 if axis else 32
    base, lane, warp = (f"${count + i}" for i in range(3))
    row = f"shr.u32 t, {lane}, 2; mad.lo.u32 t, {warp}, 16, t; mad.lo.u32 t, t, 4, {base};"
    pair = f"and.b32 t, {lane}, 3; mad.lo.u32 t, t, 8, {base};"
    loads = "".join(f"ld.shared.b{bits} ${i}, [t + {32 * i}];" for i in range(count))
    words = _instruction(
        f"{{.reg .b32 t; {pair if axis else row} {loads}}}",
        [bits] * count,
        [inline.utils.memref_ptr(ref), *inline.lane_and_warp()],
        [32] * 3,
        is_pure=False,
    )
    register = layout.registers_element_type(kind.element_type)
    registers = np.array([inline.utils.llvm.bitcast(register, word) for word in words], dtype=object)
    is_signed = True if isinstance(kind.element_type, ir.IntegerType) else None
    return _arrays.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=is_signed)


def _instruction(
    text: str, results: Sequence[int], operands: Sequence[Any], sizes: Sequence[int], *, is_pure: bool
) -> list[Any]:
    """The results of PTX for operands, all of them words of so many bits."""
    llvm, letters = inline.utils.llvm, {32: "r", 64: "l"}
    words = [ir.IntegerType.get_signless(bits) for bits in results]
    kind = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, words))})>")
    # No result may lie where an operand does that is read later.
    constraints = [f"=&{letters[bits]}" for bits in results] + [letters[bits] for bits in sizes]
    found = llvm.inline_asm(kind, list(operands), text, ",".join(constraints), has_side_effects=not is_pure)
    return [llvm.extractvalue(word, found, ir.DenseI64ArrayAttr.get([i])) for i, word in enumerate(words)]


_Numbers = tuple[str, ...]  # two, each in a register of PTX, or two halves in one


class _Code:
    """PTX that computes a function of numbers for the two that a register has of each operand."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._lines: list[str] = []
        self._counts = {"t": 0, "p": 0}  # words, predicates
        self._results, self._operands = ([_dtype(v) for v in vs] for vs in (jaxpr.outvars, jaxpr.invars))
        count = len(self._results)
        operands = [self._unpacked(f"{{{count + i}}}", dtype) for i, dtype in enumerate(self._operands)]
        for i, value in enumerate(self._run(jaxpr, operands)):
            whole = value[0] if len(value) == 1 else _braced(*value)
            self._lines.append(f"mov.b{32 * len(value)} {{{i}}}, {whole};")
        types = {"t": ".b32", "p": ".pred"}
        registers = "".join(f".reg {types[x]} {x}<{n + 1}>; " for x, n in self._counts.items())
        self._template = f"{{{{{registers}.reg .b16 h<2>; {' '.join(self._lines)}}}}}"

    def call(self, operands: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The registers of each result."""
        size, llvm = len(operands[0]), inline.utils.llvm
        sizes = [_bits(dtype) for dtype in self._results for _ in range(size)]
        names: dict[Any, int] = {}  # of operands, each once: a number for a row is in many places
        places = [[names.setdefault(x, len(sizes) + len(names)) for x in xs] for xs in operands]
        bits = {x: _bits(dtype) for xs, dtype in zip(operands, self._operands, strict=True) for x in xs}
        indices = [(*range(i, len(sizes), size), *(place[i] for place in places)) for i in range(size)]
        text = "".join(self._template.format(*(f"${j}" for j in index)) for index in indices)
        words = [llvm.bitcast(ir.IntegerType.get_signless(bits[x]), x) for x in names]
        found = _instruction(text, sizes, words, [bits[x] for x in names], is_pure=True)
        kinds = [ir.VectorType.get((2,), inline.utils.dtype_to_ir_type(dtype)) for dtype in self._results]
        return [
            [llvm.bitcast(kind, word) for word in found[i * size : (i + 1) * size]] for i, kind in enumerate(kinds)
        ]

    def _new(self, count: int = 2, letter: str = "t") -> _Numbers:
        first = self._counts[letter]
        self._counts[letter] += count
        return tuple(f"{letter}{first + i}" for i in range(count))

    def _unpacked(self, name: str, dtype: Any) -> _Numbers:
        if dtype in _HALVES:
            return (name,)
        numbers = self._new()
        self._lines.append(f"mov.b64 {_braced(*numbers)}, {name};")
        return numbers

    def _each(self, instruction: str, *operands: _Numbers, letter: str = "t") -> _Numbers:
        results = self._new(letter=letter)
        self._lines += [f"{instruction} {', '.join(names)};" for names in zip(results, *operands, strict=True)]
        return results

    def _run(self, jaxpr: Jaxpr, operands: Sequence[_Numbers]) -> list[_Numbers]:
        values: dict[Var, _Numbers] = dict(zip(jaxpr.invars, operands, strict=True))

        def read(v: Var | Literal) -> _Numbers:
            return (_immediate(v),) * 2 if isinstance(v, Literal) else values[v]

        for equation in jaxpr.eqns:
            (result,) = equation.outvars
            values[result] = self._value(equation, [read(v) for v in equation.invars])
        return [read(v) for v in jaxpr.outvars]

    def _value(self, equation: JaxprEqn, operands: list[_Numbers]) -> _Numbers:
        first, name = operands[0], equation.primitive.name
        source, target = _dtype(equation.invars[0]), _dtype(equation.outvars[0])
        match name:
            case "jit" | "pjit":
                return self._run(equation.params["jaxpr"].jaxpr, operands)[0]
            case "broadcast_in_dim":  # to no axes
                return first
            case "convert_element_type":
                return self._converted(first, source, target)
            case "eq":
                return self._each(f"setp.eq.{'f' if source == jnp.float32 else 's'}32", *operands, letter="p")
            case "select_n":
                condition, no, yes = operands
                return self._each("selp.b32", yes, no, condition)
            case "square":
                return self._each(_INSTRUCTIONS["mul"], first, first)
        if name not in _INSTRUCTIONS or source in _HALVES:
            raise NotImplementedError(f"{equation}; expected one of {', '.join(_INSTRUCTIONS)} in float32")
        return self._each(_INSTRUCTIONS[name], *operands)

    def _converted(self, value: _Numbers, source: Any, target: Any) -> _Numbers:
        if source == target or not {source, target} & _HALVES.keys():  # with x64 numbers of Python are float64
            return value
        if target in _HALVES:
            (result,) = self._new(1)
            self._lines.append(f"cvt.rn.{_HALVES[target]}x2.f32 {result}, {value[1]}, {value[0]};")
            return (result,)
        if source == jnp.bfloat16:  # the upper half of a float32
            numbers = self._new()
            self._lines.append(f"shl.b32 {numbers[0]}, {value[0]}, 16; and.b32 {numbers[1]}, {value[0]}, -65536;")
            return numbers
        self._lines.append(f"mov.b32 {_braced('h0', 'h1')}, {value[0]};")
        return self._each(f"cvt.f32.{_HALVES[source]}", ("h0", "h1"))


def _dtype(v: Any) -> Any:
    return v.aval.dtype


def _bits(dtype: Any) -> int:
    """Of two numbers."""
    return 32 if dtype in _HALVES else 64


def _braced(*names: str) -> str:
    """Parts of a word, in a template."""
    return f"{{{{{', '.join(names)}}}}}"


def _immediate(number: Literal) -> str:
    if jnp.issubdtype(_dtype(number), jnp.integer):
        return str(int(number.val))
    return "0f" + struct.pack(">f", float(number.val)).hex()
