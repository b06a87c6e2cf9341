"""[engine]: what generates, how its answers are sampled, and speculative decoding."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rondel.core.config.section import ConfigSection, SettingsTable
from rondel.core.types import UNTRAINABLE


class SamplingConfig(SettingsTable):
    temperature: float = Field(
        1.0, ge=0, description="part of the policy: the trainer divides by it too; 0 is refused in training"
    )
    top_k: int = Field(0, ge=0, description="0 keeps everything; what is kept is recorded, and the trainer reads it")
    top_p: float = Field(
        1.0, gt=0, le=1, description="1 keeps everything; what is kept is recorded, and the trainer reads it"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="what has less than this share of the likeliest token's probability is cut off; recorded likewise",
    )
    max_tokens: int = Field(64, ge=1, description="the longest answer of one turn")
    stop: list[int | str] = Field(
        [], description="token ids and strings that end an answer; a string is cut off its text, not its tokens"
    )
    ignore_eos: bool = Field(False, description="every answer runs to max_tokens; for benchmarks")

    @model_validator(mode="before")
    @classmethod
    def _refuse_untrainable(cls, given: Any) -> Any:
        for name in UNTRAINABLE.keys() - cls.model_fields if isinstance(given, dict) else ():
            if name in given:
                raise ValueError(
                    f"{name} is not for training: the trainer could not recompute the logprobs. Drop it here; "
                    f"task.eval.sampling = {{ {name} = ... }} uses it in evaluations"
                )
        return given


class SpeculativeConfig(SettingsTable):
    """Speculative decoding: draft tokens that the model verifies in one pass."""

    kind: Literal["off", "ngram", "draft"] = Field(
        "off", description="where guesses come from: the request's own earlier tokens, or a smaller model"
    )
    k: int = Field(
        4, ge=1, le=16, description="the most guesses of a request in one step; how many are worth it is measured"
    )
    model: str | dict[str, Any] | None = Field(
        None, description='the draft, for kind "draft": as model.path, with the same tokenizer'
    )
    lr: float = Field(5e-5, ge=0, description="the draft learns what the policy writes; 0 leaves it as it is")

    @model_validator(mode="after")
    def _refuse_unread_settings(self) -> SpeculativeConfig:
        """A job.toml names every key, so a setting at its default was not asked for."""
        mine = self.__dict__
        if mine["kind"] == "draft" and mine["model"] is None:
            raise ValueError(
                'kind = "draft" needs a model: model = "a smaller model of the same family"; kind = "ngram" needs none'
            )
        reads = {"off": {"kind"}, "ngram": {"kind", "k"}}.get(mine["kind"], mine.keys())
        for name, field in type(self).model_fields.items():
            if name not in reads and mine[name] != field.default:
                raise ValueError(
                    f'{name} has no effect with kind = "{mine["kind"]}": remove it, or set kind to what reads it'
                )
        return self


class EngineConfig(ConfigSection):
    kind: str = Field(
        "builtin",
        description='builtin; sglang (also for `rondel serve`) or vllm at a url; or "module:name", '
        "a server of your own",
    )
    url: str | list[str] | None = Field(
        None, description="where servers of another kind listen: one address or several"
    )
    numerics: Literal["fast", "aligned", "rounded"] = Field(
        "fast",
        description="of engine, trainer and reference. `fast`: a model of 16 bits keeps its residual stream and its "
        "logits in float32; `rounded`: rounds them, too, as other engines do; `aligned`: the same bits in every batch "
        "and in the trainer; slower, dense models, refused where it does not hold",
    )
    compile: bool | Literal["static"] = Field(
        False,
        description="a CPU: fuses the small operations of the serving pass, seconds at the start, needs a C++ "
        'compiler; a GPU: CUDA graphs of decode steps; "static": decode steps of a few fixed shapes, each traced once, '
        "for compilers that allow no others",
    )
    kv_pages: Annotated[int, Field(ge=1, le=1 << 40)] | Literal["auto"] = Field(
        "auto", description="cache pages of one token each"
    )
    max_running: int = Field(
        64,
        ge=1,
        le=1 << 16,
        description="requests decoded together; in flight, where an engine is one of several or somebody else's",
    )
    concurrency: Literal["fixed", "auto"] = Field(
        "fixed",
        description="auto: how many of max_running work together is found while they do; performance: results are the "
        "same",
    )
    prefill_tokens: int = Field(2048, ge=16, description="prompt tokens computed in one engine step")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how training answers are drawn")
    speculative: SpeculativeConfig = Field(
        SpeculativeConfig(), description="tokens guessed ahead, which the model checks all at once"
    )

    @field_validator("url")
    @classmethod
    def _require_addresses(cls, given: str | list[str] | None) -> str | list[str] | None:
        for url in [given] if isinstance(given, str) else given or ():
            if not re.match(r"https?://[^\s/]", url):
                raise ValueError(f"'{url}' is no address; it is one like http://127.0.0.1:30000")
        return given

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url or []
