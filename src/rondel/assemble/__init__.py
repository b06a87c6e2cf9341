"""Job -> parts -> a run. The only place that may name concrete classes."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Each verb lives in its own file and is imported when it is asked for."""
    import importlib

    verbs = {
        "build": "parts",
        "train": "running",
        "check": "checking",
        "check_env": "rehearsal",
        "replay": "replaying",
        "again": "replaying",
        "differences": "replaying",
        "evaluate_checkpoint": "evaluating",
        "rate": "evaluating",
    }
    if name not in verbs:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"rondel.assemble.{verbs[name]}"), name)
