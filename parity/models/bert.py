"""BERT built from torch's own transformer layer, and our parameters as its checkpoint."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from parity.ops import reference


class Encoder(nn.Module):
    """BERT with the parameter names of a checkpoint, built from torch's own transformer layer."""

    def __init__(self, tensors: Mapping[str, Any], *, num_heads: int, epsilon: float = 1e-12, dtype=torch.float64):
        super().__init__()
        t = {name: reference.tensor(value, dtype) for name, value in tensors.items()}
        self.epsilon = epsilon
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
        self.tables = nn.ParameterDict({name: t[f"embeddings.{name}.weight"] for name in names})
        self.tables["LayerNorm_bias"] = t["embeddings.LayerNorm.bias"]
        self.layers = nn.ModuleList()
        for i in range(len({name.split(".")[2] for name in t if name.startswith("encoder.layer.")})):
            base = f"encoder.layer.{i}"
            width, hidden = t[f"{base}.output.dense.weight"].shape
            layer = nn.TransformerEncoderLayer(
                width, num_heads, hidden, 0.0, "gelu", epsilon, True, device=reference.DEVICE, dtype=dtype
            )
            state = {}
            for kind in ("weight", "bias"):
                parts = [t[f"{base}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
                state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
                state[f"self_attn.out_proj.{kind}"] = t[f"{base}.attention.output.dense.{kind}"]
                state[f"norm1.{kind}"] = t[f"{base}.attention.output.LayerNorm.{kind}"]
                state[f"linear1.{kind}"] = t[f"{base}.intermediate.dense.{kind}"]
                state[f"linear2.{kind}"] = t[f"{base}.output.dense.{kind}"]
                state[f"norm2.{kind}"] = t[f"{base}.output.LayerNorm.{kind}"]
            layer.load_state_dict(state)
            self.layers.append(layer)

    def forward(self, ids: Tensor, mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        tables = self.tables
        x = reference.embed_tokens(
            ids,
            tables["word_embeddings"],
            tables["position_embeddings"],
            tables["token_type_embeddings"],
            tables["LayerNorm"],
            tables["LayerNorm_bias"],
            token_type_ids=token_type_ids,
            epsilon=self.epsilon,
        )
        # In training mode (dropout is 0) torch takes its plain path, which leaves padding rows in place.
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        return x

    def embed(self, ids: Tensor, mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return reference.mean_pool(self(ids, mask, token_type_ids), mask)


def bert_tensors(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our parameters under the names and in the layout of a BERT checkpoint: the inverse of its conversion."""
    out, params = {}, jax.tree.map(np.asarray, params)

    def linear(name: str, p: Mapping[str, np.ndarray]) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = p["kernel"].T, p["bias"]

    def norm(name: str, p: Mapping[str, np.ndarray]) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = p["scale"], p["bias"]

    for table in ("word", "position", "token_type"):
        out[f"embeddings.{table}_embeddings.weight"] = params["embeddings"][table]["embedding"]
    norm("embeddings.LayerNorm", params["embeddings"]["norm"])
    for i, layer in params["layers"].items():
        base, qkv = f"encoder.layer.{i}", layer["attention"]["qkv"]
        kernels, biases = np.split(qkv["kernel"], 3, axis=1), np.split(qkv["bias"], 3)
        for part, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
            linear(f"{base}.attention.self.{part}", {"kernel": kernel, "bias": bias})
        linear(f"{base}.attention.output.dense", layer["attention"]["out"])
        norm(f"{base}.attention.output.LayerNorm", layer["attention_norm"])
        linear(f"{base}.intermediate.dense", layer["mlp"]["up"])
        linear(f"{base}.output.dense", layer["mlp"]["down"])
        norm(f"{base}.output.LayerNorm", layer["mlp_norm"])
    return out
