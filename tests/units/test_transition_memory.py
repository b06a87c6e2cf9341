"""What a model of a world learns from again: the newest episodes of earlier steps, the same after a resume."""

import pytest

from kits.worlds import learned_groups, world_model
from rondel.driver.transition_memory import TransitionMemory
from rondel.runtime.journal import store


def steps():
    """Six steps of four groups with 29 transitions, under numbers of their own."""
    groups = [learned_groups(world_model(), seed) for seed in range(6)]
    for step, own in enumerate(groups):
        for group in own:
            group.id += 10 * step
    return {step + 1: own for step, own in enumerate(groups)}


def told(memory):
    return [
        (group.id, [(t.agent, list(t.steps.rows[:, 0])) for t in group.trajectories]) for group in memory.due_groups()
    ]


@pytest.mark.slow
def test_the_newest_that_have_so_many_transitions_come_back(tmp_path):
    whole, resumed = TransitionMemory(40), TransitionMemory(40)
    for step, groups in steps().items():
        whole.record_step(step, groups)
        store.write_step(tmp_path, step, groups)
        if step == 1:
            assert whole.due_groups() == []
    found = whole.due_groups()
    assert [group.id for group in found] == [33, 35, 41, 42, 43, 45]  # of steps 5 and 4; 29 and 15 transitions
    assert sum(t.written for group in found for t in group.trajectories) == 44
    assert {t.agent for group in found for t in group.trajectories} == {"world.remembered"}
    assert sorted(whole.taken) == [4, 5, 6]
    resumed.restore_steps(tmp_path, range(1, 6))
    resumed.record_step(6, steps()[6])
    assert told(resumed) == told(whole)
