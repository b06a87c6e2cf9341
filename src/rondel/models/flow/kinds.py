"""Which models are flows."""

from __future__ import annotations

from typing import Any

from rondel.models.model_type import model_type_of

FLOW_MLP, FLOW_DIT, FLOW_VIDEO = "flow_mlp", "flow_dit", "flow_video"
FLOWS = (FLOW_MLP, FLOW_DIT, FLOW_VIDEO)  # model types that are flows


def is_flow(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a flow: by its table, or by the config.json in its folder."""
    return model_type_of(path) in FLOWS
