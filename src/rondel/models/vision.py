"""The eye of a vision-language model: its tower encodes pictures, and their features
stand in for the placeholders' embeddings.

    pixels [H,W,3] ──patches──> [p, 3·t·s·s] ──tower──> features [n, D] ──rows──> embeddings [T, D] ──> language model

The language model attends as any other here (models/attention.py); the tower attends
within one picture, in transformers' own way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from rondel.core.errors import ModelError
from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
PIXELS = {"qwen3_vl": (256 * 256, 4096 * 4096)}  # least and most where a folder does not say


@dataclass(slots=True)
class ImageFeatures:
    """What the tower says of n cells: for the embeddings, and for the first layers of a
    model that looks again there (deepstack).
    """

    main: Tensor  # [n, D]
    deep: tuple[Tensor, ...] = ()  # each [n, D]

    def select_rows(self, index: Tensor) -> ImageFeatures:
        return ImageFeatures(self.main.index_select(0, index), tuple(d.index_select(0, index) for d in self.deep))

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
    """Features and the packed rows, ascending, that they belong to."""

    rows: Tensor  # [n]
    features: ImageFeatures


def vision_tower(model: Any) -> nn.Module:
    return model.base_model.visual


def encode_images(model: Any, sight: ImageProcessorConfig, images: Sequence[Image]) -> ImageFeatures:
    """The cells of all images behind each other; their pixels are joined once."""
    eye = vision_tower(model)
    parameter = next(eye.parameters())
    pixels = torch.from_numpy(np.concatenate([image_patches(image, sight) for image in images])).to(
        parameter.device, parameter.dtype
    )
    grid = torch.tensor(
        [[1, image.rows * sight.merge, image.columns * sight.merge] for image in images], device=parameter.device
    )
    out = eye(pixels, grid_thw=grid)
    return ImageFeatures(out.pooler_output, tuple(getattr(out, "deepstack_features", None) or ()))


def image_patches(image: Image, sight: ImageProcessorConfig) -> np.ndarray:
    """[p, 3*t*s*s] The patches of one picture, those of a cell together, as transformers' processor makes them."""
    scaled = (image.pixels.astype(np.float32) * np.float32(1 / 255) - np.asarray(sight.mean, np.float32)) / np.asarray(
        sight.std, np.float32
    )
    s, m = sight.patch, sight.merge
    cells = scaled.transpose(2, 0, 1).reshape(3, image.rows, m, s, image.columns, m, s).transpose(1, 4, 2, 5, 0, 3, 6)
    cells = np.broadcast_to(cells[:, :, :, :, :, None], (*cells.shape[:5], sight.temporal, s, s))
    return cells.reshape(image.tokens * m * m, -1)


def hidden_states(model: Any, tokens: Tensor, positions: Tensor, seen: VisionFeatures | None) -> Tensor:
    """Last hidden states of packed tokens: [T], [T] or [3,T] -> [T, D]."""
    inner, more = model.base_model, {}
    embedded = inner.get_input_embeddings()(tokens)
    if seen is not None:
        embedded = embedded.index_copy(0, seen.rows, seen.features.main.to(embedded.dtype))
        if seen.features.deep:
            mask = torch.zeros(1, len(tokens), dtype=torch.bool, device=tokens.device)
            mask[0, seen.rows] = True
            more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(seen.features.deep)}
    at = positions if positions.ndim == 2 else positions.expand(3, -1)
    return inner.language_model(
        inputs_embeds=embedded[None], position_ids=at[:, None], use_cache=False, **more
    ).last_hidden_state[0]


def sight_of(config: Any, folder: str | Path | None = None) -> ImageProcessorConfig | None:
    """How a model of this config looks, with what its folder says of pixels; None for a model that does not."""
    if config.model_type not in FAMILIES:
        return None
    eye = config.vision_config
    file = None if folder is None else Path(folder) / "preprocessor_config.json"
    said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    mean, std = HALF if config.model_type == "qwen3_vl" else CLIP
    least, most = PIXELS.get(config.model_type, (56 * 56, 28 * 28 * 1280))
    if folder is None:
        least = 4 * (eye.patch_size * eye.spatial_merge_size) ** 2
    size = said.get("size") or {}
    return ImageProcessorConfig(
        config.image_token_id,
        eye.patch_size,
        eye.spatial_merge_size,
        eye.temporal_patch_size,
        int(said.get("min_pixels") or size.get("shortest_edge") or least),
        int(said.get("max_pixels") or size.get("longest_edge") or most),
        tuple(said.get("image_mean") or mean),
        tuple(said.get("image_std") or std),
    )


def preprocessor_config(sight: ImageProcessorConfig) -> dict[str, Any]:
    """The same as a `preprocessor_config.json`, which transformers and the foreign engines read."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": sight.patch,
        "merge_size": sight.merge,
        "temporal_patch_size": sight.temporal,
        "size": {"shortest_edge": sight.least, "longest_edge": sight.most},
        "image_mean": list(sight.mean),
        "image_std": list(sight.std),
    }


# -- the model's own way, to be compared with ------------------------------------------------------


def checkered_image(sight: ImageProcessorConfig) -> Image:
    """A picture of 2 x 3 cells, no two alike."""
    n = sight.token_pixels
    y, x = np.mgrid[: 2 * n, : 3 * n]
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
        kinds[0, place.start : place.end] = 1
    pixels = np.concatenate([image_patches(place.image, sight) for place in media])
    grid = [[1, place.image.rows * sight.merge, place.image.columns * sight.merge] for place in media]
    given = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor(grid), "mm_token_type_ids": kinds}
    return {name: value.to(device) for name, value in given.items()}


# -- made on the spot ------------------------------------------------------------------------------

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def random_config(kind: str, given: dict[str, Any], tokenizer: Any) -> tuple[Any, set[str]]:
    """Keys of the language model as for any family, those of the tower in `vision_config`.
    -> the config, and the keys that it has.
    """
    text, eye = dict(given), dict(given.get("vision_config") or {})
    text.pop("vision_config", None)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    plain = AutoConfig.for_model(kind)
    known = {*type(plain.text_config)().to_dict(), *plain.text_config.attribute_map, "head_dim", "vision_config"}
    if odd := [k for k in eye if k not in {*type(plain.vision_config)().to_dict(), *plain.vision_config.attribute_map}]:
        raise ModelError(f"the vision_config of a {kind} has no '{odd[0]}'")
    width = text.get("hidden_size", plain.text_config.hidden_size)
    heads = text.get("num_attention_heads", plain.text_config.num_attention_heads)
    half = (
        text.get("head_dim", getattr(plain.text_config, "head_dim", None) if kind == "qwen3_vl" else None)
        or width // heads
    )
    side = 3 * (half // 2) // 8
    text.setdefault(
        "rope_parameters",
        {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half // 2 - 2 * side, side, side]},
    )
    eye.setdefault("hidden_size" if kind == "qwen2_vl" else "out_hidden_size", width)
    config = AutoConfig.for_model(
        kind,
        text_config={k: v for k, v in text.items() if k in known},
        vision_config=eye,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return config, known
