"""The layout of an engine's step as whole numbers, for the other ranks of its model: who sees whom, and in which slots.

    message = describe_layout(layout)      header, int64 tensors
    rebuild_layout(*message, pools)        the same layout over the pools of another rank
    own_slots(layout, first)               of numbers that run through the caches of several ranks: those of one

Keys and values themselves do not travel: every rank has those of its own key heads, in the same slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    decoding = None if header["decodes"] == "nothing" else DecodeBatch(*left)  # type: ignore[arg-type]  # two tensors, or six
    return PagedLayout(keys, values, write, chunks, decoding)


def own_slots(layout: PagedLayout, first: int) -> PagedLayout:
    """As the rank has it whose pages are first + 1, first + 2, ...: to it they are 1, 2, ..., and scratch stays 0."""

    def shift(slots: Tensor) -> Tensor:
        return (slots - first).clamp_(min=0)

    chunks = [PrefillChunk(chunk.start, chunk.length, shift(chunk.context)) for chunk in layout.chunks]
    decoding = layout.decoding
    if decoding is not None:
        prefix = None if decoding.prefix is None else shift(decoding.prefix)
        decoding = replace(decoding, own=shift(decoding.own), prefix=prefix)
    return PagedLayout(layout.keys, layout.values, shift(layout.write), chunks, decoding)
