"""Environments written for verifiers 0.4: a taskset says what is asked and what it was worth,
a harness is the agent, and both are packages.

    data = { kind = "verifiers", name = "my_taskset", args = { taskset = { ... }, agent
    = { harness = { id = "null" } } } }

`args` is the package's own `[env]` block without `taskset.id`, which `name` is. The harness
asks the package's interception server, that the gateway, and the gateway the policy; the rewards
that the task recorded on the trace are the score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ConfigError, EnvError, error_boundary
from rondel.core.types import Score, Task

if TYPE_CHECKING:
    from rondel.generate.envs.gateway.agent import Agent

# where a harness runs unless `args` says: the package's own choice is a machine of its makers
LOCAL = {"type": "subprocess"}


def read_examples(name: str, split: str, args: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """A row for each task, with its place in the taskset."""
    if split != "train":
        raise ConfigError(
            f"task.data.split = '{split}'; a taskset of verifiers 0.4 has no splits: use holdout, or what its own args "
            f"say"
        )
    for place, task in enumerate(load_taskset(name, json.dumps(args))[1]):
        yield {
            "prompt": task.data.prompt_text,
            "place": place,
            "task": task.data.model_dump(mode="json", exclude_none=True),
        }


def agent_of(name: str, args: dict[str, Any]) -> Agent:
    """An agent for the gateway that plays tasks of this taskset."""
    config, tasks, role = load_taskset(name, json.dumps(args))

    async def run_taskset(task: Task, url: str, key: str) -> Score:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment

        client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="RONDEL_NO_KEY", headers={"x-api-key": key})
        env = load_environment(config)  # its own: what it serves ends with the episode
        async with env.serving():
            episode = await env.run_episode(
                tasks[task.data["example"]["place"]], vf.ModelContext(model="policy", client=client)
            )
        traces = [trace for trace in episode.traces if trace.agent.name == role]
        if errors := [*episode.errors, *(trace.last_error for trace in traces if not trace.ok and trace.last_error)]:
            raise EnvError(f"the taskset '{name}' of verifiers: {errors[0].type}: {errors[0].message}"[:1000])
        if len(traces) != 1:
            raise EnvError(
                f"the taskset '{name}' of verifiers ran its agent {len(traces)} times; what one of them was worth "
                f"cannot be told"
            )
        (trace,) = traces
        if (
            not trace.rewards
            or any(reward is None for reward in trace.rewards.values())
            or not math.isfinite(trace.reward)
        ):
            raise EnvError(f"the taskset '{name}' of verifiers gave the rewards {dict(trace.rewards)}"[:300])
        parts = {part: reward.value for part, reward in trace.rewards.items()} | {
            k: v for k, v in trace.metrics.items() if v is not None
        }
        return Score(float(trace.reward), parts)

    return run_taskset


@lru_cache
def load_taskset(name: str, args: str) -> tuple[Any, list[Any], str]:
    """-> the environment's config, its tasks, and the role that is trained."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, load_environment

    given = json.loads(args)
    size = given.pop("size", None)
    if ":" in name:
        raise ConfigError(
            f"task.data.name = '{name}'; verifiers 0.4 takes the id or the module of a package whose __all__ has its "
            f"Taskset"
        )
    with error_boundary(ConfigError, f"task.data.name = '{name}': loading it"):
        kind = environment_class(name, given.get("id", ""))
        shape: Any = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
        block = {**given, "taskset": {**given.get("taskset", {}), "id": name}}
        for role in (
            role for role, field in shape.model_fields.items() if role in agent_config_fields(shape.model_construct())
        ):
            block[role] = _local_harness(name, role, dict(given.get(role) or {}))
        config = shape.model_validate(block)
        env = load_environment(config)
        if not env.taskset.bounded and not size:
            raise ConfigError("it has no end: say how many of its tasks, args = { size = 1000 }")
        tasks = list(islice(env.taskset, size))
    mine = [role for role, spec in agent_config_fields(config).items() if spec.client is None]
    if len(mine) != 1:
        raise ConfigError(
            f"task.data.name = '{name}': its roles {', '.join(mine)} would all ask the policy, and one is trained "
            f"here: give the others a client of "
            "their own, args = { ROLE = { client = { base_url = ... } } }"
        )
    return config, tasks, mine[0]


def _local_harness(name: str, role: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A harness that carries out nothing, here, unless `args` says another; what carries out
    what a policy writes must have been told where.
    """
    from verifiers.v1.utils.loaders import default_harness_id, harness_class

    harness = dict(spec.get("harness") or {})
    own = default_harness_id(name)
    harness.setdefault("id", "null" if own == "bash" else own)
    if "runtime" not in spec and harness_class(harness["id"]).EXECUTES_CODE:
        raise ConfigError(
            f"the harness '{harness['id']}' carries out what the policy writes: say where, args = "
            f"{{ {role} = {{ runtime = {{ type = 'docker' }} }} }} "
            "('subprocess' is this machine, with the rights of the run)"
        )
    return {"runtime": LOCAL, **spec, "harness": harness}
