"""Four bits, whole numbers: symmetric groups of a row, as W4A16 of compressed-tensors stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rondel.formats.blocks import LEAST, cut_blocks, divide, join_blocks, largest_of
from rondel.formats.number_format import NumberFormat, Parts

MOST = 7.0  # codes -7 to 7; -8 is read, never written
ZERO = 8  # what a nibble of 0 stands for is -8
NIBBLES = 8  # of an int32


@dataclass(frozen=True)
class Int4(NumberFormat):
    """w = code · s: nibbles, a bfloat16 scale for `block[1]` numbers of a row, s = max|w|/7.

    Eight nibbles lie in an int32, the first in its lowest bits: packed [..., O, ⌈I/8⌉].
    """

    name: ClassVar[str] = "int4"
    source: ClassVar[str] = "arXiv:2210.17323"
    block: tuple[int, int] = (1, 32)

    def encode(self, weight: Tensor) -> Parts:
        blocks = cut_blocks(weight, *self.block)
        scale = divide(largest_of(blocks, self.name), MOST).clamp_min(LEAST).to(torch.bfloat16)
        codes = (blocks / scale.float()).round_().clamp_(-MOST, MOST)
        codes = join_blocks(codes, weight.shape)
        return {
            "weight_packed": pack_nibbles(codes.to(torch.int32) + ZERO),
            "weight_scale": scale[..., :, 0, :, 0].contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = torch.Size(parts["weight_shape"].tolist())
        codes = unpack_nibbles(parts["weight_packed"], shape[-1]) - ZERO
        scale = parts["weight_scale"][..., :, None, :, None].float()
        return join_blocks(cut_blocks(codes, *self.block) * scale, shape).to(dtype)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        *lead, o, i = shape
        rows = torch.Size(lead).numel() * o
        return rows * (4 * -(-i // NIBBLES) + 2 * -(-i // self.block[1])) + 8 * len(shape)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., I] of 0 to 15 -> int32 [..., ⌈I/8⌉]; the rest of the last one is 0."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % NIBBLES))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    # bits do not overlap, so a sum is an or; the highest nibble may set the sign
    return (padded.to(torch.int32).unflatten(-1, (-1, NIBBLES)) << shifts).sum(-1, dtype=torch.int32)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """int32 [..., ⌈count/8⌉] -> [..., count] of 0 to 15."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & 15).flatten(-2)[..., :count]
