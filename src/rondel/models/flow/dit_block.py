"""One block of a diffusion transformer: attention among all patches of a sample, then an MLP on each of them.

The noise level and the prompt steer it by adaptive layer norm: h += gate·f(scale·norm(h) + shift), with the three from
one linear layer that begins at 0 (arXiv:2212.09748, adaLN-Zero).

M samples · P patches of one · W width · H heads of d numbers
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.models.collectives import computed_again
from rondel.models.elementwise import silu
from rondel.models.flow.token_share import TokenShare


class DitBlock(nn.Module):
    """heads: H; inner: width of the MLP's hidden layer. Where ranks share it (block_cuts.py),
    a rank has its part of both."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(
        self, hidden: Tensor, steer: Tensor, turns: Tensor | None = None, share: TokenShare | None = None
    ) -> Tensor:
        """[M, P, W], [M, W] -> [M, P, W]

        turns   [2, P, d / 2] cosines and sines of the angles by which queries and keys are turned (video_dit.py)
        share   who has the other patches, where these are one rank's: then P, and `turns`, are of its own
        """
        shift, scale, gate, shift_up, scale_up, gate_up = self.modulation(steer)[:, None].chunk(6, -1)
        hidden = hidden + gate * self._attend(modulated_norm(hidden, shift, scale), turns, share)
        inner = silu(self.up(modulated_norm(hidden, shift_up, scale_up)))
        result: Tensor = hidden + gate_up * self.down(inner)
        return result

    def _attend(self, x: Tensor, turns: Tensor | None, share: TokenShare | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if turns is not None:
            q, k = rotate_pairs(q, turns), rotate_pairs(k, turns)
        if share is None:
            seen = F.scaled_dot_product_attention(q, k, v)
        else:
            rows = torch.stack([k, v]).permute(3, 0, 1, 2, 4)  # [P, 2, M, H, d]
            seen = computed_again(share.attend, q, rows)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Numbers 2i and 2i + 1 turned by the i-th angle of their position.  [..., P, d], [2, P, d / 2] -> [..., P, d]
    arXiv:2104.09864: the product of two of them then depends on the difference of their positions alone.
    """
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale)·(x - mean) / deviation + shift, of each token."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
