"""One training step on one device: micro-batches that only sum, finite-checks at five
borders, one optimizer move an update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.algos.aggregate import counted_tokens, masked_scale, sample_weights
from rondel.algos.mixture import Mixture
from rondel.algos.objective import FIELDS, decide_update, objective
from rondel.algos.tokens import TokenBatch, k3
from rondel.core.clocks import TimeAccount
from rondel.core.errors import TrainError, UserError
from rondel.core.events import Warned, emit
from rondel.core.types import Manifest, Route, StepStats
from rondel.models import linear
from rondel.models.activation_offload import activation_store
from rondel.models.recompute import install_recompute
from rondel.system.process_memory import release_freed_memory
from rondel.train import annotate as notes
from rondel.train import checkpoint, row_passes
from rondel.train.adaptive_coefs import AdaptiveCoefs
from rondel.train.mesh_checks import names_model
from rondel.train.observations import observed_batch
from rondel.train.offload import Offload
from rondel.train.optim import learning_rate
from rondel.train.pack import PackedBatch, TrainBatch, TrainSample, micro_batches, micro_budget
from rondel.train.parallel import ALONE, SingleRank, WeightPublisher
from rondel.train.row_share import count_shared, forward_stage
from rondel.train.settings import TrainSettings
from rondel.train.step_metrics import MismatchAlarm, StepMetricSums
from rondel.train.teachers import Teacher, TeacherEnsemble
from rondel.train.weight_publisher import RankPublisher

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.core.protocols import MemoryClaim, Transport
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.routing_tape import RoutingTape
    from rondel.train.critic import Critic
    from rondel.train.draft import DraftTrainer
    from rondel.train.loss_scale import LossScale
    from rondel.train.static_passes import StaticPasses


# functions -> kinds of a time account
DOING = {"logprobs_of": "score", "save_trainer": "save", "sleep": "move", "wake": "move"}


@contextmanager
def _timed_phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Its wall clock is added to the part of the step with this name."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - began


START_SHARE = 16  # of so many trained samples one is scored under the starting weights: some 2 % of a step

# fields of TokenBatch that must be finite before the first forward pass with a gradient
LOGPROBS = ("behavior", "proximal", "reference", "teacher", "entropy", "start", "trained")


class NotFinite(Exception):
    """A finite-check failed; the text names the border and the samples."""


class LocalTrainer:
    """The Trainer of one device. `run` executes a function on the device's own thread,
    so the event loop never runs torch.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: TrainSettings,
        *,
        run: Callable[..., Awaitable[Any]],
        needs: frozenset[str] = frozenset(),
        draft: DraftTrainer | None = None,
        critic: Critic | None = None,
        teachers: Sequence[Teacher] = (),
        warmup: TrainSettings | None = None,
        ranks: SingleRank = ALONE,
        transport: Transport | None = None,
        claim: MemoryClaim | None = None,
        static: StaticPasses | None = None,
    ) -> None:
        """`static`: passes of fixed shapes. `claim`: on the memory of a device that an engine wants, too;
        with one the trainer begins asleep."""
        self.main = settings
        self.warmup = warmup
        self._device = run
        self.draft = draft
        self.critic = critic
        self.ranks = ranks
        self.account = TimeAccount("trainer")
        wants_start = bool(needs & {"ref_logprobs", "ref_means"}) or settings.start_probe > 0
        self.start = ranks.shard_model(_frozen_start(loaded)) if wants_start else None
        if "teacher_hidden" not in needs:  # whole distributions need a teacher's whole head on every rank
            with names_model("model.teacher"):
                teachers = [t.over_ranks(ranks.shard_model) for t in teachers]
        keep = activation_store(settings.activations, settings.folder)
        install_recompute(loaded.model, settings.recompute, loaded.adapter, keep)
        self.loaded = ranks.shard_model(loaded)
        self.teachers = TeacherEnsemble(
            [replace(t, loaded=self.loaded) if t.is_policy else t for t in teachers],
            keeps_heads="teacher_hidden" in needs,
        )
        self.weights = ranks.make_masters(self.loaded.model, **settings.optimizer_options)
        publisher = WeightPublisher if ranks.size == 1 else RankPublisher
        self.publisher = publisher(self.loaded, ranks, transport, self.weights)
        self.step_number = self.bad_steps = 0
        self.told_few = False
        self.version = 0
        self.alarm = MismatchAlarm(settings.mismatch_bound, rounded=settings.rollout_format)
        self.coefs = AdaptiveCoefs()
        self.static = static
        self._shapes = None if static is None else static.shapes  # that every micro-batch is padded to
        self.whose = ""  # " of 'critic'" where there are several policies
        self.moved = False  # did the last step write other bits into the weights that the engine reads?
        beside = {"critic": self.critic.loaded if self.critic is not None else None, "reference": self.start}
        beside |= {"teacher" if i == 0 else f"teacher {i + 1}": teacher.loaded for i, teacher in enumerate(teachers)}
        owners = [self.weights, *(other.weights for other in (critic, draft) if other is not None)]
        self.offload = Offload(self.loaded, owners, beside, claim, settings.folder)

    @property
    def settings(self) -> TrainSettings:
        """Those of the step that comes: a supervised phase has its own."""
        return self.warmup if self.warmup is not None and self.step_number < self.main.first_step else self.main

    @property
    def transport(self) -> Transport:
        """Carries the weights to the engines."""
        return self.publisher.require_transport()

    async def _run_on_device(self, function: Callable[..., Any], *args: Any) -> Any:
        """On the device's thread, and in the account under the name of what is done."""
        name = function.__name__.strip("_")
        self.account.switch_to(DOING.get(name, name))
        try:
            return await self._device(function, *args)
        finally:
            self.account.switch_to("idle")

    # -- the verbs of the protocol ---------------------------------------------------------------

    async def annotate(self, batch: TrainBatch, needs: frozenset[str]) -> TrainBatch:
        return await self._run_on_device(self._annotate, batch, needs)

    async def step(self, batch: TrainBatch, algo: Algorithm | Mixture) -> StepStats:
        stats = await self._run_on_device(self._step, batch, algo)
        if self.draft is not None and batch.samples:
            stats.metrics |= await self._run_on_device(self.draft.step, batch, self.settings)
        self.account.report_time(self.offload.memory())
        return stats

    async def publish(self, route: Route) -> tuple[Manifest, Route]:
        """The transport takes the tensors one by one: itself, into shared memory, into files, or only their digests."""
        await self._run_on_device(self.offload.end_step)
        return await self._run_on_device(self.publisher.publish, route, self.version)

    async def send(self, route: Route) -> None:
        await self._run_on_device(self.publisher.send, route)

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Of one text, through the training path at temperature 1: what a probe of the engine must agree with."""
        vocab = self.loaded.model.config.get_text_config().vocab_size
        if strange := [token for token in tokens if not 0 <= token < vocab]:
            raise UserError(
                f"token {strange[0]} does not exist: this model's tokens are 0 to {vocab - 1}. Was the prompt made by "
                f"another tokenizer?"
            )
        return await self._run_on_device(_logprobs_of, self.loaded, tokens)

    async def save(self, path: Path) -> None:
        await self._run_on_device(checkpoint.save_trainer, self, path)

    async def load(self, path: Path) -> None:
        await self._run_on_device(self._load, path)

    async def sleep(self, tags: tuple[str, ...]) -> None:
        """All that only a step needs goes to host memory, bit for bit, whatever the tag; the
        weights stay where the engine reads them.
        """
        if self.ranks.size > 1:
            raise TrainError(
                "the shards of several ranks stay on their devices: an offload is for place.kind = 'shared'"
            )
        await self._run_on_device(self.offload.sleep)

    async def wake(self, tags: tuple[str, ...]) -> None:
        await self._run_on_device(self.offload.wake)

    # -- on the device's thread ------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        checkpoint.load_trainer(self, path)
        self.offload.offload_new_state()

    def _annotate(self, batch: TrainBatch, needs: frozenset[str]) -> TrainBatch:
        self.offload.refuse_asleep("annotate")
        settings = self.settings
        how: dict[str, Any] = dict(
            budget=micro_budget(batch, settings),
            temperature=settings.temperature,
            share=settings.share_prompts,
            ranks=self.ranks,
            shapes=self._shapes,
        )
        for need, source in (
            ("proximal_logprobs", self.loaded),
            ("ref_logprobs", self.start),
            ("trained_logprobs", self.loaded),
        ):
            if need in needs:
                assert source is not None, f"the row needs {need}, and the trainer was built without that model"
                own = source is self.loaded
                replay = self.settings.replay_routes and own
                with self.offload.on_device(source):
                    notes.annotate_logprobs(
                        source, batch, FIELDS.get(need, need.removesuffix("_logprobs")), replay=replay, drawn=own, **how
                    )
        if "ref_means" in needs:
            assert self.start is not None, "the row needs the reference, and the trainer was built without it"
            with self.offload.on_device(self.start):
                row_passes.annotate_step_means(
                    self.start, batch, budget=micro_budget(batch, settings), ranks=self.ranks
                )
        if "collisions" in needs:
            notes.annotate_collisions(self.loaded, batch, replay=settings.replay_routes, **how)
        if "ages" in needs:
            row_passes.annotate_ages(batch, self.version)
        if "teacher_logprobs" in needs:

            def annotate_teacher(teacher: LoadedModel, own: TrainBatch, number: int) -> None:
                with self.offload.on_device(teacher):
                    notes.annotate_logprobs(teacher, own, number, **how)

            self.teachers.query_teachers(batch, annotate_teacher)
            self.teachers.combine_teachers(batch)
        if "teacher_hidden" in needs:

            def store_teacher_states(teacher: LoadedModel, own: TrainBatch, number: int) -> None:
                with self.offload.on_device(teacher):
                    row_passes.store_hidden_states(
                        teacher,
                        own,
                        number,
                        budget=micro_budget(batch, settings),
                        share=settings.share_prompts,
                        ranks=self.ranks,
                    )

            self.teachers.query_teachers(batch, store_teacher_states)
        if "criterion_margins" in needs:

            def annotate_hint(policy: LoadedModel, own: TrainBatch, number: int) -> None:
                row_passes.annotate_margins(policy, own, number, **how)

            self.teachers.query_teachers(batch, annotate_hint)
        if "values" in needs:
            assert self.critic is not None, "the row needs values, and the trainer was built without a critic"
            self.critic.annotate_values(batch, self.settings)
        return batch

    def _step(self, batch: TrainBatch, algo: Algorithm | Mixture) -> StepStats:
        self.offload.refuse_asleep("step")
        if not batch.samples:
            return self._skip_step()
        settings, sums, seconds = (
            self.settings,
            StepMetricSums(),
            {"forward_backward": 0.0, "optimizer": 0.0, "annotate": 0.0},
        )
        main = algo.main if isinstance(algo, Mixture) else algo
        if main.is_adaptive:
            main = self.coefs.apply_coefs(main)
            algo = replace(algo, main=main) if isinstance(algo, Mixture) else main
        critic = self.critic if "values" in main.needs else None
        if critic is not None:
            critic.copy_backbone(self.weights)
        frozen = critic is not None and critic.steps < settings.critic_warmup
        updates = batch.split_updates(settings.updates_per_step)
        if 0 < len(updates) < settings.updates_per_step and not self.told_few:
            self.told_few = True
            _warn_few_updates(f"step {self.step_number + 1}{self.whose}", len(updates), settings.updates_per_step)
        moves = updates * settings.epochs
        more = ({"proximal_logprobs"} if len(moves) > 1 else set()) | ({"trained_logprobs"} if frozen else set())
        known: dict[str, float] = {}
        stepped, note, self.moved, taken, overflows = True, "", False, 0, 0
        learned: set[int] = set()  # groups
        try:
            with _timed_phase(seconds, "annotate"):
                known = self._precompute_update(batch, algo, updates, more)
            for update in moves:
                changed = self._optimizer_step(update, algo, sums, seconds, more=more, critic=critic, frozen=frozen)
                if changed is None:
                    overflows += 1
                else:
                    taken, self.moved = taken + 1, self.moved or changed > 0
                    learned |= {sample.group for sample in update.samples}
            stepped, self.bad_steps = taken > 0, 0 if taken else self.bad_steps
        except NotFinite as fault:
            self.weights.zero_grad()
            stepped = False
            note = f"{fault} (update {taken + 1} of {len(moves)}, {taken} were taken)" if taken else str(fault)
            self.bad_steps += 1
            _warn_bad_step(self.step_number + 1, self.whose, note, self.bad_steps, self.settings.max_bad_steps)
        name = f"step {self.step_number + 1}{self.whose}"
        if overflows and (scale := self.weights.loss_scale) is not None:
            self.weights.zero_grad()
            note = _report_overflows(scale, overflows, len(moves), name, note)
        for sample in batch.samples:
            sample.hidden.clear()
        sums.gather_ranks(self.ranks)
        metrics = (
            sums.to_metrics(len(moves))
            | known
            | {
                "train/lr": learning_rate(settings.lr, self.step_number, settings),
                "train/tokens": float(batch.total_tokens),
            }
        )
        if masked := sum(
            len(share.samples) - len(share.trainable_samples(row).samples) for row, _, share in batch.split_by_row(algo)
        ):
            metrics["train/truncated_masked"] = float(masked)
        if (scale := self.weights.loss_scale) is not None:
            metrics |= {"train/loss_scale": scale.value, "train/overflows": float(overflows)}
        if critic is not None:
            metrics["train/critic_lr"] = learning_rate(settings.critic_lr, self.step_number, self.settings)
            critic.steps += 1
        if stepped:
            if main.is_adaptive:
                metrics |= self.coefs.update_coefs(batch, algo, main)
            metrics |= self.alarm.check_step(_drawn_samples(batch, algo), self.version, name)
        if self.start is not None and stepped and settings.start_probe:
            with _timed_phase(seconds, "annotate"):
                trained = [s for s in batch.samples if s.known.trained is not None]
                probe = TrainBatch(trained[: min(settings.start_probe, -(-len(trained) // START_SHARE))])
                sizes: dict[str, Any] = dict(
                    budget=self.main.micro_tokens,
                    temperature=self.main.temperature,
                    ranks=self.ranks,
                    shapes=self._shapes,
                )
                with self.offload.on_device(self.start):
                    metrics |= _measure_kl_to_start(self.start, probe, **sizes)
        metrics |= {f"train/{name}_s": spent for name, spent in seconds.items()}
        metrics |= {} if self.static is None else self.static.take_metrics()
        self.step_number += 1
        self.version += 1
        reason = note.partition(":")[0] or "overflow"
        in_part = {s.group: "" if s.group in learned else reason for s in batch.samples} if taken < len(moves) else {}
        return StepStats(stepped, metrics, note, in_part if taken else {})

    def _skip_step(self) -> StepStats:
        """A step in which there was nothing of this policy: its weights stay, its version and its schedule go on."""
        metrics = {
            "train/lr": learning_rate(self.settings.lr, self.step_number, self.settings),
            "train/tokens": 0.0,
            "train/weights_changed": 0.0,
        }
        self.moved = False
        self.step_number += 1
        self.version += 1
        return StepStats(True, metrics)

    def _precompute_update(
        self, batch: TrainBatch, algo: Algorithm | Mixture, updates: list[TrainBatch], more: set[str]
    ) -> dict[str, float]:
        """What must be known of every token before the first move, each update in the packing
        in which it will be trained. -> metrics.
        """
        for update in updates:
            for row, _, share in update.split_by_row(algo):
                if row.surrogate.whole_distribution:
                    share.restore_vocabulary()
                self._annotate(share, row.needs | more)
        known: dict[str, float] = {}
        for row, _, share in batch.split_by_row(algo):
            known |= notes.compute_advantages(share, row)
        _check_samples(batch)
        return known

    def _optimizer_step(
        self,
        update: TrainBatch,
        algo: Algorithm | Mixture,
        sums: StepMetricSums,
        seconds: dict[str, float],
        *,
        more: set[str],
        critic: Critic | None,
        frozen: bool,
    ) -> float | None:
        """One gradient over all rows, one step of each optimizer. -> the share of weights that it changed, or None
        where float16 overflowed and no step was taken.
        """
        main = algo.main if isinstance(algo, Mixture) else algo
        with _timed_phase(seconds, "forward_backward"):
            begin_gradients(self)
            critic_norm = torch.zeros(())
            shares = [(*found, found[2].trainable_samples(found[0])) for found in update.split_by_row(algo)]
            shares = [found for found in shares if found[3].samples]  # not all of them were cut off
            for row, weight, _, own in list(shares):
                if row.reading is not None and (read := observed_batch(own)).samples:
                    shares.append((row.reading[0], weight * row.reading[1], read, read))
            for number, (row, weight, share, own) in enumerate(shares, 1):
                scale = masked_scale(row.aggregate, own.lengths_N, share.lengths_N)
                if not frozen:
                    self._accumulate_gradients(
                        own,
                        row,
                        sums,
                        weight=weight * scale,
                        proximal_noted="proximal_logprobs" in row.needs | more and own.is_noted,
                        last=number == len(shares),
                    )
                if critic is not None and row is main:
                    critic_norm = critic.accumulate_gradients(own, row, self.settings, sums, weight=scale)
            norm = self.weights.gradient_norm()
            sizes = [("", self.weights, norm)]
            if critic is not None:
                sizes.append((" of the critic", critic.weights, critic_norm))
            if any([owner.overflowed(size) for _, owner, size in sizes]):
                return None
            for whose, _, size in sizes:
                if not math.isfinite(float(size)):
                    raise NotFinite(
                        f"gradient{whose}: its norm is {float(size)} over "
                        f"{_name_samples(update, range(len(update.samples)))}"
                    )
        with _timed_phase(seconds, "optimizer"):
            release_freed_memory()  # of the activations
            changed = 0.0
            if norm > 0:  # without signal the momentum of earlier steps must not move anything either
                changed = self.weights.step(
                    lr=learning_rate(self.settings.lr, self.step_number, self.settings),
                    clip=self.settings.clip,
                    norm=norm,
                )
            if critic is not None:
                critic.optimizer_step(
                    lr=learning_rate(self.settings.critic_lr, self.step_number, self.settings),
                    clip=self.settings.clip,
                    norm=critic_norm,
                )
                sums.put("train/critic_grad_norm", float(critic_norm))
        sums.put("train/grad_norm", float(norm))
        sums.put("train/weights_changed", changed)
        return changed

    def _accumulate_gradients(
        self,
        batch: TrainBatch,
        algo: Algorithm,
        sums: StepMetricSums,
        *,
        proximal_noted: bool,
        weight: float = 1.0,
        last: bool = True,
    ) -> None:
        """Forward and backward over micro-batches; every weight is fixed before the first of them (law 3). `last`: no
        other row of the update follows.
        """
        device = self.loaded.device
        decided = _decide_masks(batch, algo, sums) if proximal_noted else None
        counted_N = counted_tokens(batch.lengths_N, decided.counts if decided is not None else None)
        weight_N = weight * sample_weights(algo.aggregate, counted_N, batch.group_N).float().to(device)
        # with proximal log-probabilities the packing stays that in which they were computed: then ratios begin at 1 exactly
        everything = proximal_noted or self.settings.every_answer
        if not everything and len(computed := batch.samples_to_compute(algo)) < len(batch.samples):
            for sample in batch.samples:
                sample.known.trained = None  # of an earlier step that had it, too
            rest = TrainBatch([batch.samples[i] for i in computed])
            sums.put("train/not_computed", 1 - rest.total_tokens / batch.total_tokens)
            batch, weight_N = rest, weight_N[computed]
        score_N = torch.tensor([s.reward for s in batch.samples], dtype=torch.float32, device=device)
        guided_N = torch.tensor([s.guided for s in batch.samples], dtype=torch.bool, device=device)
        faults: list[tuple[str, int]] = []  # (border, sample)
        done: list[int] = []

        def forward(packed: PackedBatch, is_last: bool) -> tuple[Tensor, Callable[[], None]]:
            """-> a loss, and what is to be read of its pass when the backward pass is under way."""
            self.ranks.begin_pass(self.loaded.model, last=last and is_last)
            tape = notes.expert_tape(self.loaded, packed, replay=self.settings.replay_routes)
            if not self.loaded.has_head:
                return forward_stage(self.loaded, packed, tape), lambda: add_routes(packed, tape)
            how: dict[str, Any] = {"temperature": self.settings.temperature, "tape": tape}
            own = batch.tokens(packed.samples, device)
            weight_M = weight_N[packed.sample] * (not packed.idle)
            known = _visible_tokens(own, algo, decides=proximal_noted).with_fields(
                score=score_N[packed.sample], demonstration=guided_N[packed.sample]
            )
            if self.static is not None:
                loss, tokens, terms = self.static.evaluate(
                    token_loss, packed, known, weight_M, algo, temperature=self.settings.temperature
                )
            elif algo.needs & {"teacher_hidden", "behavior_top", "ref_means"}:
                if "teacher_hidden" in algo.needs:
                    taught = self.teachers.teacher_distribution(batch, packed, self.settings.temperature)
                    found = row_passes.forward_taught(self.loaded, packed, taught, algo.divergence, **how)
                    more = {"full_kl": found[2]}
                elif "ref_means" in algo.needs:
                    found = row_passes.forward_with_reference(self.loaded, packed, known_means(own))
                    more = {"step_kl": found[2]}
                else:
                    found = row_passes.forward_with_top(self.loaded, packed, known_top(own), **how)
                    more = {"top_logprobs": found[2]}
                tokens = known.with_fields(sample=packed.sample, logprobs=found[0], entropy=found[1], **more)
                loss, terms = objective(algo, tokens, weight_M)
            else:
                known = known.with_fields(sample=packed.sample)
                loss, tokens, terms = token_loss(self.loaded, packed, known, weight_M, algo, **how)
            assert tokens.logprobs is not None and tokens.entropy is not None
            measured = {
                **terms,
                "entropy": tokens.entropy.detach(),
                "logprobs": tokens.logprobs.detach(),
                "trained": tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal,
                "loss": loss.detach()[None],
            }

            def read() -> None:
                found = _to_host(measured)  # the one time that the host waits for this micro-batch
                faults.extend(_find_nonfinite("logprob", found.pop("logprobs"), packed))
                faults.extend(_find_nonfinite("ratio", found["ratio"], packed))
                if packed.idle:
                    return
                done.extend(packed.samples)
                batch.write_tokens(packed.samples, trained=found.pop("trained"))  # by the version that began the step
                sums.packed += packed.token_count
                sums.shared += 0 if self.loaded.context is None else count_shared(self.loaded.context, packed)
                sums.add_terms(found.pop("loss"), found)
                add_routes(packed, tape)

            return loss, read

        def add_routes(packed: PackedBatch, tape: RoutingTape | None) -> None:
            if tape is None or packed.idle:
                return
            sums.add_expert_counts(tape.expert_counts())
            if self.settings.replay_routes:
                sums.add_routing_flips(tape.flips, tape.margins)

        def backward(made: tuple[Tensor, Callable[[], None]], is_last: bool) -> None:
            self.ranks.begin_pass(self.loaded.model, last=last and is_last)
            loss, read = made
            self.weights.backward(loss)
            read()

        packs = micro_batches(
            batch,
            micro_budget(batch, self.settings),
            share=self.settings.share_prompts,
            device=device,
            rank=self.ranks.data_rank,
            ranks=self.ranks.data_size,
            stages=self.ranks.stages,
            shapes=self._shapes,
        )
        self.ranks.run_passes(packs, forward, backward)
        # no rank leaves a pass that the others wait for
        if told := {fault for found in self.ranks.all_gather_object(faults) for fault in found}:
            border = min(border for border, _ in told)  # a ratio follows from log-probabilities
            bad = sorted(i for where, i in told if where == border)
            raise NotFinite(f"{border}: not finite for {_name_samples(batch, bad)}")
        self.ranks.exchange_tokens(batch, done, "trained")


def _logprobs_of(loaded: LoadedModel, tokens: list[int]) -> list[float]:
    """Nothing is packed for so short a pass where the engine packs for itself."""
    with linear.without_packing() if linear.has_packed_layers(loaded.model) else nullcontext():
        return notes.logprobs_of(loaded, tokens)


def token_loss(
    loaded: LoadedModel,
    packed: PackedBatch,
    known: TokenBatch,
    weight_M: Tensor,
    row: Algorithm,
    *,
    temperature: float,
    tape: RoutingTape | None = None,
) -> tuple[Tensor, TokenBatch, dict[str, Tensor]]:
    """The loss of one micro-batch, `known` with log-probabilities and entropies, and the terms of each token."""
    logprobs, entropy = notes.forward(loaded, packed, temperature=temperature, tape=tape, drawn=True)
    tokens = known.with_fields(logprobs=logprobs, entropy=entropy)
    loss, terms = objective(row, tokens, weight_M)
    return loss, tokens, terms


def begin_gradients(trainer: LocalTrainer) -> None:
    """Nothing is added up yet. What is stale as soon as the weights move goes, for it is in the way of the
    activations.
    """
    for stack in linear.packed_linears(trainer.loaded.model):
        if stack.is_trained:
            stack.drop_packed()
    trainer.weights.zero_grad()
    release_freed_memory()


def known_means(tokens: TokenBatch) -> Tensor:
    """[T, D] means by the reference, which a row with "ref_means" needs of every step."""
    assert tokens.reference_mean is not None, "ask for ref_means before a pass compares with them"
    return tokens.reference_mean


def known_top(tokens: TokenBatch) -> Tensor:
    """Ids [T, K] that a row with "behavior_top" needs of every token."""
    if tokens.top_ids is None:
        raise TrainError(
            "a trajectory without the tokens that were likeliest when its own were drawn: an environment that builds "
            "trajectories itself must hand Completion.behavior_top to extend(), and demonstrations have none"
        )
    return tokens.top_ids


def _report_overflows(scale: LossScale, overflows: int, updates: int, step: str, note: str) -> str:
    """Updates that float16 did not hold. -> the note of a step in which none was taken, else `note`."""
    told = f"{overflows} of {updates} updates had a gradient beyond float16; the loss scale is {scale.value:g}"
    if overflows == updates:
        return f"overflow: {told}"
    emit(Warned(f"{step}: {told}"))
    return note


def _measure_kl_to_start(start: LoadedModel, probe: TrainBatch, **how: Any) -> dict[str, float]:
    """k3 estimate of KL(policy || starting weights) on the probed samples, in nats a token; nothing where none was."""
    if not probe.samples:
        return {}
    notes.annotate_logprobs(start, probe, "start", **how)
    known = probe.tokens()
    assert known.trained is not None and known.start is not None
    return {"train/kl_to_start": float(k3(known.trained - known.start).mean())}


def _warn_bad_step(step: int, whose: str, note: str, bad: int, most: int) -> None:
    """A step that a finite-check refused; after `most` in a row the run ends."""
    emit(
        Warned(
            f"step {step}{whose} was not taken: {note}. Its rollouts are stored; look at them with `rondel "
            f"replay RUN --step {step}`"
        )
    )
    if bad >= most:
        raise TrainError(
            f"{bad} steps{whose} in a row were refused by a finite-check, the last one for: {note}. "
            "Lower trainer.lr or look at the rewards"
        )


def _warn_few_updates(step: str, groups: int, wanted: int) -> None:
    emit(
        Warned(
            f"{step} makes {groups} updates and not loop.updates_per_step = {wanted}: an update has whole groups, and "
            f"{groups} were left to train. Raise loop.groups_per_step, or go over a step more often with loop.epochs"
        )
    )


def _drawn_samples(batch: TrainBatch, algo: Algorithm | Mixture) -> list[TrainSample]:
    """What an engine drew and a row trained."""
    shares = [share.trainable_samples(row) for row, _, share in batch.split_by_row(algo) if row.needs]
    return [s for share in shares for s in share.samples if not s.guided and s.known.trained is not None]


def _frozen_start(loaded: LoadedModel) -> LoadedModel:
    """The starting weights, which nothing trains: a copy, or under an adapter that is still zero the base itself."""
    if loaded.adapter is not None and loaded.adapter.is_zero:
        return replace(loaded, bare=True)
    start = loaded.copy_trainable()
    start.model.requires_grad_(False)
    linear.unpack_linears(start.model)  # it scores a few samples a step: a packed copy would be as large as the model
    return start


def _visible_tokens(known: TokenBatch, algo: Algorithm, *, decides: bool) -> TokenBatch:
    """What a row may look at of what is known: its needs. Demonstrations were drawn from no policy."""
    hidden = {} if "ref_logprobs" in algo.needs else {"reference": None}
    hidden |= {} if algo.needs else {"behavior": None}
    if not decides:
        hidden |= dict.fromkeys(("proximal", "correction", "counts", "selected", "entropy_mask"))
    return known.with_fields(**hidden)


def _decide_masks(batch: TrainBatch, algo: Algorithm, sums: StepMetricSums) -> TokenBatch:
    """What the row decides over the whole update, also kept with its samples."""
    each = batch.scored_samples.spread_to_tokens
    known = _visible_tokens(batch.tokens(), algo, decides=True)
    decided, measured = decide_update(
        algo,
        known.with_fields(
            score=each(torch.tensor([s.reward for s in batch.samples])),
            demonstration=each(torch.tensor([s.guided for s in batch.samples])),
        ),
    )
    for name, value in measured.items():
        sums.put(name, value)
    for name in ("correction", "counts", "selected", "entropy_mask"):
        values_T = getattr(decided, name)
        if values_T is not None:
            batch.write_tokens(**{name: values_T})
        else:
            for sample in batch.samples:
                setattr(sample.known, name, None)
    return decided


def _to_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One copy for all of them; fp32."""
    flat = torch.cat([x.float().reshape(-1) for x in values.values()]).cpu()
    return dict(zip(values, flat.split([x.numel() for x in values.values()])))


