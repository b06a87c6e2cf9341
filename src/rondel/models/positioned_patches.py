"""Images as patches with their positions, padded to one length: the tower of Gemma 4, which averages cells of patches.

    pixels [H, W, 3] ──> patches [p, s·s·3], row by row, and (x, y) of each ──tower──> features [p / m², D]

s pixels a side of a patch · m patches a side of a cell. An image is scaled to as many cells as it may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig
    from rondel.models.image_form import PixelDefaults

CELLS = 280  # most of an image, as Gemma4ImageProcessor has them


class PositionedPatches:
    """A model that is called with the patches of each image and the position of each patch; -1 is no patch."""

    name = "positions"

    def sight_fields(
        self, config: Any, pixels: PixelDefaults, given: dict[str, Any], *, random: bool
    ) -> dict[str, Any]:
        tower = config.vision_config
        cell = tower.patch_size * tower.pooling_kernel_size
        most = (given.get("max_soft_tokens") or (12 if random else CELLS)) * cell**2
        return {
            "placeholder": config.image_token_id,
            "patch": tower.patch_size,
            "merge": tower.pooling_kernel_size,
            "temporal": 1,
            "least": most,
            "most": most,
            "frame": (config.boi_token_id, config.eoi_token_id),
            "frame_mark": config.image_token_id,
        }

    def pixel_values(self, image: Image, sight: ImageProcessorConfig) -> np.ndarray:
        """[p, s*s*3], row by row"""
        s, m = sight.patch, sight.merge
        patches = sight.normalized(image.pixels).reshape(image.rows * m, s, image.columns * m, s, 3)
        return patches.transpose(0, 2, 1, 3, 4).reshape(-1, s * s * 3)

    def encode(
        self, model: Any, pixels: Tensor, sight: ImageProcessorConfig, images: Sequence[Image]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        padded, positions = _padded(pixels, sight, images, 0)
        return torch.cat(model.base_model.get_image_features(padded, positions).pooler_output), ()

    def own_inputs(
        self, sight: ImageProcessorConfig, kinds: Tensor, pixels: Tensor, media: Sequence[ImagePlaceholder]
    ) -> dict[str, Tensor]:
        padded, positions = _padded(pixels, sight, [place.image for place in media], sight.most // sight.patch**2)
        return {"pixel_values": padded, "image_position_ids": positions, "mm_token_type_ids": kinds}

    def processor_config(self, sight: ImageProcessorConfig) -> dict[str, Any]:
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": sight.patch,
            "pooling_kernel_size": sight.merge,
            "max_soft_tokens": sight.most // sight.token_pixels**2,
            "image_mean": list(sight.mean),
            "image_std": list(sight.std),
        }


def _padded(pixels: Tensor, sight: ImageProcessorConfig, images: Sequence[Image], least: int) -> tuple[Tensor, Tensor]:
    """[N, P, s*s*3] patches and [N, P, 2] their (x, y); P is that of the largest image, and at least `least`."""
    pieces = list(pixels.split([image.tokens * sight.merge**2 for image in images]))
    places = [_positions(image.rows * sight.merge, image.columns * sight.merge).to(pixels.device) for image in images]
    longest = max([least, *(len(piece) for piece in pieces)])
    pieces.append(pixels.new_zeros(longest, pixels.shape[1]))
    places.append(places[0].new_full((longest, 2), -1))
    return (
        pad_sequence(pieces, batch_first=True)[:-1],
        pad_sequence(places, batch_first=True, padding_value=-1)[:-1],
    )


def _positions(rows: int, columns: int) -> Tensor:
    """[rows * columns, 2] (x, y) of each patch, row by row."""
    at = torch.arange(rows * columns)
    return torch.stack([at % columns, at // columns], 1)
