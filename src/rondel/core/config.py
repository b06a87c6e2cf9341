"""Job: the whole recipe as one frozen tree. TOML plus dotted overrides; an unknown
key, or a set key nobody read, is an error.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from rondel.core.errors import ConfigError, disk_refusal
from rondel.core.registry import look_beside, suggest_name
from rondel.core.types import DATA, GREEDY, POLICY, UNTRAINABLE

CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
LONGEST = 1e7  # seconds that a setting may ask to wait: four months
MOST_ANSWERS = 1_000_000  # of one step
Count = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class ConfigSection(BaseModel):
    """Frozen, closed, and it notes which of its keys were read (law 12)."""

    model_config = CLOSED
    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith(("_", "model_")) and name in type(self).model_fields:
            self._read.add(name)
        return value

    def unread_keys(self, prefix: str = "") -> list[str]:
        """Dotted names of keys that were set to other than their defaults, but that no part of the run looked at."""
        out = []
        for name in self.model_fields_set:
            value = self.__dict__.get(name)
            if isinstance(value, ConfigSection):
                out += value.unread_keys(f"{prefix}{name}.")
            elif name not in self._read and value != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                out.append(f"{prefix}{name}")
        return sorted(out)

    def read_keys(self, prefix: str = "") -> list[str]:
        """Dotted names of the keys that were read: what a worker tells of its copy of the recipe."""
        out = [f"{prefix}{name}" for name in self._read]
        for name, value in self.__dict__.items():
            if isinstance(value, ConfigSection):
                out += value.read_keys(f"{prefix}{name}.")
        return out

    def mark_read(self, keys: Iterable[str]) -> None:
        """Count dotted names as read: by a worker, in its copy of the recipe."""
        for key in keys:
            name, _, rest = key.partition(".")
            inner = self.__dict__.get(name)
            self._read.add(name)
            if rest and isinstance(inner, ConfigSection):
                inner.mark_read([rest])

    def mark_everything_read(self) -> None:
        self._read.update(type(self).model_fields)
        for value in self.__dict__.values():
            if isinstance(value, ConfigSection):
                value.mark_everything_read()

    def to_values(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The settings as plain data for one reader, who refuses what it does not know."""
        names = [name for name in type(self).model_fields if name not in without]
        self._read.update(names)
        return {name: value for name, value in self.model_dump().items() if name in names}


class SettingsTable(ConfigSection):
    """A key whose value is the table of one thing: `adapter = { kind = "lora", rank = 16 }`."""


class AdapterConfig(SettingsTable):
    """Few new numbers beside the model's own, which stay as they are: they alone are trained, published and stored."""

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
    def _what_is_carried(self) -> AdapterConfig:
        mine = self.__dict__
        if isinstance(mine["targets"], str) and mine["targets"] != "all-linear":
            raise ValueError(
                f'targets = "{mine["targets"]}": it is "all-linear" or a list of names, ["q_proj", "v_proj"]'
            )
        for name, field in type(self).model_fields.items():
            if mine["kind"] == "off" and mine[name] != field.default:
                raise ValueError(f'{name} has no effect without a kind: set kind = "lora", or remove it')
        return self


class TeacherConfig(BaseModel):
    """One of several: `{ path = "big-math", source = "math" }`, or one that is served:
    `{ url = "http://127.0.0.1:30000" }`.
    """

    model_config = CLOSED
    path: str | dict[str, Any] | None = Field(None, description="as model.path: a teacher that is loaded here")
    url: str | None = Field(None, description="the address of a teacher that is served")
    kind: Literal["sglang", "vllm"] = Field("sglang", description="what serves it")
    weight: float = Field(1.0, gt=0, description="what it counts beside the other teachers of a sample")
    source: str | None = Field(None, description="the source whose tasks it teaches; unset, all")

    @model_validator(mode="after")
    def _one_place(self) -> TeacherConfig:
        if (self.path is None) == (self.url is None):
            raise ValueError(
                "a teacher has either a path, and is loaded here, or a url, where it is served: "
                '{ url = "http://127.0.0.1:30000" }'
            )
        return self

    @property
    def name(self) -> str:
        return self.url or str(self.path)


class VisionConfig(SettingsTable):
    """How a vision-language model sees."""

    tower: Literal["frozen", "trained"] = Field(
        "frozen",
        description="of a vision-language model: whether what encodes images learns, too; frozen, it costs no gradient",
    )
    image_tokens: Count | Literal["auto"] = Field(
        "auto",
        description="most tokens of one image, which is scaled down to it; auto: what the model's own settings say",
    )


class ModelConfig(ConfigSection):
    path: str | dict[str, Any] = Field(
        description='folder, hub id, GGUF file, "smollm2-135m", or { random = "llama", ... }'
    )
    teacher: str | dict[str, Any] | list[TeacherConfig] | None = Field(
        None, description="whom algo.distill learns from: as model.path, with the same tokenizer"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute dtype; master weights are always float32"
    )
    adapter: AdapterConfig = Field(
        AdapterConfig(), description="few new weights beside the model's own, which alone are trained"
    )
    vision: VisionConfig = Field(VisionConfig(), description="of a vision-language model: its tower and its images")

    @property
    def teachers(self) -> list[TeacherConfig]:
        told = self.teacher
        return told if isinstance(told, list) else [] if told is None else [TeacherConfig(path=told)]


