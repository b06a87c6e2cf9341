"""Where the time of each worker went, from what they told of themselves (law 13): shares that sum to 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

CONTROLLER = "controller"  # its account are the phases of StepDone
KINDS = {
    "wait": "for rollouts",
    "prepare": "packing, annotations that an engine gives",
    "hand_over": "the device changes hands",
    "train": "the step, as the controller sees it",
    "sync": "weights to the engines",
    "milestone": "evaluations and checkpoints",
    "generate": "prompts and tokens",
    "score": "texts whose log-probabilities were asked for; the probe",
    "held": "a pause for the trainer or an update",
    "asleep": "its memory is lent",
    "refusing": "until a good update",
    "idle": "nothing was asked of it",
    "annotate": "log-probabilities before the step",
    "step": "forward, backward, optimizer",
    "publish": "weights described, or given",
    "send": "weights on their way",
    "save": "a checkpoint",
    "load": "a checkpoint",
    "move": "offload and back",
}


def seconds_of(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{"controller": {"wait": 61.0, ...}, "engine-0": {"generate": 80.0, "held": 3.0,
    "idle": 17.0}, ...} of journal events.
    """
    found: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event["kind"] == "StepDone":
            worker, told = CONTROLLER, {name: s for name, s in event["seconds"].items() if name != "step"}
        elif event["kind"] == "WorkerTime":
            worker, told = event["worker"], event["seconds"]
        else:
            continue
        for kind, n in told.items():
            found[worker][kind] += n
    return {worker: dict(seconds) for worker, seconds in found.items()}


def seconds_to_shares(seconds: dict[str, float]) -> dict[str, float]:
    """{"generate": 0.8, "idle": 0.2}, the largest first; nothing where no time passed."""
    total = sum(seconds.values())
    return {kind: n / total for kind, n in sorted(seconds.items(), key=lambda kv: -kv[1])} if total > 0 else {}
