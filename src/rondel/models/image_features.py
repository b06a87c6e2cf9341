"""What a vision tower makes of images, and which packed tokens read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FeatureWidths = list[tuple[int, str]]  # width and dtype: for the embeddings, then for each layer that reads more


@dataclass(slots=True)
class ImageFeatures:
    """Features of n cells: for the embeddings, and for the first layers of a language model that reads more of
    them there (DeepStack, arXiv:2406.04334).
    """

    main: Tensor  # [n, D]
    deep: tuple[Tensor, ...] = ()  # each [n, D]

    def select_rows(self, index: Tensor) -> ImageFeatures:
        return ImageFeatures(self.main.index_select(0, index), tuple(d.index_select(0, index) for d in self.deep))

    def to(self, device: torch.device) -> ImageFeatures:
        return ImageFeatures(self.main.to(device), tuple(d.to(device) for d in self.deep))

    @classmethod
    def concat_features(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([p.main for p in parts]), tuple(torch.cat(layer) for layer in zip(*(p.deep for p in parts)))
        )

    @property
    def feature_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.main, *self.deep))


@dataclass(slots=True)
class VisionFeatures:
    """Features and the packed rows, ascending, that they belong to, and which image each row is of; None:
    all of one."""

    rows: Tensor  # [n]
    features: ImageFeatures
    images: Tensor | None = None  # [n] a number for each image and place

    def slice_rows(self, first: int, end: int) -> VisionFeatures | None:
        """Of the packed rows first .. end alone, which become 0 .. end - first."""
        at = ((self.rows >= first) & (self.rows < end)).nonzero()[:, 0]
        if not len(at):
            return None
        images = None if self.images is None else self.images[at]
        return VisionFeatures(self.rows[at] - first, self.features.select_rows(at), images)

    def image_numbers(self, total: int) -> Tensor:
        """[T] the image of each packed token, -1 for text."""
        numbers = torch.full((total,), -1, dtype=torch.int64, device=self.rows.device)
        return numbers.index_copy(0, self.rows, torch.zeros_like(self.rows) if self.images is None else self.images)


def feature_tensors(features: ImageFeatures) -> dict[str, Tensor]:
    """[n, D] each, by the number of the layer that reads it; "0" is for the embeddings."""
    return {str(number): tensor for number, tensor in enumerate((features.main, *features.deep))}


def feature_widths(features: ImageFeatures) -> FeatureWidths:
    return [
        (tensor.shape[1], str(tensor.dtype).removeprefix("torch.")) for tensor in feature_tensors(features).values()
    ]


def feature_shapes(widths: FeatureWidths, cells: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """What `feature_tensors` gives of so many cells."""
    return {str(number): ((cells, width), dtype) for number, (width, dtype) in enumerate(widths)}
