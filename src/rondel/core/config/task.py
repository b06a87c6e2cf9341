"""[task]: tasks, environment, reward, filters, and held-out evaluations."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from rondel.core.config.environment import ENV_TABLES, EpisodeConfig
from rondel.core.config.reward import RewardCallConfig
from rondel.core.config.section import ConfigSection, SettingsTable, read_settings, split_kind

HELD_OUT = "held_out"  # the set that task.data holds out
MOST_SAMPLES = 1024


class EvaluationConfig(SettingsTable):
    every: int = Field(0, ge=0, description="evaluate every so many steps; 0 is only before and after")
    n: int = Field(0, ge=0, description="how many held-out tasks; 0 is all")
    sampling: dict[str, Any] = Field(
        {},
        description="fields of `Sampling`: temperature (0, greedy, unless set), max_tokens (unless set, that of "
        "engine.sampling), top_p, repetition_penalty, grammar, stop, ...; with samples above 1 the temperature, unless "
        "set, is that of engine.sampling",
    )
    samples: int = Field(
        1,
        ge=1,
        le=MOST_SAMPLES,
        description="draws of each task; above 1 avg@samples, pass@k and majority@k are reported",
    )
    k: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="the k of pass@k and majority@k, none above samples; unset, the powers of 2 up to samples"
    )
    pass_reward: float = Field(1.0, description="an answer is right, for pass@k and majority@k, from this reward on")
    sets: dict[str, dict[str, Any]] = Field(
        {},
        description='more sets beside what task.data holds out: { aime = { kind = "jsonl", path = "aime.jsonl" } }, '
        "each a table like task.data",
    )

    @field_validator("sets")
    @classmethod
    def _check_set_names(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in given:
            if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) or name == HELD_OUT:
                raise ValueError(
                    f"a set cannot be called '{name}': take letters, digits, '-' and '_', and not '{HELD_OUT}', "
                    "which is what task.data holds out"
                )
        return given

    @model_validator(mode="after")
    def _check_draws(self) -> EvaluationConfig:
        samples, wanted = self.__dict__["samples"], self.__dict__["k"]
        if over := [k for k in wanted if k > samples]:
            raise ValueError(f"k = {over[0]} needs as many draws of each task, and samples = {samples}: raise samples")
        if samples > 1 and self.__dict__["sampling"].get("temperature") == 0:
            raise ValueError(
                f"samples = {samples} with temperature = 0 draws one answer {samples} times: set a temperature, or "
                "samples = 1"
            )
        return self

    @property
    def reported_k(self) -> list[int]:
        """The k of pass@k and majority@k: [1, 2, 4, 6] for samples = 6."""
        powers = {2**i for i in range(self.samples.bit_length())}
        return sorted(set(self.k) or powers | {self.samples})


class TaskConfig(ConfigSection):
    env: str | dict[str, Any] = Field(
        "single_turn",
        description='an environment: "single_turn", "tools", "search", "gym", "gateway", "agents", "verifiers", '
        '"repository", "shop", "debate", "proposer_solver", "flow", "control" or "module:name"; '
        'with settings: { kind = "tools", tools = ["calculator"] }',
    )
    data: dict[str, Any] = Field(
        description="where tasks come from: `kind` and its settings, `prompt`, `answer`, `image`, `video`, `holdout`, "
        "`eval_<key>`, `seed`, `split_special_tokens`; see generate.md"
    )
    curriculum: dict[str, Any] = Field(
        {}, description='{ kind = "shuffle" }, "easy_first", "priority", "band" or "focused"'
    )
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
        description='beside the row\'s own: signal, truncated, repetition, stub, or "module:name"; with settings: '
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
        """Its own, without those of every episode."""
        settings = split_kind(self.env, "single_turn")[1]
        return {name: value for name, value in settings.items() if name not in EpisodeConfig.model_fields}

    @property
    def episode(self) -> EpisodeConfig:
        settings = split_kind(self.env, "single_turn")[1]
        return EpisodeConfig(**{name: value for name, value in settings.items() if name in EpisodeConfig.model_fields})

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
        shared = {name: settings.pop(name) for name in EpisodeConfig.model_fields if name in settings}
        read_settings("task.env", EpisodeConfig, shared)
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
