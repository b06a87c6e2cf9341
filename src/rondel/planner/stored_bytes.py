"""Bytes of a model whose matrices are kept in fewer bits than its other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rondel.planner.shapes import ModelShape


def encoded_bytes(shape: ModelShape, bits: float, width: float) -> float:
    """Bytes with the linear layers' matrices in a number format of so many bits, the rest at `width` bytes a number."""
    inside = shape.matrix_parameters
    return inside * bits / 8 + (shape.parameter_count - inside) * width


def nf4_bytes(shape: ModelShape, width: float) -> float:
    """Bytes with those layers in 4 bits, the rest at `width` bytes a number.
    arXiv:2305.14314: (4 + 8/64 + 32/(64·256)) / 8 a number.
    """
    inside = [(i * o, count) for (i, o), count in shape.linear_shapes.values()]
    rest = shape.parameter_count - sum(numbers * count for numbers, count in inside)
    return rest * width + sum(_nf4_layer_bytes(numbers) * count for numbers, count in inside)


def _nf4_layer_bytes(numbers: int) -> int:
    """Bytes of one layer, as models/nf4.py packs it."""
    blocks = -(-numbers // 64)
    return blocks * 33 + 4 * -(-blocks // 256) + 4
