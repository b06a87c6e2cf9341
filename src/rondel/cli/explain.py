"""rondel explain: the final values and who set them, the arithmetic of a step, the formula of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, read_job
from rondel.core.errors import UserError
from rondel.core.registry import suggest_name
from rondel.text.unicode import visible_text

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RUN.toml|ALGORITHM", help="The recipe, or a value of algo.kind.")],
) -> None:
    """Show what a recipe or an algorithm means.

    Of a recipe every final value and who set it, the arithmetic of one step, the formula of the loss; of an algorithm
    the formula, with its defaults.
    """
    if not Path(recipe).suffix and not Path(recipe).exists():
        from rondel.algos.explanation import explain_objective
        from rondel.algos.table import TABLE

        if recipe not in TABLE:
            raise UserError(f"no recipe and no algorithm '{recipe:.100}'.{suggest_name(recipe, list(TABLE))}")
        if ctx.args:
            raise UserError(f"{ctx.args[0]:.100} changes a recipe: rondel explain RUN.toml --algo.kind={recipe} ...")
        print(explain_objective(TABLE[recipe]))
        return
    said, overrides = read_job(recipe, *ctx.args)
    job, why = said, ""
    if said.loop.passes is not None:  # counting the tasks takes the data, and with it torch
        from rondel.assemble.components import with_steps

        job, why = with_steps(said)
    rows = list_values(said, set(overrides))
    if why:
        rows = [(key, job.steps, "loop.passes") if key == "loop.steps" else (key, value, by) for key, value, by in rows]
    width = max(len(key) for key, _, _ in rows)
    print(f"{'key':<{width}}  {'set by':<12}  value")
    for key, value, by in rows:
        shown = "as in the row below" if key.startswith("algo.") and value == {} else _format_toml(value)
        print(visible_text(f"{key:<{width}}  {by:<12}  {shown}"))
    print(f"\n{step_arithmetic(job)}" + f"\nloop.steps = {job.steps}: {why}" * bool(why) + f"\n\n{loss_formula(job)}")


def list_values(section: Any, overridden: set[str], prefix: str = "") -> list[tuple[str, Any, str]]:
    """(dotted key, final value, "recipe" | "command line" | "default") of every leaf."""
    from rondel.core.config.section import ConfigSection

    rows = []
    for name in type(section).model_fields:
        key, value = f"{prefix}{name}", getattr(section, name)
        if isinstance(value, ConfigSection):
            rows += list_values(value, overridden, f"{key}.")
        elif key == "policies" and value:
            for policy, table in value.items():
                rows += list_values(table, overridden, f"{key}.{policy}.")
        elif any(key == o or o.startswith(f"{key}.") or key.startswith(f"{o}.") for o in overridden):
            rows.append((key, value, "command line"))
        else:
            rows.append((key, value, "recipe" if name in section.model_fields_set else "default"))
    return rows


def step_arithmetic(job: Any) -> str:
    """One step: 16 groups x 8 samples = 128 answers, in 1 update; 40 steps = 5120 answers."""
    groups = job.loop.groups_per_step
    samples = job.algo.group_size
    updates = job.loop.updates_per_step
    steps = job.steps
    batch, passes = groups * samples, f" in each of {job.loop.epochs} epochs" if job.loop.epochs > 1 else ""
    return (
        f"one step: {groups} groups x {samples} samples = {batch} answers of at most {job.engine.sampling.max_tokens} "
        f"tokens, "
        f"in {updates} update{'s' if updates > 1 else ''}{passes}; {steps} steps = {steps * batch} answers"
    )


def loss_formula(job: Any) -> str:
    """The effective loss: the row of the table with the recipe's overrides."""
    from rondel.algos.explanation import explain_objective
    from rondel.algos.table import resolve_algorithm
    from rondel.assemble.rows import rows_of

    rows = rows_of(job)
    own = [
        f"\nof '{name}'    {weight:g} · the loss below, with a count of its own\n\n{explain_objective(row)}"
        for name, (row, weight) in rows.of.items()
    ]
    beside = [
        f"\nbeside    {b.weight:g} · the loss below, over {b.groups_per_step} demonstrations a step and with their "
        f"own count\n\n{explain_objective(resolve_algorithm({'kind': b.kind}))}"
        for b in job.algo.beside
    ]
    policies = [
        f"\nof the policy '{name}'    "
        + (
            "frozen: it plays and learns nothing"
            if policy.frozen
            else (
                f"the loss above over {_describe_agents(job, name)} alone, with their own counts, lr "
                f"{job.of_policy(name).trainer.lr:g}"
            )
        )
        for name, policy in job.policies.items()
    ]
    return "\n".join([explain_objective(rows.main), *own, *beside, *policies])


def _describe_agents(job: Any, policy: str) -> str:
    return "the tokens of " + " and ".join(agent for agent, plays in job.agent_policies.items() if plays == policy)


def _format_toml(value: Any) -> str:
    """A value as one would write it in a recipe."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_format_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_format_toml, value)) + "]"
    return "not set" if value is None else str(value)
