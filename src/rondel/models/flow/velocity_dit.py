"""A small diffusion transformer: it says with which velocity the pixels of a square grayscale image move.

patches of the image ──> tokens ──> blocks of attention and MLP ──> velocities of the patches

The noise level and the prompt steer every block by adaptive layer norm: h += gate·f(scale·norm(h) + shift), with the
three from one linear layer that begins at 0 (arXiv:2212.09748, adaLN-Zero). The parts of a pass that sum over numbers
are linear layers, and attention within one image, so an image has the same bits whatever stands beside it.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from rondel.models.flow.transition import sinusoidal
from rondel.models.flow.velocity_model import VelocityConfig, VelocityModel


class FlowDitConfig(VelocityConfig):
    """Of `FlowDit`. dim: pixels, a square number; patch_size: side of a patch, in pixels; mlp_ratio: how much wider than
    a token the hidden layer of a block's MLP is.
    """

    model_type = "flow_dit"

    dim: int = 64
    patch_size: int = 2
    num_attention_heads: int = 4
    mlp_ratio: int = 4

    @property
    def patches(self) -> int:
        """Along one side of an image. ValueError where image, patches and heads do not fit."""
        side = math.isqrt(self.dim)
        if side * side != self.dim or side % self.patch_size:
            raise ValueError(
                f"dim = {self.dim} pixels are no square image of patches of {self.patch_size}·{self.patch_size}; "
                "8·8 pixels are dim = 64"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is no multiple of num_attention_heads = {self.num_attention_heads}"
            )
        return side // self.patch_size


class FlowDit(VelocityModel):
    """Blocks on the patches of an image, steered by its noise level and the prompt."""

    config_class = FlowDitConfig

    def __init__(self, config: FlowDitConfig) -> None:
        super().__init__(config)
        width, pixels = config.hidden_size, config.patch_size**2
        self.embed = nn.Embedding(config.vocab_size, width)
        self.level = nn.Linear(2 * config.frequencies, width)
        self.enter = nn.Linear(pixels, width)
        self.places = nn.Embedding(config.patches**2, width)
        self.layers = nn.ModuleList(DitBlock(config) for _ in range(config.num_hidden_layers))
        self.modulation = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, pixels)
        self.post_init()

    def _begin_at_0(self) -> list[nn.Module]:
        blocks = [module.modulation for module in self.layers if isinstance(module, DitBlock)]
        return [self.leave, self.modulation, *blocks]

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor) -> Tensor:
        """[M, D], [M], [M, W] -> velocities [M, D]"""
        steer = F.silu(self.level(sinusoidal(sigma, self.config.frequencies)) + condition)
        hidden = self.enter(self._to_patches(x)) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, steer)
        shift, scale = self.modulation(steer)[:, None].chunk(2, -1)
        return self._to_pixels(self.leave(modulated_norm(hidden, shift, scale)))

    def _to_patches(self, x: Tensor) -> Tensor:
        """[M, D] -> [M, patches, pixels of one]"""
        n, p = self.config.patches, self.config.patch_size
        return x.view(-1, n, p, n, p).transpose(2, 3).reshape(-1, n * n, p * p)

    def _to_pixels(self, patches: Tensor) -> Tensor:
        n, p = self.config.patches, self.config.patch_size
        return patches.view(-1, n, n, p, p).transpose(2, 3).reshape(-1, self.config.dim)


class DitBlock(nn.Module):
    """Attention among the patches of one image, then an MLP on each."""

    def __init__(self, config: FlowDitConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, config.mlp_ratio * width)
        self.down = nn.Linear(config.mlp_ratio * width, width)

    def forward(self, hidden: Tensor, steer: Tensor) -> Tensor:
        """[M, P, W], [M, W] -> [M, P, W]"""
        shift, scale, gate, shift_up, scale_up, gate_up = self.modulation(steer)[:, None].chunk(6, -1)
        hidden = hidden + gate * self._attend(modulated_norm(hidden, shift, scale))
        inner = F.silu(self.up(modulated_norm(hidden, shift_up, scale_up)))
        result: Tensor = hidden + gate_up * self.down(inner)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        m, p, width = x.shape
        q, k, v = self.qkv(x).view(m, p, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(m, p, width))
        return out


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale)·(x - mean) / deviation + shift, of each token."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


AutoConfig.register(FlowDitConfig.model_type, FlowDitConfig)
AutoModel.register(FlowDitConfig, FlowDit)
