"""The records of a case file: an op, and calls of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec

from parity.support.bounded import Bounded
from parity.support.draws import Draw

Arrays = tuple[jax.Array, ...]


def _as_it_is(out: Any, *arrays: jax.Array) -> Any:
    del arrays
    return out


def _named(implementation: Any) -> Any:
    return implementation


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of an op with small random operands.

    Attributes:
      name: what tests show of it.
      op: the function of `pallas_models.ops`.
      arguments: `arguments(*arrays)` gives the arguments of the op by their names, arrays and options.
      make: `make(size, dtype)` draws the arrays. Sizes are odd if `size` is 1; if it is 16, they need no masks.
      floats: how many of the arrays can be differentiated: the first ones.
      batched: the indices of the arrays whose first axis is a batch, which can be mapped over.
      result: `result(out, *arrays)` makes one array of the op's results.
      implementation: gives the op's argument for the implementation that a test names.
      kernels: how many kernels of Triton the call is at most.
      symbols: the sizes of axes, where sizes are odd, that `jax.export` can leave open: "b" for a batch, "s" and
        "t" for lengths.
      most: the largest size that a symbol can have, where another array limits it.
    """

    name: str
    op: Callable[..., Any]
    arguments: Callable[..., dict[str, Any]]
    make: Callable[[int, str], Arrays]
    floats: int
    batched: tuple[int, ...] = (0,)
    _: dataclasses.KW_ONLY
    result: Callable[..., jax.Array] = _as_it_is
    implementation: Callable[[Any], Any] = _named
    kernels: int = 1
    symbols: Mapping[int, str] = dataclasses.field(default_factory=lambda: {2: "b", 7: "s"})
    most: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def arrays(self, dtype: str = "float32", size: int = 1) -> Arrays:
        """Random operands."""
        return self.make(size, dtype)

    def outputs(self, *arrays: Any, implementation: Any, **options: Any) -> Any:
        """The results of the op."""
        named = self.implementation(implementation)
        return self.op(**self.arguments(*arrays), implementation=named, **options)

    def function(self, *arrays: Any, implementation: Any, **options: Any) -> jax.Array:
        """The result of the call, as one array."""
        return self.result(self.outputs(*arrays, implementation=implementation, **options), *arrays)

    def __call__(self, implementation: Any, **options: Any) -> Callable[..., jax.Array]:
        """The call as a function of its arrays."""
        return lambda *arrays: self.function(*arrays, implementation=implementation, **options)


@dataclasses.dataclass(frozen=True, eq=False)
class Empty:
    """A call with an axis of size 0: its arguments, and the shape and the one value of its result."""

    arguments: Mapping[str, Any]
    shape: tuple[int, ...]
    value: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Spread:
    """A call whose operands are spread over a mesh of 4 x 2 devices, whose axes are "data" and "model".

    Attributes:
      call: its name says which axes are split.
      specs: how each array is spread.
      result: how the result is spread.
      sums: how many arrays are added up over devices, in forward and gradient together.
      swaps: of how many arrays each device sends every other one a part.
      kinds: the kinds of mesh on which it runs beside `jit`: "explicit", or "shard_map".
      of_part: options of the op in a `shard_map`.
    """

    call: Call
    specs: tuple[PartitionSpec, ...]
    result: PartitionSpec
    sums: int
    swaps: int = 0
    kinds: tuple[Literal["explicit", "shard_map"], ...] = ()
    of_part: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Without:
    """The reason why an op has nothing in a field."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Everything that the suite has to know of an op. No field has a default, so that none is forgotten.

    Attributes:
      op: the function of `pallas_models.ops`.
      products: what computes the products of the forward pass where kernels run; "none" if there are no products.
      calls: small calls in any implementation but "mosaic", which together call every Triton kernel of the op.
        These calls are transformed, lowered, exported, made under JAX's settings and under the sanitizers.
      hopper_calls: small calls that the Mosaic kernels serve, each of them called by one, kernels for all GPUs
        too; tiles of 64, half precision. With `size` 1 the last tile reaches past the end where kernels allow it.
      large: calls at the sizes of real use, by name: arguments, by a function of the dtype, with arrays as their
        shapes. The shared memory that their kernels take is computed for every GPU.
      empty: calls with an axis of size 0.
      spread: calls over devices, one for each axis that can be split. `spread(rng)` makes them.
      formula: the op in float64, with the bound that float32 and the dtype have to keep, in the arithmetic of
        `parity.support.bounded`. It takes the arguments of the op and `dtype`, the dtype of the operands, and
        rounds where the kernels round, as their docstrings say.
      draw: a random call for the campaign, as `draw(pick, dtype, mosaic)`.
      torch: the name of the op's reference in `parity.ops.reference`.
    """

    op: Callable[..., Any]
    products: Literal["kernels", "xla", "none"]
    calls: tuple[Call, ...] | Without
    hopper_calls: tuple[Call, ...] | Without
    large: Mapping[str, Callable[[str], dict[str, Any]]] | Without
    empty: tuple[Empty, ...] | Without
    spread: Callable[[np.random.Generator], Sequence[Spread]] | Without
    formula: Callable[..., Bounded | tuple[Bounded, ...]] | Without
    draw: Draw | Without
    torch: str | Without

    @property
    def name(self) -> str:
        return self.op.__name__


def sizes(size: int) -> tuple[int, int, int, int]:
    """Batch, tokens, inputs and outputs of a small call: odd, or multiples of 16."""
    return (2, 7, 33, 21) if size == 1 else (2, 4 * size, 2 * size, 4 * size)


def shaped(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """An array that is known by its shape and dtype alone."""
    return jax.ShapeDtypeStruct(shape, dtype)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    """An array without elements, or a vector beside one."""
    return np.zeros(shape, dtype)
