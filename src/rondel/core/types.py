"""What crosses a stage: plain data, importable without torch.

T tokens of one trajectory · G trajectories of one group · P groups of one step
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from math import fsum, inf
from operator import index
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rondel.core.drawn_steps import DrawnSteps
    from rondel.core.media import ImagePlaceholder

FinishReason = Literal["stop", "length", "abort"]


# -- tasks and what became of them ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: `Task("chain_sum/17", "single_turn", {"prompt": "3 + 4 =", "answer": "7"})`.

    id    stable across runs: the ledger, the hold-out split and resume name a task by it
    env   the environment that runs it
    data  whatever environment and reward need; JSON-shaped
    """

    id: str
    env: str
    data: dict[str, Any]

    @property
    def stream(self) -> str:
        """By which a mixture finds its row: the source that brought it, or its environment."""
        return str(self.data.get("source", self.env))


@dataclass(frozen=True, slots=True)
class Ok:
    """The episode ran to its end."""


@dataclass(frozen=True, slots=True)
class EnvFault:
    """The world broke: retried on a fresh environment, never scored, never in a baseline."""

    reason: str


@dataclass(frozen=True, slots=True)
class PolicyFault:
    """The policy broke a rule of the environment: scored like any other episode."""

    reason: str


@dataclass(frozen=True, slots=True)
class OutOfBudget:
    """The episode used up what it had of `reason`: "tokens", "turns", "seconds" or "cost". Scored like any other
    episode, or dropped (task.env.budget.over).
    """

    reason: str


Outcome = Ok | EnvFault | PolicyFault | OutOfBudget
DROPPED = "out of budget"  # the `reason` of Failed of an episode that task.env.budget.over = "drop" leaves out


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and the named parts it was made of: `Score(1.2, {"correct": 1.0, "format": 0.2})`.

    steps    what of it was earned on the way, as (position in the trajectory's tokens, value):
             `Score(1.3, steps=((14, 0.1), (52, 0.2)))`; the rest, here 1.0, is due at the end
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple((index(position), float(value)) for position, value in self.steps))

    def token_rewards(self, mask: Sequence[bool]) -> list[float]:
        """[m] What each of the m tokens that the policy wrote has earned; together the value. A
        step at a token it did not write counts for the last one that it wrote before."""
        if not self.steps:  # of a million tokens it takes no time
            return [*[0.0] * (mask.count(True) - 1), 0.0 + self.value] if True in mask else []
        written = [at for at, mine in enumerate(mask) if mine]
        earned = [0.0] * len(written)
        for position, value in self.steps:
            if not 0 <= position < len(mask):
                raise ValueError(
                    f"a reward of {value:g} at position {position} of {len(mask)} tokens, whose first is 0"
                )
            if not written or position < written[0]:
                before = f"before {written[0]}" if written else "at all"
                raise ValueError(f"a reward of {value:g} at position {position}, but the policy wrote nothing {before}")
            earned[bisect_right(written, position) - 1] += value
        if written:
            earned[-1] += self.value - fsum(value for _, value in self.steps)
        return earned


@dataclass(frozen=True, slots=True)
class Failed:
    """The reward could not be computed. Never a number, never in a baseline (law 11)."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A filter's answer: `Verdict(False, "unanimous")`. `failed` books the group under
    failures instead of under filters.
    """

    keep: bool
    reason: str = ""
    failed: bool = False
    detail: str = ""  # what failed, in the reward's or the environment's own words


KEEP = Verdict(True)


# -- columns ------------------------------------------------------------------------------------


IDS, FLAGS, NUMBERS = "i", "b", "d"  # int32, one byte, float64


