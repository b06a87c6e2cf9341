"""Engine and trainer of one run, each with what it needs: in one process, or as hosts that can live anywhere.

shared    one device and one module for both; on several devices ColocatedHost
split     EngineHost and TrainerHost: a device and weights of their own, in this process or in
          another, on this machine or another
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rondel.algos.tokens import TokenBatch
from rondel.assemble.model_info import ModelInfo
from rondel.assemble.number_formats import format_fact, rollout_bits
from rondel.assemble.refusals import refuse_idle_memory, refuse_without_routes
from rondel.core.config.job import Job
from rondel.core.config.model import TeacherConfig
from rondel.core.errors import ConfigError
from rondel.core.media import ImageProcessorConfig
from rondel.core.protocols import MemoryClaim, Transport
from rondel.core.registry import find_registered
from rondel.core.types import Sampling, StepStats
from rondel.generate.engine.blocks import BLOCK_ENGINE
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.generate.engine.concurrency import ConcurrencyController
from rondel.models import adapters, names, nf4, vision
from rondel.models.aligned_numerics import align_numerics
from rondel.models.control.kinds import draws_chunks, is_world_model, reads_pictures
from rondel.models.cuda_graphs import serving_pass
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.rendezvous import Rendezvous
from rondel.models.rounded_weights import forget_whole
from rondel.models.step_head import StepHead
from rondel.models.vocabulary import same_words
from rondel.models.weight_formats import (
    apply_format,
    apply_rollout_format,
    forget_format,
    hold_format,
    send_rollout_format,
)
from rondel.planner import resolve as planner
from rondel.runtime.cluster import torchrun
from rondel.runtime.devices import Device
from rondel.runtime.journal.wal import TokenLog
from rondel.sync.choice import SampleEnd, TransportChoice
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_tcp import FromTcp
from rondel.sync.from_tensor import FromTensor
from rondel.system import sockets
from rondel.train.checkpoint import bytes_needed
from rondel.train.critic import Critic
from rondel.train.draft import DraftTrainer
from rondel.train.fsdp import FsdpRank
from rondel.train.pack import TrainBatch
from rondel.train.parallel import ALONE, SingleRank
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer
from rondel.train.step_metrics import bound_of
from rondel.train.teachers import Teacher

if TYPE_CHECKING:
    from rondel.assemble.engine_encoder import EngineEncoder
    from rondel.assemble.engine_ranks import EngineRanks
    from rondel.generate.engine.builtin.adapter_receiver import AdapterReceiver
    from rondel.generate.engine.builtin.encoder_lead import EncoderLead
    from rondel.generate.engine.builtin.lead_rank import LeadRank
    from rondel.generate.engine.stepwise.engine import StepwiseEngine
    from rondel.models.compilation import CompiledModel
    from rondel.models.cuda_graphs import DecodeGraphs
    from rondel.models.static_decode import StaticDecode
    from rondel.train.static_passes import StaticPasses


def engine_of(
    job: Job,
    loaded: LoadedModel,
    device: Device,
    longest: int,
    speculation: SpeculativeDecoder | None,
    *,
    transports: dict[str, Transport],
    log: Path | None = None,
    claim: MemoryClaim | None = None,
    ranks: LeadRank | EncoderLead | None = None,
    receiver: AdapterReceiver | None = None,
) -> tuple[BuiltinEngine | StepwiseEngine[Any], dict[str, str]]:
    """`log`: where drawn tokens are kept for a life after a crash. -> the engine, and what was resolved for it."""
    if loaded.blocks is not None:
        blocks = f"blocks of {loaded.blocks.block} tokens, each filled in {loaded.blocks.steps} steps"
        return _stepwise_engine(BLOCK_ENGINE, job, loaded, device, transports, log), {"engine.kind": blocks}
    if isinstance(loaded.head, StepHead):
        kind, told = (
            STEP_ENGINES[loaded.head.kind],
            loaded.head.describe(job.engine.sampling.max_tokens, job.engine.sampling.temperature),
        )
        return _stepwise_engine(kind, job, loaded, device, transports, log), {"engine.kind": told}
    draft = speculation.draft if speculation else None
    own = device.name.startswith("cuda") and (
        job.place.kind == "split" or (job.trainer.memory.offload and not job.policies)
    )
    pages = pages_of(
        [loaded, draft.loaded] if draft else [loaded],
        wanted=job.engine.kv_pages,
        max_running=job.engine.max_running,
        longest=longest,
        prefill=job.engine.prefill_tokens,
        caches=job.place.engine_dp,
        own=own,
        staged="ipc" in transports,
    )
    engine = BuiltinEngine(
        loaded,
        run=device.run,
        kv_pages=pages.value,
        max_running=job.engine.max_running,
        prefill_tokens=job.engine.prefill_tokens,
        routes=replays_routing(job, loaded),
        speculation=speculation,
        compiled=device.call(_serving_pass, job, loaded) if job.engine.compile else None,
        transports=transports,
        concurrency=ConcurrencyController(job.engine.max_running) if job.engine.concurrency == "auto" else None,
        log=token_log_of(job, log),
        claim=claim,
        ranks=ranks,
        receiver=receiver,
    )
    return engine, {
        "engine.kv_pages": f"{pages.value} ({pages.why})",
        "engine.numerics": job.engine.numerics,
        "engine.concurrency": job.engine.concurrency,
        "engine.compile": "static" if job.engine.compile == "static" else "on" if job.engine.compile else "off",
        "engine.speculative": speculation_fact(job, draft),
    }


STEP_ENGINES = {  # by name: who serves text imports none of them
    "flow": "rondel.generate.engine.flow.engine:FlowEngine",
    "control": "rondel.generate.engine.control.engine:ControlEngine",
    "world": "rondel.generate.engine.control.world_engine:WorldEngine",
}


def _stepwise_engine(
    kind: str, job: Job, loaded: LoadedModel, device: Device, transports: dict[str, Transport], log: Path | None
) -> StepwiseEngine[Any]:
    """Of a model without pages of a cache: there is nothing to plan for."""
    found, running = find_registered("engine", kind, {}), job.engine.max_running
    engine: StepwiseEngine[Any] = found(
        loaded, run=device.run, max_running=running, transports=transports, log=token_log_of(job, log)
    )
    return engine


def _serving_pass(job: Job, loaded: LoadedModel) -> CompiledModel | DecodeGraphs | StaticDecode:
    """What engine.compile asks for."""
    if job.engine.compile != "static":
        return serving_pass(loaded, job.engine.max_running)
    from rondel.models.static_decode import StaticDecode

    return StaticDecode(loaded, job.engine.max_running)


def token_log_of(job: Job, folder: Path | None) -> TokenLog | None:
    """Where an engine keeps what it draws; None keeps nothing."""
    if folder is None:
        return None
    return TokenLog(folder, durable=job.run.durability == "disk", beside=folder.parent.glob("engine-*"))


def trainer_of(
    job: Job,
    needs: frozenset[str],
    sampling: Sampling,
    loaded: LoadedModel,
    device: Device,
    *,
    draft: DraftModel | None = None,
    ranks: SingleRank = ALONE,
    transport: Transport,
    claim: MemoryClaim | None = None,
) -> tuple[LocalTrainer, dict[str, str]]:
    """-> the trainer, and what was resolved for it."""
    refuse_idle_memory(job.trainer.memory, device.name)
    each = loaded.step_tokens
    budget, on_gpu = job.trainer.micro_budget, device.name.startswith("cuda")
    is_text = each == 1 and job.trainer.static_shapes is None
    vocab = loaded.model.config.get_text_config().vocab_size if is_text else 1
    micro = planner.micro_tokens(budget, on_gpu=on_gpu, vocab=vocab)
    settings = settings_of(
        job,
        sampling,
        max(1, micro.value // each),
        replay_routes=replays_routing(job, loaded),
        mismatch_bound=mismatch_bound(job, loaded),
        whole="whole_distribution" in needs,
    )
    if budget == "auto" and is_text and not on_gpu:
        settings = replace(settings, micro_group=planner.MOST_MICRO)
    if is_world_model(job.model.path):  # it is to leave its start, and a KL of densities is without bound
        settings = replace(settings, start_probe=0)
    if job.trainer.static_shapes is not None:
        from rondel.assemble.static_shapes import with_static_shapes

        settings = with_static_shapes(settings, job, sampling, loaded, needs)

    def build_trainer() -> LocalTrainer:
        if job.place.mesh.layers == "megatron":
            from rondel.models.megatron.layers import install_megatron_layers

            install_megatron_layers(loaded, ranks.tensor, run_twice=settings.recompute == "layers")
        static: StaticPasses | None = None
        if settings.shapes:
            from rondel.train.static_passes import make_static_passes

            static = make_static_passes(loaded, settings)
        return LocalTrainer(
            loaded,
            settings,
            run=device.run,
            needs=needs,
            draft=pupil_of(job, draft) if draft else None,
            critic=critic_of(job, loaded, settings, ranks) if "values" in needs else None,
            teachers=teachers_of(job, loaded, full="teacher_hidden" in needs),
            warmup=warmup_settings(job, settings) if job.loop.warmup.steps else None,
            ranks=ranks,
            transport=transport,
            claim=claim,
            static=static,
        )

    trainer = device.call(build_trainer)
    return trainer, {
        "trainer.micro_tokens": f"{micro.value} ({micro.why})"
        + (f", {settings.micro_tokens} steps of {each}" if each > 1 else "")
        + "".join(f", {t}x{m}" for t, m in settings.shapes),
        "routing_replay": replay_fact(job, loaded),
        "model.adapter": adapter_fact(loaded),
        "model.format": format_fact(job),
        "model.teacher": teachers_fact(job),
        "trainer.critic": critic_fact(job) if trainer.critic else "none",
    } | ({} if job.place.mesh.layers == "transformers" else {"place.mesh.layers": job.place.mesh.layers})


class EngineHost:
    """An engine with a device and weights of its own; its verbs are the engine's.

    ranks  starts the processes that share its model (engine_ranks.py), if there are any
    """

    def __init__(
        self,
        job: Job,
        device: str | Device,
        threads: int | None,
        transports: dict[str, Transport],
        log: Path | None,
        ranks: Callable[[dict[str, Transport]], EngineRanks | EngineEncoder] | None = None,
    ) -> None:
        self.job, self.device, self.transports, self.log = job, _own_device(device, threads), transports, log
        self.samples = SampleEnd(self.device.name)
        self.ranks = None if ranks is None else ranks(transports)
        if self.ranks is None:
            self.loaded = self.device.call(served_policy_of, job, self.device.name)
        else:
            self.loaded = self.ranks.load(job.model.path, job.model.dtype, self.device, job.model.engine_format)

    def known(self) -> ModelInfo:
        return ModelInfo.from_model(self.loaded, self.device.threads)

    def read_keys(self) -> list[str]:
        """What this worker read of the recipe."""
        return self.job.read_keys()

    def sample(self, verb: str, *args: Any) -> Any:
        """A part of a measurement of a transport."""
        return getattr(self.samples, verb)(*args)

    def open(self, longest: int) -> dict[str, str]:
        """Ready for requests of at most `longest` tokens. -> what was resolved."""
        speculation = self.device.call(speculation_of, self.job, self.device.name)
        self.engine, resolved = engine_of(
            self.job,
            self.loaded,
            self.device,
            longest,
            speculation,
            transports=self.transports,
            log=self.log,
            ranks=None if self.ranks is None else self.ranks.lead,
        )
        return resolved

    def __getattr__(self, verb: str) -> Any:
        if verb == "engine":
            raise AttributeError("open() comes first")
        return getattr(self.engine, verb)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close(self.device)
        self.device.close()


def follow_leader(job: Job, needs: frozenset[str], sampling: Sampling, device: str, threads: int | None) -> None:
    """A rank that torchrun started beside the one with the loop: does what that one calls."""
    rank, size = torchrun.rank_and_size()
    # it gives its shards and sends nothing itself
    host = TrainerHost(job, needs, sampling, device, threads, FromTensor())
    with torchrun.lost_ranks_named():
        calls = host.device.call(torchrun.init_process_groups, device, collective_patience(job))
        host.join(rank, size)
    torchrun.follow_leader(host, calls)


class TrainerHost:
    """One rank of the trainer with a device and weights of its own. What it learns of a
    batch is told, for the batch came as a copy.
    """

    def __init__(
        self,
        job: Job,
        needs: frozenset[str],
        sampling: Sampling,
        device: str | Device,
        threads: int | None,
        transport: Transport,
    ) -> None:
        self.device, self.ranks = _own_device(device, threads), ALONE
        self.samples = SampleEnd(self.device.name)
        several = (torchrun.rank_and_size()[1] if job.place.cluster == "torchrun" else job.place.ranks) > 1
        self.loaded = self.device.call(lambda: policy_of(job, self.device.name, deferred=several))
        self.job, self.needs, self.sampling, self.transport = job, needs, sampling, transport

    def read_keys(self) -> list[str]:
        """What this worker read of the recipe."""
        return self.job.read_keys()

    def sample(self, verb: str, *args: Any) -> Any:
        """A part of a measurement of a transport."""
        return getattr(self.samples, verb)(*args)

    def meet(self, host: str, ranks: int) -> tuple[str, int] | None:
        """`host`: where other workers reach this one, the first of `ranks`. -> where the
        others find it, if there are any.
        """
        self._listen_at(host)
        if ranks == 1:
            return None
        self.meeting = Rendezvous(host)
        return self.meeting.address

    def _listen_at(self, host: str) -> None:
        """By which address engines will reach what this rank sends."""
        ways = self.transport.ways.values() if isinstance(self.transport, TransportChoice) else [self.transport]
        for way in ways:
            if isinstance(way, FromDistributed | FromTcp):
                way.host = host

    def join(
        self, rank: int = 0, size: int = 1, address: tuple[str, int] | None = None
    ) -> tuple[ModelInfo, dict[str, str], int]:
        """Returns when all ranks have. -> facts of the model, what was resolved, and the size of a checkpoint."""
        known = ModelInfo.from_model(self.loaded, self.device.threads)
        if size > 1:
            # None: torchrun has joined them
            meeting = None if address is None else self.meeting if rank == 0 else Rendezvous.connect_to(address)
            if address is not None and rank > 0:
                self._listen_at(sockets.own_address(address[0]))
            patience = collective_patience(self.job)
            self.ranks = self.device.call(
                lambda: FsdpRank(
                    rank, self.job.place.mesh.to_mesh(size), meeting, device=self.device.name, patience=patience
                )
            )
        self.trainer, resolved = trainer_of(
            self.job, self.needs, self.sampling, self.loaded, self.device, ranks=self.ranks, transport=self.transport
        )
        return known, resolved, bytes_needed(self.trainer)

    async def annotate(self, batch: TrainBatch, needs: frozenset[str]) -> list[TokenBatch]:
        with self.ranks.collective_section("annotate"):
            await self.trainer.annotate(batch, needs)
        return self._known_tokens(batch)

    async def step(self, batch: TrainBatch, algo: Any) -> tuple[StepStats, bool, list[TokenBatch]]:
        with self.ranks.collective_section("step"):
            stats = await self.trainer.step(batch, algo)
        return stats, self.trainer.moved, self._known_tokens(batch)

    def _known_tokens(self, batch: TrainBatch) -> list[TokenBatch]:
        return [s.known for s in batch.samples] if self.ranks.is_leader else []

    def __getattr__(self, verb: str) -> Any:
        if verb == "trainer":
            raise AttributeError(verb)
        found = getattr(self.trainer, verb)
        return self._call_collectively(verb, found) if iscoroutinefunction(found) else found

    def _call_collectively(self, verb: str, found: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            with self.ranks.collective_section(verb):
                return await found(*args)

        return call

    def close(self) -> None:
        self.ranks.close()
        self.device.close()


class ColocatedHost:
    """One rank of the trainer and one engine that take turns on one device, of which there are several.

    rank-0   trainer: rank 0 of the mesh │ engine-0     one process, one device, one thread for both
    rank-1   trainer: rank 1             │ engine-1     the engine has whole weights of its own
    """

    def __init__(
        self,
        job: Job,
        needs: frozenset[str],
        sampling: Sampling,
        device: str,
        threads: int | None,
        transport: Transport,
        transports: dict[str, Transport],
        log: Path | None,
    ) -> None:
        self.device = Device(device, threads)
        self.trainer = TrainerHost(job, needs, sampling, self.device, threads, transport)
        self.engine = EngineHost(job, self.device, threads, transports, log)

    def read_keys(self) -> list[str]:
        """What this worker read of the recipe."""
        return [*self.trainer.read_keys(), *self.engine.read_keys()]

    def close(self) -> None:
        self.trainer.close()


def _own_device(device: str | Device, threads: int | None) -> Device:
    """A thread of its own, unless it is given one that another has, too."""
    return device if isinstance(device, Device) else Device(device, threads)


def collective_patience(job: Job) -> float:
    """Seconds that one rank waits for another: they compute side by side, but one of them writes the checkpoints."""
    return 10 * job.place.patience


# -- what they are made of -------------------------------------------------------------------------


def policy_of(job: Job, device: str, *, deferred: bool = False) -> LoadedModel:
    """As the recipe wants it: adapted, aligned or rounded. `deferred`: for a rank that will hold shards of it."""
    wanted = job.model.adapter
    loaded = load_model(
        job.model.path,
        dtype=job.model.dtype,
        device=device,
        four_bits=wanted.kind == "qlora",
        deferred=deferred
        and wanted.kind != "qlora"
        and job.engine.numerics != "aligned"
        and job.sync.probe
        and job.model.trained_format == "none",
    )
    return prepare_policy(job, loaded)


def served_policy_of(job: Job, device: str) -> LoadedModel:
    """The same as an engine computes with it, in a module of its own: nothing is trained there."""
    loaded = policy_of(job, device)
    if job.model.engine_holds_codes:
        hold_format(loaded.model, job.model.engine_format)
    elif job.model.rollout_format != "none":
        apply_rollout_format(loaded.model, job.model.rollout_format)
    forget_whole(loaded.model)
    return loaded


def prepare_policy(job: Job, loaded: LoadedModel) -> LoadedModel:
    """A model that was loaded, as the recipe wants it."""
    wanted = job.model.adapter
    if reads_pictures(job.model.path):
        if job.model.vision.tower == "frozen":
            vision.vision_tower(loaded.model.backbone).requires_grad_(False)
    else:
        loaded.sight = sight_within(job, loaded.sight, loaded.name)
        if loaded.sight is not None and job.model.vision.tower == "frozen":
            vision.vision_tower(loaded.model).requires_grad_(False)
    if wanted.kind != "off":
        nf4.refuse_other(loaded.model, loaded.name, wanted=wanted.kind == "qlora")
        adapters.add_adapter(loaded, rank=wanted.rank, alpha=wanted.alpha, targets=wanted.targets, seed=job.loop.seed)
    if job.model.trained_format != "none":
        apply_format(loaded.model, job.model.trained_format, travels=not job.place.one_module)
    else:
        forget_format(loaded.model)
    if job.model.rollout_format != "none":
        send_rollout_format(loaded.model, job.model.rollout_format)
    if job.engine.numerics == "aligned":
        align_numerics(loaded)
    if job.engine.numerics == "rounded":
        loaded.round_sums()
    return loaded


def sight_within(job: Job, sight: ImageProcessorConfig | None, name: str) -> ImageProcessorConfig | None:
    """How the model looks, with images of at most model.vision.image_tokens."""
    m, plain = job.model.vision, type(job.model.vision).model_fields
    if sight is None and (odd := [key for key in ("tower", "image_tokens") if getattr(m, key) != plain[key].default]):
        raise ConfigError(
            f"model.vision.{odd[0]} = {getattr(m, odd[0])!r}, but '{name}' reads text alone: leave it out, or take a "
            f"vision-language model"
        )
    if m.tower == "trained" and (job.model.adapter.kind != "off" or job.place.ranks > 1):
        what = (
            "model.adapter, which alone is trained"
            if job.model.adapter.kind != "off"
            else "place.ranks > 1, whose ranks see images at different times"
        )
        raise ConfigError(f"model.vision.tower = 'trained' beside {what}: leave the tower frozen")
    if sight is None or m.image_tokens == "auto":
        return sight
    if m.image_tokens < 1:
        raise ConfigError(f"model.vision.image_tokens = {m.image_tokens}; an image takes at least 1 token")
    if sight.side is not None:
        of = "every image" if sight.tiles is None else "every tile of an image, which it cuts by its own settings"
        raise ConfigError(
            f"model.vision.image_tokens = {m.image_tokens}: '{name}' makes {(sight.side // sight.token_pixels) ** 2} "
            f"tokens of {of}; leave it out"
        )
    most = m.image_tokens * sight.token_pixels**2
    return replace(sight, most=most, least=min(sight.least, most))


def adapter_fact(loaded: LoadedModel) -> str:
    if (adapter := loaded.adapter) is None:
        return "none: every weight is trained"
    whole, packed = loaded.parameter_count, nf4.describe_quantization(loaded.model)
    return (
        f"lora of rank {adapter.config.r}, alpha {adapter.config.lora_alpha}, on {len(adapter.layers)} layers: "
        f"{adapter.parameter_count} of {whole} numbers are trained ({adapter.parameter_count / whole:.1%})"
        + (f"; base: {packed}" if packed else "")
    )


def replays_routing(job: Job, loaded: LoadedModel | ModelInfo) -> bool:
    """Whether the trainer sends every token to the experts that the engine sent it to."""
    wanted = job.trainer.routing_replay
    if wanted is True and not loaded.routers:
        raise ConfigError(
            f"trainer.routing_replay = true, but '{loaded.name}' is dense: it has no routers. Leave it at \"auto\""
        )
    if not loaded.routers or wanted is False:
        return False
    refuse_without_routes(job)
    return True


def replay_fact(job: Job, loaded: LoadedModel) -> str:
    if not loaded.routers:
        return "none: a dense model"
    return f"{'on' if replays_routing(job, loaded) else 'OFF by trainer.routing_replay'}: {loaded.routers} routers"


def speculation_of(job: Job, device: str) -> SpeculativeDecoder | None:
    """What guesses ahead, if anything; the engine refuses a draft with other words."""
    wanted = job.engine.speculative
    if wanted.kind == "off":
        return None
    if wanted.model is None:
        return SpeculativeDecoder(wanted.k)
    return SpeculativeDecoder(wanted.k, DraftModel(load_model(wanted.model, dtype=job.model.dtype, device=device)))


def pupil_of(job: Job, draft: DraftModel) -> DraftTrainer | None:
    lr = job.engine.speculative.lr
    return DraftTrainer(draft.loaded, lr=lr) if lr else None


def speculation_fact(job: Job, draft: DraftModel | None) -> str:
    wanted = job.engine.speculative
    if draft is None:
        return wanted.kind if wanted.kind == "off" else f"{wanted.kind}, at most {wanted.k} guesses"
    return f"draft {draft.loaded.name}, at most {wanted.k} guesses, " + (
        f"trained with lr {wanted.lr:g}" if wanted.lr else "frozen"
    )


def mismatch_bound(job: Job, loaded: LoadedModel | ModelInfo) -> float:
    return bound_of(
        loaded.dtype,
        mixture=bool(loaded.routers),
        foreign=job.engine.kind != "builtin",
        rounded=not loaded.fp32_stream,
        engine_bits=rollout_bits(job),
    )


def settings_of(
    job: Job,
    sampling: Sampling,
    micro_tokens: int,
    *,
    replay_routes: bool,
    mismatch_bound: float,
    whole: bool = False,
) -> TrainSettings:
    """`whole`: log-probabilities are the model's own, whatever temperature drew the tokens."""
    t = job.trainer
    return TrainSettings(
        lr=t.lr,
        temperature=1.0 if whole else sampling.temperature,
        schedule=t.schedule,
        warmup_steps=t.optimizer.warmup_steps,
        steps=job.steps,
        clip=t.clip,
        weight_decay=t.optimizer.weight_decay,
        betas=t.optimizer.betas,
        optimizer=t.optimizer.kind,
        optimizer_on_host=t.memory.optimizer == "host",
        micro_tokens=micro_tokens,
        updates_per_step=job.loop.updates_per_step,
        epochs=job.loop.epochs,
        max_bad_steps=t.max_bad_steps,
        first_step=job.loop.warmup.steps,
        replay_routes=replay_routes,
        critic_lr=t.critic.lr,
        critic_warmup=t.critic.warmup,
        mismatch_bound=mismatch_bound,
        rollout_format="" if job.model.rollout_format == "none" else job.model.rollout_format,
        recompute=t.memory.recompute,
        activations=t.memory.activations,
        folder=str(job.run.folder),
    )


