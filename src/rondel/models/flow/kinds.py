"""Which models are flows."""

from __future__ import annotations

from typing import Any

from rondel.models.flow.velocity_dit import FlowDitConfig
from rondel.models.flow.velocity_mlp import FlowMlpConfig
from rondel.models.flow.video_dit import FlowVideoConfig
from rondel.models.model_type import model_type_of

FLOW_MLP = FlowMlpConfig.model_type
FLOWS = (FLOW_MLP, FlowDitConfig.model_type, FlowVideoConfig.model_type)  # model types that are flows


def is_flow(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a flow: by its table, or by the config.json in its folder."""
    return model_type_of(path) in FLOWS
