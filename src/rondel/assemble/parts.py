"""Job -> the concrete parts of a run, built in the order in which they can fail cheaply: recipe, data, reward, model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rondel.algos.mixture import Mixture
from rondel.algos.table import Algorithm, resolve
from rondel.filter import FILTERS, chain
from rondel.filter.complete import Complete
from rondel.generate.engine.builtin.draft import Draft
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.builtin.speculative import Speculation
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.demonstrate import Demonstrate
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import TaskSet, load_tasks
from rondel.generate.envs.stream import nth
from rondel.generate.envs.template import Template
from rondel.models.aligned import align
from rondel.models.compiled import Compiled
from rondel.models.load import Loaded, load
from rondel.planner import resolve as planner
from rondel.runtime.devices import Device, Shared, pick_device
from rondel.score.pool import RewardPool
from rondel.score.result import placed
from rondel.sync import transport_of
from rondel.sync.update import Update
from rondel.train.critic import Critic
from rondel.train.draft import DraftTrainer
from rondel.train.logprobs import logprob_and_entropy
from rondel.train.pack import Batch, batch_of
from rondel.train.step import LocalTrainer, Settings
from rondel.words.config import OF_GROUPS, Job
from rondel.words.config import Critic as CriticSection
from rondel.words.errors import ConfigError, DataError, EngineError, EnvError, RondelError, boundary
from rondel.words.registry import find
from rondel.words.types import (
    DATA,
    GREEDY,
    EnvFault,
    Failed,
    Group,
    PolicyFault,
    Sampling,
    Score,
    Slot,
    Task,
    Trajectory,
    Verdict,
    sample_key,
)

ENVS = {"single_turn": SingleTurn}
PROBE = 24  # tokens of the first prompt that are scored on both sides after every sync
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # mean nats a token of the probe


@dataclass(frozen=True)
class Shown:
    """Demonstrations beside the samples of every step."""

    stream: str
    tasks: list[Task]
    row: Algorithm
    weight: float
    groups: int  # a step
    suffix: str


@dataclass
class Parts:
    """Everything one process needs for one run."""

    job: Job
    row: Algorithm
    tasks: TaskSet
    sampling: Sampling
    pool: RewardPool
    device: Device
    loaded: Loaded
    engine: BuiltinEngine
    trainer: LocalTrainer
    devices: Shared
    sync: Update
    window: int
    judge: Callable[[Group], Verdict]
    env: Any
    resolved: dict[str, str]
    shown: list[Shown] = field(default_factory=list)

    @property
    def algo(self) -> Algorithm | Mixture:
        """What the loop trains: the row, or a mixture of it and of what is shown beside."""
        return Mixture(self.row, {s.stream: (s.row, s.weight) for s in self.shown}) if self.shown else self.row

    def close(self) -> None:
        self.pool.close()
        self.device.close()


def build(job: Job) -> Parts:
    """Every fault that can be known before the model is loaded is raised before."""
    row = row_of(job)
    with boundary(ConfigError, "engine.sampling"):
        sampling = Sampling(**{**job.engine.sampling.model_dump(), "stop": tuple(job.engine.sampling.stop)})
    for section in (job.engine.sampling,):  # all of its keys are read by the line above
        section._read.update(type(section).model_fields)
    if sampling.temperature == 0:
        raise ConfigError(
            "engine.sampling.temperature = 0 is greedy: every sample of a group is the same, and greedy samples are not trainable. Use 1.0"
        )
    refuse_untrainable(sampling)
    if row.name != "sft" and job.algo.group_size == 1 and getattr(row.advantage, "compares", False):
        raise ConfigError(
            f"algo.group_size = 1 gives {row.name} no baseline: every advantage would be 0. Use 4 or more, or kind = 'reinforce'"
        )
    if ("guidance" in row.needs) != (job.algo.guides > 0):
        raise ConfigError(
            f"algo.guides = {job.algo.guides} has no effect on kind = '{row.name}', which would train demonstrations as its own samples: use "
            "kind = 'luffy', or a supervised phase: loop.warmup"
            if job.algo.guides
            else f"algo.kind = '{row.name}' learns from demonstrations beside its samples: set algo.guides = 1; tasks need an 'answer'"
        )
    critic_knobs = [name for name, field in CriticSection.model_fields.items() if getattr(job.trainer.critic, name) != field.default]
    if critic_knobs and "values" not in row.needs:
        raise ConfigError(
            f"trainer.critic.{critic_knobs[0]} has no effect: algo.kind = '{row.name}' has no critic. Remove it, or use kind = 'ppo', "
            "or algo.advantage = { kind = 'gae' }"
        )
    if ("teacher_logprobs" in row.needs) != (job.model.teacher is not None):
        raise ConfigError(
            f"algo.kind = '{row.name}' learns from a teacher: name one with model.teacher = 'folder or hub id'"
            if job.model.teacher is None
            else "model.teacher has no effect: nothing is distilled. Remove it, or set algo.distill = { coef = 1.0 } or algo.kind = 'opd'"
        )
    if job.loop.warmup.steps and row.kl.coef:
        raise ConfigError(
            "algo.kl.coef with loop.warmup: the reference would be the model before its supervised phase. Run the warmup as a run of its own "
            "(loop.steps = 0) and start from its checkpoint with model.path"
        )
    window = planner.window(job.loop.window, max_staleness=job.loop.max_staleness, groups_per_step=job.loop.groups_per_step)
    find("engine", job.engine.kind, {"builtin": BuiltinEngine})
    find("trainer", job.trainer.kind, {"fsdp": LocalTrainer})
    numerics, way = job.engine.numerics, planner.transport(job.sync.kind, apart="module")
    transport = transport_of(way.value, folder=f"{job.run.folder}/weights")
    name = pick_device(job.place.device)
    tasks = load_tasks(job.task.data, env=job.task.env)
    env = env_of(job)
    shown = shown_of(job, tasks)
    pool = RewardPool(job.task.reward, workers=job.task.reward_workers, timeout=job.task.reward_timeout)
    try:
        device = Device(name, None if job.place.threads == "auto" else job.place.threads)
        loaded = device.call(lambda: load(job.model.path, dtype=job.model.dtype, device=name))
        if numerics == "aligned":
            device.call(align, loaded)
        speculation = device.call(speculation_of, job, name)
        draft = speculation.draft if speculation else None
        longest = longest_prompt(job, tasks, loaded, sampling)
        resolved = {
            "loop.window": window,
            "engine.kv_pages": planner.kv_pages(
                job.engine.kv_pages,
                max_running=job.engine.max_running,
                longest=longest + sampling.max_tokens,
                page_bytes=page_bytes(loaded) + (page_bytes(draft.loaded) if draft else 0),
                free_bytes=torch.cuda.mem_get_info()[0] if name.startswith("cuda") else planner.free_memory(),
            ),
            "trainer.micro_tokens": planner.micro_tokens(job.trainer.micro_tokens, on_gpu=name.startswith("cuda")),
        }
        engine = BuiltinEngine(
            loaded,
            run=device.run,
            kv_pages=resolved["engine.kv_pages"].value,
            max_running=job.engine.max_running,
            prefill_tokens=job.engine.prefill_tokens,
            routes=replays(job, loaded),
            speculation=speculation,
            compiled=device.call(Compiled, loaded) if job.engine.compile else None,
        )
        settings = settings_of(job, sampling, resolved["trainer.micro_tokens"].value, replay_routes=replays(job, loaded))
        teacher = device.call(teacher_of, job, loaded)
        critic = device.call(critic_of, job, loaded, settings) if "values" in row.needs else None
        pupil = device.call(lambda: DraftTrainer(draft.loaded, lr=lr)) if draft and (lr := job.engine.speculative.lr) else None
        trainer = device.call(
            lambda: LocalTrainer(
                loaded, settings, run=device.run, needs=row.needs, draft=pupil, critic=critic, teacher=teacher, transport=transport
            )
        )
        probe = Template(loaded.tokenizer).opening([{"role": "user", "content": "One, two, three."}])[:PROBE] if job.sync.probe else []
        sync = Update(
            transport,
            probe=probe,
            score=lambda tokens: device.run(trainer_logprobs, loaded, tokens),
            tolerance=TOLERANCE[loaded.dtype],
        )
        facts = {k: f"{v.value} ({v.why})" for k, v in resolved.items()}
        facts |= {
            "engine.numerics": numerics,
            "engine.compile": "on" if job.engine.compile else "off",
            "routing_replay": replay_fact(job, loaded),
            "engine.speculative": speculation_fact(job, draft),
            "model.teacher": teacher.name if teacher else "none",
            "trainer.critic": critic_fact(job) if critic else "none",
            "sync.kind": f"{way.value} ({way.why})",
        }
        return Parts(
            job, row, tasks, sampling, pool, device, loaded, engine, trainer, Shared(engine, trainer, how=job.loop.in_flight), sync, window.value,
            judge_of(job, row), env, facts, shown,
        )  # fmt: skip
    except BaseException:
        pool.close()
        raise


def refuse_untrainable(sampling: Sampling) -> None:
    """Law 4: what is trained was drawn from a distribution that the trainer can compute again."""
    if names := sampling.untrainable:
        raise ConfigError(
            f"samples drawn with {names} cannot be trained: the trainer recomputes logits and temperature, and nothing else (law 4). Train with "
            "temperature above 0, top_k = 0, top_p = 1 and no penalties, bias, grammar or min_tokens; task.eval.sampling may use them all"
        )


def row_of(job: Job) -> Algorithm:
    section = {k: v for k, v in job.algo.model_dump().items() if v != {} and k not in OF_GROUPS}
    job.algo._read.update(type(job.algo).model_fields)
    return resolve(section).bounded(job.engine.sampling.max_tokens)


def shown_of(job: Job, tasks: TaskSet) -> list[Shown]:
    """The components of algo.beside: from data of their own, or the tasks' own answers."""
    found = []
    for i, b in enumerate(job.algo.beside):
        row = resolve({"kind": b.kind}).bounded(job.engine.sampling.max_tokens)
        if row.needs:
            raise ConfigError(
                f"algo.beside: kind = '{b.kind}' learns from rewards or from tokens that the policy drew; what stands beside is shown to it. "
                "Use kind = 'sft'"
            )
        stream, own = f"beside.{i}", b.data is None
        source = tasks.train if b.data is None else load_tasks(b.data, env=stream).train
        if lacking := next((t for t in source if "answer" not in t.data), None):
            raise DataError(f"algo.beside: task {lacking.id} has no 'answer' to show; it has: {', '.join(lacking.data)}")
        found.append(
            Shown(stream, [replace(t, env=stream) for t in source], row, b.weight, b.groups_per_step, job.task.suffix if own else "")
        )
    return found


