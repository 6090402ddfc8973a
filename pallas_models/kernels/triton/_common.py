"""What the kernels share: tile arithmetic, masked access, activations in registers."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Ref = jax.Array  # inside a kernel: a reference to an array in device memory


def check_powers_of_two(config: object, *names: str) -> None:
    """Raises ValueError unless the named fields of a tile config are powers of two."""
    for name in names:
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{type(config).__module__}: {name}={value} must be a power of two")


def block_size(size: int, low: int, high: int) -> int:
    """The least power of two that covers `size`, within [low, high]."""
    return min(max(pl.next_power_of_2(max(size, 1)), low), high)


def span(start: jax.Array | int, block: int) -> pl.Slice:
    """`start + [0, block)`, which may reach past the end of an axis: access is to be masked there."""
    return pl.ds(jnp.asarray(start, jnp.int32), block)  # Pallas rejects static slices past the end


def in_bounds(start: jax.Array | int, block: int, size: int) -> jax.Array | None:
    """Which of `start + [0, block)` lie below `size`; None where `block` divides `size`: all do."""
    return None if size % block == 0 else start + jnp.arange(block) < size


def tile_mask(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a tile from those of its rows and columns, each None where all are in bounds."""
    if rows is None:
        return None if columns is None else columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def load(tile: Ref, mask: jax.Array | None = None) -> jax.Array:
    """Loads what `tile`, a `ref.at[...]`, points at; 0 where `mask`, broadcast to its shape, is False."""
    if mask is None:
        return plgpu.load(tile)
    return plgpu.load(tile, mask=jnp.broadcast_to(mask, tile.shape), other=0)


def store(tile: Ref, value: jax.Array, mask: jax.Array | None = None) -> None:
    """Stores `value` to `tile` in its dtype, where `mask`, broadcast to its shape, is True."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, tile.shape)
    plgpu.store(tile, value.astype(tile.dtype), mask=mask)


_GELU_POLYNOMIAL = (
    -1.67469544e-05,
    9.75813072e-05,
    1.11351941e-04,
    9.80662648e-04,
    8.59163005e-03,
    4.47888025e-02,
    9.97324951e-02,
    1.0,
)


def _gelu(x: jax.Array) -> jax.Array:
    # Triton has no erf. gelu(x) = relu(x) - |x| erfc(|x| / sqrt(2)) / 2, where erfc is p(|x|)^-8 with a
    # polynomial p fitted to minimise the error of gelu: below 2e-7 in float32, at any x.
    a = jnp.minimum(jnp.abs(x), 16.0)
    p = jnp.full_like(a, 2.93246614e-06)
    for coefficient in _GELU_POLYNOMIAL:
        p = p * a + coefficient
    p *= p
    p *= p
    p *= p
    r = jax.lax.rsqrt(p)
    return jnp.maximum(x, 0.0) - (0.5 * a) * (r * r)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    # (1 + tanh(u)) / 2 = sigmoid(2 u)
    return x / (1.0 + jnp.exp2((x * x * 0.044715 + 1.0) * x * -2.302208198))


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp2(x * -1.442695041))


def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


_ACTIVATIONS = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu, "silu": _silu}


def activate(activation: str | None, x: jax.Array) -> jax.Array:
    """Applies the activation named as in `pallas_models.ops.activations`; `x` is float32."""
    return x if activation is None else _ACTIVATIONS[activation](x)
