"""How a vision-language model reads images: its tower encodes them, and their features
stand in for the placeholders' embeddings.

    pixels [H,W,3] ──form──> tower's input ──tower──> features [n, D] ──rows──> embeddings [T, D] ──> language model

The language model attends as any other here (models/attention.py); the tower attends
within one image, in transformers' own way. What differs by family is in models/vision_families.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig
from rondel.core.tiles import TileConfig
from rondel.core.video import VideoProcessorConfig
from rondel.models.image_features import ImageFeatures, VisionFeatures
from rondel.models.vision_families import FAMILIES, FORMS, VIDEO_PIXELS, VisionFamily, tower_parts


def vision_tower(model: Any) -> nn.Module:
    """The modules that make features of pixels."""
    modules = tower_parts(model)
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def tower_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers of the tower, by the model's names."""
    mine = {id(t) for part in tower_parts(model) for t in (*part.parameters(), *part.buffers())}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if id(tensor) in mine}


def keep_tower(model: Any) -> None:
    """Let go of everything but the tower, in place: what is left encodes images and nothing else."""
    inner, tower = model.base_model, set(FAMILIES[model.config.model_type].tower)
    for owner in {id(m): m for m in (model, inner)}.values():
        for name, child in list(owner.named_children()):
            if child is not inner and name not in tower:
                setattr(owner, name, nn.Module())


def language_model(model: Any) -> Any:
    """The decoder beside the tower."""
    return model.base_model.get_submodule(FAMILIES[model.config.model_type].text)


def fill_projections(model: Any) -> None:
    """Random numbers where a tower's projection starts at zero: a random model would see nothing."""
    for parameter in vision_tower(model).parameters():
        if parameter.ndim == 2 and not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[0] ** -0.5)


def encode_images(model: Any, sight: ImageProcessorConfig, images: Sequence[Image]) -> ImageFeatures:
    """The cells of all images behind each other; their pixels are joined once."""
    parameter = next(vision_tower(model).parameters())
    pixels = torch.from_numpy(np.concatenate([image_patches(image, sight) for image in images])).to(
        parameter.device, parameter.dtype
    )
    return ImageFeatures(*FORMS[sight.form].encode(model, pixels, sight, images))


def image_patches(image: Image, sight: ImageProcessorConfig) -> np.ndarray:
    """The pixels of one image as its tower reads them, and as transformers' processor lays them out."""
    return FORMS[sight.form].pixel_values(image, sight)


def hidden_states(model: Any, tokens: Tensor, positions: Tensor, seen: VisionFeatures | None) -> Tensor:
    """Last hidden states of packed tokens: [T], [T] or [4,T] (core/media.py: position_rows) -> [T, D]."""
    inner, family = model.base_model, FAMILIES[model.config.model_type]
    more: dict[str, Any] = {}
    if family.other_ids:
        tokens = _without_placeholders(model.config, family, tokens)
    embedded = inner.get_input_embeddings()(tokens)
    if getattr(inner.get_submodule(family.text), "hidden_size_per_layer_input", None):
        more["per_layer_inputs"] = inner.get_submodule(family.text).get_per_layer_inputs(tokens[None], embedded[None])
    if seen is not None:
        embedded = embedded.index_copy(0, seen.rows, seen.features.main.to(embedded.dtype))
        if seen.features.deep:
            mask = torch.zeros(1, len(tokens), dtype=torch.bool, device=tokens.device)
            mask[0, seen.rows] = True
            more |= {"visual_pos_masks": mask, "deepstack_visual_embeds": list(seen.features.deep)}
        if family.mutual(model.config):
            more["image_of_token"] = seen.image_numbers(len(tokens))
    rows = positions if positions.ndim == 2 else positions.expand(4, -1)
    at = rows[1:, None] if family.mrope else rows[:1]
    return (
        inner.get_submodule(family.text)(inputs_embeds=embedded[None], position_ids=at, use_cache=False, **more)
        .last_hidden_state[0]
        .to(embedded.dtype)
    )


