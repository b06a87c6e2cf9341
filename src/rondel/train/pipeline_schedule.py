"""Order in which a stage of a pipeline computes its micro-batches: one forward, one backward (1F1B, arXiv:1806.03377).

    p = 3, m = 4       F forward, B backward, . idle
    stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1      F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

A stage runs at most p - stage micro-batches ahead of its backward passes, so it keeps the activations of no more, however
many there are. Micro-batches are ragged: a tick is as long as the work it holds, and the order is the same. With p = 1 it
is the plain loop, F0 B0 F1 B1 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StagePass:
    """The forward or backward pass of one micro-batch."""

    micro_batch: int
    backward: bool


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[StagePass]:
    """Passes of `stage` of `stages`, in turn; gradients of micro-batches are added in their order, as on one device."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [StagePass(i, False) for i in range(ahead)]
    for i in range(micro_batches):
        order += [StagePass(ahead + i, False)] if ahead + i < micro_batches else []
        order.append(StagePass(i, True))
    return order


def run_schedule(
    order: Sequence[StagePass],
    micro_batches: Iterable[T],
    forward: Callable[[T, bool], Any],
    backward: Callable[[Any, bool], None],
) -> None:
    """Make each pass of `order`. What `forward` gives waits for `backward`; both are told whether the micro-batch is the
    last one.
    """
    last = max((each.micro_batch for each in order), default=0)
    coming = iter(micro_batches)
    waiting: dict[int, Any] = {}
    for each in order:
        is_last = each.micro_batch == last
        if each.backward:
            backward(waiting.pop(each.micro_batch), is_last)
        else:
            waiting[each.micro_batch] = forward(next(coming), is_last)
