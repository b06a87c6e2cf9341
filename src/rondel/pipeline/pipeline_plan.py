"""What a pipeline costs, before anything is started: the planner's answer for each stage, and when each could run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rondel.generate.envs.sources import TaskSet
from rondel.pipeline.pipeline_file import Pipeline
from rondel.pipeline.preflight import check_pipeline
from rondel.pipeline.stage_recipe import StageRecipe
from rondel.planner.workload import Workload, of_job, what_if

MakePlan = Callable[[Workload], dict[str, Any]]


def plan_pipeline(pipeline: Pipeline, make_plan: MakePlan, questions: Sequence[str] = ()) -> dict[str, Any]:
    """{"stages": [{"name", "kind", "needs", "steps", "step_seconds", "seconds", "begins", "memory", "fits", ...}],
    "seconds", "parallel", "folder"}.

    make_plan   the planner: `rondel.planner.plan.make_plan`
    questions   --what-if of `rondel plan`, asked of each stage
    """
    tasks = check_pipeline(pipeline)
    rows = [_plan_stage(pipeline, stage, tasks[name], make_plan, questions) for name, stage in pipeline.stages.items()]
    begins = schedule_stages(pipeline.parallel, {row["name"]: (tuple(row["needs"]), row["seconds"]) for row in rows})
    for row in rows:
        row["begins"] = begins[row["name"]]
    return {
        "folder": str(pipeline.folder),
        "parallel": pipeline.parallel,
        "seconds": max(row["begins"] + row["seconds"] for row in rows),
        "stages": rows,
    }


def _plan_stage(
    pipeline: Pipeline, stage: StageRecipe, tasks: TaskSet, make_plan: MakePlan, questions: Sequence[str]
) -> dict[str, Any]:
    job = stage.job.parse(stage.resolve(lambda name: starting_model(pipeline, name)), str(pipeline.path))
    work = of_job(job)
    told = make_plan(what_if(list(questions), work) if questions else work)
    steps = stage.steps
    if steps is None:
        steps = job.loop.warmup.steps + math.ceil((job.loop.passes or 0) * len(tasks.train) / job.loop.groups_per_step)
    if stage.kind == "eval":
        draws = sum(1 for _ in tasks.evaluated[: job.task.eval.n or None]) * job.task.eval.samples
        seconds = draws * told["work"]["mean_tokens"] / max(1e-9, told["generate"]["tokens_per_second"])
    else:
        warm = job.loop.warmup.steps
        shown = told["train"]["seconds"] * job.loop.warmup.groups_per_step / told["work"]["samples"]
        seconds = warm * shown + (steps - warm) * told["step_seconds"]
    return {
        "name": stage.name,
        "kind": stage.kind,
        "needs": list(stage.needs),
        "inputs": list(stage.inputs),
        "model": told["model"]["name"],
        "teachers": [teacher.name for teacher in stage.job.model.teachers],
        "train_tasks": len(tasks.train),
        "held_out_tasks": len(tasks.evaluated),
        "steps": None if stage.kind == "eval" else steps,
        "step_seconds": None if stage.kind == "eval" else told["step_seconds"],
        "seconds": seconds,
        "devices": told["devices"]["count"],
        "hardware": told["devices"]["hardware"],
        "memory": max(bill["peak"] for bill in told["memory"]),
        "fits": told["fits"],
        "assumed": told["assumed"],
    }


def starting_model(pipeline: Pipeline, name: str) -> Any:
    """What the result of a stage will look like to the planner: the model that it began with, back to the first."""
    model = pipeline.stages[name].job.model.path
    while isinstance(model, str) and (inner := model.partition(":"))[0] == "stage":
        model = pipeline.stages[inner[2]].job.model.path
    return model


def schedule_stages(parallel: int, stages: dict[str, tuple[tuple[str, ...], float]]) -> dict[str, float]:
    """{name: (needs, seconds)} in order -> when each begins, with so many places side by side: {"a": 0.0,
    "b": 12.5}."""
    begins: dict[str, float] = {}
    places = [0.0] * parallel
    while len(begins) < len(stages):
        ready = {
            name: max((begins[need] + stages[need][1] for need in needs), default=0.0)
            for name, (needs, _) in stages.items()
            if name not in begins and all(need in begins for need in needs)
        }
        place = min(range(parallel), key=places.__getitem__)
        name = min(ready, key=lambda name: max(ready[name], places[place]))
        begins[name] = max(ready[name], places[place])
        places[place] = begins[name] + stages[name][1]
    return begins


def plan_table(told: dict[str, Any]) -> str:
    """A line a stage, as `rondel pipeline FILE --plan` prints it."""
    rows = [("stage", "needs", "steps", "a step", "time", "begins", "memory", "model")]
    for row in told["stages"]:
        rows.append(
            (
                row["name"] + (" (eval)" if row["kind"] == "eval" else ""),
                ", ".join(row["needs"]) or "-",
                "-" if row["steps"] is None else str(row["steps"]),
                "-" if row["step_seconds"] is None else duration_text(row["step_seconds"]),
                duration_text(row["seconds"]),
                duration_text(row["begins"]),
                f"{row['memory'] / 1e9:.2f} GB" + ("" if row["fits"] else ", too much"),
                row["model"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
    side = (
        f", at most {told['parallel']} stages side by side" if told["parallel"] > 1 else ", one stage after the other"
    )
    assumed = dict.fromkeys(text for row in told["stages"] for text in row["assumed"])
    all_of_it = f"in all   {duration_text(told['seconds'])}{side}; {told['folder']}"
    return "\n".join([*lines, "", all_of_it, "", "assumed  " + "\n         ".join(assumed)])


def duration_text(seconds: float) -> str:
    """ "1.5 h", "12 min", "3.2 s", "40 ms"."""
    for unit, name in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1000:.3g} ms" if 0 < seconds < 1 else f"{seconds:.3g} s"
