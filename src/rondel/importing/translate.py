"""The parts of a recipe that a peer's config asks for -> the recipe, and the fate of every key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rondel.core.config.job import Job
from rondel.core.config.section import ConfigSection
from rondel.core.registry import suggest_name
from rondel.core.types import Sampling
from rondel.importing.peer import MissingKeys, PeerFormat, PeerSettings, RecipeLine, SameKeys

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


class AlgorithmTable(Protocol):
    """The table of algorithms, which lies beyond this room."""

    @property
    def names(self) -> Collection[str]: ...

    def rejection_reason(self, section: dict[str, Any]) -> str:
        """Why an [algo] section cannot be; "" if it can."""
        ...

    def row_knobs(self, section: dict[str, Any]) -> dict[str, Any]:
        """{"surrogate.kind": "clip", "surrogate.low": 0.2, ...} of the row that the section means."""
        ...


@dataclass
class TranslationReport:
    """`translated`, `same`, `missing` and `unknown` hold every key of the user's exactly once.

    lines        the recipe
    translated   key -> the lines that say it
    same         key -> why no line is needed
    missing      key -> why nothing here does it
    unknown      key -> the nearest that exists there
    other        (line, our default): a default of theirs that is not ours, so it is written
    lost         (keys left at their default, why): what their defaults do and nothing here does
    """

    peer: PeerFormat
    lines: list[RecipeLine] = field(default_factory=list)
    translated: dict[str, list[str]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    other: list[tuple[RecipeLine, Any]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    @property
    def open_questions(self) -> list[RecipeLine]:
        return [line for line in self.lines if line.ask]


def translate_config(peer: PeerFormat, given: dict[str, Any], rows: AlgorithmTable) -> TranslationReport:
    """Every key of `given` finds its place in the report; a default that differs from ours is written as theirs."""
    setting = PeerSettings(peer, given)
    report = TranslationReport(peer, written=setting.written)
    parts = [part for read in peer.parts for part in read(setting)]
    lines, refused = _accepted_lines(
        [_question_variables(part) for part in parts if isinstance(part, RecipeLine)], rows, setting
    )
    for line, ours in lines:
        theirs = not setting.is_set(*line.sources) and ours is not MISSING and line.value != ours
        if theirs and (not line.ask or line.key == "algo.kind"):
            report.other.append((line, ours))
        if theirs or setting.is_set(*line.sources) or line.ask or ours is MISSING or line.key == "algo.kind":
            report.lines.append(line)
    gaps = [part for part in parts if isinstance(part, MissingKeys)] + refused
    for gap in gaps:
        for key in gap.sources:
            if key in setting.values:
                report.missing.setdefault(setting.written[key], gap.why)
        if not setting.is_set(*gap.sources):
            report.lost.append((", ".join(f"{key} = {peer.defaults[key]!r}" for key in gap.sources), gap.why))
    for same in (part for part in parts if isinstance(part, SameKeys)):
        for key in same.sources:
            if key in setting.values and setting.written[key] not in report.missing:
                report.same[setting.written[key]] = same.why
    for line in report.lines:
        for key in line.sources:
            if key in setting.values and not {setting.written[key]} & {*report.missing, *report.same}:
                report.translated.setdefault(setting.written[key], []).append(line.key)
    _report_remaining(report, setting)
    return report


def _question_variables(line: RecipeLine) -> RecipeLine:
    """A line whose value still has a variable of a script in it is asked about."""
    return (
        line
        if line.ask or not re.search(r"\$\{?\w", repr(line.value))
        else replace(line, ask="the config does not say what the variable is")
    )


def _report_remaining(report: TranslationReport, setting: PeerSettings) -> None:
    """The keys that no part has named."""
    peer = report.peer
    report.missing |= {name: f"{later} says it again" for name, later in setting.twice.items()}
    report.same |= {name: f"not set; {peer.canonical_key(name)} says it today" for name in setting.silent}
    for key, name in setting.written.items():
        if name in report.missing or name in report.same or name in report.translated:
            continue
        if not peer.knows_key(key) and not key.startswith("launcher "):
            report.unknown[name] = (
                suggest_name(key, list(peer.defaults)).strip() or f"{peer.name} {peer.release} has no such key"
            )
        elif key in peer.defaults and setting.values[key] == peer.defaults[key] and setting.values[key] in OFF:
            report.same[name] = "off, as here"
        else:
            report.missing[name] = peer.missing_reason(key)


class _Missing:
    """The recipe needs the key, so there is no default."""


MISSING = _Missing()


def _accepted_lines(
    lines: list[RecipeLine], rows: AlgorithmTable, setting: PeerSettings
) -> tuple[list[tuple[RecipeLine, Any]], list[MissingKeys]]:
    """(lines with our default for each, gaps): a knob is taken if the row that results has it
    and reads it; a table whole or not at all.
    """
    kind = next((line.value for line in lines if line.key == "algo.kind"), Job.model_fields["algo"].get_default().kind)
    section: dict[str, Any] = {"kind": kind}
    taken: list[tuple[RecipeLine, Any]] = []
    gaps: list[MissingKeys] = []
    for line in lines:
        family, _, knob = line.key.removeprefix("algo.").partition(".")
        if not line.key.startswith("algo.") or family in ("kind", "group_size", "mask_truncated"):
            taken.append((_mark_missing_row(line, rows), _default_value(line.key)))
            continue
        if kind not in rows.names:
            if setting.is_set(*line.sources):
                gaps.append(MissingKeys(line.sources, f"it belongs to the row '{kind}', which does not exist here yet"))
            continue
        knobs = rows.row_knobs(section)
        ours = knobs.get(f"{family}.{knob}", MISSING)
        if not knob:
            line = replace(line, value=_drop_defaults(family, line.value, knobs))
        wished = section | {family: section.get(family, {}) | ({knob: line.value} if knob else line.value)}
        if not (why := rows.rejection_reason(wished)):
            section = wished
            taken.append((line, ours))
        elif setting.is_set(*line.sources) or not knob or (ours is not MISSING and ours != line.value):
            gaps.append(MissingKeys(line.sources, why))
    return taken, gaps


def _drop_defaults(family: str, table: dict[str, Any], knobs: dict[str, Any]) -> dict[str, Any]:
    """The table without what the row does anyway, or can do only so."""
    only = {("kl", "where"): "loss"}
    return {
        name: value
        for name, value in table.items()
        if not knobs.get(f"{family}.{name}", value) == value == only.get((family, name))
    }


def _mark_missing_row(line: RecipeLine, rows: AlgorithmTable) -> RecipeLine:
    """A row that is not there is still written: a recipe that does not start is better
    than one that trains something else.
    """
    if line.key != "algo.kind" or line.value in rows.names:
        return line
    return RecipeLine(
        line.key, line.value, line.sources, line.note, "this row does not exist here yet, so the recipe will not start"
    )


def _default_value(dotted: str) -> Any:
    """Our default of a key, MISSING if the recipe must say it."""
    section: Any = Job
    *parents, leaf = dotted.split(".")
    if parents == ["task", "eval", "sampling"]:
        return {"temperature": 0.0}.get(leaf, getattr(Sampling(), leaf))
    for name in parents:
        section = section.model_fields[name].annotation
    assert issubclass(section, ConfigSection) and leaf in section.model_fields, f"{dotted} is no key of a recipe"
    found = section.model_fields[leaf]
    if found.is_required():
        return MISSING
    value = found.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def nest_lines(lines: list[RecipeLine]) -> dict[str, Any]:
    """The tree that the lines mean: {"algo": {"surrogate": {"low": 0.2}}}."""
    tree: dict[str, Any] = {}
    for line in lines:
        *parents, leaf = line.key.split(".")
        table = tree
        for name in parents:
            table = table.setdefault(name, {})
        table[leaf] = line.value
    return tree


def lines_by_section(lines: list[RecipeLine]) -> Iterator[tuple[str, list[RecipeLine]]]:
    """The lines by section, in the order of the recipe."""
    for name in Job.model_fields:
        if mine := [line for line in lines if line.key.startswith(f"{name}.")]:
            yield name, mine
