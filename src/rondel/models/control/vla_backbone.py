"""The vision-language model in a table of a vision-language-action model: random, or from its folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModel

from rondel.core.errors import ModelError, error_boundary
from rondel.models.control.kinds import FLOW_VLA
from rondel.system.whole_checkpoint import load_pretrained

BACKBONES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # read one grid of patches of any size, and keep no state
# sizes of a random model, for its example and those of models/load.py
SMALL = (
    "hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2"
)
SMALL_TOWER = "vision_config = { depth = 1, hidden_size = 32, num_heads = 2, intermediate_size = 64 }"
EXAMPLE = f'{{ random = "flow_vla", backbone = {{ random = "qwen2_5_vl", {SMALL}, {SMALL_TOWER} }} }}'


Backbone = tuple[Any, Any, Any]  # its config, its tokenizer, and how it looks at pictures where its folder says so


def with_backbone(recipe: dict[str, Any], read: Callable[[Any], Backbone]) -> tuple[dict[str, Any], Any]:
    """The table of a vision-language-action model with the config of its backbone instead of the backbone's table or
    folder, which `read` reads, and the tokenizer. ModelError where there is none that can read a picture here.
    """
    backbone, more = recipe.get("backbone"), dict[str, Any]()
    if isinstance(backbone, dict | str):
        config, tokenizer, sight = read(backbone)
        if sight is not None:
            more = {"image_mean": list(sight.mean), "image_std": list(sight.std)}
    else:
        raise ModelError(
            f"model.path has no backbone, the vision-language model of a {FLOW_VLA}: {EXAMPLE}, or the folder of one"
        )
    if config.model_type not in BACKBONES:
        raise ModelError(
            f"the backbone of model.path is a {config.model_type}, and a {FLOW_VLA} reads pictures by "
            f"{', '.join(BACKBONES)}: take one of these"
        )
    given = {key: value for key, value in recipe.items() if key != "backbone"}
    return {**given, **more, "backbone": config.to_dict()}, tokenizer


def load_backbone(model: Any, recipe: dict[str, Any], folder_of: Callable[[str], Any]) -> None:
    """The weights of a backbone that is a folder, into a new model."""
    if isinstance(backbone := recipe.get("backbone"), str):
        with error_boundary(ModelError, f"loading the model '{backbone}'"):
            folder = folder_of(backbone)
            found = load_pretrained(AutoModel, backbone, pretrained_model_name_or_path=folder, dtype=torch.float32)
        model.backbone.load_state_dict(found.state_dict())
