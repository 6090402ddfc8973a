"""Sentence embeddings from token embeddings: masked mean and L2 normalisation."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation
from pallas_models.dispatch.legacy import Op, run
from pallas_models.dispatch.records import Backward, Kernel
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.triton import pooling as triton
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON
from pallas_models.tuning import Chooser


def mean_pool(
    x: Array,
    mask: Array,
    *,
    normalize: bool = True,
    epsilon: float = 1e-12,
    config: triton.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `m = sum_s x[:, s] * mask[:, s] / sum_s mask[:, s]`, then `m / max(|m|, epsilon)`.

    This is the pooling of sentence-transformers ([Sentence-BERT](https://arxiv.org/abs/1908.10084)).
    What padding positions hold never reaches the result, NaN and infinities included.

    Args:
      x: (B, S, D), float16, bfloat16 or float32.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding; traced, anything but 0 is a token.
      normalize: whether to scale every row to unit L2 norm.
      epsilon: lower bound of the norm that is divided by.
      config: block sizes of the Triton kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      (B, D) in float32; zeros for a row whose mask is all zero.

    Raises:
      TypeError: `x` is not floating point or `mask` not bool or integer.
      ValueError: shapes do not fit, or a concrete `mask` holds anything but 0 and 1.
    """
    _checks.check_float("x", x)
    _checks.check_rank("x", x, 3, "(B, S, D)")
    _checks.check_mask("mask", mask, x.shape[:2], "(B, S)")
    return run(
        _OP,
        x,
        _checks.as_int32(mask),
        config=config,
        implementation=implementation,
        normalize=normalize,
        epsilon=epsilon,
    )


