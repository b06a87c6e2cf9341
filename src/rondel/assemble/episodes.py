"""What the conversations of an episode share, as the recipe has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rondel.core.config.environment import EpisodeConfig
from rondel.core.errors import ConfigError
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.episode_budget import EpisodeBudget
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.template import Messages
from rondel.runtime.journal.command_log import EpisodeCommandLog


def episodes_of(
    section: EpisodeConfig, env: Any, tokenizer: Any, shots: Mapping[str, Messages]
) -> Callable[[], EpisodeState]:
    """-> what makes the state of a new episode. ConfigError where task.env.drift could have no effect."""
    b, drift = section.budget, section.drift
    limits, drops = (b.tokens, b.turns, b.seconds, b.cost), b.over == "drop"
    if drops and all(limit is None for limit in limits):
        raise ConfigError(
            "task.env.budget.over = 'drop' without a budget: set tokens, turns, seconds or cost beside it"
        )
    if drift != "keep" and isinstance(env, SingleTurn):
        raise ConfigError(
            f"task.env.drift = '{drift}' with an environment of one turn, whose prompt is always what the chat "
            "template writes; leave it out, or choose an environment with several turns"
        )
    if drift != "keep" and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"task.env.drift = '{drift}' with a tokenizer without a chat template, which alone could differ; leave it "
            "out, or take an instruct model"
        )
    if all(limit is None for limit in limits):
        return partial(EpisodeState, drift=drift, shots=shots)
    return lambda: EpisodeState(EpisodeBudget(*limits), drift, drops, shots=shots)


def command_log_of(folder: Path | None) -> EpisodeCommandLog | None:
    """What the sandboxed episodes of a run did, where it has a folder."""
    return None if folder is None else EpisodeCommandLog(folder / "wal" / "commands")