def _without_placeholders(config: Any, family: VisionFamily, tokens: Tensor) -> Tensor:
    """[T] the tokens, padding where a placeholder stands, whoever wrote it: as the model's own pass embeds them."""
    ids = torch.tensor([getattr(config, key) for key in (family.marks[2], *family.other_ids)], device=tokens.device)
    return torch.where(torch.isin(tokens, ids), config.get_text_config().pad_token_id, tokens)


def sight_of(config: Any, folder: str | Path | None = None) -> ImageProcessorConfig | None:
    """How a model of this config looks, with what its folder says of pixels; None for a model that does not."""
    if (family := FAMILIES.get(config.model_type)) is None or not family.reads(config):
        return None
    given = _read_settings(folder, "preprocessor_config.json")
    fields = family.form.sight_fields(config, family.pixels, given, random=folder is None)
    if "tiles" in fields:
        fields["tiles"] = TileConfig(*fields["tiles"])
    return ImageProcessorConfig(
        video=_video_config(config, family, family.video, folder) if family.video else None,
        **fields,
        mean=tuple(given.get("image_mean") or family.pixels.mean),
        std=tuple(given.get("image_std") or family.pixels.std),
        form=family.form.name,
        mutual=family.mutual(config),
    )


def _video_config(config: Any, family: VisionFamily, kind: str, folder: str | Path | None) -> VideoProcessorConfig:
    """The same of videos; a random model has no least size but a few cells."""
    tower, given = config.vision_config, _read_settings(folder, "video_preprocessor_config.json")
    size, pixels = given.get("size") or {}, VIDEO_PIXELS[kind]
    least = 4 * (tower.patch_size * tower.spatial_merge_size) ** 2 if folder is None else pixels[0]
    begin, end, _ = (getattr(config, mark) for mark in family.marks)
    return VideoProcessorConfig(
        placeholder=config.video_token_id,
        frame=(begin, end) if kind == "apart" else None,
        step=tower.temporal_patch_size,
        least=int(given.get("min_pixels") or size.get("shortest_edge") or least),
        most=int(given.get("max_pixels") or size.get("longest_edge") or pixels[1]),
        rate=getattr(tower, "tokens_per_second", None) if kind == "joined" else None,
    )


def _read_settings(folder: str | Path | None, name: str) -> dict[str, Any]:
    """A file of settings beside the weights; {} where there is none."""
    file = None if folder is None else Path(folder) / name
    return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}


def preprocessor_config(sight: ImageProcessorConfig) -> dict[str, dict[str, Any]]:
    """The same as files: `preprocessor_config.json`, and where steps of videos are read
    `video_preprocessor_config.json`.
    """
    images = FORMS[sight.form].processor_config(sight)
    files = {"preprocessor_config.json": images}
    if sight.video is not None:
        plain = {key: value for key, value in images.items() if key != "image_processor_type"}
        size = {"shortest_edge": sight.video.least, "longest_edge": sight.video.most}
        files["video_preprocessor_config.json"] = {
            **plain,
            "video_processor_type": "Qwen2VLVideoProcessor" if sight.video.frame is None else "Qwen3VLVideoProcessor",
            "size": size,
        }
    return files


# -- the model's own way, to be compared with ------------------------------------------------------


def checkered_image(sight: ImageProcessorConfig) -> Image:
    """An image of 2 x 3 cells, or of the one size that the model takes, no two cells alike."""
    n = sight.token_pixels
    width, height = (3 * n, 2 * n) if sight.side is None else (sight.side, sight.side)
    y, x = np.mgrid[:height, :width]
    return Image.from_pixels(
        np.stack([(7 * x + y) % 256, (3 * x + 11 * y) % 256, (x * y) % 256], -1).astype(np.uint8), n
    )


def as_given(
    sight: ImageProcessorConfig,
    tokens: list[int],
    media: Sequence[ImagePlaceholder],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """What transformers' own forward pass of one row wants beside its tokens."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.int64)
    for place in media:
        kinds[0, place.start : place.end] = 1 if place.image.frames == 1 else 2
    pixels = torch.from_numpy(np.concatenate([image_patches(place.image, sight) for place in media]))
    given = FORMS[sight.form].own_inputs(sight, kinds, pixels, media)
    return {name: value.to(device) for name, value in given.items()}
