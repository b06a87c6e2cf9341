"""How the policy moves: not at all, too far, or into a corner."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import LEAST, RECENT, Story

COLLAPSED, EXPLODED = 0.15, 1.5  # of the entropy at the beginning of the RL phase
FAR, RUNAWAY = 1.0, 10.0  # nats a token from the start
BLOWN = 10.0  # times the usual norm of a gradient
CLIPPED = 0.3  # share of tokens
EARLY = 6  # steps after the first in which a run diverges
TIGHT = 5.0  # times trainer.clip that every gradient is
FINDING_SCALE = 8  # first steps, in which the loss scale of float16 comes down to where gradients fit


def find_divergence(story: Story) -> Iterator[Finding]:
    """Broken by its first updates: the first step still tells of the weights that the
    phase began with, the next ones do not.
    """
    early = story.steps[: EARLY + 1]
    if len(early) < 2 * LEAST:
        return

    def early_values(name: str) -> tuple[float, list[float]] | None:
        values = [s.row[name] for s in early if name in s.row and math.isfinite(s.row[name])]
        return (values[0], values[1:]) if len(values) > LEAST else None

    seen = []
    if (entropy := early_values("train/entropy")) and (
        min(entropy[1]) < COLLAPSED * entropy[0] or max(entropy[1]) > max(2 * entropy[0], entropy[0] + 1)
    ):
        far = max(entropy[1], key=lambda value: abs(value - entropy[0]))
        seen.append(f"entropy {entropy[0]:.3g} to {far:.3g} nats a token")
    if (kl := early_values("train/kl_to_start")) and max(kl[1]) > kl[0] + FAR:
        seen.append(f"KL to the start {kl[0]:.3g} to {max(kl[1]):.3g} nats a token")
    if (norm := early_values("train/grad_norm")) and max(norm[1]) > BLOWN * norm[0] > 0:
        seen.append(f"gradient norm {norm[0]:.3g} to {max(norm[1]):.3g}")
    reward, now = early_values("score/reward_mean"), story.recent_mean("score/reward_mean")
    worse = reward is not None and now is not None and now < 0.5 * reward[0]
    if worse and reward is not None:
        seen.append(f"mean reward {reward[0]:.3g} to {now:.3g}")
    better = reward is not None and now is not None and now > max(reward[0], 0.1)
    if len(seen) < 2 or better:
        return
    lr = story.first_mean("train/lr", 1) or story.recipe_value("trainer.lr", math.nan)
    yield Finding(
        "diverged",
        "error",
        f"in steps {early[0].number} to {early[-1].number}, with learning rate {lr:.2g}: {'; '.join(seen)}",
        "The first updates threw the policy far from where it began: the learning rate is too high, whatever else is "
        "found.",
        f"trainer.lr = {lr / 10:.1g} or less, from the start again; trainer.optimizer.warmup_steps",
        weight=5,
    )


def entropy_collapse(story: Story) -> Iterator[Finding]:
    first, now = story.first_mean("train/entropy"), story.recent_mean("train/entropy")
    reward = story.recent_mean("score/reward_mean")
    if first is None or now is None or len(story.steps) < 2 * LEAST or not now < COLLAPSED * first:
        return
    top = max((v for _, v in story.series("score/reward_max")), default=0.0)
    right = reward is not None and top > 0 and reward > 0.9 * top
    yield Finding(
        "entropy_collapse",
        "note" if right else "error",
        f"entropy {first:.3g} nats a token at first, {now:.3g} in {story.recent_span}"
        + (f"; mean reward {reward:.3g}" if reward is not None else ""),
        "The answers to a task have become one answer: groups agree, right or wrong, and nothing more is explored.",
        "algo.entropy.coef = 0.001 … 0.01, algo.surrogate.high (clip-higher, `algo.kind = 'dapo'`), a lower trainer.lr",
        weight=1.5,
    )


def entropy_explosion(story: Story) -> Iterator[Finding]:
    first, now = story.first_mean("train/entropy"), story.recent_mean("train/entropy")
    if (
        first is not None
        and now is not None
        and len(story.steps) >= 2 * LEAST
        and now > max(EXPLODED * first, first + 0.5)
    ):
        yield Finding(
            "entropy_explosion",
            "error",
            f"entropy {first:.3g} nats a token at first, {now:.3g} in {story.recent_span}",
            "The policy is drifting towards noise.",
            "a lower trainer.lr, algo.entropy.coef = 0 if it is set, algo.kl.kind; look at the answers with `rondel "
            "view RUN`",
            weight=1.5,
        )


def kl_runaway(story: Story) -> Iterator[Finding]:
    for name, whom in (("train/kl_to_start", "the weights of the start"), ("train/kl_ref", "the reference")):
        first, now = story.first_mean(name), story.recent_mean(name)
        if first is None or now is None or not now > max(FAR, 4 * first):
            continue
        yield Finding(
            "kl_runaway",
            "error" if now > RUNAWAY else "warning",
            f"KL to {whom} {first:.3g} nats a token at first, {now:.3g} in {story.recent_span}",
            "The policy has left the region of its start; what it could before is being forgotten.",
            "a lower trainer.lr, or algo.kl.kind with a coefficient",
        )
        return


def loss_scale_overflows(story: Story) -> Iterator[Finding]:
    """Float16 under a loss scale: the first steps find the scale, later ones should rarely lose an update."""
    lost = [s.number for s in story.steps if s.row.get("train/overflows", 0.0) > 0]
    late = [number for number in lost if number > FINDING_SCALE]
    if len(late) < 3 or len(late) < 0.05 * len(story.steps):
        return
    yield Finding(
        "loss_scale_overflows",
        "warning",
        f"{len(lost)} of {len(story.steps)} steps lost an update to float16: {', '.join(map(str, late[:5]))}"
        f"{' …' * (len(late) > 5)}",
        "Gradients of these steps were beyond 65504 at the loss scale, so their answers taught nothing.",
        "model.dtype = 'bfloat16', which has the range of float32; a lower trainer.lr if the norm grows",
    )


def gradient_explosion(story: Story) -> Iterator[Finding]:
    series = story.series("train/grad_norm")
    refused = [s for s in story.steps if s.note and not s.note.startswith("overflow")]
    if skipped := [s.number for s in refused]:
        note = refused[0].note
        yield Finding(
            "steps_skipped",
            "error" if len(skipped) >= 3 else "warning",
            f"{len(skipped)} of {len(story.steps)} steps were refused, whole or in part: "
            f"{', '.join(map(str, skipped[:5]))}{' …' * (len(skipped) > 5)}: {note}",
            "A finite-check refused an update: something was not a number, and what it would have moved stayed as it was.",
            f"`rondel replay RUN --step {skipped[0]}`; a lower trainer.lr, model.dtype = 'float32' to rule rounding "
            f"out",
            weight=2,
        )
    usual = [v for _, v in series[:-RECENT] if math.isfinite(v) and v > 0] or [
        v for _, v in series[:LEAST] if math.isfinite(v) and v > 0
    ]
    high = [(s, v) for s, v in series[-RECENT:] if math.isfinite(v)]
    if len(series) < 2 * LEAST or len(usual) < LEAST or not high:
        return
    middle, now = statistics.median(usual), statistics.median(v for _, v in high)
    if now > BLOWN * middle and now > story.recipe_value("trainer.clip", 1.0):
        step, value = max(high, key=lambda sv: sv[1])
        yield Finding(
            "gradient_explosion",
            "error",
            f"gradient norm {middle:.3g} (median), now {now:.3g}, {value:.3g} at step {step}",
            "The steps pull against each other: what follows is usually noise.",
            "a lower trainer.lr, a lower trainer.clip, trainer.optimizer.warmup_steps",
            weight=1.5,
        )


def clipped_always(story: Story) -> Iterator[Finding]:
    norms, clip = story.recent_values("train/grad_norm", 2 * RECENT), story.recipe_value("trainer.clip", 1.0)
    if len(norms) >= RECENT and min(norms) > clip and statistics.median(norms) > TIGHT * clip:
        ratio = statistics.median(norms) / clip
        yield Finding(
            "clipped_always",
            "note",
            f"every gradient of the last {len(norms)} steps was cut, the median one by {ratio:.0f} (trainer.clip = "
            f"{clip:g})",
            "Each step has the same length whatever the gradient says: the learning rate is a length of steps.",
            f"trainer.clip = {statistics.median(norms):.2g}, or leave it and tune trainer.lr for it",
            weight=0.5,
        )


def weights_still(story: Story) -> Iterator[Finding]:
    pairs = [(s.row["train/weights_changed"], s.row.get("train/grad_norm", 0.0), s.row.get("train/lr", math.nan)) for s in story.steps[-RECENT:]
             if "train/weights_changed" in s.row]  # fmt: skip
    if len(pairs) < LEAST:
        return
    changed, norm, lr = (statistics.fmean(p[i] for p in pairs) for i in range(3))
    if lr == 0 or (norm > 0 and changed < 1e-3):
        why = (
            "trainer.lr is 0"
            if lr == 0
            else f"updates of lr {lr:.1e} are smaller than half a step of the weights' numbers"
        )
        yield Finding(
            "weights_still",
            "error" if changed == 0 else "warning",
            f"{changed:.2%} of the weights change in a step, gradient norm {norm:.2g}, learning rate {lr:.1e} "
            f"({story.recent_span})",
            f"Nothing is learned: {why}.",
            "a higher trainer.lr (with an adapter ten times that of full training); the schedule must not have ended "
            "(trainer.schedule, loop.steps)",
            weight=3,
        )


def clip_fraction(story: Story) -> Iterator[Finding]:
    share = story.recent_mean("train/clip_fraction")
    if share is not None and share > CLIPPED:
        yield Finding(
            "clip_fraction",
            "warning",
            f"{share:.0%} of the tokens have a clipped ratio ({story.recent_span})",
            "Most of the batch gives no gradient: the policy has moved too far from the one that the ratio is anchored "
            "to.",
            "fewer loop.updates_per_step, a lower trainer.lr, a smaller loop.max_staleness",
        )


RULES = (
    find_divergence,
    entropy_collapse,
    entropy_explosion,
    kl_runaway,
    loss_scale_overflows,
    gradient_explosion,
    clipped_always,
    weights_still,
    clip_fraction,
)
