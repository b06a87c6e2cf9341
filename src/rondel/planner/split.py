"""Two pools or one: rates, idle shares, and how to divide devices.  Samples (or steps) a second.

R = a·r   a engines' devices at r each        T = l·t   l trainer's devices at t each        G = a + l
overlapped    min(R, T)                  idle: of the faster pool 1 - min/max
synchronous   R·T / (R + T)              one pool waits for the other
colocated     G·r·t / (r + t)            all devices do both in turn
balanced      a/G = t / (r + t)          then overlapped = colocated, and twice the synchronous split
"""

from __future__ import annotations

from math import ceil, floor
from typing import NamedTuple


def overlapped(R: float, T: float) -> float:
    return min(R, T)


def synchronous(R: float, T: float) -> float:
    return R * T / (R + T)


def colocated(G: float, r: float, t: float) -> float:
    return G * r * t / (r + t)


def engine_share(r: float, t: float) -> float:
    """Of the devices, so that both pools are always busy."""
    return t / (r + t)


def idle(R: float, T: float) -> float:
    """Of the faster pool."""
    return 1 - min(R, T) / max(R, T)


def balanced(G: int, r: float, t: float, *, unit: int = 1) -> int:
    """Engines' devices, in whole engines, that are fastest overlapped: one of the two splits beside the share that keeps both pools busy."""
    wanted, most = engine_share(r, t) * G / unit, max(1, (G - 1) // unit)
    near = {min(max(1, n), most) * unit for n in (floor(wanted), ceil(wanted))}
    return max(sorted(near), key=lambda a: overlapped(a * r, (G - a) * t))


class Advice(NamedTuple):
    bound: str  # "rollout" or "train"
    engines: int
    trainers: int
    gain_async: float  # over a synchronous split of the same devices
    gain_colocated: float  # of the balanced async split over perfect colocation
    text: str


def advise(G: int, r: float, t: float, *, trainers: int = 0, unit: int = 1) -> Advice:
    """`r`, `t`: samples a second of one device that generates, that trains. `unit`: devices of one engine. `trainers`: of the split at hand."""
    best = balanced(G, r, t, unit=unit) if G > 1 else G
    a = G - trainers if trainers else best
    R, T = a * r, (G - a) * t
    bound = "rollout" if (R < T if trainers else r < t) else "train"
    if G == 1:
        return Advice(bound, 1, 0, 1.0, 1.0, f"one device: {t / (r + t):.0%} of the time generates, {r / (r + t):.0%} trains")
    now, both = overlapped(R, T), overlapped(best * r, (G - best) * t)
    if not trainers:
        text = (
            f"{t / (r + t):.0%} of the time generates, {r / (r + t):.0%} trains: {bound}-bound. "
            f"Apart and asynchronous, {a}:{G - a} would be {both / colocated(G, r, t):.0%} as fast"
        )
        return Advice(bound, best, G - best, now / synchronous(R, T), both / colocated(G, r, t), text)
    text = f"{bound}-bound: {a} devices generate {R:.3g} samples/s, {G - a} train {T:.3g}/s; the faster pool idles {idle(R, T):.0%}"
    if both > now:
        text += f"; {best}:{G - best} would give {both / now - 1:+.0%}"
    return Advice(bound, best, G - best, now / synchronous(R, T), both / colocated(G, r, t), text)


def placement(devices: int) -> str:
    """What published systems found; decide by the two rates where they are known (arXiv:2409.19256; C1)."""
    if devices <= 64:
        return "all roles together on all devices, in turn"
    if devices <= 128:
        return "engines and trainer apart; reference and reward beside one of them"
    return "pools apart; more than about a thousand devices: several controllers (see `rondel simulate --chain`)"
