"""MXFP4 as FP8 without loss: engines that have products of FP8 alone compute with a checkpoint of MXFP4 bit for bit.

A block of 128 x 128 has one scale 2^b where MXFP4 has 512 scales 2^e. A number v · 2^(e-b), v of E2M1, is in E4M3
wherever the largest of the e lies at most 14 above the smallest one in use: from 6 · 2^6 (below 448) down to ½ · 2^-8
(the smallest subnormal number of E4M3 is 2^-9). (DeepSeek-V4 report.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondel.formats.blocks import BIAS, E4M3, cut_blocks, join_blocks
from rondel.formats.fp4 import Mxfp4
from rondel.formats.fp8 import Fp8
from rondel.formats.number_format import Parts

UP = 6  # 6 · 2^6 = 384 is the largest number of E2M1 times a power of two that E4M3 has


def fold_to_fp8(parts: Parts) -> tuple[Parts, Tensor]:
    """Of MXFP4 -> parts of Fp8(128, 128), and which blocks [..., H, W] lost something: their scales lie too far apart.
    Where one did, decode to bfloat16 instead.
    """
    form, shape = Mxfp4(), torch.Size(parts["weight_shape"].tolist())
    numbers = form.decode(parts)
    blocks = cut_blocks(numbers, *Fp8().block)
    columns = form.block[1]
    spread = parts["weight_scale"].int()[..., None].expand(*parts["weight_scale"].shape, columns).flatten(-2)
    powers = cut_blocks(spread[..., : shape[-1]], *Fp8().block).int() - BIAS
    used = blocks != 0
    top = torch.where(used, powers, -(1 << 20)).amax((-3, -1), keepdim=True)
    power = torch.where(used.any(-1, keepdim=True).any(-3, keepdim=True), top - UP, 0)
    scale = torch.ldexp(torch.ones(power.shape), power)
    codes = (blocks / scale).to(E4M3)
    lost = ((codes.float() * scale) != blocks).any(-1).any(-2)
    found = join_blocks(codes.view(torch.uint8), shape).contiguous().view(E4M3)
    return {"weight": found, "weight_scale_inv": scale[..., :, 0, :, 0].contiguous()}, lost
