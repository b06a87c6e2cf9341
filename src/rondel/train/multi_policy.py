"""Several policies behind the verbs of one trainer: an episode's turns are one step, and
each agent's tokens train its own weights.

    batch ──> samples of "policy" ──> packed, credited, counted, one move    metrics train/...      checkpoint/
          └─> samples of "critic" ──> the same apart from them               metrics critic/...     checkpoint/policies/critic/
    frozen policies have no trainer: their samples are in the rollouts and in no gradient

Each loss is what it would be if its agents trained alone: denominators, clipping and
schedule are its own.  MARFT, arXiv:2504.16129.

A policy may have a row of its own: a model of a world learns by likelihood what the world did, and nothing of what it
drew itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondel.core.errors import CheckpointError, LawError, SyncError
from rondel.core.events import Warned, emit
from rondel.core.transitions import IMAGINED, OBSERVED, PREDICTED, REMEMBERED
from rondel.core.types import POLICY, Manifest, Route, StepStats
from rondel.system.files import make_folder
from rondel.train.pack import TrainBatch, TrainSample

if TYPE_CHECKING:
    from rondel.algos.mixture import Mixture
    from rondel.algos.table import Algorithm
    from rondel.core.protocols import Trainer

FOLDER = "policies"  # of a checkpoint, in which those beside the main policy have theirs


class MultiPolicyTrainer:
    """`MultiPolicyTrainer({"policy": t0, "critic": t1})`, the main policy among them. `rows`: of those that learn by
    another row than the run's.
    """

    def __init__(
        self, each: Mapping[str, Trainer[TrainBatch, Algorithm | Mixture]], rows: Mapping[str, Algorithm] | None = None
    ) -> None:
        self.each: dict[str, Any] = dict(each)
        self.rows = dict(rows or {})
        self._published: dict[str, Manifest] = {}
        self._idle: set[str] = set()  # policies whose silence was told

    @property
    def moved(self) -> bool:
        """Did the last step write other bits into any of them?"""
        return any(trainer.moved for trainer in self.each.values())

    async def annotate(self, batch: TrainBatch, needs: frozenset[str]) -> TrainBatch:
        for name, own in self._split_by_policy(batch).items():
            await self.each[name].annotate(own, self.rows[name].needs if name in self.rows else needs)
        return batch

    async def step(self, batch: TrainBatch, algo: Algorithm | Mixture) -> StepStats:
        """One after the other, for they may share a device. A policy of which nobody wrote
        stays as it is, and counts the version.
        """
        shares = self._split_by_policy(batch)
        self._check_versions(shares)
        metrics = _policy_metrics(batch)
        refused, trained = [], []
        outcomes: dict[int, str] = {}
        for name, own in shares.items():
            stats = await self.each[name].step(own, self.rows.get(name, algo))
            metrics |= {policy_metric(name, metric): value for metric, value in stats.metrics.items()}
            border, _, rest = stats.note.partition(":")
            if not stats.stepped:
                refused.append(f"{border} of '{name}':{rest}")
            elif own.samples:
                trained.append(f"'{name}'")
            for group in {sample.group for sample in own.samples}:
                if why := stats.outcomes.get(group, "" if stats.stepped else border):
                    outcomes.setdefault(group, f"{why} of '{name}'")
                else:
                    outcomes[group] = ""  # what one policy refuses, another one may learn from
        if refused and trained:
            refused[-1] += f" ({' and '.join(trained)} took theirs)"
        self._tell_silence(batch, shares)
        return StepStats(not refused, metrics, "; ".join(refused), outcomes)

    async def publish(self, route: Route) -> tuple[Manifest, Route]:
        """Of the policies that the route names."""
        told = {name: await self.each[name].publish(part) for name, part in route.data.items()}
        for name, (manifest, _) in told.items():
            self._check_moved(name, manifest)
        joined = Manifest.join_policies({name: manifest for name, (manifest, _) in told.items()})
        return joined, Route(route.kind, {name: part for name, (_, part) in told.items()})

    async def send(self, route: Route) -> None:
        await self._call_trainers(lambda name: self.each[name].send(route.data[name]), route.data)

    async def logprobs(self, tokens: list[int]) -> list[float]:
        return await self.each[POLICY].logprobs(tokens)

    async def save(self, path: Path) -> None:
        for name, trainer in self.each.items():
            folder = folder_of(path, name)
            make_folder(folder)
            await trainer.save(folder)

    async def load(self, path: Path) -> None:
        if lacking := [name for name in self.each if not folder_of(path, name).is_dir()]:
            raise CheckpointError(
                f"{path} has no weights of the policy '{lacking[0]}': it was written by a run without it"
            )
        for name, trainer in self.each.items():
            await trainer.load(folder_of(path, name))

    async def sleep(self, tags: tuple[str, ...]) -> None:
        await self._call_trainers(lambda name: self.each[name].sleep(tags), self.each)

    async def wake(self, tags: tuple[str, ...]) -> None:
        await self._call_trainers(lambda name: self.each[name].wake(tags), self.each)

    @property
    def offload(self) -> MultiPolicyMemory:
        return MultiPolicyMemory(self.each)

    def _split_by_policy(self, batch: TrainBatch) -> dict[str, TrainBatch]:
        """The samples of each trained policy, in their order. -> also of one that has none."""
        learned = [s for s in batch.samples if s.agent != PREDICTED]
        return {name: TrainBatch([s for s in learned if s.policy == name]) for name in self.each}

    def _check_versions(self, shares: Mapping[str, TrainBatch]) -> None:
        """A token's version is one that its policy has had."""
        for name, own in shares.items():
            drawn = [s.known.versions for s in own.samples if not s.guided]
            newest = max((int(v.max()) for v in drawn if v is not None), default=0)
            if name in self._published and newest > (version := self._published[name].version):
                raise LawError(
                    f"'{name}' is at version {version}, and a token of its agents was written by version {newest}"
                )

    def _check_moved(self, name: str, manifest: Manifest) -> None:
        """The digest of each changes if and only if it was moved; that of all would hide one that stood still."""
        before, moved = self._published.get(name), self.each[name].moved
        self._published[name] = manifest
        if before is None or manifest.version <= before.version:
            return
        if moved and manifest.root == before.root:
            raise SyncError(
                f"'{name}' made a step with lr > 0, but the weights it publishes are bit for bit the old ones"
            )
        if not moved and manifest.root != before.root:
            raise SyncError(f"no update of '{name}' was applied, but its published weights changed")

    def _tell_silence(self, batch: TrainBatch, shares: Mapping[str, TrainBatch]) -> None:
        """Once: a policy that nobody plays costs its memory and learns nothing."""
        for name in [name for name, own in shares.items() if not own.samples and name not in self._idle]:
            self._idle.add(name)
            spoke = ", ".join(dict.fromkeys(f"'{s.agent}'" for s in batch.samples)) or "none"
            emit(
                Warned(
                    f"the {'main policy' if name == POLICY else f'policy {name!r}'} had nothing to learn from in this "
                    f"step: no agent that it plays wrote anything. Agents that did: {spoke}"
                )
            )

    async def _call_trainers(self, ask: Callable[[str], Awaitable[None]], names: Mapping[str, Any]) -> None:
        await asyncio.gather(*(ask(name) for name in names))


