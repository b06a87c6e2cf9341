"""[task]: tasks, environment, reward, filters, and held-out evaluations."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.reward import RewardCallConfig
from rondel.core.config.section import ConfigSection, SettingsTable, read_settings, split_kind


class EvaluationConfig(SettingsTable):
    every: int = Field(0, ge=0, description="evaluate every so many steps; 0 is only before and after")
    n: int = Field(0, ge=0, description="how many held-out tasks; 0 is all")
    sampling: dict[str, Any] = Field(
        {},
        description="fields of `Sampling`: temperature (0, greedy, unless set), max_tokens (unless set, that of "
        "engine.sampling), top_p, repetition_penalty, grammar, stop, ...",
    )


class TaskConfig(ConfigSection):
    env: str | dict[str, Any] = Field(
        "single_turn",
        description='an environment: "single_turn", "tools", "gym", "gateway", "agents", "verifiers" or "module:name"; '
        "with "
        'settings: { kind = "tools", tools = ["calculator"] }',
    )
    data: dict[str, Any] = Field(
        description="where tasks come from: `kind` and its settings, `prompt`, `answer`, `image`, `video`, `holdout`, "
        "`eval_<key>`, `seed`, `split_special_tokens`; see generate.md"
    )
    curriculum: dict[str, Any] = Field({}, description='{ kind = "shuffle" }, "easy_first", "priority" or "band"')
    reward: str | dict[str, Any] = Field(
        "number", description='a kind or "module:name"; with settings: { kind = ..., ... }'
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="tasks whose prompt is longer are left out before the run, and counted; unset, a prompt that does "
        "not fit is an error",
    )
    filters: list[str | dict[str, Any]] = Field(
        [],
        description='beside the row\'s own: signal, truncated, repetition, or "module:name"; with settings: '
        '{ kind = "module:name", ... }',
    )
    system: str | None = Field(None, description="a system message for prompts that bring none")
    eval: EvaluationConfig = Field(
        EvaluationConfig(), description="how held-out tasks are measured while the run goes on"
    )

    @property
    def env_kind(self) -> str:
        return split_kind(self.env, "single_turn")[0]

    @property
    def env_settings(self) -> dict[str, Any]:
        return split_kind(self.env, "single_turn")[1]

    @property
    def suffix(self) -> str:
        """What the environment appends to prompts."""
        return str(self.env_settings.get("suffix", ""))

    @property
    def shown_examples(self) -> list[dict[str, str]]:
        return list(self.env_settings.get("examples", []))

    @property
    def reward_spec(self) -> str | dict[str, Any]:
        """The reward with its own settings, without those of its calls."""
        if isinstance(self.reward, str):
            return self.reward
        if "kind" not in self.reward:
            return self.reward  # which is refused when it is made
        own = {name: value for name, value in self.reward.items() if name not in RewardCallConfig.model_fields}
        return own if own.keys() - {"kind"} or not isinstance(own["kind"], str) else own["kind"]

    @property
    def reward_calls(self) -> RewardCallConfig:
        _, settings = split_kind(self.reward, "number")
        calls = {name: value for name, value in settings.items() if name in RewardCallConfig.model_fields}
        return RewardCallConfig(**calls)

    @field_validator("env")
    @classmethod
    def _check_env_settings(cls, given: str | dict[str, Any]) -> str | dict[str, Any]:
        kind, settings = split_kind(given, "single_turn")
        if isinstance(kind, str) and kind in ENV_TABLES:
            read_settings("task.env", ENV_TABLES[kind], settings)
        return given

    @field_validator("reward")
    @classmethod
    def _check_reward_calls(cls, given: str | dict[str, Any]) -> str | dict[str, Any]:
        _, settings = split_kind(given, "number")
        calls = {name: value for name, value in settings.items() if name in RewardCallConfig.model_fields}
        read_settings("task.reward", RewardCallConfig, calls)
        return given
