"""Sentence embeddings from token embeddings: masked mean and L2 normalisation."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.common.pooling import TINY
from pallas_models.kernels.forms.pooling import Form, SegmentForm
from pallas_models.kernels.mosaic import pooling as mosaic
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_on_hopper
from pallas_models.kernels.triton import pooling as triton
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, Target
from pallas_models.tuning import Chooser


def mean_pool(
    x: Array,
    mask: Array,
    *,
    normalize: bool = True,
    epsilon: float = 1e-12,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `m = sum_s x[:, s] * mask[:, s] / sum_s mask[:, s]`, then `m / max(|m|, epsilon)`.

    This is the pooling of sentence-transformers ([Sentence-BERT](https://arxiv.org/abs/1908.10084)).
    Values at padding positions never reach the result, NaN and infinities included.

    Beside the operands the gradient keeps the means, (B, D) float32; it does not read `x`.

    ```
    y = ops.mean_pool(jnp.ones((2, 16, 64)), jnp.arange(16) < jnp.array([[16], [5]]))  # (2, 64)
    ```

    Args:
      x: (B, S, D), float16, bfloat16 or float32.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding; traced, anything but 0 is a token.
      normalize: whether to scale every row to unit L2 norm.
      epsilon: lower bound of the norm that is divided by.
      config: block sizes of the Triton or the Mosaic kernel; chosen as `pallas_models.tuning` says when None.
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
    form = Form(x=x, mask=_checks.as_int32(mask), normalize=normalize, epsilon=epsilon)
    out: jax.Array = run(_OP, form, config=config, implementation=implementation)
    return out


def segment_mean_pool(
    x: Array,
    segment_ids: Array,
    *,
    num_segments: int,
    normalize: bool = True,
    epsilon: float = 1e-12,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `mean_pool` of the segments of packed rows: m_i is the mean of x over the tokens of segment i.

    Beside the operands the gradient keeps the means, (num_segments, D) float32; it does not read `x`.

    ```
    ids = jnp.repeat(jnp.arange(4), 8).reshape(2, 16)
    y = ops.segment_mean_pool(jnp.ones((2, 16, 64)), ids, num_segments=4)  # (4, 64)
    ```

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
    form = SegmentForm(
        x=x,
        segment_ids=jnp.where(is_one, segment_ids, num_segments).astype(jnp.int32),
        num_segments=num_segments,
        normalize=normalize,
        epsilon=epsilon,
    )
    out: jax.Array = run(_SEGMENTS, form, config=config, implementation=implementation)
    return out


def reference(form: Form[jax.Array]) -> Any:
    """`mean_pool` in plain XLA."""
    kept = jnp.where((form.mask != 0)[:, :, None], form.x.astype(jnp.float32), 0.0)
    return _results(form, jnp.sum(kept, axis=1) / _tokens(form.mask))


def segment_reference(form: SegmentForm[jax.Array]) -> Any:
    """`segment_mean_pool` in plain XLA."""
    ids, x, num_segments = form.segment_ids.ravel(), form.x, form.num_segments
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    total = jnp.zeros((num_segments, x.shape[-1]), jnp.float32).at[ids].add(rows, mode="drop")
    return _results(form, total / _tokens_of_segments(ids, num_segments))


def _results(form: Form[jax.Array] | SegmentForm[jax.Array], mean: jax.Array) -> Any:
    """The results of a call whose mean is known."""
    out = _normalize(mean, form.epsilon) if form.normalize else mean
    return (out, mean) if form.return_mean else out


def _tokens_of_segments(places: jax.Array, num_segments: int) -> jax.Array:
    """The number of tokens of each segment, at least 1, (num_segments, 1)."""
    tokens = jnp.zeros(num_segments, jnp.int32).at[places].add(1, mode="drop")
    return jnp.maximum(tokens, 1)[:, None]


def _tokens(mask: jax.Array) -> jax.Array:
    """The number of tokens of each row, at least 1, (B, 1)."""
    return jnp.maximum(jnp.sum(mask != 0, axis=1, keepdims=True), 1)


def _normalize(mean: jax.Array, epsilon: float) -> jax.Array:
    # By its largest part or epsilon first, so that no square leaves float32. The result does not depend on that,
    # nor does its gradient. The floor under the square keeps m = 0 and its gradient finite.
    peak = jnp.maximum(jax.lax.stop_gradient(jnp.max(jnp.abs(mean), axis=-1, keepdims=True)), epsilon)
    peak = jnp.where(peak == 0.0, 1.0, peak)
    mean /= peak
    square = jnp.sum(jnp.square(mean), axis=-1, keepdims=True)
    return mean * jax.lax.rsqrt(jnp.maximum(square, jnp.maximum(jnp.square(epsilon / peak), TINY)))


def _with_mean(kernel: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The kernel; for the gradient, which wants the mean, without the scaling, which XLA does."""

    def call(
        form: Form[jax.Array] | SegmentForm[jax.Array],
        *,
        config: triton.Config | mosaic.Config | Chooser | None,
        target: Target,
        interpret: bool,
    ) -> Any:
        plain = form.replace(normalize=False) if form.return_mean else form
        out = kernel(plain, config=config, target=target, interpret=interpret)
        return _results(form, out) if form.return_mean else out

    return call


def _pull_norm(
    form: Form[jax.Array] | SegmentForm[jax.Array], kept: list[jax.Array], cotangents: list[jax.Array | None]
) -> jax.Array:
    """The cotangent of the mean."""
    (mean,), dout = kept, cotangents[0]
    assert dout is not None
    if not form.normalize:
        return dout
    found: jax.Array = jax.vjp(functools.partial(_normalize, epsilon=form.epsilon), mean)[1](dout)[0]
    return found


def _backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, None]:
    """A share of the mean's cotangent for each token, written once: x is not read again."""
    x, mask = form.x, form.mask
    share = (_pull_norm(form, kept, cotangents) / _tokens(mask)).astype(x.dtype)
    return jnp.where((mask != 0)[:, :, None], share[:, None, :], jnp.zeros((), x.dtype)), None


def _segments_backward(
    form: SegmentForm[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, None]:
    """A share of its segment's cotangent for each token; XLA would add up the means again, in another order."""
    x, places = form.x, form.segment_ids.ravel()
    share = _pull_norm(form, kept, cotangents) / _tokens_of_segments(places, form.num_segments)
    return share.astype(x.dtype).at[places].get(mode="fill", fill_value=0).reshape(x.shape), None


_OP: Op[Form[Any]] = Op(
    name="mean_pool",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=_with_mean(mosaic.mean_pool),
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=prefer_on_hopper,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=_with_mean(triton.mean_pool), config=triton.Config),
    ),
    sharding=Sharding(equation="b S N, b S -> b N, b N"),
    backward=(Backward(backend="xla", call=_backward, keeps=-1, options={"return_mean": True}),),
)
_SEGMENTS: Op[SegmentForm[Any]] = Op(
    name="segment_mean_pool",
    reference=segment_reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=_with_mean(mosaic.segment_mean_pool),
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=prefer_on_hopper,
        ),
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