def env_of(job: Job) -> Any:
    """One of ours, a class of the user's, or the user's async function of (task, chat)."""
    found = find("environment", job.task.env, ENVS)
    settings = {"suffix": job.task.suffix, "system": job.task.system}
    if found in ENVS.values():
        return found(**settings)
    return found() if isinstance(found, type) else AsFunction(found)


@dataclass
class AsFunction:
    function: Callable[[Task, Any], Awaitable[Trajectory]]

    async def run(self, task: Task, chat: Any) -> Trajectory:
        return await self.function(task, chat)


def judge_of(job: Job, row: Algorithm) -> Callable[[Group], Verdict]:
    names = list(dict.fromkeys([*row.filters, *job.task.filters]))
    return chain([Complete(min(2, job.algo.group_size), greedy="greedy" in row.needs), *(find("filter", n, FILTERS)() for n in names)])


def replays(job: Job, loaded: Loaded) -> bool:
    """Whether the trainer sends every token to the experts that the engine sent it to."""
    wanted = job.trainer.routing_replay
    if wanted is True and not loaded.routers:
        raise ConfigError(f"trainer.routing_replay = true, but '{loaded.name}' is dense: it has no routers. Leave it at \"auto\"")
    return loaded.routers > 0 and wanted is not False


def replay_fact(job: Job, loaded: Loaded) -> str:
    if not loaded.routers:
        return "none: a dense model"
    return f"{'on' if replays(job, loaded) else 'OFF by trainer.routing_replay'}: {loaded.routers} routers"


