"""`rondel diagnose`: what is wrong with a run, in the order in which to look at it. Rules
over its journal; a rule is a function of a Story.

signal    nothing to learn from, or the wrong thing      time     who waits
policy    how the weights move                           health   alive, ended, saved
lag       engine against trainer                         data     the tasks
generate  cut, refused, failed
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rondel.runtime.telemetry.diagnose import data, generate, health, lag, policy, signal, time
from rondel.runtime.telemetry.diagnose.finding import Finding, rank_findings
from rondel.runtime.telemetry.diagnose.story import Story, differing, read_story

__all__ = ["Finding", "Story", "diagnose", "differing", "findings", "read_story"]
RULES = (*health.RULES, *signal.RULES, *policy.RULES, *lag.RULES, *generate.RULES, *time.RULES, *data.RULES)
OF_WEIGHTS = (
    *policy.RULES,
    lag.find_logprob_gap,
    lag.find_stale_samples,
)  # asked again of each policy that is trained beside the main one


def diagnose(folder: str | Path) -> list[Finding]:
    return findings(read_story(folder))


def findings(story: Story) -> list[Finding]:
    found = [finding for rule in RULES for finding in rule(story)]
    for name in story.other_policies:
        own = story.for_policy(name)
        found += [
            replace(finding, evidence=f"policy '{name}': {finding.evidence}")
            for rule in OF_WEIGHTS
            for finding in rule(own)
        ]
    return rank_findings(found)
