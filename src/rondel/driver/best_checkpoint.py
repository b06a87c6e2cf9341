"""The best checkpoint of a run: the one whose held-out metric is highest stays, beside the newest ones.

evaluate ──> note_evaluation ──> improved? ──> a checkpoint, whose state.json says so ──> checkpoints/best.json

What a checkpoint says is what a resume believes; best.json repeats it for readers, and is written anew then.
"""

from __future__ import annotations

import json
from typing import Any

from rondel.core.config.task import HELD_OUT, EvaluationConfig
from rondel.core.errors import ConfigError
from rondel.core.events import Evaluated
from rondel.core.registry import suggest_name
from rondel.runtime.telemetry.metrics import from_evaluation
from rondel.system.files import replace_file
from rondel.system.run_weights import BEST
from rondel.train.checkpoint import Checkpoints, find_flaw


class BestCheckpoint:
    """Which step is best by `metric`, a name as in the metrics: "eval/score", "eval/aime/pass@8"."""

    def __init__(self, metric: str, sets: list[str], checkpoints: Checkpoints) -> None:
        self.metric, self.checkpoints = metric, checkpoints
        self.main = sets[0] if sets else HELD_OUT
        self.best: dict[str, Any] | None = None  # {"step", "metric", "value"}
        self._candidate: tuple[int, float] | None = None

    def restore(self, saved: dict[str, Any] | None) -> None:
        """After a resume: what its checkpoint says, if that one is whole and by the same metric."""
        told = saved or {}
        folder = self.checkpoints.folder / f"step-{told.get('step', -1):06d}"
        whole = bool(told) and told.get("metric") == self.metric and find_flaw(folder) is None
        self.best, self._candidate = (told if whole else None), None
        self.checkpoints.pinned = told["step"] if whole else None
        self.publish()

    def note_evaluation(self, event: Evaluated) -> None:
        """The starting weights are in no checkpoint: step 0 does not count."""
        value = from_evaluation(event, main=event.profile == self.main).get(self.metric)
        if value is not None and event.step and (self.best is None or value > self.best["value"]):
            self._candidate = (event.step, value)

    def improved_at(self, step: int) -> bool:
        return self._candidate is not None and self._candidate[0] == step

    def state_at(self, step: int) -> dict[str, Any] | None:
        """What the checkpoint of this step says; the one that was best before goes only once this one is whole."""
        if self.improved_at(step):
            assert self._candidate is not None
            self.best = {"step": step, "metric": self.metric, "value": self._candidate[1]}
            self.checkpoints.pinned, self._candidate = step, None
        return self.best

    def publish(self) -> None:
        path = self.checkpoints.folder / BEST
        if self.best is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, json.dumps(self.best) + "\n")


def refuse_unknown_metric(metric: str, sets: list[str], given: EvaluationConfig) -> None:
    """run.checkpoint.best must be a number that evaluations of this run bring."""
    if not metric:
        return
    if not sets:
        raise ConfigError(
            f"run.checkpoint.best = '{metric}' has no effect: no tasks are held out. Set task.data.holdout or "
            "task.eval.sets, or remove it"
        )
    known = ["eval/score"] + [f"eval/{name}/score" for name in sets[1:]]
    if given.samples > 1:
        of = [f"avg@{given.samples}", *(f"{what}@{k}" for what in ("pass", "majority") for k in given.reported_k)]
        known += [f"eval/{name}/{what}" for name in sets for what in of]
    if metric not in known:
        raise ConfigError(
            f"run.checkpoint.best = '{metric}' is no number of these evaluations.{suggest_name(metric, known)} Known: "
            f"{', '.join(known)}"
        )
