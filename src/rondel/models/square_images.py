"""Images as squares of one size: SigLIP towers (arXiv:2303.15343) with a projector that averages cells of patches.

    pixels [H, W, 3] ──resized──> [3, S, S] ──tower──> patches [(S/s)², E] ──projector──> features [(S/(s·m))², D]

S pixels a side of every image · s of a patch · m patches a side of a cell
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig
    from rondel.models.image_form import PixelDefaults


class SquareImages:
    """A model that is called with the pixels of all images and knows their one size."""

    name = "squares"

    def sight_fields(
        self, config: Any, pixels: PixelDefaults, given: dict[str, Any], *, random: bool
    ) -> dict[str, Any]:
        tower = config.vision_config
        merge = tower.image_size // tower.patch_size // math.isqrt(config.mm_tokens_per_image)
        return {
            "placeholder": config.image_token_id,
            "patch": tower.patch_size,
            "merge": merge,
            "temporal": 1,
            "least": tower.image_size**2,
            "most": tower.image_size**2,
            "side": tower.image_size,
            "resample": "bilinear",
            "frame": (config.boi_token_index, config.eoi_token_index),
        }

    def pixel_values(self, image: Image, sight: ImageProcessorConfig) -> np.ndarray:
        """[1, 3, S, S]"""
        return sight.normalized(image.pixels).transpose(2, 0, 1)[None]

    def encode(
        self, model: Any, pixels: Tensor, sight: ImageProcessorConfig, images: Sequence[Image]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return model.base_model.get_image_features(pixels).pooler_output.flatten(0, 1), ()

    def own_inputs(
        self, sight: ImageProcessorConfig, kinds: Tensor, pixels: Tensor, media: Sequence[ImagePlaceholder]
    ) -> dict[str, Tensor]:
        return {"pixel_values": pixels, "token_type_ids": kinds}

    def processor_config(self, sight: ImageProcessorConfig) -> dict[str, Any]:
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": sight.side, "width": sight.side},
            "image_mean": list(sight.mean),
            "image_std": list(sight.std),
        }
