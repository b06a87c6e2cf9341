"""Control tokens that tasks spell, and what a chat template cannot write: found out before the weights are loaded."""

from __future__ import annotations

from typing import Any

from rondel.core.errors import ConfigError, TemplateError
from rondel.core.types import Task
from rondel.driver.demonstration_stream import DemonstrationStream
from rondel.generate.envs.agents import Agents
from rondel.generate.envs.gym import Gym
from rondel.generate.envs.sources import TaskSet, control_tokens_in
from rondel.generate.envs.tools import Tools
from rondel.generate.template import Template
from rondel.text.tokenization import SPLIT, special_tokens


def all_tasks(tasks: TaskSet, shown: list[DemonstrationStream]) -> list[Task]:
    """Those of a run, with those that are shown beside."""
    own = tasks.every_task
    known = {task.id for task in own}
    return [*own, *(task for beside in shown for task in beside.tasks if task.id not in known)]


def read_as_text(tasks: list[Task], tokenizer: Any) -> str:
    """Which tasks spell control tokens that are read as text; "" where none does."""
    special = special_tokens(tokenizer)
    found = [
        (task, names) for task in tasks if task.data.get(SPLIT, True) and (names := control_tokens_in(task, special))
    ]
    if not found:
        return ""
    task, names = found[0]
    who = f"{len(found)} tasks spell" if len(found) > 1 else "1 task spells"
    of = f" of source '{task.data['source']}'" if "source" in task.data else ""
    return (
        f"{who} control tokens, as {task.id}{of} does with {names[0]}: they are read as text. If the data means them: "
        f"task.data.{SPLIT} = false"
    )


def refuse_idle_split(tasks: list[Task], tokenizer: Any) -> None:
    """Data that is said to mean control tokens, and spells none."""
    special, means = special_tokens(tokenizer), dict[str, bool]()  # source -> whether it spells any
    for task in tasks:
        if not task.data.get(SPLIT, True):
            means[task.stream] = means.get(task.stream, False) or bool(control_tokens_in(task, special))
    if idle := next((source for source, spells in means.items() if not spells), None):
        known = ", ".join(list(special.names)[:8]) or "none"
        raise ConfigError(
            f"task.data.{SPLIT} = false has no effect: no question or answer of '{idle}' spells a control token of the "
            f"model ({known}). Remove it"
        )


def refuse_deaf_template(env: Any, tokenizer: Any) -> None:
    """A chat template that cannot append what the environment says after the policy's first turn."""
    for one in getattr(env, "envs", {"": env}).values():
        role = "tool" if isinstance(one, Tools) else "user"
        if isinstance(one, Tools | Gym | Agents) and one.turns > 1:
            try:
                Template(tokenizer).render_after_turn([], [{"role": role, "name": "name", "content": "content"}])
            except TemplateError as error:
                raise ConfigError(f"task.env: {error}") from error
