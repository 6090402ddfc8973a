"""What follows attention in a post-norm transformer layer: projection and MLP, each with residual and norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models import target as targets
from pallas_models._implementation import Implementation
from pallas_models.dispatch.derivatives import differentiated_as
from pallas_models.dispatch.legacy import Op, run, serves
from pallas_models.dispatch.records import Kernel
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.attention import Form as AttentionForm
from pallas_models.kernels.forms.matmul import Form as MatmulForm
from pallas_models.kernels.forms.matmul_layer_norm import Form as NormForm
from pallas_models.kernels.mosaic import post_norm_mlp as mosaic
from pallas_models.kernels.mosaic.matmul_layer_norm import fills
from pallas_models.kernels.triton import attention_matmul_layer_norm as triton
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.activations import Activation
from pallas_models.ops.attention import attention_qkv
from pallas_models.ops.attention import reference as attention_reference
from pallas_models.ops.matmul import matmul
from pallas_models.ops.matmul import reference as matmul_reference
from pallas_models.ops.matmul_layer_norm import matmul_layer_norm
from pallas_models.ops.matmul_layer_norm import reference as norm_reference
from pallas_models.target import AMPERE_ON, HOPPER


def post_norm_mlp(
    y: Array,
    x: Array,
    w_out: Array,
    w_up: Array,
    w_down: Array,
    *,
    scale_out: Array,
    offset_out: Array,
    scale: Array,
    offset: Array,
    bias_out: Array | None = None,
    bias_up: Array | None = None,
    bias_down: Array | None = None,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    attention: Mapping[str, Any] | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes what follows attention in a layer whose norms come last, such as BERT's:

        z = layer_norm(y @ w_out + bias_out + x) * scale_out + offset_out
        layer_norm(activation(z @ w_up + bias_up) @ w_down + bias_down + z) * scale + offset

    On Hopper, where rows fill its multiprocessors, one kernel keeps `z` and the hidden values on chip; they are
    rounded to the dtype of `x` all the same. Elsewhere, and where it is differentiated, it is `matmul_layer_norm`,
    `matmul` and `matmul_layer_norm` again. Attention of heads of 32 within 64 or 128 tokens is in that kernel too
    where it has a mask or segments at most; of up to 128 tokens in all, one of Triton's has it and the product
    with `w_out`.

    Args:
      y: (..., K), the result of attention; float16, bfloat16 or float32. With `attention` (B, S, 3 K), the
        `qkv` of `attention_qkv`.
      x: (..., N), what the layer began with, in the dtype of `y`.
      w_out: (K, N), the dtype of `y`; so are `w_up` (N, F) and `w_down` (F, N).
      scale_out, offset_out: (N,), of the first norm, any float dtype; `scale` and `offset` of the second.
      bias_out, bias_up, bias_down: (N,), (F,) and (N,), any float dtype, or None.
      activation: as in `matmul`.
      epsilon: added to variances.
      attention: the other arguments of `attention_qkv`, whose result then takes the place of `y`; what it gives
        for tokens that a `mask` rules out is without meaning.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves in one kernel
        half precisions, all biases, rows in multiples of 8, K and N of 128, 256 or 384 alike, and F in multiples
        of N; with `attention`, JAX 0.11 or newer, and N from 256 on for 64 tokens, of 384 for 128. Other calls are
        served in those that it stands for.

    Returns:
      (..., N) in the dtype of `y`.

    Raises:
      TypeError: an operand is not floating point, or `y`, `x` and the weights differ in dtype.
      ValueError: shapes do not fit, `activation` is unknown, or `attention` asks for a second result.
      NotImplementedError: the kernels that `implementation` names do not serve the call.
    """
    _checks.check_float("y", y)
    for name, w, axes in (("w_out", w_out, "(K, N)"), ("w_up", w_up, "(N, F)"), ("w_down", w_down, "(F, N)")):
        if w.dtype != y.dtype:
            raise TypeError(f"y has dtype {y.dtype} and {name} has dtype {w.dtype}; expected the same")
        _checks.check_rank(name, w, 2, axes)
    if attention is not None:
        _checks.check_rank("y", y, 3, "(B, S, 3 * K)")
    elif y.ndim < 1:
        raise ValueError(f"y has shape {y.shape}; expected (..., K)")
    k, (n, f) = y.shape[-1] // (1 if attention is None else 3), w_up.shape
    _checks.check_shape("w_out", w_out, (k, n), f"(K, N) with the K of y {y.shape} and the N of w_up")
    _checks.check_shape("w_down", w_down, (f, n), f"(F, N) for w_up {w_up.shape}")
    _checks.check_shape("x", x, (*y.shape[:-1], n), "that of the result")
    if x.dtype != y.dtype:
        raise TypeError(f"y has dtype {y.dtype} and x has dtype {x.dtype}; expected the same")
    for name, vector, size in (
        ("scale_out", scale_out, n),
        ("offset_out", offset_out, n),
        ("scale", scale, n),
        ("offset", offset, n),
        ("bias_out", bias_out, n),
        ("bias_up", bias_up, f),
        ("bias_down", bias_down, n),
    ):
        if vector is not None:
            _checks.check_float(name, vector)
            _checks.check_shape(name, vector, (size,), "(F,)" if name == "bias_up" else "(N,)")
    activations.check_activation(activation)
    named: dict[str, Any] = dict(precision=precision, implementation=implementation)
    static: dict[str, Any] = dict(
        activation=activation, epsilon=epsilon, precision=_checks.as_precision(precision)
    )
    weights: dict[str, Any] = dict(w_out=w_out, bias_out=bias_out, scale_out=scale_out, offset_out=offset_out)
    weights |= dict(w_up=w_up, bias_up=bias_up, w_down=w_down, bias_down=bias_down, scale=scale, offset=offset)
    rows = math.prod(y.shape[:-1])

    def pays(op: Op, *arrays: Any, **static: Any) -> bool:
        """Whether a kernel serves the call and is given enough rows.

        How many those are is not in the records, so that what a device has of them runs in the kernel too.
        """
        served = serves(op, *arrays, implementation=implementation, **static)
        return served and (implementation is not None or fills(rows, targets.current()))

    def in_one(op: Op, other: Any, *arrays: Any, **static: Any) -> jax.Array:
        """`op` in a kernel that serves it; where it is differentiated `other`."""

        def together(*arrays: Any) -> jax.Array:
            return run(op, *arrays, implementation=implementation, **static)

        return differentiated_as(together, other)(*arrays)

    def end(z: Any, w_up: Any, bias_up: Any, w_down: Any, bias_down: Any, scale: Any, offset: Any) -> jax.Array:
        hidden = matmul(z, w_up, bias=bias_up, activation=activation, **named)
        return matmul_layer_norm(
            hidden, w_down, scale, offset, bias=bias_down, residual=z, epsilon=epsilon, **named
        )

    if attention is not None:
        given = {name: value for name, value in attention.items() if value is not None and value is not False}
        if "return_lse" in given:
            raise ValueError("attention has return_lse=True; expected arguments that leave one result")
        of_tokens = [name for name in ("mask", "segment_ids") if name in given]

        def attended(y: Any, ids: Any, x: Any, *values: Any) -> jax.Array:
            y = attention_qkv(y, **named | given | ({} if ids is None else {of_tokens[0]: ids}))
            rest: dict[str, Any] = dict(activation=activation, epsilon=epsilon) | named
            return post_norm_mlp(y, x, **dict(zip(weights, values, strict=True)), **rest)

        if len(of_tokens) > 1 or given.keys() != {"num_heads", *of_tokens}:
            return attended(y, None, x, *weights.values())
        ids = None
        if "mask" in given:
            _checks.check_mask("mask", given["mask"], x.shape[:2], "(B, S)")
            ids = jnp.asarray(given["mask"], bool).astype(jnp.int32)
        elif "segment_ids" in given:
            _checks.check_integer("segment_ids", given["segment_ids"])
            _checks.check_shape("segment_ids", given["segment_ids"], x.shape[:2], "(B, S)")
            ids = given["segment_ids"]
        arrays, heads = (y, ids, x, *weights.values()), dict(num_heads=given["num_heads"])
        if pays(_ATTENDING, *arrays, **heads, **static):
            return in_one(_ATTENDING, attended, *arrays, **heads, **static)
        projecting: dict[str, Any] = heads | dict(epsilon=epsilon, precision=static["precision"])
        mask, segment_ids = (ids if name in given else None for name in ("mask", "segment_ids"))
        first = (y, mask, segment_ids, x, w_out, bias_out, scale_out, offset_out)
        if not serves(_PROJECTING, *first, implementation=implementation, **projecting):
            return attended(*arrays)

        def projected(qkv: Any, mask: Any, segment_ids: Any, x: Any, w: Any, bias: Any, *norm: Any) -> jax.Array:
            y = attention_qkv(qkv, mask=mask, segment_ids=segment_ids, **heads, **named)
            return matmul_layer_norm(y, w, *norm, bias=bias, residual=x, epsilon=epsilon, **named)

        return end(in_one(_PROJECTING, projected, *first, **projecting), *list(weights.values())[4:])

    def apart(
        y: Any, x: Any, w_out: Any, bias_out: Any, scale_out: Any, offset_out: Any, *others: Any
    ) -> jax.Array:
        z = matmul_layer_norm(y, w_out, scale_out, offset_out, bias=bias_out, residual=x, epsilon=epsilon, **named)
        return end(z, *others)

    arrays = (y.reshape(rows, k), x.reshape(rows, n), *weights.values())
    one = pays(_OP, *arrays, **static)
    return (in_one(_OP, apart, *arrays, **static) if one else apart(*arrays)).reshape(x.shape)


