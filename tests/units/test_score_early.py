"""Score beside Generate: whoever is written is scored while the others still write.
Told by the order of events, not by a clock.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from kits import runs
from kits.no_rows import NO_ROWS
from rondel.core.types import EnvFault, Failed, PolicyFault, Sampling, Score, Slot, Task, Trajectory
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.rollouts import GroupRollouts
from rondel.generate.envs.episode import EpisodeState


class Quiet(GroupRollouts):
    def open_chat(self, *args, **settings):
        return SimpleNamespace(episode=EpisodeState())


class Env:
    """Sample n is written only after n others were scored: a group that is scored at its end would wait for ever."""

    def __init__(self, log, scored):
        self.log, self.scored, self.begun = log, scored, 0

    async def run(self, task, chat):
        number, self.begun = self.begun, self.begun + 1
        while len(self.scored) < number:
            await asyncio.sleep(0)
        self.log.append(("written", number))
        outcome = {2: PolicyFault("too many calls")}.get(number)
        return Trajectory(text=str(number), **({"outcome": outcome} if outcome else {}))


class Pool:
    groupwise = False

    def __init__(self, log, scored):
        self.log, self.scored = log, scored

    async def score(self, trajectory, task):
        await asyncio.sleep(0)
        number = int(trajectory.text)
        self.log.append(("scored", number))
        self.scored.append(number)
        return Failed("no") if number == 1 else Score(float(number))


def rollouts(tmp_path, env, pool):
    job = runs.tiny(Path(tmp_path))
    return Quiet(
        SimpleNamespace(job=job, sampling=Sampling(), env=env, pool=pool, rows=NO_ROWS, failures=FailureBudget()),
        group_size=4,
    )


def test_a_sample_is_scored_while_others_are_written(tmp_path):
    log, scored = [], []
    crew = rollouts(tmp_path, Env(log, scored), Pool(log, scored))

    async def group():
        found = await crew.generate_group(Slot(0, Task("t", "x", {}), 0))
        await crew.score(found)
        return found

    found = asyncio.run(asyncio.wait_for(group(), 20))
    assert log == [(what, number) for number in range(4) for what in ("written", "scored")]  # each once
    assert [t.score for t in found.trajectories] == [Score(0.0), Failed("no"), Score(2.0), Score(3.0)]


def test_a_fault_of_the_environment_is_not_scored(tmp_path):
    class Broken:
        async def run(self, task, chat):
            raise RuntimeError("no disk")

    class Never:
        groupwise = False

        async def score(self, trajectory, task):
            raise AssertionError

    crew = rollouts(tmp_path, Broken(), Never())
    found = asyncio.run(crew.generate_group(Slot(0, Task("t", "x", {}), 0)))
    assert {t.score for t in found.trajectories} == {Failed("environment fault", "RuntimeError: no disk")}
    assert all(isinstance(t.outcome, EnvFault) and t.reward is None for t in found.trajectories)
    assert found.rewards == []
