"""What the sliders ask: a plan of a model on devices, or of a run's own recipe with some of it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rondel.core.config.job import Job
from rondel.core.errors import UserError
from rondel.planner.families import MODELS, PUBLIC
from rondel.planner.hardware import DEVICES
from rondel.planner.workload import QUESTIONS, Workload, of_job, what_if

Plan = Callable[[Workload], dict[str, Any]]
START = {"model": "7b", "hardware": "h100", "gpus": "16", "place": "split"}  # where no run is asked about


def list_choices() -> dict[str, list[str]]:
    """Plain sizes first."""
    return {
        "model": sorted({*PUBLIC, *MODELS}, key=lambda name: (not name[0].isdigit(), _parse_billions(name), name)),
        "hardware": list(DEVICES),
    }


def _parse_billions(name: str) -> float:
    number = name.rstrip("b")
    return float(number) if number.replace(".", "", 1).isdigit() else 0.0


def answer_plan_query(words: Mapping[str, str], plan: Plan, folder: Path | None = None) -> dict[str, Any]:
    """{"gpus": "64"} -> the plan, and the values that it was made for."""
    sizes = list_choices()["model"]
    for name, known in (
        list_choices() | {beside: [*sizes, "none"] for beside in ("reference", "reward", "teacher", "critic")}
    ).items():
        if words.get(name, "") not in ("", *known):
            raise UserError(f"{name} = {words[name][:80]}: here it is one of {', '.join(known)}")
    start = _of_run(folder / "job.toml", (folder / "job.toml").stat().st_mtime) if folder is not None else None
    given = {} if start is not None else dict(START)
    asked = {**given, **{name: value for name, value in words.items() if name in QUESTIONS and value != ""}}
    setting = what_if([f"{name}={value}" for name, value in asked.items()], start)
    return {"plan": plan(setting), "setting": _workload_settings(setting)}


@lru_cache(maxsize=8)
def _of_run(path: Path, written: float) -> Workload:
    try:
        return of_job(Job.read(path, {}))
    except UserError:
        raise
    except ValueError as error:  # of a number that Python does not read
        raise UserError(f"{path} cannot be read: {error}") from error


def _workload_settings(s: Workload) -> dict[str, Any]:
    return {
        "model": s.shape.name,
        "hardware": s.hardware.name,
        "gpus": s.gpus,
        "place": s.place,
        "trainers": s.trainers,
        "prompts": s.prompts,
        "group": s.group,
        "prompt": s.prompt,
        "output": s.output,
        "staleness": s.staleness,
        "lora": s.rank,
        "nf4": s.four_bits,
        "micro": s.micro,
        "offload": s.offload,
        "in_flight": s.in_flight,
        "running": s.running,
    }
