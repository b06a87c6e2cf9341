"""Policies that are adapters on one base, on one device: the base is loaded once, one engine serves all of them, and
each is trained by a trainer of its own.

    base W ──> engine: passes over W, each request's rows + its adapter     one cache, one token log
      ├──────> trainer of "policy": W + its A, B                            an optimizer each
      └──────> trainer of "critic": W + its A, B

The engine reads the tensors that the trainers write: an update moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rondel.assemble.model_info import ModelInfo
from rondel.assemble.placement import Deployment
from rondel.assemble.worker_devices import format_threads
from rondel.assemble.workers import engine_of, prepare_policy, speculation_of, trainer_of
from rondel.core.config.job import Job
from rondel.core.config.model import AdapterConfig
from rondel.core.types import POLICY, Sampling
from rondel.driver.multi_policy import name_workers, policy_key, refuse_others
from rondel.generate.engine.adapter_policies import AdapterPolicyEngine
from rondel.generate.engine.builtin.adapter_receiver import AdapterReceiver
from rondel.models import adapter_files
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapters import attach_adapter
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.shared_base import adapter_weights, find_base, share_base
from rondel.planner.resolve import resolve_transport
from rondel.runtime.devices import Device, SharedDevice, pick_device
from rondel.sync.from_tensor import FromTensor
from rondel.sync.multi_policy import MultiPolicyTransport
from rondel.train.checkpoint import bytes_needed
from rondel.train.multi_policy import MultiPolicyTrainer


def shares_base(job: Job) -> bool:
    """Whether all policies of the run are adapters on the same model, or that model itself, on one device."""
    if not job.may_share_base:
        return False
    first, *others = [find_base(job.of_policy(name).model.path) for name in (POLICY, *job.policies)]
    return all(other == first for other in others)


def deploy_on_one_base(
    job: Job,
    needs: frozenset[str],
    sampling: Sampling,
    longest: Callable[[ModelInfo], int],
    folder: Path | None,
) -> Deployment:
    """The parts of the run as the loop calls them. `folder`: of the run, for what survives a crash."""
    way = resolve_transport(job.sync.kind, apart="module")
    with ExitStack() as ends:
        threads = job.place.threads
        device = Device(pick_device(job.place.device), None if threads == "auto" else threads)
        ends.callback(device.close)
        placed = _deploy(job, needs, sampling, longest, device, folder and folder / "wal" / "engine-0")
        placed.resolved["sync.kind"] = f"{way.value} ({way.why})"
        placed.close = ends.pop_all().close
        return placed


def _deploy(
    job: Job,
    needs: frozenset[str],
    sampling: Sampling,
    longest: Callable[[ModelInfo], int],
    device: Device,
    log: Path | None,
) -> Deployment:
    jobs = {name: job.of_policy(name) for name in (POLICY, *job.policies)}
    frozen = {name for name, policy in job.policies.items() if policy.frozen}
    base, models = device.call(_load_models, jobs, device.name)
    trained = {name: models[name] for name in jobs if name not in frozen}
    bank = device.call(AdapterBank, base)
    for name, loaded in models.items():
        if loaded.adapter is not None:
            bank.add(adapter_weights(name, loaded))
    known = {name: ModelInfo.from_model(loaded, device.threads) for name, loaded in models.items()}
    for name in job.policies:
        refuse_others(name, known[name], known[POLICY])
    one, resolved = engine_of(
        jobs[POLICY],
        base,
        device,
        longest(known[POLICY]),
        device.call(speculation_of, jobs[POLICY], device.name),
        transports={},
        log=log,
        receiver=AdapterReceiver(bank, trained),
    )
    trainers: dict[str, Any] = {}
    for name, loaded in trained.items():
        trainers[name], told = trainer_of(jobs[name], needs, sampling, loaded, device, transport=FromTensor("never"))
        resolved |= {policy_key(name, key): value for key, value in told.items()}
        name_workers(name, None, trainers[name])
    engine = AdapterPolicyEngine(
        one, {name: name if name in bank.served else "" for name in jobs}, trained=list(trained)
    )
    trainer = MultiPolicyTrainer(trainers)
    return Deployment(
        known[POLICY],
        engine,
        trainer,
        SharedDevice(engine, trainer, how=job.loop.in_flight, device=device.name),
        resolved,
        f"one process, {format_threads(device.threads)} on {device.name} for engine and trainers of {len(jobs)} "
        "policies on one base",
        sum(bytes_needed(one) for one in trainers.values()),
        MultiPolicyTransport({name: FromTensor("never") for name in trained}),
        others={name: known[name] for name in job.policies},
    )


def _load_models(jobs: dict[str, Job], device: str) -> tuple[LoadedModel, dict[str, LoadedModel]]:
    """The base, and the model of each policy on it. On the device's thread."""
    main = jobs[POLICY]
    paths = {name: job.model.path for name, job in jobs.items()}
    own = {name: path for name, path in paths.items() if isinstance(path, str) and adapter_files.is_adapter(path)}
    packed = main.model.adapter.kind == "qlora" or any(map(adapter_files.over_four_bits, own.values()))
    base = load_model(find_base(main.model.path), dtype=main.model.dtype, device=device, four_bits=packed)
    models = {}
    for name, job in jobs.items():
        loaded = share_base(base)
        if name in own:
            attach_adapter(loaded, own[name])
            loaded.name = own[name]
        models[name] = prepare_policy(job, loaded)
    bare = main.model_copy(update={"model": main.model.model_copy(update={"adapter": AdapterConfig()})})
    return prepare_policy(bare, base), models
