"""Job -> parts -> a run. The only place that may name concrete classes."""

from __future__ import annotations

from typing import Any

VERBS = {  # each lives in a file of another name, and is imported when it is asked for
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


def __getattr__(name: str) -> Any:
    import importlib

    if name not in VERBS:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"rondel.assemble.{VERBS[name]}"), name)
