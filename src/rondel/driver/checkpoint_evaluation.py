"""`rondel eval`: the number of a training run once more, for a run folder, a checkpoint or
any model; and how hard its tasks are for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rondel.assemble.components import build
from rondel.assemble.run_components import Components
from rondel.core.clocks import run_loop
from rondel.core.config.job import Job
from rondel.core.errors import UserError
from rondel.core.events import Evaluated
from rondel.core.types import Slot
from rondel.driver.evaluation import OnProgress, SetEvaluation, evaluate
from rondel.driver.rollouts import GroupRollouts
from rondel.runtime.devices import prepare_process
from rondel.system.run_weights import find_run_weights
from rondel.train.multi_policy import FOLDER


def evaluate_checkpoint(model_or_run: str, recipe: str | None, overrides: dict[str, Any]) -> Evaluated:
    """The same number for a run folder (its newest checkpoint), a checkpoint folder,
    or any model with a recipe's tasks: of the held-out set, or of the first of task.eval.sets where there is none.
    """
    return evaluate_sets(model_or_run, recipe, overrides)[0].event


def evaluate_sets(
    model_or_run: str,
    recipe: str | None,
    overrides: dict[str, Any],
    best: bool = False,
    on_progress: OnProgress | None = None,
) -> list[SetEvaluation]:
    """Every held-out set of the recipe, with all draws. best: of a run folder the checkpoint that was best."""
    with _open_checkpoint(model_or_run, recipe, overrides, best) as (parts, step):
        if not parts.tasks.evaluated:
            raise UserError(
                "the recipe holds no tasks out: set task.data.holdout = 50, eval_path for files, or name a set: --set "
                "NAME=FILE.jsonl"
            )
        return _run_aside(evaluate(parts, step, on_progress))


def _run_aside(work: Coroutine[Any, Any, list[SetEvaluation]]) -> list[SetEvaluation]:
    """run_loop; in a notebook, whose own loop runs in this thread, in another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_loop(work)
    with ThreadPoolExecutor(1, "rondel-eval") as thread:
        return thread.submit(run_loop, work).result()


def rate(
    model_or_run: str,
    recipe: str | None,
    overrides: dict[str, Any],
    samples: int,
    told: Callable[[int, int], None],
    best: bool = False,
) -> list[dict[str, Any]]:
    """Every training task tried `samples` times as in training. -> its fields with
    `pass_rate`, the mean reward, each in [0, 1].

    None where no try could be scored. told: (tasks done, tasks) as they end. best: as above.
    """
    with _open_checkpoint(model_or_run, recipe, overrides | {"algo.guides": 0}, best) as (parts, _):
        rollouts, tasks, done = GroupRollouts(parts, samples, watch=parts.step_watch), parts.tasks.train, 0

        async def rate_task(number: int, lanes: asyncio.Semaphore) -> float | None:
            nonlocal done
            async with lanes:
                group = await rollouts.generate_group(Slot(-1 - number, tasks[number], 0))
                await rollouts.score(group)
            told(done := done + 1, len(tasks))
            passed = [min(1.0, max(0.0, r)) for r in group.rewards]
            return sum(passed) / len(passed) if passed else None

        async def all_of_them() -> list[float | None]:
            lanes = asyncio.Semaphore(max(1, parts.job.engine.max_running // samples))
            return list(await asyncio.gather(*(rate_task(i, lanes) for i in range(len(tasks)))))

        rates = run_loop(all_of_them())
    return [{**task.data, "pass_rate": passed} for task, passed in zip(tasks, rates)]


def _with_policies(job: Job, model: str, start: Callable[[], str | dict[str, Any]]) -> Job:
    """The other policies as they are in this checkpoint. One that is not in it, or frozen, begins
    where it began: in `start` if it names no model.
    """
    policies = {}
    for name, policy in job.policies.items():
        own = Path(model) / FOLDER / name
        policies[name] = policy.model_copy(update={"model": str(own) if own.is_dir() else policy.model or start()})
    return job.model_copy(update={"policies": policies})


@contextmanager
def _open_checkpoint(
    model_or_run: str, recipe: str | None, overrides: dict[str, Any], best: bool = False
) -> Iterator[tuple[Components, int]]:
    """The parts of a run with these weights, and the step they are of."""
    prepare_process()
    own = Path(model_or_run) / "job.toml"
    weights = find_run_weights(
        model_or_run, best, f"train it, or evaluate its starting model: rondel eval MODEL {recipe or own}"
    )
    recipe, model = recipe or weights.recipe, weights.model
    if recipe is None:
        raise UserError(
            f"'{model_or_run}' is no run folder, so it is read as a model: name the tasks, rondel eval {model_or_run} "
            "RUN.toml, or give the folder named by run.folder in the recipe"
        )
    job = _with_policies(
        Job.read(recipe, {**overrides, "model.path": model}), model, lambda: Job.read(recipe, overrides).model.path
    )
    parts = build(job.on_one_device(), trains=False)
    try:
        parts.engine.version = weights.step
        yield parts, weights.step
    finally:
        parts.close()
