"""Videos as their frames: the steps of time that a model sees, and how large each frame is.

frames   f0 f1 │ f2 f3 │ f4 f4    equal sizes; the last one is repeated until the steps are whole
steps      0   │   1   │   2      each an Image of `step` frames, with a run of placeholders behind its time
apart    <0.2 seconds><start>░░<end><1.2 seconds><start>░░<end><2.0 seconds><start>░░<end>
joined   <start>░░░░░░<end>         the time of a step is in its positions alone
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class VideoProcessorConfig:
    """How a model reads videos in steps: apart in the text, each behind its time (Qwen3-VL), or joined (Qwen2-VL).

    placeholder   the token that stands where a step is seen
    frame         tokens around the placeholders of each step; None where steps are joined
    step          frames of a step, which its tower merges
    least, most   pixels of all frames together, of joined steps those of each frame; they are scaled to lie between
    rate          positions a second, where steps are joined; None: one a step
    """

    placeholder: int
    frame: tuple[int, int] | None
    step: int
    least: int
    most: int
    rate: float | None = None

    def target_size(self, width: int, height: int, frames: int, *, cell: int, image_most: int) -> tuple[int, int]:
        """(width, height) of every frame: whole cells, proportions kept as far as they go. `image_most`: pixels that
        one step may have.
        """
        if min(width, height) < cell:
            scale = max(cell / height, cell / width)
            width, height = int(width * scale), int(height * scale)
        frames = max(frames, self.step)
        counted = round(frames / self.step) * self.step
        most = min(self.most, image_most * counted)
        sides = [round(side / cell) * cell for side in (width, height)]
        if counted * math.prod(sides) > most:
            scale = math.sqrt(frames * width * height / most)
            sides = [max(cell, math.floor(side / scale / cell) * cell) for side in (width, height)]
        elif counted * math.prod(sides) < min(self.least, most):
            scale = math.sqrt(min(self.least, most) / (frames * width * height))
            sides = [math.ceil(side * scale / cell) * cell for side in (width, height)]
        return sides[0], sides[1]

    def step_times(self, times: Sequence[float]) -> list[float]:
        """Seconds of each step: halfway between its first and its last frame."""
        padded = [*times, *[times[-1]] * (-len(times) % self.step)]
        return [(padded[i] + padded[i + self.step - 1]) / 2 for i in range(0, len(padded), self.step)]

    def written(self, times: Sequence[float], tokenizer: Any) -> str:
        """What stands for a video whose frames have these times, in seconds: a placeholder for each step."""
        if self.frame is None:
            return tokenizer.convert_ids_to_tokens(self.placeholder) * math.ceil(len(times) / self.step)
        begin, slot, end = tokenizer.convert_ids_to_tokens([self.frame[0], self.placeholder, self.frame[1]])
        return "".join(f"<{time:.1f} seconds>{begin}{slot}{end}" for time in self.step_times(times))

    def step_positions(self, times: Sequence[float]) -> list[int | None]:
        """Where each step stands behind the first one, in positions; None: it begins anew (Image.time)."""
        steps = math.ceil(len(times) / self.step)
        if self.frame is not None:
            return [None] * steps
        apart = 1.0
        if self.rate is not None:  # frames a second in the mean; one frame alone needs none
            seconds = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
            apart = round(self.rate * self.step * seconds, 6)
        return [None, *(int(np.float32(i) * np.float32(apart)) for i in range(1, steps))]
