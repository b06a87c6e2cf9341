"""Where engine and trainer of a run live: on one device, on two of this process, or in processes of their own.

place.kind   place.cluster
shared       local            one device, one module, 0 bytes move
shared       process          place.ranks devices of this machine, a process each, with a rank of the trainer and an
             engine
split        local            two devices of this process, a module each
split        process          place.ranks + place.engines processes of this machine, each on cores (or a GPU) of its own
split        torchrun         the ranks that torchrun started; the first one has the loop, and
             the engines as processes of its own
split        ray              the same as actors of a Ray cluster, on any of its machines

An engine of others is where its url says; then only the trainer's ranks are processes of ours.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rondel.algos.table import SFT
from rondel.assemble.engine_encoder import EngineEncoder
from rondel.assemble.engine_ranks import EngineRanks, RankSettings, end_process, stay_alive
from rondel.assemble.model_info import ModelInfo
from rondel.assemble.placement import Deployment, no_lost_replica
from rondel.assemble.refusals import refuse_offloaded_reward, refuse_unrepeatable, refuse_untold_routes
from rondel.assemble.remote_workers import MOMENT, RemoteEngine, RemoteTrainer, WorkerRole
from rondel.assemble.worker_devices import cores_per_worker, device_names, format_threads, warn_if_crowded
from rondel.assemble.workers import (
    ColocatedHost,
    EngineHost,
    TrainerHost,
    collective_patience,
    engine_of,
    policy_of,
    served_policy_of,
    speculation_of,
    trainer_of,
)
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, UserError
from rondel.core.protocols import Cluster, Transport
from rondel.core.registry import find_registered, refuse_uncallable
from rondel.core.types import POLICY, Sampling
from rondel.driver.multi_policy import join_deployments
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.concurrency import ConcurrencyController
from rondel.generate.engine.foreign import ForeignEngine, ServerDriver
from rondel.generate.engine.routed_experts import RoutedExperts
from rondel.generate.engine.router import EngineRouter
from rondel.generate.engine.sglang import SglangServer
from rondel.generate.engine.vllm import VllmServer
from rondel.models.control.kinds import is_world_model
from rondel.planner import resolve as planner
from rondel.planner.shapes import hub_cache, of_recipe
from rondel.runtime.cluster import torchrun
from rondel.runtime.cluster.process import ProcessCluster
from rondel.runtime.devices import (
    Device,
    OneAtATime,
    SharedDevice,
    SharedDevices,
    SplitDevices,
    pick_device,
)
from rondel.sync import transport_of
from rondel.sync.choice import WORTH, TransportChoice, measure_ways, order_ways
from rondel.system.cpu_quota import usable_processors
from rondel.train.checkpoint import bytes_needed
from rondel.train.multi_policy import FOLDER

ENGINES = {"builtin": BuiltinEngine, "sglang": SglangServer, "vllm": VllmServer}
# mean nats a token of what two sides score
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
ROUTED = 4  # times as much for a mixture in 16 bits


def probe_tolerance(known: ModelInfo) -> float:
    """Largest mean difference on the probe, in nats a token. In 16 bits a token of a mixture that lies between two
    experts may take one of them on one side and the other one on the other; the probe's routes are not replayed.
    """
    return TOLERANCE[known.dtype] * (ROUTED if known.routers and known.dtype != torch.float32 else 1)


def refuse_engine(kind: str, found: Any) -> None:
    """A server driver of the user's without a part that will be used."""
    if kind in ENGINES:
        return
    parts = [name for name in vars(ServerDriver) if not name.startswith("_")] + list(ServerDriver.__annotations__)
    if lacks := [name for name in dict.fromkeys(parts) if not hasattr(found, name)]:
        raise ConfigError(
            f"engine.kind: '{kind}' has no {', '.join(lacks)}; add what is missing: ServerDriver in "
            f"generate/engine/foreign.py says what each is, and a class may inherit the rest from SglangServer"
        )
    refuse_uncallable(f"engine.kind: '{kind}'", found, "url")


def bytes_sent(job: Job) -> int:
    """Of one version of the weights on a CPU; 0 where only an adapter is sent, and where the
    model must be fetched before its size is known.
    """
    if job.model.adapter.kind != "off":
        return 0
    try:
        return of_recipe(job.model.path, hub_cache()).parameter_count * (
            2 if job.model.dtype in ("bfloat16", "float16") else 4
        )
    except UserError:
        return 0