def segment_mean_pool(
    x: Array,
    segment_ids: Array,
    *,
    num_segments: int,
    normalize: bool = True,
    epsilon: float = 1e-12,
    config: triton.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `mean_pool` of the segments of packed rows: m_i is the mean of x over the tokens of segment i.

    Args:
      x: (B, S, D), float16, bfloat16 or float32.
      segment_ids: (B, S), integers: i for the tokens of segment i. Tokens of other ids than 0 to num_segments - 1
        reach no result, whatever they hold. The kernel reads ids from the first to the last token of a segment.
      num_segments: how many segments there are at most.
      normalize, epsilon, config, implementation: as in `mean_pool`.

    Returns:
      (num_segments, D) in float32; zeros for a segment without tokens.

    Raises:
      TypeError: `x` is not floating point or segment ids are not integers.
      ValueError: shapes do not fit or `num_segments` is negative.
    """
    _checks.check_float("x", x)
    _checks.check_rank("x", x, 3, "(B, S, D)")
    _checks.check_integer("segment_ids", segment_ids)
    _checks.check_shape("segment_ids", segment_ids, x.shape[:2], "(B, S)")
    if operator.index(num_segments) < 0:
        raise ValueError(f"{num_segments=}; expected at least 0")
    if segment_ids.dtype.itemsize < 8:
        segment_ids = segment_ids.astype(jnp.int32)  # those beyond it come out negative
    # Of no segment: one past the last, as an index below 0 would count from the end.
    is_one = (segment_ids >= 0) & (segment_ids < num_segments)
    return run(
        _SEGMENTS,
        x,
        jnp.where(is_one, segment_ids, num_segments).astype(jnp.int32),
        config=config,
        implementation=implementation,
        num_segments=num_segments,
        normalize=normalize,
        epsilon=epsilon,
    )


def reference(x: jax.Array, mask: jax.Array, *, normalize: bool, epsilon: float, return_mean: bool = False) -> Any:
    """`mean_pool` in plain XLA, and the mean itself on request, for the gradient."""
    kept = jnp.where((mask != 0)[:, :, None], x.astype(jnp.float32), 0.0)
    mean = jnp.sum(kept, axis=1) / _tokens(mask)
    out = _normalize(mean, epsilon) if normalize else mean
    return (out, mean) if return_mean else out


def segment_reference(
    x: jax.Array,
    segment_ids: jax.Array,
    *,
    num_segments: int,
    normalize: bool,
    epsilon: float,
    return_mean: bool = False,
) -> Any:
    """`segment_mean_pool` in plain XLA, and the means themselves on request, for the gradient.

    The id of tokens of no segment is `num_segments`.
    """
    ids, rows = segment_ids.ravel(), x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    total = jnp.zeros((num_segments, x.shape[-1]), jnp.float32).at[ids].add(rows, mode="drop")
    mean = total / _tokens_of_segments(ids, num_segments)
    out = _normalize(mean, epsilon) if normalize else mean
    return (out, mean) if return_mean else out


def _tokens_of_segments(places: jax.Array, num_segments: int) -> jax.Array:
    """What the sum of a segment is divided by, (num_segments, 1)."""
    tokens = jnp.zeros(num_segments, jnp.int32).at[places].add(1, mode="drop")
    return jnp.maximum(tokens, 1)[:, None]


def _tokens(mask: jax.Array) -> jax.Array:
    """What the sum of a row is divided by, (B, 1)."""
    return jnp.maximum(jnp.sum(mask != 0, axis=1, keepdims=True), 1)


def _normalize(mean: jax.Array, epsilon: float) -> jax.Array:
    # By its largest part or epsilon first, so that no square leaves float32. The result does not depend on that,
    # nor does its gradient. The floor under the square keeps m = 0 and its gradient finite.
    peak = jnp.maximum(jax.lax.stop_gradient(jnp.max(jnp.abs(mean), axis=-1, keepdims=True)), epsilon)
    peak = jnp.where(peak == 0.0, 1.0, peak)
    mean /= peak
    square = jnp.sum(jnp.square(mean), axis=-1, keepdims=True)
    return mean * jax.lax.rsqrt(jnp.maximum(square, jnp.maximum(jnp.square(epsilon / peak), triton.TINY)))


def _with_mean(kernel: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The kernel; or, for the gradient, without the norm, which is then by itself."""

    def call(*arrays: jax.Array, normalize: bool, epsilon: float, return_mean: bool = False, **runs: Any) -> Any:
        if not return_mean:
            return kernel(*arrays, normalize=normalize, epsilon=epsilon, **runs)
        mean = kernel(*arrays, normalize=False, epsilon=epsilon, **runs)
        return _normalize(mean, epsilon) if normalize else mean, mean

    return call


def _pull_norm(mean: jax.Array, dout: jax.Array, normalize: bool, epsilon: float) -> jax.Array:
    """The cotangent of the mean."""
    return jax.vjp(functools.partial(_normalize, epsilon=epsilon), mean)[1](dout)[0] if normalize else dout


def _backward(
    x: jax.Array,
    mask: jax.Array,
    mean: jax.Array,
    dout: jax.Array,
    *_: None,
    normalize: bool,
    epsilon: float,
    **__: Any,
) -> tuple[jax.Array, None]:
    """A share of the mean's cotangent for each token, written once: x is not read again."""
    share = (_pull_norm(mean, dout, normalize, epsilon) / _tokens(mask)).astype(x.dtype)
    return jnp.where((mask != 0)[:, :, None], share[:, None, :], jnp.zeros((), x.dtype)), None


def _segments_backward(
    x: jax.Array,
    segment_ids: jax.Array,
    mean: jax.Array,
    dout: jax.Array,
    *_: None,
    num_segments: int,
    normalize: bool,
    epsilon: float,
    **__: Any,
) -> tuple[jax.Array, None]:
    """The same by segments; XLA would add up the means again, in another order each time."""
    places = segment_ids.ravel()
    share = _pull_norm(mean, dout, normalize, epsilon) / _tokens_of_segments(places, num_segments)
    return share.astype(x.dtype).at[places].get(mode="fill", fill_value=0).reshape(x.shape), None


_OP = Op(
    name="mean_pool",
    reference=reference,
    kernels=(
        Kernel(backend="triton", architectures=AMPERE_ON, call=_with_mean(triton.mean_pool), config=triton.Config),
    ),
    sharding=Sharding(equation="b S N, b S -> b N, b N"),
    backward=(Backward(backend="xla", call=_backward, keeps=-1, options={"return_mean": True}),),
)
_SEGMENTS = Op(
    name="segment_mean_pool",
    reference=segment_reference,
    kernels=(
        Kernel(
            backend="triton",
            architectures=AMPERE_ON,
            call=_with_mean(triton.segment_mean_pool),
            config=triton.Config,
        ),
    ),
    sharding=Sharding(equation="B S N, B S -> M N, M N"),
    backward=(Backward(backend="xla", call=_segments_backward, keeps=-1, options={"return_mean": True}),),
)
