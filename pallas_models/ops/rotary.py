"""Rotary positions in a fused QKV buffer, with the RMS norm of queries and keys that precedes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.rotary import Form
from pallas_models.kernels.mosaic import rotary as mosaic
from pallas_models.kernels.mosaic import rotary_backward as mosaic_backward
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_on_hopper
from pallas_models.kernels.triton import rotary as triton
from pallas_models.kernels.triton import rotary_backward as triton_backward
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, Target
from pallas_models.tuning import Chooser


def rotary_table(positions: Array, head_dim: int, *, theta: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin of `positions * theta ** (-2 i / head_dim)` for i below head_dim / 2.

    ```
    cos, sin = ops.rotary_table(jnp.arange(16), 32)  # (16, 16) each
    ```

    Args:
      positions: (S,) or (B, S), integers.
      head_dim: width of a head, even.
      theta: base of the frequencies.

    Returns:
      cos and sin, (S, head_dim / 2) or (B, S, head_dim / 2) float32, for `rotary`. Angles are float32 as
      everywhere else: at position p they are off by up to p * 6e-8.

    Raises:
      TypeError: positions are not integers.
      ValueError: `positions` has another rank, or head_dim is not even.
    """
    _checks.check_integer("positions", positions)
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions has shape {positions.shape}; expected (S,) or (B, S)")
    _check_head_dim(head_dim)
    frequencies = (theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angles), jnp.sin(angles)


def rotary(
    qkv: Array,
    cos: Array,
    sin: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    epsilon: float = 1e-6,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Rotates queries and keys by their positions, after RMS norm if scales are given; values stay as they are.

    Of every head, with a and b its first and second half (each normalised, `x / rms(x) * scale`):
    `a cos - b sin` and `b cos + a sin`. This is [RoFormer](https://arxiv.org/abs/2104.09864)'s rotation in the
    layout of Hugging Face's LLaMA and Qwen, which pairs element i with i + head_dim / 2, not with its neighbour.
    All is float32 and rounded once; Hugging Face rounds the normalised and the scaled head, cos, sin and both
    products to the dtype of the model.

    The gradient keeps the operands alone, and without scales does not read `qkv`. It takes the memory of the
    cotangent.

    ```
    qkv = jnp.ones((2, 16, (4 + 2 * 2) * 32))
    y = ops.rotary(qkv, *ops.rotary_table(jnp.arange(16), 32), num_heads=4, num_kv_heads=2)  # (2, 16, 256)
    ```

    Args:
      qkv: (B, S, (num_heads + 2 num_kv_heads) * head_dim), float16, bfloat16 or float32: the queries of all
        heads, then the keys, then the values. head_dim is even. Where it is not used again, as under `jit`, the
        kernel works in place.
      cos: (S, head_dim / 2) or (B, S, head_dim / 2), any float dtype; see `rotary_table`.
      sin: the shape of `cos`, any float dtype.
      num_heads: number of query heads.
      num_kv_heads: number of key heads, and of value heads.
      q_scale: (head_dim,), scale of the RMS norm of each query, any float dtype; no norm when None.
      k_scale: (head_dim,), of each key; given where q_scale is.
      epsilon: added to the mean of squares.
      config: block sizes of the Triton or the Mosaic kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      The shape and dtype of `qkv`.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit, or one of q_scale and k_scale is missing.
    """
    _checks.check_float("qkv", qkv)
    _checks.check_rank("qkv", qkv, 3, "(B, S, (num_heads + 2 * num_kv_heads) * head_dim)")
    if num_heads < 1 or num_kv_heads < 1 or qkv.shape[-1] % (num_heads + 2 * num_kv_heads):
        raise ValueError(
            f"qkv has shape {qkv.shape}; expected its width to be ({num_heads=} + 2 * {num_kv_heads=}) * head_dim"
        )
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    _check_head_dim(head_dim)
    batch, seq, _ = qkv.shape
    for name, table in (("cos", cos), ("sin", sin)):
        _checks.check_float(name, table)
        if table.shape not in ((seq, head_dim // 2), (batch, seq, head_dim // 2)):
            raise ValueError(
                f"{name} has shape {table.shape}; expected {(seq, head_dim // 2)} or "
                f"{(batch, seq, head_dim // 2)}, (S, head_dim / 2) or (B, S, head_dim / 2)"
            )
    _checks.check_shape("sin", sin, cos.shape, "the shape of cos")
    if (q_scale is None) != (k_scale is None):
        missing = "q_scale" if q_scale is None else "k_scale"
        raise ValueError(f"{missing} is None and the other scale is not; expected both or neither")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is not None:
            _checks.check_float(name, scale)
            _checks.check_shape(name, scale, (head_dim,), "(head_dim,)")
    form = Form(
        qkv=qkv,
        cos=cos if cos.ndim == 3 else cos[None],
        sin=sin if sin.ndim == 3 else sin[None],
        q_scale=q_scale,
        k_scale=k_scale,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        epsilon=epsilon,
    )
    out: jax.Array = run(_OP, form, config=config, implementation=implementation)
    return out


def _check_head_dim(head_dim: int) -> None:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{head_dim=} cannot be rotated; expected an even number")


def reference(form: Form[jax.Array]) -> jax.Array:
    """Norm and rotation in plain XLA."""
    qkv = form.qkv
    by_head = qkv.reshape(*qkv.shape[:2], form.num_rotated + form.num_kv_heads, form.head_dim)
    q, k, v = jnp.split(by_head, (form.num_heads, form.num_rotated), axis=2)
    cos, sin = (table.astype(jnp.float32)[:, :, None, :] for table in (form.cos, form.sin))

    def rotate(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        y = x.astype(jnp.float32)
        if scale is not None:
            y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + form.epsilon)
            y *= scale.astype(jnp.float32)
        a, b = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    return jnp.concatenate([rotate(q, form.q_scale), rotate(k, form.k_scale), v], axis=2).reshape(qkv.shape)


def _backward(
    kernel: Callable[..., jax.Array],
    with_norm: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangent turned back by the same angles, and through the norm if there is one.

    Args:
      kernel: `rotary` of a backend.
      with_norm: its gradient where there is a norm.
    """
    (dout,) = cotangents
    dcos, dsin = None, None
    if wanted[1] or wanted[2]:  # of a table that is learned; others are constants

        def of_table(cos: jax.Array, sin: jax.Array) -> jax.Array:
            return reference(form.replace(cos=cos, sin=sin))

        dcos, dsin = jax.vjp(of_table, form.cos, form.sin)[1](dout)
    if form.q_scale is None:
        back = form.replace(qkv=dout, sin=-form.sin)
        return kernel(back, config=config, target=target, interpret=interpret), dcos, dsin, None, None
    dqkv, *dscales = with_norm(form, dout, config=config, target=target, interpret=interpret)
    return dqkv, dcos, dsin, *dscales


_OP: Op[Form[Any]] = Op(
    name="rotary",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=mosaic.rotary,
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=prefer_on_hopper,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.rotary, config=triton.Config),
    ),
    sharding=Sharding(equation="b s F, b s C, b s C, D, D -> b s F"),
    backward=(
        Backward(
            backend="mosaic",
            call=functools.partial(_backward, mosaic.rotary, mosaic_backward.rotary_backward),
            refuses=mosaic.unsupported,
            preferred=prefer_on_hopper,
        ),
        Backward(
            backend="triton", call=functools.partial(_backward, triton.rotary, triton_backward.rotary_backward)
        ),
    ),
)
