"""A checkpoint into a class of transformers, whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rondel.core.errors import ModelError
from rondel.core.events import Warned, emit
from rondel.system.files import INDEX, SINGLE

READ_AS_JSON = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    "video_preprocessor_config.json",
)
LAYER = re.compile(r"(.*\b(?:layers|blocks|h))\.(\d+)\.")


def load_pretrained(cls: Any, name: str, **how: Any) -> Any:
    """`cls.from_pretrained(**how)`. ModelError where the checkpoint lacks a weight of the model or has it in another
    shape: transformers draws it at random and goes on. Layers that it has beyond the model's are told. `name` for its
    messages.
    """
    model, report = cls.from_pretrained(**how, output_loading_info=True, ignore_mismatched_sizes=True)
    if odd := sorted(report["mismatched_keys"]):
        weight, stored, wanted = odd[0]
        raise ModelError(
            f"'{name}' holds {weight} as {list(stored)}, and its config.json makes it {list(wanted)} ({len(odd)} of its "
            "weights differ so): put the config.json back that it was saved with, or fetch its files again"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"'{name}' lacks {len(missing)} of the weights of a {type(model).__name__}, first {missing[0]}, which would "
            "be random numbers: fetch its files again, or name a model of this kind"
        )
    tell_layers_left_out(name, model.config, (key for key, _ in model.named_parameters()), report["unexpected_keys"])
    return model


def refuse_unreadable_files(name: str, folder: Path) -> None:
    """ModelError that names the file of a checkpoint which is cut off, no JSON, or not there though the index names
    it. Files that nobody reads may lie beside them.
    """
    for path in (folder / file for file in READ_AS_JSON):
        if path.is_file():
            _read_json(name, path)
    for path in _weight_files(name, folder):
        try:
            with safe_open(path, "pt"):
                pass
        except Exception as error:
            raise ModelError(
                f"'{name}': {path} is no whole safetensors file ({path.stat().st_size} bytes; {error}): copy or fetch it "
                "again"
            ) from error


def _weight_files(name: str, folder: Path) -> list[Path]:
    """A single one, as transformers looks for it first, or those of the index; none where there are only other formats."""
    if (whole := folder / SINGLE).is_file():
        return [whole]
    if not (index := folder / INDEX).is_file():
        return []
    read = _read_json(name, index)
    stored = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(stored, dict):
        raise ModelError(f"'{name}': {index} has no \"weight_map\": copy or fetch it again")
    files = [folder / file for file in sorted({str(file) for file in stored.values()})]
    if lost := [path for path in files if not path.is_file()]:
        raise ModelError(
            f"'{name}': {index.name} names {lost[0].name}, which is not in {folder} ({len(lost)} files lack): copy or "
            "fetch what lacks"
        )
    return files


def _read_json(name: str, path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"'{name}': {path} is no whole JSON file ({error}): copy or fetch it again") from error


def tell_layers_left_out(name: str, config: Any, taken: Iterable[str], left: Iterable[str]) -> None:
    """Keys of the model, and those that its checkpoint has beside them. Layers that guess ahead are for an engine."""
    layers = _layers_of(taken)
    guesses = getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0
    for stack, numbers in sorted(_layers_of(left).items()):
        more = sorted(numbers - layers[stack]) if stack in layers else []
        if len(more) > guesses:
            emit(
                Warned(
                    f"'{name}' stores layers that its config.json does not count: {stack}.{more[0]} to {more[-1]} are "
                    f"left out of a model of {len(layers[stack])}. Unless it was cut on purpose, put the config.json "
                    "back that it was saved with"
                )
            )


def _layers_of(keys: Iterable[str]) -> dict[str, set[int]]:
    """{"model.layers": {0, 1}}"""
    found: dict[str, set[int]] = {}
    for key in keys:
        if match := LAYER.match(key):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found
