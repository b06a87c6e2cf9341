"""Rondel: reinforcement-learning post-training for language models. Nothing heavy is imported until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rondel.core.types import Sampling as Sampling
    from rondel.generate.engine.notebook import Engine as Engine

_HOMES = {
    "Sampling": "rondel.core.types",
    "Task": "rondel.core.types",
    "Trajectory": "rondel.core.types",
    "Engine": "rondel.generate.engine.notebook",
}


def run(recipe: str, *, quiet: bool = False, **sections: dict[str, Any]) -> dict[str, Any]:
    """The whole loop in a notebook: `rondel.run("recipes/quickstart.toml", loop={"steps": 5})`. -> the run card.

    Keyword arguments are sections of the recipe whose keys override it. Errors are `rondel.core.errors.RondelError`.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.core.errors import unwrap_exception_group

    overrides = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    job = Job.read(recipe, overrides)
    # a notebook's own event loop is already running in this one
    with unwrap_exception_group(), ThreadPoolExecutor(1, "rondel-run") as thread:
        return thread.submit(train, job, quiet=quiet).result()


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'rondel' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
