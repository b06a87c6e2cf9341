"""All contracts on one screen. A stage knows its neighbours only through these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

from rondel.core.types import (
    Completion,
    EngineStatus,
    Group,
    Manifest,
    Message,
    Request,
    Route,
    Score,
    StepStats,
    Task,
    TensorInfo,
    TokenScores,
    Trajectory,
    Verdict,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from rondel.core.sandbox_types import BoxUsage, CommandResult, Limits
    from rondel.core.tensor_parts import Block, TensorPart

Interrupt = Literal["hold", "drain", "abort"]
Earned = float | list[tuple[int, float]]
Tags = tuple[str, ...]  # "weights", "kv_cache", "cuda_graph"
# each whole and under its HF name, one at a time: a gathered tensor can go when its turn is over
Tensors = Iterable[tuple[str, "Tensor"]]
Progress = dict[int, tuple[int, Sequence[int]]]  # key of a request -> (tokens before these, tokens)
Weights = Iterable[tuple[TensorInfo, "Tensor"]]  # the same with shape, dtype and digest
Messages = list[dict[str, object]]  # of a conversation, as chat templates read them
Schemas = Sequence[dict[str, object]]  # of tools, as OpenAI's `tools` has them

BatchT = TypeVar("BatchT")  # what a trainer takes a step on
AlgoT_contra = TypeVar("AlgoT_contra", contravariant=True)  # the loss of that step
AnswerT = TypeVar("AnswerT")  # of a worker, as who asks knows it
AddressT = TypeVar("AddressT")  # where a writer's bytes lie


class RolloutEngine(Protocol):
    """Generates and scores tokens at a weight version."""

    async def status(self) -> EngineStatus: ...
    async def generate(self, request: Request) -> Completion: ...
    async def score(self, request: Request) -> TokenScores: ...
    async def pause(self, how: Interrupt = "hold", lease: float = inf) -> None: ...  # at most so long
    async def resume(self) -> None: ...
    async def sleep(self, tags: Tags) -> None: ...
    async def wake(self, tags: Tags) -> None: ...
    async def receive(self, message: Message) -> int: ...  # -> the version served from now on


class RestartableEngine(RolloutEngine, Protocol):
    """An engine elsewhere that is started again when it has ended."""

    async def restart_if_dead(self) -> bool: ...  # -> had it ended?
    async def caught_up(self, engine: RolloutEngine) -> int: ...  # -> the version that it was brought


class ProgressEngine(Protocol):
    """An engine with the capability "progress": of its requests, by key, what they have written behind the tokens that
    the caller knows; everything, from 0 on, where one has fewer than that."""

    async def progress(self, known: Mapping[int, int]) -> Progress: ...


class Trainer(Protocol[BatchT, AlgoT_contra]):
    """Owns the weights being trained. The driver sends whole groups packed once; ranks
    and micro-batches are its own affair.
    """

    @property
    def moved(self) -> bool: ...  # whether the last step changed bits of the weights that engines read

    async def logprobs(self, tokens: list[int]) -> list[float]: ...  # of a probe prompt, under the current weights
    async def annotate(self, batch: BatchT, needs: frozenset[str]) -> BatchT: ...
    async def step(self, batch: BatchT, algo: AlgoT_contra) -> StepStats: ...
    async def publish(self, route: Route) -> tuple[Manifest, Route]: ...  # -> what there is, and where
    async def send(self, route: Route) -> None: ...  # while the engines receive it: only where both must meet
    async def save(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...
    async def sleep(self, tags: Tags) -> None: ...
    async def wake(self, tags: Tags) -> None: ...


class AskedCall(Protocol):
    """A call of a tool, as a reply asks for it."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, object]: ...
    @property
    def fault(self) -> str: ...  # why it cannot be carried out, for the policy to read


class Chat(Protocol):
    """A conversation with the policy whose token buffer is the only truth."""

    trajectory: Trajectory

    # render once, append, mask 0
    def give(self, messages: Messages, tools: Schemas = ()) -> None: ...
    async def reply(self) -> Completion: ...  # the policy writes, mask 1
    async def calls(self, done: Completion) -> Sequence[AskedCall]: ...  # the tools that a reply asks for
    # another agent's conversation in the same episode, written by the policy that plays it
    def beside(self, agent: str = "") -> Chat: ...


class SandboxCell(Protocol):
    """One box in which code of the policy runs, with blocking verbs. Nothing that a command started outlives it."""

    @property
    def alive(self) -> bool: ...
    @property
    def clean(self) -> bool: ...  # it is as it was when it was new

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult: ...
    def call(
        self, code: str, *, stdin: bytes = b"", wall: float | None = None, prelude: str = ""
    ) -> CommandResult: ...  # Python text
    def begin(
        self, code: str, stdin: int, stdout: int, stderr: int, *, prelude: str = ""
    ) -> None: ...  # on open files, to be waited for by
    def finish(self, wall: float) -> CommandResult: ...
    def usage(self) -> BoxUsage: ...
    def kill(self) -> None: ...


class SandboxFactory(Protocol):
    """What makes them: lent to rewards and tools that have a `sandbox` among their settings."""

    def cell(self, limits: Limits, **settings: object) -> SandboxCell: ...