def reference(
    y: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    bias_out: jax.Array | None,
    scale_out: jax.Array,
    offset_out: jax.Array,
    w_up: jax.Array,
    bias_up: jax.Array | None,
    w_down: jax.Array,
    bias_down: jax.Array | None,
    scale: jax.Array,
    offset: jax.Array,
    *,
    activation: Activation,
    epsilon: float,
    precision: jax.lax.Precision,
) -> jax.Array:
    """The same in plain XLA, for y (M, K) and x (M, N)."""
    options: dict[str, Any] = dict(epsilon=epsilon, precision=precision)
    z = norm_reference(
        NormForm(x=y, w=w_out, scale=scale_out, offset=offset_out, bias=bias_out, residual=x, **options)
    )
    hidden = matmul_reference(
        MatmulForm(x=z, w=w_up, bias=bias_up, activation=activation, precision=precision, out_dtype=z.dtype)
    )
    out = norm_reference(
        NormForm(x=hidden, w=w_down, scale=scale, offset=offset, bias=bias_down, residual=z, **options)
    )
    assert isinstance(out, jax.Array)
    return out


_OP = Op(
    name="post_norm_mlp",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.post_norm_mlp,
            config=None,
            refuses=mosaic.unsupported,
        ),
    ),
    sharding=Sharding(equation="m K, m N, K N, N, N, N, N F, F, F N, N, N, N -> m N"),
)


