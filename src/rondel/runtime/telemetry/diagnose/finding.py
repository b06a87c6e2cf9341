"""One finding: what is wrong, by which numbers, what it means, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """
    name      of the rule, stable: what scripts ask for
    severity  error: the run learns nothing, or wrongly, or has ended; warning: it wastes or will; note: worth knowing
    evidence  the numbers, with their steps
    meaning   one sentence
    action    a key of the recipe, or a command
    weight    of two of the same severity the heavier comes first
    """

    name: str
    severity: Severity
    evidence: str
    meaning: str
    action: str
    weight: float = 1.0


def rank_findings(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (ORDER.index(f.severity), -f.weight, f.name))
