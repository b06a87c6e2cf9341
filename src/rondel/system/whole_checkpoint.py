"""A checkpoint into a class of transformers, whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rondel.core.errors import ModelError
from rondel.core.events import Warned, emit

LAYER = re.compile(r"(.*\b(?:layers|blocks|h))\.(\d+)\.")


def load_pretrained(cls: Any, name: str, **how: Any) -> Any:
    """`cls.from_pretrained(**how)`. ModelError where the checkpoint lacks a weight of the model: transformers draws it at
    random and goes on. Layers that it has beyond the model's are told. `name` for its messages.
    """
    model, report = cls.from_pretrained(**how, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"'{name}' lacks {len(missing)} of the weights of a {type(model).__name__}, first {missing[0]}, which would "
            "be random numbers: fetch its files again, or name a model of this kind"
        )
    tell_layers_left_out(name, model.config, (key for key, _ in model.named_parameters()), report["unexpected_keys"])
    return model


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
