"""What the controller holds of a step ends with it: a million tokens weigh as much as the rest of its memory."""

import asyncio
import subprocess
import sys
from weakref import WeakSet

import numpy as np
import pytest
import torch

from kits.fakes import CountingTrainer, Rollouts, endless, loop_kit
from rondel import loop
from rondel.buffer import Buffer
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.driver.phases import PerToken
from rondel.driver.rollouts import prepare
from rondel.train.pack import batch_of


class Tracked(Group):
    """A group that can be watched."""

    __hash__ = object.__hash__


class Watched(Rollouts):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.groups, self.alive = WeakSet(), []

    async def generate_group(self, slot):
        self.alive.append(len(self.groups))
        found = await super().generate_group(slot)
        self.groups.add(group := Tracked(found.id, found.task, found.trajectories, found.born))
        return group


@pytest.mark.parametrize("staleness", [0, 2])
def test_groups_of_the_last_step_are_gone_when_the_next_is_generated(staleness):
    """Not those of lanes that wait for their next task either: what lives is in the buffer, or being written."""
    trainer, rollouts = CountingTrainer(), Watched(0)
    buffer = Buffer(groups_per_step=3, max_staleness=staleness)
    asyncio.run(loop.run(endless(), buffer, **loop_kit(trainer, rollouts, 12)))
    assert max(rollouts.alive) < 3 * (staleness + 1) and len(rollouts.alive) >= 36
    assert rollouts.alive[::3] == [0] * len(rollouts.alive[::3]) or staleness, "a synchronous step begins with none"


def long_trajectory(tokens: int) -> Trajectory:
    t = Trajectory(score=Score(1.0))
    t.extend([1, 2])
    t.extend(range(tokens), logprobs=[-0.5] * tokens, versions=[3] * tokens)
    return t


def test_long_groups_are_packed_beside_the_event_loop_and_alike(monkeypatch):
    monkeypatch.setattr("rondel.driver.rollouts.TURN_TOKENS", 50)
    groups = [Group(n, Task("t", "e", {}), [long_trajectory(size)] * 2, 0) for n, size in enumerate((10, 40, 9, 30))]
    for ours, plain in zip(asyncio.run(prepare(groups)).samples, batch_of(groups).samples, strict=True):
        assert (ours.group, ours.index) == (plain.group, plain.index) and np.array_equal(ours.tokens, plain.tokens)
        assert torch.equal(ours.known.behavior, plain.known.behavior)


def test_what_training_learned_is_laid_out_when_it_is_asked_for():
    batch = batch_of([Group(7, Task("t", "e", {}), [long_trajectory(3), long_trajectory(2)], 0)])
    batch.write_tokens(advantages=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    told = PerToken(batch, "advantages")
    assert len(told) == 2 and (7, 1) in told and (7, 2) not in told
    assert told[7, 0].tolist() == [0, 0, 1, 2, 3] and told[7, 1].tolist() == [0, 0, 4, 5]
    assert not PerToken(batch, "trained"), "no pass has computed it"
    batch.samples[1].known.advantages = None
    assert list(PerToken(batch, "advantages")) == [(7, 0)]


PROGRAM = """
import numpy as np
from rondel.runtime.devices import prepare_controller
from rondel.system.process_memory import resident_memory

assert prepare_controller()
np.ones(30 << 20, np.uint8)  # what is mapped and freed first teaches glibc to take the next from its heap
before = resident_memory()["rss"]
blocks = [np.ones(8 << 20, np.uint8) for _ in range(16)]
full = resident_memory()["rss"]
del blocks[:-1]
print(before, full, resident_memory()["rss"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_a_controller_gives_large_arrays_back():
    """Also those that lie below one that lives."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, full, after = (int(word) >> 20 for word in told.split())
    assert full - before > 120 and after - before < 16
