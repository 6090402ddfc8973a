"""Every check of an argument, triggered once: the error names it, what it was and what is expected."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import minilm, ops
from pallas_models.dispatch import choice
from pallas_models.kernels.triton.attention import Config as Blocks
from parity.cases import CALLS, Call
from parity.cases.post_norm_layers import layer
from parity.support.common import MOSAIC_CALL, ON_GPU, array, assert_close, cuda_device, normal, random_params
from parity.support.tolerances import OP

RNG = np.random.default_rng(60)
X, W = normal(RNG, 5, 6), normal(RNG, 6, 8)
N6, N8, R8 = normal(RNG, 6), normal(RNG, 8), normal(RNG, 5, 8)
QKV, X3, Q4 = normal(RNG, 2, 4, 96), normal(RNG, 2, 4, 8), normal(RNG, 2, 5, 4, 16)
MASK = array([[1, 0, 1, 1], [1, 1, 0, 0]])
IDS = array([[1, 2, 3, 0], [4, 0, 2, 1]])
PAIRS, PAIR_MASK, W_IN = normal(RNG, 2, 5, 5, 6), array(np.ones((2, 5, 5), bool)), normal(RNG, 6, 4, 8)
WORD, POSITION, TYPE = normal(RNG, 9, 8), normal(RNG, 6, 8), normal(RNG, 2, 8)
X8, W8, UP = (array(np.ones(shape)) for shape in ((5, 8), (8, 8), (8, 16)))
INTS, DOUBLE = array(np.arange(30).reshape(5, 6)), np.ones((5, 6)) * 0.5


def segment_mean_pool(x, segment_ids, num_segments=2):
    return ops.segment_mean_pool(x, segment_ids, num_segments=num_segments)


def embed_tokens(ids=IDS, word=WORD, position=POSITION, token_type=TYPE, scale=N8, bias=N8, **options):
    return ops.embed_tokens(ids, word, position, token_type, scale, bias, **options)


def triangle_update(x=PAIRS, norm_scale=N6, w_in=W_IN, out_norm_scale=N8, w_gate=W, w_out=W.T, **options):
    options = {"direction": "incoming"} | options
    return ops.triangle_update(x, norm_scale, N6, w_in, out_norm_scale, N8, w_gate, w_out, **options)


def cross_entropy(x=X, w=W, labels=INTS[0, :5], **options):
    return ops.linear_cross_entropy(x, w, labels, **options)


def attention(q=Q4, k=Q4[:, :3, :2], v=Q4[:, :3, :2], **options):
    return ops.attention(q, k, v, **options)


def attention_qkv(qkv=QKV, num_heads=2, **options):
    return ops.attention_qkv(qkv, num_heads=num_heads, **options)


def rotary(qkv=QKV, cos=QKV[0, :, :8], sin=QKV[1, :, :8], num_heads=4, num_kv_heads=1, **options):
    return ops.rotary(qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, **options)


def post_norm_mlp(y=X8, x=X8, w_out=W8, w_up=UP, w_down=UP.T, bias_up=None, scale=N8, **options):
    weights = {"w_out": w_out, "w_up": w_up, "w_down": w_down, "bias_up": bias_up}
    norms = {"scale_out": N8, "offset_out": N8, "scale": scale, "offset": N8}
    return ops.post_norm_mlp(y, x, **weights, **norms, **options)


def attention_post_norm_mlp(qkv=QKV[..., :24], num_heads=2, **options):
    weights = {"w_out": W8, "w_up": UP, "w_down": UP.T}
    weights |= dict.fromkeys(("scale_out", "offset_out", "scale", "offset"), N8)
    return ops.attention_post_norm_mlp(qkv, X3, num_heads=num_heads, **weights | options)


def post_norm_layers(num_heads=2, layers=2, without="", **changes):
    arrays = {name: x for name, x in layer(RNG, 8, 16, "float32").items() if name != without} | changes
    return ops.post_norm_layers(X3, [arrays] * layers, num_heads=num_heads)


CASES = {
    "matmul": [
        (lambda: ops.matmul([1.0], W), TypeError, "x must be an array, got list"),
        (lambda: ops.matmul(INTS, W), TypeError, "x has dtype int32; expected float16, bfloat16 or float32"),
        (lambda: ops.matmul(DOUBLE, W), TypeError, "x has dtype float64; expected float16"),
        (lambda: ops.matmul(X, INTS), TypeError, "w has dtype int32; expected float16"),
        (lambda: ops.matmul(X, W.astype("float16")), TypeError, "x has dtype float32 and w has dtype float16"),
        (lambda: ops.matmul(X[0, 0], W), ValueError, "x has shape (); expected (..., K)"),
        (lambda: ops.matmul(X, N6), ValueError, "w has shape (6,); expected 2 axes, (K, N)"),
        (lambda: ops.matmul(X, W.T), ValueError, "x has shape (5, 6) and w has shape (8, 6); expected (..., K)"),
        (lambda: ops.matmul(X, W, activation="elu"), ValueError, "activation='elu' is unknown; expected None or"),
        (lambda: ops.matmul(X, W, bias=INTS[0]), TypeError, "bias has dtype int32; expected float16"),
        (lambda: ops.matmul(X, W, bias=N6), ValueError, "bias has shape (6,); expected (8,), (N,)"),
        (lambda: ops.matmul(X, W, residual=INTS), TypeError, "residual has dtype int32; expected float16"),
        (lambda: ops.matmul(X, W, residual=X), ValueError, "residual has shape (5, 6); expected (5, 8)"),
        (lambda: ops.matmul(X, W, acc_dtype=jnp.bfloat16), ValueError, "is not supported; expected float32 or"),
        (lambda: ops.matmul(X, W, acc_dtype=jnp.float16), ValueError, "needs float16 operands, got float32"),
        (lambda: ops.matmul(X, W, precision="some"), ValueError, "some"),
        (
            lambda: ops.matmul(X, W, implementation="mosaic"),
            NotImplementedError,
            "takes float16 and bfloat16, not float",
        ),
    ],
    "linear_cross_entropy": [
        (lambda: cross_entropy(x=INTS), TypeError, "x has dtype int32; expected float16, bfloat16 or float32"),
        (lambda: cross_entropy(w=INTS), TypeError, "w has dtype int32; expected float16"),
        (lambda: cross_entropy(w=W.astype("float16")), TypeError, "float32 and w has dtype float16"),
        (lambda: cross_entropy(w=N6), ValueError, "w has shape (6,); expected 2 axes, (D, V)"),
        (lambda: cross_entropy(w=W.T), ValueError, "w has shape (8, 6); expected (..., D) and (D, V)"),
        (lambda: cross_entropy(transpose_w=True), ValueError, "(6, 8); expected (..., D) and (V, D)"),
        (lambda: cross_entropy(x=X[0, 0]), ValueError, "x has shape () and w has shape (6, 8); expected (.."),
        (
            lambda: cross_entropy(w=W[:, :0]),
            ValueError,
            "shape (6, 0); expected at least one label in (D, V)",
        ),
        (lambda: cross_entropy(labels=[1]), TypeError, "labels must be an array, got list"),
        (lambda: cross_entropy(labels=X[:, 0]), TypeError, "labels has dtype float32; expected an integer dtype"),
        (lambda: cross_entropy(labels=INTS), ValueError, "labels has shape (5, 6); expected (5,), the shape of x"),
        (lambda: cross_entropy(bias=INTS[0]), TypeError, "bias has dtype int32; expected float16"),
        (lambda: cross_entropy(bias=N6), ValueError, "bias has shape (6,); expected (8,), (V,)"),
        (lambda: cross_entropy(weights=[1]), TypeError, "weights must be an array, got list"),
        (lambda: cross_entropy(weights=DOUBLE[:, 0]), TypeError, "weights has dtype float64; expected float16"),
        (lambda: cross_entropy(weights=X), ValueError, "weights has shape (5, 6); expected (5,), the shape of x"),
        (
            lambda: cross_entropy(label_smoothing=1.5),
            ValueError,
            "label_smoothing=1.5 is out of range; expected 0",
        ),
        (lambda: cross_entropy(logit_softcap=0.0), ValueError, "logit_softcap=0.0 is out of range; expected None"),
        (lambda: cross_entropy(z_loss=-1.0), ValueError, "z_loss=-1.0 is out of range; expected 0 or a positive"),
        (
            lambda: cross_entropy(reduction="none"),
            ValueError,
            "reduction='none' is unknown; expected 'mean', 'sum'",
        ),
        (lambda: cross_entropy(precision="some"), ValueError, "some"),
    ],
    "matmul_layer_norm": [
        (lambda: ops.matmul_layer_norm(X, W.T, N8, N8), ValueError, "expected (..., K) and (K, N)"),
        (lambda: ops.matmul_layer_norm(X, W, N6, N8), ValueError, "scale has shape (6,); expected (8,), (N,)"),
        (lambda: ops.matmul_layer_norm(X, W, N8, N6), ValueError, "offset has shape (6,); expected (8,), (N,)"),
        (lambda: ops.matmul_layer_norm(X, W, INTS[0], N8), TypeError, "scale has dtype int32; expected float16"),
        (lambda: ops.matmul_layer_norm(X, W, N8, N8, bias=N6), ValueError, "bias has shape (6,); expected (8,)"),
        (lambda: ops.matmul_layer_norm(X, W, N8, N8, residual=X), ValueError, "residual has shape (5, 6); exp"),
    ],
    "post_norm_mlp": [
        (
            lambda: post_norm_mlp(w_out=W),
            ValueError,
            "w_out has shape (6, 8); expected (8, 8), (K, N) with the K of y",
        ),
        (lambda: post_norm_mlp(w_down=W), ValueError, "w_down has shape (6, 8); expected (16, 8), (F, N)"),
        (lambda: post_norm_mlp(x=X), ValueError, "x has shape (5, 6); expected (5, 8), the shape of the result"),
        (lambda: post_norm_mlp(bias_up=N8), ValueError, "bias_up has shape (8,); expected (16,), (F,)"),
        (lambda: post_norm_mlp(scale=N6), ValueError, "scale has shape (6,); expected (8,), (N,)"),
        (lambda: post_norm_mlp(y=INTS[0]), TypeError, "y has dtype int32; expected float16"),
        (lambda: post_norm_mlp(activation="tanh"), ValueError, "tanh"),
        (lambda: post_norm_mlp(bias_in=N8), TypeError, "unexpected keyword argument 'bias_in'"),
        (lambda: ops.post_norm_mlp(X8, X8, w_out=W8), TypeError, "missing 6 required positional arguments"),
    ],
    "attention_post_norm_mlp": [
        (lambda: attention_post_norm_mlp(X8), ValueError, "qkv has shape (5, 8); expected 3 axes, (B, S, 3 * K)"),
        (
            lambda: attention_post_norm_mlp(QKV),
            ValueError,
            "w_out has shape (8, 8); expected (32, 8), (K, N) with",
        ),
        (
            lambda: attention_post_norm_mlp(mask=MASK.T),
            ValueError,
            "mask has shape (4, 2); expected (2, 4), (B, S)",
        ),
        (lambda: attention_post_norm_mlp(mask=2 * MASK), ValueError, "mask has values from 0 to 2; expected only"),
        (lambda: attention_post_norm_mlp(segment_ids=N8), TypeError, "segment_ids has dtype float32; expected an"),
        (lambda: attention_post_norm_mlp(segment_ids=IDS.T), ValueError, "segment_ids has shape (4, 2); expected"),
        (lambda: attention_post_norm_mlp(bias=N8), ValueError, "bias has shape (8,); expected 4 axes"),
        (lambda: attention_post_norm_mlp(w_down=W8), ValueError, "w_down has shape (8, 8); expected (16, 8), (F"),
        (lambda: attention_post_norm_mlp(num_heads=3), ValueError, "num_heads"),
    ],
    "post_norm_layers": [
        (lambda: post_norm_layers(num_heads=3), ValueError, "its last axis to be a multiple of num_heads=3"),
        (lambda: post_norm_layers(layers=0), ValueError, "layers is empty; expected one or more"),
        (lambda: post_norm_layers(without="w_up"), ValueError, "'w_qkv']; expected ['bias_down', 'bias_out',"),
        (lambda: post_norm_layers(w_up=N8), ValueError, "layers[0]['w_up'] has shape (8,); expected 2 axes, (N,"),
        (lambda: post_norm_layers(w_qkv=W8), ValueError, "['w_qkv'] has shape (8, 8); expected (8, 24), N 3N for"),
        (lambda: post_norm_layers(scale=INTS), TypeError, "layers[0]['scale'] has dtype int32; expected float16"),
        (lambda: post_norm_layers(w_out=W8.astype("float16")), TypeError, "['w_out'] has dtype float16; expected"),
    ],
    "layer_norm": [
        (lambda: ops.layer_norm(INTS, N6, N6), TypeError, "x has dtype int32; expected float16"),
        (lambda: ops.layer_norm(X[0, 0], N6, N6), ValueError, "x has shape (); expected (..., D)"),
        (lambda: ops.layer_norm(X, N8, N6), ValueError, "scale has shape (8,); expected (6,), (D,)"),
        (lambda: ops.layer_norm(X, N6, N8), ValueError, "bias has shape (8,); expected (6,), (D,)"),
        (lambda: ops.layer_norm(X, N6, INTS[0]), TypeError, "bias has dtype int32; expected float16"),
        (lambda: ops.layer_norm(X, N6, N6, residual=R8), ValueError, "residual has shape (5, 8); expected (5, 6)"),
        (lambda: ops.layer_norm(X, N6, N6, residual=INTS), TypeError, "residual has dtype int32; expected"),
    ],
    "rms_norm": [
        (lambda: ops.rms_norm(INTS, N6), TypeError, "x has dtype int32; expected float16"),
        (lambda: ops.rms_norm(X[0, 0], N6), ValueError, "x has shape (); expected (..., D)"),
        (lambda: ops.rms_norm(X, N8), ValueError, "scale has shape (8,); expected (6,), (D,)"),
        (lambda: ops.rms_norm(X, N6, residual=R8), ValueError, "residual has shape (5, 8); expected (5, 6)"),
        (lambda: ops.rms_norm(X, N6, residual=INTS), TypeError, "residual has dtype int32; expected"),
    ],
    "attention": [
        (lambda: attention(INTS), TypeError, "q has dtype int32; expected float16"),
        (lambda: attention(v=[1.0]), TypeError, "v must be an array, got list"),
        (lambda: attention(Q4[0]), ValueError, "q has shape (5, 4, 16); expected 4 axes, (B, Sq, Hq, D)"),
        (lambda: attention(k=Q4[0]), ValueError, "k has shape (5, 4, 16); expected 4 axes, (B, Skv, Hkv, D)"),
        (lambda: attention(k=Q4.astype("float16")), TypeError, "k has dtype float16 and q has dtype float32"),
        (lambda: attention(k=Q4[:1]), ValueError, "k has shape (1, 5, 4, 16); expected (2, 5, 4, 16), (B, Skv,"),
        (lambda: attention(v=Q4), ValueError, "v has shape (2, 5, 4, 16); expected (2, 3, 2, 16), the shape of k"),
        (
            lambda: attention(k=Q4[:, :, :3], v=Q4[:, :, :3]),
            ValueError,
            "num_heads=4 is not a positive multiple of num_kv_heads=3",
        ),
        (lambda: attention(k=Q4[:, :, :0], v=Q4[:, :, :0]), ValueError, "num_kv_heads=0"),
        (lambda: attention(*[Q4[..., :0]] * 3), ValueError, "head_dim=0 must be positive"),
        (
            lambda: attention(*[jnp.tile(Q4, 20)] * 3, implementation="interpret"),
            NotImplementedError,
            "takes heads of up to 256, not head_dim=320",
        ),
        (lambda: attention(causal=True, window=0), ValueError, "window=0 must be positive"),
        (lambda: attention(sm_scale=np.ones(2)), ValueError, "sm_scale has shape (2,); expected one number"),
        (lambda: attention(causal=True, window=1.5), TypeError, "float"),
        (lambda: attention(mask=MASK), ValueError, "mask has shape (2, 4); expected (2, 3), (B, Skv)"),
        (
            lambda: attention(mask=MASK[:, None, None]),
            ValueError,
            "mask has shape (2, 1, 1, 4); expected (2, 1, 1, 3), (B or 1, Hq or 1, Sq or 1, Skv)",
        ),
        (
            lambda: attention(mask=-MASK[:, None, None, :3]),
            ValueError,
            "mask has values from -1 to 0; expected only",
        ),
        (lambda: attention(mask=MASK[:, :3] * 0.5), TypeError, "mask has dtype float32; expected bool or an int"),
        (lambda: attention(bias=INTS), TypeError, "bias has dtype int32; expected float16"),
        (
            lambda: attention(bias=X),
            ValueError,
            "bias has shape (5, 6); expected 4 axes, (B or 1, Hq or 1, Sq, Skv)",
        ),
        (
            lambda: attention(bias=Q4),
            ValueError,
            "bias has shape (2, 5, 4, 16); expected (2, 4, 5, 3), (B or 1, H",
        ),
        (
            lambda: attention(bias=Q4[:1, :1]),
            ValueError,
            "bias has shape (1, 1, 4, 16); expected (1, 1, 5, 3), (B",
        ),
        (lambda: attention(segment_ids=Q4), TypeError, "segment_ids has dtype float32; expected an integer"),
        (lambda: attention(segment_ids=IDS), ValueError, "segment_ids has shape (2, 4); expected (2, 5), (B, Sq)"),
        (
            lambda: attention(segment_ids=jnp.tile(IDS, 2)[:, :5]),
            ValueError,
            "kv_segment_ids has shape (2, 5); expected (2, 3), (B, Skv)",
        ),
        (lambda: attention(kv_segment_ids=IDS[:, :3]), ValueError, "kv_segment_ids is given without segment_ids"),
        (lambda: attention(config=1, implementation="interpret"), TypeError, "config is a int; expected"),
        (
            lambda: attention(
                config=Blocks(block_q=16, block_kv=16, num_warps=1, num_stages=1, heads=3),
                implementation="interpret",
            ),
            ValueError,
            "config: heads=3 does not divide num_heads=4",
        ),
        (lambda: ops.segment_ids_from_cu_seqlens(X, 3), TypeError, "cu_seqlens has dtype float32; expected an"),
        (
            lambda: ops.segment_ids_from_cu_seqlens(IDS, 3),
            ValueError,
            "cu_seqlens has shape (2, 4); expected 1 axes",
        ),
    ],
    "attention_qkv": [
        (lambda: attention_qkv(INTS), TypeError, "qkv has dtype int32; expected float16"),
        (
            lambda: attention_qkv(QKV[0]),
            ValueError,
            "qkv has shape (4, 96); expected 3 axes, (B, S, (num_heads + 2",
        ),
        (
            lambda: attention_qkv(num_heads=5),
            ValueError,
            "qkv has shape (2, 4, 96); expected its width to be (num_heads=5 + 2 * num_kv_heads=5) * head_dim",
        ),
        (lambda: attention_qkv(num_heads=0), ValueError, "num_heads=0"),
        (lambda: attention_qkv(num_heads=2, num_kv_heads=0), ValueError, "num_kv_heads=0"),
        (lambda: attention_qkv(num_heads=2, num_kv_heads=4), ValueError, "width to be (num_heads=2 + 2 * num_kv"),
        (
            lambda: attention_qkv(jnp.tile(QKV, 9), 1, implementation="triton"),
            NotImplementedError,
            "takes heads of up to 256, not head_dim=288",
        ),
        (lambda: attention_qkv(mask=[1, 1]), TypeError, "mask must be an array, got list"),
        (lambda: attention_qkv(mask=MASK * 1.0), TypeError, "mask has dtype float32; expected bool or an integer"),
        (lambda: attention_qkv(mask=MASK[:, :3]), ValueError, "mask has shape (2, 3); expected (2, 4), (B, Skv)"),
        (
            lambda: attention_qkv(mask=MASK * 2),
            ValueError,
            "mask has values from 0 to 2; expected only 0 (padding)",
        ),
        (lambda: attention_qkv(mask=-MASK), ValueError, "mask has values from -1 to 0; expected only 0 (padding)"),
    ],
    "embed_tokens": [
        (lambda: embed_tokens([[1]]), TypeError, "ids must be an array, got list"),
        (lambda: embed_tokens(IDS * 1.0), TypeError, "ids has dtype float32; expected an integer dtype"),
        (lambda: embed_tokens(IDS[0]), ValueError, "ids has shape (4,); expected 2 axes, (B, S)"),
        (lambda: embed_tokens(word=INTS), TypeError, "word has dtype int32; expected float16"),
        (lambda: embed_tokens(word=N8), ValueError, "word has shape (8,); expected 2 axes, (rows, D)"),
        (lambda: embed_tokens(position=X), ValueError, "position is float32 (5, 6) and word is float32 (9, 8)"),
        (
            lambda: embed_tokens(token_type=TYPE.astype("float16")),
            ValueError,
            "token_type is float16 (2, 8) and word is float32 (9, 8); expected the same width and dtype",
        ),
        (lambda: embed_tokens(scale=N6), ValueError, "scale has shape (6,); expected (8,), (D,)"),
        (lambda: embed_tokens(bias=N6), ValueError, "bias has shape (6,); expected (8,), (D,)"),
        (lambda: embed_tokens(position=POSITION[:3]), ValueError, "length 4; expected at most 3 positions"),
        (lambda: embed_tokens(IDS + 6), ValueError, "ids has values from 6 to 10; expected 0 to 8, rows of"),
        (lambda: embed_tokens(IDS - 1), ValueError, "ids has values from -1 to 3; expected 0 to 8, rows of"),
        (lambda: embed_tokens(token_type_ids=MASK * 0.5), TypeError, "token_type_ids has dtype float32; expected"),
        (lambda: embed_tokens(token_type_ids=MASK[:1]), ValueError, "token_type_ids has shape (1, 4); expected"),
        (lambda: embed_tokens(token_type_ids=MASK * 2), ValueError, "token_type_ids has values from 0 to 2; exp"),
        (lambda: embed_tokens(position_ids=MASK * 9), ValueError, "position_ids has values from 0 to 9; expected"),
    ],
    "softmax": [
        (lambda: ops.softmax([1.0]), TypeError, "x must be an array, got list"),
        (lambda: ops.softmax(INTS), TypeError, "x has dtype int32; expected float16"),
        (lambda: ops.softmax(X[0, 0]), ValueError, "x has shape (); expected at least one axis"),
        (lambda: ops.softmax(X, 2), ValueError, "axis=2 is out of range for x of shape (5, 6)"),
        (lambda: ops.softmax(X, -3), ValueError, "axis=-3 is out of range for x of shape (5, 6)"),
        (lambda: ops.softmax(X, algorithm="fast"), ValueError, "algorithm='fast' is unknown; expected None or"),
        (lambda: ops.softmax(X, scale=jnp.ones(6)), ValueError, "scale has shape (6,); expected one number"),
        (lambda: ops.softmax(X, where=[1]), TypeError, "where must be an array, got list"),
        (lambda: ops.softmax(X, where=X), TypeError, "where has dtype float32; expected bool or an integer"),
        (lambda: ops.softmax(X, where=MASK[:, :3]), ValueError, "where has shape (2, 3); expected one broad"),
        (lambda: ops.softmax(X[0], where=X > 0), ValueError, "where has shape (5, 6); expected one broadcastable"),
        (lambda: ops.softmax(X, where=INTS), ValueError, "where has values from 0 to 29; expected only 0"),
    ],
    "rotary": [
        (lambda: rotary(INTS), TypeError, "qkv has dtype int32; expected float16"),
        (
            lambda: rotary(QKV[0]),
            ValueError,
            "qkv has shape (4, 96); expected 3 axes, (B, S, (num_heads + 2 * num",
        ),
        (lambda: rotary(num_heads=5), ValueError, "expected its width to be (num_heads=5 + 2 * num_kv_heads=1) *"),
        (lambda: rotary(num_kv_heads=0), ValueError, "num_heads=4 + 2 * num_kv_heads=0"),
        (lambda: rotary(QKV[..., :90]), ValueError, "head_dim=15 cannot be rotated; expected an even number"),
        (
            lambda: rotary(cos=N8),
            ValueError,
            "cos has shape (8,); expected (4, 8) or (2, 4, 8), (S, head_dim / 2)",
        ),
        (lambda: rotary(sin=INTS), TypeError, "sin has dtype int32; expected float16"),
        (lambda: rotary(sin=QKV[..., :8]), ValueError, "sin has shape (2, 4, 8); expected (4, 8), the shape of"),
        (lambda: rotary(q_scale=N8), ValueError, "k_scale is None and the other scale is not; expected both"),
        (lambda: rotary(k_scale=N8), ValueError, "q_scale is None and the other scale is not; expected both"),
        (
            lambda: rotary(q_scale=N8, k_scale=N8),
            ValueError,
            "q_scale has shape (8,); expected (16,), (head_dim,)",
        ),
        (lambda: ops.rotary_table(N8, 16), TypeError, "positions has dtype float32; expected an integer dtype"),
        (lambda: ops.rotary_table(INTS[None], 16), ValueError, "positions has shape (1, 5, 6); expected (S,) or"),
        (lambda: ops.rotary_table(INTS, 5), ValueError, "head_dim=5 cannot be rotated; expected an even number"),
    ],
    "triangle_update": [
        (lambda: triangle_update([1.0]), TypeError, "x must be an array, got list"),
        (lambda: triangle_update(INTS), TypeError, "x has dtype int32; expected float16"),
        (lambda: triangle_update(X), ValueError, "x has shape (5, 6); expected (..., N, N, C)"),
        (lambda: triangle_update(PAIRS[:, :4]), ValueError, "x has shape (2, 4, 5, 6); expected (..., N, N, C)"),
        (lambda: triangle_update(direction="in"), ValueError, "direction='in' is unknown; expected one of ('outg"),
        (lambda: triangle_update(mask=[1]), TypeError, "mask must be an array, got list"),
        (
            lambda: triangle_update(mask=PAIR_MASK[0]),
            ValueError,
            "mask has shape (5, 5); expected (2, 5, 5), (...",
        ),
        (
            lambda: triangle_update(mask=PAIR_MASK[:1] * 1.0),
            ValueError,
            "mask has shape (1, 5, 5); expected (2, 5",
        ),
        (lambda: triangle_update(mask=PAIR_MASK * 2), ValueError, "mask has values from 2 to 2; expected only 0"),
        (lambda: triangle_update(mask=PAIR_MASK * 1j), TypeError, "mask has dtype complex64; expected bool or an"),
        (lambda: triangle_update(compute_dtype="int8"), ValueError, "compute_dtype='int8' is not supported; exp"),
        (lambda: triangle_update(norm_scale=N8), ValueError, "norm_scale has shape (8,); expected (6,), (C,)"),
        (
            lambda: triangle_update(out_norm_scale=W),
            ValueError,
            "out_norm_scale has shape (6, 8); expected 1 axes",
        ),
        (lambda: triangle_update(out_norm_scale=N6), ValueError, "w_in has shape (6, 4, 8); expected (6, 4, 6)"),
        (lambda: triangle_update(w_in=W), ValueError, "w_in has shape (6, 8); expected (6, 4, 8), (C, 4, H)"),
        (lambda: triangle_update(w_in=None), TypeError, "w_in must be an array, got NoneType"),
        (lambda: triangle_update(w_gate=W.T), ValueError, "w_gate has shape (8, 6); expected (6, 8), (C, H) with"),
        (lambda: triangle_update(gate_after=True), ValueError, "w_gate has shape (6, 8); expected (6, 6), (C, C)"),
        (lambda: triangle_update(w_out=W), ValueError, "w_out has shape (6, 8); expected (8, 6), (H, C)"),
        (lambda: triangle_update(w_out=INTS), TypeError, "w_out has dtype int32; expected float16"),
        (lambda: triangle_update(b_in=N8), ValueError, "b_in has shape (8,); expected (4, 8), (4, H)"),
        (
            lambda: triangle_update(b_gate=N6),
            ValueError,
            "b_gate has shape (6,); expected (8,), (H,) with gate_af",
        ),
        (lambda: triangle_update(b_out=N8), ValueError, "b_out has shape (8,); expected (6,), (C,)"),
        (lambda: triangle_update(precision="some"), ValueError, "some"),
    ],
    "segment_mean_pool": [
        (lambda: segment_mean_pool(X, MASK), ValueError, "x has shape (5, 6); expected 3 axes, (B, S, D)"),
        (
            lambda: segment_mean_pool(X3, MASK * 0.5),
            TypeError,
            "segment_ids has dtype float32; expected an integer",
        ),
        (
            lambda: segment_mean_pool(X3, MASK.T),
            ValueError,
            "segment_ids has shape (4, 2); expected (2, 4), (B, S)",
        ),
        (lambda: segment_mean_pool(X3, MASK, -1), ValueError, "num_segments=-1; expected at least 0"),
    ],
    "mean_pool": [
        (lambda: ops.mean_pool(INTS, MASK), TypeError, "x has dtype int32; expected float16"),
        (lambda: ops.mean_pool(X, MASK), ValueError, "x has shape (5, 6); expected 3 axes, (B, S, D)"),
        (lambda: ops.mean_pool(X3, MASK * 0.5), TypeError, "mask has dtype float32; expected bool or an integer"),
        (lambda: ops.mean_pool(X3, MASK.T), ValueError, "mask has shape (4, 2); expected (2, 4), (B, S)"),
        (
            lambda: ops.mean_pool(X3, MASK + 1),
            ValueError,
            "mask has values from 1 to 2; expected only 0 (padding)",
        ),
    ],
}


@pytest.mark.parametrize(
    "call, error, message",
    [pytest.param(*case, id=f"{op}-{case[2]}") for op, cases in CASES.items() for case in cases],
)
def test_ops(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_unknown_implementation(call: Call):
    with pytest.raises(ValueError, match=r"implementation='cuda' is unknown; expected None or one of .*'triton'"):
        call("cuda")(*call.arrays())


def test_no_implementation_at_all():
    (call,) = (call for call in CALLS if call.name == "matmul")
    with pytest.raises(ValueError, match=r"implementation=\(\) is unknown; expected None or one of"):
        call(())(*call.arrays())


def test_arrays_too_large_for_the_kernels():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((2**31, 16), (16, 16)))
    with pytest.raises(
        NotImplementedError,
        match=r"takes arrays of up to 2147418112 rows and as many columns, not 2147483648; use another .* 'xla'",
    ):
        jax.eval_shape(functools.partial(ops.matmul, implementation="triton"), x, w)
    assert jax.eval_shape(ops.matmul, x, w).shape == (2**31, 16)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((2**21, 384), (384, 1536)))
    out = jax.eval_shape(functools.partial(ops.matmul, implementation="triton"), x, w)
    assert out.size == 3 * 2**30


@pytest.mark.parametrize(
    "shape, dtype, rows",
    [
        ((2**12, 2**12, 2**7), "bfloat16", 2**24),
        ((2**20, 2**20, 2), "bfloat16", 2**40),
        ((2, 2**33), "float32", 2**33),
        ((2**16, 2**16), "bool", 2**32),  # offsets of up to 4 GiB are 32-bit integers, which may be signed
        ((), "float32", 1),
    ],
)
def test_what_is_counted_in_32_bits(shape, dtype, rows):
    assert choice._most_rows(jax.ShapeDtypeStruct(shape, dtype)) == rows


NO_CUDA = re.escape(
    "runs on NVIDIA GPUs, not on the platform cpu, which this program is lowered for; expected None"
)


@pytest.mark.skipif(ON_GPU, reason="needs a machine without CUDA")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_triton_does_not_fall_back_on_a_cpu(call: Call):
    with pytest.raises(NotImplementedError, match=f"^implementation='triton' {NO_CUDA}"):
        call("triton")(*call.arrays())


@pytest.mark.skipif(ON_GPU, reason="needs a machine without CUDA")
@pytest.mark.parametrize("names", ["mosaic", ("mosaic", "triton")])
def test_a_kernel_for_gpus_is_refused_where_a_program_is_lowered_for_a_cpu(names):
    """Under transformations too; for CUDA it is lowered anywhere, and a sequence may say what runs elsewhere."""
    x, w = jax.random.normal(jax.random.key(0), (2, 128, 128), jnp.bfloat16)

    def loss(x, names):
        return jnp.sum(ops.matmul(x, w, activation="gelu", implementation=names).astype(jnp.float32))

    with pytest.raises(NotImplementedError, match=f"^implementation={re.escape(repr(names))} {NO_CUDA}"):
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, names=names))))(x[None])
    with pytest.raises(NotImplementedError, match=NO_CUDA):
        jax.export.export(jax.jit(lambda x: loss(x, names)), platforms=("cpu", "cuda"))(x)
    with cuda_device("NVIDIA H200", 132):
        program = jax.jit(jax.grad(functools.partial(loss, names=names))).trace(x)
        assert MOSAIC_CALL in program.lower(lowering_platforms=("cuda",)).as_text()
    or_xla = (*(names if isinstance(names, tuple) else (names,)), "xla")
    np.testing.assert_array_equal(loss(x, or_xla), loss(x, "xla"))
    assert_close(jax.grad(loss)(x, or_xla), jax.grad(loss)(x, "xla"), OP["bfloat16"])


CONFIG = minilm.MiniLMConfig(
    vocab_size=9, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=16, max_positions=6
)


@pytest.mark.parametrize(
    "ids, mask, options, error, message",
    [
        (IDS[0], MASK[0], {}, ValueError, "ids has shape (4,); expected 2 axes, (B, S)"),
        (IDS[None], MASK, {}, ValueError, "ids has shape (1, 2, 4); expected 2 axes, (B, S)"),
        (IDS.tolist(), MASK, {}, TypeError, "ids must be an array, got list"),
        (IDS, MASK.tolist(), {}, TypeError, "mask must be an array, got list"),
        (IDS * 1.0, MASK, {}, TypeError, "ids has dtype float32; expected an integer dtype"),
        (IDS, MASK[:, :3], {}, ValueError, "mask has shape (2, 3); expected (2, 4), the shape of ids"),
        (IDS, MASK * 1.0, {}, TypeError, "mask has dtype float32; expected bool or an integer dtype"),
        (IDS, MASK * 3, {}, ValueError, "mask has values from 0 to 3; expected only 0 (padding) and 1 (token)"),
        (IDS + 5, MASK, {}, ValueError, "ids has values from 5 to 9; expected 0 to 8, rows of the vocabulary"),
        (IDS - 1, MASK, {}, ValueError, "ids has values from -1 to 3; expected 0 to 8, rows of the vocabulary"),
        (jnp.tile(IDS, 2), jnp.tile(MASK, 2), {}, ValueError, "ids has length 8; expected at most 6 positions"),
        (IDS, MASK, {"token_type_ids": MASK[:1]}, ValueError, "token_type_ids has shape (1, 4); expected (2, 4)"),
        (IDS, MASK, {"token_type_ids": MASK * 2}, ValueError, "token_type_ids has values from 0 to 2; expected"),
        (IDS, MASK, {"implementation": "cudnn"}, ValueError, "implementation='cudnn' is unknown; expected None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("function", [minilm.encode, minilm.embed], ids=["encode", "embed"])
def test_minilm(function, ids, mask, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        function(random_params(CONFIG), ids, mask, config=CONFIG, **options)


def test_what_can_be_known_is_checked_under_jit():
    embed = jax.jit(functools.partial(minilm.embed, config=CONFIG))
    with pytest.raises(ValueError, match="ids has length 8; expected at most 6 positions"):
        embed(random_params(CONFIG), jnp.tile(IDS, 2), jnp.tile(MASK, 2))
    with pytest.raises(ValueError, match=re.escape("mask has shape (2, 3); expected (2, 4)")):
        embed(random_params(CONFIG), IDS, MASK[:, :3])


def test_params_that_do_not_fit_the_config_are_listed():
    wrong = {**random_params(CONFIG), "extra": {"kernel": N8}}
    wrong["embeddings"] = {**wrong["embeddings"], "word": {"embedding": WORD}}
    with pytest.raises(ValueError) as error:
        minilm.embed(wrong, IDS, MASK, config=CONFIG)
    for part in ("['embeddings']['word']['embedding']: expected (9, 32), got (9, 8)", "['extra']['kernel']"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"\['layers'\].*: expected nothing, got"):
        minilm.embed(
            random_params(CONFIG), IDS, MASK, config=minilm.MiniLMConfig(num_layers=0, hidden_size=32, num_heads=2)
        )


def test_config_of_impossible_sizes():
    with pytest.raises(ValueError, match="hidden_size=384 is not a multiple of num_heads=7"):
        minilm.MiniLMConfig(num_heads=7)
