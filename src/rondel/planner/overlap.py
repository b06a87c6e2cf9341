"""The two stages of a step, rollouts and training: how long the step is and who waits for whom. Pure arithmetic.

R  seconds of a step's rollouts                  U  seconds of a weight update on the trainer's path
T  seconds of a step's training                  h  seconds of them in which the engines stand still

              overlapped (split placement, S >= 1)     in turn (S = 0, or one set of devices)
step          max(R + h, T + U)                        R + T + U
trainer idle  1 - (T + U) / step                       1 - (T + U) / step
engines idle  1 - (R + h) / step                       1 - R / step

S = 1 is enough to overlap: with S the step is at least (R + T) / (S + 1), and (R + T) / 2 <= max(R, T). S counts again
for the longest answer, which is written one token after the other and has S + 1 steps to end: R >= longest / (S + 1).

More devices: e + n engines make it R·e / (e + n), r + 1 ranks make it T·r / (r + 1).

Pools, in samples a second: a devices that generate r each, l that train t each, G = a + l. Then R = 1/(a·r) and
T = 1/(l·t) are seconds a sample, so that the rate is

overlapped    min(a·r, l·t)
in turn       a·r·l·t / (a·r + l·t)          two pools; all devices in turn: G·r·t / (r + t)
balanced      a/G = t / (r + t)              overlapped, it is as fast as all devices in turn
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, inf
from typing import Literal


def stages_overlap(split: bool, staleness: int) -> bool:
    """Whether rollouts and training go on at the same time."""
    return split and staleness > 0


def idle_share(busy: float, seconds: float) -> float:
    """1 - busy / seconds, at least 0: busy for 6 of 8 seconds -> 0.25."""
    return max(0.0, 1 - busy / seconds)


def longest_answer_bound(longest: float, staleness: int) -> float:
    """The least seconds of a step's rollouts: an answer may take S + 1 steps."""
    return longest / (staleness + 1)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, or of one sample: `StepTimes(6.0, 3.0, overlap=True).seconds` is 6, without overlap 9."""

    rollouts: float
    training: float
    overlap: bool

    @classmethod
    def with_update(cls, rollouts: float, training: float, *, update: float, pause: float, overlap: bool) -> StepTimes:
        """With a weight update of U = `update` seconds, of which the engines stand still h = `pause`."""
        return cls(rollouts + (pause if overlap else 0.0), training + update, overlap)

    @classmethod
    def from_rates(cls, engines: float, trainer: float, *, overlap: bool) -> StepTimes:
        """Of two pools, from what each does in a second."""
        return cls(1 / engines, 1 / trainer, overlap)

    @property
    def seconds(self) -> float:
        return max(self.rollouts, self.training) if self.overlap else self.rollouts + self.training

    @property
    def rate(self) -> float:
        """Steps, or samples, a second."""
        return 1 / self.seconds

    @property
    def trainer_idle(self) -> float:
        return idle_share(self.training, self.seconds)

    @property
    def engine_idle(self) -> float:
        return idle_share(self.rollouts, self.seconds)

    @property
    def waiting(self) -> Literal["trainer", "engine"]:
        """The side that stands still for longer."""
        return "trainer" if self.rollouts >= self.training else "engine"

    @property
    def bottleneck(self) -> Literal["rollout", "train"]:
        """The stage that takes longer."""
        return "rollout" if self.rollouts > self.training else "train"

    @property
    def rollout_share(self) -> float:
        """The rollouts' share of the work of both stages."""
        return self.rollouts / (self.rollouts + self.training)

    def overlapped(self) -> StepTimes:
        return replace(self, overlap=True)

    def in_turn(self) -> StepTimes:
        return replace(self, overlap=False)

    def scaled(self, *, engines: float = 1.0, ranks: float = 1.0) -> StepTimes:
        """With so many times the engines, and so many times the ranks."""
        return replace(self, rollouts=self.rollouts / engines, training=self.training / ranks)

    def speedup_over(self, other: StepTimes) -> float:
        return other.seconds / self.seconds

    def matching_engines(self, engines: int, most: int) -> int:
        """The fewest engines, `most` at most, with which rollouts are no longer than training."""
        return most if self.rollouts * engines > self.training * most else ceil(self.rollouts * engines / self.training)


def engine_share(r: float, t: float) -> float:
    """The share of the devices that generates where both pools are always busy."""
    return t / (r + t)


def best_engine_devices(G: int, r: float, t: float, *, unit: int = 1, most: float = inf) -> int:
    """The devices of engines, in whole engines of `unit`, that are fastest overlapped.

    `most`: samples a second that the longest answer allows, however many engines there are. The best is a neighbour
    of the share that keeps both pools busy, or of the fewest devices that reach `most`.
    """
    shares, largest = (engine_share(r, t) * G / unit, min(most, G * r) / r / unit), max(1, (G - 1) // unit)
    near = {min(max(1, n), largest) * unit for share in shares for n in (floor(share), ceil(share))}
    return max(sorted(near), key=lambda a: min(a * r, most, (G - a) * t))
