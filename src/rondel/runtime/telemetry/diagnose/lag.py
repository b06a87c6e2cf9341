"""Between engine and trainer: how old the tokens are, and whether both sides mean the same by them."""

from __future__ import annotations

from collections.abc import Iterator

from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import RECENT, Story

UNKNOWN, BROKEN = 1e-2, 10.0  # K3 in nats a token that a run may have which does not tell its bound; times the bound
GREW = 10.0  # times the gap of the first steps
FEW = 0.5  # effective sample size of a batch, as a share
FULL = 0.9  # of the limit


def find_logprob_gap(story: Story) -> Iterator[Finding]:
    """Of tokens that the trainer's own version wrote: there nothing but the programs may differ."""
    bound = float(story.facts.get("mismatch_bound", UNKNOWN))
    now, first = story.recent_mean("train/mismatch_k3_lag_0"), story.first_mean("train/mismatch_k3_lag_0", RECENT)
    if now is None or first is None:
        return
    action = (
        "model.dtype = 'float32' or engine.numerics = 'aligned' tells rounding from a bug; algo.correction.kind "
        "= 'importance' bounds what it does"
    )
    if now > bound:
        yield Finding(
            "gap_above_bound",
            "error" if now > BROKEN * bound else "warning",
            f"K3 of fresh tokens {now:.1e} nats, above {bound:g} ({story.recent_span})",
            "Engine and trainer disagree about tokens of the same weights: the gradient is of another policy than the "
            "one that wrote.",
            action,
            weight=2,
        )
    elif len(story.series("train/mismatch_k3_lag_0")) >= 2 * RECENT and now > GREW * first and now > 0.01 * bound:
        yield Finding(
            "gap_growing",
            "warning",
            f"K3 of fresh tokens {first:.1e} nats in the first {RECENT} steps, {now:.1e} in {story.recent_span}",
            "Engine and trainer drift apart while the weights change: it ends in a collapse when nobody looks.",
            action,
        )


def find_uncorrected_lag(story: Story) -> Iterator[Finding]:
    limit, mean = story.recent_mean("loop/lag_limit"), story.recent_mean("loop/lag_mean")
    if not limit or mean is None or mean < FULL * limit or story.facts.get("corrects", True):
        return
    yield Finding(
        "lag_uncorrected",
        "warning",
        f"lag {mean:.2g} of at most {limit:g} versions, and no correction ({story.recent_span})",
        "Nearly every token was written by older weights, and is trained as if it were fresh.",
        "algo.correction.kind = 'importance', or a smaller loop.max_staleness",
        weight=1.5,
    )


def find_stale_samples(story: Story) -> Iterator[Finding]:
    few, dropped = story.recent_mean("train/mismatch_ess_token"), story.recent_mean("train/correction_dropped")
    lag = story.recent_mean("loop/lag_mean") or 0.0
    if lag > 0 and ((few is not None and few < FEW) or (dropped is not None and dropped > 1 - FEW)):
        yield Finding(
            "stale_rollouts",
            "warning",
            f"lag {lag:.2g} versions; the batch is worth {few or 0:.0%} of its tokens, {dropped or 0:.0%} have no "
            f"weight left ({story.recent_span})",
            "The policy has moved so far since the answers were written that few of them still say anything about it.",
            "a smaller loop.max_staleness, a lower trainer.lr",
        )


RULES = (find_logprob_gap, find_uncorrected_lag, find_stale_samples)
