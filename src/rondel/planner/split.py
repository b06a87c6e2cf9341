"""Two pools or one: rates, idle shares, and how to divide devices.  Samples (or steps) a second.

R = a·r   a engines' devices at r each        T = l·t   l trainer's devices at t each        G = a + l
overlapped    min(R, T)                  idle: of the faster pool 1 - min/max
synchronous   R·T / (R + T)              one pool waits for the other
colocated     G·r·t / (r + t)            all devices do both in turn
balanced      a/G = t / (r + t)          then overlapped = colocated, and twice the synchronous split
most          samples a second that the longest answer allows, however many engines there are: R = min(a·r, most)
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import NamedTuple


def overlapped_rate(R: float, T: float) -> float:
    return min(R, T)


def synchronous_throughput(R: float, T: float) -> float:
    return R * T / (R + T)


def colocated_throughput(G: float, r: float, t: float) -> float:
    return G * r * t / (r + t)


def engine_share(r: float, t: float) -> float:
    """Of the devices, so that both pools are always busy."""
    return t / (r + t)


def idle_share(R: float, T: float) -> float:
    """Of the faster pool."""
    return 1 - min(R, T) / max(R, T)


def balanced_split(G: int, r: float, t: float, *, unit: int = 1, most: float = inf) -> int:
    """Engines' devices, in whole engines, that are fastest overlapped: a split beside the share that
    keeps both pools busy, or the fewest that reach `most`.
    """
    shares, largest = (engine_share(r, t) * G / unit, min(most, G * r) / r / unit), max(1, (G - 1) // unit)
    near = {min(max(1, n), largest) * unit for share in shares for n in (floor(share), ceil(share))}
    return max(sorted(near), key=lambda a: overlapped_rate(min(a * r, most), (G - a) * t))


class SplitAdvice(NamedTuple):
    bound: str  # "rollout" or "train"
    engines: int
    trainers: int
    gain_async: float  # over a synchronous split of the same devices
    gain_colocated: float  # of the balanced async split over perfect colocation
    text: str


def advise_split(G: int, r: float, t: float, *, trainers: int = 0, unit: int = 1, most: float = inf) -> SplitAdvice:
    """`r`, `t`: samples a second of one device that generates, that trains. `unit`: devices of
    one engine. `trainers`: of the split at hand.
    """
    best = balanced_split(G, r, t, unit=unit, most=most) if G > 1 else G
    a = G - trainers if trainers else best
    R, T = min(a * r, most), (G - a) * t
    in_turn = min(G * r, most)  # of all devices that generate
    share = G * t / (in_turn + G * t)
    bound = "rollout" if (R < T if trainers else in_turn < G * t) else "train"
    if G == 1:
        return SplitAdvice(
            bound, 1, 0, 1.0, 1.0, f"one device: {share:.0%} of the time generates, {1 - share:.0%} trains"
        )
    both = synchronous_throughput(in_turn, G * t)
    now, fastest = overlapped_rate(R, T), overlapped_rate(min(best * r, most), (G - best) * t)
    if not trainers:
        text = f"{share:.0%} of the time generates, {1 - share:.0%} trains: {bound}-bound. Apart and asynchronous, {a}:{G - a} would be {fastest / both:.0%} as fast"
        return SplitAdvice(bound, best, G - best, now / synchronous_throughput(R, T), fastest / both, text)
    text = f"{bound}-bound: {a} devices generate {R:.3g} samples/s, {G - a} train {T:.3g}/s; the faster pool idles {idle_share(R, T):.0%}"
    if fastest > now:
        text += f"; {best}:{G - best} would give {fastest / now - 1:+.0%}"
    if most == R:
        text += "; the longest answer sets the pace, and more engines do not help: a lower engine.sampling.max_tokens or a higher loop.max_staleness does"
    return SplitAdvice(bound, best, G - best, now / synchronous_throughput(R, T), fastest / both, text)


def recommend_placement(devices: int) -> str:
    """What published systems found; decide by the two rates where they are known (arXiv:2409.19256; C1)."""
    if devices <= 64:
        return "all roles together on all devices, in turn"
    if devices <= 128:
        return "engines and trainer apart; reference and reward beside one of them"
    return "pools apart; more than about a thousand devices: several controllers (see `rondel simulate --chain`)"