@dataclass
class DeploymentPlan:
    """What all placements are made from.

    needs     what the rows of the run ask of the trainer
    longest   the most tokens of a request, once the tokenizer is known
    folder    of the run, for what survives a crash; None keeps nothing
    policy    whose weights, where there are several: the main one's, or the name of another
    frozen    nothing trains them: an engine is all they need
    before    workers of the policies that were placed before this one, of `workers` in all;
              their cores and GPUs are taken
    beside    the device of a shared placement, once it is there
    reward    whose model is on that device, too, and sleeps while the trainer works
    """

    job: Job
    needs: frozenset[str]
    sampling: Sampling
    longest: Callable[[ModelInfo], int]
    folder: Path | None
    policy: str = POLICY
    frozen: bool = False
    before: int = 0
    workers: int = 0
    beside: Device | None = None
    reward: Any = None
    ends: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        where = self.job.place
        self.device = pick_device(where.device)
        if self.job.run.record:
            refuse_unrepeatable(
                self.job, self.device, torchrun.rank_and_size()[1] if where.cluster == "torchrun" else where.ranks
            )
        self.threads = None if where.threads == "auto" else where.threads
        of: dict[str, planner.Apart] = {"local": "device", "ray": "machine"}
        apart: planner.Apart = (
            "module" if where.one_module else of.get("ray" if where.on_ray else where.cluster, "process")
        )
        if where.one_module and self.job.model.rollout_format != "none":
            apart = "device"  # the engine's weights are its own
        if self.job.engine.kind != "builtin":
            apart = "server"
        # those of a GPU are read where they lie
        weights = bytes_sent(self.job) if apart == "process" and self.device == "cpu" else 0
        way = planner.resolve_transport(
            self.job.sync.kind,
            apart=apart,
            weights=weights,
            room=planner.shared_memory(),
            server=self.job.engine.kind,
        )
        self.kind, self.resolved = way.value, {"sync.kind": f"{way.value} ({way.why})"}
        # on devices of their own: a broadcast from a worker to itself would wait for itself
        between = where.kind == "split" and where.cluster == "process" and apart == "process"
        several = between and self.job.sync.kind == "auto" and not self.job.policies
        self.kinds = planner.transport_ways(way.value) if several else [way.value]

    def new_transport(self) -> Transport:
        """Of driver and trainer, which have an instance each."""
        ways = self.new_transports()
        return TransportChoice(ways) if len(ways) > 1 else ways[self.kind]

    def new_transports(self, within: str = "weights") -> dict[str, Transport]:
        """Those of an engine, by kind."""
        # others read it from where they are
        folder = (self.folder or Path(tempfile.gettempdir()) / f"rondel-{os.getpid()}").resolve() / within
        one = self.job.place.one_module
        server = "" if self.job.engine.kind == "builtin" else urlsplit(self.job.engine.urls[0]).hostname or ""
        return {kind: transport_of(kind, folder=folder, one_module=one, server=server) for kind in self.kinds}

    def choose_way(self, transport: Transport, known: ModelInfo, trainer: Any, engine: Any) -> None:
        """The driver's transport takes the fastest way first, where weights are large enough for a difference."""
        weights = 0 if self.job.model.adapter.kind != "off" else known.parameters * known.dtype.itemsize
        if not isinstance(transport, TransportChoice) or weights < WORTH:
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as sample:
            rates, failed = measure_ways(self.new_transports(sample), trainer, engine, self.job.place.patience)
        order, why = order_ways(self.kinds, rates, failed)
        transport.prefer(order)
        self.resolved["sync.kind"] = f"{order[0]} ({why})"

    def make_cluster(self, names: Sequence[str], threads: int | None) -> Cluster:
        """What starts the workers of these names, whose order is that of their devices."""
        where = self.job.place
        if not where.on_ray:
            return ProcessCluster(self.folder / "logs" if self.folder else None, patience=where.patience)
        try:
            from rondel.runtime.cluster.ray import RayCluster
        except ImportError as error:
            raise ConfigError('place.cluster = "ray" needs Ray: pip install "rondel[cluster]"') from error
        return RayCluster(
            names, cpus=threads or 1, gpus=self.device != "cpu", address=where.ray_address, patience=where.patience
        )

    def worker_devices(self, workers: int) -> list[str]:
        """The device of each worker; a Ray actor sees only its own."""
        if self.job.place.on_ray:
            return [self.device.partition(":")[0]] * workers
        return device_names(self.device, self.before + workers)[self.before :]

    def worker_name(self, role: str, number: int) -> str:
        """engine-0, or engine-critic-0."""
        return f"{role}-{number}" if self.policy == POLICY else f"{role}-{self.policy}-{number}"

    def engine_ranks(
        self, number: int, devices: list[str], threads: int | None, cores: list[tuple[int, ...]]
    ) -> Callable[..., EngineRanks | EngineEncoder] | None:
        """What starts the other processes of an engine that has several."""
        if len(devices) == 1:
            return None
        where = self.job.place
        cluster = partial(ProcessCluster, self.folder / "logs" if self.folder else None, patience=where.patience)
        name = self.worker_name("engine", number)
        settings = RankSettings(
            name,
            tuple(devices),
            cluster,
            threads,
            tuple(cores[1:]),
            where.patience,
            where.engine_prefill,
            where.engine_experts_apart,
            where.engine_dp > 1,
        )
        made = partial(EngineEncoder, ranks=EngineRanks) if where.engine_encoders else EngineRanks
        return partial(made, settings, stay_alive if where.cluster == "local" else end_process)

    def wal_path(self, engine: int = 0) -> Path | None:
        return self.folder / "wal" / f"engine-{engine}" if self.folder else None


