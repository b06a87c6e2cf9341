"""What a pipeline has brought, in words: a line a stage, the table at the end, the student beside its teachers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rondel.pipeline.stage_recipe import REFERENCE, is_reference
from rondel.pipeline.stage_result import FAILED
from rondel.runtime.telemetry.scores import score_text
from rondel.system.files import replace_file

if TYPE_CHECKING:
    from rondel.pipeline.pipeline_record import PipelineRecord

CARD = "card.md"


def stage_line(name: str, known: dict[str, Any]) -> str:
    """ "math: 60 steps, held out 12.0% -> 98.0%, 41 s"."""
    if known["status"] == FAILED:
        return f"{name}: failed: {known['error']}"
    steps = "" if known["steps"] is None else f"{known['steps']} steps, "
    return f"{name}: {steps}held out {held_out_text(known)}, {known['seconds']:.0f} s"


def held_out_text(known: dict[str, Any]) -> str:
    """The score before and after; of an evaluation each set, and of a mixture each source."""
    if not known["held_out"]:
        return "nothing"
    told: list[str] = []
    for name, row in known["held_out"].items():
        first = len(told) == 0
        before = f"{score_text(known['before'], row['share'])} -> " if first and known["before"] is not None else ""
        each = ", ".join(f"{source} {score_text(value, row['share'])}" for source, value in (row["of"] or {}).items())
        label = "" if first else f"{name} "
        told.append(f"{label}{before}{score_text(row['score'], row['share'])}" + (f" ({each})" if each else ""))
    return ", ".join(told)


def summary_rows(record: PipelineRecord) -> list[tuple[str, str, str, str]]:
    """(stage, steps, held-out reward, checkpoint), with the heads first."""
    rows = [("stage", "steps", "held-out reward", "checkpoint")]
    for name in record.pipeline.stages:
        if (known := record.stages.get(name)) is None or "held_out" not in known:
            rows.append((name, "", "not done", ""))
            continue
        steps = "" if known["steps"] is None else str(known["steps"])
        rows.append((name, steps, held_out_text(known), (known["checkpoint"] or {}).get("path", "")))
    return rows


def summary_table(record: PipelineRecord) -> str:
    rows = summary_rows(record)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *teacher_lines(record)])


def teacher_shares(record: PipelineRecord) -> Iterator[tuple[str, str, str, float, float]]:
    """(student, source, teacher, the student's score, the teacher's) for each source that a stage teaches, where both
    were measured on held-out tasks.
    """
    for name, stage in record.pipeline.stages.items():
        for teacher in stage.job.model.teachers:
            if stage.kind == "train" and is_reference(teacher.path) and teacher.source is not None:
                master = str(teacher.path).removeprefix(REFERENCE)
                scores = [_score_of(record.stages.get(who), teacher.source) for who in (name, master)]
                if scores[0] is not None and scores[1] is not None:
                    yield name, teacher.source, master, scores[0], scores[1]


def _score_of(known: dict[str, Any] | None, source: str) -> float | None:
    """The held-out score of a source; of a run that has one source alone, its score."""
    if known is None or not known.get("held_out"):
        return None
    row = next(iter(known["held_out"].values()))
    found: float | None = row["of"].get(source) if row["of"] else row["score"]
    return found


def teacher_lines(record: PipelineRecord) -> list[str]:
    """ "student   reverse: 0.98 of 1 that its teacher has (98 %)"."""
    told = []
    for student, source, teacher, own, theirs in teacher_shares(record):
        share = f" ({own / theirs:.1%})" if theirs > 0 else ""
        told.append(f"{student} has {own:.4g} on {source}, its teacher {teacher} {theirs:.4g}{share}")
    return ["", *told] if told else []


def write_summary(record: PipelineRecord) -> None:
    """card.md beside pipeline.json."""
    head, *rows = summary_rows(record)
    lines = [f"# {record.pipeline.path}", "", *(f"| {' | '.join(row)} |" for row in (head, ("---",) * 4, *rows))]
    lines += [f"{line}" for line in teacher_lines(record)]
    replace_file(record.pipeline.folder / CARD, "\n".join(lines) + "\n")
