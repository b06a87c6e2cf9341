"""A diffusion transformer on patches of a point: it says with which velocity its numbers move.

patches of the point ──> tokens ──> blocks of attention and MLP (dit_block.py) ──> velocities of the patches

The parts of a pass that sum over numbers are linear layers, and attention within one sample, so a sample has the same
bits whatever stands beside it.

M samples · D numbers of a point · P patches of N numbers each, P·N = D · W width
"""

from __future__ import annotations

from torch import Tensor, nn

from rondel.models.collectives import enter_cut
from rondel.models.elementwise import silu
from rondel.models.flow.dit_block import DitBlock, modulated_norm
from rondel.models.flow.token_share import SplitTokens, TokenShare
from rondel.models.flow.transition import sinusoidal
from rondel.models.flow.velocity_model import VelocityConfig, VelocityModel


class PatchTransformer(VelocityModel):
    """What images and videos have in common; how a point falls into patches is their own."""

    _no_split_modules = ["DitBlock"]  # noqa: RUF012

    def __init__(self, config: VelocityConfig, *, heads: int, inner: int, numbers: int, places: int = 0) -> None:
        """heads, inner: of a block; numbers: N of a patch; places: how many have a learned vector of their own."""
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.level = nn.Linear(2 * config.frequencies, width)
        self.enter = nn.Linear(numbers, width)
        self.places = nn.Embedding(places, width) if places else None
        self.layers = nn.ModuleList(DitBlock(width, heads, inner) for _ in range(config.num_hidden_layers))
        self.modulation = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, numbers)
        self.between: SplitTokens | None = None  # who has which tokens between the parts of a block (block_cuts.py)
        self.post_init()

    def _begin_at_0(self) -> list[nn.Module]:
        blocks = [module.modulation for module in self.layers if isinstance(module, DitBlock)]
        return [self.leave, self.modulation, *blocks]

    def cut_patches(self, x: Tensor) -> Tensor:
        """[M, D] -> [M, P, N]"""
        raise NotImplementedError

    def join_patches(self, patches: Tensor) -> Tensor:
        """[M, P, N] -> [M, D]"""
        raise NotImplementedError

    @property
    def token_count(self) -> int:
        """P."""
        raise NotImplementedError

    def turns(self) -> Tensor | None:
        """[2, P, d / 2] cosines and sines by which queries and keys are turned; None where places are learned."""
        return None

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor) -> Tensor:
        """[M, D], [M], [M, W] -> velocities [M, D]"""
        return self.join_patches(self.patch_velocities(self.cut_patches(x), sigma, condition))

    def patch_velocities(
        self, patches: Tensor, sigma: Tensor, condition: Tensor, share: TokenShare | None = None
    ) -> Tensor:
        """[M, P, N], [M], [M, W] -> [M, P, N]; with a `share`, of this rank's patches and for them."""
        steer = silu(self.level(sinusoidal(sigma, self.config.frequencies)) + condition)
        hidden, turns = self.enter(patches), self.turns()
        if self.places is not None:
            hidden = hidden + (self.places.weight if share is None else share.own(self.places.weight[None]))
        if turns is not None and share is not None:
            turns = share.own(turns)
        steering = steer
        if self.between is not None:
            self.between.tokens = hidden.shape[1]
            hidden, steering = self.between.keep(hidden, summed=False), enter_cut(steer, self.between.ranks)
        for layer in self.layers:
            hidden = layer(hidden, steering, turns, share)
        if self.between is not None:
            hidden = self.between.join(hidden, summed=False)
        shift, scale = self.modulation(steer)[:, None].chunk(2, -1)
        velocities: Tensor = self.leave(modulated_norm(hidden, shift, scale))
        return velocities
