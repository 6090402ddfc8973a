"""GPT-2 and Qwen3 written out with torch.nn and torch.nn.functional, under the names of their checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pallas_models.gpt2 import GPT2Config
from pallas_models.qwen3 import Qwen3Config
from parity.ops.reference import DEVICE, tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Attention of q (B, S, heads, head_dim) to k and v of as many heads or fewer, as (B, S, heads * head_dim)."""
    batch, seq = q.shape[:2]
    keep = torch.ones(batch, 1, seq, seq, dtype=torch.bool, device=q.device)
    if causal:
        keep = keep.tril()
    if mask is not None:
        keep = keep & (mask != 0)[:, None, None, :]
    empty = ~keep.any(-1, keepdim=True)  # computed with every key, and then zero
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep | empty, enable_gqa=True)
    return out.masked_fill(empty, 0.0).transpose(1, 2).flatten(2)


def load(module: nn.Module, tensors: Mapping[str, Any]) -> nn.Module:
    """The module in float64 with these tensors, every name of which it has to know."""
    module.to(DEVICE, torch.float64).load_state_dict({name: tensor(t) for name, t in tensors.items()})
    return module


class Conv1D(nn.Module):
    """A linear map whose weight is (in, out)."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(d_in, d_out)), nn.Parameter(torch.empty(d_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class GPT2Block(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        h, f = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(h, config.epsilon), nn.LayerNorm(h, config.epsilon)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(h, 3 * h), "c_proj": Conv1D(h, h)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(h, f), "c_proj": Conv1D(f, h)})

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = True) -> Tensor:
        q, k, v = self.attn["c_attn"](self.ln_1(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        x = x + self.attn["c_proj"](attend(q, k, v, mask, causal=causal))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_positions, config.hidden_size)
        self.h = nn.ModuleList([GPT2Block(config) for _ in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, config.epsilon)

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            counted = torch.ones_like(ids) if mask is None else mask.long()
            positions = (counted.cumsum(1) - 1).clamp(min=0)
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = block(x, mask)
        return F.linear(self.ln_f(x), self.wte.weight)


class Qwen3Layer(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
        self.config = config
        self.input_layernorm = nn.RMSNorm(h, config.epsilon)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(h, config.num_heads * d, bias=False),
                "k_proj": nn.Linear(h, config.num_kv_heads * d, bias=False),
                "v_proj": nn.Linear(h, config.num_kv_heads * d, bias=False),
                "o_proj": nn.Linear(config.num_heads * d, h, bias=False),
                "q_norm": nn.RMSNorm(d, config.epsilon),
                "k_norm": nn.RMSNorm(d, config.epsilon),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(h, config.epsilon)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(h, f, bias=False),
                "up_proj": nn.Linear(h, f, bias=False),
                "down_proj": nn.Linear(f, h, bias=False),
            }
        )

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x (B, S, heads, head_dim) as complex numbers, by angles in float32 as all do."""
        d = self.config.head_dim
        frequencies = self.config.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
        angles = (positions[..., None].float() * frequencies.float()).double()[..., None, :]
        z = torch.polar(torch.ones_like(angles), angles) * torch.complex(*x.chunk(2, -1))
        return torch.cat([z.real, z.imag], -1)

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        attn, mlp, y = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (attn[f"{part}_proj"](y).unflatten(-1, (-1, self.config.head_dim)) for part in "qkv")
        q, k = self.rotate(attn["q_norm"](q), positions), self.rotate(attn["k_norm"](k), positions)
        x = x + attn["o_proj"](attend(q, k, v, mask, causal=True))
        y = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class Qwen3(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList([Qwen3Layer(config) for _ in range(config.num_layers)])
        self.model.norm = nn.RMSNorm(config.hidden_size, config.epsilon)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, mask, positions)
        head = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
        return F.linear(self.model.norm(x), head.weight)