class Env(Protocol):
    """-> what was written in one episode: one trajectory, or several whose first is scored and
    the others with it (generate/envs/episode.py).
    """

    async def run(self, task: Task, chat: Chat) -> Trajectory | list[Trajectory]: ...


@runtime_checkable
class PromptedEnv(Protocol):
    """An environment whose opening is known: too long a prompt is found before the run."""

    def prompt(self, task: Task) -> tuple[Messages, Schemas]: ...


@runtime_checkable
class MultiTurnEnv(Protocol):
    """An environment that says how many replies an episode has at most: the cache is planned for them. Else one."""

    @property
    def turns(self) -> int: ...


@runtime_checkable
class NamedAgentsEnv(Protocol):
    """An environment that names its agents: a policy for another one is refused before the run."""

    @property
    def agents(self) -> Sequence[str]: ...


@runtime_checkable
class GoldEnv(Protocol):
    """An environment that knows replies which deserve the best score: `rondel check-env` plays them."""

    def gold(self, task: Task) -> Iterable[str]: ...


@runtime_checkable
class DemonstratingEnv(Protocol):
    """An environment that writes its demonstrations itself, by the noise of `key`: of points, which have no text."""

    def demonstrate(self, task: Task, chat: Chat, key: int) -> Trajectory: ...


@runtime_checkable
class SelfScoringEnv(Protocol):
    """An environment that always sets the score of its episodes: `rondel check` plays it instead of asking a reward."""

    scores_itself: bool


@runtime_checkable
class EnvByTask(Protocol):
    """Several environments in one run, by the name that a task has in `env`."""

    envs: dict[str, Env]


class Reward(Protocol):
    """-> a number, [(position, value)] for what was earned on the way, or named parts of
    either; raising is a failure, never a 0.
    """

    def __call__(self, trajectory: Trajectory, task: Task) -> Earned | dict[str, Earned] | Score: ...


class Filter(Protocol):
    def __call__(self, group: Group) -> Verdict: ...


class Transport(Protocol):
    """Moves bytes and owes nothing else; the transaction around it is sync/update.py. Driver,
    trainer and engine have an instance each.

    holds   when the engines stand still. "never": who calls has parked them. "begin": while
            data moves over the weights that serve. "commit": all data is written when `publish`
            returns and is read beside those weights
    names   under which tensors travel. "checkpoint": those of the family's checkpoints, which
            other programs read. "module": those of the module, which both ends compute with
    """

    @property
    def holds(self) -> Literal["never", "begin", "commit"]: ...
    @property
    def names(self) -> Literal["module", "checkpoint"]: ...

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route: ...  # the driver's end
    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]: ...  # the trainer's
    def send(self, route: Route, weights: Tensors) -> None: ...
    # the engine's
    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]: ...
    def close(self) -> None: ...


@runtime_checkable
class PartTransport(Protocol[AddressT]):
    """A transport to which each rank of a trainer gives what it holds, so that nobody gathers.

    one_machine   all ranks and engines must be on the same one
    """

    one_machine: bool

    # of every rank's parts, by name -> the blocks that each of them is to write
    def assign_parts(
        self, held: Sequence[Mapping[str, TensorPart]], itemsize: Mapping[str, int]
    ) -> list[dict[str, list[Block]]]: ...
    def write_parts(self, pieces: Iterable[Tensor]) -> AddressT: ...  # one rank's blocks, in order -> where they lie
    def route_parts(self, addresses: Sequence[AddressT], assigned: Sequence[Mapping[str, list[Block]]]) -> Route: ...


@runtime_checkable
class PartSource(Protocol):
    """A transport that gives a rank of an engine its part of every tensor, where a publication has parts."""

    def has_parts(self, route: Route) -> bool: ...
    def receive_parts(
        self, route: Route, manifest: Manifest, wanted: Mapping[str, TensorPart]
    ) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class SeveralWays(Protocol):
    """A transport that is one of several: a route names which."""

    def way_of(self, route: Route) -> Transport: ...


class RemoteVerb(Protocol):
    """A method of an object elsewhere, which is waited for."""

    def __call__(self, *args: object) -> Awaitable[AnswerT]: ...


class RemoteProxy(Protocol):
    """A worker, and a proxy with the same awaitable verbs as its object, wherever that lives."""

    @property
    def alive(self) -> bool: ...
    @property
    def fate(self) -> str: ...  # how it ended
    @property
    def host(self) -> str: ...  # where others reach it
    def dismiss(self) -> None: ...
    def ask(self, verb: str, *args: object) -> Future[AnswerT]: ...  # for a thread
    def __getattr__(self, verb: str) -> RemoteVerb: ...


class MemoryClaim(Protocol):
    """Who may fill the memory of a device that several want."""

    def take(self, who: str) -> None: ...  # raises while another has it
    def leave(self, who: str) -> None: ...


class Cluster(Protocol):
    """What starts workers: `spawn("engine-0", make, job)` is a worker that builds `make(job)` and
    serves its methods.
    """

    def spawn(
        self, name: str, make: Callable[..., object], *args: object, cores: Sequence[int] = (), tells: bool = True
    ) -> RemoteProxy: ...
    def pids(self) -> dict[str, int]: ...  # of those on this machine, by name
    def dump(self) -> None: ...  # the stacks of all, into their logs
    def close(self) -> None: ...


class Sink(Protocol):
    """Where metrics go: TensorBoard, a file, a service."""

    def write(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...
