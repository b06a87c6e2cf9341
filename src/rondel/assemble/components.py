"""Job -> the concrete parts of a run, built in the order in which they can fail cheaply: recipe,
data, reward, model.
"""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rondel.algos.table import Algorithm
from rondel.assemble.deployment import ENGINES, deploy_job, probe_tolerance, refuse_engine
from rondel.assemble.episodes import command_log_of, episodes_of
from rondel.assemble.model_info import ModelInfo
from rondel.assemble.number_formats import probe_gap
from rondel.assemble.one_base import deploy_on_one_base, shares_base
from rondel.assemble.placement import Deployment
from rondel.assemble.recipe_parts import load_run_tasks, sampling_of
from rondel.assemble.refusals import (
    refuse_idle_evaluation,
    refuse_job,
    refuse_shown_tasks,
    refuse_unanswered,
    refuse_unplayed,
    refuse_unwritable,
)
from rondel.assemble.rows import AlgorithmRows, refuse_unknown_sources, rows_beside, rows_of, warn_of_entropy
from rondel.assemble.run_components import Components
from rondel.assemble.shots import play_shots
from rondel.assemble.step_refusals import (
    refuse_block_job,
    refuse_control_job,
    refuse_flow_job,
    refuse_other_points,
    refuse_world_model,
)
from rondel.assemble.world_sizes import with_world_sizes
from rondel.checks.special_token_check import all_tasks, read_as_text, refuse_deaf_template, refuse_idle_split
from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.job import Job
from rondel.core.config.section import SettingsFault, read_settings, split_kind
from rondel.core.config.validation_messages import explain_settings
from rondel.core.errors import ConfigError, DataError, SandboxError, TemplateError, error_boundary
from rondel.core.events import Warned, emit
from rondel.core.media import ImageProcessorConfig
from rondel.core.protocols import DemonstratingEnv, Env, Filter, GoldEnv, MultiTurnEnv, PromptedEnv
from rondel.core.registry import (
    find_registered,
    locate_path,
    make_from_settings,
    refuse_missing_methods,
    refuse_settings,
    refuse_uncallable,
)
from rondel.core.types import POLICY, Completion, Group, Request, Sampling, Task, Trajectory, Verdict
from rondel.driver.demonstration_stream import DemonstrationStream
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.remote_teachers import connect_teachers
from rondel.driver.replay_buffer import ReplayBuffer
from rondel.driver.rollouts import batch_function, shown_of
from rondel.driver.transition_memory import TransitionMemory
from rondel.filter import FILTERS, chain_filters
from rondel.filter.complete import Complete
from rondel.generate.corpus.store import open_corpus
from rondel.generate.corpus.tools import CorpusTools
from rondel.generate.envs.agents import Agents
from rondel.generate.envs.block_turn import BlockTurn
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.control import Control
from rondel.generate.envs.curriculum import build_curriculum
from rondel.generate.envs.debate import Debate
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.experts import EXPERTS, DemonstratedControl, DemonstratedGym
from rondel.generate.envs.flow import Flow
from rondel.generate.envs.gateway.agent import agent_of, function_agent
from rondel.generate.envs.gateway.env import Gateway
from rondel.generate.envs.gym import Gym
from rondel.generate.envs.imagination import Imagination
from rondel.generate.envs.mcp import Mcp
from rondel.generate.envs.order import MixedOrder, TaskAdmissions
from rondel.generate.envs.proposer_solver import ProposerSolver, arithmetic
from rondel.generate.envs.python import GRACE, SECONDS, python_tool
from rondel.generate.envs.repository.env import LATE, RepositoryEnv
from rondel.generate.envs.search import Search
from rondel.generate.envs.shop.database import open_database
from rondel.generate.envs.shop.env import Shop
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import TaskSet, question_text
from rondel.generate.envs.token_worlds import TokenWorlds
from rondel.generate.envs.toolbox import calculator
from rondel.generate.envs.tools import Tools
from rondel.generate.envs.verifiers import agent_of_verifiers
from rondel.generate.envs.worlds import world_factory
from rondel.generate.template import Messages, Template
from rondel.models import adapters, nf4
from rondel.models.block_diffusion.settings import block_of, has_blocks
from rondel.models.control.kinds import chunk_sizes
from rondel.models.load import tokenizer_of
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.probe import find_isolation
from rondel.runtime.sandbox.recipe import describe, prepare, sandbox_of
from rondel.score import examine_task
from rondel.score.pool import RewardPool
from rondel.sync.update import WeightUpdate