def deploy_job(
    job: Job,
    needs: frozenset[str],
    sampling: Sampling,
    longest: Callable[[ModelInfo], int],
    folder: Path | None,
    reward: Any = None,
) -> Deployment:
    """The parts of a run; of several policies each as if it were alone,
    and then joined (those on one base: one_base.py)."""
    if reward is not None:
        refuse_offloaded_reward(job)
    if not job.policies:
        return deploy_plan(DeploymentPlan(job, needs, sampling, longest, folder, reward=reward))
    frozen = {name for name, policy in job.policies.items() if policy.frozen}
    rows = {name: SFT for name in job.policies if is_world_model(job.of_policy(name).model.path)}
    workers = {name: 1 if name in frozen else 2 for name in (POLICY, *job.policies)}
    each: dict[str, Deployment] = {}
    with ExitStack() as ends:
        where, beside = job.place, None
        device = pick_device(where.device)
        if where.kind == "shared":
            beside = Device(device, None if where.threads == "auto" else where.threads)
            ends.callback(beside.close)
        for name in workers:
            plan = DeploymentPlan(
                job.of_policy(name),
                rows[name].needs if name in rows else needs,
                sampling,
                longest,
                folder and (folder if name == POLICY else folder / FOLDER / name),
            )
            plan.policy, plan.frozen, plan.beside = name, name in frozen, beside
            plan.before, plan.workers = sum(workers[other] for other in each), sum(workers.values())
            each[name] = deploy_plan(plan)
            ends.callback(each[name].close)
        whole = join_deployments(job, each, device, rows)
        whole.close = ends.pop_all().close
        return whole


def deploy_plan(plan: DeploymentPlan) -> Deployment:
    where = plan.job.place
    with plan.ends as ends:
        if plan.frozen:
            placed = _deploy_engine_worker(plan) if where.cluster == "process" else _alone_here(plan)
        else:
            placed = (
                _deploy_shared
                if where.one_module
                else _deploy_colocated
                if where.kind == "shared"
                else _split_here
                if where.cluster == "local"
                else _deploy_split
            )(plan)
        placed.resolved |= plan.resolved
        placed.close = ends.pop_all().close
        return placed


def _deploy_shared(plan: DeploymentPlan) -> Deployment:
    job, device = plan.job, plan.beside or Device(plan.device, plan.threads)
    if plan.beside is None:
        plan.ends.callback(device.close)
    loaded = device.call(policy_of, job, plan.device)
    # quantised rollouts have a module of their own
    served = loaded if job.model.rollout_format == "none" else device.call(served_policy_of, job, plan.device)
    known, speculation, transport = (
        ModelInfo.from_model(loaded, device.threads),
        device.call(speculation_of, job, plan.device),
        plan.new_transport(),
    )
    draft = speculation.draft if speculation else None
    claim = OneAtATime("engine") if job.trainer.memory.offload else None
    engine, ours = engine_of(
        job,
        served,
        device,
        plan.longest(known),
        speculation,
        transports={} if served is loaded else plan.new_transports(),
        log=plan.wal_path(),
        claim=claim,
    )
    trainer, theirs = trainer_of(
        job, plan.needs, plan.sampling, loaded, device, draft=draft, transport=transport, claim=claim
    )
    where = f"one process, {format_threads(device.threads)} on {plan.device} for engine and trainer"
    devices = SharedDevice(
        engine,
        trainer,
        how=job.loop.in_flight,
        offload=job.trainer.memory.offload,
        device=plan.device,
        beside=plan.reward,
    )
    return Deployment(known, engine, trainer, devices, ours | theirs, where, bytes_needed(trainer), transport)


