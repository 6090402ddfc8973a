"""Attention on Hopper's tensor cores, in the manner of [FlashAttention-3](https://arxiv.org/abs/2407.08608).

`attention_kernel` has what the warpgroups of a CTA do; here are the blocks that they take, and for which calls.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.attention_kernel import attention_kernel
from pallas_models.kernels.mosaic.attention_plan import Plan
from pallas_models.kernels.mosaic.common.attention_together import joined, part, part_rows, together
from pallas_models.kernels.mosaic.common.attention_walk import ROWS, pad_rows, padded_masks, searched
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of `block_q` queries, 64 a warpgroup, against `block_kv` keys a step, `num_stages` in the ring.

    Where lines of pairs share a bias, a tile may be of several `lines`, with warpgroups for each. Four warpgroups
    have registers for blocks of 64 keys and heads of 32, which pairs have.
    """

    block_q: int
    block_kv: int
    num_stages: int
    lines: int = 1

    def __post_init__(self) -> None:
        if self.block_q not in (ROWS, 2 * ROWS, 3 * ROWS, 4 * ROWS):
            raise ValueError(f"{__name__}: block_q={self.block_q} must be 64, 128, 192 or 256")
        if self.block_kv not in ((64,) if self.block_q == 4 * ROWS else (64, 128)):
            raise ValueError(f"{__name__}: block_kv={self.block_kv} must be 64 or, below 256 queries, 128")
        if not 1 <= self.lines <= (3 if self.block_q == ROWS else 1):
            raise ValueError(f"{__name__}: lines={self.lines} must be 1, or with blocks of 64 queries up to 3")
        if self.num_stages < 2:
            raise ValueError(f"{__name__}: num_stages={self.num_stages} must be at least 2")


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve a call; None where it does."""
    del target
    head_dim, sm_scale = form.head_dim, form.sm_scale
    if form.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.dtype}"
    if form.item_axis is None and head_dim not in (32, 64, 128):
        return f"takes heads of 32, 64 and 128, not {head_dim=}"
    if form.item_axis is not None and (head_dim != 32 or form.seq % ROWS or form.seq < 2 * ROWS):
        least = 2 * ROWS
        return (
            f"takes pairs with heads of 32 in multiples of {ROWS} from {least} on, not {head_dim=} and {form.seq}"
        )
    if sm_scale <= 0.0:
        return f"takes positive scales, not {sm_scale=}"
    if form.item_axis is not None and not _jax.since(0, 11):  # before, the interpreter waits for ever
        return f"needs JAX 0.11 or newer for pairs, not {jax.__version__}"
    return None


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the faster kernel for a call that it serves, as measured on an H200."""
    del target
    if form.item_axis is not None:
        return form.bias is not None
    # Triton's tiles are smaller, so that it skips more of what masks rule out, and pads short sequences less.
    if form.head_dim == 32 or (form.head_dim == 64 and form.has_masks):
        return False
    if form.window is not None and form.window < (1024 if form.head_dim == 64 else 128):
        return False
    seq, kv_seq = form.seq, form.kv_seq
    return min(seq, kv_seq) >= 128 and seq % 8 == kv_seq % 8 == 0  # others are padded, which is a copy


def _bias_itemsize(form: Form[Any]) -> int:
    return 0 if form.bias is None else form.bias.dtype.itemsize


def heuristic(form: Form[Any], target: Target) -> Config:
    """Chooses blocks, as measured on an H200."""
    head_dim, bias_itemsize = form.head_dim, _bias_itemsize(form)
    if form.item_axis is not None:  # of three lines scores of 64 x 128 fit in the registers
        config = Config(block_q=ROWS, block_kv=64 if form.seq % 128 else 128, num_stages=3, lines=3)
        if form.seq == 4 * ROWS:
            config = Config(block_q=4 * ROWS, block_kv=64, num_stages=3)
        elif form.seq >= 768 and form.seq % (3 * ROWS) == 0:
            config = Config(block_q=3 * ROWS, block_kv=128, num_stages=2)
        fits = shared_memory(config, head_dim, bias_itemsize) <= target.shared_memory
        return config if fits else dataclasses.replace(config, num_stages=2)
    masked = form.causal or form.window is not None or form.has_masks
    if form.batch * form.num_heads * pl.cdiv(form.seq, 2 * ROWS) < target.num_cores:
        config = Config(block_q=ROWS, block_kv=128, num_stages=2)
    elif head_dim == 64 and not masked and not bias_itemsize and form.seq >= 2048:
        config = Config(block_q=3 * ROWS, block_kv=128, num_stages=2)
    else:
        config = Config(
            block_q=2 * ROWS, block_kv=128, num_stages=4 if head_dim == 64 and not bias_itemsize else 2
        )
    fits = shared_memory(config, head_dim, bias_itemsize) <= target.shared_memory
    return config if fits else dataclasses.replace(config, block_kv=64)