class TokenColumn(array):
    """A list of numbers in 1, 4 or 8 bytes each, where a list of Python's takes 36: `column += [3, 4]`, `column[2:]`,
    `column == [1, 2]`, `[0] + column`. numpy reads it without a copy, and a pickle of it is one run of bytes.

    The first argument is the kind: IDS, FLAGS or NUMBERS. A number that it cannot hold is a TypeError or OverflowError.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, kind: str, values: Iterable[Any]) -> TokenColumn:
        """The same column, or a new one of these values."""
        if type(values) is cls and values.typecode == kind:
            return values
        return cls(kind, list(values) if isinstance(values, array) else values)

    @classmethod
    def from_text(cls, kind: str, text: str | list[Any]) -> TokenColumn:
        """The inverse of `to_text`; a list of numbers is taken, too."""
        if isinstance(text, list) and not (text and isinstance(text[0], str)):
            return cls(kind, text)
        return _from_bytes(kind, text_to_bytes(text))

    def to_text(self) -> str | list[str]:
        """Its bytes, little-endian, in base64; in pieces if there are many."""
        return bytes_to_text(self)

    def copy(self) -> TokenColumn:
        return type(self)(self.typecode, self)

    def extend(self, values: Iterable[Any]) -> None:
        if isinstance(values, array) and values.typecode != self.typecode:
            values = list(values)
        super().extend(values)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return type(self)(self.typecode, found) if isinstance(at, slice) else found

    def __iadd__(self, values: Iterable[Any]) -> TokenColumn:  # type: ignore[override]
        self.extend(values)
        return self

    def __add__(self, values: Iterable[Any]) -> TokenColumn:  # type: ignore[override]
        both = self.copy()
        both.extend(values)
        return both

    def __radd__(self, values: Iterable[Any]) -> TokenColumn:
        both = type(self)(self.typecode, values)
        both.extend(self)
        return both

    def __mul__(self, times: int) -> TokenColumn:
        return type(self)(self.typecode, super().__mul__(times))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other))
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __copy__(self) -> TokenColumn:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> TokenColumn:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raw = PickleBuffer(self) if protocol >= 5 else self.tobytes()
        return _from_bytes, (self.typecode, raw)

    def __repr__(self) -> str:
        return repr(self.tolist())


PIECE = 3 << 18  # bytes that are encoded at once, a whole number of letters: two milliseconds of the interpreter


def bytes_to_text(data: Any) -> str | list[str]:
    """Whatever has a buffer, as JSON can hold it: base64, in pieces if it is long; `text_to_bytes` gives it back."""
    view = memoryview(data)
    raw = view.cast("B") if view.nbytes else memoryview(b"")
    pieces = [b64encode(raw[at : at + PIECE]).decode() for at in range(0, len(raw) or 1, PIECE)]
    return pieces if len(pieces) > 1 else pieces[0]


def text_to_bytes(text: str | list[str]) -> bytes:
    return b64decode(text) if isinstance(text, str) else b"".join(map(b64decode, text))


def _from_bytes(kind: str, raw: Any) -> TokenColumn:
    column = TokenColumn(kind)
    column.frombytes(memoryview(raw).cast("B"))
    return column


# -- trajectories --------------------------------------------------------------------------------


POLICY = "policy"  # the run's own, which plays whoever has no weights of its own
# the `policy` of what stands beside a group's samples: the data set's answer, the most likely one
DATA, GREEDY = "data", "greedy"
# parts of the score of an answer to a prompt that is asked several times: of how many answers so many were right
ATTEMPTS, SOLVED = "visit_attempts", "visit_solved"
BESIDE = "world."  # begins the names of agents that make no attempt at the task (core/transitions.py)


class Turn(NamedTuple):
    """One message of a conversation: `Turn("tool", "42", 17, 25)`, its tokens among the
    trajectory's, and whether the policy wrote it.
    """

    role: str
    text: str
    start: int
    end: int
    written: bool = False


class Drift(NamedTuple):
    """The first token in which a conversation differs from what its chat template would write now:
    `Drift("thought", 57, 1)`, at token 57, in the policy's first turn or behind it. Kinds: generate/drift.py.
    """

    kind: str
    at: int
    turn: int


@dataclass(slots=True)
class Trajectory:
    """One attempt at one task: a stream of T tokens and, for each, who wrote it.

    tokens    [T] int    everything the policy read or wrote, in order
    mask      [T] bool   True where the policy wrote it: the trainable tokens
    logprobs  [T] float  log pi_behavior(token) when it was drawn; 0 elsewhere
    versions  [T] int    the weights of `policy` that wrote it; -1 elsewhere
              these four are columns: lists to whoever reads them, 17 bytes a token (`TokenColumn`)
    experts   [T-1,L,K]  routed experts of a MoE; None for a dense model
    support   [T] ids    what the token was drawn from, where truncation cut the rest; None where
              nothing was cut, and for all if nothing ever was
    behavior_top [T]     (ids [K], log-probabilities [K]) of the likeliest tokens, or of more draws, by the distribution
              that drew it; None where the policy only read, and for all unless a row needs them
    steps                one for each token that the policy wrote, where its tokens do not say it all: the points of a
              flow or the actions in a world (core/continuous_steps.py), whose token is the number of the step, or of an
              action that is counted, and whose log-probability may be a log-density, which may be above 0; the blocks
              that a masked-diffusion model saw (core/unmasking_steps.py)
    teacher_prompts      what a teacher reads instead of its prompt, by the teacher's place; None for the prompt itself
    media                the pictures that it reads, each where its placeholders stand (core/media.py)
    policy               whose weights wrote: "policy", or one of the recipe's policies that plays the
                         agent; DATA and GREEDY stand beside
    agent                who acts, where an episode has several: each is compared with its own kind
    laps                 what took time, turn by turn: ("chat" or a tool's name, seconds since 1970,
                         seconds, tokens read, tokens written)
    parent               its place in the group, of the trajectory whose score it shares: this one is
                         a branch of the same episode
    conversation         the same as messages, for rewards; empty where an environment appended tokens itself
    drift                where it differs from what the template would write of the same messages; None where it does
                         not, and where that cannot be said
    """

    tokens: TokenColumn = field(default_factory=partial(TokenColumn, IDS))
    mask: TokenColumn = field(default_factory=partial(TokenColumn, FLAGS))
    logprobs: TokenColumn = field(default_factory=partial(TokenColumn, NUMBERS))
    versions: TokenColumn = field(default_factory=partial(TokenColumn, IDS))
    experts: Any | None = None
    support: list[Any | None] | None = None
    behavior_top: list[Any | None] | None = None
    steps: DrawnSteps | None = None
    teacher_prompts: list[list[int] | None] = field(default_factory=list)
    media: list[ImagePlaceholder] = field(default_factory=list)
    policy: str = POLICY
    agent: str = ""
    parent: int | None = None
    score: Score | Failed | None = None
    outcome: Outcome = field(default_factory=Ok)
    finish_reason: FinishReason = "stop"
    text: str = ""  # what the policy wrote, decoded once, for rewards and readers; never tokenised again
    timings: dict[str, float] = field(default_factory=dict)
    laps: list[tuple[str, float, float, int, int]] = field(default_factory=list, compare=False, repr=False)
    conversation: list[Turn] = field(default_factory=list, compare=False, repr=False)
    drift: Drift | None = None

    def __post_init__(self) -> None:
        """Lists are taken, too."""
        self.tokens, self.versions = TokenColumn.of(IDS, self.tokens), TokenColumn.of(IDS, self.versions)
        self.mask, self.logprobs = TokenColumn.of(FLAGS, self.mask), TokenColumn.of(NUMBERS, self.logprobs)

    def extend(
        self,
        tokens: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        support: list[Any | None] | None = None,
        behavior_top: list[Any | None] | None = None,
        steps: DrawnSteps | None = None,
        media: Sequence[ImagePlaceholder] = (),
    ) -> None:
        """Append tokens: given ones (no logprobs) or ones the policy wrote (logprobs and versions). The only writer.

        `steps` are those of `Trajectory.steps` of these tokens.
        `media` are pictures in the given ones, their places counted from the first of these.
        """
        n = len(tokens)
        if media:
            if logprobs is not None:
                raise ValueError(f"{len(media)} images in what the policy wrote: it writes tokens; an image is given")
            media[0].check_placeholders(tokens, media)
            self.media += [replace(place, start=len(self.tokens) + place.start) for place in media]
        if (logprobs is None) != (versions is None):
            raise ValueError("a policy's tokens need both logprobs and versions; given tokens need neither")
        if logprobs is not None and versions is not None and not (n == len(logprobs) == len(versions)):
            raise ValueError(f"{n} tokens, {len(logprobs)} logprobs, {len(versions)} versions: lengths must agree")
        for name, entries in (("support", support), ("behavior_top", behavior_top)):
            if entries is not None and (logprobs is None or len(entries) != n):
                raise ValueError(
                    f"a {name} of {len(entries)} entries for {n} {'given' if logprobs is None else 'drawn'} tokens: "
                    f"one a drawn token"
                )
        ids, drawn = TokenColumn.of(IDS, tokens), None if logprobs is None else TokenColumn.of(NUMBERS, logprobs)
        wrote = TokenColumn(IDS, [-1]) * n if versions is None else TokenColumn.of(IDS, versions)
        if (
            drawn
            and (wrong := _first_impossible(drawn, inf if steps is not None and steps.are_densities else MOST))
            is not None
        ):
            raise ValueError(
                f"token {tokens[wrong]} was drawn with a log-probability of {drawn[wrong]}: it must be finite and at "
                f"most 0"
            )
        if drawn is not None:
            self.steps = self._joined_steps(steps, n)
        self.support = self._joined(self.support, support, n)
        self.behavior_top = self._joined(self.behavior_top, behavior_top, n)
        self.tokens += ids
        self.mask += TokenColumn(FLAGS, [drawn is not None]) * n
        self.logprobs += TokenColumn(NUMBERS, [0.0]) * n if drawn is None else drawn
        self.versions += wrote

    def _joined(self, known: list[Any | None] | None, more: list[Any | None] | None, n: int) -> list[Any | None] | None:
        """Entries of all tokens so far and of `n` more; None where no token has any."""
        if known is None and more is None:
            return None
        return ([None] * len(self.tokens) if known is None else known) + ([None] * n if more is None else more)

    def _joined_steps(self, more: DrawnSteps | None, n: int) -> DrawnSteps | None:
        """The points so far and those of `n` more tokens: of all that the policy writes, or of none."""
        if more is not None and len(more) != n:
            raise ValueError(f"{n} tokens with {len(more)} steps: a step is one token")
        if n and (more is None) != (self.steps is None) and self.written:
            raise ValueError(f"{n} tokens {'without' if more is None else 'with'} steps behind others: all have them")
        return more if self.steps is None else self.steps if more is None else self.steps + more  # type: ignore[operator]

    @property
    def reward(self) -> float | None:
        """The scalar reward, or None while unscored or when scoring failed."""
        return self.score.value if isinstance(self.score, Score) else None

    @property
    def is_demonstration(self) -> bool:
        """A demonstration: nobody drew it."""
        return self.policy == DATA

    @property
    def is_truncated(self) -> bool:
        """Whether it ran out of room for its tokens or turns. An episode of actions that a time limit ended is whole,
        and often the best one.
        """
        return self.finish_reason == "length" and not (self.steps is not None and self.steps.observed)

    @property
    def is_attempt(self) -> bool:
        """Whether it was an attempt at the task, and not what a learned model
        of its world did (core/transitions.py)."""
        return not self.agent.startswith(BESIDE)

    @property
    def written(self) -> int:
        """How many tokens the policy wrote."""
        import numpy as np  # a tenth of the time of bytes.count; a reward's worker starts without it

        return int(np.count_nonzero(np.asarray(self.mask).view(bool)))


MOST = 1e-6  # of a log-probability, as rounding leaves it
MAX = 1.7976931348623157e308  # the largest float that is finite


def _first_impossible(logprobs: TokenColumn, most: float) -> int | None:
    """Place of the first that is not finite, or above `most`, if there is one."""
    import numpy as np  # a reward's worker starts without it

    values = np.asarray(logprobs)
    if len(values) and -inf < values.min() and values.max() <= min(most, MAX):  # two passes, NaN in neither
        return None
    impossible = ~((values > -inf) & (values <= most) & (values < inf))
    return int(impossible.argmax()) if impossible.any() else None


@dataclass(slots=True)
class Group:
    """G attempts at one task. `id` is the admission number, `born` the version that served when it was admitted.

    An attempt is one trajectory, or several: what its harness forked, and what each of its
    agents wrote. Branches have a `parent`, and their reward is counted once, with it.
    """

    id: int
    task: Task
    trajectories: list[Trajectory]
    born: int
    # answers of the data set, which loop.warmup copies: their score is no reward that anything earned
    supervised: bool = False

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored samples and demonstrations only; a failure is never a number."""
        tried = [t for t in self.root_trajectories if t.policy != GREEDY and t.is_attempt]
        return [t.reward for t in tried if t.reward is not None]

    @property
    def root_trajectories(self) -> list[Trajectory]:
        """Those with a score of their own."""
        return [t for t in self.trajectories if t.parent is None]

    @property
    def policy_samples(self) -> list[Trajectory]:
        """The samples alone, without what stands beside them."""
        return [t for t in self.root_trajectories if t.policy not in (DATA, GREEDY) and t.is_attempt]

    def count_episodes(self) -> dict[str, int]:
        """{"drift_thought": 3, "out_of_turns": 1}: the first drift of each sample or its branches, and the budgets
        that were used up.
        """
        counts: dict[str, int] = {}
        drifted: set[int] = set()
        for place, t in enumerate(self.trajectories):
            root = place if t.parent is None else t.parent
            if t.drift is not None and root not in drifted:
                drifted.add(root)
                counts[f"drift_{t.drift.kind}"] = counts.get(f"drift_{t.drift.kind}", 0) + 1
        for t in self.policy_samples:
            if isinstance(t.outcome, OutOfBudget):
                counts[f"out_of_{t.outcome.reason}"] = counts.get(f"out_of_{t.outcome.reason}", 0) + 1
        return counts

    def sum_boxes(self) -> dict[str, float]:
        """What the samples used of sandboxes: {"episodes": 8, "seconds": 41.2, "cpu": 3.1, "peak": 31457280}; the peak
        is of one episode, cpu and peak are there if somebody counted them. Nothing where no episode had a box.
        """
        used = [t.timings for t in self.policy_samples if "box_seconds" in t.timings]
        if not used:
            return {}
        found = {"episodes": float(len(used)), "seconds": sum(one["box_seconds"] for one in used)}
        if cpu := [one["box_cpu"] for one in used if "box_cpu" in one]:
            found["cpu"] = sum(cpu)
        if peak := [one["box_peak"] for one in used if "box_peak" in one]:
            found["peak"] = max(peak)
        return found

    @property
    def baseline(self) -> float | None:
        """The reward of its greedy answer, where one was asked for and scored."""
        return next((t.reward for t in self.root_trajectories if t.policy == GREEDY), None)


