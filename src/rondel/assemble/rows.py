"""The rows of a run: that of the recipe, those that its sources have of their own, and what is shown beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rondel.algos.table import Algorithm, resolve_algorithm
from rondel.core.config.algorithm import OF_GROUPS
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.core.events import Warned, emit
from rondel.core.registry import suggest_name
from rondel.core.types import Task

ALONE = {  # what a row may ask of the whole run, and so of the main row only
    "values": "it needs a critic, which learns from every sample",
    "greedy": "it needs a greedy answer to every prompt",
    "guidance": "it needs a demonstration in every group",
}

TAUGHT = frozenset({"teacher_logprobs", "teacher_hidden", "criterion_margins"})  # what a row may ask of a teacher


@dataclass(frozen=True)
class AlgorithmRows:
    """`AlgorithmRows(GRPO, {"code": (RLOO, 1.0)})`: the tasks of the source "code" are trained by RLOO,
    all others by GRPO.

    main    trains whatever no other row is for
    of      by the name of a source: its row, and what its loss counts beside that of `main`
    """

    main: Algorithm
    of: dict[str, tuple[Algorithm, float]] = field(default_factory=dict)

    @property
    def all_rows(self) -> list[Algorithm]:
        return [self.main, *(row for row, _ in self.of.values())]

    @property
    def student_row(self) -> Algorithm | None:
        """The first that learns from a teacher."""
        return next((row for row in self.all_rows if row.needs & TAUGHT), None)

    def row_of(self, stream: str) -> Algorithm:
        """Whatever trains the samples of a source."""
        return self.of.get(stream, (self.main, 1.0))[0]

    def needs_teacher(self, stream: str) -> bool:
        """Whether a teacher must speak of the samples of a source."""
        return bool(TAUGHT & self.row_of(stream).needs)

    @property
    def behavior_wants(self) -> frozenset[str]:
        """Of the engine at every draw, for the rows that read more of its distribution than the token."""
        asked = {
            "behavior_top": max(row.surrogate.behavior_top for row in self.all_rows),
            "behavior_draws": max(row.surrogate.behavior_draws for row in self.all_rows),
        }
        return frozenset(f"{name}:{count}" for name, count in asked.items() if count)

    @property
    def needs(self) -> frozenset[str]:
        """Of all rows; and "whole_distribution" where the main one learns the model's own."""
        whole = {"whole_distribution"} if self.main.surrogate.whole_distribution else set()
        return frozenset(whole).union(*(row.needs for row in self.all_rows))


def rows_of(job: Job) -> AlgorithmRows:
    """Every row with the length that the recipe gives it."""
    section = {name: value for name, value in job.algo.to_values(without=OF_GROUPS).items() if value != {}}
    return AlgorithmRows(
        _resolve_row(job, section),
        {name: _of_source(job, name, dict(table)) for name, table in job.algo.sources.items()},
    )


def rows_beside(job: Job) -> list[Algorithm]:
    return [_resolve_row(job, {"kind": beside.kind}) for beside in job.algo.beside]


def refuse_unknown_sources(job: Job, rows: AlgorithmRows, tasks: list[Task]) -> None:
    """A row or a teacher for a source of which there is no task, and a source that nobody teaches."""
    known = list(dict.fromkeys(task.stream for task in tasks))
    named = {f"algo.sources.{name}": name for name in rows.of}
    named |= {f"model.teacher[{i}].source": t.source for i, t in enumerate(job.model.teachers) if t.source is not None}
    for where, name in named.items():
        if name not in known:
            raise ConfigError(
                f"{where} = '{name}': no task has this source.{suggest_name(name, known)} The tasks are of: "
                f"{', '.join(known)}"
            )
    for name in known:
        if rows.needs_teacher(name) and not any(t.source in (None, name) for t in job.model.teachers):
            raise ConfigError(
                f"'{name}' learns from a teacher and has none: add one with source = '{name}', or one without a "
                f"source, which teaches all"
            )


def _resolve_row(job: Job, section: dict[str, Any]) -> Algorithm:
    return resolve_algorithm(section).bounded(job.engine.sampling.max_tokens)


def _of_source(job: Job, name: str, table: dict[str, Any]) -> tuple[Algorithm, float]:
    where, weight = f"algo.sources.{name}", table.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"{where}.weight = {weight!r}; it must be a positive number")
    if "kind" not in table:
        raise ConfigError(
            f'{where} has no kind: {{ kind = "rloo", weight = 1.0, ... }}, with whatever [algo] says of a row'
        )
    row = _resolve_row(job, table)
    for need, why in ALONE.items():
        if need in row.needs:
            raise ConfigError(
                f"{where}.kind = '{row.name}': {why}. Make it the main row, algo.kind, and give the other sources "
                "theirs"
            )
    if row.advantage.remembers:
        raise ConfigError(
            f"{where}.kind = '{row.name}': its advantage follows what earlier steps have earned, and a run keeps that "
            "of the main row, algo.kind, alone. Make it the main row, or give this one another advantage"
        )
    for part in ("kl", "entropy"):
        if getattr(row, part).is_adaptive:
            raise ConfigError(
                f"{where}.{part} steers its coefficient, and a run steers that of algo.{part} alone: give it a fixed "
                "coef"
            )
    return row, float(weight)


def warn_of_entropy(row: Algorithm) -> None:
    """Of a bonus that pays for certainty, or that is larger than all that an advantage of 1 moves."""
    coef, steep = row.entropy.coef, row.surrogate.steepness
    if coef < 0:
        emit(
            Warned(
                f"algo.entropy.coef = {coef:g} in {row.name} is negative: the policy is paid for being certain, and "
                "the answers of a group become equal sooner. A bonus for entropy is positive"
            )
        )
    elif coef > steep:
        emit(
            Warned(
                f"algo.entropy.coef = {coef:g} is more than {row.name} moves for an advantage of 1 ({steep:g}, `rondel "
                f"explain {row.name}`), so that answers grow random whatever they earn: {coef:g} beside a gradient of "
                f"A is {coef * steep:g} here"
            )
        )