class EvaluationConfig(SettingsTable):
    every: int = Field(0, ge=0, description="evaluate every so many steps; 0 is only before and after")
    n: int = Field(0, ge=0, description="how many held-out tasks; 0 is all")
    sampling: dict[str, Any] = Field(
        {},
        description="fields of `Sampling`: temperature (0, greedy, unless set), max_tokens (unless set, that of "
        "engine.sampling), top_p, repetition_penalty, grammar, stop, ...",
    )


class ExampleConfig(BaseModel):
    """One solved question: `{ prompt = "2 + 2 =", answer = "4" }`."""

    model_config = CLOSED
    prompt: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class SingleTurnConfig(BaseModel):
    """One prompt, one answer."""

    model_config = CLOSED
    suffix: str = Field("", description="appended to the last message of every prompt")
    examples: list[ExampleConfig] = Field(
        [],
        description="few-shot: { prompt, answer } shown as earlier turns before every question, each prompt with the "
        "suffix",
    )


class ToolsConfig(BaseModel):
    """The policy calls tools until it answers without one."""

    model_config = CLOSED
    tools: list[str] = Field(
        min_length=1,
        description="what the policy may call: calculator, python (in a sandbox), functions and classes of yours as "
        '"module:name", "mcp:command", "mcp:http://...", "mcp+shared:..."',
    )
    turns: int = Field(8, ge=1, description="most replies of the policy in one episode")
    timeout: float = Field(30.0, gt=0, le=LONGEST, description="seconds for one call of a tool")
    suffix: str = Field("", description="appended to the last message of every prompt")


class GymConfig(BaseModel):
    """Worlds with reset and step, from task.data.kind = "gym"."""

    model_config = CLOSED
    turns: int = Field(8, ge=1, description="most actions of the policy in one episode")
    timeout: float = Field(30.0, gt=0, le=LONGEST, description="seconds for one call of the world")
    suffix: str = Field("", description="appended to the last message of every prompt")


class GatewayConfig(BaseModel):
    """An agent program that talks to the policy through an OpenAI or Anthropic API."""

    model_config = CLOSED
    agent: str | list[str] = Field(description='"module:name", a function; else a command')
    timeout: float = Field(600.0, gt=0, le=LONGEST, description="seconds of wall clock for one episode of the agent")


class AgentsConfig(BaseModel):
    """Several agents that read each other's turns."""

    model_config = CLOSED
    agents: list[dict[str, Any]] = Field(
        min_length=1, description='their turns, { agent = "a", says = "{prompt}" }, the answer last'
    )
    suffix: str = Field("", description="appended to the last message of every prompt")


class VerifiersConfig(BaseModel):
    """An environment of the verifiers package, named in task.data."""

    model_config = CLOSED
    timeout: float = Field(600.0, gt=0, le=LONGEST, description="seconds of wall clock for one episode")


ENV_TABLES: dict[str, type[BaseModel]] = {
    "single_turn": SingleTurnConfig,
    "tools": ToolsConfig,
    "gym": GymConfig,
    "gateway": GatewayConfig,
    "agents": AgentsConfig,
    "verifiers": VerifiersConfig,
}


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
    def _what_is_waited_for(self) -> RewardCallConfig:
        if self.patience and self.max_failures == 1:
            raise ValueError(
                "patience has no effect while any share of failures will do: set max_failures below 1, to 0.2 say"
            )
        return self


class SettingsFault(ValueError):
    """A fault in a table whose settings depend on its kind; the message names the whole key."""


def split_kind(value: str | dict[str, Any], default: str) -> tuple[str, dict[str, Any]]:
    """ "tools" and { kind = "tools", turns = 2 } -> the kind, and the settings beside it."""
    if isinstance(value, str):
        return value, {}
    settings = {name: setting for name, setting in value.items() if name != "kind"}
    return value.get("kind", default), settings