@dataclass(slots=True)
class Slot:
    """A place in the pipeline, given by admission: `Slot(number=17, task=..., born=3)`."""

    number: int
    task: Task
    born: int


# -- requests to an engine -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw. `temperature = 0` is greedy, and greedy samples are not trainable (law 4).

    top_k, top_p, min_p   0, 1 and 0 keep the whole vocabulary
    repetition_penalty    logits of all tokens so far, prompt included: divided where positive, multiplied
                          where negative (arXiv:1909.05858)
    presence_penalty      subtracted from the logits of what this sample has written
    frequency_penalty     the same, once for every time it was written (both as in OpenAI's API)
    logit_bias            {token: what is added to its logit}
    min_tokens            end tokens and stop ids are forbidden until so many are written; a stop string that
                          is complete by then does not count
    stop                  token ids and strings that end a sample beside the model's own end tokens; a string
                          is cut off `text`, never off `tokens`
    grammar               {"json_schema": {...} or text}, {"regex": "..."} or {"grammar": "... in Lark"}; the
                          sample may end only where it is whole
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    max_tokens: int = 64
    min_tokens: int = 0
    stop: tuple[int | str, ...] = ()
    ignore_eos: bool = False
    grammar: dict[str, Any] | None = field(default=None, hash=False)
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        strange = [b for b in self.logit_bias.values() if not -100 <= b <= 100]
        rules = [
            (
                self.temperature == 0 or 1e-6 <= self.temperature <= 1e6,
                f"temperature = {self.temperature}; it must be 0 (greedy) or positive, from 1e-6 to 1e6",
            ),
            (self.top_k >= 0, f"top_k = {self.top_k}; 0 keeps everything, k > 0 keeps k tokens"),
            (0 < self.top_p <= 1, f"top_p = {self.top_p}; it must be in (0, 1]"),
            (0 <= self.min_p < 1, f"min_p = {self.min_p}; it must be in [0, 1)"),
            (
                0.01 <= self.repetition_penalty <= 100,
                f"repetition_penalty = {self.repetition_penalty}; it must lie in [0.01, 100], and 1 is none",
            ),
            (-2 <= self.presence_penalty <= 2, f"presence_penalty = {self.presence_penalty}; it must lie in [-2, 2]"),
            (
                -2 <= self.frequency_penalty <= 2,
                f"frequency_penalty = {self.frequency_penalty}; it must lie in [-2, 2]",
            ),
            (
                not strange,
                f"a logit_bias of {strange[:1]}; it must lie in [-100, 100], and -100 forbids a token in practice",
            ),
            (self.max_tokens >= 1, f"max_tokens = {self.max_tokens}; at least 1 token must be drawn"),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens = {self.min_tokens}; it must lie in [0, max_tokens]",
            ),
            (
                not isinstance(self.stop, str),
                f"stop = {self.stop!r} is one string; give a tuple: stop = ({self.stop!r},)",
            ),
            ("" not in self.stop, "stop holds an empty string, which every text contains"),
            (self.n >= 1, f"n = {self.n}; at least 1 sample"),
        ]
        if self.grammar is not None:
            one = len(self.grammar) == 1 and self.grammar.keys() <= {"json_schema", "regex", "grammar"}
            rules += [
                (one, f"grammar has the keys {sorted(self.grammar)}; give exactly one of json_schema, regex, grammar"),
                (
                    not self.ignore_eos,
                    "ignore_eos with a grammar: the grammar says where the answer ends; drop one of them",
                ),
            ]
        for holds, message in rules:
            if not holds:
                raise ValueError(message)

    @property
    def truncates_support(self) -> bool:
        """True where the support is cut: the trainer then cannot recompute the logprob without the recorded one."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """True where a token's logit depends on the tokens before beyond what the model says."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """True where logits are changed before the temperature."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0 or self.grammar is not None

    @property
    def untrainable_settings(self) -> str:
        """The settings whose samples cannot be trained, by name: the trainer recomputes logits and
        temperature, and reads what top-k, top-p and min-p kept (law 4).
        """
        names = [f.name for f in fields(self) if f.name in UNTRAINABLE and getattr(self, f.name) != UNTRAINABLE[f.name]]
        return ", ".join([*["temperature"] * (self.temperature == 0), *names])


