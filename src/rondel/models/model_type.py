"""The model type that model.path names, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_type_of(path: str | dict[str, Any]) -> str | None:
    """By its table, or by the config.json in its folder; None where neither says it."""
    if isinstance(path, dict):
        found = path.get("random")
    else:
        try:
            found = json.loads((Path(path).expanduser() / "config.json").read_text()).get("model_type")
        except (OSError, ValueError, AttributeError):
            return None
    return found if isinstance(found, str) else None
