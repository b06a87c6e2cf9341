"""Which models are policies of actions, and which are models of a world."""

from __future__ import annotations

from typing import Any

from rondel.models.model_type import model_settings, model_type_of

MLP_POLICY, FLOW_POLICY, FLOW_VLA, MLP_WORLD = "mlp_policy", "flow_policy", "flow_vla", "mlp_world"
CHUNK, STEPS = 4, 4  # actions that a flow draws at once, and in how many steps, where its table says nothing


def is_control(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a policy of actions: by its table, or by the config.json in its folder."""
    return model_type_of(path) in (MLP_POLICY, FLOW_POLICY, FLOW_VLA)


def draws_chunks(path: str | dict[str, Any]) -> bool:
    """Whether it is one whose denoising steps draw several actions at once."""
    return model_type_of(path) in (FLOW_POLICY, FLOW_VLA)


def reads_pictures(path: str | dict[str, Any]) -> bool:
    """Whether it is one that reads a picture and an instruction instead of numbers."""
    return model_type_of(path) == FLOW_VLA


def chunk_length(path: str | dict[str, Any]) -> int:
    """How many actions a policy draws at once: those of a chunk, or 1."""
    return chunk_sizes(path)["chunk"] if draws_chunks(path) else 1


def chunk_sizes(path: str | dict[str, Any]) -> dict[str, int]:
    """H and K of one that draws chunks, by the names in its config."""
    given = model_settings(path)
    return {"chunk": int(given.get("chunk", CHUNK)), "denoising_steps": int(given.get("denoising_steps", STEPS))}


def is_world_model(path: str | dict[str, Any]) -> bool:
    """The same of a learned model of a world."""
    return model_type_of(path) == MLP_WORLD
