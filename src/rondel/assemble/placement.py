"""Where engine and trainer of a run are, as its driver calls them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rondel.assemble.model_info import ModelInfo
from rondel.assemble.remote_workers import RemoteEngine
from rondel.core.errors import WorkerError
from rondel.core.protocols import Transport
from rondel.core.types import POLICY
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.engine.multi_policy import MultiPolicyEngine
from rondel.runtime.devices import SharedDevice, SplitDevices
from rondel.sync.update import WeightUpdate
from rondel.train.multi_policy import MultiPolicyTrainer


async def _no_lost_worker() -> None:
    """A trainer in this process is there as long as we are."""


async def no_lost_replica() -> bool:
    """Without a router each engine is started again by whoever asks it."""
    return False


@dataclass
class Deployment:
    """Engine and trainer as the loop calls them, wherever they are."""

    known: ModelInfo
    engine: Any
    trainer: Any
    devices: SharedDevice | SplitDevices
    resolved: dict[str, str]
    where: str
    checkpoint_bytes: int
    transport: Transport
    remotes: dict[str, RemoteEngine] = field(default_factory=dict)  # engines that may end and be started again
    reach: Callable[[str], ForeignEngine] | None = None  # an engine of others by its address, if it can carry this run
    new_engine: Callable[[int], RemoteEngine] | None = None  # one more of our own, by its number, if a run can take one
    bring_back_lost: Callable[[], Awaitable[bool]] = no_lost_replica  # replicas of a router -> was there any?
    lost: Callable[[], Awaitable[WorkerError | None]] = _no_lost_worker  # a rank of the trainer that has ended
    dump: Callable[[], None] = lambda: None  # makes the workers write their stacks
    pids: Callable[[], dict[str, int]] = dict  # of those on this machine
    close: Callable[[], None] = lambda: None
    others: dict[str, ModelInfo] = field(default_factory=dict)  # policies beside the main one
    frozen_bytes: int = 0  # weights of those that are frozen and have a copy of their own

    @property
    def trainers(self) -> dict[str, Any]:
        """That of each policy that is trained."""
        return self.trainer.each if isinstance(self.trainer, MultiPolicyTrainer) else {POLICY: self.trainer}

    @property
    def may_lose_engines(self) -> bool:
        """Whether an engine may end while the run goes on: one in a process of its own, or a replica of a router."""
        return bool(self.remotes) or self.new_engine is not None or self.bring_back_lost is not no_lost_replica

    @property
    def stays_whole(self) -> bool:
        """Whether no worker can end while the run goes on: all of them are in this process."""
        return not self.may_lose_engines and self.lost is _no_lost_worker

    def catches_up(self, worker: str, sync: WeightUpdate) -> Callable[[Any], Awaitable[int]] | None:
        """What brings an engine that was started again the weights that serve: of several
        policies those of its own, if they are trained.
        """
        if not isinstance(self.engine, MultiPolicyEngine):
            return sync.catch_up
        [name] = [name for name, engine in self.engine.each.items() if engine is self.remotes[worker]]
        return (lambda fresh: sync.catch_up(MultiPolicyEngine({name: fresh}))) if name in self.engine.trained else None

    async def restart_engines(self) -> bool:
        """Start again the engines that have ended; one that a router has lost joins again. -> was there any?"""
        healed = False
        for remote in list(self.remotes.values()):  # they become more and fewer meanwhile
            healed |= await remote.restart_if_dead()
        return await self.bring_back_lost() or healed
