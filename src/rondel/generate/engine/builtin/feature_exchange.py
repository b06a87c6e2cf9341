"""What a pass reads of pictures, on its way from the first rank of an engine to another, whose tower is idle.

command   the pass │ rows and pictures of n cells │ width and dtype of each tensor of features
behind it [n, D] for the embeddings, and one for each layer that reads more
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from rondel.generate.engine.builtin.rank_channel import raw_bytes, receive_tensor
from rondel.models.image_features import (
    FeatureWidths,
    ImageFeatures,
    VisionFeatures,
    feature_shapes,
    feature_tensors,
    feature_widths,
)

if TYPE_CHECKING:
    import torch


def describe_features(seen: VisionFeatures | None) -> tuple[FeatureWidths, list[Tensor]]:
    """What a command says of them, and its whole numbers: nothing of a pass that reads text alone."""
    if seen is None:
        return [], []
    assert seen.images is not None, "an engine numbers the pictures of a step"
    return feature_widths(seen.features), [seen.rows, seen.images]


def send_features(seen: VisionFeatures | None, send: Callable[[Tensor], object]) -> None:
    """Behind the command that has described them."""
    for tensor in () if seen is None else feature_tensors(seen.features).values():
        send(raw_bytes(tensor))


def receive_features(
    widths: FeatureWidths, numbers: list[Tensor], receive: Callable[[Tensor], Tensor], device: torch.device
) -> tuple[VisionFeatures | None, list[Tensor]]:
    """-> the same on another rank, and what else came with the command."""
    if not widths:
        return None, numbers
    rows, images, *rest = numbers
    shapes = feature_shapes(widths, len(rows)).values()
    main, *deep = (receive_tensor(dtype, shape, receive, device) for shape, dtype in shapes)
    return VisionFeatures(rows, ImageFeatures(main, tuple(deep)), images), rest