# What the trainer does not recompute, each with the value that changes nothing.
UNTRAINABLE: dict[str, Any] = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {},
    "min_tokens": 0, "grammar": None,
}  # fmt: skip


def unwrap_scalar(value: Any) -> Any:
    """What an array of numpy or a tensor of torch without axes holds; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def earliest_routes(known: Any | None, told: Any | None) -> Any | None:
    """Routes [t-1,L,K] of a stream that grows: of a token those count with which it was drawn, so the earliest record
    stays, and what is told anew is that of the tokens behind it.
    """
    if known is None or told is None:
        return told if known is None else known
    import numpy as np  # a reward's worker starts without it

    return np.concatenate([known, told[len(known) :]])


def sample_key(seed: int, admission: int, sample: int, turn: int = 0) -> int:
    """The 128-bit key of one sample's noise: token t is drawn from Philox(key, t), whatever the scheduling."""
    text = f"{seed}/{admission}/{sample}/{turn}".encode()
    return int.from_bytes(blake2b(text, digest_size=16).digest(), "little")


# (version, tokens with keys and values, tokens written): what a request had when it last stood still under it
Stint = tuple[int, int, int]


@dataclass(slots=True)
class Request:
    """Tokens in. `continuation` says that the last tokens were already drawn by the
    policy, so token t goes on from there.

    `id` is what a client calls it, to abort it by; samples of one call share it, and go to one replica.
    `lines` are the stints of its recorded run, to be computed again: at each it stands
    still until those weights have gone. `media` are the pictures among its tokens, which only
    an engine with the capability "images" sees. `steps` are those of its continuation, where tokens have some.
    `observation` is what a world shows [O], where a policy draws actions: it is asked for one. `start_key` is that of
    the noise which a flow begins with, where that is not its own: answers of one group may share it.
    """

    tokens: Sequence[int]
    sampling: Sampling = Sampling()
    key: int = 0
    policy: str = POLICY
    adapter: str = ""
    namespace: str = ""
    continuation: int = 0
    deadline: float | None = None
    wants: frozenset[str] = frozenset()
    id: str = ""
    lines: tuple[Stint, ...] | None = None
    media: tuple[ImagePlaceholder, ...] = ()
    steps: DrawnSteps | None = None
    observation: Any | None = None
    start_key: int | None = None


