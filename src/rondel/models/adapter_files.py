"""The files of an adapter: what peft and vLLM read, beside a note of the base that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rondel.core.errors import ModelError, error_boundary
from rondel.models import names

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder).expanduser() / CONFIG).is_file()


def save_adapter(loaded: LoadedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """What peft and vLLM read, and `base.json`: where the base came from and the digest of its bits. `weights`: in
    place of the module's own, which may not have all layers.
    """
    assert loaded.adapter is not None
    config, origin = loaded.adapter.config, loaded.model.config.name_or_path
    config.base_model_name_or_path = str(Path(origin).resolve()) if origin and Path(origin).is_dir() else origin or None
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file in every run
    config.save_pretrained(folder)
    save_file(
        {name: t.cpu().contiguous() for name, t in (weights or dict(names.named_weights(loaded.model))).items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    note = {
        "path": loaded.path,
        "dtype": str(loaded.dtype),
        "nf4": loaded.in_four_bits,
        "digest": names.base_digest(loaded.model),
    }
    (folder / BASE).write_text(json.dumps(note))


def base_of(folder: str | Path) -> str | dict[str, Any]:
    """The model that an adapter belongs to, as model.path says it."""
    folder = Path(folder).expanduser()
    with error_boundary(ModelError, f"reading the adapter in '{folder}'"):
        if note := _read_base_note(folder):
            return note["path"]
        if base := json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path"):
            return base
    raise ModelError(
        f"'{folder}' is an adapter whose {CONFIG} does not say of which model: set base_model_name_or_path in it"
    )


def over_four_bits(folder: str | Path) -> bool:
    """Whether its note says that it was trained over a base in 4 bits; of adapters of others only their user knows."""
    return bool(_read_base_note(folder).get("nf4"))


def trained_in(folder: str | Path) -> str:
    """The dtype of its base while it was trained."""
    return str(_read_base_note(folder)["dtype"]).removeprefix("torch.")


def read_adapter(loaded: LoadedModel, folder: str | Path) -> dict[str, Tensor]:
    """The tensors of an adapter for this model, under peft's names; another base, shape or scale is refused by name."""
    folder, adapter = Path(folder).expanduser(), loaded.adapter
    assert adapter is not None
    with error_boundary(ModelError, f"reading the adapter in '{folder}'"):
        if not is_adapter(folder):
            raise ModelError(
                f"'{folder}' holds no {CONFIG}, and '{loaded.name}' is an adapted model: only its adapter can be "
                "replaced"
            )
        config = json.loads((folder / CONFIG).read_text())
        tensors = {n: t.float() for n, t in load_file(folder / WEIGHTS).items()}
        mine = {name: tuple(t.shape) for name, t in names.named_weights(loaded.model)}
        if odd := sorted(
            {n for n in mine.keys() | tensors.keys() if n not in tensors or mine.get(n) != tuple(tensors[n].shape)}
        ):
            raise ModelError(
                f"the adapter in '{folder}' does not fit '{loaded.name}': {len(odd)} tensors differ, first {odd[0]}"
            )
        if (scale := config["lora_alpha"] / config["r"]) != adapter.config.lora_alpha / adapter.config.r:
            raise ModelError(f"the adapter in '{folder}' has alpha/r = {scale:g}, the one of '{loaded.name}' another")
        base = _read_base_note(folder)
        if base.get("dtype") == str(loaded.dtype) and base["digest"] != names.base_digest(loaded.model):
            raise ModelError(
                f"the adapter in '{folder}' was trained on {base['path']} with other bits than the base of "
                f"'{loaded.name}' has"
            )
    return tensors


def _read_base_note(folder: str | Path) -> dict[str, Any]:
    """What `save` wrote of the base; nothing where somebody else did."""
    file = Path(folder).expanduser() / BASE
    return json.loads(file.read_text()) if file.is_file() else {}