def read_settings(where: str, model: type[BaseModel], settings: dict[str, Any]) -> Any:
    """The settings of one table as its model; SettingsFault names each wrong key."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise SettingsFault("; ".join(_explain_faults(error, model, f"{where}."))) from error


class TaskConfig(ConfigSection):
    env: str | dict[str, Any] = Field(
        "single_turn",
        description='an environment: "single_turn", "tools", "gym", "gateway", "agents", "verifiers" or "module:name"; '
        "with "
        'settings: { kind = "tools", tools = ["calculator"] }',
    )
    data: dict[str, Any] = Field(
        description="where tasks come from: `kind` and its settings, `prompt`, `answer`, `image`, `holdout`, "
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
    def _settings_of_the_environment(cls, given: str | dict[str, Any]) -> str | dict[str, Any]:
        kind, settings = split_kind(given, "single_turn")
        if isinstance(kind, str) and kind in ENV_TABLES:
            read_settings("task.env", ENV_TABLES[kind], settings)
        return given

    @field_validator("reward")
    @classmethod
    def _settings_of_its_calls(cls, given: str | dict[str, Any]) -> str | dict[str, Any]:
        _, settings = split_kind(given, "number")
        calls = {name: value for name, value in settings.items() if name in RewardCallConfig.model_fields}
        read_settings("task.reward", RewardCallConfig, calls)
        return given


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
        description="an answer that the token limit cut off gives no gradient; its reward stays in the group's baseline",
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
        description="over what the ratio is taken and from where: token, sequence, sequence_token; anchor = proximal "
        "or behavior",
    )
    surrogate: dict[str, Any] = Field(
        {},
        description="the loss of a token: clip, policy_gradient, clipped_weight, ... and its knobs; kinds: papers.md",
    )
    correction: dict[str, Any] = Field(
        {},
        description="weight for tokens that other weights or another numeric path sampled: none, importance, "
        "off_policy_mask",
    )
    kl: dict[str, Any] = Field(
        {},
        description="distance to the starting weights, in the loss, charged to the reward, or to the advantage behind "
        "the baseline: kind k1, k2, k3; coef; where; target; through; unbiased",
    )
    aggregate: dict[str, Any] = Field(
        {}, description="the weight of a token: token_mean, seq_mean_token_mean, seq_mean_token_sum, fixed_norm"
    )
    shaping: dict[str, Any] = Field(
        {}, description="rewards -> rewards before the advantage: none, clip, overlong, kimi_length"
    )
    entropy: dict[str, Any] = Field({}, description="entropy bonus: coef, target, top")
    distill: dict[str, Any] = Field({}, description="a teacher's opinion of every token: coef; needs model.teacher")
    value: dict[str, Any] = Field({}, description="what a critic minimises: clip")
    terms: list[dict[str, Any]] = Field(
        [], description='per-token loss terms of your own: kind = "module:NAME", coef and its knobs'
    )


class WarmupConfig(SettingsTable):
    """A supervised phase before the loop: the same loop, whose Generate copies the data set's answers."""

    steps: int = Field(0, ge=0, description="steps of the supervised phase; 0 is none")
    lr: float = Field(1e-4, ge=0, description="its learning rate, constant")
    groups_per_step: int = Field(32, ge=1, description="its demonstrations in one step")


class LoopConfig(ConfigSection):
    steps: int | None = Field(
        None, ge=0, description="training steps after the supervised phase; this or passes is needed"
    )
    passes: float | None = Field(
        None,
        gt=0,
        description="in place of steps: how often each training task is trained; steps is then passes · tasks / "
        "groups_per_step",
    )
    groups_per_step: int = Field(16, ge=1, description="P, groups in one step")
    updates_per_step: int = Field(1, ge=1, description="optimizer moves in one step")
    epochs: int = Field(
        1,
        ge=1,
        description="how often a step goes over its own batch, each time in updates_per_step updates; passes over the "
        "data are loop.passes",
    )
    replays: int = Field(
        0, ge=0, description="groups of each step that come back in a later one, once and within max_staleness"
    )
    max_staleness: int = Field(
        0, ge=0, le=1000, description="S, versions between a group's admission and its training; 0 is on-policy"
    )
    in_flight: Literal["hold", "drain", "abort"] = Field(
        "hold", description="what happens to a request while the weights change: it waits, it ends first, or it is cut"
    )
    window: int | Literal["auto"] = Field(
        "auto",
        description="how many younger groups may be trained before an unfinished one; 1 is first in, first out; "
        '"auto": as many as leave it its time',
    )
    oversample: int = Field(
        0,
        ge=0,
        description="groups begun beyond those that are waited for: the first to finish are trained, who is late is "
        "lost",
    )
    late: Literal["drop", "retry"] = Field(
        "drop", description="what becomes of the task of a group that is late: gone and counted, or asked again"
    )
    seed: int = Field(0, description="of the order of tasks and of all noise")
    max_refills: int = Field(20, ge=1, description="a step stops refilling after this many times P dropped groups")
    warmup: WarmupConfig = Field(WarmupConfig(), description="a supervised phase before the loop")

    @model_validator(mode="after")
    def _what_is_late(self) -> LoopConfig:
        mine = self.__dict__
        if mine["warmup"].__dict__["steps"] == 0:  # a phase that is left out has no settings
            object.__setattr__(self, "warmup", WarmupConfig())
        if mine["steps"] is None and mine["passes"] is None:
            raise ValueError(
                "steps is not set: steps = 100 is the number of training steps; passes = 2 counts them in passes over "
                "the data"
            )
        if mine["steps"] is not None and mine["passes"] is not None:
            raise ValueError(
                f"steps = {mine['steps']} and passes = {mine['passes']:g} both say how long the run is: remove one of "
                f"them"
            )
        if mine["replays"] and not mine["max_staleness"]:
            raise ValueError(
                "replays has no effect at max_staleness = 0: what is trained again is at least one version old. Set "
                "max_staleness"
            )
        if mine["replays"] > mine["groups_per_step"]:
            raise ValueError(
                f"replays = {mine['replays']} is more than a step has: groups_per_step = {mine['groups_per_step']}"
            )
        if mine["late"] == "retry" and not mine["oversample"]:
            raise ValueError(
                'late = "retry" has no effect: without oversample no group is ever late, it is waited for. Set '
                "oversample, or remove it"
            )
        if mine["oversample"] and mine["window"] != "auto":
            raise ValueError(
                "window has no effect with oversample, which takes whoever has finished: remove one of them"
            )
        if mine["oversample"] and mine["in_flight"] == "drain":
            raise ValueError(
                'in_flight = "drain" would wait for those that oversample means not to wait for: use "hold" or "abort"'
            )
        return self


