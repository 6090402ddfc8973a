"""What the kernels of a triangle multiplicative update take and give, and which of them an update is made of."""

import dataclasses
from typing import Protocol

import jax

from pallas_models.kernels.forms.trimul import Output, Product, Projection
from pallas_models.target import Target


class _Bounds(Protocol):
    def __call__(
        self,
        mask: jax.Array | None,
        norm_scale: jax.Array,
        norm_bias: jax.Array,
        w: jax.Array,
        bias: jax.Array | None,
        *,
        interpret: bool,
    ) -> jax.Array: ...


class Project(Protocol):
    def __call__(
        self, form: Projection[jax.Array], *, target: Target, interpret: bool
    ) -> tuple[jax.Array | None, jax.Array | None]: ...


class _Multiply(Protocol):
    def __call__(self, form: Product[jax.Array], *, target: Target, interpret: bool) -> jax.Array: ...


class _Finish(Protocol):
    def __call__(self, form: Output[jax.Array], *, target: Target, interpret: bool) -> jax.Array: ...


class _FinishWithGate(Protocol):
    def __call__(
        self, form: Output[jax.Array], gating: Projection[jax.Array], *, target: Target, interpret: bool
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels of an update.

    Attributes:
      bounds: how large left and right can be.
      project: normalises x and writes left, right and the gate, each once.
      multiply: sums over third positions.
      finish: normalises the sums, gates and projects them.
      finish_with_gate: the same, and computes the gate, which `project` then does not write; None if it does.
      by_rows: whether the first two have the channels of a row side by side, (B, N, channels, N), and not
        (B, channels, N, N).
      tile: of the rows and columns of a matrix that the second copies, where it wants whole ones; only `by_rows`.
      norms_before: whether the first is Triton's, which has a kernel for the norm of x where that is not narrow.
      store_to_peers: whether the first two store to the GPUs that share the pairs, where their results are needed.
    """

    bounds: _Bounds
    project: Project
    multiply: _Multiply
    finish: _Finish
    finish_with_gate: _FinishWithGate | None = None
    by_rows: bool = False
    tile: tuple[int, int] = (1, 1)
    norms_before: bool = False
    store_to_peers: bool = False
