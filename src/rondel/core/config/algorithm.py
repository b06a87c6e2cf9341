"""[algo]: a row of the table of algorithms, its overrides, and the groups it trains on."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from rondel.core.config.section import CLOSED, ConfigSection

MOST_ANSWERS = 1_000_000  # of one step
OF_GROUPS = ("group_size", "guides", "beside", "sources", "batch")  # what [algo] says of groups and not of the row


class BesideConfig(BaseModel):
    """Demonstrations that are trained in the same step: `{ kind = "sft", weight = 0.1,
    groups_per_step = 8, data = { ... } }`.
    """

    model_config = CLOSED
    kind: str = Field("sft", description="the row that trains them")
    weight: float = Field(0.1, gt=0, description="what their loss counts beside that of the main row")
    groups_per_step: int = Field(8, ge=1, le=MOST_ANSWERS, description="demonstrations in one step")
    data: dict[str, Any] | None = Field(None, description="as task.data; unset, the tasks of the run")


class AlgorithmConfig(ConfigSection):
    """A row of the table; any component of the row can be overridden: surrogate.high = 0.28."""

    kind: str = Field("grpo", description='a row of papers.md (grpo, dapo, gspo, rloo, sft, ...), or "module:name"')
    group_size: int = Field(8, ge=1, description="G, answers to one task")
    guides: int = Field(
        0,
        ge=0,
        le=1 << 16,
        description="how many times the task's own answer joins each group as a demonstration, beside the G answers; "
        "for luffy",
    )
    mask_truncated: bool = Field(
        False,
        description="an answer that the token limit cut off gives no gradient; "
        "its reward stays in the group's baseline",
    )
    beside: list[BesideConfig] = Field(
        [],
        description="demonstrations in the same step, with a row, a weight and a count of their own: kind, weight, "
        "groups_per_step, data (as task.data)",
    )
    sources: dict[str, dict[str, Any]] = Field({}, description="a row of its own for what a source brings")
    batch: str | None = Field(
        None,
        description='a function of yours from the batch of a step to the batch that is trained: "module:name"',
    )
    advantage: dict[str, Any] = Field(
        {}, description="rewards of a group, or of the step -> advantages; kinds: papers.md"
    )
    ratio: dict[str, Any] = Field(
        {},
        description="over what the ratio is taken and from where: token, sequence, sequence_token; anchor = proximal, "
        "behavior or reference",
    )
    surrogate: dict[str, Any] = Field(
        {},
        description="the loss of a token: clip, policy_gradient, clipped_weight, ... and its knobs; kinds: papers.md",
    )
    correction: dict[str, Any] = Field(
        {},
        description="weight for tokens that other weights or another numeric path sampled: none, importance, "
        "off_policy_mask, binary_kl_mask, variation_mask, freshness; or of tokens that are singled out: least_likely",
    )
    kl: dict[str, Any] = Field(
        {},
        description="distance to the starting weights, in the loss, charged to the reward, or to the advantage behind "
        "the baseline: kind k1, k2, k3, closed_form (of flows); coef; where; target; through; unbiased",
    )
    aggregate: dict[str, Any] = Field(
        {},
        description="the weight of a token: token_mean, seq_mean_token_mean, seq_mean_token_sum, "
        "prompt_mean, fixed_norm",
    )
    shaping: dict[str, Any] = Field(
        {}, description="rewards -> rewards before the advantage: none, clip, overlong, kimi_length"
    )
    entropy: dict[str, Any] = Field({}, description="entropy bonus: coef, target, top")
    distill: dict[str, Any] = Field(
        {},
        description="a teacher's opinion of every token: distill, early, gated, full (with beta and top); they need "
        "model.teacher. criteria: credit by parts of the reward, with a hint for each in model.teacher. observations: "
        "learn what tools sent back. coef",
    )
    value: dict[str, Any] = Field({}, description="what a critic minimises: clip")
    terms: list[dict[str, Any]] = Field(
        [], description='per-token loss terms of your own: kind = "module:NAME", coef and its knobs'
    )