class SamplingConfig(SettingsTable):
    temperature: float = Field(
        1.0, ge=0, description="part of the policy: the trainer divides by it too; 0 is refused in training"
    )
    top_k: int = Field(0, ge=0, description="0 keeps everything; what is kept is recorded, and the trainer reads it")
    top_p: float = Field(
        1.0, gt=0, le=1, description="1 keeps everything; what is kept is recorded, and the trainer reads it"
    )
    max_tokens: int = Field(64, ge=1, description="the longest answer of one turn")
    stop: list[int | str] = Field(
        [], description="token ids and strings that end an answer; a string is cut off its text, not its tokens"
    )
    ignore_eos: bool = Field(False, description="every answer runs to max_tokens; for benchmarks")

    @model_validator(mode="before")
    @classmethod
    def _what_trains(cls, given: Any) -> Any:
        for name in UNTRAINABLE.keys() - cls.model_fields if isinstance(given, dict) else ():
            if name in given:
                raise ValueError(
                    f"{name} is not for training: the trainer could not recompute the logprobs. Drop it here; "
                    f"task.eval.sampling = {{ {name} = ... }} uses it in evaluations"
                )
        return given


class SpeculativeConfig(SettingsTable):
    """Guess tokens ahead and let the model look at all of them at once."""

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
    def _what_is_read(self) -> SpeculativeConfig:
        """A job.toml names every key, so a default is not a wish."""
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
        description='builtin; sglang (also for `rondel serve`) or vllm at a url; or "module:name", a server of your own',
    )
    url: str | list[str] | None = Field(
        None, description="where servers of another kind listen: one address or several"
    )
    numerics: Literal["fast", "aligned"] = Field(
        "fast",
        description="`aligned`: the same bits in every batch and in the trainer; slower, dense models, refused where "
        "it does not hold",
    )
    compile: bool = Field(
        False,
        description="a CPU: fuses the small operations of the serving pass, seconds at the start, needs a C++ "
        "compiler; a GPU: CUDA graphs of decode steps",
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
    def _an_address(cls, given: str | list[str] | None) -> str | list[str] | None:
        for url in [given] if isinstance(given, str) else given or ():
            if not re.match(r"https?://[^\s/]", url):
                raise ValueError(f"'{url}' is no address; it is one like http://127.0.0.1:30000")
        return given

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url or []


class CriticConfig(SettingsTable):
    """Of a row that needs values: its own backbone with one number a token."""

    lr: float = Field(1e-5, ge=0, description="its own, under the trainer's schedule")
    warmup: int = Field(
        0, ge=0, description="first steps in which only the critic learns; the policy stays bit for bit as it is"
    )
    path: str | dict[str, Any] | None = Field(
        None, description="where its backbone starts, as model.path; unset, a copy of the policy"
    )


class OptimizerConfig(SettingsTable):
    """AdamW."""

    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises to lr")
    weight_decay: float = Field(0.0, ge=0, description="on matrices only")
    betas: tuple[Beta, Beta] = Field((0.9, 0.99), strict=False, description="of AdamW")


class TrainerConfig(ConfigSection):
    lr: float = Field(1e-5, ge=0, description="learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after its warmup"
    )
    clip: float = Field(1.0, gt=0, allow_inf_nan=True, description="global gradient norm; inf clips nothing")
    optimizer: OptimizerConfig = Field(
        OptimizerConfig(), description="AdamW beside its learning rate: warmup_steps, weight_decay, betas"
    )
    micro_tokens: Count | Literal["auto"] = Field(
        "auto", description="tokens in one forward and backward pass; speed and memory, never the result"
    )
    routing_replay: bool | Literal["auto"] = Field(
        "auto", description="a MoE's tokens go to the experts that the engine chose; auto: if it has any"
    )
    offload: bool = Field(
        False,
        description="shared device: while the engine writes, optimizer, critic, reference and teacher lie in host "
        "memory, while the trainer "
        "works there is no KV cache; reference and teacher are on the device for their own pass only",
    )
    critic: CriticConfig = Field(CriticConfig(), description="of a row that needs values")
    max_bad_steps: int = Field(3, ge=1, description="stop after so many steps in a row that a finite-check refused")


class PlaceConfig(ConfigSection):
    kind: Literal["shared", "split"] = Field(
        "shared", description="engine and trainer on one device, or on devices of their own"
    )
    cluster: Literal["auto", "local", "process", "torchrun", "ray"] = Field(
        "auto",
        description="where they run: in this process, in processes of their own, as Ray actors; auto: local if shared, "
        "process if split",
    )
    engines: int = Field(1, ge=1, le=4096, description="engines of a split run")
    ranks: int = Field(
        1, ge=1, le=4096, description="processes among which the trainer's weights lie in shards (FSDP2)"
    )
    address: str | None = Field(
        None, description='of a running Ray cluster: "auto", "ray://host:10001"; unset, one is started'
    )
    patience: float = Field(
        60.0,
        gt=0,
        le=LONGEST,
        description="seconds without progress in what it was asked for after which a process counts as stuck",
    )
    device: str = Field("auto", description='"cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one')
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description='CPU threads; "auto" is all that this process may use'
    )

    @model_validator(mode="after")
    def _what_goes_together(self) -> PlaceConfig:
        mine = self.__dict__
        if mine["address"] is not None and not re.fullmatch(
            r"auto|local|(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", mine["address"]
        ):
            raise ValueError(
                f'address = "{mine["address"]}" is none of Ray: it is "auto", "host:6379" or "ray://host:10001"'
            )
        if mine["cluster"] == "auto":
            object.__setattr__(self, "cluster", "process" if mine["kind"] == "split" else "local")
        if mine["kind"] == "shared" and mine["cluster"] != "local":
            raise ValueError(f'cluster = "{mine["cluster"]}" needs kind = "split": a shared device is in one process')
        if mine["cluster"] == "local" and (mine["engines"], mine["ranks"]) != (1, 1):
            raise ValueError('more than one engine or rank needs kind = "split" and cluster = "process"')
        return self