def warmup_settings(job: Job, settings: TrainSettings) -> TrainSettings:
    """The supervised phase: its own learning rate, constant. Chunks of actions are shown without noise: their density
    is then that of flow matching."""
    return replace(
        settings,
        temperature=0.0 if draws_chunks(job.model.path) else settings.temperature,
        lr=job.loop.warmup.lr,
        schedule="constant",
        warmup_steps=0,
        updates_per_step=1,
        epochs=1,
        first_step=0,
        start_probe=0,
        replay_routes=False,
    )


def critic_of(job: Job, loaded: LoadedModel, settings: TrainSettings, ranks: SingleRank) -> Critic:
    """A copy of the policy as it will be at the critic's first step, or a model of its own that
    reads the same tokens.
    """
    path = job.trainer.critic.path
    if path is None:
        return Critic(loaded, settings, ranks=ranks)
    other = load_model(path, dtype=job.model.dtype, device=str(loaded.device), deferred=loaded.weights is not None)
    same_words(
        loaded,
        other,
        who=f"trainer.critic.path = {path!r}",
        remedy="It must read the same tokens: take a model of the same family",
    )
    return Critic(other, settings, follows=False, ranks=ranks)


def teachers_of(job: Job, loaded: LoadedModel, *, full: bool) -> list[Teacher]:
    """Any models that read the same tokens; nothing trains them. Those behind a url are
    asked by the driver. `full`: logit by logit. Under trainer.memory.teachers = "one" each is loaded here once, to be
    sure that it can be, and then for its own pass in every step.
    """
    one = job.trainer.memory.teachers == "one"

    def load_teacher(path: str | dict[str, Any]) -> LoadedModel:
        teacher = load_model(
            path,
            dtype=job.model.dtype,
            device=str(loaded.device),
            deferred=loaded.weights is not None and not full,
        )
        remedy = "It cannot say how likely the policy's tokens are: take a teacher of the same family"
        same_words(loaded, teacher, who=f"model.teacher = {path!r}", remedy=remedy)
        if full and (ours := len(loaded.head.weight)) != (theirs := len(teacher.head.weight)):
            raise ConfigError(
                f"model.teacher = {path!r} has {theirs} logits a token and the policy {ours}: whole distributions "
                f"cannot be compared. "
                "Use algo.distill.kind = 'distill', which reads the drawn tokens"
            )
        teacher.model.requires_grad_(False)
        return teacher

    def read_teacher(path: str | dict[str, Any]) -> LoadedModel:
        with torch.random.fork_rng(devices=[]):  # what the run draws does not depend on it
            return load_teacher(path)

    def place_teacher(t: TeacherConfig) -> Teacher:
        where = Teacher(None, t.weight, t.source, is_policy=t.is_policy)
        if t.path is None:
            return where
        if one:
            read_teacher(t.path)  # what the ranks hold of it, they try before the first step
            return replace(where, read=partial(read_teacher, t.path))
        return replace(where, loaded=load_teacher(t.path))

    return [place_teacher(t) for t in job.model.teachers]


