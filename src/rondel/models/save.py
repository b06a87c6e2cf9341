"""From a module to files that any other tool loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel


def save_model(loaded: LoadedModel, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Plain Hugging Face files: safetensors, config, tokenizer. `weights` replaces
    the module's own (fp32 masters, say).
    """
    state = weights if weights is not None else loaded.model.state_dict()
    dtype = next(iter(state.values())).dtype
    loaded.model.save_pretrained(folder, state_dict=dict(state))
    save_description(loaded, folder, dtype)


def save_description(loaded: LoadedModel, folder: Path, dtype: torch.dtype) -> None:
    """What lies beside the weights: config, tokenizer, how images are read. `dtype`: of the weights."""
    model = loaded.model
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_attn_implementation", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if loaded.sight is not None:
        for name, settings in loaded.preprocessor_config.items():
            (folder / name).write_text(json.dumps(settings, indent=2))
    make_readable(folder)


def make_readable(folder: Path) -> None:
    """safetensors writes for its owner alone; files are for whom their folder is for."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)
