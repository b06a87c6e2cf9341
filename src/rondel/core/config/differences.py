"""What differs between two recipes of one run."""

from __future__ import annotations

from typing import Any

from rondel.core.config.job import Job

MISSING = "not set"


def changed_keys(old: Job, new: Job) -> dict[str, tuple[Any, Any]]:
    """{"loop.seed": (0, 1)}: every key that must be equal for a folder to be continued, and is not. Where a run lives
    (run.*) and how long it goes on (loop.steps) may change.
    """
    before, now = (flatten_tree(without_none(job.to_dict())) for job in (old, new))
    return {
        key: (before.get(key, MISSING), now.get(key, MISSING))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith("run.") and key != "loop.steps"
    }


def changed_text(changed: dict[str, tuple[Any, Any]]) -> str:
    """ "loop.seed: 0 -> 1; ..." """
    quoted = {key: [v if v is MISSING else repr(v) for v in pair] for key, pair in changed.items()}
    return "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in quoted.items())


def without_none(node: Any) -> Any:
    """TOML has no null."""
    if isinstance(node, dict):
        return {k: without_none(v) for k, v in node.items() if v is not None}
    return [without_none(v) for v in node] if isinstance(node, list | tuple) else node


def flatten_tree(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loop": {"steps": 5}} -> {"loop.steps": 5}."""
    out: dict[str, Any] = {}
    for key, value in node.items():
        out |= flatten_tree(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