ENVS = {
    "single_turn": SingleTurn,
    "tools": Tools,
    "search": Search,
    "gateway": Gateway,
    "agents": Agents,
    "verifiers": agent_of_verifiers,
    "gym": Gym,
    "repository": RepositoryEnv,
    "shop": Shop,
    "debate": Debate,
    "proposer_solver": ProposerSolver,
    "flow": Flow,
    "control": Control,
}
CORPUS = "corpus:"  # before its folder, in task.env.tools
TOOLS: dict[str, Any] = {"calculator": calculator, "python": python_tool(Sandbox)}
EXAMINED = 2000  # tasks that are looked at before a run: all, or so many evenly among them
LENDS = {"sandbox": "rondel.runtime.sandbox.recipe:sandbox_of"}  # by name: a worker that wants none imports none
PROBE = 24  # tokens of the first prompt that are scored on both sides after every sync


def refuse_recipe(job: Job) -> tuple[Job, AlgorithmRows, Sampling]:
    """Every fault that a recipe has by itself, before anything is read. -> it with its steps and sizes, its rows, and
    how it samples.
    """
    job, _ = with_steps(job)
    job = with_world_sizes(job)
    refuse_engine(job.engine.kind, find_registered("engine", job.engine.kind, ENGINES))
    batch_function(job)
    rows, sampling = rows_of(job), sampling_of(job)
    refuse_world_model(job, rows)
    refuse_job(job, rows, sampling)
    refuse_flow_job(job, rows, sampling)
    refuse_control_job(job, rows, sampling)
    refuse_block_job(job, rows, sampling)
    if job.model.adapter.kind != "off":
        adapters.require_peft()
    if job.model.adapter.kind == "qlora":
        nf4.require_bitsandbytes()
    return job, rows, sampling


