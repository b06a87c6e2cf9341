"""Rondel: reinforcement-learning post-training for language models. Nothing heavy is imported until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rondel.assemble.own_loop import Trainer as Trainer
    from rondel.core.types import Sampling as Sampling
    from rondel.generate.engine.notebook import Engine as Engine

_HOMES = {
    "Sampling": "rondel.core.types",
    "Task": "rondel.core.types",
    "Trajectory": "rondel.core.types",
    "Engine": "rondel.generate.engine.notebook",
    "Trainer": "rondel.assemble.own_loop",
}


def run(recipe: str | Path | dict[str, Any], *, quiet: bool = False, **sections: dict[str, Any]) -> dict[str, Any]:
    """The whole loop in a notebook or a script: `rondel.run("recipes/quickstart.toml", loop={"steps": 5})`. -> the run
    card.

    recipe    a TOML file, or its tables as dicts: {"model": {...}, "task": {...}, ...}
    sections  tables of the recipe whose keys override it

    Wherever a recipe names something of yours as "module:name", the function or class itself may stand: a reward, an
    environment, a filter, a source of tasks; task.data may be a list of rows or a DataFrame of pandas. Errors are
    `rondel.core.errors.RondelError`.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.core.errors import ConfigError, unwrap_exception_group

    for section, keys in sections.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{section} = {keys!r}; it is a table of the recipe, as in loop={{'steps': 5}}")
    overrides = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    job = Job.read(recipe, overrides)
    # a notebook's own event loop is already running in this one
    with unwrap_exception_group(), ThreadPoolExecutor(1, "rondel-run") as thread:
        return thread.submit(train, job, quiet=quiet).result()


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("rondel")
    if name not in _HOMES:
        raise AttributeError(f"module 'rondel' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
