"""What a form of images must say: how pixels are laid out for a tower, and how the tower is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig


@dataclass(frozen=True, slots=True)
class PixelDefaults:
    """What holds of images unless the model's folder says otherwise: mean and deviation of red, green and blue,
    in [0, 1]; least and most pixels.
    """

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    least: int = 256 * 256
    most: int = 4096 * 4096


class ImageForm(Protocol):
    @property
    def name(self) -> str: ...

    def sight_fields(
        self, config: Any, pixels: PixelDefaults, given: dict[str, Any], *, random: bool
    ) -> dict[str, Any]:
        """Of an ImageProcessorConfig. `given`: the model's preprocessor_config.json. A random model has no least size
        but a few cells. "tiles" are the fields of a TileConfig.
        """

    def pixel_values(self, image: Image, sight: ImageProcessorConfig) -> np.ndarray:
        """The pixels of one image, as transformers' processor lays them out."""

    def encode(
        self, model: Any, pixels: Tensor, sight: ImageProcessorConfig, images: Sequence[Image]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Features of all cells from the pixels of all images: ImageFeatures' main and deep."""

    def own_inputs(
        self, sight: ImageProcessorConfig, kinds: Tensor, pixels: Tensor, media: Sequence[ImagePlaceholder]
    ) -> dict[str, Tensor]:
        """What transformers' own forward pass wants beside the tokens; `kinds` [1, T] is 1 at placeholders of images,
        2 at those of videos.
        """

    def processor_config(self, sight: ImageProcessorConfig) -> dict[str, Any]:
        """The same as a `preprocessor_config.json`, which transformers and the foreign engines read."""
