"""What a call of the triangle multiplicative update is, and a call of each kernel that takes a step of it."""

import dataclasses
from typing import ClassVar, Generic, Literal

import jax
import jax.numpy as jnp

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A

Direction = Literal["outgoing", "incoming"]
Residuals = Literal["save", "recompute"]
RESIDUALS: tuple[Residuals, ...] = ("save", "recompute")
DIRECTIONS: tuple[Direction, ...] = ("outgoing", "incoming")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The update of a pair representation; see `pallas_models.ops.triangle_update`.

    Attributes:
      x: (B, N, N, C), or the rows and columns of it that a device has.
      mask: (B, N, N), factors of left and right, or None.
      norm_scale: (C,).
      norm_bias: (C,).
      w_in: (C, 4, H): left, its gate, right, its gate.
      b_in: (4, H), or None.
      out_norm_scale: (H,).
      out_norm_bias: (H,).
      w_gate: (C, G): G is C where `gate_after`, else H.
      b_gate: (G,), or None.
      w_out: (H, C).
      b_out: (C,), or None.
      direction: whether an edge is updated by the edges that go out of its two nodes, or by those that come in.
      gate_after: whether the gate is applied to the result and not to the hidden channels.
      epsilon: added to the variances of both layer norms.
      compute_dtype: of the operands of products.
      precision: of products of float32 operands.
      out_dtype: of the result.
      residual: whether x is added to the result.
      rows_over: the axes of the mesh that the rows of x are split over.
      columns_over: the axes of the mesh that the columns of x are split over.
      max_temporary_bytes: how much memory tensors of pairs may take beside x and the result; None for any.
      residuals: whether the gradient keeps results of the forward pass or computes them again.
      return_residuals: whether what the gradient keeps is a result, too, in the compute dtype: left and right,
        scaled, (B, N, 2 H, N), the gate, (B, N, G, N), and the sums over third positions, scaled, (B, N, H, N).
      padded: the rows and columns of what is kept, no fewer than N, also where a device has a part of x: pairs
        beyond N count for nothing. As many as x has when None.
    """

    OPERANDS: ClassVar = (
        "x",
        "mask",
        "norm_scale",
        "norm_bias",
        "w_in",
        "b_in",
        "out_norm_scale",
        "out_norm_bias",
        "w_gate",
        "b_gate",
        "w_out",
        "b_out",
    )
    WEIGHTS: ClassVar = OPERANDS[2:]

    x: A
    mask: A | None
    norm_scale: A
    norm_bias: A
    w_in: A
    b_in: A | None
    out_norm_scale: A
    out_norm_bias: A
    w_gate: A
    b_gate: A | None
    w_out: A
    b_out: A | None
    direction: Direction
    gate_after: bool
    epsilon: float
    compute_dtype: jnp.dtype
    precision: jax.lax.Precision
    out_dtype: jnp.dtype
    residual: bool = False
    rows_over: tuple[str, ...] = ()
    columns_over: tuple[str, ...] = ()
    max_temporary_bytes: int | None = None
    residuals: Residuals = "save"
    return_residuals: bool = False
    padded: tuple[int, int] | None = None

    @property
    def hidden(self) -> int:
        """The number H of hidden channels."""
        return self.w_in.shape[2]

    @property
    def is_split(self) -> bool:
        """Whether devices share the pairs."""
        return bool(self.rows_over or self.columns_over)

    @property
    def factors(self) -> A | None:
        """The mask where it is more than 0 or 1: where it is of a float dtype."""
        is_float = self.mask is not None and jnp.issubdtype(self.mask.dtype, jnp.floating)
        return self.mask if is_float else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection(forms.Form, Generic[A]):
    """Left and right of the update, and its gate, which a position makes of its own channels.

    With z = layer_norm(x) and p = z @ w + bias, left is `mask * p[:, 0] * sigmoid(p[:, 1])`, right is
    `mask * p[:, 2] * sigmoid(p[:, 3])`, and the gate is `sigmoid(z @ w_gate + b_gate)`.

    Attributes:
      x: (B, M, C).
      mask: (B, M), or None.
      norm_scale: (C,), float32.
      norm_bias: (C,), float32.
      w: (C, 4, H), in the dtype of the products.
      bias: (4, H), float32, or None.
      w_gate: (C, G), in the dtype of the products; G may be 0.
      b_gate: (G,), float32, or None.
      epsilon: added to the variance.
      precision: of products of float32 operands.
      rows: how many of the B items are rows of one matrix of pairs; 1 where an item is all of it.
      padded: the rows of a matrix and the positions of an item that results have, no fewer than `rows` and M. What
        lies beyond is 0 in left and right. As many as x has when None.
    """

    OPERANDS: ClassVar = ("x", "mask", "norm_scale", "norm_bias", "w", "bias", "w_gate", "b_gate")

    x: A
    mask: A | None
    norm_scale: A
    norm_bias: A
    w: A
    bias: A | None
    w_gate: A
    b_gate: A | None
    epsilon: float
    precision: jax.lax.Precision
    rows: int = 1
    padded: tuple[int, int] | None = None

    @property
    def hidden(self) -> int:
        """The number H of channels of left, and of right."""
        return self.w.shape[2]

    @property
    def padded_rows(self) -> int:
        """The rows of a matrix that results have."""
        return self.rows if self.padded is None else self.padded[0]

    @property
    def result(self) -> tuple[int, int]:
        """The numbers B' of items and M' of positions that results have."""
        items, size, _ = self.x.shape
        return items // self.rows * self.padded_rows, size if self.padded is None else self.padded[1]

    @property
    def gates(self) -> int:
        """The number G of channels of the gate."""
        return self.w_gate.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product(forms.Form, Generic[A]):
    """`factor` times a matrix product for each hidden channel: sums over a third position, or their gradient.

    Attributes:
      sides: (B, S, N, N), the left factors in `channels` of its S channels. With `pieces` so many rows and columns
        lie one after another, row by row: (B * pieces, S, N / rows, N / columns); so does the result, and tiles
        have to divide them. With `by_rows` it is (B, N, S, N'), and the result (B, N, channels, N').
      right: the right factors, laid out alike; None where they are in the second half of `sides`.
      channels: how many channels of left and of right are multiplied.
      left_from: the first channel of `sides` that is a left factor.
      right_from: the first channel of `right` that is a right factor.
      transpose_left: whether left factors are transposed.
      transpose_right: whether right factors are transposed.
      factor: multiplies the products before they are rounded.
      precision: of products of float32 operands.
      pieces: in how many rows and columns of pieces the matrices come.
      by_rows: whether matrices of all channels lie row by row beside one another, so that who writes or reads all
        channels of a few positions has them near one another.
    """

    OPERANDS: ClassVar = ("sides", "right")

    sides: A
    right: A | None = None
    channels: int
    left_from: int = 0
    right_from: int = 0
    transpose_left: bool
    transpose_right: bool
    factor: float
    precision: jax.lax.Precision
    pieces: tuple[int, int] = (1, 1)
    by_rows: bool = False

    @property
    def batch(self) -> int:
        """The number B of items."""
        return self.sides.shape[0] // (self.pieces[0] * self.pieces[1])

    @property
    def size(self) -> int:
        """The number N of positions."""
        return self.sides.shape[1] if self.by_rows else self.sides.shape[2] * self.pieces[0]

    @property
    def firsts(self) -> tuple[int, int]:
        """The first channels of left and of right, each in its array."""
        if self.right is None:
            return self.left_from, self.sides.shape[2 if self.by_rows else 1] // 2
        return self.left_from, self.right_from

    @property
    def kind(self) -> dict[str, int]:
        """What tables of configs know the transposes by."""
        plain = {} if self.transpose_left or self.transpose_right else {"plain": 1}
        return {"incoming": int(self.transpose_left)} | plain

    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        shape = list(self.sides.shape)
        shape[2 if self.by_rows else 1] = self.channels
        return tuple(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(forms.Form, Generic[A]):
    """The end of the update: `(layer_norm(y) * gate) @ w + bias`, or `(layer_norm(y) @ w + bias) * gate`; plus x.

    Attributes:
      ys: y, (B, H, M), in equal parts of its channels: the sums over third positions times `factor` and, as left
        and right are scaled, times both scales.
      gate: (B, G', M), G' >= G: G is C where `gate_after`, else H; None where the kernel computes it.
      bounds: (parts, 5), of left and right, from which both scales follow.
      scale: (H,), float32, of the layer norm.
      shift: (H,), float32, its bias.
      w: (H, C), in the dtype of the products.
      bias: (C,), float32, or None.
      residual: x, (B, size, C), or None where it is not added.
      gate_after: whether the gate is applied to the result and not to the hidden channels.
      factor: the factor of the products.
      epsilon: added to the variance.
      precision: of products of float32 operands.
      out_dtype: of the result.
      size: how many of the M positions the result has.
      rows: how many of so many rows of each matrix, which the items are, the result has; (1, 1) for all items.
    """

    OPERANDS: ClassVar = ("ys", "gate", "bounds", "scale", "shift", "w", "bias", "residual")

    ys: tuple[A, ...]
    gate: A | None
    bounds: A
    scale: A
    shift: A
    w: A
    bias: A | None
    residual: A | None = None
    gate_after: bool
    factor: float
    epsilon: float
    precision: jax.lax.Precision
    out_dtype: jnp.dtype
    size: int
    rows: tuple[int, int] = (1, 1)

    @property
    def batch(self) -> int:
        """The number of items of the result."""
        return self.ys[0].shape[0] // self.rows[1] * self.rows[0]

    @property
    def hidden(self) -> int:
        """The number H of hidden channels."""
        return sum(y.shape[1] for y in self.ys)
