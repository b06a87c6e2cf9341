"""[model]: the weights that are trained, their adapter, their teachers, their images."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator

from rondel.core.config.section import CLOSED, ConfigSection, Count, SettingsTable

FormatName = Literal["none", "fp8", "fp8_row", "fp8_tensor", "mxfp8", "int4", "int4_128", "mxfp4", "nvfp4"]


class AdapterConfig(SettingsTable):
    """LoRA: small matrices beside frozen weights. Only they are trained, published and stored."""

    kind: Literal["off", "lora", "qlora"] = Field(
        "off",
        description="`lora`: y = W x + alpha/rank · B (A x); `qlora`: over a base in 4 bits (nf4, double quantisation)",
    )
    rank: int = Field(16, ge=1, le=1 << 16, description="rows of A and columns of B")
    alpha: int = Field(32, ge=1, description="the adapter counts alpha/rank times")
    targets: str | list[str] = Field(
        "all-linear", description='names of linear layers, `["q_proj", "v_proj"]`, or "all-linear": all but the head'
    )

    @model_validator(mode="after")
    def _refuse_unread_settings(self) -> AdapterConfig:
        mine = self.__dict__
        if isinstance(mine["targets"], str) and mine["targets"] != "all-linear":
            raise ValueError(
                f'targets = "{mine["targets"]}": it is "all-linear" or a list of names, ["q_proj", "v_proj"]'
            )
        for name, field in type(self).model_fields.items():
            if mine["kind"] == "off" and mine[name] != field.default:
                raise ValueError(f'{name} has no effect without a kind: set kind = "lora", or remove it')
        return self


def check_context(context: str) -> None:
    """What a teacher reads instead of the prompt: text with fields in braces, that says more than {prompt}."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(context) if name is not None}
    except ValueError as error:
        raise ValueError(f"context = {context!r}: {error}; write {{{{ and }}}} for braces that are text") from error
    if odd := sorted(name for name in names if not name.isidentifier()):
        raise ValueError(f"context = {context!r}: {{{odd[0]}}} is no name of a field, as {{answer}} is")
    if not names or context.strip() == "{prompt}":
        raise ValueError(
            f"context = {context!r} tells nothing of the task but its prompt, or not even that: write {{prompt}} with "
            "a hint, or name a field of the task, as {answer}, or {solution}"
        )


class TeacherConfig(BaseModel):
    """One of several teachers: `{ path = "big-math", source = "math" }`, one that is served:
    `{ url = "http://127.0.0.1:30000" }`, or the policy itself, which is told more:
    `{ context = "{prompt}\\n\\nThe answer is {answer}." }`.
    """

    model_config = CLOSED
    path: str | dict[str, Any] | None = Field(None, description="as model.path: a teacher that is loaded here")
    url: str | None = Field(None, description="the address of a teacher that is served")
    kind: Literal["sglang", "vllm"] = Field("sglang", description="what serves it")
    weight: float = Field(1.0, gt=0, description="what it counts beside the other teachers of a sample")
    source: str | None = Field(None, description="the source whose tasks it teaches; unset, all")
    context: str | None = Field(
        None,
        description="what it reads instead of the prompt: {prompt}, any field of the task, as {answer}, and "
        "{solution}, the best other answer of the group; without path and url it is the policy itself, "
        "as the step begins",
    )

    @model_validator(mode="after")
    def _require_one_location(self) -> TeacherConfig:
        if (self.path is not None and self.url is not None) or self.path == self.url == self.context:
            raise ValueError(
                "a teacher has either a path, and is loaded here, or a url, where it is served: "
                '{ url = "http://127.0.0.1:30000" }; the policy itself teaches with a context alone'
            )
        if self.context is not None and self.url is not None:
            raise ValueError("a teacher with a context reads it here: give it a path, or neither path nor url")
        if self.context is not None:
            check_context(self.context)
        return self

    @property
    def is_policy(self) -> bool:
        """Whether the policy teaches itself."""
        return self.path is None and self.url is None

    @property
    def name(self) -> str:
        return "the policy itself" if self.is_policy else self.url or str(self.path)


class VisionConfig(SettingsTable):
    """Images of a vision-language model: its tower, and tokens an image."""

    tower: Literal["frozen", "trained"] = Field(
        "frozen",
        description="of a vision-language model: whether what encodes images learns, too; frozen, it costs no gradient",
    )
    image_tokens: Count | Literal["auto"] = Field(
        "auto",
        description="most tokens of one image or step of a video, scaled down to it; auto: "
        "what the model's own settings say",
    )


