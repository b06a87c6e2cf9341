"""Two runs side by side, and only what differs: recipe, software, machine, data, results."""

from __future__ import annotations

from typing import Any

from rondel.runtime.telemetry.card import markdown_table
from rondel.runtime.telemetry.diagnose.story import differing

PARTS = {  # section -> where in a card it is
    "recipe": ("recipe",),
    "software and machine": ("facts",),
    "data": ("data",),
    "results": (
        "eval_before",
        "eval_after",
        "seconds",
        "steps",
        "trained_groups",
        "resumes",
        "ended",
        "ledger",
        "cost",
        "warnings",
    ),
    "answers": ("questions",),
}
ELSEWHERE = ("recipe.run.", "facts.tasks", "facts.loss", "eval_before.request", "eval_after.request")


def compare_cards(a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """{"recipe": {"loop.seed": (0, 1)}, "results": {...}}: of two cards, section by section;
    a section without a difference is left out.
    """
    found = {}
    for section, keys in PARTS.items():
        old, new = ({key: card.get(key) for key in keys} for card in (a, b))
        differ = differing(old, new, skip=ELSEWHERE)
        inside = f"{keys[0]}." if len(keys) == 1 else ""
        if differ:
            found[section] = {name.removeprefix(inside): values for name, values in differ.items()}
    return found


def render_comparison(a: str, b: str, differ: dict[str, dict[str, tuple[Any, Any]]]) -> str:
    """The same as a page."""
    parts = [f"# {a} beside {b}"]
    for section, rows in differ.items():
        parts += [
            f"## {section.capitalize()}",
            markdown_table(("", a, b), [(name, _format_value(x), _format_value(y)) for name, (x, y) in rows.items()]),
        ]
    return "\n\n".join(parts if differ else [*parts, "No difference."]) + "\n"


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
