"""MiniLM as users of JAX and of torch run it today: ours is measured against these, from the same tensors.

Every model here is built from `Checkpoint`: the tensors of a BERT encoder by their official names, real or random.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import weights
from bench.measuring.contenders import DTYPES
from pallas_models import ops
from pallas_models.minilm import MiniLMConfig
from weights.lazy import read_tensors
from weights.minilm import convert


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Tensors of a BERT encoder by their official names, its sizes, and where they come from."""

    tensors: dict[str, np.ndarray]
    config: MiniLMConfig
    origin: str
    path: Path | None = None

    def params(self, dtype: str) -> dict[str, Any]:
        """The parameters of `pallas_models.minilm`."""
        return jax.device_put(convert(self.tensors, self.config, dtype=DTYPES[dtype], source=self.origin))


def load_checkpoint(path: str | os.PathLike[str] | None) -> Checkpoint:
    """Loads the weights at `path`, or the installed all-MiniLM-L6-v2 if None; random ones if there is none.

    Args:
      path: a checkpoint folder, or a tensor file with config.json beside it.
    """
    origin = f"real ({name_of(path)})"
    try:
        path = weights.resolve() if path is None else Path(path)
    except FileNotFoundError:
        config = MiniLMConfig()
        return Checkpoint(tensors=random_tensors(config), config=config, origin="random")
    tensors = {name.removeprefix("bert."): tensor for name, tensor in read_tensors(path).items()}
    return Checkpoint(tensors=tensors, config=weights.load_minilm_config(path), origin=origin, path=path)


def name_of(path: str | os.PathLike[str] | None) -> str:
    """What a result calls weights: by name, since where they lie is a matter of one machine."""
    return "all-MiniLM-L6-v2" if path is None else Path(path).name


