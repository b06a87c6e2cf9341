"""Evaluation: the same env.run at a fixed version with a named profile, in training and afterwards.

a set ──> its tasks, `samples` draws of each ──> rewards [n tasks, s draws] ──> avg@s, pass@k, majority@k
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rondel.core.config.task import HELD_OUT, EvaluationConfig
from rondel.core.errors import ConfigError, error_boundary
from rondel.core.events import Evaluated
from rondel.core.media import message_text
from rondel.core.registry import suggest_name
from rondel.core.types import Sampling, Task, Trajectory, sample_key
from rondel.runtime.telemetry.card import normal_interval, wilson_interval
from rondel.runtime.telemetry.draw_estimates import bootstrap_interval, majority_at_k, pass_at_k
from rondel.runtime.telemetry.scores import within_unit
from rondel.score.vote import vote_of

NAMESPACE = "eval"  # its prefixes stay out of the rollouts' cache, so that a resumed run computes the same bits
SHOWN = 6
BOOTSTRAP = "bootstrap over tasks"
SET_STRIDE = 1 << 32  # between the numbers of tasks of two sets, so that none draws with the noise of another
OnProgress = Callable[[str, int, int], None]  # (set, answers done, answers in all)


@dataclass(frozen=True, slots=True)
class SetEvaluation:
    """One set at one version: what the journal keeps, and every task with its draws; right from `pass_reward` on."""

    event: Evaluated
    tasks: list[Task]
    draws: list[list[Trajectory]]  # [n tasks, s draws]
    pass_reward: float = 1.0


async def evaluate(parts: Any, step: int, on_progress: OnProgress | None = None) -> list[SetEvaluation]:
    """Every task of every set (or the first n of each), `samples` times, under the recipe's eval profile;
    failures count as wrong, as 0 or the lowest reward below it, and are reported. The set that task.data holds out comes
    first.
    """
    sets = evaluation_sets(parts.job.task.eval, parts.tasks)
    return [
        await _evaluate_set(parts, step, name, tasks, number, on_progress)
        for number, (name, tasks) in enumerate(sets.items())
    ]


async def _evaluate_set(
    parts: Any, step: int, name: str, tasks: list[Task], number: int, on_progress: OnProgress | None
) -> SetEvaluation:
    from rondel.driver.rollouts import GroupRollouts
    from rondel.generate.envs.episode import assign_parents

    began, job, samples, done = time.perf_counter(), parts.job, parts.job.task.eval.samples, 0
    sampling = evaluation_sampling(job.task.eval, parts.sampling)
    rollouts, total = GroupRollouts(parts, 1, watch=parts.step_watch), len(tasks) * samples
    if on_progress:
        on_progress(name, 0, total)

    async def draw(at: int, task: Task, sample: int) -> list[Trajectory]:
        nonlocal done

        def open_chat() -> Any:
            admission = -1 - at - number * SET_STRIDE
            return rollouts.open_chat(
                lambda turn: sample_key(job.loop.seed, admission, sample, turn), sampling, NAMESPACE
            )

        async with rollouts.watched(task):
            episode = assign_parents(await rollouts.run_episode(task, open_chat))
            if not rollouts.scores_together:
                await rollouts.score_episode(episode, task)
        done += 1
        if on_progress:
            on_progress(name, done, total)
        return episode

    async def draw_group(at: int, task: Task) -> list[Trajectory]:
        episodes = await asyncio.gather(*(draw(at, task, sample) for sample in range(samples)))
        if rollouts.scores_together:
            await rollouts.score_episodes(episodes, task)
        return [episode[0] for episode in episodes]

    draws = list(await asyncio.gather(*(draw_group(at, task) for at, task in enumerate(tasks))))
    event = _summarize(parts, step, name, tasks, draws, sampling)
    event.seconds = time.perf_counter() - began
    return SetEvaluation(event, tasks, draws, job.task.eval.pass_reward)


def _summarize(
    parts: Any, step: int, name: str, tasks: list[Task], draws: list[list[Trajectory]], sampling: Sampling
) -> Evaluated:
    job = parts.job
    scored = [[t.reward for t in own] for own in draws]
    rewards, worst = count_failures(scored)
    means, flat = [math.fsum(own) / len(own) for own in rewards], [r for own in rewards for r in own]
    low, high, how = score_interval(means, flat, job.task.eval.samples)
    request = {
        **job.task.eval.sampling,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "env": job.task.env_kind,
        "reward": job.task.reward_spec,
        "suffix": job.task.suffix,
        "examples": job.task.shown_examples,
    }
    if shots := job.task.episode.shots:
        request["shots"] = shots
    if weights := job.model.served_weights:
        request["weights"] = weights
    request["failed"] = sum(t.reward is None for own in draws for t in own)
    request |= {"failed_as": worst} if request["failed"] and worst < 0 else {}
    of: dict[str, list[float]] = {}
    for task, mean in zip(tasks, means):
        of.setdefault(task.stream, []).append(mean)
    each = {source: sum(own) / len(own) for source, own in of.items()} if parts.tasks.sources else {}
    return Evaluated(
        step,
        parts.engine.version,
        name,
        sum(means) / max(1, len(means)),
        low,
        high,
        len(tasks),
        request,
        [sample_row(task, own[0]) for task, own in list(zip(tasks, draws))[:SHOWN]],
        0.0,
        each,
        min(flat, default=None),
        max(flat, default=None),
        job.task.eval.samples,
        how,
        draw_metrics(scored, [[t.text for t in own] for own in draws], job.task.eval),
    )


def count_failures(scored: list[list[float | None]]) -> tuple[list[list[float]], float]:
    """Rewards with a number in place of each None, an answer that could not be scored, and that number: no better than
    the worst answer, for where the world pays less than nothing 0 would be the best.
    """
    worst = min([0.0, *(reward for own in scored for reward in own if reward is not None)])
    return [[worst if reward is None else reward for reward in own] for own in scored], worst


def score_interval(means: list[float], rewards: Sequence[float], samples: int) -> tuple[float, float, str]:
    """95 % interval of the mean over tasks, and how it is made. means: [n tasks], rewards: [n · samples].

    One draw a task: Wilson where rewards lie in [0, 1], else normal. Several: bootstrap over tasks, because the
    draws of one task are no independent evidence; where all tasks are equal it knows no spread, and Wilson over the
    tasks is taken.
    """
    if samples > 1 and min(means, default=0.0) < max(means, default=0.0):
        return *bootstrap_interval(means), BOOTSTRAP
    if within_unit(rewards):
        return *wilson_interval(min(math.fsum(means), float(len(means))), len(means)), "Wilson"
    return *normal_interval(means), "normal"


def draw_metrics(
    rewards: list[list[float | None]], texts: list[list[str]], given: EvaluationConfig
) -> dict[str, list[float]]:
    """{"avg@8": [value, low, high], "pass@4": ..., "majority@4": ...} of [n tasks, s draws]; none of one draw.

    What could not be scored, None, counts in the mean as `count_failures` says, and is never right. No majority where no
    draw of any task has an answer that can be compared.
    """
    if given.samples == 1 or not rewards:
        return {}
    votes = [[vote_of(text) for text in own] for own in texts]
    right = [[float(is_right(r, given.pass_reward)) for r in own] for own in rewards]
    columns = {f"avg@{given.samples}": [math.fsum(own) / len(own) for own in count_failures(rewards)[0]]}
    for k in given.reported_k:
        columns[f"pass@{k}"] = [pass_at_k(len(own), round(sum(own)), k) for own in right]
    if any(vote is not None for own in votes for vote in own):
        for k in given.reported_k:
            columns[f"majority@{k}"] = [majority_at_k(own, ok, k) for own, ok in zip(votes, right)]
    return {
        name: [math.fsum(values) / len(values), *score_interval(values, values, given.samples)[:2]]
        for name, values in columns.items()
    }


def is_right(reward: float | None, pass_reward: float) -> bool:
    """What could not be scored is wrong, where a reward of 0 would pass, too."""
    return reward is not None and reward >= pass_reward


def sample_row(task: Task, drawn: Trajectory) -> dict[str, Any]:
    """One answer as journals and pages show it."""
    asked = task.data.get("prompt")
    return {
        "prompt": message_text(task.data.get("messages", [{"content": ""}])[-1]["content"]) if asked is None else asked,
        "answer": task.data.get("answer"),
        "text": drawn.text,
        "reward": drawn.reward,
        "tokens": len(drawn.tokens),
    }


def evaluation_sets(given: EvaluationConfig, tasks: Any) -> dict[str, list[Task]]:
    """{"held_out": its first n tasks, "aime": ...}; n = 0 is all. The held-out set is first, where there is one."""
    found = ({HELD_OUT: tasks.held_out} if tasks.held_out else {}) | dict(tasks.sets)
    return {name: own[: given.n or None] for name, own in found.items()}


def evaluation_sampling(given: EvaluationConfig, rollouts: Sampling) -> Sampling:
    """How held-out tasks are sampled: greedy, or at the rollouts' temperature where each is drawn several times,
    unless the recipe says otherwise, and ending where rollouts end.
    """
    more: dict[str, Any] = {
        "temperature": 0.0 if given.samples == 1 else rollouts.temperature,
        "max_tokens": rollouts.max_tokens,
        "stop": rollouts.stop,
    }
    known = {f.name for f in fields(Sampling)} - {"n", "seed"}
    for name in given.sampling.keys() - known:
        raise ConfigError(f"task.eval.sampling has no '{name}'.{suggest_name(name, sorted(known))}")
    more |= given.sampling
    with error_boundary(ConfigError, f"task.eval.sampling = {given.sampling}"):
        bias = {int(token): value for token, value in more.get("logit_bias", {}).items()}  # keys of TOML are text
        return Sampling(**{**more, "stop": tuple(more["stop"]), "logit_bias": bias})
