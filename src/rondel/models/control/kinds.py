"""Which models are policies of actions, and which are models of a world."""

from __future__ import annotations

from typing import Any

from rondel.models.model_type import model_settings, model_type_of

MLP_POLICY, FLOW_POLICY, MLP_WORLD = "mlp_policy", "flow_policy", "mlp_world"
CHUNK = 4  # actions that a flow draws at once where its table says nothing


def is_control(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a policy of actions: by its table, or by the config.json in its folder."""
    return model_type_of(path) in (MLP_POLICY, FLOW_POLICY)


def draws_chunks(path: str | dict[str, Any]) -> bool:
    """Whether it is one whose denoising steps draw several actions at once."""
    return model_type_of(path) == FLOW_POLICY


def chunk_length(path: str | dict[str, Any]) -> int:
    """How many actions a policy draws at once: those of a chunk, or 1."""
    return int(model_settings(path).get("chunk", CHUNK)) if draws_chunks(path) else 1


def is_world_model(path: str | dict[str, Any]) -> bool:
    """The same of a learned model of a world."""
    return model_type_of(path) == MLP_WORLD
