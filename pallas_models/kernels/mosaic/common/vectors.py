"""Neighbours in device memory, which a thread loads or stores up to 16 bytes at a time."""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic.common import ptx as inline

_MOST_WORDS = 4  # of 32 bits, which a thread moves at once


def vector_length(width: int, dtype: DTypeLike) -> int:
    """Neighbours that a thread moves of rows of `width`: 16 bytes, or fewer where rows begin at odd addresses."""
    return math.gcd(width, 4 * _MOST_WORDS // jnp.dtype(dtype).itemsize)


def address(ref: Any, offset: Any) -> Any:
    """Where an element of device memory lies; `offset` counts elements, in 32 or 64 bits without a sign."""
    arith, long = inline.utils.arith, ir.IntegerType.get_signless(64)
    if offset.type != long:
        offset = arith.extui(long, offset)
    size = inline.utils.bitwidth(ir.MemRefType(ref.type).element_type) // 8
    begin = inline.utils.llvm.ptrtoint(long, inline.utils.memref_ptr(ref))
    return arith.addi(begin, arith.muli(offset, inline.utils.c(size, long)))


def moves(count: int) -> Iterator[tuple[int, str, str]]:
    """The instructions that move so many words of 32 bits: the first byte, the size and the registers of each."""
    for first in range(0, count, _MOST_WORDS):
        names = [f"${i}" for i in range(first, min(first + _MOST_WORDS, count))]
        many = len(names) > 1
        yield 4 * first, f".v{len(names)}" if many else "", f"{{{', '.join(names)}}}" if many else names[0]


def _words(kind: Any) -> tuple[int, int, Any, str]:
    """How many words a vector has, their bits, and the type and letter of registers for them in PTX."""
    bits = kind.shape[0] * inline.utils.bitwidth(kind.element_type)
    count, bits = (1, bits) if bits < 32 else (bits // 32, 32)
    return count, bits, ir.IntegerType.get_signless(max(bits, 16)), "h" if bits < 32 else "r"


def load_vector(kind: Any, place: Any, is_there: Any) -> Any:
    """A vector of type `kind` from an address; zeros, and nothing is read, where `is_there` is false.

    Args:
      is_there: one bit, or None where it is known to be true.
    """
    llvm, (count, bits, word, letter) = inline.utils.llvm, _words(kind)
    guard = "" if is_there is None else f"@${count + 1} "
    zeros = "" if is_there is None else "".join(f"mov.b{word.width} ${i}, 0;" for i in range(count))
    loads = "".join(f"{guard}ld.global{size}.b{bits} {to}, [${count} + {at}];" for at, size, to in moves(count))
    result = word if count == 1 else ir.Type.parse(f"!llvm.struct<({', '.join([str(word)] * count)})>")
    operands, letters = ([place], "l") if is_there is None else ([place, is_there], "l,b")
    constraints = f"=&{letter}," * count + letters
    # Of side effects it has none, but it is to stay where it is: well before its result is used.
    found = llvm.inline_asm(result, operands, zeros + loads, constraints, has_side_effects=True)
    if count == 1:
        if bits < word.width:
            found = inline.utils.arith.trunci(ir.IntegerType.get_signless(bits), found)
        return llvm.bitcast(kind, found)
    words = [llvm.extractvalue(word, found, ir.DenseI64ArrayAttr.get([i])) for i in range(count)]
    return llvm.bitcast(kind, inline.utils.vector.from_elements(ir.VectorType.get((count,), word), words))


def store_vector(vector: Any, place: Any, is_there: Any) -> None:
    """Stores a vector at an address where `is_there`, as in `load_vector`, is true."""
    llvm, (count, bits, word, letter) = inline.utils.llvm, _words(ir.VectorType(vector.type))
    if count == 1:
        found = llvm.bitcast(ir.IntegerType.get_signless(bits), vector)
        words = [inline.utils.arith.extui(word, found) if bits < word.width else found]
    else:
        together = llvm.bitcast(ir.VectorType.get((count,), word), vector)
        words = [inline.item(together, i) for i in range(count)]
    guard, operands, letters = ("", [], "l") if is_there is None else (f"@${count + 1} ", [is_there], "l,b")
    text = "".join(f"{guard}st.global{size}.b{bits} [${count} + {at}], {of};" for at, size, of in moves(count))
    inline.asm(text, f"{letter}," * count + letters, *words, place, *operands)
