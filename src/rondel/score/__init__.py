"""Score: a trajectory and its task in, a number, named parts or a failure out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.registry import ImportedOnUse, find_registered, refuse_uncallable
from rondel.core.types import Task
from rondel.score.combine import By, Combine

Spec = str | dict[str, Any]
Lent = dict[str, Callable[..., Any]]  # called with the setting of that name, if there is one


def combine_rewards(*, parts: dict[str, Spec], **lent: Callable[..., Any]) -> Combine:
    """`parts = { correct = "number", format = { kind = "format", tag = "answer", weight =
    0.2 } }`; a weight is 1 unless given.
    """
    specs = {name: {"kind": part} if isinstance(part, str) else dict(part) for name, part in parts.items()}
    return Combine({name: (float(part.pop("weight", 1.0)), build_reward(part, lent)) for name, part in specs.items()})


def reward_by_field(*, parts: dict[str, Spec], field: str = "source", **lent: Callable[..., Any]) -> By:
    """`field = "source", parts = { sums = "number", proofs = "math" }`: which of them
    judges a task, a field of its data says.
    """
    return By(field, {name: build_reward(part, lent) for name, part in parts.items()})


# a worker imports what its recipe asks for: every run waits for its first one
REWARDS: dict[str, Callable[..., Any]] = ImportedOnUse(
    {
        "number": "rondel.score.number:Number",
        "near": "rondel.score.near:Near",
        "digit": "rondel.score.digit:Digit",
        "motion": "rondel.score.motion:Motion",
        "math": "rondel.score.math:Math",
        "code": "rondel.score.code:Code",
        "citation": "rondel.score.citation:Citation",
        "format": "rondel.score.format:Format",
        "reasoning_gym": "rondel.score.reasoning_gym:ReasoningGym",
        "combine": combine_rewards,
        "by": reward_by_field,
        "judge": "rondel.score.judge:Judge",
        "remote": "rondel.score.remote:RemoteReward",
        "model": "rondel.score.model:RewardModel",
        "process": "rondel.score.process:ProcessReward",
    }
)


def reward_urls(spec: Spec) -> list[str]:
    """Where a reward goes with every call: what may have a price."""
    if isinstance(spec, str):
        return []
    return [spec[key] for key in ("url",) if key in spec] + [
        url for part in dict(spec.get("parts", {})).values() for url in reward_urls(part)
    ]


def reward_kinds(spec: Spec) -> set[str]:
    """The kinds of a reward and of its parts."""
    settings: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else spec
    return {settings["kind"]}.union(*map(reward_kinds, dict(settings.get("parts", {})).values()))


def code_sandboxes(spec: Spec) -> list[Spec]:
    """Where the code rewards among a reward and its parts run what the policy wrote."""
    settings: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else spec
    own = [settings.get("sandbox", "process")] if settings["kind"] == "code" else []
    return own + [one for part in dict(settings.get("parts", {})).values() for one in code_sandboxes(part)]


def has_offload(spec: Spec) -> bool:
    """Whether a model of the reward, or of a part of it, is to leave its device to the trainer."""
    settings: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else spec
    own = settings.get("kind") in ("model", "process") and settings.get("offload") is True
    return own or any(map(has_offload, dict(settings.get("parts", {})).values()))


def examine_task(spec: Spec, task: Task) -> None:
    """DataError for a task that this reward cannot judge whatever the answer is, as far as its data says."""
    settings: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else spec
    parts: dict[str, Spec] = settings.get("parts", {})
    if settings["kind"] == "code":
        from rondel.score.code_tests import read_tests

        read_tests(task)
    elif settings["kind"] == "combine":
        for part in parts.values():
            examine_task(part, task)
    elif settings["kind"] == "by" and (source := str(task.data.get(settings.get("field", "source")))) in parts:
        examine_task(parts[source], task)


def build_reward(spec: Spec, lent: Lent | None = None) -> Callable[..., Any]:
    """A reward from its spec: "number", "module:name", or {kind = "number", tolerance = 0.01}.

    A class is constructed with the settings; a user's function is the reward itself,
    with the settings as keyword arguments. `lent`: what is made for rewards that have a
    parameter of that name: sandbox, deadline.
    """
    settings = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(
            f"reward {spec!r} has no 'kind'. Known: {', '.join(sorted(REWARDS))}; or your own as 'module:name'"
        )
    factory = find_registered("reward", kind, REWARDS)
    if kind in REWARDS and "deadline" in settings:
        raise ConfigError(f"reward '{kind}' has no setting 'deadline': task.reward.timeout is its deadline")
    if kind in REWARDS and not isinstance(box := settings.get("sandbox", "process"), str | dict):
        raise ConfigError(f"reward '{kind}': sandbox = {box!r}; it is a kind, or {{ kind = \"container\", ... }}")
    settings |= _lent_arguments(factory, lent or {}, settings)
    try:
        if kind in REWARDS or isinstance(factory, type):
            return factory(**settings)
    except TypeError as error:
        raise ConfigError(f"reward '{kind}' cannot be made from {settings}: {error}") from error
    reward: Any = functools.partial(factory, **settings) if settings else factory
    for trait in ("groupwise", "maximum"):
        if settings and hasattr(factory, trait):
            setattr(reward, trait, getattr(factory, trait))
    refuse_uncallable(f"reward '{kind}'", reward, "trajectory", "task")
    return reward


def _lent_arguments(factory: Callable[..., Any], lent: Lent, settings: dict[str, Any]) -> dict[str, Any]:
    if factory in (combine_rewards, reward_by_field):  # for their parts
        return dict(lent)
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return {}
    return {
        name: make(settings[name]) if name in settings else make()
        for name, make in lent.items()
        if name in known and (name not in settings or isinstance(settings[name], str | dict))
    }