class MultiPolicyMemory:
    """What they all have on a device that they share."""

    def __init__(self, each: Mapping[str, Any]) -> None:
        self._each = [trainer.offload for trainer in each.values()]

    def memory(self) -> dict[str, int]:
        total: dict[str, int] = {}
        seen: set[int] = set()  # a base under several adapters is there once
        for one in self._each:
            for what, n in one.memory(seen).items():
                total[what] = total.get(what, 0) + n
        return total

    @property
    def high(self) -> int:
        return sum(one.high for one in self._each)

    @high.setter
    def high(self, value: int) -> None:
        for one in self._each:
            one.high = value


def _policy_metrics(batch: TrainBatch) -> dict[str, float]:
    """What the agents of each policy earned and wrote, of those that are frozen, too; what was imagined apart."""
    of: dict[str, list[TrainSample]] = {}
    for sample in batch.samples:
        if sample.agent not in (IMAGINED, PREDICTED, REMEMBERED):
            of.setdefault(sample.policy, []).append(sample)
    rewards = {f"{policy}/reward_mean": sum(s.reward for s in own) / len(own) for policy, own in of.items()}
    lengths = {f"{policy}/length_mean": sum(len(s.trainable) for s in own) / len(own) for policy, own in of.items()}
    return rewards | lengths | _world_metrics(batch)


def _world_metrics(batch: TrainBatch) -> dict[str, float]:
    """Steps in the world and in its model, and how far the model is off; nothing where no model is learned."""
    observed = [s for s in batch.samples if s.agent == OBSERVED]
    if not observed:
        return {}
    world, parts = observed[0].policy, dict[str, list[float]]()
    for sample in observed:
        for name, value in sample.parts.items():
            parts.setdefault(name, []).append(value)
    imagined = [s for s in batch.samples if s.agent == IMAGINED]
    row = {
        "real_steps": sum(len(s.trainable) for s in observed),
        "imagined_steps": sum(len(s.trainable) for s in imagined),
        "trusted": len({s.group for s in imagined}) / len({s.group for s in observed}),
    }
    row |= {name: sum(values) / len(values) for name, values in parts.items()}
    return {f"{world}/{name}": float(value) for name, value in row.items()}


def policy_metric(policy: str, metric: str) -> str:
    """train/loss of the policy "critic" is critic/loss."""
    return metric if policy == POLICY else f"{policy}/{metric.removeprefix('train/')}"


def folder_of(path: Path, policy: str) -> Path:
    return path if policy == POLICY else path / FOLDER / policy
