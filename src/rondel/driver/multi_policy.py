"""A run with several policies: each was placed as if it were alone, and composites of
engine, trainer and transport join them.

    policies.critic      engine, trainer, transport of its own      run.folder/policies/critic/ (token
                         log, weights on their way, logs)
    frozen = true        an engine alone

In one process they share the device and its thread (adapters on one base, its memory and its engine, too:
assemble/one_base.py). Nobody behind the composites knows that there are others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, WorkerError
from rondel.core.types import POLICY
from rondel.generate.engine.multi_policy import MultiPolicyEngine
from rondel.models.vocabulary import same_words
from rondel.runtime.devices import SharedDevice, SplitDevices
from rondel.sync.multi_policy import MultiPolicyTransport
from rondel.train.multi_policy import MultiPolicyTrainer

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.assemble.model_info import ModelInfo
    from rondel.assemble.placement import Deployment


def join_deployments(
    job: Job, each: dict[str, Deployment], device: str, rows: dict[str, Algorithm] | None = None
) -> Deployment:
    """The parts of all as the loop calls them. `rows`: of policies that learn by another one than the run's."""
    for name, one in each.items():
        if name != POLICY:
            refuse_others(name, one.known, each[POLICY].known)
            name_workers(name, one.engine, one.trainer)
    trained = {name: one for name, one in each.items() if one.trainer is not None}
    frozen = {name: one.engine for name, one in each.items() if one.trainer is None}
    engine = MultiPolicyEngine({name: one.engine for name, one in trained.items()}, frozen=frozen)
    trainer = MultiPolicyTrainer({name: one.trainer for name, one in trained.items()}, rows)
    shared = job.place.kind == "shared"

    async def find_lost_worker() -> WorkerError | None:
        for one in each.values():
            if ended := await one.lost():
                return ended
        return None

    def dump() -> None:
        for one in each.values():
            one.dump()

    return replace(
        each[POLICY],
        engine=engine,
        trainer=trainer,
        devices=SharedDevice(engine, trainer, how=job.loop.in_flight, device=device) if shared else SplitDevices(),
        resolved={policy_key(name, key): value for name, one in each.items() for key, value in one.resolved.items()},
        where=each[POLICY].where if shared else "; ".join(f"{name}: {one.where}" for name, one in each.items()),
        checkpoint_bytes=sum(one.checkpoint_bytes for one in each.values()),
        transport=MultiPolicyTransport({name: one.transport for name, one in trained.items()}),
        remotes={name: remote for one in each.values() for name, remote in one.remotes.items()},
        lost=find_lost_worker,
        dump=dump,
        pids=lambda: {name: pid for one in each.values() for name, pid in one.pids().items()},
        others={name: one.known for name, one in each.items() if name != POLICY},
        frozen_bytes=sum(each[name].known.weight_bytes for name in frozen),
    )


def policy_key(policy: str, key: str) -> str:
    """How a resolved key is told: those of the main policy have no prefix."""
    return key if policy == POLICY else f"policies.{policy}.{key}"


def name_workers(policy: str, engine: Any, trainer: Any) -> None:
    """In time accounts and warnings. Workers of a process of their own have their name from where they were started."""
    if policy == POLICY:
        return
    for role, part in (("engine", engine), ("trainer", trainer)):
        if part is not None and "account" in vars(part):
            part.account.worker = f"{role}-{policy}"
    if trainer is not None and "account" in vars(trainer):
        trainer.whose = f" of '{policy}'"


def refuse_others(name: str, other: ModelInfo, main: ModelInfo) -> None:
    """What one conversation of an episode cannot carry beside another."""
    where = f"policies.{name}.model = '{other.name}'"
    same_words(
        main,
        other,
        who=where,
        remedy="All agents of an episode are written in the same tokens: take a model of the same family",
    )
    if bool(other.routers) != bool(main.routers):
        raise ConfigError(
            f"{where} has {other.routers} routers and '{main.name}' {main.routers}: a mixture of experts plays only "
            f"with others of its kind so far. "
            "Take two dense models, or two mixtures"
        )
    if other.sight != main.sight:
        raise ConfigError(
            f"{where} looks at pictures otherwise than '{main.name}': take models of one family, or two that read text "
            f"alone"
        )
    if other.max_context < main.max_context:
        raise ConfigError(
            f"{where} carries {other.max_context} tokens and '{main.name}' {main.max_context}: conversations are cut "
            f"where model.path ends. "
            "Give model.path the shorter context, or take a model that carries as many"
        )
