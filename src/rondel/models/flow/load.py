"""A flow from a folder or a recipe's inline table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from rondel.core.errors import ModelError, error_boundary
from rondel.models import linear
from rondel.models.flow.loaded_flow import FlowHead, LoadedFlow
from rondel.models.flow.velocity_mlp import FlowMlpConfig
from rondel.models.random_model import random_config, random_tokenizer

FLOWS = (FlowMlpConfig.model_type,)  # model types that are flows


def is_flow(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a flow: by its table, or by the config.json in its folder."""
    if isinstance(path, dict):
        return path.get("random") in FLOWS
    config = Path(path).expanduser() / "config.json"
    try:
        return json.loads(config.read_text()).get("model_type") in FLOWS
    except (OSError, ValueError, AttributeError):
        return False


def load_flow(path: str | dict[str, Any], *, dtype: str = "auto", device: str = "cpu") -> LoadedFlow:
    """In float32: densities in 16 bits overflow, and a flow of this size is not faster in them."""
    if dtype not in ("auto", "float32"):
        raise ModelError(f'model.dtype = "{dtype}" with a flow: its log-densities need float32; leave the key out')
    if isinstance(path, dict):
        tokenizer, name = random_tokenizer(path), f"random-{path['random']}"
        config = random_config(dict(path), tokenizer)
        with error_boundary(ModelError, f"making a random '{path['random']}'"):
            torch.manual_seed(path.get("seed", 0))
            model = AutoModel.from_config(config)
    else:
        folder = name = str(Path(path).expanduser().resolve())
        with error_boundary(ModelError, f"loading the model '{path}'"):
            model = AutoModel.from_pretrained(folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder)
    model = model.to(device, torch.float32).eval()
    linear.install_cpu_linear(model)
    stops = frozenset(i for i in [tokenizer.eos_token_id] if i is not None)
    return LoadedFlow(
        model, tokenizer, FlowHead(model), name, stops, int(model.config.max_position_embeddings), path=path
    )


def flow_tokenizer(path: str | dict[str, Any]) -> tuple[Any, int]:
    """(tokenizer, context length) of what `load_flow` would load, without a weight."""
    if isinstance(path, dict):
        tokenizer = random_tokenizer(path)
        return tokenizer, int(random_config(dict(path), tokenizer).max_position_embeddings)
    with error_boundary(ModelError, f"loading the tokenizer of '{path}'"):
        config = AutoConfig.from_pretrained(str(path))
        return AutoTokenizer.from_pretrained(str(path)), int(config.max_position_embeddings)
