"""Attention by `mma` for every GPU from Ampere on, in the manner of [FlashAttention-2](https://arxiv.org/abs/2307.08691).

A CTA is one warpgroup, which holds the queries of a tile in registers. Keys and values are copied to shared memory
some blocks ahead.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band
from pallas_models.kernels.common.scores import NO_KEY, exponents, lowest_score
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.attention_pairs import (
    Pairs,
    bias_spec,
    head_spec,
    of_head,
    padded,
    result,
    whole,
)
from pallas_models.kernels.mosaic.common.attention_walk import narrowed, searched
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import layout_cast, load, store
from pallas_models.kernels.mosaic.common.products_mma import ROWS, as_left, left_layout, multiply, zeros
from pallas_models.kernels.mosaic.common.scores import exponent_scale, softmax_weights
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers
_HEADS = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of `block_q` queries, `block_kv` keys a step, and `num_stages` steps that are copied ahead."""

    block_q: int
    block_kv: int
    num_stages: int

    def __post_init__(self) -> None:
        sizes = self.block_q in (ROWS, 2 * ROWS) and self.block_kv in (32, 64, 128)
        if not sizes or not 2 <= self.num_stages <= 4:
            raise ValueError(
                f"{self}: expected block_q of 64 or 128, block_kv of 32, 64 or 128, and 2 to 4 stages"
            )


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve a call; None where it does."""
    del target
    if form.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.dtype}"
    if form.head_dim not in _HEADS:
        return f"takes heads of 16, 32, 64 and 128, not head_dim={form.head_dim}"
    if form.item_axis is not None and form.seq % ROWS:
        return f"takes pairs in multiples of {ROWS}, not {form.seq}"
    if form.sm_scale <= 0.0:
        return f"takes positive scales, not sm_scale={form.sm_scale}"
    return None


def shared_memory(config: Config, head_dim: int, bias_itemsize: int = 0) -> int:
    """Bytes of shared memory that a CTA takes: keys, values and bias of all stages."""
    step = config.block_kv * (4 * head_dim + config.block_q * bias_itemsize)
    return config.num_stages * step + 1024


def candidates(form: Form[Any]) -> Iterator[Config]:
    """The blocks worth measuring."""
    for block_q, block_kv, num_stages in itertools.product((64, 128), (32, 64, 128), (2, 3)):
        fits = form.item_axis is None or form.seq % block_q == form.seq % block_kv == 0
        if fits and block_q * max(block_kv, form.head_dim) <= 128 * 64:
            yield Config(block_q=block_q, block_kv=block_kv, num_stages=num_stages)


def heuristic(form: Form[Any], target: Target) -> Config:
    """Blocks whose scores and sums registers hold; not measured."""
    config = Config(block_q=ROWS, block_kv=64 if form.head_dim <= 64 else 32, num_stages=3)
    fits = shared_memory(config, form.head_dim, _bias_itemsize(form)) <= target.shared_memory
    return config if fits else dataclasses.replace(config, num_stages=2)


def _bias_itemsize(form: Form[Any]) -> int:
    return 0 if form.bias is None else form.bias.dtype.itemsize


def attention(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention, (B, Sq, heads * head_dim), and the log-sum-exp that `return_lse` asks for."""
    call = form.abstract()
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="attention_mma",
            shape=form.sizes,
            bucketed=("batch", "q", "kv"),
            dtype=form.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, call, target),
            candidates=functools.partial(candidates, call),
            shared_memory=functools.partial(
                shared_memory, head_dim=form.head_dim, bias_itemsize=_bias_itemsize(form)
            ),
        ),
        target,
    )
    block_q, block_kv = config.block_q, config.block_kv
    rows = whole(form.seq, block_q)
    out, *lse = launch(
        _Kernel(call, config).run,
        padded(form, block_q, block_kv) | dict(found=searched(form, block_q=block_q, block_kv=block_kv)),
        dict(
            o=result(form, rows, form.num_heads),
            lse=jax.ShapeDtypeStruct((form.batch, form.num_heads, rows), jnp.float32) if form.return_lse else None,
        ),
        {},
        name="attention_mma",
        num_ctas=form.batch * form.num_heads * (rows // block_q),
        num_warpgroups=None,
        interpret=interpret,
    )
    out = out[:, : form.seq].reshape(form.out_shape)
    return (out, lse[0][..., : form.seq].reshape(form.lse_shape)) if form.return_lse else out


_Carry = tuple[jax.Array, jax.Array, jax.Array]  # of each row: weighted sum of values, maximum, sum of weights


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Form[Any]
    config: Config

    @property
    def scale(self) -> float:
        return exponent_scale(self.form)

    def run(self, refs: Refs) -> None:
        """Attends for the tile of this CTA."""
        form, block_q, block_kv = self.form, self.config.block_q, self.config.block_kv
        cta, q_blocks = jax.lax.axis_index("cta"), pl.cdiv(form.seq, block_q)
        # Tiles of a head, which share keys, go side by side, those with most keys first.
        block, index = q_blocks - 1 - rem(cta, q_blocks), div(cta, q_blocks)
        item, head = div(index, form.num_heads), rem(index, form.num_heads)
        start = block * block_q
        runs = Band.of(form).keys_of(start, block_q, block_kv)
        first, end, full, full_end = narrowed(runs, refs.found, item, block, masked=form.has_masks)
        pairs, rows = Pairs(form, refs, item, block_q, block_kv), pl.Slice(start, block_q)
        q = load(of_head(form, refs.q, 0, item, rows, head), left_layout(form.dtype))

        def step(indices: tuple[jax.Array], k: Ref, v: Ref, *rest: Any) -> _Carry:
            *bias, carry = rest
            at = first + indices[0]
            scores = multiply(zeros(block_q, block_kv), q, k.T[...])
            if bias:
                scores = scores * form.sm_scale + load(bias[0], plgpu.Layout.WGMMA).astype(jnp.float32)
            scores = pairs.masked(scores, start, at * block_kv, (at >= full) & (at < full_end))
            return self.add(carry, scores, v)

        kv_head = div(head, form.group)
        sources = [refs.k, refs.v]
        specs = [head_spec(form, i, block_kv, lambda j: (item, first + j, kv_head)) for i in (1, 2)]
        if refs.bias is not None:
            sources.append(refs.bias)
            specs.append(bias_spec(form, (block_q, block_kv), lambda j: (item, head, block, first + j)))
        along_rows = plgpu.Layout.WGMMA.reduce(1)
        begin = (
            zeros(block_q, form.head_dim),
            layout_cast(
                jnp.full((block_q,), lowest_score(self.scale, with_bias=refs.bias is not None), jnp.float32),
                along_rows,
            ),
            layout_cast(jnp.zeros((block_q,), jnp.float32), along_rows),
        )
        carry = plgpu.emit_pipeline(
            step,
            grid=(jnp.maximum(end - first, 0),),
            in_specs=specs,
            max_concurrent_steps=self.config.num_stages,
            init_carry=begin,
        )(*sources)
        self.finish(refs, item, head, rows, carry)

    def add(self, carry: _Carry, scores: jax.Array, v: Ref) -> _Carry:
        """Adds a block of keys, given its scores and values."""
        values, peak, total = carry
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = softmax_weights(scores, new_peak, self.scale)
        correction = jnp.exp2(exponents(peak, self.scale)[1] - exponents(new_peak, self.scale)[1])
        values = values * jax.lax.broadcast_in_dim(correction, values.shape, [0])
        values = multiply(values, as_left(weights, self.form.dtype), v[...])
        return values, new_peak, total * correction + jnp.sum(weights, axis=1)

    def finish(self, refs: Refs, item: jax.Array, head: jax.Array, rows: pl.Slice, carry: _Carry) -> None:
        """Stores the results of the tile."""
        values, peak, total = carry
        empty = total == 0.0  # no key took part
        factor = jnp.where(empty, 0.0, 1.0 / total)
        target = of_head(self.form, refs.o, None, item, rows, head)
        store(target, (values * jax.lax.broadcast_in_dim(factor, values.shape, [0])).astype(target.dtype))
        if refs.lse is not None:
            lse = jnp.where(empty, NO_KEY, peak * (self.scale * math.log(2)) + jnp.log(total))
            store(refs.lse.at[item, head, rows], lse)