class NumberFormatConfig(SettingsTable):
    """Of the engine, and how much of it the trainer shares."""

    engine: FormatName = Field(description="number format of the engine's matrices")
    trainer: Literal["whole", "rounded"] = Field(
        "whole",
        description="whole: trainer and reference compute with whole weights (quantised rollouts), and the row has to "
        'weigh tokens by both: algo.correction.kind = "importance", or algo.ratio.anchor = "behavior"; rounded: with '
        "what the format decodes to, as the name of a format alone says",
    )
    held: Literal["decoded", "encoded"] = Field(
        "decoded",
        description="what the engine keeps of its linear layers: numbers in the model's dtype, or codes and scales, "
        "which are decoded for each product: less memory, slower on a CPU, the same numbers up to rounding",
    )

    @field_validator("engine")
    @classmethod
    def _require_format(cls, given: FormatName) -> FormatName:
        if given == "none":
            raise ValueError('engine = "none" rounds nothing: leave model.format out')
        return given


class ModelConfig(ConfigSection):
    path: str | dict[str, Any] = Field(
        description='folder, hub id, GGUF file, "smollm2-135m", or { random = "llama", ... }'
    )
    teacher: str | dict[str, Any] | list[TeacherConfig] | None = Field(
        None,
        description="whom algo.distill learns from: as model.path, with the same tokenizer; or a list of teachers, as "
        '[{ context = "{prompt} The answer is {answer}." }] for the policy itself, told more',
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="compute dtype; master weights are always float32; float16 trains under a dynamic loss scale "
        "(arXiv:1710.03740)",
    )
    format: Annotated[FormatName, Tag("text")] | Annotated[NumberFormatConfig, Tag("[table]")] = Field(
        "none",
        discriminator=Discriminator(
            lambda given: "[table]" if isinstance(given, (dict, NumberFormatConfig)) else "text"
        ),
        description="number format of the layers' matrices, in engine, trainer and reference alike: rounded to it at "
        'every update, while their masters stay whole (quantisation-aware training); or `{ engine = "fp8" }`: '
        "the engine's alone (quantised rollouts)",
    )
    adapter: AdapterConfig = Field(
        AdapterConfig(), description="few new weights beside the model's own, which alone are trained"
    )
    vision: VisionConfig = Field(VisionConfig(), description="of a vision-language model: its tower and its images")

    @field_validator("teacher")
    @classmethod
    def _require_list_of_contexts(cls, teacher: Any) -> Any:
        if isinstance(teacher, dict) and "context" in teacher:
            raise ValueError("a teacher with a context is one of a list: model.teacher = [{ context = ... }]")
        return teacher

    @property
    def trained_format(self) -> FormatName:
        """The number format in which engine, trainer and reference alike compute."""
        return "none" if self.rollout_format != "none" else self.engine_format

    @property
    def rollout_format(self) -> FormatName:
        """The number format in which the engine alone computes."""
        return "none" if isinstance(self.format, str) or self.format.trainer == "rounded" else self.format.engine

    @property
    def engine_holds_codes(self) -> bool:
        """Whether an engine keeps its weights encoded."""
        return not isinstance(self.format, str) and self.format.held == "encoded"

    @property
    def engine_format(self) -> FormatName:
        """The number format of the engine's matrices, whatever the trainer's are in."""
        return self.format if isinstance(self.format, str) else self.format.engine

    def on_one_module(self) -> ModelConfig:
        """The same where engine and trainer read one module: what both round is held decoded,
        as the trainer needs it."""
        if not self.engine_holds_codes or self.rollout_format != "none":
            return self
        return self.model_copy(update={"format": self.engine_format})

    @property
    def served_weights(self) -> str:
        """What the engine's weights are where they are not the masters in the model's dtype, in words; else ""."""
        if self.engine_format == "none":
            return ""
        whose = "in the engine alone" if self.rollout_format != "none" else "as the trainer's are"
        return f"rounded to {self.engine_format}, {whose}"

    @property
    def teachers(self) -> list[TeacherConfig]:
        told = self.teacher
        return told if isinstance(told, list) else [] if told is None else [TeacherConfig(path=told)]
