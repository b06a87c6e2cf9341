"""Builds a run from its recipe: components, deployment, workers, refusals. The only place that
names concrete classes.
"""

from __future__ import annotations

from typing import Any

VERBS = {  # imported when they are asked for
    "build": "assemble.components",
    "train": "run.controller",
    "check": "checks.recipe_check",
    "check_env": "checks.environment_check",
    "replay": "run.replay",
    "again": "run.replay",
    "differences": "run.replay",
    "evaluate_checkpoint": "run.checkpoint_evaluation",
    "rate": "run.checkpoint_evaluation",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in VERBS:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"rondel.{VERBS[name]}"), name)
