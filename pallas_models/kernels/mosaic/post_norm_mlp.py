"""The projection and the MLP of a post-norm transformer layer, and maybe its attention, for Hopper GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.forms.attention_post_norm_mlp import Form as AttentionForm
from pallas_models.kernels.forms.post_norm_mlp import Form, Weights
from pallas_models.kernels.mosaic.common.heads_of_32 import HEAD_DIM, Heads, slot_rows
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import launch
from pallas_models.kernels.mosaic.common.memory import untiled
from pallas_models.kernels.mosaic.post_norm_mlp_kernel import (
    BLOCK,
    CONSUMERS,
    ROWS,
    STAGES,
    VECTORS,
    Kernel,
    Steps,
)
from pallas_models.target import HOPPER, Target

_WIDEST = 384  # of which a warpgroup has sums of hidden values and of results in registers
_KEYS = (64, 128)  # of a sequence, where attention is in the kernel


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `post_norm_mlp` does not serve a call; None if it does."""
    return _unsupported(form.x, form.weights, target)


def _unsupported(x: jax.ShapeDtypeStruct, weights: Weights[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve rows x (M, N); None if it does."""
    (k, n), f = weights.w_out.shape, weights.w_up.shape[1]
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if weights.bias_out is None or weights.bias_up is None or weights.bias_down is None:
        return "takes all biases"
    if k != n or n % (2 * BLOCK) or n > _WIDEST or f % n or not f:
        return (
            f"takes as many columns of y as of x, in multiples of {2 * BLOCK} up to {_WIDEST}, and of those a "
            f"multiple of hidden values, not {k}, {n} and {f}"
        )
    if target.runs(HOPPER) and _shared_memory(n, f) > target.shared_memory:
        return f"does not fit {f} hidden values beside {n} columns into shared memory"
    return untiled("x", x.shape, x.dtype)


def unsupported_attention(form: AttentionForm[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `attention_post_norm_mlp` does not serve a call; None if it does."""
    (batch, seq, n), k, num_heads = form.x.shape, form.qkv.shape[2] // 3, form.num_heads
    if jax.__version_info__ < (0, 11):
        return "needs JAX 0.11, which has arrays side by side in registers"
    if form.bias is not None or (form.mask is not None and form.segment_ids is not None):
        return "takes a mask or segment ids at most"
    if form.segment_ids is not None and form.segment_ids.dtype.itemsize > 4:
        return f"takes ids of 32 bits, not {form.segment_ids.dtype}"
    if k != n or n != num_heads * HEAD_DIM or seq not in _KEYS or slot_rows(seq) > n:
        return (
            f"takes heads of {HEAD_DIM} within 64 tokens from 256 columns on, within 128 from 384 on, "
            f"not {num_heads} heads of {k} columns within {seq} tokens"
        )
    return _unsupported(jax.ShapeDtypeStruct((batch * seq, n), form.x.dtype), form.weights, target)


def _shared_memory(n: int, f: int) -> int:
    """Bytes of shared memory that a CTA takes: rows and hidden values, ring, vectors, moments, barriers, ids."""
    return 2 * (2 * ROWS * n + STAGES * BLOCK * n // 2) + 4 * (len(VECTORS) * n + f) + 4 * 4 * ROWS + 2048


def post_norm_mlp(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """The projection and the MLP of rows; see `pallas_models.ops.post_norm_mlp`."""
    del config  # there are no other tiles
    return _post_norm_mlp(form, target=target, interpret=interpret)


def attention_post_norm_mlp(
    form: AttentionForm[jax.Array], *, config: None, target: Target, interpret: bool
) -> jax.Array:
    """Attention, projection and MLP: tokens attend to those with their id, or with their value of the mask."""
    del config  # there are no other tiles
    batch, seq, _ = form.x.shape
    ids = form.segment_ids if form.mask is None else form.mask
    ids = None if ids is None else ids.astype(jnp.int32)
    heads = Heads(num_heads=form.num_heads, keys=seq, ids=ids)
    qkv, x = (a.reshape(batch * seq, a.shape[2]) for a in (form.qkv, form.x))
    options: dict[str, Any] = dict(activation=form.activation, epsilon=form.epsilon, precision=form.precision)
    rows = Form(y=qkv, x=x, weights=form.weights, **options)
    return _post_norm_mlp(rows, heads=heads, target=target, interpret=interpret).reshape(form.x.shape)


def _post_norm_mlp(
    form: Form[jax.Array], *, target: Target, interpret: bool, heads: Heads | None = None
) -> jax.Array:
    """The kernel. With `heads` the form's y has queries, keys and values, (M, 3 N)."""
    weights, (m, n), dtype = form.weights, form.x.shape, form.x.dtype
    assert weights.bias_up is not None  # see `unsupported`
    if interpret:
        check_interpreted_sizes(m=(m, ROWS))
    tiles = pl.cdiv(m, ROWS)
    kernel = Kernel(
        steps=Steps(n=n, f=weights.w_up.shape[1], heads=heads is not None),
        tiles=tiles,
        num_ctas=min(num_cores(target, interpret), tiles),
        dtype=dtype,
        activation=form.activation,
        epsilon=form.epsilon,
        heads=heads,
    )
    rows = ({} if heads is None else heads.operands) | dict(y=form.y, x=form.x)
    matrices = dict(w_out=weights.w_out, w_up=weights.w_up, w_down=weights.w_down)
    vectors = {name: getattr(weights, name).astype(jnp.float32) for name in ("bias_up", *VECTORS)}
    (out,) = launch(
        kernel,
        rows | matrices | vectors,
        dict(o=jax.ShapeDtypeStruct((m, n), dtype)),
        kernel.scratch_types,
        name="post_norm_mlp",
        num_ctas=kernel.num_ctas,
        num_warpgroups=CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
    )
    return out
