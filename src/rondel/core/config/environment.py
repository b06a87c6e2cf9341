"""task.env: the settings of each environment, by its kind."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from rondel.core.config.section import CLOSED, LONGEST


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
        description="what the policy may call: calculator, python (in a sandbox), corpus:FOLDER (search, open, find), "
        'functions and classes of yours as "module:name", "mcp:command", "mcp:http://...", "mcp+shared:..."',
    )
    turns: int = Field(8, ge=1, description="most replies of the policy in one episode")
    timeout: float = Field(30.0, gt=0, le=LONGEST, description="seconds for one call of a tool")
    sandbox: str | dict[str, Any] = Field(
        "process",
        description='where the tool python runs: a kind of substrate, or { kind = "container", image = ..., ... }',
    )
    suffix: str = Field("", description="appended to the last message of every prompt")


class SearchConfig(BaseModel):
    """The policy looks answers up in a corpus that `rondel tasks search` wrote."""

    model_config = CLOSED
    corpus: str = Field(min_length=1, description="its folder")
    turns: int = Field(6, ge=1, description="most replies of the policy in one episode")
    results: int = Field(5, ge=1, le=20, description="passages that one search returns")
    snippet: int = Field(30, ge=1, description="words of each that a search shows; open shows the whole passage")
    output_tokens: int = Field(512, ge=16, description="most tokens that one call returns; what is longer is cut")
    calls: Literal["template", "lines"] = Field(
        "template",
        description='how the policy calls: "template", as its chat template writes calls of tools, or "lines", for a '
        'model that knows none: a line "search: words", "open: 17" or "find: 17 words"',
    )
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


class RepositoryConfig(BaseModel):
    """The policy works on the files of a repository, from task.data.kind = "repository"."""

    model_config = CLOSED
    turns: int = Field(30, ge=1, description="most replies of the policy in one episode")
    seconds: float = Field(60.0, gt=0, le=LONGEST, description="wall clock of one command of the policy")
    output: int = Field(6000, ge=200, description="characters that the policy reads of one call")
    sandbox: str | dict[str, Any] = Field(
        "process",
        description='where its commands run: a kind of substrate, or { kind = "container", image = ..., ... }',
    )
    suffix: str = Field("", description="appended to the last message of every prompt")
    agent: str | list[str] = Field(
        "", description="a command that works in the box and asks the policy over HTTP, instead of the tools"
    )
    agent_seconds: float = Field(600.0, gt=0, le=LONGEST, description="wall clock of that command")
    agent_files: str = Field("", description="a folder that is copied into the box; {files} in the command is where")
    shown: list[str] = Field(
        [], description="folders of this machine that the box may read, outside of /tmp: the programs of the agent"
    )


class ShopConfig(BaseModel):
    """The policy serves the customers of a shop that `rondel tasks shop` wrote."""

    model_config = CLOSED
    path: str = Field(min_length=1, description="its folder")
    turns: int = Field(20, ge=1, description="most replies of the policy in one episode, calls included")
    short: bool = Field(
        False,
        description='for models that read letters and no language: "u0417 cancel 51234 mistake" instead of sentences, '
        "calls as lines, no rules and no tools in the prompt",
    )
    user: str = Field(
        "scripted",
        description='who the customer is: "scripted"; "policy", the agent "user", by the weights of [policies.user] '
        "(frozen or trained) or else by those that are trained; or a model at an OpenAI-shaped address, "
        '"http://127.0.0.1:8000/v1"',
    )
    user_model: str = Field("", description="the server's name of that model")
    user_score: Literal["goal", "hard", "shared"] | None = Field(
        None,
        description='what a policy earns as the user: "goal" (if unset), for saying what it is asked for and nothing '
        'else; "hard", the same where the agent failed; "shared", what the agent earned',
    )
    timeout: float = Field(30.0, gt=0, le=LONGEST, description="seconds for one call of a tool")
    suffix: str = Field("", description="appended to the first message of every user")

    @model_validator(mode="after")
    def _check_user(self) -> ShopConfig:
        _check_partner("user", self.user, self.user_model, ("scripted", "policy"))
        if self.user_score is not None and self.user != "policy":
            raise ValueError(f'user_score is what a policy earns as the user, and user = "{self.user}"; leave it out')
        return self


class DebateConfig(BaseModel):
    """Two debaters and a judge; tasks have an answer, and in `wrong` another one."""

    model_config = CLOSED
    rounds: int = Field(1, ge=1, description="turns of each debater")
    judge: str = Field("policy", description='"policy", the agent "judge"; or a model at an OpenAI-shaped address')
    judge_model: str = Field("", description="the server's name of that model")
    score: Literal["zero_sum", "judged"] = Field(
        "zero_sum", description='what debaters earn: +1 and -1 by the verdict, or with "judged" the points of each'
    )
    timeout: float = Field(30.0, gt=0, le=LONGEST, description="seconds that a judge at an address may take")
    suffix: str = Field("", description="appended to what debaters and judge read first")

    @model_validator(mode="after")
    def _check_judge(self) -> DebateConfig:
        _check_partner("judge", self.judge, self.judge_model, ("policy",))
        return self


class ProposerSolverConfig(BaseModel):
    """A policy that writes problems, and one that solves them."""

    model_config = CLOSED
    checker: str = Field(
        "arithmetic",
        description='what makes question and answer of a proposal: "arithmetic", or your "module:name", a function of '
        "its text that raises ValueError where it is no problem",
    )
    attempts: int = Field(4, ge=1, description="answers of the solver to one problem")
    solver_score: Literal["relative", "plain"] = Field(
        "relative", description='right or wrong less the mean of the other attempts; or with "plain" right or wrong'
    )
    suffix: str = Field("", description="appended to every problem")


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


class FlowConfig(BaseModel):
    """The policy is a flow: it draws one point for each prompt."""

    model_config = CLOSED
    points: int = Field(32, ge=1, description="data points of one demonstration, each at a noise level of its own")
    every: int = Field(1, ge=1, description="one denoising step of so many is trained, counted back from the last one")
    shared_noise: bool = Field(False, description="in training all chains of a group begin with the same noise")


class ImaginationConfig(BaseModel):
    """Episodes in a learned model of the world, beside those that are played."""

    model_config = CLOSED
    policy: str = Field("world", description="the policy of the run that is the model: [policies.NAME]")
    branches: int = Field(16, ge=1, description="imagined episodes beside each one that is played")
    horizon: int = Field(8, ge=1, description="most steps of an imagined one")
    memory: int = Field(
        4000,
        ge=0,
        description="transitions of earlier steps from which the model learns again; 0: those of each step alone",
    )
    trust: float = Field(
        0.5,
        gt=0,
        description="nothing is imagined beside an episode on which the model's error after `horizon` steps is above "
        "this; 1 is as good as to know the mean change",
    )


class ControlConfig(BaseModel):
    """The policy acts in a world of arrays, from task.data.kind = "gym": observations in, actions out."""

    model_config = CLOSED
    turns: int = Field(
        1000, ge=1, description="most actions of one episode; the world may end it sooner, or cut it off (TimeLimit)"
    )
    model: ImaginationConfig | None = Field(
        None, description="short episodes in a learned model of the world are trained, too; unset, there are none"
    )
    threads: bool = Field(
        False,
        description="each verb of the world runs on a thread: for worlds that take milliseconds and let other threads "
        'run meanwhile; with actions = "tokens" they always do',
    )
    processes: int = Field(
        0,
        ge=0,
        description="the worlds are shared out among so many processes beside the run: for worlds that take "
        "milliseconds of Python; 0: they step in the run's own",
    )
    actions: Literal["arrays", "tokens"] = Field(
        "arrays",
        description='"tokens": a model of text, or of text and pictures, writes the number of an action, or of the bin '
        "of each number of one; each action is a turn",
    )
    bins: int = Field(8, ge=2, description='with actions = "tokens": bins of each number of an action')
    frames: bool = Field(
        False, description="pictures that the world renders are shown, to a vision-language model or a flow_vla"
    )
    pixels: int = Field(56, ge=1, description="of a side of such a picture, at most; each is the mean of several")
    suffix: str = Field("", description='with actions = "tokens": appended to every observation')
    instruction: str = Field("", description="what a flow_vla is told in words, beside every picture")
    expert: str = Field(
        "",
        description='a controller whose episodes loop.warmup shows to what writes tokens or draws chunks: "cartpole", '
        'or "module:name", a function from an observation to an action',
    )

    @model_validator(mode="after")
    def _check_tokens(self) -> ControlConfig:
        told = self.model_fields_set
        if self.actions == "arrays" and (odd := told & {"bins", "suffix"}):
            raise ValueError(f'{sorted(odd)[0]} is of actions = "tokens"; set that, or leave it out')
        if self.actions == "tokens" and (odd := told & {"threads", "processes", "instruction"}):
            raise ValueError(
                f'{sorted(odd)[0]} is of actions = "arrays"; worlds of tokens run on threads and write what they show, '
                "with `suffix`; leave it out"
            )
        if self.threads and self.processes:
            raise ValueError("processes beside threads: a world steps in one or the other; leave one of them out")
        if self.actions == "tokens" and self.model is not None:
            raise ValueError('model imagines arrays, and actions = "tokens"; leave one of them out')
        if "pixels" in told and not self.frames:
            raise ValueError("pixels is of frames = true; set that, or leave it out")
        return self


def _check_partner(name: str, kind: str, model: str, known: tuple[str, ...]) -> None:
    """`kind` is one of the known, or an address with the name of a model."""
    remote = kind.startswith(("http://", "https://"))
    if not remote and kind not in known:
        names = " or ".join(f'"{one}"' for one in known)
        raise ValueError(f'{name} = "{kind}"; it is {names}, or an address like http://127.0.0.1:8000/v1')
    if remote != bool(model):
        raise ValueError(f"{name}_model names the model of a {name} at an address; give both, or neither")


class EpisodeBudgetConfig(BaseModel):
    """What one episode may use, in all its conversations together."""

    model_config = CLOSED
    tokens: int | None = Field(None, ge=1, description="tokens that the policy writes; unset is no limit")
    turns: int | None = Field(None, ge=1, description="replies of the policy; unset is no limit")
    seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST,
        description="seconds from its first reply on, looked at before each reply; unset is no limit. Such a run "
        "cannot be repeated bit for bit",
    )
    cost: float | None = Field(
        None, gt=0, description="what its remote models may cost, as the environment says with chat.spend(cost)"
    )
    over: Literal["score", "drop"] = Field(
        "score",
        description='what becomes of an episode that used up its budget: "score" as any other, "drop" without a score, '
        "in no baseline",
    )


class EpisodeConfig(BaseModel):
    """What holds in every environment; all other settings of task.env are the environment's own."""

    model_config = CLOSED
    budget: EpisodeBudgetConfig = Field(
        EpisodeBudgetConfig(),
        description="what one episode may use: { tokens = 8192, turns = 20, seconds = 300.0, cost = 0.05 }",
    )
    shots: int = Field(
        0,
        ge=0,
        description="so many training tasks stand before every prompt, played by the environment with its own gold "
        "replies (of one turn: with the answer); they are not trained on",
    )
    drift: Literal["keep", "branch", "refuse"] = Field(
        "keep",
        description="where the chat template would write the conversation so far in other tokens than those that stand "
        'there (Qwen3 drops earlier thoughts): "keep" goes on from what was written, "branch" begins another '
        'trajectory of the episode with what it writes, "refuse" ends the episode as a fault of the environment; every '
        "kind is counted",
    )


ENV_TABLES: dict[str, type[BaseModel]] = {
    "single_turn": SingleTurnConfig,
    "tools": ToolsConfig,
    "search": SearchConfig,
    "gym": GymConfig,
    "gateway": GatewayConfig,
    "agents": AgentsConfig,
    "verifiers": VerifiersConfig,
    "repository": RepositoryConfig,
    "flow": FlowConfig,
    "control": ControlConfig,
    "shop": ShopConfig,
    "debate": DebateConfig,
    "proposer_solver": ProposerSolverConfig,
}
