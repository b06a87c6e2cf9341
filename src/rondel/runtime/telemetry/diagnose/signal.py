"""Is there anything to learn from: unanimous groups, a reward that falls, or rises for the wrong reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from rondel.runtime.telemetry.card import compared_intervals
from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import LEAST, RECENT, Story
from rondel.runtime.telemetry.reward_hacking import PAID, HackingMonitor
from rondel.runtime.telemetry.scores import score_text

NONE, LITTLE = 0.1, 0.2  # share of groups with a signal
NEAR = 0.1  # of the reward's range, from its end: all wrong, or all right
FELL = 0.3  # of the range by which a reward has collapsed


def no_signal(story: Story) -> Iterator[Finding]:
    share, reward = story.recent_mean("filter/signal_fraction"), story.recent_mean("score/reward_mean")
    first = story.first_mean("filter/signal_fraction")
    if share is None and first == 0:  # as plain after one step as after many
        share, reward = first, story.first_mean("score/reward_mean")
    if share is None or reward is None or share >= LITTLE or not story.compares_answers:
        return
    highs, lows = [v for _, v in story.series("score/reward_max")], [v for _, v in story.series("score/reward_min")]
    span = max(highs) - min(lows)
    evidence = (
        f"{share:.0%} of the groups have answers that differ in reward, mean reward {reward:.3g} ({story.recent_span})"
    )
    if span and reward > max(highs) - NEAR * span:
        yield Finding(
            "solved",
            "note",
            evidence,
            "Nearly every group is unanimous because nearly every answer is right: the tasks have nothing more to "
            "teach.",
            "harder tasks (task.data), or task.curriculum; otherwise stop here",
        )
        return
    where = (
        "every answer earns the same"
        if not span
        else "nearly all are wrong"
        if reward < min(lows) + NEAR * span
        else "groups agree"
    )
    yield Finding(
        "no_signal",
        "error" if share < NONE else "warning",
        f"{evidence}; {where}",
        "An advantage is a difference within a group: a group whose answers all earn the same teaches nothing.",
        "`rondel check RUN.toml` (does the reward tell gold from wrong?), easier tasks or task.curriculum, a larger "
        "algo.group_size, loop.warmup.steps",
        weight=3 - share,
    )


def reward_collapse(story: Story) -> Iterator[Finding]:
    series = [(number, v) for number, v in story.series("score/reward_mean") if math.isfinite(v)]
    if len(series) < 2 * RECENT:
        return
    means = [statistics.fmean(v for _, v in series[i : i + RECENT]) for i in range(len(series) - RECENT + 1)]
    best = max(range(len(means)), key=means.__getitem__)
    now, high, low = means[-1], means[best], min(v for _, v in story.series("score/reward_min"))
    noise = statistics.stdev(v for _, v in series[best : best + RECENT]) * math.sqrt(2 / RECENT)
    if high - now > max(FELL * (high - low), 3 * noise, 1e-9):
        yield Finding(
            "reward_collapse",
            "error",
            f"mean reward {high:.3g} in steps {series[best][0]} to {series[best + RECENT - 1][0]}, {now:.3g} in "
            f"{story.recent_span}",
            "The policy has unlearned what it could: most often the learning rate is too high, or the tokens are too "
            "stale.",
            "go on from an earlier checkpoint (--model.path=RUN/checkpoints/step-…) with a lower trainer.lr, or "
            "algo.kl.kind",
            weight=2 + (high - now) / max(high - low, 1e-9),
        )


def reward_hacking(story: Story) -> Iterator[Finding]:
    """The alarms of a live run, heard again over the rows."""
    if len(story.steps) < 2 * RECENT:
        return
    told: list[tuple[int, str]] = []
    ear = HackingMonitor()
    for done in story.steps:
        told += [(done.number, text) for text in ear.check_step(done.number, dict(done.row))]
    told = told or [(step, text) for step, text in story.said if text.startswith("the reward rose from")]
    if told:
        step, text = told[-1]
        yield Finding(
            "reward_hacking",
            "warning",
            f"step {step}: {text}",
            "The reward rises beside something that it should not pay for.",
            "`rondel view RUN --min-reward 1` (read the best paid answers), then weigh the parts of task.reward anew",
            weight=2,
        )


def length_bias(story: Story) -> Iterator[Finding]:
    paid = story.recent_mean("score/length_correlation")
    if paid is not None and len(story.recent_values("score/length_correlation")) >= RECENT and abs(paid) > PAID:
        more = "longer" if paid > 0 else "shorter"
        yield Finding(
            "length_bias",
            "warning",
            f"within groups reward and length correlate at {paid:+.2f} ({story.recent_span})",
            f"The {more} of two answers to the same task is the better paid one: length will drift that way whatever "
            "it is worth.",
            "look with `rondel view RUN`; if length is not the point, algo.kind = 'dr_grpo' and a reward that does "
            "not see it",
        )


def find_overfitting(story: Story) -> Iterator[Finding]:
    """Held out worse, trained better. What was evaluated within the supervised phase tells nothing of a reward."""
    evals = [e for e in story.evals if e["profile"] == story.evals[0]["profile"] and e["step"] >= story.shown]
    if len(evals) < 2:
        return
    best, last = max(evals, key=lambda e: e["score"]), evals[-1]
    rewards = {s.number: s.row["score/reward_mean"] for s in story.steps if "score/reward_mean" in s.row}
    then = [v for step, v in rewards.items() if step <= best["step"]][-RECENT:] or list(rewards.values())[:LEAST]
    now = [v for step, v in rewards.items() if step > best["step"]][-RECENT:]
    if not then or not now or statistics.fmean(now) <= statistics.fmean(then):
        return
    (low, high), (low_now, high_now) = compared_intervals(best, last)
    fell, half = best["score"] - last["score"], (high - low + high_now - low_now) / 4
    if fell > max(0.03, half):
        yield Finding(
            "overfit",
            "error" if high_now < low else "warning",
            f"held-out score {score_text(best['score'], story.scores_are_shares)} after step {best['step']}, "
            f"{score_text(last['score'], story.scores_are_shares)} after "
            f"step {last['step']}, while the training "
            f"reward went from {statistics.fmean(then):.3g} to {statistics.fmean(now):.3g}",
            "The policy learns the training tasks, or the reward, and not the skill.",
            f"the checkpoint nearest to step {best['step']}; more tasks (task.data), a lower trainer.lr, algo.kl.kind",
            weight=2,
        )


RULES = (no_signal, reward_collapse, reward_hacking, length_bias, find_overfitting)
