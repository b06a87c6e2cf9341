"""An adapter folded into its base: W' = W + alpha/r · B A, a plain model that needs no peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ModelError
from rondel.models import nf4
from rondel.models.adapter_files import is_adapter, over_four_bits, trained_in
from rondel.models.adapter_state import NAME
from rondel.models.load import load_model
from rondel.models.names import LORA
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
    loaded = load_model(str(adapter), dtype=trained_in(adapter) if over_four_bits(adapter) else dtype)
    assert loaded.adapter is not None
    if nf4.nf4_layers(loaded.model):
        nf4.restore_layers(loaded.model, loaded.dtype)
        for parameter in (p for name, p in loaded.model.named_parameters() if LORA not in name):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    lost = whole = 0.0
    with torch.no_grad():
        for name, layer in loaded.adapter.layers.items():
            base, delta = layer.get_base_layer(), layer.get_delta_weight(NAME)
            weight = base.weight.t() if isinstance(base, Conv1D) and not layer.fan_in_fan_out else base.weight
            wanted = weight.double() + delta.double()
            weight.copy_(wanted)
            lost += float((weight.double() - wanted).square().sum())
            whole += float(delta.double().square().sum())
            _replace_layer(loaded.model, name, base)
    del loaded.model.peft_config
    save_model(loaded, Path(folder))
    return (lost / whole) ** 0.5 if whole else 0.0


def _replace_layer(model: Any, name: str, layer: Any) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
