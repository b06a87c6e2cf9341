"""Weights as quantised checkpoints store them -> numbers: compressed-tensors, GPTQ, AWQ.

A module's tensors, by the end of their names:

    compressed-tensors   weight_packed, weight_scale, weight_shape, weight_zero_point, weight_global_scale; or weight,
                         weight_scale
    gptq                 qweight int32 [I/8, O], scales [G, O], qzeros int32 [G, O/8], g_idx [I]: w = (q - z - 1) s, in
                         v2 (q - z) s
    awq                  qweight int32 [I, O/8], scales [G, O], qzeros int32 [G, O/8], nibbles in the order 0 2 4 6 1 3
                         5 7
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.formats.fp4 import Mxfp4, Nvfp4
from rondel.formats.fp8 import Mxfp8
from rondel.formats.number_format import Parts

SUFFIXES = (
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale"),
    *("qweight", "qzeros", "scales", "g_idx", "input_scale", "input_global_scale"),
)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the i-th of eight lies
METHODS = ("compressed-tensors", "gptq", "awq")


def decode_stored(parts: Parts, config: dict[str, Any], name: str = "a weight") -> Tensor:
    """The tensors of one module, by the end of their names, and the quantization_config -> [O, I] in float32.

    ModelError where the layout is another one; `name` for its message.
    """
    method = config.get("quant_method")
    try:
        if method == "gptq":
            return _gptq(parts, config)
        if method == "awq":
            return _awq(parts, config)
        if method == "compressed-tensors":
            return _compressed(parts, config)
    except KeyError as error:
        raise ModelError(f"{name} is stored in {method}, but without {error}") from error
    raise ModelError(f"{name} is stored in {method}; what is decoded is {', '.join(METHODS)}")


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., N] -> [..., N · 32/bits] whole numbers from 0, the lowest bits of a word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _bits(config: dict[str, Any]) -> int:
    bits = int(config.get("bits", config.get("w_bit", 4)))
    if 32 % bits or bits > 8:
        raise ModelError(f"{bits} bits a weight do not fill a word: take the model in 16 bits")
    return bits


def _gptq(parts: Parts, config: dict[str, Any]) -> Tensor:
    bits = _bits(config)
    codes = unpack_words(parts["qweight"].t().contiguous(), bits).t()  # [I, O]
    zeros = unpack_words(parts["qzeros"], bits)[:, : codes.shape[1]] + (config.get("checkpoint_format") != "gptq_v2")
    scales = parts["scales"].float()
    rows = torch.arange(len(codes))
    group = parts["g_idx"].long() if "g_idx" in parts else rows // (len(codes) // len(scales))
    return ((codes - zeros[group]) * scales[group]).t().contiguous()


def _awq(parts: Parts, config: dict[str, Any]) -> Tensor:
    if _bits(config) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise ModelError("AWQ is decoded in 4 bits, version gemm: take the model in 16 bits")

    def unpack(packed: Tensor) -> Tensor:
        return unpack_words(packed, 4).unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)

    codes, zeros, scales = unpack(parts["qweight"]), unpack(parts["qzeros"]), parts["scales"].float()
    group = torch.arange(len(codes)) // (len(codes) // len(scales))
    return ((codes - zeros[group]) * scales[group]).t().contiguous()


def _compressed(parts: Parts, config: dict[str, Any]) -> Tensor:
    groups = list(config.get("config_groups", {}).values()) or [{}]
    weights, layout = groups[0].get("weights") or {}, groups[0].get("format") or config.get("format")
    size = weights.get("group_size") if (weights.get("group_size") or 0) > 0 else None
    if "weight_packed" in parts and parts["weight_packed"].dtype == torch.uint8:
        rows, pairs = parts["weight_packed"].shape
        whole = parts | {"weight_shape": torch.tensor([rows, 2 * pairs])}
        return (Nvfp4() if "weight_global_scale" in parts else Mxfp4()).decode(whole)
    if "weight_packed" in parts:
        return _packed(parts, int(weights.get("num_bits", 4)), size)
    if layout == "mxfp8-quantized":
        return Mxfp8().decode(parts)
    codes, scale = parts["weight"].float(), parts["weight_scale"].float()
    return codes * _spread(scale, codes.shape, size)


def _packed(parts: Parts, bits: int, size: int | None) -> Tensor:
    shape = torch.Size(parts["weight_shape"].tolist())
    codes = unpack_words(parts["weight_packed"], bits)[:, : shape[1]] - (1 << bits - 1)
    scale = parts["weight_scale"].float()
    if "weight_zero_point" in parts:  # packed along the rows
        zeros = unpack_words(parts["weight_zero_point"].t().contiguous(), bits)[:, : shape[0]].t() - (1 << bits - 1)
        codes = codes - _spread(zeros, shape, size)
    return codes * _spread(scale, shape, size)


def _spread(scale: Tensor, shape: torch.Size, size: int | None) -> Tensor:
    """One of a tensor, a row, a group of `size` columns or a block -> [O, I]."""
    if scale.ndim < 2:
        return scale.reshape(-1, 1)
    for axis in (0, 1):
        times = size if axis and size else -(-shape[axis] // scale.shape[axis])
        scale = scale.repeat_interleave(times, axis).narrow(axis, 0, shape[axis])
    return scale
