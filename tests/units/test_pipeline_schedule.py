"""1F1B as a list: what must come first comes first, few activations are alive, and the idle share is the planner's."""

from __future__ import annotations

import numpy as np
import pytest

from kits.train import awkward_groups
from rondel.planner.traffic import pipeline_bubble
from rondel.train.balance import PromptFamilies, balance_micro_batches, in_order
from rondel.train.pack import batch_of, micro_batches
from rondel.train.pipeline_schedule import StagePass, one_forward_one_backward, run_schedule

SIZES = [(1, 1), (1, 5), (2, 1), (2, 5), (3, 4), (4, 2), (4, 12), (8, 32)]


def finished(stages: int, count: int, ticks: list[int] | None = None) -> dict[tuple[int, StagePass], int]:
    """The tick in which each pass ends where every pass takes one, or those of its micro-batch: it waits for its stage, and
    for its neighbour's.
    """
    ends: dict[tuple[int, StagePass], int] = {}
    orders = [one_forward_one_backward(stages, stage, count) for stage in range(stages)]
    clock, at = [0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while at[s] < len(orders[s]):
                one = orders[s][at[s]]
                source = s + 1 if one.backward else s - 1
                needed = ends.get((source, one)) if 0 <= source < stages else 0
                if needed is None:
                    break
                clock[s] = ends[s, one] = max(clock[s], needed) + (1 if ticks is None else ticks[one.micro_batch])
                at[s], moved = at[s] + 1, True
        assert moved, "the stages wait for each other"
    return ends


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_every_pass_once_and_in_order(stages, count):
    for stage in range(stages):
        order = one_forward_one_backward(stages, stage, count)
        for backward in (False, True):
            assert [p.micro_batch for p in order if p.backward == backward] == [*range(count)]
        alive = most = 0
        for p in order:
            alive += -1 if p.backward else 1
            assert alive >= 0
            most = max(most, alive)
        assert most <= min(stages - stage, count)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_the_idle_share_is_the_planners(stages, count):
    """Of the ticks until all are done, each stage works in 2 m."""
    ends = finished(stages, count)
    ticks = max(ends.values())
    assert all(ends[s, p] > ends[s - 1, p] for s, p in ends if s and not p.backward)
    assert 1 - 2 * count / ticks == pytest.approx(pipeline_bubble(stages, count))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("budget", [500, 1000])
def test_equal_micro_batches_idle_by_the_formula_and_end_sooner(stages, budget):
    """Stages wait for the fullest micro-batch as ranks do: answers whose lengths differ are dealt, not cut in their order."""
    for seed in range(3):
        own = np.random.default_rng(seed).lognormal(4, 1, 96).astype(int).tolist()
        samples = PromptFamilies(own, [i // 8 for i in range(96)], [20] * 12)
        dealt, in_turn = (
            [samples.packed_cost(cut) for cut in cuts]
            for cuts in (balance_micro_batches(samples, budget=budget, ranks=1), in_order(samples, budget))
        )
        ends, later = (max(finished(stages, len(work), work).values()) for work in (dealt, in_turn))
        assert ends < later
        assert 1 - 2 * sum(dealt) / ends == pytest.approx(pipeline_bubble(stages, len(dealt)), abs=0.03)


def test_the_trainer_deals_where_it_has_stages():
    b = batch_of(awkward_groups())
    loads = [[len(packed.tokens) for packed in micro_batches(b, 40, stages=stages)] for stages in (1, 2)]
    assert max(loads[1]) - min(loads[1]) < max(loads[0]) - min(loads[0])


def test_ragged_work_waits_for_nothing_that_it_does_not_need():
    """What a pass gives is handed to its own backward pass, and the last one is named."""
    told = []
    run_schedule(
        one_forward_one_backward(3, 0, 4),
        "abcd",
        lambda one, last: told.append(("F", one, last)) or one.upper(),
        lambda made, last: told.append(("B", made, last)),
    )
    assert told == [
        *(("F", c, False) for c in "abc"),
        ("B", "A", False),
        ("F", "d", True),
        *(("B", "B", False), ("B", "C", False), ("B", "D", True)),
    ]
