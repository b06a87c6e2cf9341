"""Images as grids of patches, whose proportions are kept: the towers of Qwen-VL (arXiv:2409.12191).

    pixels [H, W, 3] ──> patches [p, 3·t·s·s], those of one cell behind each other ──tower──> features [p / m², D]

s pixels a side of a patch · m patches a side of a cell · t frames of a patch · F frames of an image: 1, or t of a video
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig
    from rondel.models.image_form import PixelDefaults


class PatchGrids:
    """A tower that is called with the patches of all images behind each other and with the size of each grid."""

    name = "patches"

    def sight_fields(
        self, config: Any, pixels: PixelDefaults, given: dict[str, Any], *, random: bool
    ) -> dict[str, Any]:
        tower, size = config.vision_config, given.get("size") or {}
        least = 4 * (tower.patch_size * tower.spatial_merge_size) ** 2 if random else pixels.least
        return {
            "placeholder": config.image_token_id,
            "patch": tower.patch_size,
            "merge": tower.spatial_merge_size,
            "temporal": tower.temporal_patch_size,
            "least": int(given.get("min_pixels") or size.get("shortest_edge") or least),
            "most": int(given.get("max_pixels") or size.get("longest_edge") or pixels.most),
        }

    def pixel_values(self, image: Image, sight: ImageProcessorConfig) -> np.ndarray:
        """[p, 3*t*s*s]"""
        s, m = sight.patch, sight.merge
        frames = sight.normalized(image.pixels).reshape(image.frames, image.rows, m, s, image.columns, m, s, 3)
        cells = frames.transpose(1, 4, 2, 5, 7, 0, 3, 6)  # [rows, columns, m, m, 3, F, s, s]
        if image.frames == 1:
            cells = np.broadcast_to(cells, (*cells.shape[:5], sight.temporal, s, s))
        return cells.reshape(image.tokens * m * m, -1)

    def encode(
        self, model: Any, pixels: Tensor, sight: ImageProcessorConfig, images: Sequence[Image]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        grids = _grid_sizes(sight, images).to(pixels.device)
        out = model.base_model.visual(pixels, grid_thw=grids)
        return out.pooler_output, tuple(getattr(out, "deepstack_features", None) or ())

    def own_inputs(
        self, sight: ImageProcessorConfig, kinds: Tensor, pixels: Tensor, media: Sequence[ImagePlaceholder]
    ) -> dict[str, Tensor]:
        given, of_videos = {"mm_token_type_ids": kinds}, [place.image.frames > 1 for place in media]
        rows = pixels.split([place.image.tokens * sight.merge**2 for place in media])
        for video, values, grids in (
            (False, "pixel_values", "image_grid_thw"),
            (True, "pixel_values_videos", "video_grid_thw"),
        ):
            if video in of_videos:
                given[values] = torch.cat([part for part, own in zip(rows, of_videos) if own == video])
                own_images = [p.image for p in media if (p.image.frames > 1) == video]
                given[grids] = _join_steps(_grid_sizes(sight, own_images), [image.time for image in own_images])
        if sight.video is not None and sight.video.rate is not None and "video_grid_thw" in given:
            given["second_per_grid_ts"] = _step_seconds(
                sight.video.rate, [p.image for p in media if p.image.frames > 1]
            )
        return given

    def processor_config(self, sight: ImageProcessorConfig) -> dict[str, Any]:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": sight.patch,
            "merge_size": sight.merge,
            "temporal_patch_size": sight.temporal,
            "size": {"shortest_edge": sight.least, "longest_edge": sight.most},
            "image_mean": list(sight.mean),
            "image_std": list(sight.std),
        }


def _grid_sizes(sight: ImageProcessorConfig, images: Sequence[Image]) -> Tensor:
    """[images, 3] times, rows and columns of patches. A tower attends within a time, so steps of a video are images."""
    return torch.tensor([[1, image.rows * sight.merge, image.columns * sight.merge] for image in images])


def _join_steps(grids: Tensor, times: Sequence[int | None]) -> Tensor:
    """One grid for all steps of a video that stand behind each other."""
    first = torch.tensor([time is None for time in times])
    joined = grids[first].clone()
    joined[:, 0] = (first.cumsum(0) - 1).bincount()
    return joined


def _step_seconds(rate: float, steps: Sequence[Image]) -> Tensor:
    """[videos] seconds from one step to the next, by the positions of the last ones."""
    found: list[list[int]] = []
    for step in steps:
        if step.time is None:
            found.append([])
        else:
            found[-1].append(step.time)
    return torch.tensor([times[-1] / len(times) / rate if times else 1.0 for times in found])
