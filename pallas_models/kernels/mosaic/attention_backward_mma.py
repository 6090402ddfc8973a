"""The gradients of attention by `mma` for every GPU from Ampere on.

Weights are computed again from scores and their log-sum-exp. A CTA of the first kernel has a tile of queries, of
the second one a tile of keys, of the third one a tile of the bias. Scores are computed twice, or thrice, but each
result is written once: nobody waits for others, and results are the same every time. Tiles of keys compute scores
transposed, (keys, queries): so weights and gradients of scores are left operands of the next products as they are.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band
from pallas_models.kernels.common.scores import rows_of_backward
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.attention_pairs import (
    Pairs,
    bias_spec,
    flat,
    head_spec,
    of_head,
    padded,
    result,
    whole,
)
from pallas_models.kernels.mosaic.common.attention_walk import narrowed, pad_rows, searched
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, row_bytes_of, store, tiled
from pallas_models.kernels.mosaic.common.products_mma import ROWS, as_left, left_layout, multiply, zeros
from pallas_models.target import Target
from pallas_models.tuning import Chooser

div, rem = jax.lax.div, jax.lax.rem
_NUM_STAGES = 2
_BIAS_CTAS = 4  # on each multiprocessor, that the gradient of a bias is split into where its own tiles are fewer


def _other_rows(form: Form[Any]) -> int:
    """Rows of a block that meets a tile of 64: as many as registers have room for."""
    return 64 if form.head_dim <= 32 else 32 if form.head_dim <= 64 else 16


def attention_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[Any, ...]:
    """The gradients of the operands of `attention`, as the Triton kernel of this name gives them."""
    del config  # there are no other blocks
    (out, lse), (dout, dlse) = kept, cotangents
    assert dout is not None
    rows = whole(form.seq, ROWS)
    more = (0, 0), (0, 0), (0, rows - form.seq)  # with gradients of 0
    shift, delta = (
        jnp.pad(x.reshape(form.batch, form.num_heads, form.seq), more)
        for x in rows_of_backward(form, out, lse, dout, dlse)
    )
    dout = pad_rows(flat(form, dout), rows)
    read = padded(form, ROWS, ROWS) | dict(dout=dout, shift=shift, delta=delta)
    if read["mask"] is not None:  # what a masked key holds, NaN for one, would reach the gradients of queries
        read["k"] = _unmasked(form, read["k"], read["mask"])
    call = functools.partial(_launch, form, read, interpret)
    tiles, kv_tiles = rows // ROWS, whole(form.kv_seq, ROWS) // ROWS
    of_queries, of_keys = result(form, rows, form.num_heads), result(form, kv_tiles * ROWS, form.num_kv_heads)
    gradients = call(_OfQueries, form.batch * form.num_heads * tiles, dq=of_queries)
    gradients += call(_OfKeys, form.batch * form.num_kv_heads * kv_tiles, dk=of_keys, dv=of_keys)
    sizes = form.seq, form.kv_seq, form.kv_seq
    lead = form.out_shape[:-2]
    dq, dk, dv = (
        dx[:, :size].reshape(*lead, -1, heads * form.head_dim)
        for dx, size, heads in zip(
            gradients, sizes, (form.num_heads, form.num_kv_heads, form.num_kv_heads), strict=True
        )
    )
    dqkv = (jnp.concatenate([dq, dk, dv], axis=-1),) if form.is_fused else (dq, dk, dv)
    dbias = None
    if form.bias is not None and wanted[2]:
        own = form.bias.shape[0] * form.bias.shape[1] * tiles * (kv_tiles * ROWS // _other_rows(form))
        summed = form.batch * form.num_heads // (form.bias.shape[0] * form.bias.shape[1])
        parts = min(pl.cdiv(_BIAS_CTAS * target.num_cores, own), summed)
        shape = parts, *form.bias.shape[:2], tiles * ROWS, kv_tiles * ROWS
        (sums,) = call(_OfBias, own * parts, dbias=jax.ShapeDtypeStruct(shape, jnp.float32))
        dbias = jnp.sum(sums, axis=0)[..., : form.seq, : form.kv_seq].astype(form.bias.dtype)
        dbias = dbias.swapaxes(-2, -1) if form.item_axis == 2 else dbias
    return dqkv, None, dbias, None, None


def _unmasked(form: Form[Any], k: jax.Array, mask: jax.Array) -> jax.Array:
    """The array of keys with 0 where they are masked, and in a fused buffer in other columns too."""
    if form.item_axis != 2:
        return jnp.where(mask[..., None] != 0, k, 0)
    lines = k.reshape(-1, form.seq, form.items, k.shape[-1] // form.items)
    keeps = mask.reshape(-1, form.items, form.seq).swapaxes(1, 2)
    return jnp.where(keeps[..., None] != 0, lines, 0).reshape(k.shape)


def _launch(
    form: Form[jax.Array],
    read: dict[str, Any],
    interpret: bool,
    body: type["_Side"],
    num_ctas: int,
    **results: jax.ShapeDtypeStruct,
) -> list[jax.Array]:
    """Runs a kernel with so many CTAs."""
    side = body(form.abstract())
    if side.keys_first and read["bias"] is not None:
        read = read | dict(bias=read["bias"].swapaxes(-2, -1))
    found = None
    if side.searches:
        found = searched(form, block_q=side.block_q, block_kv=side.block_kv, keys_first=side.keys_first)
    return launch(
        side.run,
        read | dict(found=found),
        results,
        side.scratch_types,
        name=side.name,
        num_ctas=num_ctas,
        num_warpgroups=None,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """The body of a kernel whose CTAs have 64 rows of one side, and what is the same for all of them."""

    form: Form[Any]
    name: ClassVar[str]
    keys_first: ClassVar[bool] = False
    searches: ClassVar[bool] = True  # masks for blocks that they rule out

    @property
    def scratch_types(self) -> dict[str, Any]:
        return {}

    @property
    def block_q(self) -> int:
        return _other_rows(self.form) if self.keys_first else ROWS

    @property
    def block_kv(self) -> int:
        return ROWS if self.keys_first else _other_rows(self.form)

    def tile(self, heads: int, tiles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Item, head and number of the tile of this CTA."""
        cta = jax.lax.axis_index("cta")
        index = div(cta, tiles)
        return div(index, heads), rem(index, heads), rem(cta, tiles)

    def pairs(self, refs: Refs, item: jax.Array) -> Pairs:
        return Pairs(self.form, refs, item, self.block_q, self.block_kv, self.keys_first)

    def numbers(self, refs: Refs, item: jax.Array, head: jax.Array, query: jax.Array) -> list[jax.Array]:
        """Shift and delta of a block of queries."""
        layout = plgpu.Layout.WGMMA.reduce(1 - int(self.keys_first))
        at = item, head, pl.Slice(query, self.block_q)
        return [load(ref.at[at], layout) for ref in (refs.shift, refs.delta)]

    def gradients(
        self, scores: jax.Array, dweights: jax.Array, numbers: Sequence[jax.Array], bias: Ref | None, masked: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Weights, and the gradients of scores, given scores and the gradients of weights."""
        form, axis = self.form, int(self.keys_first)
        shift, delta = (jax.lax.broadcast_in_dim(x, scores.shape, [axis]) for x in numbers)
        scale = form.sm_scale * math.log2(math.e)
        if bias is not None:
            scores = scores * form.sm_scale + load(bias, plgpu.Layout.WGMMA).astype(jnp.float32)
            scale = math.log2(math.e)
        weights = jnp.exp2(masked(scores) * scale + shift)
        return weights, weights * (dweights - delta)

    def left(self, ref: Ref) -> jax.Array:
        return load(ref, left_layout(self.form.dtype))

    def run(self, refs: Refs) -> None:
        raise NotImplementedError


class _OfQueries(_Side):
    """Gradients of 64 queries."""

    name = "attention_queries_mma"

    def run(self, refs: Refs) -> None:
        """Adds up the gradients of the tile of this CTA over the blocks of keys."""
        form, block_kv = self.form, self.block_kv
        item, head, block = self.tile(form.num_heads, whole(form.seq, ROWS) // ROWS)
        start, kv_head = block * ROWS, div(head, form.group)
        runs = Band.of(form).keys_of(start, ROWS, block_kv)
        first, end, full, full_end = narrowed(runs, refs.found, item, block, masked=form.has_masks)
        rows, pairs = pl.Slice(start, ROWS), self.pairs(refs, item)
        q = self.left(of_head(form, refs.q, 0, item, rows, head))
        dout = self.left(of_head(form, refs.dout, None, item, rows, head))
        numbers = self.numbers(refs, item, head, start)

        def step(indices: tuple[jax.Array], k: Ref, v: Ref, *rest: Any) -> jax.Array:
            *bias, dq = rest
            at = first + indices[0]
            _, dscores = self.gradients(
                multiply(zeros(ROWS, block_kv), q, k.T[...]),
                multiply(zeros(ROWS, block_kv), dout, v.T[...]),
                numbers,
                bias[0] if bias else None,
                lambda x: pairs.masked(x, start, at * block_kv, (at >= full) & (at < full_end)),
            )
            return multiply(dq, as_left(dscores, form.dtype), k[...])

        sources = [refs.k, refs.v]
        specs = [head_spec(form, i, block_kv, lambda j: (item, first + j, kv_head)) for i in (1, 2)]
        if refs.bias is not None:
            sources.append(refs.bias)
            specs.append(bias_spec(form, (ROWS, block_kv), lambda j: (item, head, block, first + j)))
        dq = plgpu.emit_pipeline(
            step,
            grid=(jnp.maximum(end - first, 0),),
            in_specs=specs,
            max_concurrent_steps=_NUM_STAGES,
            init_carry=zeros(ROWS, form.head_dim),
        )(*sources)
        target = of_head(form, refs.dq, None, item, rows, head)
        store(target, (dq * form.sm_scale).astype(target.dtype))


class _OfKeys(_Side):
    """Gradients of 64 keys and values."""

    name = "attention_keys_mma"
    keys_first = True

    @property
    def scratch_types(self) -> dict[str, Any]:
        """Room for keys and values where registers have none; a thread reads there what it has written."""
        if self.form.head_dim < 128:
            return {}
        row_bytes = row_bytes_of(self.form.head_dim, self.form.dtype)
        return dict.fromkeys(("k_tile", "v_tile"), tiled((ROWS, self.form.head_dim), self.form.dtype, row_bytes))

    def parked(self, refs: Refs) -> list[Ref]:
        return [getattr(refs, name) for name in self.scratch_types]

    def run(self, refs: Refs) -> None:
        """Adds up the gradients of the tile of this CTA over the blocks of queries of all heads of its group."""
        form, block_q = self.form, self.block_q
        item, kv_head, block = self.tile(form.num_kv_heads, whole(form.kv_seq, ROWS) // ROWS)
        start, head = block * ROWS, kv_head * form.group
        runs = Band.of(form).queries_of(start, ROWS, block_q)
        first, end, full, full_end = narrowed(runs, refs.found, item, block, masked=form.has_masks)
        rows, pairs = pl.Slice(start, ROWS), self.pairs(refs, item)
        own = [self.left(of_head(form, ref, i, item, rows, kv_head)) for i, ref in ((1, refs.k), (2, refs.v))]
        for tile, x in zip(self.parked(refs), own, strict=False):
            tile[...] = x

        def step(
            indices: tuple[jax.Array, jax.Array], q: Ref, dout: Ref, *rest: Any
        ) -> tuple[jax.Array, jax.Array]:
            *bias, (dk, dv) = rest
            at = first + indices[1]
            k, v = map(self.left, self.parked(refs)) if self.scratch_types else own
            weights, dscores = self.gradients(
                multiply(zeros(ROWS, block_q), k, q.T[...]),
                multiply(zeros(ROWS, block_q), v, dout.T[...]),
                self.numbers(refs, item, head + indices[0], at * block_q),
                bias[0] if bias else None,
                lambda x: pairs.masked(x, at * block_q, start, (at >= full) & (at < full_end)),
            )
            dv = multiply(dv, as_left(weights, form.dtype), dout[...])
            return multiply(dk, as_left(dscores, form.dtype), q[...]), dv

        sources = [refs.q, refs.dout]
        specs = [head_spec(form, i, block_q, lambda g, j: (item, first + j, head + g)) for i in (0, None)]
        if refs.bias is not None:
            sources.append(refs.bias)
            specs.append(bias_spec(form, (ROWS, block_q), lambda g, j: (item, head + g, block, first + j)))
        dk, dv = plgpu.emit_pipeline(
            step,
            grid=(form.group, jnp.maximum(end - first, 0)),
            in_specs=specs,
            max_concurrent_steps=_NUM_STAGES,
            init_carry=(zeros(ROWS, form.head_dim),) * 2,
        )(*sources)
        for ref, value in ((refs.dk, dk * form.sm_scale), (refs.dv, dv)):
            target = of_head(form, ref, None, item, rows, kv_head)
            store(target, value.astype(target.dtype))


class _OfBias(_Side):
    """The gradient of a tile of the bias, or a part of its sum over items and heads that share it."""

    name = "attention_bias_mma"
    searches = False

    def run(self, refs: Refs) -> None:
        """Adds up the gradients of scores."""
        form, block_kv = self.form, self.block_kv
        parts, batches, heads, rows, kv_rows = refs.dbias.shape
        cta, kv_tiles = jax.lax.axis_index("cta"), kv_rows // block_kv
        index, at = div(cta, kv_tiles), rem(cta, kv_tiles)
        index, block = div(index, rows // ROWS), rem(index, rows // ROWS)
        own, part = div(index, parts), rem(index, parts)
        summed_heads = form.num_heads // heads
        summed = form.batch // batches * summed_heads
        size = pl.cdiv(summed, parts)
        begin = part * size

        def of(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Item and head of a term of the sum."""
            item = div(own, heads) * (form.batch // batches) + div(begin + i, summed_heads)
            return item, rem(begin + i, summed_heads) if heads < form.num_heads else rem(own, heads)

        def step(
            indices: tuple[jax.Array], q: Ref, dout: Ref, k: Ref, v: Ref, bias: Ref, total: jax.Array
        ) -> jax.Array:
            item, head = of(indices[0])
            _, dscores = self.gradients(
                multiply(zeros(ROWS, block_kv), self.left(q), k.T[...]),
                multiply(zeros(ROWS, block_kv), self.left(dout), v.T[...]),
                self.numbers(refs, item, head, block * ROWS),
                bias,
                lambda x: self.pairs(refs, item).masked(x, block * ROWS, at * block_kv, jnp.bool_(False)),
            )
            return total + dscores

        def spec(operand: int | None) -> Any:
            if operand in (0, None):
                return head_spec(form, operand, ROWS, lambda i: (of(i)[0], block, of(i)[1]))
            return head_spec(form, operand, block_kv, lambda i: (of(i)[0], at, div(of(i)[1], form.group)))

        total = plgpu.emit_pipeline(
            step,
            grid=(jnp.clip(summed - begin, 0, size),),
            in_specs=[
                *map(spec, (0, None, 1, 2)),
                bias_spec(form, (ROWS, block_kv), lambda i: (*of(i), block, at)),
            ],
            max_concurrent_steps=_NUM_STAGES,
            init_carry=zeros(ROWS, block_kv),
        )(refs.q, refs.dout, refs.k, refs.v, refs.bias)
        where = part, div(own, heads), rem(own, heads)
        target = refs.dbias.at[*where, pl.Slice(block * ROWS, ROWS), pl.Slice(at * block_kv, block_kv)]
        store(target, total)
