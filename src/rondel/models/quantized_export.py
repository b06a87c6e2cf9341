"""A checkpoint of a run in a number format, as other tools load it: codes and scales, and a config that says how.

int4, mxfp4, nvfp4 and mxfp8 as compressed-tensors lays them out, fp8 as DeepSeek's checkpoints do: what vLLM, SGLang
and transformers read. Each weight is encoded from its master, and has to decode to the bits that the run computed with.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from rondel.core.errors import CheckpointError, ModelError
from rondel.formats import format_of
from rondel.models.architectures import auto_class
from rondel.models.save import make_readable
from rondel.models.weight_formats import MARK, formatted_parameters

WEIGHTS, MASTERS = "model.safetensors", "optimizer.safetensors"
LAYOUTS = {  # -> format of compressed-tensors, its words for the weights
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4_128": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}


def export_quantized(checkpoint: Path, into: Path) -> tuple[str, int, int]:
    """Write `checkpoint` encoded to the folder `into`, which must not exist. -> format, bytes before and after.

    ModelError where other tools have no place for the format or the model; CheckpointError where a weight
    would not decode to what the run computed with.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if (name := config.pop(MARK, None)) is None:
        raise ModelError(
            f"{checkpoint} is of no run with model.format: it is a whole model already, which other tools load"
        )
    description = _describe(name, checkpoint)
    form = format_of(name)
    found: dict[str, torch.Tensor] = {}
    chosen = _linear_weights(checkpoint, name)
    with safe_open(checkpoint / WEIGHTS, "pt") as held, safe_open(checkpoint / MASTERS, "pt") as masters:
        for key in held.keys():  # noqa: SIM118
            weight = held.get_tensor(key)
            if key not in chosen:
                found[key] = weight
                continue
            parts = form.encode(masters.get_tensor(f"master.{key}"))
            if not torch.equal(form.decode(parts, weight.dtype), weight):
                raise CheckpointError(
                    f"{key} of {checkpoint} is not what {name} decodes to: its files are of different runs, or were "
                    "changed. Take another checkpoint"
                )
            if name not in ("int4", "int4_128"):
                parts.pop("weight_shape", None)
            found |= {key.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    into.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model") and file.name not in (
            "config.json",
            "manifest.json",
            "state.json",
        ):
            shutil.copyfile(file, into / file.name)
    (into / "config.json").write_text(json.dumps(config | {"quantization_config": description}, indent=2))
    save_file(found, into / WEIGHTS, metadata={"format": "pt"})
    make_readable(into)
    return name, (checkpoint / WEIGHTS).stat().st_size, (into / WEIGHTS).stat().st_size


def _describe(name: str, checkpoint: Path) -> dict[str, Any]:
    """The quantization_config of other tools."""
    if name == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    if name not in LAYOUTS:
        raise ModelError(
            f"{checkpoint} is in {name}, which no checkpoint of other tools has; they have fp8, {', '.join(LAYOUTS)}"
        )
    layout, weights = LAYOUTS[name]
    plain = {"symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | plain, "format": layout}},
        "ignore": ["lm_head"],
    }


def _linear_weights(checkpoint: Path, name: str) -> set[str]:
    """Names of what is encoded."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    chosen = formatted_parameters(model)
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    columns = format_of(name).block[1]
    for key, transposed in chosen.items():
        if transposed or len(shapes[key]) != 2:
            raise ModelError(
                f"{key} of '{config.model_type}' is no matrix of a linear layer [O, I]: other tools have no such entry "
                f"in {name}. Serve it with rondel serve"
            )
        if name != "fp8" and shapes[key][1] % columns:
            raise ModelError(
                f"{key} has {shapes[key][1]} columns, and other tools read {name} in whole blocks of {columns}: train "
                "with another model.format"
            )
    return set(chosen)
