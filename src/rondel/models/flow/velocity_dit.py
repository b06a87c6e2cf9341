"""A small diffusion transformer: it says with which velocity the pixels of a square grayscale image move."""

from __future__ import annotations

import math

from torch import Tensor
from transformers import AutoConfig, AutoModel

from rondel.models.flow.kinds import FLOW_DIT
from rondel.models.flow.patch_transformer import PatchTransformer
from rondel.models.flow.velocity_model import VelocityConfig


class FlowDitConfig(VelocityConfig):
    """Of `FlowDit`. dim: pixels, a square number; patch_size: side of a patch, in pixels; mlp_ratio: how much wider
    than a token the hidden layer of a block's MLP is.
    """

    model_type = FLOW_DIT

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


class FlowDit(PatchTransformer):
    """Blocks on the patches of an image, each of which has a learned place (arXiv:2212.09748)."""

    config_class = FlowDitConfig

    def __init__(self, config: FlowDitConfig) -> None:
        super().__init__(
            config,
            heads=config.num_attention_heads,
            inner=config.mlp_ratio * config.hidden_size,
            numbers=config.patch_size**2,
            places=config.patches**2,
        )

    @property
    def token_count(self) -> int:
        return int(self.config.patches**2)

    def cut_patches(self, x: Tensor) -> Tensor:
        n, p = self.config.patches, self.config.patch_size
        return x.view(-1, n, p, n, p).transpose(2, 3).reshape(-1, n * n, p * p)

    def join_patches(self, patches: Tensor) -> Tensor:
        n, p = self.config.patches, self.config.patch_size
        return patches.view(-1, n, n, p, p).transpose(2, 3).reshape(-1, self.config.dim)


AutoConfig.register(FlowDitConfig.model_type, FlowDitConfig)
AutoModel.register(FlowDitConfig, FlowDit)
