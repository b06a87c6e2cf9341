"""Eight bits: E4M3 codes under scales of float32 (DeepSeek-V3, arXiv:2412.19437) or of a power of two (OCP MX 1.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rondel.formats.blocks import (
    E4M3,
    E4M3_MOST,
    cut_blocks,
    divide,
    divide_by_power,
    join_blocks,
    largest_of,
    multiply_by_power,
    refuse_infinite,
    round_up_to_bf16,
    to_e4m3,
)
from rondel.formats.number_format import NumberFormat, Parts
from rondel.system.kernel_choice import KernelChoice, choose_kernel

TOP = 8  # the exponent of its largest number
WIDENED = 2.0**120  # between an E4M3 code and the bfloat16 number of the same bits: biases of 7 and 127


def widen_codes(codes: Tensor, scale: Tensor) -> Tensor | None:
    """E4M3 codes moved into the bits of bfloat16, which are code / WIDENED: on a CPU torch's cast takes eight times as
    long. None where the product with the scale, rounded once, would have other bits than in float32.
    """
    raw = codes.view(torch.uint8)
    if not raw.numel():
        return None
    exact = bool((scale.to(torch.bfloat16).float() == scale).all()) and float(scale.max()) < 2.0**7
    if not exact or int((raw & 0x7F).max()) == 0x7F:  # the code of no number
        return None
    bits = raw.to(torch.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).view(torch.bfloat16)


@dataclass(frozen=True)
class Fp8(NumberFormat):
    """w = code · s: E4M3 codes [..., O, I], one float32 scale a block, s = max|w|/448.

    block    (128, 128) as checkpoints have it; (1, 128); (1, 0) a row; (0, 0) a tensor. 0: all of that dimension.
    """

    name: ClassVar[str] = "fp8"
    source: ClassVar[str] = "arXiv:2412.19437"
    block: tuple[int, int] = (128, 128)

    def encode(self, weight: Tensor) -> Parts:
        if self.choose_kernel(weight, weight.dtype).takes_kernel:
            from rondel.formats.fp8_kernel import encode_blocks

            codes, scale = encode_blocks(weight, self.block[0])
            refuse_infinite(scale, self.name)
            return {"weight": codes, "weight_scale_inv": scale}
        blocks = cut_blocks(weight, *self._size(weight.shape))
        scale = round_up_to_bf16(divide(largest_of(blocks, self.name), E4M3_MOST))
        codes = join_blocks(to_e4m3(blocks / scale).view(torch.uint8), weight.shape).contiguous().view(E4M3)
        return {"weight": codes, "weight_scale_inv": scale[..., :, 0, :, 0].contiguous()}

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        codes, scale = parts["weight"], parts["weight_scale_inv"]
        if self.choose_kernel(codes, dtype).takes_kernel:
            from rondel.formats.fp8_kernel import decode_blocks

            return decode_blocks(codes, scale, self.block[0], dtype)
        if dtype == torch.bfloat16 and codes.is_cpu and (numbers := widen_codes(codes, scale)) is not None:
            rows, columns = self._size(codes.shape)
            wide = scale.to(dtype).mul(WIDENED).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
            return numbers * wide[..., : codes.shape[-2], : codes.shape[-1]]
        blocks = cut_blocks(codes, *self._size(codes.shape))
        return join_blocks(blocks * scale[..., :, None, :, None].float(), codes.shape).to(dtype)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        *lead, o, i = shape
        rows, columns = self._size(shape)
        return torch.Size(lead).numel() * (o * i + 4 * -(-o // rows) * -(-i // columns))

    def choose_kernel(self, x: Tensor, dtype: torch.dtype) -> KernelChoice:
        """Whether the kernels of fp8_kernel.py encode or decode `x`, whose numbers are of `dtype`."""
        unsupported = {
            f"blocks of {self.block[0]} × {self.block[1]}": self.block not in ((1, 128), (128, 128)),
            str(dtype): dtype not in (torch.float32, torch.bfloat16, torch.float16),
        }
        return choose_kernel(x.device.type, *(what for what, present in unsupported.items() if present))

    def _size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.block[0] or shape[-2], self.block[1] or shape[-1]


@dataclass(frozen=True)
class Mxfp8(NumberFormat):
    """w = code · 2^e: E4M3 codes [..., O, I], a byte e + 127 for 32 numbers of a row, e = ⌊log₂ max|w|⌋ - 8."""

    name: ClassVar[str] = "mxfp8"
    source: ClassVar[str] = "OCP Microscaling Formats 1.0"
    block: tuple[int, int] = (1, 32)

    def encode(self, weight: Tensor) -> Parts:
        scaled, scale = divide_by_power(weight, self.block, TOP, self.name)
        return {"weight": to_e4m3(scaled), "weight_scale": scale}

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        return multiply_by_power(parts["weight"], parts["weight_scale"], self.block).to(dtype)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        *lead, o, i = shape
        return torch.Size(lead).numel() * o * (i + -(-i // self.block[1]))
