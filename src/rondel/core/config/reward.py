"""task.reward: how any reward is called."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from rondel.core.config.section import CLOSED, LONGEST


class RewardCallConfig(BaseModel):
    """How any reward is called; all other settings of task.reward are the reward's own."""

    model_config = CLOSED
    timeout: float = Field(10.0, gt=0, le=LONGEST, description="seconds of wall clock for one call")
    workers: int = Field(1, ge=1, le=4096, description="processes that compute rewards")
    max_failures: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the last 200 answers that may go without a score; above it the run stops, with a "
        "checkpoint",
    )
    patience: float = Field(
        0.0,
        ge=0,
        le=LONGEST,
        description="seconds that a run with more failures than max_failures waits for scores to come back, before it "
        "stops",
    )

    @model_validator(mode="after")
    def _refuse_idle_patience(self) -> RewardCallConfig:
        if self.patience and self.max_failures == 1:
            raise ValueError(
                "patience has no effect while any share of failures will do: set max_failures below 1, to 0.2 say"
            )
        return self
