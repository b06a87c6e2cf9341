"""Metrics to trackers of others, each behind its package: `run.sinks = ["wandb"]`, "trackio",
"mlflow". Without an account nothing leaves the machine.

A resumed run goes on in the run of its folder: its id is written into RUN/tracker-KIND, and
numbers that a resume repeats are not told twice.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rondel.core.config.differences import flatten_tree
from rondel.core.errors import ConfigError
from rondel.runtime.journal.log import read_recipe
from rondel.system.files import guard_write

PROJECT = "rondel"
MOST, PARAMS = 6000, 100  # MLflow's limits: characters of a value, values of one call


class Tracker:
    """What the three share: the package, the id of the run, the last step that it knew when it was opened, and what of it:
    the run may have ended before that step was evaluated.

    kind     the name in run.sinks, and of the package to import
    install  what brings it
    """

    kind, install = "", ""

    def __init__(self, folder: str | Path, after: int = -1) -> None:
        self.folder = Path(folder).resolve()
        try:
            self.package: Any = importlib.import_module(self.kind)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != self.kind:
                raise
            raise ConfigError(
                f'run.sinks names "{self.kind}", which is not installed: pip install "{self.install}", or leave it out'
            ) from error
        self._told = self.folder / f"tracker-{self.kind}"
        words = self._told.read_text(encoding="utf-8").splitlines() if after >= 0 and self._told.is_file() else []
        self.id, self.known = (words[0], int(words[1])) if len(words) > 1 else ("", -1)
        self.step, self.names = self.known, words[2:]
        self.recipe = read_recipe(self.folder)
        self._open_run()

    @property
    def name(self) -> str:
        return self.folder.name

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation comes as a row of its own, with the step of the row before it."""
        known = set(self.names) if step == self.known else ()
        fresh = {name: float(v) for name, v in metrics.items() if math.isfinite(v) and name not in known}
        if step < self.known or not fresh:
            return
        self._log_metrics(step, fresh)
        self.step, self.names = step, [*(self.names if step == self.step else ()), *fresh]
        with guard_write(self._told):
            self._told.write_text("\n".join([self.id, str(step), *self.names, ""]), encoding="utf-8")

    def close(self) -> None:
        raise NotImplementedError

    def _open_run(self) -> None:
        raise NotImplementedError

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError


class WandB(Tracker):
    """Offline (`wandb sync RUN/wandb/offline-…` sends it later) unless WANDB_MODE or WANDB_API_KEY says otherwise."""

    kind, install = "wandb", "rondel[observe]"

    def _open_run(self) -> None:
        self.id = self.id or _fresh_id(self.folder)
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self.run = self.package.init(
            project=PROJECT,
            name=self.name,
            id=self.id,
            resume="allow",
            dir=str(self.folder),
            mode=mode,
            config=self.recipe,
        )

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=max(step, self.run.step))  # a step that it has closed takes no more

    def close(self) -> None:
        self.run.finish()


class Trackio(Tracker):
    """In its local database; TRACKIO_SPACE_ID sends it to a Space."""

    kind, install = "trackio", "rondel[observe]"

    def _open_run(self) -> None:
        self.id = self.id or f"{self.name}-{_fresh_id(self.folder)}"
        self.package.init(
            project=PROJECT,
            name=self.id,
            resume="allow",
            config=self.recipe,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
        )

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.package.log(metrics, step=step)

    def close(self) -> None:
        self.package.finish()


class MLflow(Tracker):
    """To MLFLOW_TRACKING_URI, or a database in the run folder: `mlflow ui --backend-store-uri
    sqlite:///RUN/mlflow.db`.
    """

    kind, install = "mlflow", "mlflow"

    def _open_run(self) -> None:
        self.client = self.package.MlflowClient(
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder}/mlflow.db"
        )
        if not self.id:
            found = self.client.get_experiment_by_name(PROJECT)
            experiment = found.experiment_id if found else self.client.create_experiment(PROJECT)
            self.id = self.client.create_run(experiment, run_name=self.name).info.run_id
            told = [
                self.package.entities.Param(key, str(value)[:MOST]) for key, value in flatten_tree(self.recipe).items()
            ]
            for i in range(0, len(told), PARAMS):
                self.client.log_batch(self.id, params=told[i : i + PARAMS])
        self.client.update_run(self.id, status="RUNNING")

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        told = [self.package.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        for i in range(0, len(told), 500):  # of one call MLflow takes at most 1,000
            self.client.log_batch(self.id, metrics=told[i : i + 500])

    def close(self) -> None:
        self.client.set_terminated(self.id)


def _fresh_id(folder: Path) -> str:
    """An id that another start in the same folder does not have."""
    return blake2b(f"{folder} {time.time_ns()}".encode(), digest_size=6).hexdigest()
