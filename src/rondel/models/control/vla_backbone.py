"""The vision-language model in a table of a vision-language-action model: random, or from its folder."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from rondel.core.errors import ModelError, error_boundary
from rondel.models import vision
from rondel.models.control.kinds import FLOW_VLA
from rondel.models.model_folder import model_folder
from rondel.models.random_model import random_config, random_tokenizer

BACKBONES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # read one grid of patches of any size, and keep no state
EXAMPLE = '{ random = "flow_vla", backbone = { random = "qwen2_5_vl", hidden_size = 64 } }'


def with_backbone(recipe: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The table of a random model with the config of its backbone instead of the backbone's table or folder, and the
    tokenizer; a table of any other kind stays as it is. ModelError where there is none that can read a picture here.
    """
    if recipe.get("random") != FLOW_VLA:
        return dict(recipe), random_tokenizer(recipe)
    backbone, more = recipe.get("backbone"), dict[str, Any]()
    if isinstance(backbone, dict):
        tokenizer = random_tokenizer(backbone)
        config = random_config(dict(backbone), tokenizer)
    elif isinstance(backbone, str):
        folder = model_folder(backbone)
        with error_boundary(ModelError, f"loading the model '{backbone}'"):
            tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
        if config.model_type in BACKBONES and (sight := vision.sight_of(config, folder)) is not None:
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


def load_backbone(model: Any, recipe: dict[str, Any]) -> None:
    """The weights of a backbone that is a folder, into a new model."""
    if isinstance(backbone := recipe.get("backbone"), str):
        with error_boundary(ModelError, f"loading the model '{backbone}'"):
            found = AutoModel.from_pretrained(model_folder(backbone), dtype=torch.float32)
        model.backbone.load_state_dict(found.state_dict())
