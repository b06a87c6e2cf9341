"""Micro-batches of fixed shapes, and the buffers that one lies in while it is computed.

    samples ──pack──> row of 430 tokens ──pad──> 512 ──copy──> the buffers of 512 x 512, whose addresses never change

A pass that was compiled, exported or recorded for a shape reads these buffers and nothing else of the batch.

T tokens of the shape · M targets of the shape · m targets of the samples
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.algos.tokens import TokenBatch
from rondel.models.static_layout import StaticLayout
from rondel.train.pack import PackedBatch, TrainBatch, pack_samples
from rondel.train.shape_buckets import ShapeBucket, ShapeBuckets

ROW = ("tokens", "positions", "at", "end", "source", "target", "weight")  # beside the columns of a TokenBatch


@dataclass(slots=True)
class StaticPackedBatch(PackedBatch):
    """A micro-batch padded to a shape: tokens, positions and layout to T, source and target to M; `sample` [m] is of
    the real targets, and so is what `join_targets` returns.
    """

    real: int = 0  # tokens of the samples

    @property
    def shape(self) -> ShapeBucket:
        return ShapeBucket(len(self.tokens), len(self.target))

    @property
    def token_count(self) -> int:
        return self.real

    def join_targets(self, values_M: Tensor) -> Tensor:
        """[M] -> [m]: what was computed of padding is left out."""
        return values_M[: len(self.sample)]


class StaticShapes:
    """Packing into the shapes of a run."""

    def __init__(self, buckets: ShapeBuckets) -> None:
        self.buckets = buckets

    def split_cuts(self, batch: TrainBatch, cuts: list[list[int]]) -> list[list[int]]:
        """Micro-batches whose targets fit, too: those that hold too many are halved, down to single samples."""
        out: list[list[int]] = []
        todo = list(reversed(cuts))
        while todo:
            cut = todo.pop()
            if len(cut) > 1 and sum(len(batch.samples[i].trainable) for i in cut) > self.buckets.most_targets:
                todo += [cut[len(cut) // 2 :], cut[: len(cut) // 2]]
            else:
                out.append(cut)
        return out

    def pack_samples(
        self, batch: TrainBatch, chosen: list[int], *, share: bool = True, device: torch.device | str = "cpu"
    ) -> PackedBatch:
        """The chosen samples as a row of the smallest shape that holds them."""
        packed = pack_samples(batch, chosen, share=share, device=device, lay_out=StaticLayout.from_segments)
        whose = batch.sample_name(chosen[0]) if len(chosen) == 1 else f"a micro-batch of {len(chosen)} samples"
        shape = self.buckets.choose(len(packed.tokens), len(packed.target), whose)
        self.buckets.count_pass(shape, len(packed.tokens))
        return pad_packed(packed, shape)


def pad_packed(packed: PackedBatch, shape: ShapeBucket) -> StaticPackedBatch:
    """Token 0 fills the row up, and its last position is the source of what fills the targets up."""
    real, written = len(packed.tokens), len(packed.target)
    assert shape.holds(real, written) and packed.positions.ndim == 1, (shape, real, written, packed.positions.shape)
    row, targets = (0, shape.tokens - real), (0, shape.targets - written)
    return StaticPackedBatch(
        packed.samples,
        F.pad(packed.tokens, row),
        F.pad(packed.positions, row),
        F.pad(packed.source, targets, value=shape.tokens - 1),
        F.pad(packed.target, targets),
        packed.sample,
        packed.layout.padded(shape.tokens),  # type: ignore[attr-defined]
        real=real,
    )


class StaticBuffers:
    """The inputs of a pass of one shape. `fill` copies a micro-batch into them: their addresses stay."""

    def __init__(self, shape: ShapeBucket, given: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.tensors = {
            name: torch.zeros(
                shape.targets if is_target(name) else shape.tokens, dtype=value.dtype, device=value.device
            )
            for name, value in given.items()
        }

    def fill(self, packed: StaticPackedBatch, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`given` [T], [M] or [m] of each name; padding is 0, and in "sample" a sample of its own."""
        assert packed.shape == self.shape and given.keys() == self.tensors.keys()
        for name, room in self.tensors.items():
            value = given[name]
            room[: len(value)].copy_(value)
            room[len(value) :].fill_(len(packed.samples) if name == "sample" else 0)
        return self.tensors


def is_target(name: str) -> bool:
    """Whether an input is one number a target, and not one a token of the row."""
    return name not in ("tokens", "positions", "at", "end")


def static_inputs(packed: StaticPackedBatch, known: TokenBatch, weight_m: Tensor) -> dict[str, Tensor]:
    """All that a pass reads of a micro-batch, by name: the row, the weights, and the columns that are known. The
    samples of `known` are counted from 0, so that there are fewer of them than targets.
    """
    layout: StaticLayout = packed.layout  # type: ignore[assignment]
    row = (packed.tokens, packed.positions, layout.at, layout.end, packed.source, packed.target, weight_m)
    columns = {f.name: getattr(known, f.name) for f in fields(TokenBatch)}
    return dict(zip(ROW, row)) | {name: v for name, v in columns.items() if isinstance(v, Tensor)}


def packed_of(inputs: Mapping[str, Tensor]) -> PackedBatch:
    """The micro-batch in buffers, all of whose targets are asked for."""
    return PackedBatch(
        [],
        inputs["tokens"],
        inputs["positions"],
        inputs["source"],
        inputs["target"],
        inputs["sample"],
        StaticLayout(inputs["at"], inputs["end"]),  # type: ignore[arg-type]
    )


def known_of(inputs: Mapping[str, Tensor]) -> TokenBatch:
    """What is known of its targets."""
    return TokenBatch(inputs["sample"]).with_fields(**{name: v for name, v in inputs.items() if name not in ROW})