def _check_samples(batch: TrainBatch) -> None:
    """All that is known before the first forward pass with a gradient."""
    known: list[tuple[str, list[Any]]] = [
        ("reward", [s.reward for s in batch.samples]),
        ("reward", [s.earned for s in batch.samples]),
        *(("logprob", [getattr(s.known, name) for s in batch.samples]) for name in LOGPROBS),
        *(("logprob", [s.known.teachers.get(i) for s in batch.samples]) for i in range(_most_teachers(batch))),
        ("value", [s.known.values for s in batch.samples]),
        ("advantage", [s.known.advantages for s in batch.samples]),
    ]
    for border, values in known:
        if not _all_finite(values):
            bad = [i for i, value in enumerate(values) if not _all_finite([value])]
            raise NotFinite(f"{border}: not finite for {_name_samples(batch, bad)}")


def _most_teachers(batch: TrainBatch) -> int:
    return max((1 + max(s.known.teachers) for s in batch.samples if s.known.teachers), default=0)


def _all_finite(values: list[Any]) -> bool:
    """Of numbers, arrays or tensors, one a sample; None where a sample has none."""
    given = [value for value in values if value is not None]
    if given and isinstance(given[0], Tensor):
        return bool(torch.isfinite(torch.cat(given)).all())
    return not given or bool(np.isfinite(np.concatenate([np.atleast_1d(value) for value in given])).all())


def _find_nonfinite(border: str, values_M: Tensor, packed: PackedBatch) -> list[tuple[str, int]]:
    """(border, sample) of each sample with such a value."""
    finite = torch.isfinite(values_M)
    return [] if bool(finite.all()) else [(border, i) for i in packed.sample[~finite].unique().tolist()]


def _name_samples(batch: TrainBatch, samples: Sequence[int]) -> str:
    more = f" and {len(samples) - 4} more" if len(samples) > 4 else ""
    return ", ".join(batch.sample_name(i) for i in samples[:4]) + more
