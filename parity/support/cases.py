"""One small call of every op, for tests of what all ops have in common; none of them needs torch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import ops
from pallas_models.kernels.mosaic import matmul
from pallas_models.kernels.mosaic import matmul_layer_norm_cluster as cluster
from pallas_models.kernels.triton import matmul_layer_norm as fused
from pallas_models.kernels.triton import softmax
from parity.support.common import array, normal, random_mask


@dataclasses.dataclass(frozen=True)
class Call:
    """`function(*arrays, implementation=...)`; the first `floats` arrays can be differentiated.

    The first axis of `arrays[i]` for i in `batched` is a batch: it can be mapped over.
    """

    name: str
    function: Callable[..., jax.Array]
    make: Callable[[int, str], tuple[jax.Array, ...]]
    floats: int
    batched: tuple[int, ...] = (0,)

    def arrays(self, dtype: str = "float32", size: int = 1) -> tuple[jax.Array, ...]:
        """Random operands; `size` multiplies the odd sizes, so that size 16 needs no masks."""
        return self.make(size, dtype)

    def __call__(self, implementation: str | None, **options: Any) -> Callable[..., jax.Array]:
        return lambda *arrays: self.function(*arrays, implementation=implementation, **options)


def _sizes(size: int) -> tuple[int, int, int, int]:
    """batch, tokens, inputs, outputs: odd, or multiples of 16."""
    return (2, 7, 33, 21) if size == 1 else (2, 4 * size, 2 * size, 4 * size)


def _linear(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, n = _sizes(size)
    rng = np.random.default_rng(20)
    return (
        normal(rng, b, s, k, dtype=dtype),
        normal(rng, b, s, n, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=0.5),
    )


def _linear_norm(size: int, dtype: str) -> tuple[jax.Array, ...]:
    n = _sizes(size)[-1]
    rng = np.random.default_rng(21)
    return (
        *_linear(size, dtype),
        normal(rng, n, dtype=dtype, shift=1, scale=0.3),
        normal(rng, n, dtype=dtype),
    )


def _batched_linear(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, n = _sizes(size)
    rng = np.random.default_rng(27)
    return normal(rng, b, s, k, dtype=dtype), normal(rng, b, n, k, dtype=dtype, scale=k**-0.5)


def _gated(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, n = _sizes(size)
    rng = np.random.default_rng(28)
    return (
        normal(rng, b, s, k, dtype=dtype),
        normal(rng, k, 2, n, dtype=dtype, scale=k**-0.5),
        normal(rng, 2, n, dtype=dtype, shift=0.5),
    )


def _norm(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, _, n = _sizes(size)
    rng = np.random.default_rng(22)
    return (
        normal(rng, b, s, n, dtype=dtype),
        normal(rng, b, s, n, dtype=dtype),
        normal(rng, n, dtype=dtype, shift=1, scale=0.3),
        normal(rng, n, dtype=dtype),
    )


def _rms_norm(size: int, dtype: str) -> tuple[jax.Array, ...]:
    return _norm(size, dtype)[:3]


def _attention(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, _ = _sizes(size)
    rng = np.random.default_rng(29)
    d = 48 if size == 1 else 32
    return (
        normal(rng, b, s, 4, d, dtype=dtype),
        *(normal(rng, b, k, 2, d, dtype=dtype) for _ in range(2)),
        normal(rng, 1, 4, s, k, dtype=dtype),
        random_mask(rng, b, k),
        *(array(rng.integers(0, 2, (b, n)), "int32") for n in (s, k)),
    )


def _attention_qkv(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, _, _ = _sizes(size)
    rng = np.random.default_rng(23)
    return normal(rng, b, s, 3 * 2 * (48 if size == 1 else 32), dtype=dtype), random_mask(rng, b, s)


def _attention_matmul_layer_norm(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, n, f = (2, 5, 32, 24) if size == 1 else (2, 40, 96, 64)
    rng = np.random.default_rng(44)
    tokens = (normal(rng, b, s, width, dtype=dtype) for width in (3 * n, n))
    weights = (normal(rng, *shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in ((n, n), (n, f), (f, n)))
    vectors = (normal(rng, n, dtype=dtype, shift=shift) for shift in (1.0, 0.0))
    return *tokens, *weights, *vectors, random_mask(rng, b, s)


def _pooling(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, _, n = _sizes(size)
    rng = np.random.default_rng(24)
    return normal(rng, b, s, n, dtype=dtype), random_mask(rng, b, s)


def _segments(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, _, n = _sizes(size)
    rng = np.random.default_rng(32)
    ends = np.sort(rng.integers(0, s, (b, 3)))
    places = 4 * np.arange(b)[:, None] + np.sum(np.arange(s) >= ends[..., None], axis=1)
    return normal(rng, b, s, n, dtype=dtype), array(np.where(places % 4 == 3, -1, places), "int32")


def _triangle_update(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, c, h = _sizes(size)
    rng = np.random.default_rng(27)
    return (
        normal(rng, b, s, s, c, dtype=dtype),
        normal(rng, c, dtype=dtype, shift=1, scale=0.3),
        normal(rng, c, dtype=dtype),
        normal(rng, c, 4, h, dtype=dtype, scale=c**-0.5),
        normal(rng, 4, h, dtype=dtype),
        normal(rng, h, dtype=dtype, shift=1, scale=0.3),
        normal(rng, h, dtype=dtype),
        normal(rng, c, c, dtype=dtype, scale=c**-0.5),
        normal(rng, c, dtype=dtype),
        normal(rng, h, c, dtype=dtype, scale=h**-0.5),
        normal(rng, c, dtype=dtype),
        array(rng.integers(0, 2, (b, s, s)), "int32"),
    )


def _softmax(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, _ = _sizes(size)
    rng = np.random.default_rng(26)
    return normal(rng, b, s, k, dtype=dtype, scale=2.0), random_mask(rng, b, k)


def _rotary(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, _ = _sizes(size)
    rng = np.random.default_rng(27)
    head_dim = 2 * (k // 2)
    return (
        normal(rng, b, s, (3 + 2 * 2) * head_dim, dtype=dtype),
        *(normal(rng, b, s, head_dim // 2) for _ in range(2)),
        *(normal(rng, head_dim, dtype=dtype, shift=1, scale=0.3) for _ in range(2)),
    )


def _embedding(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, _, n = _sizes(size)
    rng = np.random.default_rng(25)
    return (
        normal(rng, 50, n, dtype=dtype),
        normal(rng, s + 2, n, dtype=dtype),
        normal(rng, 3, n, dtype=dtype),
        normal(rng, n, dtype=dtype, shift=1, scale=0.3),
        normal(rng, n, dtype=dtype),
        array(rng.integers(0, 50, (b, s)), "int32"),
        array(rng.integers(0, 3, (b, s)), "int32"),
    )


def _vocabulary(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, k, n = _sizes(size)
    rng = np.random.default_rng(30)
    return (
        normal(rng, b, s, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype),
        normal(rng, b, s, dtype=dtype, shift=1, scale=0.3),
        array(rng.integers(0, n, (b, s)), "int32"),
    )


def _call_matmul(x, residual, w, bias, **options):
    return ops.matmul(x, w, bias=bias, residual=residual, activation="gelu", **options)


def _call_split_matmul(x, residual, w, bias, **options):
    return _call_matmul(x, residual, w, bias, algorithm="split_k", **options)


def _call_segment_mean_pool(x, ids, **options):
    return ops.segment_mean_pool(x, ids, num_segments=4 * len(x), **options)


def _call_batched_matmul(x, w, **options):
    return ops.matmul(x, w, transpose_w=True, **options)


def _call_gated_matmul(x, w_gate_up, bias, **options):
    return ops.gated_matmul(x, w_gate_up, bias=bias, **options)


def _call_matmul_layer_norm(x, residual, w, bias, scale, offset, **options):
    return ops.matmul_layer_norm(x, w, scale, offset, bias=bias, residual=residual, epsilon=0.1, **options)


def _call_fused_matmul_layer_norm(x, residual, w, bias, scale, offset, **options):
    config = fused.Config(block_m=16, block_n=-(-w.shape[1] // 16) * 16, block_k=32, num_warps=4, num_stages=2)
    return _call_matmul_layer_norm(x, residual, w, bias, scale, offset, config=config, **options)


def _call_layer_norm(x, residual, scale, bias, **options):
    return ops.layer_norm(x, scale, bias, residual=residual, epsilon=0.1, **options)


def _call_rms_norm(x, residual, scale, **options):
    return ops.rms_norm(x, scale, residual=residual, epsilon=0.1, **options)


def _call_rms_norm_residual(x, residual, scale, **options):
    # The tests take one array from every op.
    return jnp.concatenate(
        ops.rms_norm(x, scale, residual=residual, return_residual=True, epsilon=0.1, **options), axis=-1
    )


def _call_attention(q, k, v, bias, mask, ids, kv_ids, **options):
    masks = dict(mask=mask, segment_ids=ids, kv_segment_ids=kv_ids, causal=True, window=30)
    return ops.attention(q, k, v, bias=bias, **masks, **options)


def _call_attention_qkv(qkv, mask, **options):
    return ops.attention_qkv(qkv, num_heads=2, mask=mask, **options)


def _call_attention_matmul_layer_norm(qkv, x, w_out, w_up, w_down, scale, offset, mask, **options):
    norms = dict(scale_out=scale, offset_out=offset, scale=scale, offset=offset)
    attention = dict(num_heads=x.shape[-1] // 32, mask=mask)
    return ops.post_norm_mlp(qkv, x, w_out, w_up, w_down, **norms, attention=attention, **options)


def _call_softmax(x, mask, **options):
    return ops.softmax(x, where=mask[:, None, :], scale=0.5, **options)


def _call_split_softmax(x, mask, **options):
    config = softmax.Config(block_m=4, block_n=16, num_warps=1, splits=2)
    return _call_softmax(x, mask, algorithm="online", config=config, **options)


def _call_rotary(qkv, cos, sin, q_scale, k_scale, **options):
    scales = dict(q_scale=q_scale, k_scale=k_scale)
    return ops.rotary(qkv, cos, sin, num_heads=3, num_kv_heads=2, **scales, epsilon=0.1, **options)


def _call_embed_tokens(word, position, token_type, scale, bias, ids, types, **options):
    return ops.embed_tokens(
        ids, word, position, token_type, scale, bias, token_type_ids=types, epsilon=0.1, **options
    )


def _call_linear_cross_entropy(x, w, bias, weights, labels, **options):
    options = dict(bias=bias, weights=weights, label_smoothing=0.1, reduction=None) | options
    return ops.linear_cross_entropy(x, w, labels, **options)


def _call_mean_linear_cross_entropy(x, w, bias, weights, labels, **options):
    mean = _call_linear_cross_entropy(x, w, bias, weights, labels, reduction="mean", **options)
    return jnp.broadcast_to(mean, labels.shape)  # the tests ask for the axes of the operands


def _call_triangle_update(x, *weights_and_mask, **options):
    norm_scale, norm_bias, w_in, b_in, out_scale, out_bias, w_gate, b_gate, w_out, b_out, mask = weights_and_mask
    biases = dict(b_in=b_in, b_gate=b_gate, b_out=b_out)
    operands = (x, norm_scale, norm_bias, w_in, out_scale, out_bias, w_gate, w_out)
    form = dict(direction="incoming", gate_after=True, epsilon=0.1, compute_dtype=x.dtype)
    return ops.triangle_update(*operands, mask=mask, **biases, **form, **options)


CALLS = [
    Call("matmul", _call_matmul, _linear, 4, (0, 1)),
    Call("matmul_split", _call_split_matmul, _linear, 4, (0, 1)),
    Call("matmul_batched", _call_batched_matmul, _batched_linear, 2, (0, 1)),
    Call("gated_matmul", _call_gated_matmul, _gated, 3),
    Call("matmul_layer_norm", _call_matmul_layer_norm, _linear_norm, 6, (0, 1)),
    Call("matmul_layer_norm_fused", _call_fused_matmul_layer_norm, _linear_norm, 6, (0, 1)),
    Call("layer_norm", _call_layer_norm, _norm, 4, (0, 1)),
    Call("rms_norm", _call_rms_norm, _rms_norm, 3, (0, 1)),
    Call("rms_norm_residual", _call_rms_norm_residual, _rms_norm, 3, (0, 1)),
    Call("attention", _call_attention, _attention, 4, (0, 1, 2, 4, 5, 6)),
    Call("attention_qkv", _call_attention_qkv, _attention_qkv, 1, (0, 1)),
    Call(
        "attention_matmul_layer_norm",
        _call_attention_matmul_layer_norm,
        _attention_matmul_layer_norm,
        7,
        (0, 1, 7),
    ),
    Call("embed_tokens", _call_embed_tokens, _embedding, 5, (5, 6)),
    Call("softmax", _call_softmax, _softmax, 1, (0, 1)),
    Call("softmax_split", _call_split_softmax, _softmax, 1, (0, 1)),
    Call("rotary", _call_rotary, _rotary, 5, (0, 1, 2)),
    Call("mean_pool", ops.mean_pool, _pooling, 1, (0, 1)),
    Call("segment_mean_pool", _call_segment_mean_pool, _segments, 1, (0, 1)),
    Call("linear_cross_entropy", _call_linear_cross_entropy, _vocabulary, 4, (0, 3, 4)),
    Call("linear_cross_entropy_mean", _call_mean_linear_cross_entropy, _vocabulary, 4, (0, 3, 4)),
    Call("triangle_update", _call_triangle_update, _triangle_update, 11, (0, 11)),
]


def _hopper_product(seed: int, dtype: str, m: int, k: int, n: int, *shifts: float) -> tuple[jax.Array, ...]:
    """Rows, a residual, a matrix, and a vector for each mean."""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, m, n, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        *(normal(rng, n, dtype=dtype, shift=shift) for shift in shifts),
    )


def _hopper_matmul(size: int, dtype: str) -> tuple[jax.Array, ...]:
    return _hopper_product(31, dtype, *((72, 192, 320) if size == 1 else (128, 128, 256)), 0.5)


def _hopper_matmul_resident(size: int, dtype: str) -> tuple[jax.Array, ...]:
    """Several tiles for each CTA of an H200."""
    return _hopper_product(44, dtype, *((392, 192, 2112) if size == 1 else (384, 128, 2112)), 0.5)


def _hopper_matmul_layer_norm(size: int, dtype: str) -> tuple[jax.Array, ...]:
    return _hopper_product(36, dtype, *((72, 192, 128) if size == 1 else (128, 128, 384)), 0.5, 1.0, 0.0)


def _hopper_gated(size: int, dtype: str) -> tuple[jax.Array, ...]:
    m, k, n = (72, 192, 192) if size == 1 else (128, 128, 256)
    rng = np.random.default_rng(32)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, 2, n, dtype=dtype, scale=k**-0.5),
        normal(rng, 2, n, dtype=dtype, shift=0.5),
    )


def _hopper_attention(size: int, dtype: str) -> tuple[jax.Array, ...]:
    seq, kv_seq, head_dim = (131, 205, 64) if size == 1 else (256, 256, 128)
    rng = np.random.default_rng(33)
    q = normal(rng, 2, seq, 4, head_dim, dtype=dtype)
    return q, *(normal(rng, 2, kv_seq, 2, head_dim, dtype=dtype) for _ in range(2))


def _hopper_attention_qkv(size: int, dtype: str) -> tuple[jax.Array, ...]:
    seq, head_dim = (131, 64) if size == 1 else (256, 128)
    return (normal(np.random.default_rng(34), 2, seq, 3 * 2 * head_dim, dtype=dtype),)


def _hopper_attention_resident(size: int, dtype: str) -> tuple[jax.Array, ...]:
    seq, rng = (64 if size == 1 else 320), np.random.default_rng(42)
    mask = array(np.arange(seq) < np.array([[seq], [seq // 3]]), "int32")
    return normal(rng, 2, seq, 3 * 2 * 32, dtype=dtype), mask


def _hopper_triangle(size: int, dtype: str, c: int = 128) -> tuple[jax.Array, ...]:
    b, n, h = (1, 64, 32) if size == 1 else (2, 128, 128)
    rng = np.random.default_rng(35)
    shapes = ((c,), (c,), (c, 4, h), (4, h), (h,), (h,), (c, c), (c,), (h, c), (c,))
    weights = (normal(rng, *shape, dtype=dtype, scale=c**-0.5) for shape in shapes)
    return normal(rng, b, n, n, c, dtype=dtype), *weights, array(rng.integers(0, 2, (b, n, n)), "int32")


def _hopper_wide_triangle(size: int, dtype: str) -> tuple[jax.Array, ...]:
    return _hopper_triangle(size, dtype, 256)


def _call_hopper_attention(q, k, v, **options):
    return ops.attention(q, k, v, causal=True, window=70, **options)


def _call_hopper_attention_qkv(qkv, **options):
    return ops.attention_qkv(qkv, num_heads=2, **options)


def _call_hopper_linear(x, w, bias, **options):
    """Without an activation, whose gradient has a kernel."""
    return ops.matmul(x, w, bias=bias, **options)


def _hopper_linear(size: int, dtype: str) -> tuple[jax.Array, ...]:
    x, _, w, bias = _hopper_matmul(size, dtype)
    return x, w, bias


def _call_hopper_mlp(x, w_up, bias_up, w_down, bias_down, **options):
    return ops.mlp(x, w_up, w_down, bias_up=bias_up, bias_down=bias_down, activation="gelu", **options)


def _hopper_mlp(size: int, dtype: str) -> tuple[jax.Array, ...]:
    m, k, n, d = (200, 192, 320, 128) if size == 1 else (256, 128, 256, 128)
    rng = np.random.default_rng(37)
    up, down = (normal(rng, *shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in ((k, n), (n, d)))
    bias_up, bias_down = (normal(rng, width, dtype=dtype, shift=0.5) for width in (n, d))
    return normal(rng, m, k, dtype=dtype), up, bias_up, down, bias_down


POST_NORM_MLP = (
    *("y", "x", "w_out", "bias_out", "scale_out", "offset_out"),
    *("w_up", "bias_up", "w_down", "bias_down", "scale", "offset"),
)


def _call_post_norm_mlp(*arrays, **options):
    return ops.post_norm_mlp(**dict(zip(POST_NORM_MLP, arrays, strict=True)), epsilon=0.1, **options)


def _hopper_post_norm_mlp(size: int, dtype: str) -> tuple[jax.Array, ...]:
    m, n, f = (72, 128, 128) if size == 1 else (192, 128, 256)
    rng = np.random.default_rng(39)
    shapes = ((m, n), (m, n), (n, n), (n,), (n,), (n,), (n, f), (f,), (f, n), (n,), (n,), (n,))
    return tuple(
        normal(rng, *shape, dtype=dtype, scale=n**-0.5 if name[0] == "w" else 1.0, shift=float("scale" in name))
        for name, shape in zip(POST_NORM_MLP, shapes, strict=True)
    )


LAYER = ("w_qkv", "bias_qkv", *POST_NORM_MLP[2:])


def layer(rng: np.random.Generator, n: int, f: int, dtype: str, factor: float = 1.0) -> dict[str, jax.Array]:
    """One of `ops.post_norm_layers`, with weights larger by a factor."""
    shapes = {"w_qkv": (n, 3 * n), "bias_qkv": (3 * n,), "w_out": (n, n), "w_up": (n, f), "bias_up": (f,)}
    shapes = dict.fromkeys(LAYER, (n,)) | shapes | {"w_down": (f, n)}

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name[0] == "w":
            return normal(rng, *shape, dtype=dtype, scale=factor * shape[0] ** -0.5)
        return normal(rng, *shape, shift=float("scale" in name), scale=0.3)

    return {name: draw(name, shapes[name]) for name in LAYER}


def _call_post_norm_layers(x, *layer_and_mask, implementation):
    """Where it is differentiated it is kernels of both backends."""
    *arrays, mask = layer_and_mask
    layers = [dict(zip(LAYER, arrays, strict=True))] * 3
    options = dict(num_heads=x.shape[-1] // 32, epsilon=0.1, implementation=(implementation, "triton"))
    return ops.post_norm_layers(x, layers, mask=mask, **options)


def _hopper_post_norm_layers(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, n = (2, 4, 128) if size == 1 else (1, 16, 384)
    rng = np.random.default_rng(43)
    return normal(rng, b, s, n, dtype=dtype), *layer(rng, n, 4 * n, dtype).values(), random_mask(rng, b, s)


def _call_attention_post_norm_mlp(*arrays, implementation, **options):
    """For the gradient attention is Triton's."""
    *arrays, ids = arrays
    options["attention"] = dict(num_heads=8, segment_ids=ids)
    return _call_post_norm_mlp(*arrays, implementation=(implementation, "triton"), **options)


