"""Functions of numbers, applied to arrays in registers, and vectors beside these, in a kernel of one warpgroup."""

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.elementwise import _Code, elementwise, load_vector
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, tiled
from parity.ops.test_lowering import HOPPER
from parity.support.common import cuda_device, normal
from parity.support.primitives import all_called

HALF = np.float16
M, N = 64, 128
ROWS, COLUMNS = ("row", "row_id"), ("column", "column_id")
Arrays = dict[str, jax.Array]


def kernel(function: Callable[..., Any], dtypes: Sequence[Any], arrays: Arrays, *, interpret: bool) -> Any:
    """The results of `function` in these dtypes; it takes x, y, both of a row and both of a column."""

    def body(refs: Refs) -> None:
        def tile(name: str) -> Any:
            return getattr(refs, f"{name}_tile")

        for name in arrays:
            plgpu.copy_gmem_to_smem(getattr(refs, name), tile(name), refs.full)
        plgpu.barrier_wait(refs.full)
        both = (load(tile(name), plgpu.Layout.WGMMA) for name in "xy")
        rows, columns = (
            [load_vector(tile(name), axis) for name in names] for axis, names in enumerate((ROWS, COLUMNS))
        )
        results = elementwise(function, *both, rows=rows, columns=columns)
        for i, result in enumerate(results):
            tile(f"o{i}")[...] = result
        plgpu.commit_smem()
        for i in range(len(results)):
            plgpu.copy_smem_to_gmem(tile(f"o{i}"), getattr(refs, f"o{i}"))
        plgpu.wait_smem_to_gmem(0)

    types = {f"o{i}": jax.ShapeDtypeStruct((M, N), dtype) for i, dtype in enumerate(dtypes)}
    return launch(
        body,
        arrays,
        types,
        {
            f"{name}_tile": (tiled if x.ndim == 2 else plgpu.SMEM)(x.shape, x.dtype)
            for name, x in (arrays | types).items()
        }
        | dict(full=plgpu.Barrier(num_arrivals=len(arrays))),
        name="elementwise",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )


def operands(dtype: str) -> Arrays:
    rng = np.random.default_rng(0)
    arrays = dict(x=normal(rng, M, N), y=normal(rng, M, N, dtype=dtype), row=normal(rng, M), column=normal(rng, N))
    sizes = dict(row_id=M, column_id=N)
    return arrays | {name: jnp.asarray(rng.integers(0, 4, n), jnp.int32) for name, n in sizes.items()}


def sums(x, y, row, row_id, column, column_id):
    return x * row + column, x - row * column, jnp.square(x) - row, x


def rounded(x, y, row, row_id, column, column_id):
    half = (y.astype(jnp.float32) + column).astype(y.dtype)
    return half, half.astype(jnp.float32) * row


def masked(x, y, row, row_id, column, column_id):
    return (jnp.where(row_id == column_id, x, -jnp.inf), jnp.where(column_id == 2, row, 0.5))


def functions(x, y, row, row_id, column, column_id):
    return (
        jnp.maximum(x, row) - jnp.minimum(column, 0.5),
        jnp.exp2(-jnp.abs(x)) + jax.lax.rsqrt(1.0 + jnp.abs(column)),
        jnp.tanh(x) / (2.0 + jnp.abs(row)),
    )


def activated(x, y, row, row_id, column, column_id):
    return tuple(activate(name, x, y.dtype) for name in ("gelu", "gelu_tanh", "silu"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("function", [sums, rounded, masked, functions, activated], ids=lambda f: f.__name__)
def test_functions(function: Callable[..., Any], dtype: str, on_gpu: bool) -> None:
    arrays = operands(dtype)
    given = (*(arrays[name] for name in "xy"), *(arrays[name][:, None] for name in ROWS))
    expected = function(*given, *(arrays[name] for name in COLUMNS))  # where XLA would round less
    with all_called("mosaic.common.elementwise"):
        found = jax.jit(lambda a: kernel(function, [x.dtype for x in expected], a, interpret=not on_gpu))(arrays)
    for out, right in zip(found, expected, strict=True):
        # tanh has 11 bits; a sum may be rounded to the next number of its dtype.
        error = 2.0**-10 if out.dtype == jnp.float32 else jnp.finfo(out.dtype).eps
        right = np.broadcast_to(np.asarray(right, np.float64), (M, N))
        np.testing.assert_allclose(np.asarray(out, np.float64), right, rtol=error, atol=error)


PTX: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "ex2": np.exp2,
    "max": np.maximum,
    "min": np.minimum,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "selp": lambda a, b, p: a if p else b,
    "setp": lambda a, b: a == b,
    "sub": lambda a, b: a - b,
    "tanh": np.tanh,
}


def execute(text: str, words: dict[str, Any]) -> dict[str, Any]:
    """Runs PTX of `elementwise`; a word that holds two numbers is a tuple."""

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return struct.unpack(">f", bytes.fromhex(name[2:]))[0]
        return words[name] if name in words else int(name)

    for line in re.findall(r"(\w+\.[^;]*);", text.partition(".reg .b16")[2]):
        (instruction, rest) = line.split(" ", 1)
        given = [tuple(x[1:-1].split(", ")) if x[0] == "{" else x for x in re.findall(r"\{.*?\}|[\w$]+", rest)]
        target, *operands = given
        name = instruction.partition(".")[0]
        if name == "mov" and isinstance(target, tuple):
            words |= dict(zip(target, value(operands[0]), strict=True))
        elif name == "mov":
            source = operands[0]
            words[target] = tuple(map(value, source)) if isinstance(source, tuple) else value(source)
        elif instruction.startswith("cvt.rn"):  # the first is the upper half
            dtype = jnp.bfloat16 if ".bf16x2" in instruction else HALF
            words[target] = tuple(dtype(value(x)) for x in reversed(operands))
        elif name == "cvt":
            words[target] = np.float32(value(operands[0]))
        elif name in ("shl", "and"):  # numbers in bfloat16 are the upper halves of their float32
            assert operands[1] == {"shl": "16", "and": "65536"}[name]
            words[target] = np.float32(value(operands[0])[name == "and"])
        else:
            words[target] = PTX[name](*map(value, operands))
    return words


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("function", [sums, rounded, masked, functions, activated], ids=lambda f: f.__name__)
def test_ptx(function: Callable[..., Any], dtype: str, wide: bool) -> None:
    arrays = operands(dtype)
    pairs = [np.ravel(arrays[name])[:2] for name in ("x", "y", "row", "row_id", "column", "column_id")]
    with jax.enable_x64(wide):
        traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), x.dtype) for x in pairs))
    count = len(traced.jaxpr.outvars)
    names = [f"${i}" for i in range(count + len(pairs))]
    text = _Code(traced.jaxpr)._template.format(*names)
    words = execute(text, dict(zip(names[count:], map(tuple, pairs), strict=True)))
    for name, right in zip(names[:count], function(*pairs), strict=True):
        error = 1e-5 if right.dtype == jnp.float32 else jnp.finfo(right.dtype).eps
        np.testing.assert_allclose(*(np.array(x, np.float64) for x in (words[name], right)), rtol=error, atol=1e-5)


def test_unknown_operations_are_refused() -> None:
    def sine(x, *others):
        return (jnp.sin(x),)

    def call(arrays: Arrays) -> Any:
        return kernel(sine, [jnp.float32], arrays, interpret=False)

    with (
        cuda_device(*HOPPER),
        pytest.raises(NotImplementedError, match=r"sin.*; expected one of abs, add, div, exp2"),
    ):
        jax.jit(call).trace(operands("float16")).lower(lowering_platforms=("cuda",))
