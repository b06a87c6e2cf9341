"""Builds a run from its recipe: components, deployment, workers, refusals. The only place that
names concrete classes.
"""

from __future__ import annotations

from typing import Any

VERBS = {  # imported when they are asked for
    "build": "rondel.assemble.components",
    "train": "rondel.driver.controller",
    "check": "rondel.checks.recipe_check",
    "check_env": "rondel.checks.environment_check",
    "replay": "rondel.driver.replay",
    "again": "rondel.driver.replay",
    "differences": "rondel.driver.replay",
    "evaluate_checkpoint": "rondel.driver.checkpoint_evaluation",
    "evaluate_sets": "rondel.driver.checkpoint_evaluation",
    "rate": "rondel.driver.checkpoint_evaluation",
}


def __getattr__(name: str) -> Any:
    from rondel.system.interpreter import import_whole

    if name not in VERBS:
        raise AttributeError(name)
    return getattr(import_whole(VERBS[name]), name)
