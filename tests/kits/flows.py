"""Small flows for tests, their engines, and a run of recipes/flow.toml made smaller."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from rondel.core.types import Begin, Commit, Request, Route, Sampling, sample_key
from rondel.generate.engine.flow.engine import FlowEngine
from rondel.models import names
from rondel.models.flow.load import load_flow
from rondel.models.flow.loaded_flow import LoadedFlow


def flow(seed: int = 0, **sizes: Any) -> LoadedFlow:
    """A random flow whose last layer is not 0."""
    loaded = load_flow({"random": "flow_mlp", "hidden_size": 16, "num_hidden_layers": 1, "seed": seed, **sizes})
    torch.nn.init.normal_(loaded.model.leave.weight, std=0.3)
    return loaded


async def run_here(function: Any, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


def engine(loaded: LoadedFlow | None = None, **how: Any) -> FlowEngine:
    return FlowEngine(loaded or flow(), run=run_here, **how)


def asked(i: int, *, steps: int = 6, eta: float = 0.7, key: int | None = None) -> Request:
    sampling = Sampling(max_tokens=steps, temperature=eta)
    return Request([5, 40 + i % 3, 9], sampling, key=sample_key(0, i, 0) if key is None else key)


async def publish_in_place(e: FlowEngine, version: int) -> None:
    """The weights that the module has now become a version."""
    manifest = names.build_manifest(e.loaded.model, version)
    await e.receive(Begin(manifest))
    await e.receive(Route("tensor", dict(names.named_weights(e.loaded.model))))
    await e.receive(Commit(version, manifest.root))


RECIPE = Path(__file__).parents[2] / "recipes" / "flow.toml"
FAST = {
    "loop.warmup.steps": 6, "loop.warmup.groups_per_step": 8, "loop.steps": 6, "loop.groups_per_step": 4, "algo.group_size": 4,
    "model.path.hidden_size": 16, "engine.sampling.max_tokens": 4, "place.threads": 1, "run.checkpoint.every": 3,
    "run.checkpoint.keep": 2, "run.sinks": [], "task.eval.every": 0,
}  # fmt: skip


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Overrides that make recipes/flow.toml small; `loop__steps=2` sets loop.steps."""
    return {**FAST, "run.folder": str(folder), **{key.replace("__", "."): value for key, value in changes.items()}}
