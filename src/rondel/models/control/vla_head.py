"""What a vision-language-action model reads: of each step its picture and the instruction of its episode, packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.media import Image, ImagePlaceholder, position_rows
from rondel.models.control.chunk_head import ChunkHead
from rondel.models.control.flow_vla import PicturePrefix
from rondel.models.noise import draw_normal
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.packed_steps import PackedSteps
from rondel.models.vision_families import FAMILIES


class VlaHead(ChunkHead):
    """Over a `FlowVla`.

    rows of a step  pixels of a picture [h·w·3], 0 to 255, then the chain as in `ChunkHead`
    """

    def describe(self, max_tokens: int, temperature: float) -> str:
        height, width = self.model.config.frame
        return (
            super()
            .describe(max_tokens, temperature)
            .replace(f"{self.observed} numbers of an observation", f"a picture of {height}·{width} pixels")
        )

    def states(self, steps: PackedSteps) -> Any:
        """What the model gives for M steps; equal pictures under equal instructions are read once."""
        shape, cell = (*self.model.config.frame, 3), self.model.sight.token_pixels
        pixels = steps.rows[:, : self.observed].clamp(0, 255).cpu().numpy().astype(np.uint8)
        prompts = [tuple(own.tolist()) for own in steps.prompt.tensor_split(steps.begins[1:].cpu())]
        numbers: dict[tuple[tuple[int, ...], Image], int] = {}
        of_step = [
            numbers.setdefault((prompts[of], Image.from_pixels(own.reshape(shape), cell)), len(numbers))
            for of, own in zip(steps.prompt_of.tolist(), pixels, strict=True)
        ]
        return self.model(self.prefix_of(list(numbers)), torch.tensor(of_step, device=steps.rows.device))

    def prefix_of(self, read: list[tuple[tuple[int, ...], Image]]) -> PicturePrefix:
        """Picture first, then the instruction."""
        config, device = self.model.backbone.config, self.weight.device
        begin, end, place = (getattr(config, mark) for mark in FAMILIES[config.model_type].marks)
        tokens, positions, segments, rows = list[int](), list[np.ndarray](), list[PackedSegment](), list[np.ndarray]()
        for prompt, image in read:
            own = [begin, *[place] * image.tokens, end, *prompt]
            rows.append(len(tokens) + 1 + np.arange(image.tokens))
            segments.append(PackedSegment(len(tokens), len(own)))
            positions.append(position_rows(len(own), [ImagePlaceholder(1, image)]))
            tokens += own

        def on_device(numbers: Any) -> Tensor:
            return torch.as_tensor(numbers, dtype=torch.int64, device=device)

        return PicturePrefix(
            on_device(tokens),
            on_device(np.concatenate(positions, 1)),
            PackedLayout(segments, device),
            [image for _, image in read],
            on_device(np.concatenate(rows)),
            on_device([s.start + s.length - 1 for s in segments]),
        )

    def probe_rows(self, key: int, n: int) -> np.ndarray:
        """Under pictures of noise."""
        rows = super().probe_rows(key, n)
        noise = np.stack([draw_normal(key, n + t, self.observed) for t in range(n)])
        rows[:, : self.observed] = np.clip(128 + 64 * noise, 0, 255).round()
        return rows
