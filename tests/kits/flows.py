"""Small flows for tests, and their engines."""

from __future__ import annotations

import asyncio
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
