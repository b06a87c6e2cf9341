"""[policies.NAME]: weights of their own for some agents of an episode."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from rondel.core.config.section import CLOSED


class PolicyConfig(BaseModel):
    """Weights of their own for some agents of an episode: `[policies.critic]`."""

    model_config = CLOSED
    agents: list[str] = Field(
        [], description="whom these weights play; unset, the agent that is called NAME. Others play model.path"
    )
    model: str | dict[str, Any] | None = Field(
        None,
        description="where they start, as model.path, with the same tokens; unset, a copy of what model.path names",
    )
    lr: float | None = Field(None, ge=0, description="unset, the trainer's")
    clip: float | None = Field(None, gt=0, description="of the norm of its gradient; unset, the trainer's")
    epochs: int | None = Field(
        None, ge=1, description="passes over the episodes of a step; unset, those of loop.epochs"
    )
    frozen: bool = Field(False, description="never trained: an opponent that stays as it is")

    @model_validator(mode="after")
    def _refuse_frozen_lr(self) -> PolicyConfig:
        for name in ("lr", "clip", "epochs"):
            if self.frozen and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} = {value:g} has no effect on frozen weights: remove it, or set frozen = false"
                )
        return self
