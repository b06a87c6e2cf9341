"""Attention while a graph is traced: one operation, which asks the layout in force when the graph runs.

A latent projection is named there by a number, counted, so that it is the same in the next process.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rondel.models.attention import LatentProjection, current_layout, use_attention_layout
from rondel.models.dense_attention import ScoreRule
from rondel.models.torch_library import LIBRARY


class TracedLayout:
    """The layout of a pass that is traced."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return torch.ops.rondel.attend(
            q, k, v, layer, rule.scale, rule.window, rule.softcap, rule.chunk, rule.sinks, rule.slopes
        )

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        number = next(_numbers)
        _traced[number] = up
        return torch.ops.rondel.attend_latents(
            q,
            c,
            r,
            layer,
            number,
            up.value,
            rule.scale,
            rule.window,
            rule.softcap,
            rule.chunk,
            rule.sinks,
            rule.slopes,
        )


def outside_graph() -> AbstractContextManager[None]:
    """Inside, a pass leaves its attention to the layout of each run of its graph."""
    return use_attention_layout(TracedLayout())


def _attend_now(q: Tensor, k: Tensor, v: Tensor, layer: int, *rule: Any) -> Tensor:
    return current_layout().attend(layer, q, k, v, ScoreRule(*rule)).contiguous()


def _attend_latents_now(q: Tensor, c: Tensor, r: Tensor, layer: int, up: int, value: int, *rule: Any) -> Tensor:
    return current_layout().attend_latents(layer, q, c, r, _traced[up], ScoreRule(*rule)).contiguous()


_numbers = itertools.count()
_traced: WeakValueDictionary[int, LatentProjection] = WeakValueDictionary()
LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, int layer, float scale, int? window, float? softcap, int? chunk, "
    "Tensor? sinks, Tensor? slopes) -> Tensor"
)
LIBRARY.impl("attend", _attend_now, "CPU")
torch.library.register_fake("rondel::attend", lambda q, k, v, *how: q.new_empty(*q.shape[:2], v.shape[2]), lib=LIBRARY)
LIBRARY.define(
    "attend_latents(Tensor q, Tensor c, Tensor r, int layer, int up, int value, float scale, int? window, float? "
    "softcap, int? chunk, Tensor? sinks, Tensor? slopes) -> Tensor"
)
LIBRARY.impl("attend_latents", _attend_latents_now, "CPU")
torch.library.register_fake(
    "rondel::attend_latents", lambda q, c, r, layer, up, value, *how: q.new_empty(*q.shape[:2], value), lib=LIBRARY
)
