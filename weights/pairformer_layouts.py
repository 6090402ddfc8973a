"""What the layers, modules and blocks of a pair stack are called in a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from weights.families import Shape

Form = Literal["oi", "io", "ihd", "hdi", "cco"]


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """The names of the scale and of the bias of a layer norm."""

    scale: str
    bias: str


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """The names of weight and bias of a linear layer, and the axes of the weight.

    These are inputs (i) and outputs (o), which may be heads (h) of channels (d); inputs may be pairs of channels
    (c, c).
    """

    weight: str
    bias: str
    form: Form

    def shape(self, inputs: int, outputs: int, heads: int) -> Shape:
        """The shape of the weight."""
        by_heads = (heads, outputs // heads)
        channels = round(inputs**0.5)
        return {
            "oi": (outputs, inputs),
            "io": (inputs, outputs),
            "ihd": (inputs, *by_heads),
            "hdi": (*by_heads, inputs),
            "cco": (channels, channels, outputs),
        }[self.form]

    def sizes(self, shape: Shape) -> tuple[int, int]:
        """The numbers of inputs and of outputs of a weight of this shape."""
        inputs, outputs = 1, 1
        for axis, size in zip(self.form, shape, strict=True):
            if axis in "ic":
                inputs *= size
            else:
                outputs *= size
        return inputs, outputs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Gated attention, whose bias is of what it attends from where there is no `pair_norm`."""

    norm: Norm
    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    out: Linear
    pair_norm: Norm | None = None
    pair_bias: Linear | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TriMul:
    """The triangle multiplicative update.

    Attributes:
      projections: left, its gate, right and its gate, or all projections and all gates.
      interleaved: whether left and right take turns in the outputs of the latter, and are not halves.
      swapped: whether what is called left is multiplied from the right.
    """

    norm: Norm
    projections: tuple[Linear, ...]
    gate: Linear
    out_norm: Norm
    out: Linear
    interleaved: bool = False
    swapped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwiGLU:
    """A transition of a gate and what it multiplies: two layers, or one that has the outputs of both."""

    norm: Norm
    gate_up: tuple[Linear, ...]
    down: Linear


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReLU:
    norm: Norm
    up: Linear
    down: Linear


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OuterProduct:
    norm: Norm
    left: Linear
    right: Linear
    out: Linear


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    norm: Norm
    pair_norm: Norm
    pair_bias: Linear
    v: Linear
    gate: Linear
    out: Linear


Module = Norm | Attention | TriMul | SwiGLU | ReLU | OuterProduct | Averaging


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The blocks of a stack of one line of models.

    Attributes:
      name: of the line and of the stack.
      trunk: the end of the prefix that the stack has in the trunk of the model, of which it is the largest part;
        None for other stacks.
      blocks: what is between the prefix and the number of a block; None where a tensor has all blocks on its first
        axis.
      pair: the modules of pairs, by our names; every block has them.
      parts: other modules, those together that a block has all or none of. The last block alone may lack some.
      options: arguments of `pairformer`'s functions that go with these parameters.
    """

    name: str
    trunk: str | None
    blocks: str | None
    pair: Mapping[str, Module]
    parts: tuple[Mapping[str, Module], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
