"""Which models are policies of actions, and which are models of a world."""

from __future__ import annotations

from typing import Any

from rondel.models.model_type import model_type_of

MLP_POLICY, MLP_WORLD = "mlp_policy", "mlp_world"


def is_control(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a policy of actions: by its table, or by the config.json in its folder."""
    return model_type_of(path) == MLP_POLICY


def is_world_model(path: str | dict[str, Any]) -> bool:
    """The same of a learned model of a world."""
    return model_type_of(path) == MLP_WORLD
