"""Videos as their frames: the steps of time that a model sees, and how large each frame is.

frames   f0 f1 │ f2 f3 │ f4 f4    equal sizes; the last one is repeated until the steps are whole
steps      0   │   1   │   2      each an Image of `step` frames, with a run of placeholders behind its time
written  <0.2 seconds><start>░░<end><1.2 seconds><start>░░<end><2.0 seconds><start>░░<end>
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VideoProcessorConfig:
    """How a model reads videos whose steps stand apart in the text (Qwen3-VL).

    placeholder   the token that stands where a step is seen
    frame         tokens around each run of placeholders
    step          frames of a step, which its tower merges
    least, most   pixels of all frames together, which are scaled to lie between
    """

    placeholder: int
    frame: tuple[int, int]
    step: int
    least: int
    most: int

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
        begin, slot, end = tokenizer.convert_ids_to_tokens([self.frame[0], self.placeholder, self.frame[1]])
        return "".join(f"<{time:.1f} seconds>{begin}{slot}{end}" for time in self.step_times(times))