def _deploy_colocated(plan: DeploymentPlan) -> Deployment:
    """A rank of the trainer and an engine on each device."""
    job, ranks = plan.job, plan.job.place.ranks
    names, on_cpu = plan.worker_devices(ranks), plan.device == "cpu"
    shares = cores_per_worker(ranks) if on_cpu else [()] * ranks
    each = plan.threads or (max(1, usable_processors() // ranks) if on_cpu else None)
    if on_cpu:
        warn_if_crowded(ranks, 0)  # an engine takes turns with its rank
    cluster = ProcessCluster(plan.folder / "logs" if plan.folder else None, patience=job.place.patience)
    plan.ends.callback(cluster.close)
    workers = [
        cluster.spawn(
            plan.worker_name("rank", i),
            ColocatedHost,
            job,
            plan.needs,
            plan.sampling,
            name,
            each,
            plan.new_transport(),
            {plan.kind: plan.new_transport()},
            plan.wal_path(i),
            cores=shares[i],
        )
        for i, name in enumerate(names)
    ]
    for worker in workers:
        worker.now()
    trainers = [WorkerRole(worker, "trainer") for worker in workers]
    known, resolved, size = _join_ranks(trainers, workers[0].host)
    longest = plan.longest(known)
    engines = {f"engine-{i}": WorkerRole(worker, "engine") for i, worker in enumerate(workers)}
    for one in engines.values():
        resolved |= one.ask("open", longest).result()
    for worker in workers:
        job.mark_read(worker.now("read_keys"))
    engine = _build_router(engines, job, known)
    trainer = RemoteTrainer(trainers)
    return Deployment(
        known,
        engine,
        trainer,
        SharedDevices(engine, trainer, how=job.loop.in_flight),
        resolved,
        f"{ranks} processes with {format_threads(each)} each, for a rank of the trainer and an engine",
        size,
        plan.new_transport(),
        lost=trainer.find_lost_rank,
        dump=cluster.dump,
        pids=cluster.pids,
    )


def _split_here(plan: DeploymentPlan) -> Deployment:
    each = plan.threads or max(1, usable_processors() // (1 + plan.job.place.engine_processes))
    own_count = plan.job.place.engine_processes
    first, *own = plan.worker_devices(1 + own_count)
    trainer = TrainerHost(plan.job, plan.needs, plan.sampling, first, each, plan.new_transport())
    plan.ends.callback(trainer.close)
    ranks = plan.engine_ranks(0, own, each, [()] * own_count)
    engine = EngineHost(plan.job, own[0], each, {plan.kind: plan.new_transport()}, plan.wal_path(), ranks)
    plan.ends.callback(engine.close)
    known, resolved, size = trainer.join()
    resolved |= engine.open(plan.longest(known))
    where = f"one process, {format_threads(each)} each for engine and trainer"
    where += f", and {own_count - 1} of the engine beside it" * (own_count > 1)
    return Deployment(
        known, engine.engine, trainer.trainer, SplitDevices(), resolved, where, size, plan.new_transport()
    )


def _deploy_split(plan: DeploymentPlan) -> Deployment:
    job, mine, led = plan.job, plan.job.engine.kind == "builtin", plan.job.place.cluster == "torchrun"
    ranks = torchrun.rank_and_size()[1] if led else job.place.ranks
    if led and job.place.ranks not in (1, ranks):
        raise ConfigError(
            f"place.ranks = {job.place.ranks}, but torchrun started {ranks}: leave it out, torchrun says how many "
            "there are"
        )
    engines = job.place.engine_count if mine else 0
    n = job.place.engine_processes
    workers = ranks + engines * n
    here = torchrun.ranks_here() if led else ranks  # under torchrun the others are on machines of their own
    on_cpu, names = plan.device == "cpu", plan.worker_devices(here + engines * n)
    in_all = plan.workers or workers
    shares: list[tuple[int, ...]] = cores_per_worker(in_all)[plan.before :] if on_cpu and not led else [()] * workers
    each = plan.threads or (max(1, usable_processors() // in_all) if on_cpu else None)
    if on_cpu and not led and not job.place.on_ray:
        warn_if_crowded(ranks, engines * n)
    roles = [("trainer", i) for i in range(ranks)] + [("engine", i) for i in range(engines)]
    cluster = plan.make_cluster([plan.worker_name(role, i) for role, i in roles], each)
    plan.ends.callback(cluster.close)

    def start_engine(i: int) -> Any:
        own = plan.worker_devices(here + (i + 1) * n)[here + i * n :]
        cores = shares[ranks + i * n :][:n] or [()] * n  # one that joins later shares them
        made_of = (job, own[0], each, plan.new_transports(), plan.wal_path(i))
        beside = plan.engine_ranks(i, own, each, cores)
        return cluster.spawn(plan.worker_name("engine", i), EngineHost, *made_of, beside, cores=cores[0])

    hosts = [start_engine(i) for i in range(engines)]
    trainers, (known, resolved, size) = (
        _lead_torchrun(plan, ranks, names[0], each)
        if led
        else _spawn_trainers(plan, cluster, names[:ranks], shares, each)
    )
    for worker in hosts:
        worker.now()
    longest = plan.longest(known)
    for worker in hosts:
        resolved |= worker.now("open", longest)
    for worker in hosts if led else (*trainers, *hosts):
        job.mark_read(worker.now("read_keys"))
    where = f"{workers} processes with {format_threads(each)} each: {ranks} of the trainer, {engines * n} of the engine"
    where += f" ({job.place.engine_sizes})" * (n > 1)
    remotes = {
        plan.worker_name("engine", i): RemoteEngine(worker, partial(start_engine, i), longest)
        for i, worker in enumerate(hosts)
    }

    def new_engine(i: int) -> RemoteEngine:
        return RemoteEngine(start_engine(i), partial(start_engine, i), longest)

    elastic = mine and not plan.workers and not job.run.record
    replays = not mine and job.trainer.routing_replay is not False and bool(known.routers)
    if replays:
        refuse_untold_routes(job, known, find_registered("engine", job.engine.kind, ENGINES))
    reach = (
        None if mine else partial(_connect_engine, job, plan.sampling, longest, known.told_experts if replays else None)
    )
    others = {url: reach(url) for url in job.engine.urls} if reach else {}
    if others:
        where += f", which is {job.engine.kind} at {', '.join(others)}"
    single = mine and engines == 1 and not elastic
    engine = remotes[plan.worker_name("engine", 0)] if single else _build_router(remotes | others, job, known, remotes)
    trainer, way = RemoteTrainer(trainers), plan.new_transport()
    if hosts:
        plan.choose_way(way, known, trainers[0], hosts[0])
    return Deployment(
        known,
        engine,
        trainer,
        SplitDevices(),
        resolved,
        where,
        size,
        way,
        remotes,
        reach,
        new_engine=new_engine if elastic else None,
        bring_back_lost=engine.bring_back_lost if isinstance(engine, EngineRouter) else no_lost_replica,
        lost=trainer.find_lost_rank,
        dump=cluster.dump,
        pids=cluster.pids,
    )


def _alone_here(plan: DeploymentPlan) -> Deployment:
    """Weights that nothing trains, on the device that others share or on one of their own.
    Asked again, they draw the same tokens again, so they need no token log."""
    shared = plan.job.place.kind == "shared"
    device = (
        plan.beside
        if shared and plan.beside
        else Device(plan.device if shared else plan.worker_devices(1)[0], plan.threads)
    )
    if device is not plan.beside:
        plan.ends.callback(device.close)
    loaded = device.call(served_policy_of, plan.job, device.name)
    speculation = device.call(speculation_of, plan.job, device.name)
    known = ModelInfo.from_model(loaded, device.threads)
    engine, resolved = engine_of(plan.job, loaded, device, plan.longest(known), speculation, transports={})
    return Deployment(
        known, engine, None, SplitDevices(), resolved, f"an engine on {device.name}", 0, plan.new_transport()
    )


def _deploy_engine_worker(plan: DeploymentPlan) -> Deployment:
    """The same in a process of its own."""
    cluster = plan.make_cluster([plan.worker_name("engine", 0)], plan.threads)
    [name] = plan.worker_devices(1)
    plan.ends.callback(cluster.close)
    on_cpu = plan.device == "cpu"
    each = plan.threads or (max(1, usable_processors() // plan.workers) if on_cpu else None)
    [share, *_] = cores_per_worker(plan.workers)[plan.before :] if on_cpu else [()]

    def start_engine() -> Any:
        return cluster.spawn(plan.worker_name("engine", 0), EngineHost, plan.job, name, each, {}, None, cores=share)

    worker = start_engine()
    worker.now()
    known = worker.now("known")
    longest = plan.longest(known)
    resolved = worker.now("open", longest)
    plan.job.mark_read(worker.now("read_keys"))
    remotes = {plan.worker_name("engine", 0): RemoteEngine(worker, start_engine, longest)}
    engine = remotes[plan.worker_name("engine", 0)]
    return Deployment(
        known,
        engine,
        None,
        SplitDevices(),
        resolved,
        f"a process of its own with {format_threads(each)}",
        0,
        plan.new_transport(),
        remotes,
        dump=cluster.dump,
        pids=cluster.pids,
    )


def _spawn_trainers(
    plan: DeploymentPlan, cluster: Cluster, names: list[str], shares: list[tuple[int, ...]], each: int | None
) -> tuple[list[Any], Any]:
    """The trainer's ranks as workers of the cluster. -> they, and what the first one says of itself."""
    made_of = (plan.job, plan.needs, plan.sampling)
    trainers = [
        cluster.spawn(
            plan.worker_name("trainer", rank),
            TrainerHost,
            *made_of,
            name,
            each,
            plan.new_transport(),
            cores=shares[rank],
            tells=rank == 0,
        )
        for rank, name in enumerate(names)
    ]
    for worker in trainers:
        worker.now()
    return trainers, _join_ranks(trainers, trainers[0].host)


def _join_ranks(trainers: list[Any], host: str) -> tuple[ModelInfo, dict[str, str], int]:
    """They meet where others reach the first one. -> what that one says of itself."""
    address = trainers[0].ask("meet", host, len(trainers)).result()
    joined: list[Future[tuple[ModelInfo, dict[str, str], int]]]
    joined = [trainer.ask("join", rank, len(trainers), address) for rank, trainer in enumerate(trainers)]
    wait(joined, return_when=FIRST_EXCEPTION)
    if any(answer.done() and answer.exception() for answer in joined):
        wait(joined, timeout=MOMENT)  # one that ended explains what the others complain of
        failed = [i for i, answer in enumerate(joined) if answer.done() and answer.exception()]
        return joined[min(failed, key=lambda i: trainers[i].alive)].result()
    return joined[0].result()


def _lead_torchrun(plan: DeploymentPlan, ranks: int, device: str, each: int | None) -> tuple[list[Any], Any]:
    """This process is the first rank, the others follow it."""
    host = TrainerHost(plan.job, plan.needs, plan.sampling, device, each, plan.new_transport())
    with torchrun.lost_ranks_named():
        calls = host.device.call(torchrun.init_process_groups, host.device.name, collective_patience(plan.job))
        told = host.join(0, ranks)
    leader = torchrun.LeaderWorker(host, calls)
    plan.ends.callback(leader.close)
    return [leader], told


def _connect_engine(
    job: Job, sampling: Sampling, longest: int, experts: RoutedExperts | None, url: str
) -> ForeignEngine:
    """An engine of others, asked whether it can carry this run."""
    server = find_registered("engine", job.engine.kind, ENGINES)(url)
    if experts is not None:
        server.experts = experts
    if (room := server.open(sampling)) < longest:
        raise ConfigError(
            f"the longest prompt and its answer have {longest} tokens, and {job.engine.kind} at {url} carries {room}: "
            "start it with a longer context, or lower engine.sampling.max_tokens"
        )
    return ForeignEngine(server)


def _build_router(
    engines: Mapping[str, Any], job: Job, known: ModelInfo, restartable: Mapping[str, RemoteEngine] | None = None
) -> EngineRouter:
    auto = job.engine.concurrency == "auto" and job.engine.kind != "builtin"  # ours find it themselves
    concurrency = ConcurrencyController(job.engine.max_running) if auto else None
    return EngineRouter(
        engines,
        max_inflight=job.engine.max_running,
        concurrency=concurrency,
        apart=probe_tolerance(known),
        patience=job.place.patience,
        restartable=restartable,
    )
