"""What is written, and what becomes of it before it is trained: cut, refused, failed."""

from __future__ import annotations

from collections.abc import Iterator

from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import Story

# around cause and remedy, in what a run says of such a step (tell_silence of driver/phases.py)
SILENT, TO_MEND = "there is nothing to train: ", ". To mend it, "
CUT, MOSTLY_CUT = 0.3, 0.8
FAILED, MOSTLY_FAILED = 0.05, 0.3
REFUSED = 0.7
BROKEN, MOSTLY_BROKEN = 0.02, 0.2  # groups that failed, of those that ended


def find_silence(story: Story) -> Iterator[Finding]:
    """Said of a single step, too."""
    rows = [step.row for step in story.steps if "generate/tokens" in step.row]
    silent = [row for row in rows if row["generate/tokens"] == row.get("train/tokens", 0) == 0]
    if silent:
        last = next((text for _, text in reversed(story.said) if text.startswith("the policy wrote nothing")), "")
        cause, _, remedy = last.partition(SILENT)[2].partition(TO_MEND)
        yield Finding(
            "silent",
            "error" if silent[-1] is rows[-1] else "warning",
            f"the policy wrote nothing in {len(silent)} of {len(rows)} steps{': ' * bool(cause) + cause}",
            "A step without a token of the policy trains nothing.",
            remedy or "`rondel check-env RUN.toml` plays an episode",
            weight=4,
        )


def find_truncation(story: Story) -> Iterator[Finding]:
    cut = story.recent_mean("generate/truncated_fraction")
    if cut is not None and cut > CUT:
        most = story.recipe_value("engine.sampling.max_tokens", "not set")
        turns = story.recipe_value("task.env.turns")
        limits = f"engine.sampling.max_tokens = {most}" + (f" or task.env.turns = {turns}" if turns else "")
        yield Finding(
            "truncation",
            "error" if cut > MOSTLY_CUT and (story.recent_mean("score/reward_mean") or 0) <= 0 else "warning",
            f"{cut:.0%} of the answers end at {limits} ({story.recent_span})",
            "An answer that is cut is judged for what it could not say.",
            "a higher engine.sampling.max_tokens, a shorter form of answer (task.env.suffix), algo.kind = 'dapo' (its "
            "filter and penalty for length)",
        )


def failing_reward(story: Story) -> Iterator[Finding]:
    failed = story.recent_mean("score/failed_fraction")
    if failed is not None and failed > FAILED:
        last = next((text for _, text in reversed(story.said) if text.startswith("the reward failed")), "")
        yield Finding(
            "failing_reward",
            "error" if failed > MOSTLY_FAILED else "warning",
            f"{failed:.0%} of the answers have no score ({story.recent_span}){': ' + last if last else ''}",
            "What the reward cannot judge is not trained on: what is left is a choice of the reward, not of the tasks.",
            "`rondel view RUN --errors`, `rondel check RUN.toml`; task.reward.timeout if it is slow; "
            "task.reward.max_failures ends such a run",
            weight=2,
        )


def failing_environment(story: Story) -> Iterator[Finding]:
    """By the ledger, which counts since the start."""
    ended = sum(n for name, n in story.ledger.items() if name not in ("issued", "in_flight"))
    failed = {name.partition("/")[2]: n for name, n in story.ledger.items() if name.startswith("failed/")}
    if ended and sum(failed.values()) > BROKEN * ended:
        most = max(failed, key=failed.__getitem__)
        yield Finding(
            "failing_groups",
            "error" if sum(failed.values()) > MOSTLY_BROKEN * ended else "warning",
            f"{sum(failed.values())} of {ended} groups failed, {failed[most]} of them by: {most}",
            "Too few of their answers could be scored: an environment or a reward breaks.",
            "`rondel view RUN --errors`; `rondel check RUN.toml`",
            weight=1.5,
        )


def find_dropped_groups(story: Story) -> Iterator[Finding]:
    share = story.recent_mean("filter/dropped_fraction")
    short = [(step, text) for step, text in story.said if text.startswith("a short batch")]
    if short or (share is not None and share > REFUSED):
        rules = {name.partition("/")[2]: n for name, n in story.ledger.items() if name.startswith("filtered/")}
        told = ", ".join(f"{name} {n}" for name, n in sorted(rules.items(), key=lambda kv: -kv[1]))
        yield Finding(
            "dropped_groups",
            "warning",
            f"{share or 0:.0%} of the groups are refused ({story.recent_span}): {told or 'no rule told'}"
            + (f"; step {short[-1][0] + 1}: {short[-1][1]}" if short else ""),
            "Most of what is written is thrown away; at loop.max_refills a step goes on with what it has.",
            "tasks of another difficulty (task.curriculum), a larger algo.group_size, fewer task.filters",
        )


RULES = (find_silence, find_truncation, failing_reward, failing_environment, find_dropped_groups)
