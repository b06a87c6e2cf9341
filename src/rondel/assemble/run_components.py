"""Everything one process needs for one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rondel.algos.mixture import Mixture
from rondel.algos.table import Algorithm
from rondel.assemble.model_info import ModelInfo
from rondel.assemble.placement import Deployment
from rondel.assemble.rows import AlgorithmRows
from rondel.assemble.workers import mismatch_bound, replays_routing
from rondel.core.config.job import Job
from rondel.core.types import Group, Sampling, Verdict
from rondel.driver.demonstration_stream import DemonstrationStream
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.remote_teachers import RemoteTeachers
from rondel.driver.replay_buffer import ReplayBuffer
from rondel.driver.step_watch import StepWatch
from rondel.driver.transition_memory import TransitionMemory
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.order import TaskAdmissions
from rondel.generate.envs.sources import TaskSet
from rondel.runtime.journal.command_log import EpisodeCommandLog
from rondel.score.pool import RewardPool
from rondel.sync.update import WeightUpdate


@dataclass
class Components:
    """Everything one process needs for one run."""

    job: Job
    rows: AlgorithmRows
    tasks: TaskSet
    order: TaskAdmissions
    sampling: Sampling
    pool: RewardPool
    placed: Deployment
    sync: WeightUpdate
    judge: Callable[[Group], Verdict]
    env: Any
    resolved: dict[str, str]
    shown: list[DemonstrationStream]
    teachers: RemoteTeachers | None
    returning: ReplayBuffer | TransitionMemory | None
    close: Callable[[], None]
    failures: FailureBudget
    episodes: Callable[[], EpisodeState]
    commands: EpisodeCommandLog | None
    # of `placed`, asked for many times an answer
    model_info: ModelInfo = field(init=False)
    engine: Any = field(init=False)
    trainer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model_info, self.engine, self.trainer = self.placed.known, self.placed.engine, self.placed.trainer

    @property
    def algo(self) -> Algorithm | Mixture:
        """What the loop trains: the row, or a mixture of it, of those that sources have, and of
        what is shown beside.
        """
        streams = self.rows.of | {s.stream: (s.row, s.weight) for s in self.shown}
        return Mixture(self.row, streams) if streams else self.row

    @property
    def row(self) -> Algorithm:
        return self.rows.main

    @cached_property
    def step_watch(self) -> StepWatch | None:
        """Where the reward values steps while answers are written."""
        return StepWatch(self.pool, lambda: self.engine) if self.pool.separators else None

    @cached_property
    def behavior_wants(self) -> frozenset[str]:
        """What rows want of every draw beside the token: the likeliest tokens, or more draws."""
        return self.rows.behavior_wants

    @cached_property
    def replays_routing(self) -> bool:
        """Whether the trainer replays the engine's choice of experts."""
        return replays_routing(self.job, self.model_info)

    @property
    def mismatch_bound(self) -> float:
        """K3 of fresh tokens, in nats a token, above which trainer and engine disagree."""
        return mismatch_bound(self.job, self.model_info)
