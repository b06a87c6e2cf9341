"""A bandit behind the whole loop, whose world breaks now and then; its mean reward is known."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

from kits import runs
from kits.fakes import CountingTrainer, endless, loop_kit
from kits.no_rows import NO_ROWS
from rondel import loop
from rondel.buffer import Buffer
from rondel.core.types import Sampling, Score, Trajectory
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.rollouts import GroupRollouts
from rondel.filter.complete import Complete
from rondel.generate.envs.episode import EpisodeState

RIGHT = 0.3  # a bandit's chance: the mean of its rewards, in closed form


class Bandit(GroupRollouts):
    """A sample's reward is its own coin; whether the world breaks is another one."""

    faults: float = 0.0
    judge = staticmethod(Complete(2))

    async def _sample_episode(self, slot, index, policy="policy"):
        parts, coin, world = (
            self.parts,
            random.Random(f"reward {slot.number} {index}"),
            random.Random(f"world {slot.number} {index}"),
        )
        broken = world.random() < self.faults

        class Env:
            async def run(self, task, chat):
                await asyncio.sleep(0)
                if broken:
                    raise RuntimeError("no route to the sandbox")
                return Trajectory(text=f"{slot.number} {index}", score=Score(float(coin.random() < RIGHT)))

        view = GroupRollouts(SimpleNamespace(**{**vars(parts), "env": Env()}), self.group_size)
        view.open_chat = lambda *a, **k: SimpleNamespace(episode=EpisodeState())
        return await view._sample_episode(slot, index, policy)


def bandit(tmp_path, faults, steps=60, groups=8, size=8):
    parts = SimpleNamespace(
        job=runs.tiny(Path(tmp_path)), sampling=Sampling(), failures=FailureBudget(), pool=None, rows=NO_ROWS
    )
    rollouts, trained, trainer = Bandit(parts, size), [], CountingTrainer()
    rollouts.faults = faults
    buffer = Buffer(groups_per_step=groups, max_staleness=1)

    async def keep(batch):
        trained.extend(batch)
        return batch

    kit = loop_kit(trainer, rollouts, steps) | {"prepare": keep}
    asyncio.run(asyncio.wait_for(loop.run(endless(), buffer, **kit), 60))
    return trained, buffer.ledger(), parts.failures
