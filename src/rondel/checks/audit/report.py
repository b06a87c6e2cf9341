"""Findings of a run over its steps: which rollout, the words, reward against the group, correlation with reward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rondel.checks.audit import answers, judges, tests
from rondel.checks.audit.rollout import Rollout
from rondel.core.types import BESIDE, GREEDY

DETECTORS = (*tests.DETECTORS, *answers.DETECTORS, *judges.DETECTORS)
LEAST = 3  # steps from which a correlation is told


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One rollout and one reason. `advantage` is its reward minus the mean of its agent's in its group, in which an
    episode counts once, and none that is only measured; None where it has none.

    Example: AuditFinding("tests edited", 12, 96, 3, "sum/7", "rm tests/test_sum.py", 1.0, 0.75)
    """

    name: str
    step: int
    group: int
    sample: int
    task: str
    quote: str
    reward: float | None
    advantage: float | None


@dataclass(slots=True)
class AuditReport:
    """
    rollouts  how many were read
    shares    {name: {step: share of that step's rollouts}}
    rewards   {step: mean reward}
    """

    rollouts: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    shares: dict[str, dict[int, float]] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)

    def summary(self) -> list[dict[str, Any]]:
        """One row a name, the one that gains most above its group first."""
        rows = []
        for name in self.shares:
            own = [f for f in self.findings if f.name == name]
            gains = [f.advantage for f in own if f.advantage is not None]
            rows.append(
                {
                    "name": name,
                    "rollouts": len(own),
                    "share": len(own) / self.rollouts,
                    "advantage": math.fsum(gains) / len(gains) if gains else None,
                    "correlation": self.correlation(name),
                }
            )
        return sorted(rows, key=lambda row: (-(row["advantage"] or 0.0), row["name"]))

    def correlation(self, name: str) -> float | None:
        """Pearson's r over steps between the share of findings and the mean reward; None below LEAST steps or where one
        of both is constant.
        """
        steps = sorted(self.rewards)
        if len(steps) < LEAST:
            return None
        x, y = [self.shares[name].get(step, 0.0) for step in steps], [self.rewards[step] for step in steps]
        x_mean, y_mean = math.fsum(x) / len(x), math.fsum(y) / len(y)
        both = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y))
        spread = math.fsum((a - x_mean) ** 2 for a in x) * math.fsum((b - y_mean) ** 2 for b in y)
        return both / math.sqrt(spread) if spread > 1e-24 else None


def find_hacks(rollout: Rollout) -> dict[str, str]:
    """{name: the first span that says so}."""
    found: dict[str, str] = {}
    for detector in DETECTORS:
        for name, quote in detector(rollout):
            found.setdefault(name, quote)
    return found


def audit_rollouts(steps: Iterable[tuple[int, list[tuple[dict[str, Any], Rollout]]]]) -> AuditReport:
    """steps: (step, its stored rows, each with the rollout as text)."""
    report = AuditReport()
    for step, rows in steps:
        groups: dict[tuple[int, str], list[float]] = defaultdict(list)
        agents = {(row["group"], row["sample"]): row["agent"] or "" for row, _ in rows}
        for row, _ in rows:
            agent = agents[row["group"], row["sample"]]
            tried = row["parent"] is None and row["policy"] != GREEDY and not agent.startswith(BESIDE)
            if tried and row["reward"] is not None:
                groups[row["group"], agent].append(row["reward"])
        report.rollouts += len(rows)
        if every := [reward for own in groups.values() for reward in own]:
            report.rewards[step] = math.fsum(every) / len(every)
        for row, rollout in rows:
            root = row["sample"] if row["parent"] is None else row["parent"]
            own, reward = groups[row["group"], agents.get((row["group"], root), "")], row["reward"]
            gain = None if reward is None or not own else reward - math.fsum(own) / len(own)
            for name, quote in find_hacks(rollout).items():
                report.findings.append(
                    AuditFinding(name, step, row["group"], row["sample"], row["task"], quote, reward, gain)
                )
                at = report.shares.setdefault(name, {})
                at[step] = at.get(step, 0.0) + 1 / len(rows)
    return report