TRANSPORTS = ("auto", "tensor", "ipc", "disk", "distributed", "delta")


class SyncConfig(ConfigSection):
    kind: str = Field(
        "auto",
        description="how weights reach the engines: auto, tensor, ipc, disk, distributed, delta, or a transport of "
        'yours as "module:name"; "auto" is tensor in one process, where nothing is copied; else see docs/sync.md',
    )
    probe: bool = Field(True, description="score a fixed prompt on both sides after every update")

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, given: str) -> str:
        if given not in TRANSPORTS and ":" not in given:
            raise ValueError(
                f"'{given}' is no transport.{suggest_name(given, list(TRANSPORTS))} Known: {', '.join(TRANSPORTS)}; or "
                f"your own as 'module:name'"
            )
        return given


class CheckpointConfig(SettingsTable):
    every: int = Field(10, ge=0, description="steps between two checkpoints; 0 is only at the end")
    keep: int = Field(2, ge=1, description="how many stay")


class RunConfig(ConfigSection):
    folder: str = Field(min_length=1, description="where the run lives")
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="when checkpoints are written, and how many stay"
    )
    sinks: list[str | dict[str, Any]] = Field(
        ["tensorboard"],
        description='tensorboard, jsonl, csv, wandb, trackio, mlflow, prometheus, opentelemetry, or "module:name"; '
        "with "
        'settings: { kind = "prometheus", port = 9464 }',
    )
    record: bool = Field(
        False,
        description="write schedule.jsonl, so that `rondel replay RUN --into FOLDER` does the whole run again, bit for "
        "bit",
    )
    durability: Literal["process", "disk"] = Field("process", description='"disk" calls fsync after each journal step')


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
    frozen: bool = Field(False, description="never trained: an opponent that stays as it is")

    @model_validator(mode="after")
    def _what_learns(self) -> PolicyConfig:
        if self.frozen and self.lr is not None:
            raise ValueError(f"lr = {self.lr:g} has no effect on frozen weights: remove it, or set frozen = false")
        return self