def _hopper_attention_post_norm_mlp(size: int, dtype: str) -> tuple[jax.Array, ...]:
    b, s, n = (1 if size == 1 else 3), 64, 256
    rng = np.random.default_rng(43)
    shapes = ((b, s, 3 * n), (b, s, n), (n, n), (n,), (n,), (n,), (n, n), (n,), (n, n), (n,), (n,), (n,))
    arrays = (normal(rng, *shape, dtype=dtype, scale=n**-0.5 if len(shape) == 2 else 1.0) for shape in shapes)
    return *arrays, array(np.sort(rng.integers(0, 9, (b, s)), 1), "int32")


def _call_hopper_masked_attention(q, k, v, mask, segment_ids, kv_segment_ids, **options):
    return ops.attention(q, k, v, mask=mask, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids, **options)


def _hopper_masked_attention(size: int, dtype: str) -> tuple[jax.Array, ...]:
    q, k, v = _hopper_attention(size, dtype)
    rng = np.random.default_rng(38)
    ids = (array(np.sort(rng.integers(0, 3, x.shape[:2]), 1), "int32") for x in (q, k))
    return q, k, v, array(rng.integers(0, 4, k.shape[:2]) > 0, "int32"), *ids


def _hopper_norm(size: int, dtype: str) -> tuple[jax.Array, ...]:
    m, n = (19, 9216) if size == 1 else (40, 16384)
    rng = np.random.default_rng(40)
    return normal(rng, m, n, dtype=dtype), *(normal(rng, n, dtype=dtype, shift=shift) for shift in (1.0, 0.0))