def build(job: Job, folder: Path | None = None, *, trains: bool = True) -> Components:
    """Every fault that can be known before the model is loaded is raised before. `folder`: of
    a run that may be continued after a crash. `trains`: False where the parts only evaluate.
    """
    job, rows, sampling = refuse_recipe(job)
    for row in rows.all_rows:
        warn_of_entropy(row)
    tasks = load_run_tasks(job, trains)
    refuse_unknown_sources(job, rows, tasks.train)
    refuse_idle_evaluation(job, tasks.evaluated)
    refuse_shown_tasks(job, tasks.evaluated)
    env = env_of(job, tasks)
    for key, shows in (("algo.guides", job.algo.guides), ("loop.warmup", job.loop.warmup.steps)):
        if shows and not isinstance(env, DemonstratedGym | DemonstratedControl):
            refuse_unanswered(key, tasks.train)
            if not isinstance(env, GoldEnv | DemonstratingEnv):
                refuse_unwritable(key, tasks.train)
    shots = play_shots(job, tasks, env, sampling)
    tasks = _that_fit(job, tasks, env, shots)
    if tasks.too_long:
        emit(
            Warned(
                f"{tasks.too_long} tasks are left out: their prompts are longer than task.max_prompt_tokens = "
                f"{job.task.max_prompt_tokens}"
            )
        )
    order = order_of(job, tasks)
    refuse_unplayed(job, env)
    shown = shown_of(job, tasks, rows_beside(job))
    with ExitStack() as ends:
        for one in env.envs.values() if isinstance(env, ByTask) else [env]:
            if isinstance(one, Control):
                ends.callback(one.close)
        reward, calls = job.task.reward_spec, job.task.reward_calls
        pool = RewardPool(reward, workers=calls.workers, timeout=calls.timeout, folder=folder, lends=LENDS)
        ends.callback(pool.close)
        every = tasks.every_task
        for task in every[:: 1 + len(every) // EXAMINED]:
            examine_task(reward, task)
        parts = (
            job,
            rows.needs,
            sampling,
            lambda known: check_encoded_tasks(job, tasks, shown, env, known, sampling, shots),
            folder,
        )
        sleeper = pool if pool.naps else None
        placed = (
            deploy_on_one_base(*parts) if shares_base(job) and sleeper is None else deploy_job(*parts, reward=sleeper)
        )
        ends.callback(placed.close)
        sync = sync_of(job, placed)
        for name, remote in placed.remotes.items():
            remote.catch_up = placed.catches_up(name, sync)
        commands = command_log_of(folder) if trains else None
        if commands is not None:
            ends.callback(commands.close)
        return Components(
            job,
            rows,
            tasks,
            order,
            sampling,
            pool,
            placed,
            sync,
            judge_of(job, rows),
            env,
            placed.resolved | {"weight_delivery": delivery_fact(job, placed, sync)},
            shown,
            connect_teachers(
                job,
                placed.known.tokenizer,
                ENGINES,
                rows.needs_teacher,
                lambda: longest_conversation(job, tasks, env, placed.known, sampling, shots),
            ),
            _returning(job, env),
            ends.pop_all().close,
            FailureBudget(calls.max_failures, calls.patience),
            episodes_of(job.task.episode, env, placed.known.tokenizer, shots),
            commands,
        )


def _returning(job: Job, env: Any) -> ReplayBuffer | TransitionMemory | None:
    """What earlier steps bring into a later one."""
    if isinstance(env, Control) and env.model is not None:
        return TransitionMemory(env.model.memory) if env.model.memory else None
    again = job.loop.replays
    max_lag = job.loop.max_staleness if again.max_lag is None else again.max_lag
    return ReplayBuffer(again.groups, max_lag, job.loop.seed) if again.groups else None


def order_of(job: Job, tasks: TaskSet) -> TaskAdmissions:
    """Each source of a mixture in an order of its own."""
    seed, spec = job.loop.seed, job.task.curriculum
    if not tasks.sources:
        return build_curriculum(tasks.train, seed, spec)
    return MixedOrder(
        [(weight, build_curriculum(own, seed + i, spec)) for i, (weight, own) in enumerate(tasks.sources)]
    )


def env_of(job: Job, tasks: TaskSet) -> Any:
    """That of the run, or where the sources of a mixture name their own, the one that each task names."""
    tables = job.task.data.get("sources", []) if tasks.sources else []
    own_kind = job.task.env_kind
    named = {split_kind(table["env"], own_kind)[0]: table for table in tables if "env" in table}
    if sum(split_kind(table.get("env", ""), "")[0] == "verifiers" for table in tables) > 1:
        raise ConfigError(
            'task.data.sources: one of them may have env = "verifiers", whose tasks say nothing of the package they '
            "are from"
        )
    if not named:
        return _build_env(job, own_kind, job.task.env_settings, job.task.data)
    return ByTask({name: _env_of_source(job, name, named.get(name, {}), tables) for name in _env_kinds(tasks)})


def _env_kinds(tasks: TaskSet) -> set[str]:
    return {task.env for task in tasks.every_task}


def _env_of_source(job: Job, kind: str, table: dict[str, Any], tables: list[dict[str, Any]]) -> Any:
    """The environment of the sources that name `kind`, whose settings must agree; without any, those of task.env."""
    told = [split_kind(one["env"], kind) for one in tables if "env" in one]
    settings = [own for name, own in told if name == kind and own]
    if any(own != settings[0] for own in settings):
        raise ConfigError(
            f'task.data.sources: two of them have env = "{kind}" with different settings; write the same settings in '
            f"both"
        )
    if settings:
        return _build_env(job, kind, settings[0], table, "task.data.sources.env")
    return _build_env(job, kind, job.task.env_settings if kind == job.task.env_kind else {}, table)


def _build_env(job: Job, kind: str, settings: dict[str, Any], data: dict[str, Any], where: str = "task.env") -> Any:
    """One of ours, a class of the user's, or the user's async function of (task, chat)."""
    found = find_registered("environment", kind, ENVS)
    if kind not in ENV_TABLES:
        return _users_env(kind, found, settings)
    try:
        own = read_settings(where, ENV_TABLES[kind], settings)
    except SettingsFault as fault:
        raise ConfigError(explain_settings(fault)) from fault
    system = job.task.system
    if found is SingleTurn:
        examples = [e.model_dump() for e in own.examples]
        if has_blocks(job.model.path):
            return BlockTurn(block_of(job.model.path), suffix=own.suffix, system=system, examples=examples)
        return SingleTurn(suffix=own.suffix, system=system, examples=examples)
    if found is Control and own.actions == "tokens":
        tokens = TokenWorlds(own.bins, own.frames, own.pixels)
        tokens(str(data["name"]))(**dict(data.get("args") or {})).close()  # the first episode would be late
        settings = {"turns": own.turns, "suffix": own.suffix, "system": system}
        if own.expert:
            return DemonstratedGym(find_registered("expert", own.expert, EXPERTS), tokens, **settings)
        return Gym(**settings, open=tokens)
    if found is Control:
        model = None if own.model is None else Imagination(**own.model.model_dump())
        settings = {name: getattr(own, name) for name in ("turns", "threads", "processes", "instruction")}
        settings |= {"model": model, "pixels": own.pixels if own.frames else None}
        if own.expert:
            size = chunk_sizes(job.model.path)
            return DemonstratedControl(find_registered("expert", own.expert, EXPERTS), **size, **settings)
        return Control(**settings)
    if found is Flow:
        return Flow(points=own.points, every=own.every, shared_noise=own.shared_noise, system=system)
    if found is Search:
        settings = own.model_dump()
        return Search(open_corpus(settings.pop("corpus")), **settings, system=system)
    if found is Debate:
        return Debate(**own.model_dump(), system=system)
    if found is ProposerSolver:
        settings = own.model_dump()
        checker = find_registered("checker", settings.pop("checker"), {"arithmetic": arithmetic})
        return ProposerSolver(checker, **settings, system=system)
    if found is Shop:
        settings = own.model_dump(exclude_none=True)
        return Shop(open_database(locate_path(settings.pop("path"))), **settings, system=system)
    if found is Tools:
        known = dict(TOOLS)
        if "python" in own.tools:
            sandbox = sandbox_of(own.sandbox, f"{where}.sandbox")
            _python_can_run(own.timeout, sandbox)
            if own.sandbox != "process":
                known["python"] = python_tool(lambda: sandbox)
        elif own.sandbox != "process":
            raise ConfigError(f'{where}.sandbox is for the tool "python", and {where}.tools has none')
        tools = [
            Mcp(name)
            if name.startswith(("mcp:", "mcp+shared:"))
            else CorpusTools(open_corpus(name.removeprefix(CORPUS)))
            if name.startswith(CORPUS)
            else find_registered("tool", name, known)
            for name in own.tools
        ]
        return Tools(tools, turns=own.turns, timeout=own.timeout, suffix=own.suffix, system=system)
    if found is Gym:
        if data.get("kind") != "gym":
            raise ConfigError(
                'task.env = "gym" plays the worlds of its tasks: set task.data = '
                '{ kind = "gym", name = "my_module:make", n = 100 }'
            )
        world_factory(str(data.get("name", "")))  # the first episode would be late
        return Gym(turns=own.turns, timeout=own.timeout, suffix=own.suffix, system=system)
    if found is Gateway:
        return Gateway(agent_of(own.agent), timeout=own.timeout)
    if found is RepositoryEnv:
        return _repository_env(own, system, where)
    if found is Agents:
        return Agents(own.agents, suffix=own.suffix, system=system)
    return Gateway(agent_of_verifiers(data), timeout=own.timeout)


def _repository_env(own: Any, system: str | None, where: str) -> RepositoryEnv:
    """Its boxes are those of a substrate that this machine has."""
    sandbox = sandbox_of(own.sandbox, f"{where}.sandbox")
    try:
        if sandbox.kind == "process":
            find_isolation()
        else:
            prepare(sandbox, lambda text: emit(Warned(f"sandbox: {text}")))
    except SandboxError as error:
        raise ConfigError(f'{where} = "repository": {error}') from error
    settings = own.model_dump(exclude={"sandbox", "shown", "agent", "agent_files"})
    shown = tuple(str(locate_path(path)) for path in own.shown)
    words = shlex.split(own.agent) if isinstance(own.agent, str) else own.agent
    files = locate_path(own.agent_files) if own.agent_files else None
    gateway = Gateway(function_agent(_no_agent), timeout=own.agent_seconds + 2 * LATE) if words else None
    return RepositoryEnv(
        sandbox, system=system, shown=shown, gateway=gateway, agent=words, agent_files=files, **settings
    )


async def _no_agent(**given: Any) -> None:
    raise AssertionError("each episode brings the agent that works in its box")


def _users_env(kind: str, found: Any, settings: dict[str, Any]) -> Any:
    """A class is made with the settings of task.env; a function gets them with each call. `sandbox`, where it has such
    a parameter, is what makes its boxes."""
    if _has_sandbox(found) and isinstance(settings.get("sandbox", "process"), str | dict):
        settings = {**settings, "sandbox": sandbox_of(settings.get("sandbox", "process"), "task.env.sandbox")}
    if not isinstance(found, type):
        refuse_settings("task.env", kind, found, settings, given=2)
        refuse_uncallable(f"environment '{kind}'", partial(found, **settings), "task", "chat")
        _refuse_synchronous(kind, found)
        return AsFunction(partial(found, **settings))
    made = make_from_settings("task.env", kind, found, settings)
    refuse_missing_methods("task.env", kind, made, {"run": ("task", "chat")})
    _refuse_synchronous(kind, made.run)
    return made


def _refuse_synchronous(kind: str, run: Any) -> None:
    """A `def` without `async`, which would fail in every episode. What a lambda or an object returns is seen there."""
    written = inspect.unwrap(run)
    is_def = (inspect.isfunction(written) or inspect.ismethod(written)) and written.__name__ != "<lambda>"
    if is_def and not inspect.iscoroutinefunction(written):
        raise ConfigError(
            f"task.env: {written.__name__} of '{kind}' is not async, and an episode waits for the policy: write "
            f"async def {written.__name__}{inspect.signature(written)}, and in it await chat.reply()"
        )


def _has_sandbox(found: Any) -> bool:
    try:
        return "sandbox" in inspect.signature(found).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _python_can_run(timeout: float, sandbox: Sandbox) -> None:
    """The python tool has the time that its own calls take, and a box."""
    if timeout <= SECONDS + GRACE:
        raise ConfigError(
            f"task.env.timeout = {timeout:g}: the python tool ends its own calls after {SECONDS + GRACE:g} s, and a "
            f"call that the "
            "environment gives up first would count as the world's fault; set it above, or leave it out"
        )
    try:
        if sandbox.kind == "process":
            find_isolation()
        else:
            prepare(sandbox, lambda text: emit(Warned(f"sandbox: {text}")))
            describe(sandbox)
    except SandboxError as error:
        raise ConfigError(f'task.env.tools has "python": {error}') from error


@dataclass
class AsFunction:
    function: Callable[[Task, Any], Awaitable[Trajectory]]

    async def run(self, task: Task, chat: Any) -> Trajectory:
        return await self.function(task, chat)


def most_turns(env: Env) -> int:
    """Replies of an episode at most, as far as the environment says."""
    return env.turns if isinstance(env, MultiTurnEnv) else 1


@dataclass
class ByTask:
    """Several environments in one run; `turns` is the most that any takes."""

    envs: dict[str, Any]

    @property
    def turns(self) -> int:
        return max(most_turns(env) for env in self.envs.values())

    def prompt(self, task: Task) -> Any:
        env = self.envs[task.env]
        return env.prompt(task) if isinstance(env, PromptedEnv) else SingleTurn().prompt(task)

    async def run(self, task: Task, chat: Any) -> Any:
        return await self.envs[task.env].run(task, chat)


def _build_filter(entry: str | dict[str, Any]) -> Filter:
    """One of ours; a class of the user's, made with its settings; or the user's function of a group."""
    kind, settings = split_kind(entry, "")
    found = find_registered("filter", kind, FILTERS)
    if kind in FILTERS:
        ours: Filter = make_from_settings("task.filters", kind, found, settings)
        return ours
    if isinstance(found, type):
        made = make_from_settings("task.filters", kind, found, settings)
        refuse_missing_methods("task.filters", kind, made, {"__call__": ("group",)})
        return _users_filter(kind, made)
    refuse_settings("task.filters", kind, found, settings, given=1)
    refuse_uncallable(f"filter '{kind}'", partial(found, **settings), "group")
    return _users_filter(kind, partial(found, **settings))


def _users_filter(kind: str, judge: Callable[[Group], Any]) -> Filter:
    """What it raises, or returns beside a verdict, is told as its own fault."""

    def apply_filter(group: Group) -> Verdict:
        with error_boundary(ConfigError, f"task.filters: '{kind}'"):
            verdict = judge(group)
        if not isinstance(verdict, Verdict):
            raise ConfigError(f"task.filters: '{kind}' returned {verdict!r:.60}; return a Verdict(keep, reason)")
        return verdict

    return apply_filter


def judge_of(job: Job, rows: AlgorithmRows) -> Callable[[Group], Verdict]:
    """A group passes the filters of its own row, and those of the task."""

    def row_filter(row: Algorithm) -> Callable[[Group], Verdict]:
        entries: list[str | dict[str, Any]] = [*row.filters, *job.task.filters]
        names = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
        return chain_filters(
            [Complete(min(2, job.algo.group_size), greedy="greedy" in row.needs), *map(_build_filter, names)]
        )

    main, of = row_filter(rows.main), {source: row_filter(row) for source, (row, _) in rows.of.items()}
    if not of:
        return main
    return lambda group: of.get(group.task.stream, main)(group)


def with_steps(job: Job) -> tuple[Job, str]:
    """The job with its number of steps, and how passes over the data became that
    number; "" where the recipe says it itself.
    """
    passes, groups = job.loop.passes, job.loop.groups_per_step
    if passes is None:
        return job, ""
    tasks = load_run_tasks(job)
    if job.task.max_prompt_tokens:
        env = env_of(job, tasks)
        tasks = _that_fit(job, tasks, env, play_shots(job, tasks, env, sampling_of(job)))
    n = len(tasks.train)
    steps = max(1, math.ceil(round(passes * n / groups, 9)))
    why = (
        f"{passes:g} pass{'es' * (passes != 1)} over {n} training tasks, {groups} a step: "
        f"{passes:g} · {n} / {groups}, rounded up"
    )
    return job.model_copy(update={"loop": job.loop.model_copy(update={"steps": steps, "passes": None})}), why


def _that_fit(job: Job, tasks: TaskSet, env: Any, shots: Mapping[str, Messages]) -> TaskSet:
    """Those whose prompts have at most task.max_prompt_tokens."""
    most = job.task.max_prompt_tokens
    if most is None:
        return tasks
    tokenizer, _, sight = tokenizer_of(job.model.path)
    count = _prompt_counter(job, env, tokenizer, sight, most, sampling_of(job), shots)
    fits = {id(task) for task in tasks.every_task if count(task) <= most}
    train, held_out = ([task for task in own if id(task) in fits] for own in (tasks.train, tasks.held_out))
    if not train or (tasks.held_out and not held_out):
        whom = "training" if not train else "held-out"
        raise DataError(f"task.max_prompt_tokens = {most} leaves no {whom} task: every prompt is longer; raise it")
    sources = tuple((weight, [task for task in own if id(task) in fits]) for weight, own in tasks.sources)
    if empty := [i for i, (_, own) in enumerate(sources, 1) if not own]:
        raise DataError(
            f"task.max_prompt_tokens = {most} leaves no task of task.data.sources[{empty[0]}]; raise it, or remove "
            "the source"
        )
    sets = {name: [task for task in own if id(task) in fits] for name, own in tasks.sets.items()}
    if empty_sets := [name for name, own in sets.items() if not own]:
        raise DataError(f"task.max_prompt_tokens = {most} leaves no task of task.eval.sets.{empty_sets[0]}; raise it")
    fitting = replace(tasks, train=train, held_out=held_out, sources=sources, sets=sets)
    return replace(fitting, too_long=len(tasks.every_task) - len(fitting.every_task))


def _prompt_counter(
    job: Job,
    env: Any,
    tokenizer: Any,
    sight: ImageProcessorConfig | None,
    max_context: int,
    sampling: Sampling,
    shots: Mapping[str, Messages],
) -> Callable[[Task], int]:
    """Task -> tokens of its rendered prompt."""
    first = next(iter(shots), "")  # the agent that reads a task's prompt

    async def refuse_generation(request: Request) -> Completion:
        raise AssertionError("only prompts are rendered here")

    prompt = env.prompt if isinstance(env, PromptedEnv) else SingleTurn(suffix=job.task.suffix).prompt

    def count_tokens(task: Task) -> int:
        chat = TokenChat(
            tokenizer,
            refuse_generation,
            sampling=sampling,
            key=lambda turn: 0,
            max_context=max_context,
            system=job.task.system,
            sight=sight,
            episode=EpisodeState(shots=shots),
        )
        chat.trajectory.agent = first
        try:
            chat.give(*prompt(task))
        except TemplateError as error:
            raise DataError(f"task {task.id}: {error}") from error
        return len(chat.trajectory.tokens)

    return count_tokens


def check_encoded_tasks(
    job: Job,
    tasks: TaskSet,
    shown: list[DemonstrationStream],
    env: Any,
    known: ModelInfo,
    sampling: Sampling,
    shots: Mapping[str, Messages],
) -> int:
    """What is wrong with the tasks or the chat template as tokens is said here, before
    the weights are loaded. -> `longest`.
    """
    everything = all_tasks(tasks, shown)
    refuse_idle_split(everything, known.tokenizer)
    refuse_deaf_template(env, known.tokenizer)
    refuse_other_points(everything, known.point_size)
    if told := read_as_text(everything, known.tokenizer):
        emit(Warned(told))
    return longest_conversation(job, tasks, env, known, sampling, shots)


def longest_conversation(
    job: Job, tasks: TaskSet, env: Any, known: ModelInfo, sampling: Sampling, shots: Mapping[str, Messages]
) -> int:
    """Tokens of the longest conversation. Renders the prompts that look longest: one that
    leaves no room for its answer is an error now, not at step 120."""

    def task_size(task: Task) -> int:
        """Characters, and for each cell of an image as many as a token has."""
        parts = [
            part
            for m in task.data.get("messages", ())
            for part in (m["content"] if isinstance(m["content"], list) else ())
        ]
        cells = [
            len(part.get("video", "1")) * math.prod(part["size"]) // known.sight.token_pixels**2
            for part in parts
            if known.sight and "size" in part
        ]
        return len(question_text(task)) + 4 * sum(cells)

    count = _prompt_counter(job, env, known.tokenizer, known.sight, known.max_context, sampling, shots)
    most = 0
    for task in sorted(tasks.every_task, key=task_size)[-32:]:
        n = count(task)
        if n + sampling.max_tokens > known.max_context:
            raise DataError(
                f"the prompt of task {task.id} has {n} tokens; with engine.sampling.max_tokens = {sampling.max_tokens} "
                f"that exceeds the model's context of "
                f"{known.max_context}: {_length_hint(known.max_context - sampling.max_tokens)}lower max_tokens"
            )
        most = max(most, n)
    return min(known.max_context, most + most_turns(env) * sampling.max_tokens)


def _length_hint(room: int) -> str:
    return f"leave out what is too long with task.max_prompt_tokens = {room}, or " if room > 0 else ""


def sync_of(job: Job, placed: Deployment) -> WeightUpdate:
    """The same probe through engine and trainer after every update."""
    known = placed.known
    probe = (
        Template(known.tokenizer).render_opening([{"role": "user", "content": "One, two, three."}])[:PROBE]
        if job.sync.probe
        else []
    )
    others = {name: trainer.logprobs for name, trainer in placed.trainers.items() if name != POLICY}
    return WeightUpdate(
        placed.transport,
        probe=probe,
        score=placed.trainer.logprobs,
        others=others,
        tolerance=max(probe_tolerance(known), probe_gap(job)),
        how=job.loop.in_flight,
    )


def delivery_fact(job: Job, placed: Deployment, sync: WeightUpdate) -> str:
    """Whether the trainer waits for an update (driver/weight_delivery.py), and why."""
    if not job.loop.max_staleness:
        return "the trainer waits (loop.max_staleness = 0)"
    if job.run.record:
        return "the trainer waits (the schedule of a recorded run says between which requests a version came)"
    if placed.devices.in_turn:
        return "the trainer waits (engines are on its devices)"
    if not sync.keeps_snapshots:
        return "the trainer waits (this transport keeps no published version)"
    return f"beside the next step (loop.max_staleness = {job.loop.max_staleness})"
