"""Decode steps of a few fixed shapes, each traced once: rows of one token over contexts of one length.

    5 requests, the longest of 90 tokens ──pad──> 8 rows x 128 slots ──> graph(weights, caches, buffers) -> hidden states
                                                  rows that nobody has read and write the scratch slot

A step is traced over tensors that have shapes and no numbers (torch's make_fx), so a graph that was made depends on
none. Families of siblings, whose common context an ordinary step reads once, are read row by row here. Steps that hold
prompts go the plain way: their shapes are those of what is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from rondel.core.errors import ConfigError
from rondel.models.compilation import REMEDY, refuse_compilation
from rondel.models.paged_layout import DecodeBatch, PagedLayout

if TYPE_CHECKING:
    from rondel.models.attention import AttentionLayout
    from rondel.models.loaded_model import LoadedModel

LEAST = 64  # slots of the shortest context
Shape = tuple[int, int]  # rows, slots of each


class StaticDecode:
    """`StaticDecode(loaded, 64).hidden_states` is `loaded.hidden_states` without gradients and without a tape."""

    def __init__(self, loaded: LoadedModel, most: int) -> None:
        """For an engine of at most so many requests."""
        refuse_compilation(loaded, "given fixed shapes", {"several processes compute it": loaded.leads_ranks})
        self._loaded, self.most = loaded, 1 << (most - 1).bit_length()
        self.graphs: dict[Shape, GraphModule] = {}
        self.buffers: dict[Shape, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """[T], [T] -> [T, D]."""
        if not isinstance(layout, PagedLayout) or layout.chunks or layout.decoding is None or len(tokens) > self.most:
            return self._loaded.hidden_states(tokens, positions, layout)
        slots, lengths = layout.decoding.whole_contexts()
        shape = _upto(len(tokens), 1), _upto(slots.shape[1], LEAST)
        given = self._fill(shape, tokens, positions, layout.write, slots, lengths)
        if shape not in self.graphs:
            self._loaded.hidden_states(
                tokens, positions, layout
            )  # makes the pools of all layers; written once more below
            self.graphs[shape] = self._trace(given, layout)
        held = [*self._loaded.model.parameters(), *self._loaded.model.buffers(), *pools_of(layout)]
        return self.graphs[shape](*held, *given.values())[: len(tokens)]

    def forget_graphs(self) -> None:
        """Nothing was recorded: a graph has no addresses."""

    def _fill(
        self, shape: Shape, tokens: Tensor, positions: Tensor, write: Tensor, slots: Tensor, lengths: Tensor
    ) -> Any:
        """The buffers of a shape with this step in them; left-over rows hold one token, in the scratch slot."""
        rows, width = shape
        if shape not in self.buffers:
            room = {name: tokens.new_zeros(rows) for name in ("tokens", "positions", "write", "lengths")}
            self.buffers[shape] = room | {"slots": tokens.new_zeros(rows, width)}
        own, n = self.buffers[shape], len(tokens)
        for name, value in (("tokens", tokens), ("positions", positions), ("write", write), ("lengths", lengths)):
            own[name][:n].copy_(value)
            own[name][n:].fill_(name == "lengths")
        own["slots"].zero_()
        own["slots"][:n, : slots.shape[1]].copy_(slots)
        return own

    def _trace(self, given: dict[str, Tensor], layout: PagedLayout) -> GraphModule:
        step = StaticDecodeStep(self._loaded)
        names = [*dict(step.named_parameters()), *dict(step.named_buffers())]
        held = [*self._loaded.model.parameters(), *self._loaded.model.buffers()]
        pools = pools_of(layout)

        def run(*tensors: Tensor) -> Tensor:
            weights, rest = tensors[: len(held)], tensors[len(held) :]
            inputs = dict(zip(given, rest[len(pools) :]))
            return functional_call(step, dict(zip(names, weights)), (inputs, list(rest[: len(pools)])))

        try:
            return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*held, *pools, *given.values())
        except Exception as error:
            raise ConfigError(
                f"engine.compile: a decode step of '{self._loaded.name}' cannot be made a graph: "
                f"{str(error).strip().splitlines()[0]}; {REMEDY}"
            ) from error


class StaticDecodeStep(nn.Module):
    """One token of each row through a model: hidden states [B, D]; keys and values are written into the pools."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model, self._loaded = loaded.model, loaded

    def forward(self, inputs: dict[str, Tensor], pools: list[Tensor]) -> Tensor:
        half = len(pools) // 2
        keys, values = _GivenPools(pools[:half]), _GivenPools(pools[half:])
        batch = DecodeBatch(inputs["slots"], inputs["lengths"])
        layout = PagedLayout(keys, values, inputs["write"], [], batch)
        return self._loaded.hidden_states(inputs["tokens"], inputs["positions"], layout)


class _GivenPools:
    """The pools of all layers as a graph is given them."""

    def __init__(self, pools: list[Tensor]) -> None:
        self.written = pools

    @property
    def data_pointers(self) -> list[int]:
        return []

    def layer_pool(self, layer: int, like: Tensor) -> Tensor:
        return self.written[layer]


def pools_of(layout: PagedLayout) -> list[Tensor]:
    """Keys of all layers, then values, as they lie."""
    return [*layout.keys.written, *layout.values.written]


def _upto(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