SYNONYMS = {  # what other trainers call a key of ours
    "learning_rate": "trainer.lr",
    "warmup_steps": "trainer.optimizer.warmup_steps",
    "max_grad_norm": "trainer.clip",
    "lr_scheduler_type": "trainer.schedule",
    "batch_size": "loop.groups_per_step",
    "train_batch_size": "loop.groups_per_step",
    "per_device_train_batch_size": "loop.groups_per_step",
    "max_steps": "loop.steps",
    "num_train_epochs": "loop.steps",
    "total_steps": "loop.steps",
    "num_iterations": "loop.updates_per_step",
    "num_generations": "algo.group_size",
    "n_samples": "algo.group_size",
    "rollout_n": "algo.group_size",
    "beta": "algo.kl.coef",
    "kl_coef": "algo.kl.coef",
    "kl_loss_coef": "algo.kl.coef",
    "entropy_coef": "algo.entropy.coef",
    "epsilon": "algo.surrogate.low",
    "clip_range": "algo.surrogate.low",
    "epsilon_high": "algo.surrogate.high",
    "max_new_tokens": "engine.sampling.max_tokens",
    "max_completion_length": "engine.sampling.max_tokens",
    "temperature": "engine.sampling.temperature",
    "top_p": "engine.sampling.top_p",
    "top_k": "engine.sampling.top_k",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "pretrain": "model.path",
    "output_dir": "run.folder",
    "save_steps": "run.checkpoint.every",
    "report_to": "run.sinks",
    "seed": "loop.seed",
    "dataset": "task.data",
    "dataset_name": "task.data",
    "reward_funcs": "task.reward",
    "system_prompt": "task.system",
}
MOVED_KEYS = {  # a key of earlier versions -> what says it now
    "task.suffix": 'task.env = { kind = "single_turn", suffix = ... }',
    "task.examples": 'task.env = { kind = "single_turn", examples = [...] }',
    "task.tools": 'task.env = { kind = "tools", tools = [...] }',
    "task.turns": 'task.env = { kind = "tools", turns = ... }',
    "task.tool_timeout": 'task.env = { kind = "tools", timeout = ... }',
    "task.agent": 'task.env = { kind = "gateway", agent = ... }',
    "task.agents": 'task.env = { kind = "agents", agents = [...] }',
    "task.agent_timeout": 'task.env = { kind = "gateway", timeout = ... }',
    "task.reward_timeout": "task.reward = { kind = ..., timeout = ... }",
    "task.reward_workers": "task.reward = { kind = ..., workers = ... }",
    "task.max_failures": "task.reward = { kind = ..., max_failures = ... }",
    "task.patience": "task.reward = { kind = ..., patience = ... }",
    "task.eval.temperature": "task.eval.sampling = { temperature = ... }",
    "task.eval.max_tokens": "task.eval.sampling = { max_tokens = ... }",
    "run.metrics_port": 'run.sinks = [{ kind = "prometheus", port = ... }]',
    "run.traces": 'run.sinks = [{ kind = "opentelemetry", url = ... }]',
    "model.adapter.dropout": "nothing: with dropout the trainer could not recompute what the engine drew from, so it is "
    "always 0. Use algo.kl or a lower rank against overfitting",
    "model.tower": "model.vision = { tower = ... }",
    "model.image_tokens": "model.vision = { image_tokens = ... }",
    "trainer.warmup_steps": "trainer.optimizer = { warmup_steps = ... }",
    "trainer.weight_decay": "trainer.optimizer = { weight_decay = ... }",
    "trainer.betas": "trainer.optimizer = { betas = [...] }",
    "trainer.kind": "nothing: there is one trainer (FSDP2), over place.ranks",
}
ENV_SETTINGS = {  # of them: a setting of the environment, and what it was where nobody set it
    "suffix": ("suffix", ""),
    "examples": ("examples", []),
    "tools": ("tools", []),
    "turns": ("turns", 8),
    "tool_timeout": ("timeout", 30.0),
    "agent": ("agent", None),
    "agents": ("agents", []),
    "agent_timeout": ("timeout", 600.0),
}
# how names of metrics begin
STAGES = ("score", "filter", "generate", "train", "sync", "loop", "eval", "time", "mem", "ledger")