def speculation_of(job: Job, device: str) -> Speculation | None:
    """What guesses ahead, if anything; the engine refuses a draft with other words."""
    wanted = job.engine.speculative
    wanted._read.update(type(wanted).model_fields)  # what has no effect was refused when the recipe was read
    if wanted.kind == "off":
        return None
    if wanted.model is None:
        return Speculation(wanted.k)
    return Speculation(wanted.k, Draft(load(wanted.model, dtype=job.model.dtype, device=device)))


def speculation_fact(job: Job, draft: Draft | None) -> str:
    wanted = job.engine.speculative
    if draft is None:
        return wanted.kind if wanted.kind == "off" else f"{wanted.kind}, at most {wanted.k} guesses"
    return f"draft {draft.loaded.name}, at most {wanted.k} guesses, " + (f"trained with lr {wanted.lr:g}" if wanted.lr else "frozen")


def settings_of(job: Job, sampling: Sampling, micro_tokens: int, *, replay_routes: bool = False) -> Settings:
    t = job.trainer
    return Settings(
        lr=t.lr, temperature=sampling.temperature, schedule=t.schedule, warmup_steps=t.warmup_steps, steps=job.loop.steps, clip=t.clip,
        weight_decay=t.weight_decay, betas=t.betas, micro_tokens=micro_tokens, updates_per_step=job.loop.updates_per_step,
        max_bad_steps=t.max_bad_steps, first_step=job.loop.warmup.steps, replay_routes=replay_routes,
        critic_lr=t.critic.lr, critic_warmup=t.critic.warmup,
    )  # fmt: skip


