"""1F1B as a list: what must come first comes first, few activations are alive, and the idle share is the planner's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kits.train import awkward_groups
from rondel.planner.traffic import pipeline_bubble
from rondel.train.balance import PromptFamilies, balance_micro_batches, in_order
from rondel.train.pack import batch_of, micro_batches
from rondel.train.pipeline_schedule import StagePass, one_forward_one_backward, run_schedule

SIZES = [(1, 1), (1, 5), (2, 1), (2, 5), (3, 4), (4, 2), (4, 12), (8, 32)]


def finished(
    stages: int, count: int, ticks: list[int] | None = None, chunks: int = 1
) -> dict[tuple[int, StagePass], int]:
    """The tick in which each pass ends where every pass takes one, or those of its micro-batch: it waits for its stage, and
    for its neighbour's; where there are chunks, the last stage's are followed by the next ones of the first.
    """
    ends: dict[tuple[int, StagePass], int] = {}
    orders = [one_forward_one_backward(stages, stage, count, chunks) for stage in range(stages)]
    clock, at = [0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while at[s] < len(orders[s]):
                one = orders[s][at[s]]
                source = one.chunk * stages + s + (1 if one.backward else -1)
                needed: int | None = 0
                if 0 <= source < stages * chunks:
                    needed = ends.get((source % stages, replace(one, chunk=source // stages)))
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


CHUNKED = [(2, 2, 2), (2, 6, 3), (2, 5, 2), (3, 9, 2), (4, 4, 2), (4, 12, 3), (4, 3, 2), (8, 16, 4), (4, 6, 2)]


@pytest.mark.parametrize(("stages", "count", "chunks"), CHUNKED)
def test_chunks_take_turns(stages, count, chunks):
    """Each pass once, gradients of a chunk in the order of the micro-batches, few chunks alive; the idle share is the
    planner's where groups are full, and a ragged last group ends, too.
    """
    ends = finished(stages, count, chunks=chunks)
    assert len(ends) == 2 * stages * count * chunks
    for stage in range(stages):
        order = one_forward_one_backward(stages, stage, count, chunks)
        assert len({*order}) == len(order) == 2 * count * chunks
        alive = most = 0
        for p in order:
            alive += -1 if p.backward else 1
            most = max(most, alive)
        assert most <= 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        for chunk in range(chunks):
            for backward in (False, True):
                told = [p.micro_batch for p in order if (p.chunk, p.backward) == (chunk, backward)]
                assert told == [*range(count)]
    ticks = max(ends.values())
    if count % stages == 0:
        assert 1 - 2 * count * chunks / ticks == pytest.approx(pipeline_bubble(stages, count, chunks))
    plain = max(finished(stages, count).values()) * chunks  # of whole stages, which take as long as all their chunks
    assert ticks <= plain if count % stages else ticks < plain


@pytest.mark.parametrize("stages", [2, 4])
def test_messages_between_two_stages_come_in_the_order_in_which_they_are_sent(stages):
    """What one stage sends another, in either direction, is received in that order: there is one wire for each."""
    for count in (1, 3, 4, 8, 10):
        for chunks in (1, 2, 3):
            orders = [one_forward_one_backward(stages, stage, count, chunks) for stage in range(stages)]
            for a in range(stages):
                for step, backward in ((1, False), (-1, True)):
                    b = (a + step) % stages
                    shift = 0 if 0 <= a + step < stages else step
                    sent = [(p.chunk + shift, p.micro_batch) for p in orders[a] if p.backward == backward]
                    got = [(p.chunk, p.micro_batch) for p in orders[b] if p.backward == backward]
                    wire = [m for m in sent if 0 <= m[0] < chunks]
                    assert wire == [m for m in got if m in {*wire}]


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


def test_a_micro_batch_is_packed_once_for_all_chunks():
    """And not kept when it has gone through the last."""
    seen, chunk = [], [0]

    def enter(n):
        chunk[0] = n

    def packs():
        for one in "abc":
            seen.append(f"pack {one}")
            yield one

    order = one_forward_one_backward(2, 1, 3, 2)
    run_schedule(
        order,
        packs(),
        lambda one, last: seen.append(f"{one}{chunk[0]}") or (one, chunk[0]),
        lambda made, last: seen.append(f"{made[0]}{made[1]}".upper()) or None,
        enter,
    )
    assert [word for word in seen if "pack" in word] == ["pack a", "pack b", "pack c"]
    passes = ["abc"[p.micro_batch] + str(p.chunk) for p in order]
    assert [word.lower() for word in seen if "pack" not in word] == passes


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
