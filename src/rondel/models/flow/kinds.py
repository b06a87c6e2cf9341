"""Which models are flows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rondel.models.flow.velocity_dit import FlowDitConfig
from rondel.models.flow.velocity_mlp import FlowMlpConfig

FLOWS = (FlowMlpConfig.model_type, FlowDitConfig.model_type)  # model types that are flows


def is_flow(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a flow: by its table, or by the config.json in its folder."""
    if isinstance(path, dict):
        return path.get("random") in FLOWS
    config = Path(path).expanduser() / "config.json"
    try:
        return json.loads(config.read_text()).get("model_type") in FLOWS
    except (OSError, ValueError, AttributeError):
        return False
