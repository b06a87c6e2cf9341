"""Job -> the concrete parts of a run, built in the order in which they can fail cheaply: recipe, data, reward, model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rondel.algos.mixture import Mixture
from rondel.algos.table import Algorithm, resolve
from rondel.assemble.refusals import refuse, refuse_unanswered, refuse_without_routes
from rondel.assemble.rollouts import Shown, shown_of
from rondel.filter import FILTERS, chain
from rondel.filter.complete import Complete
from rondel.generate.engine.builtin.draft import Draft
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.builtin.speculative import Speculation
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import TaskSet, load_tasks
from rondel.generate.envs.template import Template
from rondel.models.aligned import align
from rondel.models.compiled import Compiled
from rondel.models.load import Loaded, load
from rondel.models.vocabulary import same_words
from rondel.planner import resolve as planner
from rondel.runtime.devices import Device, Shared, pick_device
from rondel.score.pool import RewardPool
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import Update
from rondel.train.critic import Critic
from rondel.train.draft import DraftTrainer
from rondel.train.logprobs import logprob_and_entropy
from rondel.train.step import LocalTrainer, Settings
from rondel.words.config import OF_GROUPS, Job
from rondel.words.errors import ConfigError, DataError, boundary
from rondel.words.registry import find
from rondel.words.types import Group, Sampling, Task, Trajectory, Verdict

ENVS = {"single_turn": SingleTurn}
PROBE = 24  # tokens of the first prompt that are scored on both sides after every sync
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # mean nats a token of the probe


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
    row, sampling = row_of(job), sampling_of(job)
    refuse(job, row, sampling)
    window = planner.window(job.loop.window, max_staleness=job.loop.max_staleness, groups_per_step=job.loop.groups_per_step)
    find("engine", job.engine.kind, {"builtin": BuiltinEngine})
    find("trainer", job.trainer.kind, {"fsdp": LocalTrainer})
    name = pick_device(job.place.device)
    tasks = load_tasks(job.task.data, env=job.task.env)
    for key, shows in (("algo.guides", job.algo.guides), ("loop.warmup", job.loop.warmup.steps)):
        if shows:
            refuse_unanswered(key, tasks.train)
    env = env_of(job)
    shown = shown_of(job, tasks, rows_beside(job))
    pool = RewardPool(job.task.reward, workers=job.task.reward_workers, timeout=job.task.reward_timeout)
    try:
        device = Device(name, None if job.place.threads == "auto" else job.place.threads)
        loaded = device.call(policy_of, job, name)
        speculation = device.call(speculation_of, job, name)
        draft = speculation.draft if speculation else None
        longest = longest_prompt(job, tasks, loaded, sampling) + sampling.max_tokens
        pages = pages_of(job, [loaded, draft.loaded] if draft else [loaded], longest)
        micro = planner.micro_tokens(job.trainer.micro_tokens, on_gpu=name.startswith("cuda"))
        engine = BuiltinEngine(
            loaded,
            run=device.run,
            kv_pages=pages.value,
            max_running=job.engine.max_running,
            prefill_tokens=job.engine.prefill_tokens,
            routes=replays(job, loaded),
            speculation=speculation,
            compiled=device.call(Compiled, loaded) if job.engine.compile else None,
        )
        settings = settings_of(job, sampling, micro.value, replay_routes=replays(job, loaded))
        teacher = device.call(teacher_of, job, loaded)
        critic = device.call(critic_of, job, loaded, settings) if "values" in row.needs else None
        pupil = device.call(pupil_of, job, draft) if draft else None
        trainer = device.call(
            lambda: LocalTrainer(
                loaded,
                settings,
                run=device.run,
                needs=row.needs,
                draft=pupil,
                critic=critic,
                teacher=teacher,
                warmup=warmup_settings(job, settings) if job.loop.warmup.steps else None,
            )
        )
        facts = {
            k: f"{v.value} ({v.why})" for k, v in {"loop.window": window, "engine.kv_pages": pages, "trainer.micro_tokens": micro}.items()
        }
        facts |= {
            "engine.numerics": job.engine.numerics,
            "engine.compile": "on" if job.engine.compile else "off",
            "routing_replay": replay_fact(job, loaded),
            "engine.speculative": speculation_fact(job, draft),
            "model.teacher": teacher.name if teacher else "none",
            "trainer.critic": critic_fact(job) if critic else "none",
            "sync.kind": "tensor (one process, one module: 0 bytes move)" if job.sync.kind == "auto" else job.sync.kind,
        }
        return Parts(
            job, row, tasks, sampling, pool, device, loaded, engine, trainer, Shared(engine, trainer, how=job.loop.in_flight),
            sync_of(job, loaded, device), window.value, judge_of(job, row), env, facts, shown,
        )  # fmt: skip
    except BaseException:
        pool.close()
        raise


def sampling_of(job: Job) -> Sampling:
    section = job.engine.sampling
    section._read.update(type(section).model_fields)
    with boundary(ConfigError, "engine.sampling"):
        return Sampling(**{**section.model_dump(), "stop": tuple(section.stop)})


def row_of(job: Job) -> Algorithm:
    section = {k: v for k, v in job.algo.model_dump().items() if v != {} and k not in OF_GROUPS}
    job.algo._read.update(type(job.algo).model_fields)
    return resolve(section).bounded(job.engine.sampling.max_tokens)


def rows_beside(job: Job) -> list[Algorithm]:
    return [resolve({"kind": b.kind}).bounded(job.engine.sampling.max_tokens) for b in job.algo.beside]


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


def policy_of(job: Job, device: str) -> Loaded:
    loaded = load(job.model.path, dtype=job.model.dtype, device=device)
    if job.engine.numerics == "aligned":
        align(loaded)
    return loaded


def replays(job: Job, loaded: Loaded) -> bool:
    """Whether the trainer sends every token to the experts that the engine sent it to."""
    wanted = job.trainer.routing_replay
    if wanted is True and not loaded.routers:
        raise ConfigError(f"trainer.routing_replay = true, but '{loaded.name}' is dense: it has no routers. Leave it at \"auto\"")
    if not loaded.routers or wanted is False:
        return False
    refuse_without_routes(job)
    return True


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


def pupil_of(job: Job, draft: Draft) -> DraftTrainer | None:
    lr = job.engine.speculative.lr
    return DraftTrainer(draft.loaded, lr=lr) if lr else None


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
    same_words(loaded, other, who=f"trainer.critic.path = {path!r}", remedy="It must read the same tokens: take a model of the same family")
    return Critic(other, settings, follows=False)


def teacher_of(job: Job, loaded: Loaded) -> Loaded | None:
    """Any model that reads the same tokens; nothing trains it."""
    if job.model.teacher is None:
        return None
    teacher = load(job.model.teacher, dtype=job.model.dtype, device=str(loaded.device))
    remedy = "It cannot say how likely the policy's tokens are: take a teacher of the same family"
    same_words(loaded, teacher, who=f"model.teacher = {job.model.teacher!r}", remedy=remedy)
    teacher.model.requires_grad_(False)
    return teacher


def critic_fact(job: Job) -> str:
    c = job.trainer.critic
    first = f", alone for {c.warmup} steps" if c.warmup else ""
    return f"{c.path or 'a copy of the policy at its first step'}, lr {c.lr:g}{first}"


def pages_of(job: Job, models: list[Loaded], longest: int) -> planner.Resolved:
    """Cache pages for requests of at most `longest` tokens, whose keys and values all these models keep."""
    return planner.kv_pages(
        job.engine.kv_pages,
        max_running=job.engine.max_running,
        longest=longest,
        page_bytes=sum(map(page_bytes, models)),
        free_bytes=torch.cuda.mem_get_info()[0] if models[0].device.type == "cuda" else planner.free_memory(),
    )


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


def sync_of(job: Job, loaded: Loaded, device: Device) -> Update:
    """In place, and the same probe through engine and trainer after every update."""
    probe = Template(loaded.tokenizer).opening([{"role": "user", "content": "One, two, three."}])[:PROBE] if job.sync.probe else []
    return Update(
        FromTensor(), probe=probe, score=lambda tokens: device.run(trainer_logprobs, loaded, tokens), tolerance=TOLERANCE[loaded.dtype]
    )


def trainer_logprobs(loaded: Loaded, tokens: list[int]) -> list[float]:
    """The probe through the training path."""
    from rondel.models.attention import PackedLayout, Segment

    with torch.no_grad():
        ids = torch.tensor(tokens, device=loaded.device)
        hidden = loaded.hidden(ids, torch.arange(len(ids), device=loaded.device), PackedLayout([Segment(0, len(ids))], loaded.device))
        return [0.0, *logprob_and_entropy(hidden[:-1], ids[1:], loaded.head)[0].tolist()]
