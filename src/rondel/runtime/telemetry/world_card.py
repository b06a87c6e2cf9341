"""What a run card says of a learned model of the world: how far it is off, and how many steps were real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MEANING = {  # by the last part of a metric's name: what a reader is told
    "log_density": "log-density of what the world did, in nats a step",
    "error_1": "error after 1 predicted step (1: as good as to know the mean change)",
    "error_h": "error after the last predicted step",
    "coverage": "share of numbers within the central 80 % (0.8 is calibrated)",
    "disagreement": "deviation of the members from their mean, in units of the change",
    "reward_error": "root mean square error of the reward",
    "end_error": "error of the probability that it ends (1: as good as to know how often it does)",
}


def world_summary(done: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """{"policy": "world", "real_steps": 3120, "imagined_steps": 9800, "errors": {"error_1": [1.31, 0.05], ...}}: of the
    steps of a run, the errors of the first and the last one; None without a model.
    """
    rows = [(name, e["metrics"]) for e in done for name in e["metrics"] if name.endswith("/imagined_steps")]
    if not rows:
        return None
    policy = rows[0][0].partition("/")[0]
    told = [[m[f"{policy}/{name}"] for _, m in rows if f"{policy}/{name}" in m] for name in MEANING]
    return {
        "policy": policy,
        "real_steps": sum(m[f"{policy}/real_steps"] for _, m in rows),
        "imagined_steps": sum(m[name] for name, m in rows),
        "errors": {name: [own[0], own[-1]] for name, own in zip(MEANING, told, strict=True) if own},
    }


def world_sentence(found: dict[str, Any]) -> str:
    return (
        f"{found['real_steps']:,.0f} steps were played and {found['imagined_steps']:,.0f} imagined by the policy "
        f"'{found['policy']}'. Its errors on episodes that it had not been trained on:"
    )


def world_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Meaning of each error, its value in the first step and in the last."""
    return [(MEANING[name], f"{first:.3f}", f"{last:.3f}") for name, (first, last) in found["errors"].items()]
