"""A diffusion transformer on the latents of a video: every patch of every frame attends to all others.

latents [frames, height, width, channels] ──> patches of patch_frames · patch_size · patch_size ──> velocities of all

Where a patch lies is told by rotations of queries and keys: of the d numbers of a head a first part turns with the
frame, a second with the row and a third with the column, each part at frequencies 1 to 1 / 10,000 (arXiv:2104.09864),
divided as Wan has it (arXiv:2503.20314): d/2 - 2·(d/6), d/6 and d/6 pairs. No table bounds the number of frames.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from rondel.models.flow.kinds import FLOW_VIDEO
from rondel.models.flow.patch_transformer import PatchTransformer
from rondel.models.flow.velocity_model import VelocityConfig

THETA = 10_000.0  # of the slowest rotation, an angle of 1 / THETA a position


class FlowVideoConfig(VelocityConfig):
    """Of `FlowVideo`. frames, height, width, channels: of the latents; patch_frames, patch_size: of a patch, along the
    frames and along both sides; intermediate_size: width of the hidden layer of a block's MLP.
    """

    model_type = FLOW_VIDEO

    frames: int = 4
    height: int = 8
    width: int = 8
    channels: int = 1
    patch_frames: int = 1
    patch_size: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 256

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches along frames, height and width. ValueError where latents, patches and heads do not fit."""
        for name, size, patch in (
            ("frames", self.frames, self.patch_frames),
            ("height", self.height, self.patch_size),
            ("width", self.width, self.patch_size),
        ):
            if patch < 1 or size < 1 or size % patch:
                raise ValueError(f"{name} = {size} cannot be cut into patches of {patch}: take a multiple")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not give {self.num_attention_heads} heads an even number each: "
                f"take a multiple of {2 * self.num_attention_heads}"
            )
        if self.hidden_size < 6 * self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} gives {self.num_attention_heads} heads fewer than 6 numbers each, "
                f"two of which turn with frames, rows and columns: take at least {6 * self.num_attention_heads}"
            )
        return self.frames // self.patch_frames, self.height // self.patch_size, self.width // self.patch_size


def rotary_angles(grid: tuple[int, int, int], head: int) -> Tensor:
    """[P, head / 2] float64: by how much each pair of numbers of a head turns at each of the P places of the grid, in
    the order of frames, rows, columns.
    """
    pairs = head // 2
    third = pairs // 3
    angles = []
    for axis, n in enumerate((pairs - 2 * third, third, third)):
        speed = THETA ** -(torch.arange(n, dtype=torch.float64) / max(1, n))
        shape = [1, 1, 1, n]
        shape[axis] = grid[axis]
        turned = torch.arange(grid[axis], dtype=torch.float64)[:, None] * speed
        angles.append(turned.view(shape).expand(*grid, n).reshape(-1, n))
    return torch.cat(angles, 1)


class FlowVideo(PatchTransformer):
    """Blocks on the patches of a video, whose places are rotations. A point is its latents in the order frames, height,
    width, channels.
    """

    config_class = FlowVideoConfig

    def __init__(self, config: FlowVideoConfig) -> None:
        config.grid  # noqa: B018  (refuses sizes that do not fit)
        config.dim = config.frames * config.height * config.width * config.channels
        super().__init__(
            config,
            heads=config.num_attention_heads,
            inner=config.intermediate_size,
            numbers=config.patch_frames * config.patch_size**2 * config.channels,
        )
        self._turns: Tensor | None = None

    @property
    def token_count(self) -> int:
        frames, rows, columns = self.config.grid
        return int(frames * rows * columns)

    def turns(self) -> Tensor:
        if self._turns is None or self._turns.device != self.enter.weight.device:
            angles = rotary_angles(self.config.grid, self.config.hidden_size // self.config.num_attention_heads)
            self._turns = torch.stack([angles.cos(), angles.sin()]).to(self.enter.weight.device, torch.float32)
        return self._turns

    def cut_patches(self, x: Tensor) -> Tensor:
        (f, h, w), c = self.config.grid, self.config
        cut = x.view(-1, f, c.patch_frames, h, c.patch_size, w, c.patch_size, c.channels)
        return cut.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(x.shape[0], f * h * w, -1)

    def join_patches(self, patches: Tensor) -> Tensor:
        (f, h, w), c = self.config.grid, self.config
        cut = patches.view(-1, f, h, w, c.patch_frames, c.patch_size, c.patch_size, c.channels)
        return cut.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(patches.shape[0], -1)


AutoConfig.register(FlowVideoConfig.model_type, FlowVideoConfig)
AutoModel.register(FlowVideoConfig, FlowVideo)
