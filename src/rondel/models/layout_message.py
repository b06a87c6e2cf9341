"""The layout of an engine's step as whole numbers, for the other ranks of its model: who sees whom, and in which slots.

    message = describe_layout(layout)      header, int64 tensors
    rebuild_layout(*message, pools)        the same layout over the pools of another rank

Keys and values themselves do not travel: every rank has those of its own key heads, in the same slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import LawError
from rondel.models.cache_pools import CachePool
from rondel.models.paged_layout import DecodeBatch, PagedLayout, PrefillChunk

FAMILY = ("prefix", "shared", "grid", "place")


def describe_layout(layout: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """{"chunks": [[start, length], ...], "decodes": ...} and the tensors, in the order in which they are read again."""
    if not isinstance(layout, PagedLayout):
        raise LawError(f"a step of several ranks has a PagedLayout, and not a {type(layout).__name__}")
    chunks, decoding = layout.chunks, layout.decoding
    tensors = [layout.write, *(chunk.context for chunk in chunks)]
    decodes = "nothing"
    if decoding is not None:
        decodes = "whole" if decoding.prefix is None else "families"
        tensors += [decoding.own, decoding.lengths]
        tensors += [x for name in FAMILY if (x := getattr(decoding, name)) is not None]
    return {"chunks": [[chunk.start, chunk.length] for chunk in chunks], "decodes": decodes}, tensors


def rebuild_layout(header: dict[str, Any], tensors: list[Tensor], keys: CachePool, values: CachePool) -> PagedLayout:
    left = iter(tensors)
    write = next(left)
    chunks = [PrefillChunk(start, length, next(left)) for start, length in header["chunks"]]
    decoding = None if header["decodes"] == "nothing" else DecodeBatch(*left)
    return PagedLayout(keys, values, write, chunks, decoding)


def pack_message(header: bytes, tensors: list[Tensor]) -> Tensor:
    """[N] uint8 on the host: bytes of a header, padded to words of 8, and int64 tensors behind them."""
    padded = header + b" " * (-len(header) % 8)
    words = [torch.frombuffer(bytearray(padded), dtype=torch.int64)]
    return torch.cat([*words, *(x.reshape(-1).cpu() for x in tensors)]).view(torch.uint8)


def unpack_message(packed: Tensor, length: int, shapes: list[list[int]], device: torch.device) -> list[Tensor]:
    """The tensors of these shapes behind a header of `length` bytes."""
    words = packed.view(torch.int64)[-(-length // 8) :]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape).to(device) for part, shape in zip(words.split(sizes), shapes)]
