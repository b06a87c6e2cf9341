"""[run]: folder, checkpoints, sinks, journal."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rondel.core.config.section import ConfigSection, SettingsTable


class CheckpointConfig(SettingsTable):
    every: int = Field(10, ge=0, description="steps between two checkpoints; 0 is only at the end")
    keep: int = Field(2, ge=1, description="how many stay")
    best: str = Field(
        "",
        description='beside those, keep the one whose held-out metric is highest: "eval/score", "eval/aime/pass@8"; it '
        "is written as soon as an evaluation is better than all before",
    )


class RunConfig(ConfigSection):
    folder: str = Field(min_length=1, description="where the run lives")
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="when checkpoints are written, and how many stay"
    )
    sinks: list[str | dict[str, Any]] = Field(
        ["tensorboard"],
        description='tensorboard, jsonl, csv, wandb, trackio, mlflow, prometheus, opentelemetry, or "module:name"; '
        "with "
        'settings: { kind = "prometheus", port = 9464 }',
    )
    record: bool = Field(
        False,
        description="write schedule.jsonl, so that `rondel replay RUN --into FOLDER` does the whole run again, bit for "
        "bit",
    )
    durability: Literal["process", "disk"] = Field("process", description='"disk" calls fsync after each journal step')
