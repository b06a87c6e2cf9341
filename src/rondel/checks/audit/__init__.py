"""`rondel audit`: rollouts that may have earned their reward by a hack, each with the words that say so.

tests.py    tests that were edited, deleted, skipped or left early; checks that were patched; outputs that were
            special-cased
answers.py  answers that were read and not found; several answers at once
judges.py   words to the grader, and what nobody but it is meant to see
report.py   findings of a run over its steps: reward against the group, and the correlation with the reward

A detector is a function of one Rollout that yields (name, quoted span). It reads text and never runs it.
"""

from rondel.checks.audit.report import AuditFinding, AuditReport, audit_rollouts, find_hacks
from rondel.checks.audit.rollout import Rollout

__all__ = ["AuditFinding", "AuditReport", "Rollout", "audit_rollouts", "find_hacks"]
