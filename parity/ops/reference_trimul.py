"""The triangle multiplicative update in torch, as the models that use it write it, under their names."""

import torch
from torch import Tensor, nn


class Lucidrains(nn.Module):
    """The module of lucidrains and, without biases and outgoing, of GPU MODE's challenge."""

    def __init__(self, channels: int, hidden: int, direction: str = "outgoing", bias: bool = False):
        super().__init__()
        self.equation = {"outgoing": "...ikd,...jkd->...ijd", "incoming": "...kjd,...kid->...ijd"}[direction]
        self.norm = nn.LayerNorm(channels)
        self.left_proj = nn.Linear(channels, hidden, bias)
        self.right_proj = nn.Linear(channels, hidden, bias)
        self.left_gate = nn.Linear(channels, hidden, bias)
        self.right_gate = nn.Linear(channels, hidden, bias)
        self.out_gate = nn.Linear(channels, hidden, bias)
        self.to_out_norm = nn.LayerNorm(hidden)
        self.to_out = nn.Linear(hidden, channels, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        left, right = self.left_proj(x), self.right_proj(x)
        if mask is not None:
            left, right = left * mask[..., None], right * mask[..., None]
        left = left * self.left_gate(x).sigmoid()
        right = right * self.right_gate(x).sigmoid()
        out = self.to_out_norm(torch.einsum(self.equation, left, right))
        return self.to_out(out * self.out_gate(x).sigmoid())


class OpenFold(nn.Module):
    """The module of OpenFold and, without biases, of Protenix."""

    def __init__(self, channels: int, hidden: int, direction: str = "outgoing", bias: bool = True):
        super().__init__()
        self.outgoing = direction == "outgoing"
        self.linear_a_p = nn.Linear(channels, hidden, bias)
        self.linear_a_g = nn.Linear(channels, hidden, bias)
        self.linear_b_p = nn.Linear(channels, hidden, bias)
        self.linear_b_g = nn.Linear(channels, hidden, bias)
        self.linear_g = nn.Linear(channels, channels, bias)
        self.linear_z = nn.Linear(hidden, channels, bias)
        self.layer_norm_in = nn.LayerNorm(channels)
        self.layer_norm_out = nn.LayerNorm(hidden)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        z = self.layer_norm_in(z)
        mask = z.new_ones(z.shape[:-1]) if mask is None else mask
        a = mask[..., None] * self.linear_a_g(z).sigmoid() * self.linear_a_p(z)
        b = mask[..., None] * self.linear_b_g(z).sigmoid() * self.linear_b_p(z)
        a, b = a.movedim(-1, -3), b.movedim(-1, -3)  # (..., H, N, N)
        x = a @ b.mT if self.outgoing else a.mT @ b
        x = self.linear_z(self.layer_norm_out(x.movedim(-3, -1)))
        return x * self.linear_g(z).sigmoid()


class Boltz(nn.Module):
    """The module of Boltz: as many hidden channels as channels, left and right in one projection."""

    def __init__(self, channels: int, hidden: int, direction: str = "outgoing", bias: bool = False):
        super().__init__()
        self.equation = {"outgoing": "...ikd,...jkd->...ijd", "incoming": "...kid,...kjd->...ijd"}[direction]
        self.norm_in = nn.LayerNorm(channels)
        self.p_in = nn.Linear(channels, 2 * hidden, bias)
        self.g_in = nn.Linear(channels, 2 * hidden, bias)
        self.norm_out = nn.LayerNorm(hidden)
        self.p_out = nn.Linear(hidden, channels, bias)
        self.g_out = nn.Linear(channels, channels, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x_in = x = self.norm_in(x)
        x = self.p_in(x) * self.g_in(x).sigmoid()
        if mask is not None:
            x = x * mask[..., None]
        a, b = torch.chunk(x, 2, dim=-1)
        x = torch.einsum(self.equation, a, b)
        return self.p_out(self.norm_out(x)) * self.g_out(x_in).sigmoid()


FAMILIES = {"lucidrains": Lucidrains, "openfold": OpenFold, "boltz": Boltz}


def draw_(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draws every parameter as GPU MODE's challenge does: norms normal, matrices of the variance 1 / outputs."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
            if parameter.ndim == 2:
                parameter /= parameter.shape[0] ** 0.5
    return module
