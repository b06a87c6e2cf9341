"""What differs between families of vision-language models, as one value each.

A family of a known form is a row of FAMILIES, its sizes in planner/tower.py and planner/families.py, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rondel.models.image_form import ImageForm, PixelDefaults
from rondel.models.patch_grids import PatchGrids
from rondel.models.positioned_patches import PositionedPatches
from rondel.models.square_images import SquareImages
from rondel.models.tiled_images import TiledImages

HALF = PixelDefaults()
CLIP = PixelDefaults((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 56 * 56, 28 * 28 * 1280)
VIDEO_PIXELS = {  # least and most: of all frames together as Qwen3VLVideoProcessor has them, of each as Qwen2VLVideoProcessor
    "apart": (128 * 32 * 32, 768 * 32 * 32),
    "joined": (128 * 28 * 28, 768 * 28 * 28),
}


def _has_tower(config: Any) -> bool:
    return config.vision_config is not None


def _causal(config: Any) -> bool:
    return False


def _mutual(config: Any) -> bool:
    return True


def _mutual_where_told(config: Any) -> bool:
    """Larger models of Gemma 4, in their sliding layers (models/attention.py); the others are causal."""
    return config.get_text_config().use_bidirectional_attention == "vision"


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How the models of one family look: `FAMILIES["qwen3_vl"]`.

    form    layout of pixels and call of the tower
    tower   modules of the base model that make features of pixels: frozen, or trained, together
    text    module of the base model that is the language model
    width   key of the vision config that is the width of the features; None where a projector sees to it
    pixels  what holds of images where the model's folder does not say
    mrope   a token's position is a time, a row and a column (M-RoPE); else it is its index
    mutual  whether in a model with this config the tokens of an image attend to each other, also to those behind them
    video   steps of a video stand apart in the text, each behind its time, or joined; else its frames are images
    reads   whether a model with this config looks at images here; else it reads text alone
    other_ids  keys of the config, each the id of a token that is embedded as padding, as the placeholder is; where
            layers have embeddings of their own (Gemma 4)
    marks   keys of the config, each the id of a token: begin and end of an image, its placeholder; "" for none
    """

    form: ImageForm
    tower: tuple[str, ...] = ("visual",)
    text: str = "language_model"
    width: str | None = "out_hidden_size"
    pixels: PixelDefaults = HALF
    mrope: bool = True
    mutual: Callable[[Any], bool] = _causal
    video: Literal["apart", "joined"] | None = None
    reads: Callable[[Any], bool] = _has_tower
    other_ids: tuple[str, ...] = ()
    marks: tuple[str, str, str] = ("vision_start_token_id", "vision_end_token_id", "image_token_id")


_QWEN3 = VisionFamily(PatchGrids(), video="apart")
_QWEN2 = VisionFamily(PatchGrids(), pixels=CLIP, video="joined")

_IDEFICS3 = VisionFamily(
    TiledImages(),
    tower=("vision_model", "connector"),
    text="text_model",
    width=None,
    mrope=False,
    marks=("", "", "image_token_id"),
)

FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": replace(_QWEN2, width="hidden_size"),
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": VisionFamily(
        SquareImages(),
        tower=("vision_tower", "multi_modal_projector"),
        width=None,
        mrope=False,
        mutual=_mutual,
        marks=("boi_token_index", "eoi_token_index", "image_token_index"),
    ),
    "gemma4": VisionFamily(
        PositionedPatches(),
        tower=("vision_tower", "embed_vision"),
        width=None,
        pixels=PixelDefaults((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        mrope=False,
        marks=("boi_token_id", "eoi_token_id", "image_token_id"),
        mutual=_mutual_where_told,
        other_ids=("video_token_id", "audio_token_id"),
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}
FORMS: dict[str, ImageForm] = {family.form.name: family.form for family in FAMILIES.values()}


def tower_parts(model: Any) -> list[Any]:
    """The modules that make features of pixels; of a model that reads text alone none."""
    family = FAMILIES.get(model.config.model_type)
    found = [] if family is None else [getattr(model.base_model, name, None) for name in family.tower]
    return [module for module in found if module is not None]