def _call_hopper_norm(x, scale, bias, *, implementation):
    """The kernel is that of the gradient; the norm itself is Triton's."""
    return ops.layer_norm(x, scale, bias, implementation=("triton", implementation))


# Calls that the kernels for Hopper serve: tiles of 64, half precisions. With size 1 the last tile reaches past the
# end where a kernel allows it.
HOPPER_CALLS = [
    Call("matmul", _call_matmul, _hopper_matmul, 4),
    Call(
        "matmul_resident",
        functools.partial(
            _call_matmul,
            config=matmul.Config(block_m=64, block_n=64, num_stages=2, ping_pong=True, resident=True),
        ),
        _hopper_matmul_resident,
        4,
    ),
    Call("matmul_linear", _call_hopper_linear, _hopper_linear, 3),
    Call("mlp", _call_hopper_mlp, _hopper_mlp, 5),
    Call("matmul_layer_norm", _call_matmul_layer_norm, _hopper_matmul_layer_norm, 6),
    Call(
        "matmul_layer_norm_cluster",
        functools.partial(_call_matmul_layer_norm, config=cluster.Config(block_n=64, block_k=64, num_stages=2)),
        _hopper_matmul_layer_norm,
        6,
    ),
    Call("post_norm_mlp", _call_post_norm_mlp, _hopper_post_norm_mlp, 12, (0, 1)),
    Call("post_norm_layers", _call_post_norm_layers, _hopper_post_norm_layers, 13, (0, 13)),
    Call(
        "attention_post_norm_mlp", _call_attention_post_norm_mlp, _hopper_attention_post_norm_mlp, 12, (0, 1, 12)
    ),
    Call("layer_norm", _call_hopper_norm, _hopper_norm, 3, (0, 1)),
    Call("gated_matmul", _call_gated_matmul, _hopper_gated, 3),
    Call("attention", _call_hopper_attention, _hopper_attention, 3),
    Call("attention_masked", _call_hopper_masked_attention, _hopper_masked_attention, 3),
    Call("attention_qkv", _call_hopper_attention_qkv, _hopper_attention_qkv, 1),
    Call("attention_resident", _call_attention_qkv, _hopper_attention_resident, 1, (0, 1)),
    Call("triangle_update", _call_triangle_update, _hopper_triangle, 11),
    Call("triangle_update_wide", _call_triangle_update, _hopper_wide_triangle, 11),
]
# What calls every kernel of a backend.
BY_BACKEND = {"triton": CALLS, "mosaic": HOPPER_CALLS}