def warmup_settings(job: Job, settings: Settings) -> Settings:
    """The supervised phase: its own learning rate, constant."""
    return replace(
        settings, lr=job.loop.warmup.lr, schedule="constant", warmup_steps=0, updates_per_step=1, first_step=0, start_probe=0, replay_routes=False
    )  # fmt: skip


def critic_of(job: Job, loaded: Loaded, settings: Settings) -> Critic:
    """A copy of the policy as it will be at the critic's first step, or a model of its own that reads the same tokens."""
    path = job.trainer.critic.path
    if path is None:
        return Critic(loaded, settings)
    other = load(path, dtype=job.model.dtype, device=str(loaded.device))
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"trainer.critic.path = {path!r} has another vocabulary than the policy '{loaded.name}'; it must read the same tokens"
        )
    return Critic(other, settings, follows=False)


def teacher_of(job: Job, loaded: Loaded) -> Loaded | None:
    """Any model that reads the same tokens; nothing trains it."""
    if job.model.teacher is None:
        return None
    teacher = load(job.model.teacher, dtype=job.model.dtype, device=str(loaded.device))
    if teacher.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"model.teacher = {job.model.teacher!r} has another vocabulary than the policy '{loaded.name}': it cannot say how likely its "
            "tokens are. Take a teacher of the same family"
        )
    teacher.model.requires_grad_(False)
    return teacher


def critic_fact(job: Job) -> str:
    c = job.trainer.critic
    first = f", alone for {c.warmup} steps" if c.warmup else ""
    return f"{c.path or 'a copy of the policy at its first step'}, lr {c.lr:g}{first}"


def page_bytes(loaded: Loaded) -> int:
    """Keys and values of one token in all layers."""
    c = loaded.model.config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * size * torch.finfo(loaded.dtype).bits // 8


def longest_prompt(job: Job, tasks: TaskSet, loaded: Loaded, sampling: Sampling) -> int:
    """Render the prompts that look longest; one that leaves no room for its answer is an error now, not at step 120."""

    def text(task: Task) -> str:
        return str(task.data.get("prompt", task.data.get("messages", "")))

    longest = 0
    for task in sorted([*tasks.train, *tasks.held_out], key=lambda t: len(text(t)))[-32:]:
        chat = TokenChat(
            loaded.tokenizer, None, sampling=sampling, key=lambda turn: 0, max_context=loaded.max_context, system=job.task.system
        )
        prompt = task.data.get("messages") or [{"role": "user", "content": str(task.data.get("prompt", "")) + job.task.suffix}]
        chat.give([dict(m) for m in prompt])
        n = len(chat.trajectory.tokens)
        if n + sampling.max_tokens > loaded.max_context:
            raise DataError(
                f"the prompt of task {task.id} has {n} tokens; with engine.sampling.max_tokens = {sampling.max_tokens} that exceeds the model's context of "
                f"{loaded.max_context}: drop or shorten it, or lower max_tokens"
            )
        longest = max(longest, n)
    return longest


def trainer_logprobs(loaded: Loaded, tokens: list[int]) -> list[float]:
    """The probe through the training path."""
    from rondel.models.attention import PackedLayout, Segment

    with torch.no_grad():
        ids = torch.tensor(tokens, device=loaded.device)
        hidden = loaded.hidden(ids, torch.arange(len(ids), device=loaded.device), PackedLayout([Segment(0, len(ids))], loaded.device))
        return [0.0, *logprob_and_entropy(hidden[:-1], ids[1:], loaded.head)[0].tolist()]


# -- the stages as functions that the loop calls ---------------------------------------------------


