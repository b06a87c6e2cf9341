"""Small flows for tests, and their engines."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import (
    Begin,
    Commit,
    Group,
    Request,
    Route,
    Sampling,
    Score,
    Task,
    Trajectory,
    sample_key,
)
from rondel.generate.engine.flow.engine import FlowEngine
from rondel.models import names
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel


def flow(seed: int = 0, **sizes: Any) -> LoadedModel:
    """A random flow of which no layer is 0."""
    loaded = load_model({"random": "flow_mlp", "hidden_size": 16, "num_hidden_layers": 1, "seed": seed, **sizes})
    for name, weight in loaded.model.named_parameters():
        if name.endswith(("leave.weight", "modulation.weight")):
            torch.nn.init.normal_(weight, std=0.3)
    return loaded


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2}
FLOWS: dict[str, dict[str, Any]] = {  # by name, for trainers in other processes
    "points": {"random": "flow_mlp", "num_hidden_layers": 2},
    "images": {"random": "flow_dit", "dim": 16, **SMALL},
    "videos": {  # 3·3·2 = 18 patches of 2·2·2 numbers
        "random": "flow_video",
        "frames": 3,
        "height": 6,
        "width": 4,
        "channels": 2,
        "intermediate_size": 24,
        **SMALL,
    },
}


def drawn_groups(loaded: LoadedModel, lengths: list[list[int]], seed: int = 0) -> list[Group]:
    """Groups of chains of so many steps that the engine of this model draws, with rewards of their own."""

    async def draw(e: FlowEngine, number: int, i: int, n: int) -> Trajectory:
        prompt = [5 + number, 40, 9 + number % 3][: 1 + number % 3]
        request = Request(prompt, Sampling(max_tokens=n, temperature=0.7), key=sample_key(seed, number, i))
        done, t = await e.generate(request), Trajectory(score=Score(float(np.cos(7.0 * i + number + seed))))
        t.extend(prompt)
        t.extend(done.tokens, logprobs=done.logprobs, versions=[0] * n, steps=done.steps)
        return t

    async def draw_all() -> list[Group]:
        e, groups = engine(loaded), []
        for number, own in enumerate(lengths):
            chains = await asyncio.gather(*(draw(e, number, i, n) for i, n in enumerate(own)))
            groups.append(Group(number, Task(f"t{number}", "flow", {}), list(chains), 0))
        return groups

    return asyncio.run(draw_all())


async def run_here(function: Any, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


def engine(loaded: LoadedModel | None = None, **how: Any) -> FlowEngine:
    return FlowEngine(loaded or flow(), run=run_here, **how)


def asked(i: int, *, steps: int = 6, eta: float = 0.7, key: int | None = None) -> Request:
    sampling = Sampling(max_tokens=steps, temperature=eta)
    return Request([5, 40 + i % 3, 9], sampling, key=sample_key(0, i, 0) if key is None else key)


def flown_groups(seed: int = 0) -> list[Group]:
    """Chains of 1 to 9 steps under prompts of 1 to 6 tokens, a group of one among them."""
    noise = np.random.default_rng(seed)

    def chain(prompt: list[int], n: int) -> Trajectory:
        points = noise.normal(size=(2, n, 2))
        steps = ContinuousSteps.of(
            *points,
            sigma=noise.uniform(size=n),
            scale_x=noise.normal(size=n),
            scale_v=-0.2,
            std=noise.uniform(0.5, 1.5, n),
        )
        t = Trajectory(score=Score(float(noise.normal())))
        t.extend(prompt)
        t.extend(range(n), logprobs=noise.normal(-1, 1, n).tolist(), versions=[0] * n, steps=steps)
        return t

    def group(number: int, lengths: list[int]) -> Group:
        prompt = noise.integers(5, 100, number).tolist()
        return Group(number, Task(f"t{number}", "flow", {}), [chain(prompt, n) for n in lengths], 0)

    return [group(3, [1, 9, 2]), group(1, [4]), group(6, [5, 5, 5, 1]), group(2, [7, 3])]


async def publish_in_place(e: FlowEngine, version: int) -> None:
    """The weights that the module has now become a version."""
    manifest = names.build_manifest(e.loaded.model, version)
    await e.receive(Begin(manifest))
    await e.receive(Route("tensor", dict(names.named_weights(e.loaded.model))))
    await e.receive(Commit(version, manifest.root))


def corners(n: int = 4) -> dict[str, Any]:
    """Points of a user's own: {prompt: points}."""
    return {"low": [[-1.0, -1.0, -1.0]] * n, "high": [[1.0, 1.0, 1.0]] * n}


def clips(n: int = 4, dim: int = 144) -> dict[str, Any]:
    """Latents of the "videos" above, bright or dark."""
    noise = np.random.default_rng(0)
    return {name: level + 0.1 * noise.normal(size=(n, dim)) for name, level in (("day", 1.0), ("night", -1.0))}


def nowhere() -> dict[str, Any]:
    return {"gone": []}
