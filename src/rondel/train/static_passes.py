"""Passes of fixed shapes: loss and gradient of a micro-batch as a function of its buffers.

Run operation by operation, or as one graph for each shape, in which forward and backward pass stand behind each other:

    graph(weights, buffers) -> loss, what is measured of each target, gradients

The graph is made by running the pass once over tensors that have shapes and no numbers (torch's make_fx). Whatever
would depend on a number - a branch, a shape, a value that the host reads - is an error there, so a graph that was made
is a proof that nothing does. It is compiled by torch's inductor, and never again while the shapes are the same. On a
GPU the pass may be recorded as a CUDA graph instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from rondel.algos.scored_samples import dense_group_ids
from rondel.algos.tokens import TokenBatch
from rondel.core.errors import ConfigError
from rondel.train.joint_graph import GraphRun, JointGraph, Maker, compile_graph, traced
from rondel.train.shape_buckets import ShapeBuckets
from rondel.train.static_batch import (
    StaticBuffers,
    StaticPackedBatch,
    StaticShapes,
    known_of,
    packed_of,
    static_inputs,
)

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.pack import PackedBatch
    from rondel.train.settings import TrainSettings

Measured = dict[str, Tensor]  # [M] each


class TokenLoss(Protocol):
    """The loss of a micro-batch (train/step.py)."""

    def __call__(
        self,
        loaded: LoadedModel,
        packed: PackedBatch,
        known: TokenBatch,
        weight_M: Tensor,
        row: Algorithm,
        *,
        temperature: float,
    ) -> tuple[Tensor, TokenBatch, Measured]: ...


class StaticLoss(nn.Module):
    """`StaticLoss(token_loss, loaded, row, 1.0)(inputs)` -> the loss, and the log-probability, entropy and terms of
    each target: a function of its inputs alone, which can be traced, exported and compiled.
    """

    def __init__(self, loss: TokenLoss, loaded: LoadedModel, row: Algorithm, temperature: float) -> None:
        super().__init__()
        self.model = loaded.model
        self._loss, self._loaded, self._row, self._temperature = loss, loaded, row, temperature

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Measured]:
        loaded = replace(self._loaded, head=self._loaded.head.of_copy(self.model))  # whose weights may be swapped
        packed, known = packed_of(inputs), known_of(inputs)
        with dense_group_ids():
            loss, tokens, terms = self._loss(
                loaded, packed, known, inputs["weight"], self._row, temperature=self._temperature
            )
        assert tokens.logprobs is not None and tokens.entropy is not None
        return loss, {"logprobs": tokens.logprobs, "entropy": tokens.entropy, **terms}


class StaticPasses:
    """The training passes of a run whose shapes are fixed.

    make   each shape once, as a compiled or recorded graph; operation by operation otherwise
    """

    def __init__(self, loaded: LoadedModel, buckets: ShapeBuckets, *, make: Maker | None = None) -> None:
        self.loaded, self.buckets, self.shapes = loaded, buckets, StaticShapes(buckets)
        self._make = make
        self._buffers: dict[Any, StaticBuffers] = {}
        self._graphs: dict[Any, JointGraph] = {}
        self.compile_seconds = 0.0

    @property
    def graph_count(self) -> int:
        """How often something was compiled."""
        return len(self._graphs)

    def evaluate(
        self,
        loss: TokenLoss,
        packed: PackedBatch,
        known: TokenBatch,
        weight_m: Tensor,
        row: Algorithm,
        *,
        temperature: float,
    ) -> tuple[Tensor, TokenBatch, Measured]:
        """-> the loss with its gradient, `known` with log-probabilities and entropies, the terms; of real targets."""
        assert isinstance(packed, StaticPackedBatch), "a micro-batch without one of the shapes of the run"
        given = static_inputs(packed, known, weight_m)
        key = (packed.shape, *given)
        if key not in self._buffers:
            self._buffers[key] = StaticBuffers(packed.shape, given)
        inputs = self._buffers[key].fill(packed, given)
        loss_of = StaticLoss(loss, self.loaded, row, temperature)
        if self._make is None:
            value, measured = loss_of(inputs)
        else:
            refuse_changing_row(row)
            value, measured = self._run_graph((*key, row, temperature), loss_of, inputs)
        found = {name: packed.join_targets(values) for name, values in measured.items()}
        logprobs, entropy = found.pop("logprobs"), found.pop("entropy")
        return value, known.with_fields(logprobs=logprobs, entropy=entropy), found

    def take_metrics(self) -> dict[str, float]:
        """Of the passes since the last call."""
        out = self.buckets.take_metrics()
        if self._make is not None:
            out |= {"train/compiled_graphs": float(self.graph_count), "train/compile_s": self.compile_seconds}
            self.compile_seconds = 0.0
        return out

    def _run_graph(self, key: Any, loss_of: StaticLoss, inputs: dict[str, Tensor]) -> tuple[Tensor, Measured]:
        if key not in self._graphs:
            began = time.perf_counter()
            assert self._make is not None
            self._graphs[key] = JointGraph(loss_of, inputs, self._make)
            self.compile_seconds += time.perf_counter() - began
        return self._graphs[key](inputs)


def refuse_changing_row(row: Algorithm) -> None:
    """A graph holds the numbers of its row, and these must not change from step to step."""
    if row.is_adaptive:
        raise ConfigError(
            f"trainer.micro_tokens.compile: coefficients or baselines of '{row.name}' follow what was measured, and "
            "each step would be compiled anew; give them fixed values, or set compile = false"
        )


def make_static_passes(loaded: LoadedModel, settings: TrainSettings) -> StaticPasses:
    """As the settings of a trainer have it."""
    buckets = ShapeBuckets(settings.shapes, grows=settings.shapes_grow)
    makers: dict[Any, Maker] = {True: traced(compile_graph), "record": GraphRun}
    return StaticPasses(loaded, buckets, make=makers.get(settings.compile_passes))
