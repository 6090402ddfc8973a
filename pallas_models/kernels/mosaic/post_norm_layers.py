"""All layers of a post-norm encoder for a few tokens, in one cluster of CTAs of a Hopper GPU.

Each CTA has a head of attention and a share of the hidden values, and streams their weights past the tokens: a
layer waits for no launch. Activations are transposed, features by tokens: weights are the left operand of the
tensor cores, which want 64 rows of it. How CTAs send activations to one another is in `cluster_exchange.py`.

For MiniLM and 1 x 16 tokens on an H200, 3 kernels in place of 45 took the forward pass from 84.0 to 69.4 us.
"""

import itertools

import jax
import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.forms.post_norm_layers import Form
from pallas_models.kernels.mosaic.common.cluster_exchange import COLUMNS, CONSUMERS, Sizes
from pallas_models.kernels.mosaic.common.cluster_exchange_ptx import FEATURES, TOKENS
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_cluster
from pallas_models.kernels.mosaic.common.launch import launch
from pallas_models.kernels.mosaic.post_norm_layers_kernel import VECTORS, Kernel
from pallas_models.target import Target

_MOST_CTAS = 12  # of a cluster, whose shared memory has room for what all of them send
_LEAST_CORES = 132  # of an H100 or H200: a cluster has the cores of one GPC, which smaller GPUs may not have
_MOST_LAYERS = 12  # whose arrays a kernel takes as arguments


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `post_norm_layers` does not serve a call; None if it does."""
    (batch, seq, n), num_heads = form.x.shape, form.num_heads
    if form.bias is not None or form.segment_ids is not None:
        return "takes a mask at most, no bias of scores and no segment ids"
    if target.name and target.num_cores < _LEAST_CORES:
        return f"takes GPUs of {_LEAST_CORES} multiprocessors or more, not {target.num_cores}"
    if batch * seq > TOKENS:
        return f"takes up to {TOKENS} tokens, not {batch} x {seq}"
    if not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer, not {jax.__version__}"
    if form.x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.x.dtype}"
    if n != FEATURES * num_heads or n % COLUMNS or num_heads > _MOST_CTAS:
        return (
            f"takes heads of {FEATURES}, each for one of up to {_MOST_CTAS} CTAs, in multiples of "
            f"{COLUMNS // FEATURES}, not {num_heads} of {n // num_heads}"
        )
    if len(form.layers) > _MOST_LAYERS:
        return f"takes up to {_MOST_LAYERS} layers, not {len(form.layers)}"
    for layer in form.layers:
        if layer.w_up.shape[1] != 4 * n:
            return f"takes {4 * n} hidden values, four for each of {n} columns, not {layer.w_up.shape[1]}"
        for name in itertools.chain(*VECTORS):
            if getattr(layer, name).dtype != jnp.float32:
                return f"takes float32 vectors, not {name} of {getattr(layer, name).dtype}"
    return None


def post_norm_layers(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """All layers in one kernel; see `pallas_models.ops.post_norm_layers`."""
    del config, target  # see `unsupported`; there are no other tiles
    (batch, seq, n), dtype = form.x.shape, form.x.dtype
    tokens = batch * seq
    if interpret:
        check_interpreted_cluster(form.num_heads * (CONSUMERS + 1))
    sizes = Sizes(ctas=form.num_heads, tokens=tokens, layers=len(form.layers), dtype=dtype)
    kernel = Kernel(sizes=sizes, seq=seq, activation=form.activation, epsilon=form.epsilon)
    mask = jnp.ones((tokens,), jnp.int32) if form.mask is None else form.mask.reshape(tokens)
    operands = dict(x=form.x.reshape(tokens, n), mask=mask)
    for i, layer in enumerate(form.layers):
        operands |= {f"{name}_{i}": value for name, value in layer._asdict().items()}
    out, *_ = launch(
        kernel,
        operands,
        dict(o=jax.ShapeDtypeStruct((tokens, n), dtype)) | sizes.mail_types(interpret),
        sizes.scratch_types(interpret),
        name="post_norm_layers",
        num_ctas=1,
        cluster=sizes.ctas,
        num_warpgroups=CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
    )
    return out.reshape(form.x.shape)
