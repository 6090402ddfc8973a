"""Operations with hand-written kernels: formula, checks, plain-XLA reference and gradient of each."""

from pallas_models.ops._dispatch import IMPLEMENTATIONS, Implementation
from pallas_models.ops.activations import ACTIVATIONS, Activation
from pallas_models.ops.attention import attention, attention_qkv, segment_ids_from_cu_seqlens
from pallas_models.ops.embedding import embed_tokens
from pallas_models.ops.gated_mlp import gated_matmul, gated_mlp, stack_gate_up
from pallas_models.ops.matmul import matmul
from pallas_models.ops.matmul_layer_norm import matmul_layer_norm
from pallas_models.ops.norm import layer_norm, rms_norm
from pallas_models.ops.pooling import mean_pool
from pallas_models.ops.rotary import rotary, rotary_table
from pallas_models.ops.softmax import softmax
from pallas_models.ops.trimul import triangle_update

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "Activation",
    "Implementation",
    "attention",
    "attention_qkv",
    "embed_tokens",
    "gated_matmul",
    "gated_mlp",
    "layer_norm",
    "matmul",
    "matmul_layer_norm",
    "mean_pool",
    "rms_norm",
    "rotary",
    "rotary_table",
    "segment_ids_from_cu_seqlens",
    "softmax",
    "stack_gate_up",
    "triangle_update",
]
