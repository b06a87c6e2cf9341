"""Evaluation: the same env.run at a fixed version with a named profile, in training and afterwards."""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields
from typing import Any

from rondel.core.config.task import EvaluationConfig
from rondel.core.errors import ConfigError, error_boundary
from rondel.core.events import Evaluated
from rondel.core.media import message_text
from rondel.core.registry import suggest_name
from rondel.core.types import Sampling, Task, Trajectory, sample_key
from rondel.runtime.telemetry.card import normal_interval, wilson_interval
from rondel.runtime.telemetry.scores import within_unit

NAMESPACE = "eval"  # its prefixes stay out of the rollouts' cache, so that a resumed run computes the same bits
SHOWN = 6


async def evaluate(parts: Any, step: int) -> Evaluated:
    """Every held-out task once (or the first n), under the recipe's eval profile;
    failures count as wrong and are reported.
    """
    from rondel.driver.rollouts import GroupRollouts
    from rondel.generate.envs.episode import assign_parents

    began, job = time.perf_counter(), parts.job
    tasks = evaluated_tasks(job.task.eval, parts.tasks.held_out)
    sampling = evaluation_sampling(job.task.eval, parts.sampling)
    rollouts = GroupRollouts(parts, 1)

    async def evaluate_task(number: int, task: Task) -> Trajectory:
        def open_chat() -> Any:
            return rollouts.open_chat(lambda turn: sample_key(job.loop.seed, -1 - number, 0, turn), sampling, NAMESPACE)

        episode = assign_parents(await rollouts.run_episode(task, open_chat))
        await rollouts.score_episode(episode, task)
        return episode[0]

    done = await asyncio.gather(*(evaluate_task(i, t) for i, t in enumerate(tasks)))
    rewards = [t.reward or 0.0 for t in done]
    total = sum(rewards)
    low, high = wilson_interval(total, len(tasks)) if within_unit(rewards) else normal_interval(rewards)
    samples = [
        {
            "prompt": task.data["prompt"]
            if "prompt" in task.data
            else message_text(task.data.get("messages", [{"content": ""}])[-1]["content"]),
            "answer": task.data.get("answer"),
            "text": t.text,
            "reward": t.reward,
            "tokens": len(t.tokens),
        }
        for task, t in list(zip(tasks, done))[:SHOWN]
    ]
    request = {
        **job.task.eval.sampling,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "env": job.task.env_kind,
        "reward": job.task.reward_spec,
        "suffix": job.task.suffix,
        "examples": job.task.shown_examples,
    }
    request["failed"] = sum(t.reward is None for t in done)
    of: dict[str, list[float]] = {}
    for task, reward in zip(tasks, rewards):
        of.setdefault(task.stream, []).append(reward)
    each = {name: sum(own) / len(own) for name, own in of.items()} if parts.tasks.sources else {}
    return Evaluated(
        step,
        parts.engine.version,
        "held_out",
        total / max(1, len(tasks)),
        low,
        high,
        len(tasks),
        request,
        samples,
        time.perf_counter() - began,
        each,
        min(rewards, default=None),
        max(rewards, default=None),
    )


def evaluated_tasks(given: EvaluationConfig, held_out: list[Task]) -> list[Task]:
    """The first n held-out tasks; 0 is all."""
    return held_out[: given.n or None]


def evaluation_sampling(given: EvaluationConfig, rollouts: Sampling) -> Sampling:
    """How held-out tasks are sampled: greedy, unless the recipe says otherwise, and ending where rollouts end."""
    more: dict[str, Any] = {
        "temperature": 0.0,
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