def random_tensors(config: MiniLMConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws float32 tensors of an encoder: matrices from N(0, 0.04^2), scales about 1, biases about 0."""
    rng = np.random.default_rng(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        tensors[name] = rng.normal(mean, 0.04, shape).astype(np.float32)

    def norm(name: str) -> None:
        add(f"{name}.weight", hidden, mean=1.0)
        add(f"{name}.bias", hidden)

    def linear(name: str, d_in: int, d_out: int) -> None:
        add(f"{name}.weight", d_out, d_in)
        add(f"{name}.bias", d_out)

    add("embeddings.word_embeddings.weight", config.vocab_size, hidden)
    add("embeddings.position_embeddings.weight", config.max_positions, hidden)
    add("embeddings.token_type_embeddings.weight", config.num_token_types, hidden)
    norm("embeddings.LayerNorm")
    for i in range(config.num_layers):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", hidden, hidden)
        linear(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", hidden, inner)
        linear(f"{layer}.output.dense", inner, hidden)
        norm(f"{layer}.output.LayerNorm")
    return tensors


def flop(config: MiniLMConfig, batch: int, seq: int) -> float:
    """Floating-point operations of the matrix products of one forward pass, padding included.

    A layer takes 2 * B * S * (4 H^2 + 2 H F) for its linear maps and 4 * B * S^2 * H for attention.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    linear = 2 * batch * seq * (4 * hidden**2 + 2 * hidden * inner)
    return float(config.num_layers * (linear + 4 * batch * seq**2 * hidden))


def least_bytes(config: MiniLMConfig, batch: int, seq: int, itemsize: int) -> float:
    """Bytes that one forward pass must move even if all of it were one kernel.

    The layers' parameters, the word embeddings of the tokens (of each word once, at most) and the positions' are
    read; ids and mask are read, int32; the embeddings are written.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden**2 + 2 * hidden * inner + 9 * hidden + inner  # linear maps, biases, two layer norms
    rows = min(batch * seq, config.vocab_size) + seq + 3  # words, positions, one token type, layer norm
    return float((config.num_layers * layer + (rows + batch) * hidden) * itemsize + 2 * 4 * batch * seq)


def plain_jax(
    checkpoint: Checkpoint, dtype: str, *, attention: Literal["einsum", "cudnn"] = "einsum"
) -> tuple[Any, Callable[..., jax.Array]]:
    """MiniLM in plain jax.numpy, with what a careful user does for speed: queries, keys and values in one product.

    Products are in `dtype`, which XLA accumulates in float32; float32 means float32 (precision "highest").
    Layer norm, softmax and pooling compute in float32.

    Args:
      checkpoint: the tensors.
      dtype: fp32, fp16 or bf16.
      attention: einsum, written out; or cudnn, `jax.nn.dot_product_attention` with cuDNN, which takes fp16
        and bf16 and masks without holes.

    Returns:
      The parameters, and the function of (parameters, ids, mask) that computes the embeddings.
    """
    config, target = checkpoint.config, DTYPES[dtype]
    tensors = {name: np.asarray(tensor, np.float32) for name, tensor in checkpoint.tensors.items()}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        return tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def linear(*names: str) -> tuple[np.ndarray, np.ndarray]:
        kernels, biases = zip(*map(pair, names), strict=True)
        return np.concatenate(kernels).T, np.concatenate(biases)

    layers = []
    for i in range(config.num_layers):
        layer = f"encoder.layer.{i}"
        layers.append(
            {
                "qkv": linear(*(f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))),
                "out": linear(f"{layer}.attention.output.dense"),
                "out_norm": pair(f"{layer}.attention.output.LayerNorm"),
                "up": linear(f"{layer}.intermediate.dense"),
                "down": linear(f"{layer}.output.dense"),
                "down_norm": pair(f"{layer}.output.LayerNorm"),
            }
        )
    tables = [tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    params = {"tables": tables, "norm": pair("embeddings.LayerNorm"), "layers": layers}
    params = jax.device_put(jax.tree.map(lambda x: np.asarray(x, target), params))
    precision = jax.lax.Precision.HIGHEST if dtype == "fp32" else None

    def dense(x: jax.Array, weight_and_bias: tuple[jax.Array, jax.Array]) -> jax.Array:
        weight, bias = weight_and_bias
        return jnp.matmul(x, weight, precision=precision) + bias

    def layer_norm(x: jax.Array, scale_and_bias: tuple[jax.Array, jax.Array]) -> jax.Array:
        scale, bias = scale_and_bias
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + config.epsilon)
        return (x * scale + bias).astype(target)

    def attend(qkv: jax.Array, mask: jax.Array) -> jax.Array:
        batch, seq, _ = qkv.shape
        q, k, v = jnp.unstack(qkv.reshape(batch, seq, 3, config.num_heads, -1), axis=2)
        if attention == "cudnn":
            lengths = mask.sum(-1, dtype=jnp.int32)
            y = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
            return y.reshape(batch, seq, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where((mask != 0)[:, None, None, :], scores * q.shape[-1] ** -0.5, -1e30)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(target), v, precision=precision)
        return y.reshape(batch, seq, -1)

    def embed(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        word, position, token_type = params["tables"]
        x = layer_norm(word[ids] + position[: ids.shape[1]] + token_type[0], params["norm"])
        for layer in params["layers"]:
            y = dense(attend(dense(x, layer["qkv"]), mask), layer["out"])
            x = layer_norm(x + y, layer["out_norm"])
            y = dense(jax.nn.gelu(dense(x, layer["up"]), approximate=False), layer["down"])
            x = layer_norm(x + y, layer["down_norm"])
        kept = mask[:, :, None].astype(jnp.float32)
        mean = jnp.sum(x * kept, 1) / jnp.maximum(jnp.sum(kept, 1), 1.0)
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)

    return params, embed


# What each adds to the kernels of the one before. XLA alone comes before the first, the default after the last.
STEPS = {
    "step-1-products": ("matmul",),
    "step-2-bias-gelu-residual": ("epilogue",),
    "step-3-attention": ("attention",),
    "step-4-norms-embedding-pooling": ("norm", "embedding", "pooling"),
}


def stepped(config: MiniLMConfig, step: str) -> Callable[..., jax.Array]:
    """The forward pass with the kernels of this library up to a step of STEPS, and XLA for the rest."""
    order = list(STEPS)
    kernels = {kernel for name in order[: order.index(step) + 1] for kernel in STEPS[name]}

    def by(kernel: str) -> ops.Implementation:
        return "triton" if kernel in kernels else "xla"

    def dense(
        x: jax.Array, linear: Any, activation: ops.Activation | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        epilogue: dict[str, Any] = dict(bias=linear["bias"], activation=activation, residual=residual)
        if "epilogue" in kernels or "matmul" not in kernels:
            return ops.matmul(x, linear["kernel"], **epilogue, implementation=by("epilogue"))
        y = ops.matmul(x, linear["kernel"], implementation="triton").astype(jnp.float32) + linear["bias"]
        y = jax.nn.gelu(y, approximate=False) if activation else y
        return (y if residual is None else y + residual).astype(x.dtype)

    def norm(x: jax.Array, of: Any) -> jax.Array:
        return ops.layer_norm(x, of["scale"], of["bias"], epsilon=config.epsilon, implementation=by("norm"))

    def embed(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        tables = params["embeddings"]
        word, position, token_type = (tables[name]["embedding"] for name in ("word", "position", "token_type"))
        scale, bias = tables["norm"]["scale"], tables["norm"]["bias"]
        fixed: dict[str, Any] = dict(epsilon=config.epsilon, implementation=by("embedding"))
        x = ops.embed_tokens(ids, word, position, token_type, scale, bias, **fixed)
        for i in range(config.num_layers):
            layer = params["layers"][str(i)]
            qkv = dense(x, layer["attention"]["qkv"])
            y = ops.attention_qkv(qkv, num_heads=config.num_heads, mask=mask, implementation=by("attention"))
            x = norm(dense(y, layer["attention"]["out"], residual=x), layer["attention_norm"])
            y = dense(x, layer["mlp"]["up"], activation="gelu")
            x = norm(dense(y, layer["mlp"]["down"], residual=x), layer["mlp_norm"])
        return ops.mean_pool(x, mask, implementation=by("pooling"))

    return embed


def torch_missing() -> str:
    """Why torch's models cannot run here; empty if they can."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return ""


def torch_bert(checkpoint: Checkpoint, device: str) -> Any:
    """The Hugging Face BertModel with scaled-dot-product attention, in float32, without dropout."""
    import torch
    import transformers

    config = checkpoint.config
    bert = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_positions,
        type_vocab_size=config.num_token_types,
        layer_norm_eps=config.epsilon,
        hidden_act="gelu",
    )
    model = transformers.AutoModel.from_config(bert, attn_implementation="sdpa", add_pooling_layer=False)
    state = {name: torch.from_numpy(np.asarray(t, np.float32)) for name, t in checkpoint.tensors.items()}
    buffers = {"embeddings.position_ids", "embeddings.token_type_ids"}  # 0, 1, 2 ... and zeros
    used = {name: t for name, t in state.items() if not name.startswith("pooler.") and name not in buffers}
    missing, unexpected = model.load_state_dict(used, strict=False)
    if wrong := [*unexpected, *(set(missing) - buffers)]:
        raise ValueError(f"the checkpoint does not fit transformers' BertModel: {', '.join(sorted(wrong))}")
    return model.to(device).eval()


def torch_embed(model: Any, ids: Any, mask: Any) -> Any:
    """The embeddings of a `torch_bert`: the mean of its hidden states where mask is 1, normalised, float32."""
    import torch

    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    kept = mask.unsqueeze(-1).float()
    mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1.0)
    return torch.nn.functional.normalize(mean, dim=-1)


def torch_model(checkpoint: Checkpoint, dtype: str, device: str) -> Callable[..., Any]:
    """`torch_embed` of a `torch_bert` without gradients.

    Args:
      checkpoint: the tensors.
      dtype: fp32, fp16 or bf16.
      device: of torch.

    Returns:
      Function of (ids, mask), tensors on `device`, that computes the embeddings, float32.
    """
    import torch

    target = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    return functools.partial(torch_embed, torch_bert(checkpoint, device).to(target).requires_grad_(False))
