"""Adapters of a bank as files: those that peft, vLLM and SGLang read and write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from rondel.core.errors import ModelError, error_boundary
from rondel.models import names
from rondel.models.adapter_files import BASE, CONFIG, WEIGHTS, is_adapter
from rondel.models.adapter_rows import HEAD, AdapterWeights

if TYPE_CHECKING:
    from torch import Tensor

    from rondel.models.loaded_model import LoadedModel

PREFIX = "base_model.model."  # peft's
PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
SIMPLE: dict[str, Any] = {  # values at which an adapter is y = W x + s B A x and nothing else
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "trainable_token_indices": None,
}


def save_weights(loaded: LoadedModel, weights: AdapterWeights, folder: Path) -> None:
    """adapter_model.safetensors, adapter_config.json, and base.json with the digest of the base."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in weights.layers.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = a.detach().cpu().contiguous()
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = b.detach().cpu().contiguous()
    origin = loaded.model.config.name_or_path
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": weights.rank,
        "lora_alpha": weights.scale * weights.rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(weights.layers),
        "base_model_name_or_path": str(Path(origin).resolve()) if origin and Path(origin).is_dir() else origin or None,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    } | SIMPLE
    note = {
        "path": loaded.path,
        "dtype": str(loaded.dtype),
        "nf4": loaded.in_four_bits,
        "digest": names.base_digest(loaded.model, whole=True),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    (folder / BASE).write_text(json.dumps(note))
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def read_weights(loaded: LoadedModel, name: str, folder: str | Path) -> AdapterWeights:
    """The adapter in `folder`, whoever wrote it. ModelError where it is no plain LoRA or was trained on other bits."""
    folder = Path(folder).expanduser()
    with error_boundary(ModelError, f"reading the adapter in '{folder}'"):
        if not is_adapter(folder):
            raise ModelError(f"'{folder}' is no adapter: a folder with {CONFIG} and {WEIGHTS} is")
        config = json.loads((folder / CONFIG).read_text())
        odd = [key for key, plain in SIMPLE.items() if config.get(key) not in (plain, None, {}, [])]
        if config.get("peft_type") != "LORA" or odd:
            what = f"{odd[0]} = {config[odd[0]]}" if odd else f"peft_type = {config.get('peft_type')}"
            raise ModelError(f"the adapter in '{folder}' has {what}: only plain LoRA can be served beside others")
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(folder / WEIGHTS).items():
            if (match := PART.fullmatch(key)) is None:
                raise ModelError(f"the adapter in '{folder}' holds {key}, which is no part of a plain LoRA")
            layer = match["layer"] if match["layer"].rpartition(".")[2] != HEAD else HEAD
            parts.setdefault(layer, {})[match["part"]] = tensor.float().to(loaded.device)
        if not parts:
            raise ModelError(f"the adapter in '{folder}' holds no layer")
        layers = {layer: (pair["A"], pair["B"]) for layer, pair in parts.items()}
        if wrong := [layer for layer, (a, b) in layers.items() if len(a) != b.shape[1]]:
            raise ModelError(f"the adapter in '{folder}': A and B of {wrong[0]} are of different ranks")
        note = json.loads((folder / BASE).read_text()) if (folder / BASE).is_file() else {}
        if note.get("dtype") == str(loaded.dtype) and note["digest"] != names.base_digest(loaded.model, whole=True):
            raise ModelError(
                f"the adapter in '{folder}' was trained on {note['path']} with other bits than '{loaded.name}' has"
            )
        return _of_one_rank(name, layers, config)


def _of_one_rank(name: str, layers: dict[str, tuple[Tensor, Tensor]], config: dict[str, Any]) -> AdapterWeights:
    """Layers of smaller ranks get rows of zeros, and B what a layer's own alpha / r is more than that of all."""

    def scale_of(layer: str, rank: int) -> float:
        own = (
            alpha for key, alpha in (config.get("alpha_pattern") or {}).items() if re.match(rf"(.*\.)?({key})$", layer)
        )
        return next(own, config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)

    rank = max(len(a) for a, _ in layers.values())
    scale = scale_of("", rank)
    padded = {}
    for layer, (a, b) in layers.items():
        more, factor = rank - len(a), scale_of(layer, len(a)) / scale
        padded[layer] = F.pad(a, (0, 0, 0, more)), F.pad(b if factor == 1 else b * factor, (0, more))
    return AdapterWeights(name, rank, scale, padded)
