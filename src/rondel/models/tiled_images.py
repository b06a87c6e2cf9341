"""Images as tiles of one size: SigLIP towers with a projector that joins the patches of a cell (pixel shuffle).

    pixels [H, W, 3] ──cut──> tiles, each [3, S, S] ──tower──> patches [(S/s)², E] ──cells──> features [(S/(s·m))², D]

S pixels a side of a tile · s of a patch · m patches a side of a cell. Each tile is an Image: how an image is cut, and
what stands between its tiles, is in core/tiles.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig
    from rondel.models.image_form import PixelDefaults


class TiledImages:
    """A model that is called with all tiles of one row: [1, N, 3, S, S]."""

    name = "tiles"

    def sight_fields(
        self, config: Any, pixels: PixelDefaults, given: dict[str, Any], *, random: bool
    ) -> dict[str, Any]:
        tower = config.vision_config
        side = (given.get("max_image_size") or {}).get("longest_edge") or tower.image_size
        longest = (given.get("size") or {}).get("longest_edge") or (2 if random else 4) * side
        return {
            "placeholder": config.image_token_id,
            "patch": tower.patch_size,
            "merge": config.scale_factor,
            "temporal": 1,
            "least": side**2,
            "most": side**2,
            "side": side,
            "resample": "lanczos",
            "tiles": (side, longest if given.get("do_image_splitting", True) else None),
        }

    def pixel_values(self, image: Image, sight: ImageProcessorConfig) -> np.ndarray:
        """[1, 3, S, S]"""
        return sight.normalized(image.pixels).transpose(2, 0, 1)[None]

    def encode(
        self, model: Any, pixels: Tensor, sight: ImageProcessorConfig, images: Sequence[Image]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        [features] = model.base_model.get_image_features(pixels[None]).pooler_output
        return features, ()

    def own_inputs(
        self, sight: ImageProcessorConfig, kinds: Tensor, pixels: Tensor, media: Sequence[ImagePlaceholder]
    ) -> dict[str, Tensor]:
        return {"pixel_values": pixels[None]}

    def processor_config(self, sight: ImageProcessorConfig) -> dict[str, Any]:
        assert sight.tiles is not None, "images that are tiles"
        longest = sight.tiles.longest
        return {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": longest is not None,
            "size": {"longest_edge": longest or 4 * sight.tiles.side},
            "max_image_size": {"longest_edge": sight.tiles.side},
            "image_mean": list(sight.mean),
            "image_std": list(sight.std),
        }
