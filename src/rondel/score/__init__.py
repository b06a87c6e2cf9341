"""Score: a trajectory and its task in, a number, named parts or a failure out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rondel.score.combine import Combine
from rondel.score.format import Format
from rondel.score.math import Math
from rondel.score.number import Number
from rondel.score.reasoning_gym import ReasoningGym
from rondel.words.errors import ConfigError
from rondel.words.registry import find

Spec = str | dict[str, Any]


def combine(*, parts: dict[str, Spec]) -> Combine:
    """`parts = { correct = "number", format = { kind = "format", tag = "answer", weight = 0.2 } }`; a weight is 1 unless given."""
    specs = {name: {"kind": part} if isinstance(part, str) else dict(part) for name, part in parts.items()}
    return Combine({name: (float(part.pop("weight", 1.0)), build(part)) for name, part in specs.items()})


REWARDS: dict[str, Callable[..., Any]] = {
    "number": Number,
    "math": Math,
    "format": Format,
    "reasoning_gym": ReasoningGym,
    "combine": combine,
}


def build(spec: Spec) -> Callable[..., Any]:
    """A reward from its spec: "number", "module:name", or {kind = "number", tolerance = 0.01}.

    A class is constructed with the settings; a user's function is the reward itself, with the settings as keyword arguments.
    """
    settings = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"reward {spec!r} has no 'kind'. Known: {', '.join(sorted(REWARDS))}; or your own as 'module:name'")
    factory = find("reward", kind, REWARDS)
    try:
        if kind in REWARDS or isinstance(factory, type):
            return factory(**settings)
    except TypeError as error:
        raise ConfigError(f"reward '{kind}' cannot be made from {settings}: {error}") from error
    return functools.partial(factory, **settings) if settings else factory