@dataclass
class Rollouts:
    """Generate and Score for one phase."""

    parts: Parts
    group_size: int
    guides: int = 0
    greedy: bool = False

    async def attempt(self, slot: Slot) -> Group:
        """G trajectories at once; an environment that breaks is tried once more, then it is a fault, which is data."""
        asked = [self._one(slot, index) for index in range(self.group_size)]
        if self.greedy:
            asked.append(self._one(slot, self.group_size, GREEDY))
        asked += [self._demonstrated(slot, DATA) for _ in range(self.guides)]
        return Group(slot.number, slot.task, list(await asyncio.gather(*asked)), slot.born)

    async def _demonstrated(self, slot: Slot, policy: str) -> Trajectory:
        section = self.parts.job.task
        return await Demonstrate(suffix=section.suffix, system=section.system, policy=policy).run(slot.task, self.chat(lambda turn: 0))

    async def _one(self, slot: Slot, index: int, policy: str = "policy") -> Trajectory:
        reason = ""
        sampling = replace(self.parts.sampling, temperature=0.0) if policy == GREEDY else None
        for _ in range(2):
            chat = self.chat(lambda turn: sample_key(self.parts.job.loop.seed, slot.number, index, turn), sampling)
            try:
                trajectory = await self.parts.env.run(slot.task, chat)
                trajectory.policy = policy
                return trajectory
            except (EngineError, DataError):
                raise
            except (EnvError, Exception) as error:
                if isinstance(error, RondelError) and not isinstance(error, EnvError):
                    raise
                reason = f"{type(error).__name__}: {error}"
        return Trajectory(outcome=EnvFault(reason), policy=policy)

    def chat(self, key: Callable[[int], int], sampling: Sampling | None = None, namespace: str = "") -> TokenChat:
        p = self.parts

        async def generate(request):
            request.namespace = namespace
            if sampling is None:  # an environment may have changed it
                refuse_untrainable(request.sampling)
            if p.trainer.settings.replay_routes:
                request.wants |= {"experts"}
            return await p.engine.generate(request)

        return TokenChat(
            p.loaded.tokenizer,
            generate,
            sampling=sampling or p.sampling,
            key=key,
            max_context=p.loaded.max_context,
            system=p.job.task.system,
        )

    async def score(self, group: Group) -> None:
        async def one(trajectory: Trajectory) -> None:
            if isinstance(trajectory.outcome, EnvFault):
                trajectory.score = Failed("environment fault", trajectory.outcome.reason)
            elif trajectory.score is None:
                trajectory.score = await self.parts.pool.score(trajectory, group.task)
            else:  # an environment may have scored what happened in it
                trajectory.score = placed(trajectory.score, trajectory)
            if isinstance(trajectory.outcome, PolicyFault) and trajectory.score is None:
                trajectory.score = Score(0.0, {"policy_fault": 0.0})

        await asyncio.gather(*map(one, group.trajectories))


def rollouts_of(parts: Parts) -> Rollouts:
    """Of the loop itself: samples, and what the row wants beside them."""
    return Rollouts(parts, parts.job.algo.group_size, parts.job.algo.guides, "greedy" in parts.row.needs)


class Demonstrations(Rollouts):
    """The supervised phase: Generate copies the data set's answers, Score has nothing to ask."""

    async def _one(self, slot: Slot, index: int, policy: str = "policy") -> Trajectory:
        trajectory = await self._demonstrated(slot, policy)
        trajectory.score = Score(1.0)
        return trajectory


async def prepare(groups: list[Group]) -> Batch:
    """What the trainer credits and trains: the scored trajectories of the step."""
    return batch_of(groups)


def prepare_of(parts: Parts) -> Callable[[list[Group]], Awaitable[Batch]]:
    """The same with what is shown beside. The step's first number chooses it, so that a step done again, or replayed, gets the same."""
    rollouts = rollouts_of(parts)

    async def with_shown(groups: list[Group]) -> Batch:
        beside: list[Group] = []
        for shown in parts.shown:
            first = min(group.id for group in groups) * shown.groups
            for number in range(first, first + shown.groups):
                task = nth(shown.tasks, parts.job.loop.seed, number)
                trajectory = await Demonstrate(suffix=shown.suffix, system=parts.job.task.system).run(task, rollouts.chat(lambda turn: 0))
                trajectory.score = Score(1.0)
                beside.append(Group(-1 - len(beside), task, [trajectory], 0))
        return batch_of([*groups, *beside])

    return with_shown if parts.shown else prepare