def candidates(form: Form[Any]) -> Iterator[Config]:
    """The blocks worth measuring."""
    of_lines = form.item_axis is not None
    for consumers, block_kv, num_stages in itertools.product((1, 2, 3), (64, 128), (2, 3, 4)):
        if (consumers - 1) * ROWS < form.seq:
            yield Config(block_q=consumers * ROWS, block_kv=block_kv, num_stages=num_stages)
        if of_lines and consumers > 1:
            yield Config(block_q=ROWS, block_kv=block_kv, num_stages=num_stages, lines=consumers)
    if of_lines and form.seq > 3 * ROWS:
        yield from (Config(block_q=4 * ROWS, block_kv=64, num_stages=num_stages) for num_stages in (2, 3, 4))


def shared_memory(config: Config, head_dim: int, bias_itemsize: int = 0) -> int:
    """Bytes of shared memory that a CTA takes: queries, results, keys, values and masks of stages, barriers."""
    keys = config.num_stages * config.block_kv
    rows = config.lines * (config.block_q + keys)
    ones = 2 * TILE_ROWS * config.block_kv if head_dim == 32 else 0  # of pairs
    masks = (4 if config.lines > 1 else 8) * rows  # lines of pairs are not packed: they have no segments
    return 2 * head_dim * 2 * rows + config.block_q * keys * bias_itemsize + ones + masks + 2048


def attention(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention, (B, Sq, heads * head_dim), and the log-sum-exp that `return_lse` asks for."""
    if (count := together(form, 2 * ROWS)) > 1:
        results: Any = attention(joined(form, count), config=config, target=target, interpret=interpret)
        if not form.return_lse:
            return part(results, count)
        return part(results[0], count), part_rows(results[1], count)
    call, bias_itemsize = form.abstract(), _bias_itemsize(form)
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="attention",
            shape=form.sizes,
            bucketed=("batch", "q", "kv"),
            dtype=form.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, call, target),
            candidates=functools.partial(candidates, call),
            shared_memory=functools.partial(shared_memory, head_dim=form.head_dim, bias_itemsize=bias_itemsize),
        ),
        target,
    )
    if form.item_axis is None and config.lines > 1:
        raise ValueError(f"config: lines={config.lines} are for pairs, whose lines share a bias")
    if form.item_axis is None and config.block_q > 3 * ROWS:
        raise ValueError(f"config: block_q={config.block_q} is for pairs, whose heads are of 32")
    block_q, block_kv = config.block_q, config.block_kv
    # For as few keys of pairs a search takes longer than a mask for all blocks.
    few = form.item_axis is not None and form.kv_seq <= 4 * ROWS
    found = None if few else searched(form, block_q=block_q, block_kv=block_kv)
    if form.item_axis is None:
        padded = [pad_rows(x, max(ROWS, block_kv) if form.is_fused or i else ROWS) for i, x in enumerate(form.qkv)]
        q, k, v = form.replace(qkv=tuple(padded)).arrays
        rows, kv_rows = q.shape[1], k.shape[1]
    else:
        q, k, v = form.arrays
        rows, kv_rows = form.seq, form.kv_seq
    masks = padded_masks(form, rows, kv_rows)
    bias = form.bias
    if bias is not None:
        columns = ROW_BYTES // bias_itemsize  # of a tile of shared memory, which is copied as a whole
        more = pl.cdiv(kv_rows, columns) * columns - form.kv_seq
        bias = bias.swapaxes(-2, -1) if form.item_axis == 2 else bias
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, max(rows, block_q) - form.seq), (0, more)))
    if interpret:
        check_interpreted_sizes(queries=(rows, block_q), keys=(kv_rows, block_kv))
    plan = Plan.of(call, num_cores=target.num_cores, **dataclasses.asdict(config))
    ones = None
    if plan.tensor_sums:
        rows_of_ones = np.ones((TILE_ROWS, block_kv), form.dtype)
        rows_of_ones[-1] = 0.0  # an array of one number XLA fills anew in each call, which is a kernel of its own
        ones = jnp.asarray(rows_of_ones)
    lse_type = jax.ShapeDtypeStruct((*form.lse_shape[:-1], plan.q_blocks * block_q), jnp.float32)
    out, *lse = launch(
        functools.partial(attention_kernel, plan=plan),
        dict(q=q, k=k, v=v, ones=ones, bias=bias, **masks, found=found),
        dict(
            o=jax.ShapeDtypeStruct(q.shape[:-1] + form.out_shape[-1:], form.dtype),
            lse=lse_type if form.return_lse else None,
        ),
        plan.scratch_types(),
        name="attention",
        num_ctas=plan.num_ctas,
        num_warpgroups=plan.consumers + 1,
        interpret=interpret,
        reduction_scratch_bytes=0,
    )
    out = out if form.item_axis is not None else out[:, : form.seq]
    return (out, lse[0][..., : form.seq]) if form.return_lse else out
