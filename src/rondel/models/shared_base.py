"""Several models on one base: modules of their own around the same tensors.

base ── W ──┬── copy ── W x + s · B_a (A_a x)      trained as policy a
            └── copy ── W x + s · B_b (A_b x)      trained as policy b
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ModelError
from rondel.models import adapter_files, linear
from rondel.models.adapter_rows import AdapterWeights
from rondel.models.adapter_state import NAME

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel


def find_base(path: str | dict[str, Any]) -> str | dict[str, Any]:
    """The model under `path`: itself, or what the adapter in that folder belongs to. Equal for the same folder."""
    if isinstance(path, str) and adapter_files.is_adapter(path):
        path = adapter_files.base_of(path)
    if isinstance(path, dict):
        return path
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path


def share_base(base: LoadedModel) -> LoadedModel:
    """The same frozen tensors, and what is packed of them, in modules that can be given an adapter of their own."""
    base.model.requires_grad_(False)
    shared = [*base.model.parameters(), *base.model.buffers(), *linear.packed_linears(base.model)]
    model = copy.deepcopy(base.model, {id(one): one for one in shared})
    return replace(base, model=model, head=base.head.of_copy(model), bank=None)


def adapter_weights(name: str, loaded: LoadedModel) -> AdapterWeights:
    """The adapter of an adapted model, as a bank serves it: the tensors themselves, so that what moves there moves
    here. ModelError where its layers have several scales.
    """
    assert loaded.adapter is not None, loaded.name
    layers, rank = loaded.adapter.layers, loaded.adapter.config.r
    scales = {float(layer.scaling[NAME]) for layer in layers.values()}
    ranks = {len(layer.lora_A[NAME].weight) for layer in layers.values()}
    if len(scales) > 1 or ranks != {rank}:
        raise ModelError(
            f"the adapter of '{loaded.name}' has layers of several ranks or scales, and adapters on one base have one "
            "each: train it alone, or merge it first (rondel merge)"
        )
    pairs = {of: (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight) for of, layer in layers.items()}
    return AdapterWeights(name, rank, scales.pop(), pairs)
