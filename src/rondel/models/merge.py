"""An adapter folded into its base: W' = W + alpha/r · B A, a plain model that needs no peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ModelError
from rondel.models import nf4
from rondel.models.adapter_bank_files import read_weights
from rondel.models.adapter_files import base_of, is_adapter, over_four_bits, trained_in
from rondel.models.adapter_rows import HEAD
from rondel.models.load import load_model
from rondel.models.save import save_model


def merge(adapter: str | Path, folder: str | Path, *, dtype: str = "float32") -> float:
    """Write the model that `adapter` (a checkpoint, say) makes of its base to `folder`. ->
    the share of the adapter that rounding lost.

    |W' as stored - W - alpha/r · B A| / |alpha/r · B A| over all layers, in the 2-norm. bfloat16 is coarser than most of an adapter's changes:
    of recipes/lora.toml's it loses 54 %, float32 1e-5 (9f9671a,
    `merge("runs/lora/checkpoints/step-000024", ...)`). A base in 4 bits is decoded as the training did, so the merged
    model computes what was trained; in 4 bits again it would not.
    """
    if not is_adapter(adapter):
        raise ModelError(
            f"'{adapter}' is no adapter: a folder with adapter_config.json is, as checkpoints of a run with "
            f"model.adapter are"
        )
    packed = over_four_bits(adapter)
    loaded = load_model(base_of(adapter), dtype=trained_in(adapter) if packed else dtype, four_bits=packed)
    weights = read_weights(loaded, str(adapter), adapter)
    if packed:
        nf4.restore_layers(loaded.model, loaded.dtype)
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    lost = whole = 0.0
    with torch.no_grad():
        for name, (a, b) in weights.layers.items():
            layer = _untied_head(loaded.model) if name == HEAD else loaded.model.get_submodule(name)
            delta = weights.scale * b.double() @ a.double()
            if isinstance(layer, Conv1D):
                delta = delta.t()
            wanted = layer.weight.double() + delta
            layer.weight.copy_(wanted)
            lost += float((layer.weight.double() - wanted).square().sum())
            whole += float(delta.square().sum())
    save_model(loaded, Path(folder))
    return (lost / whole) ** 0.5 if whole else 0.0


def _untied_head(model: Any) -> Any:
    """The head, with a weight of its own: an adapter on it leaves the embeddings as they are."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    return head
