"""Weights as quantised checkpoints store them -> numbers: compressed-tensors, GPTQ, AWQ.

A module's tensors, by the end of their names:

    compressed-tensors   weight_packed, weight_scale, weight_shape, weight_zero_point, weight_global_scale, weight_g_idx;
                         or weight, weight_scale, weight_zero_point
    gptq                 qweight int32 [I/8, O], scales [G, O], qzeros int32 [G, O/8], g_idx [I]: w = (q - z - 1) s, in
                         v2 (q - z) s
    awq                  qweight int32 [I, O/8], scales [G, O], qzeros int32 [G, O/8], nibbles in the order 0 2 4 6 1 3
                         5 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.formats.fp4 import Mxfp4, Nvfp4
from rondel.formats.fp8 import Mxfp8
from rondel.formats.number_format import Parts

SUFFIXES = (
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx", "input_scale", "input_global_scale"),
)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the i-th of eight lies
METHODS = ("compressed-tensors", "gptq", "awq")


def decode_stored(parts: Parts, config: dict[str, Any], name: str = "a weight") -> Tensor:
    """The tensors of one module, by the end of their names, and the quantization_config -> [O, I] in float32.

    ModelError where the layout is another one, or tensors and config contradict each other; `name` for its message.
    """
    method = config.get("quant_method")
    if method not in DECODERS:
        raise ModelError(f"{name} is stored in {method}; what is decoded is {', '.join(METHODS)}")
    try:
        weight = DECODERS[method](parts, config)
    except KeyError as error:
        raise ModelError(f"{name} is stored in {method}, but without {error}") from error
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    if not bool(weight.isfinite().all()):
        raise ModelError(
            f"{name} is stored in {method} with scales that are not finite numbers: fetch its file again, or take the "
            "model in 16 bits"
        )
    return weight


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
    if "g_idx" not in parts and config.get("desc_act"):
        raise ModelError("desc_act = true, but without g_idx, which says what its columns are scaled by")
    return _of_groups(codes, zeros, parts["scales"].float(), config, parts.get("g_idx"))


def _awq(parts: Parts, config: dict[str, Any]) -> Tensor:
    if _bits(config) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise ModelError("AWQ is decoded in 4 bits, version gemm: take the model in 16 bits")

    def unpack(packed: Tensor) -> Tensor:
        return unpack_words(packed, 4).unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)

    return _of_groups(unpack(parts["qweight"]), unpack(parts["qzeros"]), parts["scales"].float(), config)


def _of_groups(
    codes: Tensor, zeros: Tensor, scales: Tensor, config: dict[str, Any], index: Tensor | None = None
) -> Tensor:
    """codes [I, O], zeros and scales [G, O], the group of each column [I] where they are not in order -> [O, I]."""
    columns, rows = codes.shape
    if zeros.shape != scales.shape or scales.shape[1] != rows or not len(scales):
        raise ModelError(
            f"scales {list(scales.shape)} and zeros {list(zeros.shape)} beside codes {list(codes.shape)}: of each group "
            f"there are {rows}"
        )
    if index is None:
        size = int(config.get("group_size", config.get("q_group_size")) or -(-columns // len(scales)))
        index = torch.arange(columns, device=codes.device) // (size if size > 0 else columns)
        if int(index[-1]) + 1 != len(scales):
            raise ModelError(f"{len(scales)} groups of scales for {columns} columns: group_size = {size} makes others")
    group = _checked_groups(index, columns, len(scales))
    return ((codes - zeros[group]) * scales[group]).t().contiguous()


def _checked_groups(index: Tensor, columns: int, groups: int) -> Tensor:
    index = index.long()
    if index.shape != (columns,) or int(index.min()) < 0 or int(index.max()) >= groups:
        raise ModelError(
            f"g_idx {list(index.shape)} names groups {int(index.min())} to {int(index.max())} for {columns} columns and {groups} groups"
        )
    return index


@dataclass(frozen=True)
class _Scheme:
    """How a group of `config_groups` stores its modules: bits of a number, columns that share a scale, rows and columns
    that do; 0 and nothing where the config does not say.
    """

    layout: str = ""
    strategy: str = ""
    bits: int = 0
    size: int = 0
    block: tuple[int, ...] = ()

    @classmethod
    def of_group(cls, group: dict[str, Any], config: dict[str, Any]) -> _Scheme:
        weights = group.get("weights") or {}
        return cls(
            str(group.get("format") or config.get("format") or ""),
            str(weights.get("strategy") or ""),
            int(weights.get("num_bits") or 0),
            max(0, int(weights.get("group_size") or 0)),
            tuple(weights.get("block_structure") or ()) if weights.get("strategy") == "block" else (),
        )

    def fits(self, parts: Parts) -> bool:
        """Whether tensors of these shapes can be stored so."""
        scale = parts["weight_scale"]
        if "weight_packed" in parts and parts["weight_packed"].dtype == torch.uint8:
            return self.bits in (0, 4)
        if "weight_packed" in parts:
            shape = parts["weight_shape"].tolist()
            if len(shape) != 2 or -(-shape[1] // (32 // (self.bits or 4))) != parts["weight_packed"].shape[1]:
                return False
        else:
            shape = list(parts["weight"].shape)
            if self.bits not in (0, 8) or (self.layout == "mxfp8-quantized") != (scale.dtype == torch.uint8):
                return False
        if scale.ndim < 2 or tuple(scale.shape) == (1, 1):
            return scale.numel() in (1, shape[0])
        if self.block:
            return tuple(scale.shape) == tuple(-(-n // of) for n, of in zip(shape, self.block))
        if self.strategy in ("channel", "tensor") and scale.shape[1] > 1:
            return False
        return scale.shape[0] == shape[0] and -(-shape[1] // self._columns(shape, scale)) == scale.shape[1]

    def _columns(self, shape: list[int], scale: Tensor) -> int:
        if self.strategy == "channel":
            return shape[1]
        return self.size or (32 if scale.dtype == torch.uint8 else -(-shape[1] // scale.shape[1]))


def _compressed(parts: Parts, config: dict[str, Any]) -> Tensor:
    groups = list((config.get("config_groups") or {}).values()) or [{}]
    found = {scheme for scheme in (_Scheme.of_group(group, config) for group in groups) if scheme.fits(parts)}
    several = parts["weight_scale"].ndim > 1 and parts["weight_scale"].shape[1] > 1
    if len({(scheme.bits, scheme.size if several else 0, scheme.block) for scheme in found}) != 1:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        what = "none of the config_groups stores" if not found else f"{len(found)} config_groups could have stored"
        raise ModelError(f"{what} {shapes}: the config is of another checkpoint, or take the model in 16 bits")
    scheme = found.pop()
    if "weight_packed" in parts and parts["weight_packed"].dtype == torch.uint8:
        rows, pairs = parts["weight_packed"].shape
        whole = parts | {"weight_shape": torch.tensor([rows, 2 * pairs])}
        return (Nvfp4() if "weight_global_scale" in parts else Mxfp4()).decode(whole)
    if parts["weight_scale"].dtype == torch.uint8:
        return Mxfp8().decode(parts)
    scale = parts["weight_scale"].float()
    if "weight_packed" in parts:
        bits = scheme.bits or 4
        shape = torch.Size(parts["weight_shape"].tolist())
        codes = unpack_words(parts["weight_packed"], bits)[:, : shape[1]] - (1 << bits - 1)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:  # packed along the rows
            zeros = unpack_words(zeros.t().contiguous(), bits)[:, : shape[0]].t() - (1 << bits - 1)
    else:
        codes, zeros, shape = parts["weight"].float(), parts.get("weight_zero_point"), parts["weight"].shape
    index = parts.get("weight_g_idx")
    if index is not None and bool((index < 0).all()):  # columns in order are written so
        index = None
    if zeros is not None:
        codes = codes - _spread(zeros.float(), shape, scheme, index)
    return codes * _spread(scale, shape, scheme, index)


def _spread(scale: Tensor, shape: torch.Size, scheme: _Scheme, index: Tensor | None) -> Tensor:
    """One of a tensor, a row, a group of columns or a block -> [O, I]."""
    if scale.ndim < 2:
        return scale.reshape(-1, 1)
    if index is not None and scale.shape[1] > 1:
        return scale[:, _checked_groups(index, shape[1], scale.shape[1])]
    for axis, told in enumerate(scheme.block or (0, scheme.size)):
        times = told or -(-shape[axis] // scale.shape[axis])
        if scale.shape[axis] > 1 or scheme.block:
            scale = scale.repeat_interleave(times, axis).narrow(axis, 0, shape[axis])
    return scale


DECODERS = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
