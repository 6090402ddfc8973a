"""cuEquivariance's functions for AlphaFold's pair stack, on this library's kernels: a port changes an import.

Signatures, layouts and results are as in cuEquivariance 0.13: `triangle_multiplicative_update` and
`triangle_attention` as in cuequivariance_jax, `attention_pair_bias` as in cuequivariance_torch, which alone has
it. Weights are (out, in) as in torch. `ops.triangle_attention` takes what kernels read in place.
"""

import enum
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_models import ops
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.trimul import Direction

_MASKED = -1e9  # the score of a key that is masked
_INITIAL = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
NormKind = Literal["layer_norm", "rms_norm"]


class TriMulPrecision(enum.IntEnum):
    """Precisions of float32 products, numbered as cuEquivariance numbers them, whose own are taken too."""

    DEFAULT = 0
    TF32 = 1
    TF32x3 = 2
    IEEE = 3


_PRECISIONS = dict(zip(TriMulPrecision, ("default", "default", "highest", "highest"), strict=True))


def triangle_multiplicative_update(
    x: Array,
    direction: Direction = "outgoing",
    key: jax.Array | None = None,
    mask: Array | None = None,
    norm_in_weight: Array | None = None,
    norm_in_bias: Array | None = None,
    p_in_weight: Array | None = None,
    p_in_bias: Array | None = None,
    g_in_weight: Array | None = None,
    g_in_bias: Array | None = None,
    norm_out_weight: Array | None = None,
    norm_out_bias: Array | None = None,
    p_out_weight: Array | None = None,
    p_out_bias: Array | None = None,
    g_out_weight: Array | None = None,
    g_out_bias: Array | None = None,
    eps: float = 1e-5,
    precision: TriMulPrecision = TriMulPrecision.DEFAULT,
    fallback: bool | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the triangle multiplicative update, as `cuequivariance_jax.triangle_multiplicative_update` does.

    With z = layer_norm(x):

        left, right = halves of mask * sigmoid(z @ g_in_weight.T + g_in_bias) * (z @ p_in_weight.T + p_in_bias)
        outgoing:  y[i, j] = sum_k left[i, k] * right[j, k];  incoming:  y[i, j] = sum_k left[k, i] * right[k, j]
        out = sigmoid(z @ g_out_weight.T + g_out_bias) * (layer_norm(y) @ p_out_weight.T + p_out_bias)

    It is `ops.triangle_update` with `gate_after` and a `compute_dtype` of the dtype of x, which says what is
    rounded, how it is differentiated and what the gradient keeps. Where D_out is not C it is computed once for
    every C columns of the result.

    Args:
      x: (..., N, N, C), float16, bfloat16 or float32.
      direction: `"outgoing"` or `"incoming"`.
      key: draws the projections that are None, as cuEquivariance draws them: LeCun's normal distribution.
      mask: (..., N, N), bool, integer or float, factors of left and right; all 1 when None. Its leading axes and
        the leading axes of x are broadcast against each other.
      norm_in_weight, norm_in_bias: (C,), the layer norm of x; ones and zeros when None.
      p_in_weight, g_in_weight: (2H, C), left, then right. cuequivariance_jax asks for H = C.
      p_in_bias, g_in_bias: (2H,); no bias when None.
      norm_out_weight, norm_out_bias: (H,), the layer norm of y; ones and zeros when None.
      p_out_weight: (D_out, H).
      g_out_weight: (D_out, C).
      p_out_bias, g_out_bias: (D_out,); no bias when None.
      eps: added to the variances.
      precision: of products where x is float32. DEFAULT and TF32 allow TF32 on a GPU, TF32x3 and IEEE are float32;
        cuEquivariance takes the products over k with TF32 whatever it is.
      fallback: whether plain XLA computes it. None is False: there is a kernel for every N.
      implementation: as `pallas_models.ops` has it, without `fallback`; cuEquivariance has no such argument.

    Returns:
      (..., N, N, D_out) in the dtype of x.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit, an option is unknown, or a projection and the key are None.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    _checks.check_float("x", x)
    if x.ndim < 3 or x.shape[-3] != x.shape[-2]:
        raise ValueError(f"x has shape {x.shape}; expected (..., N, N, C)")
    if precision not in _PRECISIONS:
        raise ValueError(f"{precision=} is unknown; expected one of {', '.join(map(str, TriMulPrecision))}")
    c = x.shape[-1]
    hidden = _rows(p_in_weight, g_in_weight, default=2 * c) // 2
    c_out = _rows(p_out_weight, g_out_weight, default=c)
    shapes = {"p_in": (2 * hidden, c), "g_in": (2 * hidden, c), "p_out": (c_out, hidden), "g_out": (c_out, c)}
    _check_weights(
        p_in_weight=(p_in_weight, shapes["p_in"], "(2H, C)"),
        g_in_weight=(g_in_weight, shapes["g_in"], "(2H, C)"),
        p_out_weight=(p_out_weight, shapes["p_out"], "(D_out, H)"),
        g_out_weight=(g_out_weight, shapes["g_out"], "(D_out, C)"),
        norm_in_weight=(norm_in_weight, (c,), "(C,)"),
        norm_in_bias=(norm_in_bias, (c,), "(C,)"),
        p_in_bias=(p_in_bias, (2 * hidden,), "(2H,)"),
        g_in_bias=(g_in_bias, (2 * hidden,), "(2H,)"),
        norm_out_weight=(norm_out_weight, (hidden,), "(H,)"),
        norm_out_bias=(norm_out_bias, (hidden,), "(H,)"),
        p_out_bias=(p_out_bias, (c_out,), "(D_out,)"),
        g_out_bias=(g_out_bias, (c_out,), "(D_out,)"),
    )
    given = {"p_in": p_in_weight, "g_in": g_in_weight, "p_out": p_out_weight, "g_out": g_out_weight}
    p_in, g_in, p_out, g_out = _complete(given, shapes, key, x.dtype)
    if mask is not None:
        _checks.check_shape("mask", mask, (*mask.shape[:-2], *x.shape[-3:-1]), "(..., N, N) with N of x")
        leading = jnp.broadcast_shapes(x.shape[:-3], mask.shape[:-2])
        x, mask = jnp.broadcast_to(x, leading + x.shape[-3:]), jnp.broadcast_to(mask, leading + mask.shape[-2:])
    b_in = None
    if p_in_bias is not None or g_in_bias is not None:
        b_in = _groups(_vector(p_in_bias, 2 * hidden), _vector(g_in_bias, 2 * hidden))
    update = functools.partial(
        ops.triangle_update,
        x,
        _vector(norm_in_weight, c, 1.0),
        _vector(norm_in_bias, c),
        jnp.moveaxis(_groups(p_in, g_in), -1, 0),
        _vector(norm_out_weight, hidden, 1.0),
        _vector(norm_out_bias, hidden),
        direction=direction,
        mask=mask,
        b_in=b_in,
        gate_after=True,
        epsilon=eps,
        compute_dtype=x.dtype,
        precision=_PRECISIONS[TriMulPrecision(precision)],
        implementation="xla" if fallback else implementation,
    )
    parts = []
    for first in range(0, c_out, c):  # the op's result has as many columns as x
        columns = slice(first, first + c)
        w_gate, w_out = _padded(g_out[columns], c).T, _padded(p_out[columns], c).T
        b_gate, b_out = (None if bias is None else _padded(bias[columns], c) for bias in (g_out_bias, p_out_bias))
        parts.append(update(w_gate, w_out, b_gate=b_gate, b_out=b_out))
    return parts[0] if c_out == c else jnp.concatenate(parts, axis=-1)[..., :c_out]


def triangle_attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    mask: Array | None = None,
    scale: float | Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    *,
    implementation: Implementation | None = None,
) -> list[jax.Array]:
    """Computes triangle attention, as `cuequivariance_jax.triangle_attention` does.

        scores[b, n, h] = scale * q[b, n, h] @ k[b, n, h].T + bias[b, 0, h], and -1e9 where mask[b, n] is 0
        out[b, n, h] = softmax(scores[b, n, h]) @ v[b, n, h]

    A row without a valid key gets the mean of v, as -1e9 in all places has it. The kernels read heads beside their
    channels, so that XLA transposes q, k, v and the result where it cannot compute them that way. Gradients are as
    in `ops.triangle_attention`, or `ops.attention` where Q is not K or N is 1, and keep what those do, transposed.

    Args:
      q: (B, N, H, Q, D), float16, bfloat16 or float32.
      k: (B, N, H, K, D) in the dtype of q.
      v: as k.
      bias: (B, 1, H, Q, K), float16, bfloat16 or float32.
      mask: (B, N, 1, 1, K), bool or integer, nonzero for a valid key; all valid when None.
      scale: factor on the products of q and k; D**-0.5 when None, as in cuequivariance_torch.
      precision: of float32 products, as in `ops.matmul`: None is float32, where cuEquivariance may take TF32.
      implementation: as `pallas_models.ops` has it; cuEquivariance has no such argument.

    Returns:
      A list of the result, (B, N, H, Q, D) in the dtype of q, and, (B, N, H, Q, 1) in float32, the logarithm of
      sum(exp(scores - maximum)) and the maximum of the scores. The latter two have no gradient. XLA computes them
      apart, in the time of another forward pass; under `jax.jit` only where they are used.

    Raises:
      TypeError: q, k, v or `bias` are not floating point, q, k and v not of one dtype, or `mask` is not bool or
        integer.
      ValueError: shapes do not fit.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        _checks.check_float(name, x)
        _checks.check_rank(name, x, 5, "(B, 1, H, Q, K)" if name == "bias" else "(B, N, H, Q or K, D)")
    (b, n, h, queries, d), keys = q.shape, k.shape[3]
    _checks.check_shape("k", k, (b, n, h, keys, d), "(B, N, H, K, D) with B, N, H and D of q")
    _checks.check_shape("v", v, k.shape, "the shape of k")
    _checks.check_shape("bias", bias, (b, 1, h, queries, keys), "(B, 1, H, Q, K)")
    if mask is not None:
        _checks.check_mask("mask", mask, (b, n, 1, 1, keys), "(B, N, 1, 1, K)")
        mask = mask.astype(bool)
    scale = d**-0.5 if scale is None else scale
    out = _attend(
        jnp.swapaxes(q, 2, 3),
        jnp.swapaxes(k, 2, 3),
        jnp.swapaxes(v, 2, 3),
        bias[:, 0],
        None if mask is None else mask[:, :, 0, 0],
        scale=scale,
        precision=precision,
        implementation=implementation,
    )
    out = jnp.swapaxes(out, 2, 3)
    if mask is not None:
        mean = jnp.mean(v, axis=3, keepdims=True, dtype=jnp.float32).astype(out.dtype)
        out = jnp.where(jnp.any(mask, axis=-1, keepdims=True), out, mean)
    still = jax.lax.stop_gradient((q, k, bias))
    return [out, *_statistics(*still, mask, scale, precision=_checks.as_precision(precision))]


def attention_pair_bias(
    single_repr: Array,
    pair_repr: Array,
    mask: Array | None,
    num_heads: int,
    w_ln_a: Array,
    b_ln_a: Array | None,
    w_proj_q: Array,
    b_proj_q: Array | None,
    w_proj_k: Array,
    w_proj_v: Array,
    w_proj_g: Array,
    w_proj_o: Array,
    w_proj_z: Array | None = None,
    b_proj_o: Array | None = None,
    b_proj_z: Array | None = None,
    w_ln_z: Array | None = None,
    b_ln_z: Array | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = False,
    is_cached_z_proj: bool = False,
    *,
    b_proj_k: Array | None = None,
    b_proj_v: Array | None = None,
    w_ln_q: Array | None = None,
    b_ln_q: Array | None = None,
    w_ln_k: Array | None = None,
    b_ln_k: Array | None = None,
    b_proj_g: Array | None = None,
    norm_kind: NormKind = "layer_norm",
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes attention with a bias of pairs, as `cuequivariance_torch.attention_pair_bias` does.

    With a = norm(single_repr) and z = norm(pair_repr) @ w_proj_z.T + b_proj_z:

        q, k, v, g = a @ w.T + b of each;  q = norm(q), k = norm(k) where they have a norm, over all heads at once
        out = (sigmoid(g) * softmax(attn_scale * q @ k.T + z) @ v) @ w_proj_o.T + b_proj_o

    Algorithm 24 of [AlphaFold 3](https://doi.org/10.1038/s41586-024-07487-w) without its conditioning. M single
    representations may share a pair representation. The gradient keeps what the gradients of
    norms, products and attention do, and three float32 arrays of the size of q.

    Args:
      single_repr: (B * M, N, C), float16, bfloat16 or float32; the M of a pair representation one after another.
      pair_repr: (B, N, N, C_z); or z, (B, H, N, N), where `is_cached_z_proj`.
      mask: (B, N) or (B * M, N), bool, integer or float, nonzero for a valid key; all valid when None.
      num_heads: H.
      w_ln_a, b_ln_a: (C,), the norm of single_repr. In this and in all other norms a bias of None is zeros, and a
        weight of None ones.
      w_proj_q, w_proj_k, w_proj_v, w_proj_g: (H * D, C).
      b_proj_q, b_proj_k, b_proj_v, b_proj_g: (H * D,), or None.
      w_proj_o: (C, H * D).
      b_proj_o: (C,), or None.
      w_proj_z: (H, C_z); not looked at where `is_cached_z_proj`.
      b_proj_z: (H,), or None.
      w_ln_z, b_ln_z: (C_z,), the norm of pair_repr.
      inf: not looked at: a masked key has a weight of exactly 0, which 1e6 gives in cuEquivariance.
      eps: added to the variances, or to the means of squares.
      attn_scale: D**-0.5 when None.
      return_z_proj: whether to return z.
      is_cached_z_proj: whether `pair_repr` is the z of another call.
      w_ln_q, b_ln_q, w_ln_k, b_ln_k: (H * D,), the norms of q and of k; there is none where both are None.
      norm_kind: `"layer_norm"`, or `"rms_norm"`, which has no biases.
      implementation: as `pallas_models.ops` has it; cuEquivariance has no such argument.

    Returns:
      The result, (B * M, N, C) in the dtype of single_repr, and z, (B, H, N, N) in the dtype of pair_repr, or None
      unless `return_z_proj`. A query without a valid key has an attention of 0.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit, `w_proj_z` is missing, or an RMS norm has a bias.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    del inf
    _checks.check_float("single_repr", single_repr)
    _checks.check_rank("single_repr", single_repr, 3, "(B * M, N, C)")
    _checks.check_float("pair_repr", pair_repr)
    _checks.check_rank("pair_repr", pair_repr, 4, "(B, H, N, N)" if is_cached_z_proj else "(B, N, N, C_z)")
    _checks.check_float("w_proj_q", w_proj_q)
    (total, n, c), (b, *_, c_z), inner = single_repr.shape, pair_repr.shape, len(w_proj_q)
    if b < 1 or total % b:
        raise ValueError(
            f"single_repr has shape {single_repr.shape}; expected (B * M, N, C) with {b=} of pair_repr"
        )
    if num_heads < 1 or inner % num_heads:
        raise ValueError(f"w_proj_q has shape {w_proj_q.shape}; expected (H * D, C) with {num_heads=}")
    if is_cached_z_proj:
        _checks.check_shape("pair_repr", pair_repr, (b, num_heads, n, n), "(B, H, N, N) with N of single_repr")
    else:
        _checks.check_shape("pair_repr", pair_repr, (b, n, n, c_z), "(B, N, N, C_z) with N of single_repr")
        if w_proj_z is None:
            raise ValueError("w_proj_z is None; expected (H, C_z) without is_cached_z_proj")
        _check_weights(
            w_proj_z=(w_proj_z, (num_heads, c_z), "(H, C_z)"),
            b_proj_z=(b_proj_z, (num_heads,), "(H,)"),
            w_ln_z=(w_ln_z, (c_z,), "(C_z,)"),
            b_ln_z=(b_ln_z, (c_z,), "(C_z,)"),
        )
    projections = {"w_proj_q": w_proj_q, "w_proj_k": w_proj_k, "w_proj_v": w_proj_v, "w_proj_g": w_proj_g}
    vectors = {"b_proj_q": b_proj_q, "b_proj_k": b_proj_k, "b_proj_v": b_proj_v, "b_proj_g": b_proj_g}
    norms = {"w_ln_q": w_ln_q, "b_ln_q": b_ln_q, "w_ln_k": w_ln_k, "b_ln_k": b_ln_k}
    _check_weights(
        **{name: (w, (inner, c), "(H * D, C)") for name, w in projections.items()},
        **{name: (w, (inner,), "(H * D,)") for name, w in (vectors | norms).items()},
        w_proj_o=(w_proj_o, (c, inner), "(C, H * D)"),
        b_proj_o=(b_proj_o, (c,), "(C,)"),
        w_ln_a=(w_ln_a, (c,), "(C,)"),
        b_ln_a=(b_ln_a, (c,), "(C,)"),
    )
    if norm_kind not in ("layer_norm", "rms_norm"):
        raise ValueError(f"{norm_kind=} is unknown; expected 'layer_norm' or 'rms_norm'")
    for name, b_ln in (("b_ln_a", b_ln_a), ("b_ln_q", b_ln_q), ("b_ln_k", b_ln_k), ("b_ln_z", b_ln_z)):
        if norm_kind == "rms_norm" and b_ln is not None:
            raise ValueError(f"{name} has shape {b_ln.shape}; expected None with {norm_kind=}")
    norm = functools.partial(_norm, kind=norm_kind, epsilon=eps, implementation=implementation)
    linear = functools.partial(_linear, implementation=implementation)

    a = norm(single_repr, w_ln_a, b_ln_a)
    bias = None
    if any(vector is not None for vector in vectors.values()):
        bias = jnp.concatenate([_vector(vector, inner) for vector in vectors.values()])
    weight = jnp.concatenate([w.astype(a.dtype) for w in projections.values()])
    q, k, v, gate = jnp.split(linear(a, weight, bias), 4, axis=-1)
    q = q if w_ln_q is None and b_ln_q is None else norm(q, w_ln_q, b_ln_q)
    k = k if w_ln_k is None and b_ln_k is None else norm(k, w_ln_k, b_ln_k)
    z = pair_repr
    if w_proj_z is not None and not is_cached_z_proj:
        z = jnp.moveaxis(linear(norm(pair_repr, w_ln_z, b_ln_z), w_proj_z, b_proj_z), -1, 1)
    if mask is not None:
        if mask.shape not in ((b, n), (total, n)):
            raise ValueError(f"mask has shape {mask.shape}; expected {(b, n)} or {(total, n)}, (B or B * M, N)")
        mask = jnp.broadcast_to(mask.astype(bool).reshape(b, -1, n), (b, total // b, n))
    q, k, v = (x.reshape(b, total // b, n, num_heads, -1) for x in (q, k, v))
    out = _attend(q, k, v, z, mask, scale=attn_scale, precision=None, implementation=implementation)
    gated = jax.nn.sigmoid(gate.astype(jnp.float32)) * out.reshape(gate.shape).astype(jnp.float32)
    return linear(gated.astype(a.dtype), w_proj_o, b_proj_o), jnp.asarray(z) if return_z_proj else None


def _attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    mask: Array | None,
    *,
    scale: float | Array | None,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
) -> jax.Array:
    """Attention of rows that share a bias, which is not copied for them.

    Args:
      q, k, v: (B, rows, Q or K, H, D).
      bias: (B, H, Q, K).
      mask: (B, rows, K), or None.

    Returns:
      (B, rows, Q, H, D).
    """
    options: dict[str, Any] = {"precision": precision, "implementation": implementation}
    if q.shape[1] == 1:
        mask = None if mask is None else mask[:, 0]
        return ops.attention(q[:, 0], k[:, 0], v[:, 0], bias=bias, mask=mask, sm_scale=scale, **options)[:, None]

    def of_one(q: Array, k: Array, v: Array, bias: Array, mask: Array | None) -> jax.Array:
        if q.shape[1] == k.shape[1]:
            options.update(direction="starting", scale=scale)
            return ops.triangle_attention(q, k, v, bias=bias, mask=mask, **options)
        return ops.attention(q, k, v, bias=bias[None], mask=mask, sm_scale=scale, **options)

    # One after another: XLA on a CPU has no products of bfloat16 with more axes of batches than these.
    masks = [None] * len(q) if mask is None else list(mask)
    return jnp.stack([of_one(*each) for each in zip(q, k, v, bias, masks, strict=True)])


@functools.partial(jax.jit, static_argnames=("precision",))
def _statistics(
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array,
    mask: jax.Array | None,
    scale: float | Array,
    *,
    precision: jax.lax.Precision,
) -> tuple[jax.Array, jax.Array]:
    """The logarithm of sum(exp(scores - maximum)) and the maximum of the scores, of one row of pairs at a time."""

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        q, k, mask = row
        q, k = q.astype(jnp.float32) * jnp.asarray(scale, jnp.float32), k.astype(jnp.float32)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision=precision) + bias[:, 0].astype(jnp.float32)
        if mask is not None:
            scores = jnp.where(mask, scores, _MASKED)
        most = jnp.max(scores, axis=-1, keepdims=True)
        return jnp.log(jnp.sum(jnp.exp(scores - most), axis=-1, keepdims=True)), most

    rows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, mask))
    lse, most = jax.lax.map(of_row, rows)
    return jnp.moveaxis(lse, 0, 1), jnp.moveaxis(most, 0, 1)


def _check_weights(**weights: tuple[Array | None, tuple[int, ...], str]) -> None:
    """Checks the weights that are not None, each by its name with the expected shape and its axes."""
    for name, (weight, shape, axes) in weights.items():
        if weight is not None:
            _checks.check_float(name, weight)
            _checks.check_shape(name, weight, shape, axes)


def _rows(*weights: Array | None, default: int) -> int:
    """The rows of the first of the weights that is given."""
    return next((len(weight) for weight in weights if weight is not None), default)


def _complete(
    given: Mapping[str, Array | None],
    shapes: Mapping[str, tuple[int, ...]],
    key: jax.Array | None,
    dtype: jnp.dtype,
) -> list[jax.Array]:
    """The weights in `dtype`, those that are not given drawn with a key of their own."""
    missing = [f"{name}_weight" for name, weight in given.items() if weight is None]
    if missing and key is None:
        raise ValueError(f"{', '.join(missing)} and key are None; expected one or the other")
    keys = [None] * len(given) if key is None else jax.random.split(key, len(given))
    each = zip(given.values(), keys, shapes.values(), strict=True)
    return [_INITIAL(key, shape, dtype) if w is None else jnp.asarray(w, dtype) for w, key, shape in each]


def _vector(given: Array | None, size: int, value: float = 0.0) -> Array:
    """The vector in float32, or one of `value` where there is none."""
    return jnp.full(size, value, jnp.float32) if given is None else given.astype(jnp.float32)


def _groups(p: Array, g: Array) -> jax.Array:
    """Rows of projections and of gates, (2H, ...), as left, its gate, right and its gate, (4, H, ...)."""
    return jnp.stack([x.reshape(2, len(x) // 2, *x.shape[1:]) for x in (p, g)], axis=1).reshape(
        4, -1, *p.shape[1:]
    )


def _padded(weight: Array, rows: int) -> jax.Array:
    """The weight with zeros after it, up to so many rows."""
    return jnp.pad(weight, [(0, rows - len(weight))] + [(0, 0)] * (weight.ndim - 1))


def _norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    kind: NormKind,
    epsilon: float,
    implementation: Implementation | None,
) -> jax.Array:
    weight = _vector(weight, x.shape[-1], 1.0)
    if kind == "rms_norm":
        return ops.rms_norm(x, weight, epsilon=epsilon, implementation=implementation)
    bias = _vector(bias, x.shape[-1])
    return ops.layer_norm(x, weight, bias, epsilon=epsilon, implementation=implementation)


def _linear(
    x: jax.Array, weight: Array, bias: Array | None, *, implementation: Implementation | None
) -> jax.Array:
    """torch's linear layer, in the dtype of x."""
    return ops.matmul(x, weight.astype(x.dtype), transpose_w=True, bias=bias, implementation=implementation)
