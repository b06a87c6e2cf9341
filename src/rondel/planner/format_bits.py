"""Bits of a weight in each number format (rondel.formats), for plans that are made without torch."""

from __future__ import annotations

# of a large matrix, with its share of the scales
FORMAT_BITS = {
    "fp8": 8 + 32 / 128**2,
    "fp8_row": 8.0,
    "fp8_tensor": 8.0,
    "mxfp8": 8 + 8 / 32,
    "int4": 4 + 16 / 32,
    "int4_128": 4 + 16 / 128,
    "mxfp4": 4 + 8 / 32,
    "nvfp4": 4 + 8 / 16,
}
