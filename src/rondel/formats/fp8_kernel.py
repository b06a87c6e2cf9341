"""E4M3 codes under scales of blocks, on a GPU: a weight is read once and written once, in both directions.

    encode   w [B, O, I] -> codes, a byte a number, and scales [B, O/rows, I/128]     a program: one block of 128 ×
             128, or
    decode   the reverse, in the dtype that is asked for                              16 rows of blocks of 1 × 128

The bits are those of formats/fp8.py: divisions are rounded to nearest, scales go up to the next bfloat16, codes are
rounded in integers as torch does it, which also works on cards whose Triton has no type of eight bits (sm_80).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128  # of a block
TILE_ROWS = 16  # of a program, where each has scales of its own
OPTIONS = {"num_warps": 8}
_MOST, _LEAST = tl.constexpr(448.0), tl.constexpr(2.0**-100)  # E4M3_MOST and LEAST of formats/blocks.py


def encode_blocks(weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """[..., O, I] -> codes [..., O, I], scales [..., ⌈O/rows⌉, ⌈I/128⌉] in float32;
    inf where a number is not finite."""
    *lead, o, i = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*lead, -(-o // rows), -(-i // COLUMNS), dtype=torch.float32, device=weight.device)
    _launch(_encode_kernel, weight.contiguous(), codes, scale, rows)
    return codes.view(torch.float8_e4m3fn), scale


def decode_blocks(codes: Tensor, scale: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The reverse. -> [..., O, I] in `dtype`"""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _launch(_decode_kernel, out, codes.contiguous().view(torch.uint8), scale.contiguous(), rows)
    return out


def _launch(kernel: triton.JITFunction, numbers: Tensor, codes: Tensor, scale: Tensor, rows: int) -> None:
    *lead, o, i = numbers.shape
    tile = TILE_ROWS if rows == 1 else rows
    grid = (triton.cdiv(o, tile), triton.cdiv(i, COLUMNS), torch.Size(lead).numel())
    if numbers.numel():
        kernel[grid](numbers, codes, scale, o, i, ROWS=tile, COLUMNS=COLUMNS, BY_ROW=rows == 1, **OPTIONS)


@triton.jit
def _places(o, i, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr):
    """-> where the numbers of a program lie and which exist [ROWS, COLUMNS], where its scales lie and which exist."""
    high, wide, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, column = high * ROWS + tl.arange(0, ROWS), wide * COLUMNS + tl.arange(0, COLUMNS)
    place = (matrix * o + row[:, None]) * i + column[None, :]
    exists = (row[:, None] < o) & (column[None, :] < i)
    across = tl.cdiv(i, COLUMNS)
    if BY_ROW:
        return place, exists, (matrix * o + row) * across + wide, row < o
    else:
        return place, exists, (matrix * tl.num_programs(0) + high) * across + wide, high >= 0


@triton.jit
def _encode_kernel(
    numbers, codes, scales, o, i, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr
):  # fmt: skip
    place, exists, at, has_scale = _places(o, i, ROWS, COLUMNS, BY_ROW)
    w = tl.load(numbers + place, mask=exists, other=0.0).to(tl.float32)
    size = tl.where(w == w, tl.abs(w), float("inf"))
    largest = tl.max(size, 1) if BY_ROW else tl.max(tl.max(size, 1), 0)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + _MOST)
    up = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)  # the next bfloat16
    scale = tl.maximum(up, _LEAST)
    tl.store(scales + at, scale, mask=has_scale)

    spread = (scale[:, None] if BY_ROW else scale) + tl.zeros_like(w)
    x = tl.minimum(tl.maximum(tl.div_rn(w, spread), -_MOST), _MOST)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # below 2^-6, E4M3 is in steps of 2^-9: those that float32 has at 2^14
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # to nearest, ties to even
    code = tl.where(bits < (121 << 23), small, normal) | sign
    tl.store(codes + place, code.to(tl.uint8), mask=exists)


@triton.jit
def _decode_kernel(
    numbers, codes, scales, o, i, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr
):  # fmt: skip
    place, exists, at, has_scale = _places(o, i, ROWS, COLUMNS, BY_ROW)
    code = tl.load(codes + place, mask=exists, other=0).to(tl.int32)
    scale = tl.load(scales + at, mask=has_scale, other=0.0).to(tl.float32)
    low = code & 0x7F
    x = tl.where(low < 8, low.to(tl.float32) * 0.001953125, ((low << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    x = tl.where(low == 0x7F, float("nan"), x)
    x = x * ((scale[:, None] if BY_ROW else scale) + tl.zeros_like(x))
    # a sign bit, not a difference: compiled, -x is 0 - x, and 0 - 0 has no sign
    x = (x.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(numbers + place, x.to(numbers.dtype.element_ty), mask=exists)
