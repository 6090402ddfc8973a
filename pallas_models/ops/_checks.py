"""Argument checks shared by the ops: each names the argument, what it was and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray  # what ops take; they give arrays of JAX
FLOAT_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def _dtype(name: str, x: Array) -> jnp.dtype:
    if getattr(x, "dtype", None) is None:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    return x.dtype


def check_float(name: str, x: Array) -> None:
    """Raises TypeError unless `x` is an array of float16, bfloat16 or float32."""
    dtype = _dtype(name, x)
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {dtype}; expected float16, bfloat16 or float32")


def check_integer(name: str, x: Array) -> None:
    """Raises TypeError unless `x` is an array of an integer dtype."""
    dtype = _dtype(name, x)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {dtype}; expected an integer dtype")


def as_precision(precision: jax.lax.PrecisionLike) -> jax.lax.Precision:
    """The precision that an op computes float32 products in: None means true float32, never TF32."""
    return jax.lax.Precision.HIGHEST if precision is None else jax.lax.Precision(precision)


def check_rank(name: str, x: Array, rank: int, axes: str) -> None:
    """Raises ValueError unless `x` has `rank` axes, described by `axes`."""
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {x.shape}; expected {rank} axes, {axes}")


def check_shape(name: str, x: Array, shape: tuple[int, ...], axes: str) -> None:
    """Raises ValueError unless `x.shape == shape`, described by `axes`."""
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}, {axes}")


def is_over(size: int, most: int) -> bool:
    """Whether a size is larger than a bound; False for a symbolic size of jax.export that may be either."""
    try:
        return size > most
    except jax.errors.InconclusiveDimensionOperation:
        return False


def check_mask(name: str, mask: Array, shape: tuple[int, ...], axes: str) -> None:
    """Checks dtype and shape of a mask and, where they are concrete, that its values are 0 and 1."""
    dtype = _dtype(name, mask)
    if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {dtype}; expected bool or an integer dtype")
    check_shape(name, mask, shape, axes)
    if dtype == jnp.bool_ or isinstance(mask, jax.core.Tracer) or mask.size == 0:
        return
    values = np.asarray(mask)  # a constant is concrete in a trace too, where jnp would trace its minimum
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 1:
        raise ValueError(f"{name} has values from {low} to {high}; expected only 0 (padding) and 1 (token)")


def as_int32(mask: Array) -> Array:
    """A mask as kernels take it, for which anything but 0 is 1: only a concrete one can be checked for more."""
    return (mask != 0 if mask.dtype.itemsize > 4 else mask).astype(jnp.int32)


def as_scalar(name: str, x: float | Array) -> float | Array:
    """A number; an array of one number as float32 without axes, so that it is multiplied under every setting."""
    if not isinstance(x, jax.Array | np.ndarray):
        return x
    if x.size != 1:
        raise ValueError(f"{name} has shape {x.shape}; expected one number")
    return x.reshape(()).astype(np.float32)


def check_ids(name: str, ids: Array, size: int, what: str) -> None:
    """Where the values are concrete, raises ValueError unless all lie in [0, size)."""
    if isinstance(ids, jax.core.Tracer) or ids.size == 0:
        return
    values = np.asarray(ids)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= size:
        raise ValueError(f"{name} has values from {low} to {high}; expected 0 to {size - 1}, {what}")