def teachers_fact(job: Job) -> str:
    told = [
        f"{t.name}{f' for {t.source}' if t.source else ''}{f', weight {t.weight:g}' if t.weight != 1 else ''}"
        for t in job.model.teachers
    ]
    one = ", one in memory at a time" if job.trainer.memory.teachers == "one" else ""
    return "; ".join(told) + one if told else "none"


def critic_fact(job: Job) -> str:
    c = job.trainer.critic
    first = f", alone for {c.warmup} steps" if c.warmup else ""
    return f"{c.path or 'a copy of the policy at its first step'}, lr {c.lr:g}{first}"


def pages_of(
    models: list[LoadedModel],
    *,
    wanted: int | str,
    max_running: int,
    longest: int,
    prefill: int,
    own: bool,
    staged: bool,
    caches: int = 1,
) -> planner.ResolvedValue:
    """Cache pages for requests of at most `longest` tokens, whose keys and values all these models keep. `own`: the
    device is a GPU with nobody else on it while the engine generates; `staged`: new
    weights lie there beside the old ones; `caches` of as many pages on ranks of their own, which share the requests."""
    loaded, reserve = models[0], None
    free, memory = (
        torch.cuda.mem_get_info(loaded.device) if loaded.device.type == "cuda" else (planner.free_memory(), 0)
    )
    if own:
        vocab, hidden = loaded.vocabulary, loaded.head.weight.shape[1]
        version = sum(t.nbytes for _, t in names.named_weights(loaded.model)) if staged else 0
        reserve = planner.engine_reserve(
            memory=memory,
            hidden=hidden,
            vocab=vocab,
            width=loaded.dtype.itemsize,
            prefill=prefill,
            max_running=max_running,
            staged=version,
        )
    return planner.kv_pages(
        wanted,
        max_running=-(-max_running // caches),
        longest=longest,
        page_bytes=sum(m.cached for m in models),
        free_bytes=max(0, free - planner.state_slots(max_running) * sum(m.state_bytes for m in models)),
        reserve_bytes=reserve,
    )
