"""Advice on how to divide devices between engines and trainer, in words; the arithmetic is that of `overlap`."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from rondel.planner.overlap import StepTimes, best_engine_devices


class SplitAdvice(NamedTuple):
    bound: str  # "rollout" or "train"
    engines: int
    trainers: int
    gain_async: float  # over a synchronous split of the same devices
    gain_colocated: float  # of the balanced async split over perfect colocation
    text: str


def advise_split(
    G: int,
    r: float,
    t: float,
    *,
    trainers: int = 0,
    unit: int = 1,
    most: float = inf,
    most_overlapped: float | None = None,
    overlap: bool = True,
) -> SplitAdvice:
    """`r`, `t`: samples a second of one device that generates, that trains. `unit`: devices of
    one engine. `trainers`: of the split at hand, whose pools work at the same time if they `overlap`. `most`: samples a
    second that the longest answer allows; `most_overlapped`: with loop.max_staleness = 1, if it is 0 now.
    """
    all_in_turn = StepTimes.from_rates(min(G * r, most), G * t, overlap=False)
    share = all_in_turn.rollout_share
    if unit >= G:
        what = "one device" if G == 1 else f"{G} devices, all of them one engine's"
        text = f"{what}: {share:.0%} of the time generates, {1 - share:.0%} trains"
        return SplitAdvice(all_in_turn.bottleneck, G, 0, 1.0, 1.0, text)

    def divided(a: int) -> StepTimes:
        return StepTimes.from_rates(min(a * r, apart), (G - a) * t, overlap=True)

    apart = most if most_overlapped is None else most_overlapped
    best = best_engine_devices(G, r, t, unit=unit, most=apart)
    a = G - trainers if trainers else best
    now, fastest = divided(a), divided(best)
    bound = (now if trainers else all_in_turn).bottleneck
    gain_async, gain_colocated = now.speedup_over(now.in_turn()), fastest.speedup_over(all_in_turn)
    if trainers and not overlap:
        turns = StepTimes.from_rates(min(a * r, most), (G - a) * t, overlap=False)
        bound = turns.bottleneck
        text = (
            f"{bound}-bound: {a} devices generate {min(a * r, most):.3g} samples/s, then {G - a} train "
            f"{(G - a) * t:.3g}/s; the trainer idles {turns.trainer_idle:.0%}, the engines {turns.engine_idle:.0%}; "
            f"loop.max_staleness = 1 would give {now.speedup_over(turns) - 1:+.0%}"
        )
    elif trainers:
        text = (
            f"{bound}-bound: {a} devices generate {min(a * r, most):.3g} samples/s, {G - a} train "
            f"{(G - a) * t:.3g}/s; the faster pool idles {max(now.trainer_idle, now.engine_idle):.0%}"
        )
        if (gain := fastest.speedup_over(now)) > 1:
            text += f"; {best}:{G - best} would give {gain - 1:+.0%}"
    else:
        text = (
            f"{share:.0%} of the time generates, {1 - share:.0%} trains: {bound}-bound. Apart and asynchronous, "
            f"{a}:{G - a} would be {gain_colocated:.0%} as fast"
        )
    if trainers and bound == "rollout" and a * r >= most:
        text += (
            "; the longest answer sets the pace, and more engines do not help: a lower "
            "engine.sampling.max_tokens or a higher loop.max_staleness does"
        )
    return SplitAdvice(bound, best, G - best, gain_async, gain_colocated, text)


def recommend_placement(devices: int) -> str:
    """What published systems found; decide by the two rates where they are known (arXiv:2409.19256; C1)."""
    if devices <= 64:
        return "all roles together on all devices, in turn"
    if devices <= 128:
        return "engines and trainer apart; reference and reward beside one of them"
    return "pools apart; more than about a thousand devices: several controllers (see `rondel simulate --chain`)"
