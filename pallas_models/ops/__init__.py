"""Operations with hand-written kernels: formula, checks, plain-XLA reference and gradient of each.

`Array` in what they take is a `jax.Array` or a NumPy array; they give a `jax.Array`.

Between forward and backward pass a gradient keeps the operands and what each docstring says; under `jax.jit` XLA
drops what is not read again. So it is where kernels compute the results; of plain XLA, JAX keeps what it needs.

Every op, and every model made of them, takes `implementation`:

- None: the best kernel for the target GPU, which is decided where a program is lowered; plain XLA on other
  platforms, and where no kernel serves the call;
- `"triton"`: Pallas Triton kernels, for NVIDIA GPUs from Ampere on; every op runs, some in the kernels of others;
- `"mosaic"`: Pallas Mosaic GPU kernels, for Hopper GPUs; products with and without a norm, MLPs, encoder layers,
  attention and the triangle update have them, for the calls that their docstrings say. Norms, softmax, rotary
  positions, pooling and embedding have some that need nothing of Hopper's: JAX 0.11 takes them from Ampere on, but
  they have been compiled for Hopper only;
- `"xla"`: the same computation in plain JAX, which also defines the gradient of the kernels;
- `"interpret"` and `"mosaic_interpret"`: the bodies of the Triton and Mosaic kernels in Pallas's interpreters, to
  try and to test them on any machine;
- a sequence of these: the first that serves the call. `("mosaic", "triton")` is Mosaic wherever it has a kernel;
  with `"xla"` among them, XLA also on platforms other than CUDA.

A name that cannot serve a call raises NotImplementedError; no other implementation takes its place. `"triton"` and
`"mosaic"` raise it where a program is lowered for anything but CUDA; for CUDA it may be lowered on any machine.
"""

from pallas_models._implementation import IMPLEMENTATIONS, Implementation
from pallas_models.ops.activations import ACTIVATIONS, Activation
from pallas_models.ops.attention import attention, attention_qkv, segment_ids_from_cu_seqlens
from pallas_models.ops.attention_post_norm_mlp import attention_post_norm_mlp
from pallas_models.ops.embedding import embed_tokens
from pallas_models.ops.gated_mlp import gated_matmul, gated_mlp, stack_gate_up
from pallas_models.ops.gated_projection import gated_projection
from pallas_models.ops.layer_norm_gated_mlp import layer_norm_gated_mlp
from pallas_models.ops.layer_norm_projections import layer_norm_projections
from pallas_models.ops.linear_cross_entropy import linear_cross_entropy
from pallas_models.ops.matmul import matmul
from pallas_models.ops.matmul_layer_norm import matmul_layer_norm
from pallas_models.ops.mlp import mlp
from pallas_models.ops.norm import layer_norm, rms_norm
from pallas_models.ops.pooling import mean_pool, segment_mean_pool
from pallas_models.ops.post_norm_layers import post_norm_layers
from pallas_models.ops.post_norm_mlp import post_norm_mlp
from pallas_models.ops.ring_attention import ring_attention, zigzag_order
from pallas_models.ops.rotary import rotary, rotary_table
from pallas_models.ops.softmax import softmax
from pallas_models.ops.triangle_attention import triangle_attention
from pallas_models.ops.trimul import triangle_update

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "Activation",
    "Implementation",
    "attention",
    "attention_post_norm_mlp",
    "attention_qkv",
    "embed_tokens",
    "gated_matmul",
    "gated_mlp",
    "gated_projection",
    "layer_norm",
    "layer_norm_gated_mlp",
    "layer_norm_projections",
    "linear_cross_entropy",
    "matmul",
    "matmul_layer_norm",
    "mean_pool",
    "mlp",
    "post_norm_layers",
    "post_norm_mlp",
    "ring_attention",
    "rms_norm",
    "rotary",
    "rotary_table",
    "segment_ids_from_cu_seqlens",
    "segment_mean_pool",
    "softmax",
    "stack_gate_up",
    "triangle_attention",
    "triangle_update",
    "zigzag_order",
]
