"""Four bits, E2M1: 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, under scales of 32 numbers (MXFP4) or 16 (NVFP4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rondel.formats.blocks import (
    E4M3_MOST,
    LEAST,
    cut_blocks,
    divide,
    divide_by_power,
    join_blocks,
    largest_of,
    multiply_by_power,
    to_e4m3,
)
from rondel.formats.number_format import NumberFormat, Parts

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MOST, TOP = 6.0, 2  # the largest number, and its exponent
BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of two neighbours
EVEN = (0.75, 1.75, 3.5)  # ties that go up, to the neighbour whose last bit is 0
LEAST_BLOCK = (
    2.0**-6
)  # a block's scale in E4M3: below it lie subnormal ones, which a second encoding would not find again


def to_e2m1(x: Tensor) -> Tensor:
    """float -> codes 0 to 15 (the sign is bit 3), to nearest, ties to even; what is too large becomes 6."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for border in BETWEEN:
        code += (size >= border) if border in EVEN else (size > border)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """Codes 0 to 15 -> float32."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=codes.device)
    return table[codes.long()]


def pack_pairs(codes: Tensor) -> Tensor:
    """[..., I] of 0 to 15 -> uint8 [..., ⌈I/2⌉], the first of two in the low bits."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return padded[..., ::2] | (padded[..., 1::2] << 4)


def unpack_pairs(packed: Tensor, count: int) -> Tensor:
    """uint8 [..., ⌈count/2⌉] -> [..., count] of 0 to 15."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :count]


@dataclass(frozen=True)
class Mxfp4(NumberFormat):
    """w = code · 2^e: a byte e + 127 for 32 numbers of a row, e = ⌊log₂ max|w|⌋ - 2."""

    name: ClassVar[str] = "mxfp4"
    source: ClassVar[str] = "OCP Microscaling Formats 1.0"
    block: tuple[int, int] = (1, 32)

    def encode(self, weight: Tensor) -> Parts:
        scaled, scale = divide_by_power(weight, self.block, TOP, self.name)
        return {
            "weight_packed": pack_pairs(to_e2m1(scaled)),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = torch.Size(parts["weight_shape"].tolist())
        numbers = from_e2m1(unpack_pairs(parts["weight_packed"], shape[-1]))
        return multiply_by_power(numbers, parts["weight_scale"], self.block).to(dtype)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        *lead, o, i = shape
        return torch.Size(lead).numel() * o * (-(-i // 2) + -(-i // self.block[1])) + 8 * len(shape)


@dataclass(frozen=True)
class Nvfp4(NumberFormat):
    """w = code · (s / g): an E4M3 scale for 16 numbers of a row, s = g max|w|/6, and one float32 for the tensor,
    g = 6 · 448 / max|w|.
    """

    name: ClassVar[str] = "nvfp4"
    source: ClassVar[str] = "NVIDIA, 'Pretraining large language models with NVFP4', arXiv:2509.25149"
    block: tuple[int, int] = (1, 16)

    @property
    def scales_tensor(self) -> bool:
        return True

    def encode(self, weight: Tensor) -> Parts:
        blocks = cut_blocks(weight, *self.block)
        largest = largest_of(blocks, self.name)
        # of eight bits, so that the largest number that is decoded leads to it again
        whole = (MOST * E4M3_MOST / largest.amax().clamp_min(LEAST)).to(torch.bfloat16).float()
        scale = to_e4m3(divide(largest * whole, MOST).clamp_min(LEAST_BLOCK))
        codes = join_blocks(to_e2m1(blocks / (scale.float() / whole)), weight.shape)
        return {
            "weight_packed": pack_pairs(codes),
            "weight_scale": scale[..., :, 0, :, 0].contiguous(),
            "weight_global_scale": whole.reshape(1),
            "weight_shape": torch.tensor(weight.shape),
        }

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = torch.Size(parts["weight_shape"].tolist())
        numbers = cut_blocks(from_e2m1(unpack_pairs(parts["weight_packed"], shape[-1])), *self.block)
        scale = parts["weight_scale"][..., :, None, :, None].float() / parts["weight_global_scale"]
        return join_blocks(numbers * scale, shape).to(dtype)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        *lead, o, i = shape
        return torch.Size(lead).numel() * o * (-(-i // 2) + -(-i // self.block[1])) + 4 + 8 * len(shape)
