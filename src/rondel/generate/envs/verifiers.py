"""Environments written for the verifiers package, as they are: their examples are the tasks,
their rollouts ask the gateway, their rubric scores. This is the classic interface of
0.3; 0.4 has tasksets and harnesses instead
(tasksets.py), and who is installed decides.

    data = { kind = "verifiers", name = "my_module:load_environment", args = { ... } }      env = "verifiers"
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ConfigError, EnvError, error_boundary
from rondel.core.registry import import_attribute
from rondel.core.types import Score, Task
from rondel.generate.envs import tasksets

if TYPE_CHECKING:
    from rondel.generate.envs.gateway.agent import Agent

EMPTY = "EmptyModelResponse"  # the policy's doing: its rubric scores that
SAID: ContextVar[list[str]] = ContextVar("said")  # errors of the rubric that scores this episode


def read_examples(name: str, split: str, args: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The rows of its data set, "train" or "eval", which the rollout gets back as they are."""
    if has_tasksets():
        yield from tasksets.read_examples(name, split, args)
        return
    env = load_verifiers(name, json.dumps(args))
    if split not in ("train", "eval"):
        raise ConfigError(f'task.data.split = \'{split}\'; an environment of verifiers has "train" and "eval"')
    with error_boundary(ConfigError, f"the {split} examples of '{name}'"):
        rows = [dict(row) for row in (env.get_dataset() if split == "train" else env.get_eval_dataset())]
    yield from rows


def agent_of_verifiers(data: dict[str, Any]) -> Agent:
    """An agent for the gateway that plays what task.data names."""
    if data.get("kind") != "verifiers":
        raise ConfigError(
            'task.env = "verifiers" plays the environment that its tasks come from: set task.data = '
            '{ kind = "verifiers", name = ... }'
        )
    name, args = str(data.get("name")), dict(data.get("args") or {})
    if has_tasksets():
        return tasksets.agent_of(name, args)
    env = load_verifiers(name, json.dumps(args))

    async def run_verifiers(task: Task, url: str, key: str) -> Score:
        import openai
        import verifiers as vf

        _install_log_handler()
        said: list[str] = []
        SAID.set(said)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None) as client:
            given: Any = dict(task.data["example"])
            done = await env.run_rollout(given, vf.OpenAIChatCompletionsClient(client), "policy", {})
        error = done.get("error")
        if error and EMPTY not in str(error):
            raise EnvError(f"the environment '{name}' of verifiers: {error}")
        if said:
            raise EnvError(f"the rubric of '{name}': {said[0]}")
        reward, metrics = done.get("reward"), done.get("metrics") or {}
        if reward is None or not math.isfinite(reward):
            raise EnvError(f"the environment '{name}' of verifiers gave the reward {reward}")
        return Score(
            float(reward), {part: float(value) for part, value in metrics.items() if isinstance(value, int | float)}
        )

    return run_verifiers


@lru_cache
def has_tasksets() -> bool:
    """Whether the installed package is one of 0.4."""
    try:
        import verifiers as vf
    except ImportError as error:
        raise ConfigError("environments of verifiers need the package: pip install 'verifiers>=0.3,<0.5'") from error
    return not hasattr(vf, "load_environment") and find_spec("verifiers.v1") is not None


@lru_cache
def _install_log_handler() -> None:
    """A rubric takes a reward function that raises for one that returned 0, and says so in its log alone."""

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "rubric" in record.name.lower() and record.getMessage().startswith("Error calling"):
                SAID.get([]).append(record.getMessage())

    logging.getLogger("verifiers").addHandler(Ear(logging.ERROR))


@lru_cache
def load_verifiers(name: str, args: str) -> Any:
    """ "module:name" is an environment, or a function that makes one; anything else an id that verifiers knows."""
    try:
        import verifiers as vf

        load, base = vf.load_environment, vf.Environment
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "this verifiers has neither its classic interface nor tasksets: pip install 'verifiers>=0.3,<0.5'"
        ) from error
    given = json.loads(args)
    with error_boundary(ConfigError, f"task.data.name = '{name}': loading it"):
        if ":" not in name:
            env = load(name, **given)
        else:
            env = import_attribute("environment of verifiers", name)
            env = env if isinstance(env, base) else env(**given)
    if not isinstance(env, base):
        raise ConfigError(f"task.data.name = '{name}' is {env!r:.80}, no environment of verifiers")
    return env