@dataclass(slots=True)
class Completion:
    """Tokens out, each with the log-probability of the distribution it was really
    drawn from and the weights that drew it.

    text              without the stop string that ended it
    stints            where it stood whenever the weights changed or its cache was lost, and at its end;
                      () from an engine that does not say
    raw_logprobs      [T]      of the drawn tokens under the model alone: temperature 1, nothing changed
    top_logprobs      [T][K]   (token, raw log-probability) of the K most likely
    prompt_logprobs   [P]      raw, of the given tokens; the first entry is 0
    prompt_top_logprobs [P,K]  the K most likely tokens in their places; the first entry is empty
    support           [T]      the ids a token was drawn from, ascending; None where nothing was cut
    behavior_top      [T]      (ids [K], log-probabilities [K]) of the likeliest tokens, or of more draws, of the distribution drawn from
    steps             [T]      `Trajectory.steps` of the drawn tokens
    actions           [H, n]   what a world takes of the one step that was drawn, behind each other
    measured                   what an engine says of steps that the request brought, by name
    From raw_logprobs to behavior_top they are None unless `Request.wants` names them.
    """

    tokens: TokenColumn
    logprobs: TokenColumn
    versions: TokenColumn
    finish_reason: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    experts: Any | None = None
    # what a reader sees: without a stop string that ended it; None if the engine did not decode
    text: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    stints: Sequence[Stint] = ()
    raw_logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    support: list[list[int] | None] | None = None
    behavior_top: list[Any] | None = None
    steps: DrawnSteps | None = None
    actions: Any | None = None
    measured: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lists are taken, too."""
        self.tokens, self.versions = TokenColumn.of(IDS, self.tokens), TokenColumn.of(IDS, self.versions)
        self.logprobs = TokenColumn.of(NUMBERS, self.logprobs)

    @classmethod
    def empty(cls, finish_reason: FinishReason, prompt_tokens: int) -> Completion:
        """Nothing was written."""
        return cls(TokenColumn(IDS), TokenColumn(NUMBERS), TokenColumn(IDS), finish_reason, prompt_tokens)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Prefill only: `logprobs[t]` is log p(token t | tokens before t), in fp32, temperature 1; the first entry is 0.

    replicas   the same of each of several engines, by name
    """

    logprobs: list[float]
    version: int
    replicas: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    version: int
    state: str  # serving | held | asleep | refusing
    running: int
    waiting: int
    parked: int
    pages_free: int
    pages_cached: int
    pages_total: int
    capabilities: frozenset[str] = frozenset()
    root: str = ""  # of the weights that the last update brought; "" before the first
    bytes_copied: int = 0  # by that update
    replicas: int = 1  # that this is the status of
    memory: dict[str, int] = field(default_factory=dict)  # bytes by tag


