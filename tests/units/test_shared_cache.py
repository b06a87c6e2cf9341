"""Recurrent states that the two halves of an engine share: what one writes the other reads, and copies are made once."""

from __future__ import annotations

import time

import pytest
import torch

from kits.thread_ranks import on_ranks
from rondel.generate.engine.builtin.shared_pools import SharedStates, copy_slots
from rondel.generate.engine.builtin.states import StateMemory

SHAPES = {(0, "conv"): ((3,), torch.float32), (2, "delta"): ((2, 2), torch.float64)}
HALF = 2


def filled(states, seed):
    generator = torch.Generator().manual_seed(seed)
    for pool in states.pools.values():
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return states


def numbers(states):
    return [pool.clone() for pool in states.pools.values()]


def test_what_one_process_writes_the_other_reads_until_it_is_given_back():
    noted = []
    own = SharedStates(4, SHAPES, copies=noted)
    other = SharedStates(4, SHAPES, own.shared.path)
    filled(own, 0)
    assert [pool.shape for pool in other.pools.values()] == [(4, 3), (4, 2, 2)]
    other.copy_slot(1, 3)
    assert all(torch.equal(a, b) and torch.equal(a[1], a[3]) for a, b in zip(numbers(own), numbers(other), strict=True))
    assert noted == [] and own.copy_slot(0, 2) is None and noted == [(0, 2)]
    own.clear()
    assert noted == [] and not any(pool.any() for pool in numbers(other)), "memory that is given back is zeros in both"
    filled(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(numbers(own), numbers(other), strict=True))


@pytest.mark.parametrize("late", range(2 * HALF))
def test_copies_are_made_once_before_either_half_computes(late):
    """A slot is saved, filled anew, and saved again: whoever makes these twice has other states, and whoever does not wait
    has the old ones. One rank comes late; the leader has made its own copies when the others are told.
    """
    copies = [(0, 3), (1, 0), (0, 2), (3, 1)]
    own = [filled(SharedStates(4, SHAPES), i) for i in range(HALF)]
    both = [*own, *(SharedStates(4, SHAPES, states.shared.path) for states in own)]
    wanted = []
    for i in range(HALF):
        plain = StateMemory(4)
        plain._pools |= {which: pool.clone() for which, pool in own[i].pools.items()}
        for pair in copies:
            plain.copy_slot(*pair)
        wanted.append(numbers(plain))
    for pair in copies:
        both[0].copy_slot(*pair)

    def begin(rank):
        if rank.index == late:
            time.sleep(0.02)
        if rank.index:
            copy_slots(both[rank.index], copies, rank, HALF, read=True)
        return numbers(both[rank.index])

    read, _ = on_ranks(2 * HALF, begin)
    for i, states in enumerate(read):
        assert all(torch.equal(a, b) for a, b in zip(states, wanted[i % HALF], strict=True)), f"rank {i}"


def test_nobody_waits_where_the_other_half_computes_nothing():
    states = [filled(SharedStates(4, SHAPES), i) for i in range(2 * HALF)]
    on_ranks(2 * HALF, lambda rank: rank.index and copy_slots(states[rank.index], [(0, 1)], rank, HALF, read=False))
    assert [all(torch.equal(pool[0], pool[1]) for pool in numbers(one)) for one in states] == [
        False,
        True,
        False,
        False,
    ]
