"""Which models are policies of actions."""

from __future__ import annotations

from typing import Any

from rondel.models.model_type import model_type_of

MLP_POLICY = "mlp_policy"


def is_control(path: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a policy of actions: by its table, or by the config.json in its folder."""
    return model_type_of(path) == MLP_POLICY