# -- weights on their way ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor of one weight version: what `begin` announces and `commit` must have received in full.

    base   digest of the frozen weights under an adapter, which do not travel and must be the
           same on both sides; "" without one
    """

    version: int
    tensors: tuple[TensorInfo, ...]
    base: str = ""

    @property
    def root(self) -> str:
        """One digest over all; equal roots mean equal weights."""
        rows = sorted(f"{t.name}|{t.shape}|{t.dtype}|{t.digest}" for t in self.tensors)
        return blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()

    def with_version(self, version: int) -> Manifest:
        return replace(self, version=version)

    @classmethod
    def join_policies(cls, parts: Mapping[str, Manifest]) -> Manifest:
        """One of several policies at one version: the tensor
        "critic/model.norm.weight", the base "critic=3f.. policy=".

        `policy_part` is its inverse. ValueError where they are not of one version.
        """
        versions = {part.version for part in parts.values()}
        if len(versions) != 1:
            raise ValueError(f"policies at versions {sorted(versions)}: one version has one number for all")
        rows = tuple(
            replace(row, name=f"{policy}/{row.name}") for policy, part in parts.items() for row in part.tensors
        )
        bases = {policy: part.base for policy, part in parts.items()}
        return cls(
            versions.pop(), rows, " ".join(f"{p}={base}" for p, base in bases.items()) if any(bases.values()) else ""
        )

    def policy_part(self, policy: str) -> Manifest:
        """What of it is one policy's, under its own names."""
        mine = [(row, row.name.partition("/")) for row in self.tensors]
        rows = tuple(replace(row, name=name) for row, (owner, _, name) in mine if owner == policy)
        return Manifest(self.version, rows, dict(pair.split("=") for pair in self.base.split()).get(policy, ""))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a file or a body."""
        rows = [[t.name, list(t.shape), t.dtype, t.digest] for t in self.tensors]
        return {"version": self.version, "root": self.root, "base": self.base, "tensors": rows}

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Manifest:
        """The inverse. ValueError where it is no manifest, or its root is not that of its rows."""
        try:
            rows = tuple(
                TensorInfo(name, tuple(shape), dtype, digest) for name, shape, dtype, digest in tree["tensors"]
            )
            found = cls(tree["version"], rows, tree.get("base", ""))
            typed = all(isinstance(x, str) for t in rows for x in (t.name, t.dtype, t.digest)) and isinstance(
                found.base, str
            )
            whole = (
                all(type(side) is int and 0 <= side < 1 << 40 for t in rows for side in t.shape)
                and type(found.version) is int
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"it is no manifest: {type(error).__name__}: {error}") from None
        if not typed or not whole:
            raise ValueError("it is no manifest: a tensor is [name, [sides], dtype, digest]")
        if found.root != tree.get("root"):
            raise ValueError(f"it says root {str(tree.get('root'))[:8]}, and its rows have {found.root[:8]}")
        return found


@dataclass(frozen=True, slots=True)
class Begin:
    """
    beside  the data will lie beside the weights that serve, which go on serving until the
            commit; else it is written over them
    anew    versions may count from less than what serves: another run begins here, or this one
            goes on from an earlier checkpoint
    """

    manifest: Manifest
    beside: bool = False
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """Where the bytes are. `data` belongs to the transport: the tensors themselves, a segment, a folder, an address.

    base    root of the weights that the data changes; "" where it needs none
    bytes   that travel to each engine, where the transport counts them
    """

    kind: str
    data: Any = None
    base: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    version: int
    root: str


@dataclass(frozen=True, slots=True)
class Abort:
    reason: str


Message = Begin | Route | Commit | Abort


# -- what a training step reports -----------------------------------------------------------------


@dataclass(slots=True)
class StepStats:
    """One optimizer batch. `stepped` is False when a finite-check stopped an update; `metrics` are named stage/what.

    outcomes  of a step that was taken in part, by group: what refused it, "" where an update of it was taken. Of a group
              that is not among them `stepped` tells it
    """

    stepped: bool
    metrics: dict[str, float]
    note: str = ""
    outcomes: dict[int, str] = field(default_factory=dict)
