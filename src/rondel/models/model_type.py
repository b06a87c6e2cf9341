"""The model type that model.path names, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_settings(path: str | dict[str, Any]) -> dict[str, Any]:
    """The table itself, or the config.json in a folder; {} where there is none."""
    if isinstance(path, dict):
        return path
    try:
        found = json.loads((Path(path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def model_type_of(path: str | dict[str, Any]) -> str | None:
    """By its table, or by the config.json in its folder; None where neither says it."""
    found = model_settings(path).get("random" if isinstance(path, dict) else "model_type")
    return found if isinstance(found, str) else None
