"""A report as a recipe with its reasons in comments, and as lists."""

from __future__ import annotations

import json
import re
from typing import Any

from rondel.importing.peer import MACHINE, RecipeLine
from rondel.importing.translate import MISSING, TranslationReport, lines_by_section


def render_recipe(report: TranslationReport, source: str) -> str:
    """The TOML: each line names the key it comes from; the lists stand at the end as comments."""
    blocks = [f"# From {source}, a config of {report.peer.name} (defaults of {report.peer.release}).\n"]
    for name, lines in lines_by_section(report.lines):
        said = [
            (f"{line.key.removeprefix(f'{name}.')} = {format_toml(line.value)}", line_comment(line, report))
            for line in lines
        ]
        width = min(60, max(len(text) for text, _ in said))
        blocks.append(f"[{name}]\n" + "".join(f"{text:<{width}}  # {why}\n" for text, why in said))
    notes = "".join(f"# {line}\n" for line in render_lists(report).splitlines())
    return "\n".join(blocks) + (f"\n{notes}" if notes else "")


def line_comment(line: RecipeLine, report: TranslationReport) -> str:
    """`num_generations`, or `their default of beta`, or `always so there`; then what else is to be known."""
    given = [report.written[key] for key in line.sources if key in report.written]
    if given:
        origin = ", ".join(given)
    elif line.sources:
        origin = f"their default of {line.sources[0]}"
    else:
        origin = "always so there"
    return one_line("; ".join(filter(None, (origin, line.note, line.ask and f"DECIDE: {line.ask}"))))


def render_lists(report: TranslationReport) -> str:
    """What a user must know beyond the recipe; nothing if it says everything."""
    name = report.peer.name
    parts = [
        ("decide", {line.key: line.ask for line in report.open_questions}),
        ("no equivalent", {key: why for key, why in report.missing.items() if why not in MACHINE}),
        (f"no key of {name} {report.peer.release}", report.unknown),
        (
            f"other default, written as {name} has it",
            {line.key: _format_change(line, ours) for line, ours in report.other},
        ),
        ("their default does what nothing here does", dict(report.lost)),
        (
            "no equivalent, and no result depends on it",
            {key: why for key, why in report.missing.items() if why in MACHINE},
        ),
        ("the same here without a line", report.same),
    ]
    return "\n".join(
        f"{title} ({len(rows)}):\n"
        + "\n".join(one_line(f"  {key}{': ' * bool(why)}{why}") for key, why in rows.items())
        for title, rows in parts
        if rows
    )


def _format_change(line: RecipeLine, ours: Any) -> str:
    return f"{format_toml(line.value)}, here {format_toml(ours)}" if ours is not MISSING else format_toml(line.value)


def format_toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml_key(key)} = {format_toml(v)}" for key, v in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_toml, value)) + "]"
    return "not set" if value is None else repr(value)


def _toml_key(name: str) -> str:
    """As TOML writes it: bare, or in quotes where it has other signs, as in "openai/gsm8k"."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def one_line(text: str) -> str:
    """No line break and no control sign may end a comment early; the indent stays."""
    return text[: len(text) - len(text.lstrip(" "))] + " ".join(word for word in text.split() if word.isprintable())
