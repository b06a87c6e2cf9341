"""`rondel check`: all that can be wrong before an hour is spent."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from rondel.assemble.components import TOOLS, build, refuse_recipe
from rondel.assemble.facts import batch_line
from rondel.assemble.refusals import refuse_offloaded_reward
from rondel.assemble.run_components import Components
from rondel.checks.layout_check import check_layouts
from rondel.checks.progress import Say, silent, slow_part
from rondel.checks.score_check import check_scores
from rondel.checks.self_test import self_test
from rondel.checks.special_token_check import all_tasks, read_as_text
from rondel.core.config.job import Job
from rondel.core.errors import CheckpointError, ConfigError, EnvError, RondelError, SandboxError
from rondel.core.protocols import DemonstratingEnv
from rondel.core.types import Failed, Group, Slot, Task
from rondel.driver.phases import explain_silence
from rondel.driver.rollouts import prepare, rollouts_of
from rondel.generate.envs.python import python_tool
from rondel.planner.resolve import free_memory
from rondel.runtime.devices import prepare_process
from rondel.runtime.sandbox.recipe import describe, sandbox_of
from rondel.score import code_sandboxes
from rondel.score.preflight import GROUPS, CheckFinding
from rondel.train.checkpoint import Checkpoints


def check(job: Job, *, asked: bool = False, say: Say = silent) -> list[CheckFinding]:
    """The recipe, its data, the reward on gold, empty and wrong answers, the signal,
    memory, disk, and a few steps at lr = 0.

    The steps are taken if the model is small, or `asked` for. `say` hears what takes longer than some seconds.
    """
    prepare_process()
    try:
        refuse_recipe(job)  # as it is laid over processes; the parts are looked at in this one
        with slow_part(say, "loading the model and the tasks"):
            parts = build(job.on_one_device())
    except RondelError as error:
        return [CheckFinding("recipe", False, str(error))]
    try:
        found = [
            CheckFinding("recipe", True, f"{parts.row.name} on {parts.model_info.name}: {batch_line(job)}"),
            _check_tasks(parts),
        ]
        if told := read_as_text(all_tasks(parts.tasks, parts.shown), parts.model_info.tokenizer):
            found.append(CheckFinding("control tokens", True, told))
        found += [CheckFinding(f"policy {name}", True, _describe_policy(parts, name)) for name in job.policies]
        found += [*check_layouts(job, parts), *_check_reward_device(job, parts)]
        found += _check_sandboxes(job)
        found += asyncio.run(_check_live(parts, asked=asked, say=say))
        return [*found, _check_memory(parts), _check_disk(parts)]
    finally:
        parts.close()


def _check_reward_device(job: Job, parts: Components) -> list[CheckFinding]:
    """A reward of the user's that leaves its device to the trainer says so once it is built, and here that is in one
    process.
    """
    try:
        if parts.pool.naps:
            refuse_offloaded_reward(job)
    except ConfigError as error:
        return [CheckFinding("reward: device", False, str(error))]
    return []


def _describe_policy(parts: Components, name: str) -> str:
    """Who plays it, and what becomes of it."""
    agents = ", ".join(agent for agent, plays in parts.job.agent_policies.items() if plays == name)
    lr = parts.job.of_policy(name).trainer.lr
    return f"plays {agents} with {parts.placed.others[name].name}, " + (
        "frozen" if parts.job.policies[name].frozen else f"lr {lr:g}"
    )


def _check_tasks(parts: Components) -> CheckFinding:
    t = parts.tasks
    dropped = {
        f"duplicate{'s' * (t.duplicates != 1)}": t.duplicates,
        "that the evaluation contains": t.leaked,
        "with too long a prompt": t.too_long,
    }
    left_out = ", ".join(f"{n} {why}" for why, n in dropped.items() if n) or "none"
    shown = f"{len(t.shots)} shown before every prompt, " if t.shots else ""
    message = f"{len(t.train)} to train on, {shown}{len(t.held_out)} held out; left out: {left_out}"
    message += "".join(f"; {len(own)} in task.eval.sets.{name}" for name, own in t.sets.items())
    if {task.id for task in t.held_out} & {task.id for task in t.train}:
        message += ": evaluated are the prompts that are trained, under other noise"
    if t.evaluated:
        return CheckFinding("tasks", True, message)
    return CheckFinding(
        "tasks",
        False,
        f"{message}: nothing to measure progress with",
        "set task.data.holdout = 50, or eval_path for files",
    )


def _check_sandboxes(job: Job) -> list[CheckFinding]:
    """Where code of the policy runs, and behind what; a recipe that has no place for it was not built."""
    env = job.task.env_settings
    python = "python" in env.get("tools", ())
    specs = [env.get("sandbox", "process")] if python else []
    specs += code_sandboxes(job.task.reward_spec)
    found = []
    for number, spec in enumerate(specs):
        if spec not in specs[:number]:
            try:
                found.append(CheckFinding("sandbox", True, describe(sandbox_of(spec))))
            except SandboxError as error:
                found.append(CheckFinding("sandbox", False, str(error), "see `rondel sandbox`"))
    return [*found, _python_tool(specs[0])] if python else found


def _python_tool(spec: str | dict[str, Any]) -> CheckFinding:
    made = TOOLS["python"] if spec == "process" else python_tool(lambda: sandbox_of(spec))
    tool = made(Task("check", "tools", {}))
    began = time.perf_counter()
    try:
        said = tool.python("6 * 7").strip()
    except EnvError as error:
        said = str(error)
    finally:
        tool.close()
    if said == "42":
        return CheckFinding(
            "python tool", True, f"answers, the first call in {1e3 * (time.perf_counter() - began):.0f} ms"
        )
    return CheckFinding(
        "python tool", False, f"6 * 7 is answered with {said!r:.200}", "see `rondel sandbox` for what works here"
    )


async def _check_live(parts: Components, *, asked: bool, say: Say) -> list[CheckFinding]:
    if isinstance(parts.env, DemonstratingEnv):
        found = [
            CheckFinding("reward", True, "not tried on texts, since it reads points; see the signal on drawn ones")
        ]
    else:
        with slow_part(say, "scores of gold, empty and wrong answers"):
            found = await check_scores(parts)
    await parts.sync(parts.trainer, parts.engine)
    rollouts = rollouts_of(parts)
    tasks = parts.tasks.train[:GROUPS]

    async def attempt_group(number: int) -> Group:
        group = await rollouts.generate_group(Slot(number, tasks[number], 0))
        await rollouts.score(group)
        return group

    with slow_part(say, f"signal: {len(tasks)} groups of {parts.job.algo.group_size} answers are drawn"):
        groups = list(await asyncio.gather(*(attempt_group(n) for n in range(len(tasks)))))
    return [*found, *_check_signal(parts, groups), *await self_test(parts, groups, prepare, asked=asked, say=say)]


def _check_signal(parts: Components, groups: list[Group]) -> list[CheckFinding]:
    answers = [t for g in groups for t in g.trajectories]
    silent = parts.job.policies.keys() - {t.policy for t in answers}
    failed = [t.score for t in answers if isinstance(t.score, Failed)]
    mixed = sum(len(set(g.rewards)) > 1 for g in groups)
    mean = sum(sum(g.rewards) for g in groups) / max(1, sum(len(g.rewards) for g in groups))
    cut = sum(t.is_truncated for t in answers) / len(answers)
    told = f"{mixed} of {len(groups)} groups have mixed rewards, mean reward {mean:.2f}"
    if all(len(g.policy_samples) == 1 for g in groups):  # each is compared with the others of a step
        mixed = len({reward for g in groups for reward in g.rewards}) - 1
        told = f"{1 + mixed} different rewards in {len(groups)} groups of one, mean reward {mean:.2f}"
    warm = parts.job.loop.warmup.steps
    found = [
        CheckFinding(
            "signal",
            mixed > 0 or warm > 0,
            told + " (before the supervised phase)" * (warm > 0),
            "an easier or harder task, a larger group_size, or a supervised phase first (loop.warmup)",
        ),
        CheckFinding(
            "length",
            cut < 0.9 or warm > 0,
            f"{cut:.0%} of the answers hit engine.sampling.max_tokens",
            "raise engine.sampling.max_tokens, or ask for shorter answers",
        ),
    ]
    found += [
        CheckFinding(
            f"policy {name}",
            False,
            "no agent that it plays wrote anything",
            f"name its agents as the environment does: policies.{name}.agents",
        )
        for name in sorted(silent)
    ]
    if not any(t.written or t.steps for t in answers):
        cause, remedy = explain_silence(answers)
        found.append(
            CheckFinding(
                "rollouts",
                False,
                f"the policy wrote nothing in {len(answers)} answers, so there is nothing to train: {cause}",
                remedy,
            )
        )
    if failed:
        found.append(
            CheckFinding(
                "rollouts",
                False,
                f"{len(failed)} of {len(answers)} answers could not be scored: {failed[0].reason} {failed[0].detail}",
            )
        )
    return found


def _check_memory(parts: Components) -> CheckFinding:
    trainers = parts.placed.trainers.values()
    owners = [owner for t in trainers for owner in (t.weights, *([t.critic.weights] if t.critic else []))]
    held = parts.trainer.offload.memory()
    loaded = sum(held.get(name, 0) for name in ("weights", "critic"))  # a frozen base included
    loaded += parts.placed.frozen_bytes
    needed = sum(4 * size * (4 if copy else 3) for owner in owners for size, copy in zip(owner.sizes, owner.has_copies))
    free = free_memory()  # beside the copy that computes: master, gradient, two moments
    several = f" of {len(trainers)} policies" if len(trainers) > 1 else ""
    message = (
        f"weights{several} {_format_bytes(loaded)}; training needs {_format_bytes(needed)} more, "
        f"{_format_bytes(free)} are free"
    )
    return CheckFinding("memory", needed < free, message, "a smaller model, or a machine with more memory")


def _check_disk(parts: Components) -> CheckFinding:
    folder = Path(parts.job.run.folder)
    existing = next((p for p in [folder, *folder.parents] if p.is_dir()), Path(tempfile.gettempdir()))
    needed, kept = parts.placed.checkpoint_bytes, parts.job.run.checkpoint
    try:
        Checkpoints(existing, kept.keep, bool(kept.best)).check_disk(needed)
    except CheckpointError as error:
        return CheckFinding("disk", False, str(error))
    return CheckFinding(
        "disk",
        True,
        f"a checkpoint takes {_format_bytes(needed)}; the newest {kept.keep} are "
        f"kept{', and the best' * bool(kept.best)}",
    )


def _format_bytes(n: float) -> str:
    """1.4e6 -> "1.4 MB": a small model's weights are not 0.00 GB."""
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