def _attend(
    qkv: jax.Array,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    *,
    num_heads: int,
    precision: jax.lax.Precision,
) -> jax.Array:
    """What tokens attend to, in plain XLA: (B * S, K) for qkv (B, S, 3 K)."""
    k = qkv.shape[2] // 3
    head_dim = k // num_heads
    form = AttentionForm(
        qkv=(qkv,),
        mask=mask,
        segment_ids=segment_ids,
        kv_segment_ids=segment_ids,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        sm_scale=head_dim**-0.5,
        precision=precision,
    )
    y: Any = attention_reference(form)
    return y.reshape(-1, k)


def _projecting_reference(
    qkv: jax.Array,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    residual: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array,
    offset: jax.Array,
    *,
    num_heads: int,
    epsilon: float,
    precision: jax.lax.Precision,
) -> jax.Array:
    y = _attend(qkv, mask, segment_ids, num_heads=num_heads, precision=precision)
    rows = residual.reshape(-1, residual.shape[2])
    out = norm_reference(
        NormForm(
            x=y, w=w, scale=scale, offset=offset, bias=bias, residual=rows, epsilon=epsilon, precision=precision
        )
    )
    assert isinstance(out, jax.Array)
    return out.reshape(residual.shape)


_PROJECTING = Op(
    name="attention_matmul_layer_norm",
    reference=_projecting_reference,
    kernels=(
        Kernel(
            backend="triton",
            architectures=AMPERE_ON,
            call=triton.attention_matmul_layer_norm,
            config=None,
            refuses=triton.unsupported,
            preferred=triton.prefer,
        ),
    ),
    sharding=Sharding(equation="b S Q, b S, b S, b S N, K N, N, N, N -> b S N"),
)


def _attending_reference(
    qkv: jax.Array, ids: jax.Array | None, x: jax.Array, *weights: Any, num_heads: int, **static: Any
) -> jax.Array:
    y = _attend(qkv, None, ids, num_heads=num_heads, precision=static["precision"])
    return reference(y, x.reshape(-1, x.shape[2]), *weights, **static).reshape(x.shape)


_ATTENDING = Op(
    name="attention_post_norm_mlp",
    reference=_attending_reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.attention_post_norm_mlp,
            config=None,
            refuses=mosaic.unsupported_attention,
        ),
    ),
    sharding=Sharding(equation="b S Q, b S, b S N, K N, N, N, N, N F, F, F N, N, N, N -> b S N"),
)
