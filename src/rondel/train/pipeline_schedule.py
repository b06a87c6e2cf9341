"""Order in which a stage of a pipeline computes its micro-batches: one forward, one backward (1F1B, arXiv:1806.03377).

    p = 3, m = 4       F forward, B backward, . idle
    stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1      F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

A stage runs at most p - stage micro-batches ahead of its backward passes, so it keeps the activations of no more,
however many there are. Micro-batches are ragged: a tick is as long as the work it holds, and the order is the same.
With p = 1 it is the plain loop, F0 B0 F1 B1 ...

With v chunks a stage has v runs of layers, each behind the same one of the stage before, and the last stage's are
followed by the first one's next (interleaved 1F1B, arXiv:2104.04473). Micro-batches go through in groups of p, a group
through one chunk after the other, so a stage waits for 1/v of a stage's work where it waited for all of it:

    p = 2, v = 2, m = 2      of stage 0 chunks a and c, of stage 1 b and d
    stage 0   a0 a1 c0 c1 .  C0 .  C1 A0 A1        a b c d forward, A B C D backward
    stage 1      b0 b1 d0 D0 d1 D1 B0 B1

    idle share     (p - 1) / (v m + p - 1)       where p divides m
    chunks alive   at most 2 (p - stage - 1) + (v - 1) p + 1, each 1/v of a stage
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StagePass:
    """The forward or backward pass of one micro-batch through one chunk of a stage."""

    micro_batch: int
    backward: bool
    chunk: int = 0


def one_forward_one_backward(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[StagePass]:
    """Passes of `stage` of `stages`, in turn; in each chunk gradients of micro-batches are added in their order, as on
    one device.
    """
    forward = _in_groups(stages, micro_batches, [*range(chunks)])
    backward = _in_groups(stages, micro_batches, [*reversed(range(chunks))])
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    order = [StagePass(i, False, chunk) for i, chunk in forward[:ahead]]
    for place, (i, chunk) in enumerate(backward):
        order += [StagePass(j, False, ahead_chunk) for j, ahead_chunk in forward[ahead + place : ahead + place + 1]]
        order.append(StagePass(i, True, chunk))
    return [each for each in order if each.micro_batch < micro_batches]


def _in_groups(stages: int, micro_batches: int, chunks: list[int]) -> list[tuple[int, int]]:
    """(micro-batch, chunk): as many micro-batches as stages through one chunk, then through the next. The last group is
    filled up, so that all stages see the same order.
    """
    if len(chunks) == 1:
        return [(i, chunks[0]) for i in range(micro_batches)]
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    return [(i, chunk) for group in groups for chunk in chunks for i in group]


def run_schedule(
    order: Sequence[StagePass],
    micro_batches: Iterable[T],
    forward: Callable[[T, bool], Any],
    backward: Callable[[Any, bool], None],
    enter_chunk: Callable[[int], None] = lambda chunk: None,
) -> None:
    """Make each pass of `order`. What `forward` gives waits for `backward`; both are told whether the micro-batch is
    the last one. `enter_chunk`: before each pass.
    """
    last = max((each.micro_batch for each in order), default=0)
    final = max((each.chunk for each in order), default=0)
    coming = enumerate(micro_batches)
    packed: dict[int, T] = {}  # until it has gone through all chunks
    waiting: dict[tuple[int, int], Any] = {}
    for each in order:
        place, is_last = (each.micro_batch, each.chunk), each.micro_batch == last
        enter_chunk(each.chunk)
        if each.backward:
            backward(waiting.pop(place), is_last)
            continue
        if each.chunk == 0:
            packed.update([next(coming)])
        one = packed.pop(each.micro_batch) if each.chunk == final else packed[each.micro_batch]
        waiting[place] = forward(one, is_last)
