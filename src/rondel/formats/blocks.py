"""Weights cut into blocks that share a scale, and scales that a second encoding finds again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.core.errors import ModelError

LEAST = 2.0**-100  # a scale: of a block of zeros, too
BIAS = 127  # of an E8M0 scale: 2^(byte - 127)
E4M3, E4M3_MOST = torch.float8_e4m3fn, 448.0


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to nearest; what is too large becomes the largest number."""
    return x.clamp(-E4M3_MOST, E4M3_MOST).to(E4M3)


def cut_blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[..., O, I] -> [..., ⌈O/rows⌉, rows, ⌈I/columns⌉, columns] in float32; what is missing at the edges is 0."""
    *lead, o, i = weight.shape
    whole = weight.float()
    if o % rows or i % columns:
        whole = F.pad(whole, (0, -i % columns, 0, -o % rows))
    return whole.reshape(*lead, -(-o // rows), rows, -(-i // columns), columns)


def join_blocks(blocks: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The reverse, without the edges. -> `shape`"""
    *lead, high, rows, wide, columns = blocks.shape
    o, i = shape[-2:]
    return blocks.reshape(*lead, high * rows, wide * columns)[..., :o, :i].reshape(shape)


def largest_of(blocks: Tensor, name: str) -> Tensor:
    """Of [..., H, rows, W, columns] the largest absolute value of each block, [..., H, 1, W, 1]. ModelError where one
    is not finite; `name`: of the format.
    """
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    refuse_infinite(largest, name)
    return largest


def refuse_infinite(largest: Tensor, name: str) -> None:
    """ModelError where one of the blocks' largest numbers, or of their scales, is not finite."""
    if not bool(torch.isfinite(largest).all()):
        raise ModelError(
            f"a weight that is not finite has no {name}: the training diverged, or the checkpoint is broken. "
            "Go on from an earlier checkpoint, or lower trainer.lr"
        )


def divide(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once. By a number of the host CUDA multiplies with its reciprocal, and 448 s / 448 is not s."""
    return x / x.new_full((), by)


def round_up_to_bf16(scale: Tensor) -> Tensor:
    """The next number of eight bits, in float32.

    A code of four bits times such a scale is exact in float32, and so is the largest code's: whoever
    encodes what was decoded finds the same scales, which a quotient of 24 bits does not promise.
    """
    near = scale.to(torch.bfloat16)
    above = torch.where(near.float() < scale, near.view(torch.int16) + 1, near.view(torch.int16))
    return above.view(torch.bfloat16).float().clamp_min(LEAST)


def power_below(x: Tensor) -> Tensor:
    """⌊log₂ x⌋ of positive numbers; of zero the exponent of LEAST."""
    return torch.frexp(x.clamp_min(LEAST)).exponent - 1


def divide_by_power(weight: Tensor, block: tuple[int, int], top: int, name: str) -> tuple[Tensor, Tensor]:
    """Each block over 2^e, e = floor(log2 max|w|) - top (OCP MX 1.0). -> [..., O, I] in float32, bytes e + 127 [...,
    H, W].
    """
    blocks = cut_blocks(weight, *block)
    power = (power_below(largest_of(blocks, name)) - top).clamp(-BIAS, BIAS)
    scaled = join_blocks(torch.ldexp(blocks, -power), weight.shape)
    return scaled, (power + BIAS)[..., :, 0, :, 0].to(torch.uint8)


def multiply_by_power(numbers: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The reverse: [..., O, I] and bytes [..., H, W] -> [..., O, I] in float32."""
    power = scale[..., :, None, :, None].int() - BIAS
    return join_blocks(torch.ldexp(cut_blocks(numbers, *block), power), numbers.shape)