class Job(ConfigSection):
    """One run, complete: `Job.read("recipes/quickstart.toml", {"loop.steps": 5})`."""

    model: ModelConfig
    task: TaskConfig
    algo: AlgorithmConfig = AlgorithmConfig()
    loop: LoopConfig
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    place: PlaceConfig = PlaceConfig()
    sync: SyncConfig = SyncConfig()
    policies: dict[str, PolicyConfig] = Field(
        {}, description="weights of their own for some agents of an episode: [policies.NAME]"
    )
    run: RunConfig
    _origin: str = PrivateAttr("")

    @property
    def origin(self) -> str:
        """Where the recipe lies, if it was read from a file."""
        return self._origin

    @field_validator("policies")
    @classmethod
    def _who_plays_whom(cls, given: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        taken: dict[str, str] = {}
        for name, policy in given.items():
            if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) or name in (POLICY, DATA, GREEDY, *STAGES):
                raise ValueError(
                    f"a policy cannot be called '{name}', which names files and metrics: take a word of letters and "
                    f"digits, "
                    f"and none of {', '.join((POLICY, DATA, GREEDY, *STAGES))}"
                )
            for agent in policy.agents or [name]:
                if agent in taken:
                    raise ValueError(
                        f"'{agent}' cannot play both '{taken[agent]}' and '{name}': name it in one of them"
                    )
                taken[agent] = name
        return given

    @model_validator(mode="after")
    def _what_a_step_holds(self) -> Job:
        loop, algo = self.__dict__["loop"].__dict__, self.__dict__["algo"].__dict__
        for key, groups, size in (
            ("loop.groups_per_step", loop["groups_per_step"] + loop["oversample"], algo["group_size"]),
            ("loop.warmup.groups_per_step", loop["warmup"].__dict__["groups_per_step"], 1),
        ):
            if groups * size > MOST_ANSWERS:
                raise ValueError(
                    f"{key} = {groups} with algo.group_size = {algo['group_size']} are {groups * size} answers in one "
                    f"step, and at most "
                    f"{MOST_ANSWERS} are carried: lower one of them"
                )
        return self

    @property
    def steps(self) -> int:
        """Training steps after the supervised phase; where the recipe says passes, they
        are known once the data is read.
        """
        assert self.loop.steps is not None, f"loop.passes = {self.loop.passes} is not resolved yet: see with_steps"
        return self.loop.steps

    @property
    def agent_policies(self) -> dict[str, str]:
        """{agent: policy} of those with weights of their own."""
        return {agent: name for name, policy in self.policies.items() for agent in policy.agents or [name]}

    def of_policy(self, name: str) -> Job:
        """The same run as one policy sees it: with its model and its learning rate, and as if it were alone."""
        if name == POLICY:
            return self.model_copy(update={"policies": {}})
        policy = self.policies[name]
        model: dict[str, Any] = {"path": self.model.path if policy.model is None else policy.model}
        if policy.frozen:
            model["adapter"] = AdapterConfig()
        lr = {} if policy.lr is None else {"lr": policy.lr}
        update = {
            "policies": {},
            "model": self.model.model_copy(update=model),
            "trainer": self.trainer.model_copy(update=lr),
        }
        return self.model_copy(update=update)

    @classmethod
    def read(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> Job:
        """Parse a TOML recipe, apply dotted overrides, validate; every fault is one readable ConfigError."""
        path = Path(path)
        tree = _read_toml(path)
        if path.name == "job.toml":
            translate_moved_keys(tree)
        look_beside(origin := _recipe_origin(path))
        _give_way(tree, overrides or {})
        for dotted, value in (overrides or {}).items():
            set_dotted(tree, dotted, deepcopy(value))  # a later override may write into it
        _refuse_odd_text(tree, str(path))
        job = cls.parse(tree, source=str(path))
        job._origin = str(origin.resolve())
        return job

    @classmethod
    def parse(cls, tree: dict[str, Any], source: str = "recipe") -> Job:
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(_explain_validation(error, source)) from error

    def to_dict(self) -> dict[str, Any]:
        """Every final value, as plain data."""
        return self.model_dump(mode="json")

    def on_one_device(self) -> Job:
        """The same for a command that looks into the parts: whole in this process."""
        place = self.place.model_copy(update={"kind": "shared", "cluster": "local", "engines": 1, "ranks": 1})
        engine = self.engine.model_copy(update={"kind": "builtin", "url": None})
        return self.model_copy(
            update={"place": place, "engine": engine, "sync": self.sync.model_copy(update={"kind": "auto"})}
        )

    def digest(self) -> str:
        """What must be equal for a folder to be continued: everything but where the run lives and
        how long it goes on.
        """
        tree = self.to_dict()
        tree.pop("run")
        tree["loop"].pop("steps")
        return blake2b(repr(tree).encode(), digest_size=8).hexdigest()


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """["--loop.steps=5", "--model.path=x"] -> {"loop.steps": 5, "model.path": "x"};
    values are TOML, bare words are strings.
    """
    out: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals or not key:
            raise ConfigError(f"'{word}' is not an override; write --section.key=value")
        try:
            out[key] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            out[key] = text
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--{key} cannot be read: {_odd_toml(error)}") from error
    return out


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        near = suggest_name(path.name, [p.name for p in path.parent.glob("*.toml")]) if path.parent.is_dir() else ""
        raise ConfigError(f"no recipe at {path}.{near}") from error
    except OSError as error:
        raise ConfigError(
            disk_refusal(error, f"reading the recipe {str(path)[:200]}") or f"reading the recipe {path}: {error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {_odd_toml(error)}") from error


def _odd_toml(error: Exception) -> str:
    """What the parser says; of what it does not expect, in words."""
    if isinstance(error, tomllib.TOMLDecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return "tables or lists are nested too deep"
    return "it has a number of more than 4300 digits" if "digits" in str(error) else str(error)


def _refuse_odd_text(node: Any, source: str, dotted: str = "") -> None:
    """Half a character (of an argument that is not UTF-8) and the zero character fit
    into no file name and no model's tokens.
    """
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_odd_text(inner, source, f"{dotted}.{name}".lstrip("."))
    elif isinstance(node, str) and (odd := next((c for c in node if c == "\0" or "\ud800" <= c <= "\udfff"), None)):
        raise ConfigError(
            f"{source}: {dotted} = {node[:80]!r} has the character {odd!r}, which is no text: remove it, or write it as "
            f"UTF-8"
        )


INSTEAD = {  # a key of the command line -> what it stands in place of in the recipe
    "loop.steps": ("loop.passes",),
    "loop.passes": ("loop.steps",),
    "loop.window": ("loop.oversample",),
    "loop.oversample": ("loop.window",),
}


def _give_way(tree: dict[str, Any], overrides: dict[str, Any]) -> None:
    """What is said on the command line counts, also where the recipe says it in another way."""
    for dotted in overrides:
        for other in INSTEAD.get(dotted, ()):
            *parents, leaf = other.split(".")
            node: Any = tree
            for name in parents:
                node = node.get(name) if isinstance(node, dict) else None
            if other not in overrides and isinstance(node, dict):
                node.pop(leaf, None)


def translate_moved_keys(tree: dict[str, Any]) -> None:
    """A job.toml of an earlier version, which names every key, says the same in today's keys."""
    task, run = tree.get("task", {}), tree.get("run", {})
    kind, settings = split_kind(task.get("env", "single_turn"), "single_turn")
    known = ENV_TABLES[kind].model_fields if kind in ENV_TABLES else {}
    for old, (new, default) in ENV_SETTINGS.items():
        if old in task and (value := task.pop(old)) != default and new in known:
            settings[new] = value
    if settings:
        task["env"] = {"kind": kind, **settings}
    calls = {"reward_timeout": "timeout", "reward_workers": "workers"}
    kind, settings = split_kind(task.get("reward", "number"), "number")
    for old in (*calls, "max_failures", "patience"):
        new = calls.get(old, old)
        if old in task and (value := task.pop(old)) != RewardCallConfig.model_fields[new].default:
            settings[new] = value
    if settings:
        task["reward"] = {"kind": kind, **settings}
    for old, default in (("temperature", 0.0), ("max_tokens", None)):
        if (value := task.get("eval", {}).pop(old, default)) != default:
            task["eval"]["sampling"] = {old: value, **task["eval"].get("sampling", {})}
    vision = {old: tree["model"].pop(old) for old in ("tower", "image_tokens") if old in tree.get("model", {})}
    if vision:
        tree["model"]["vision"] = vision
    trainer = tree.get("trainer", {})
    optimizer = {old: trainer.pop(old) for old in ("warmup_steps", "weight_decay", "betas") if old in trainer}
    if optimizer:
        trainer["optimizer"] = optimizer
    sinks = {"metrics_port": ("prometheus", "port", 0), "traces": ("opentelemetry", "url", "")}
    for old, (name, setting, default) in sinks.items():
        if (value := run.pop(old, default)) != default:
            run["sinks"] = [*run.get("sinks", []), {"kind": name, setting: value}]
    for section, old in ((tree.get("trainer", {}), "kind"), (tree.get("model", {}).get("adapter", {}), "dropout")):
        section.pop(old, None)


def set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """tree["loop"]["steps"] = value, for "loop.steps"."""
    *parents, leaf = dotted.split(".")
    for depth, name in enumerate(parents, 1):
        if isinstance(tree.get(name), str) and ".".join(parents[:depth]) in ("task.env", "task.reward"):
            tree[name] = {"kind": tree[name]}
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{dotted}: '{name}' is a value, not a section")
    tree[leaf] = value


ORIGIN = "recipe.path"  # in a run's folder: where the recipe lies that began it


def _recipe_origin(path: Path) -> Path:
    """The recipe itself; for the copy of it in a run's folder the one that it was copied from."""
    note = path.parent / ORIGIN
    return (
        Path(note.read_text(encoding="utf-8", errors="replace")) if path.name == "job.toml" and note.is_file() else path
    )


def _explain_validation(error: ValidationError, source: str) -> str:
    return f"{source}: " + "; ".join(_explain_faults(error, Job))


def _explain_faults(error: ValidationError, root: type[BaseModel], prefix: str = "") -> list[str]:
    """One row for each wrong key. `prefix`: where the table of `root` stands in the recipe."""
    rows: list[str] = []
    found: dict[str, int] = {}  # of a key with several kinds of values: the row that says what is wrong with the first
    for fault in error.errors():
        where = [str(part) for part in fault["loc"] if not _is_kind(part)]
        dotted, value = prefix + ".".join(where), fault.get("input")
        said = f"{fault['msg'][0].lower()}{fault['msg'][1:]}"
        if fault["type"] == "extra_forbidden" and dotted in MOVED_KEYS:
            rows.append(f"'{dotted}' is no key any more; in its place stands {MOVED_KEYS[dotted]}")
        elif fault["type"] == "extra_forbidden":
            synonym = f" Did you mean '{SYNONYMS[where[-1]]}'?" if where[-1] in SYNONYMS else ""
            near = synonym or suggest_name(where[-1], _known_keys(fault["loc"][:-1], root))
            rows.append(f"unknown key '{dotted}'.{near}")
        elif fault["type"] == "missing":
            rows.append(f"'{dotted}' is missing; add it to the recipe or pass --{dotted}=...")
        elif isinstance(value, str) and fault["type"] in ("float_type", "int_type"):
            rows.append(f"{dotted} = '{value}' is a string; write the number without quotes")
        elif fault["type"] == "value_error" and isinstance(fault["ctx"]["error"], SettingsFault):
            rows.append(str(fault["ctx"]["error"]))
        elif fault["type"] == "value_error":
            rows.append(f"{dotted.rstrip('.')}: {fault['ctx']['error']}".removeprefix(": "))
        elif dotted in found:
            rows[found[dotted]] += f"; or {said}"
            continue
        else:
            rows.append(f"{dotted} = {_truncate_repr(value)}: {said}")
        found.setdefault(dotted, len(rows) - 1)
    return list(dict.fromkeys(rows))


def _is_kind(part: int | str) -> bool:
    """A word of pydantic's for one of several kinds of values of a key, which is no part of its name."""
    return part in ("int", "float", "str", "bool", "constrained-int") or (isinstance(part, str) and "[" in part)


def _truncate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _known_keys(where: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """The keys of a section, or of an entry of a table or a list of such: policies.critic, algo.beside.0."""
    section: Any = root
    for name in where:
        found = _nested_sections(section)
        if found and name in found[0].model_fields and section is found[0]:
            section = found[0].model_fields[str(name)].annotation
        elif found:  # the name of an entry, or its number
            section = found[0]
    return list(found[0].model_fields) if (found := _nested_sections(section)) else []


def _nested_sections(annotation: Any) -> list[type[BaseModel]]:
    """What an annotation holds that has keys: dict[str, Policy] -> [Policy]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _nested_sections(inner)]
