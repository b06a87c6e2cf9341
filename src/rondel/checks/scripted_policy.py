"""A policy of scripts in an environment: what it asks for is kept, what it is told
is watched, and nothing runs for ever.

script(task, turn) -> text, or token ids without an end     gold, wrong, empty, garbage, long, calls
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import DataError, EngineError, EnvError
from rondel.core.media import ImageProcessorConfig
from rondel.core.protocols import GoldEnv, MultiTurnEnv
from rondel.core.types import Completion, EnvFault, Request, Sampling, Task, Trajectory
from rondel.generate.calls import JsonCalls
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import assign_parents, episode_of
from rondel.generate.template import Schemas, Template

Script = Callable[[Task, int], "str | list[int]"]
RUNAWAY = 1000  # replies of one episode, of an environment that does not say how many `turns` it has
FEW = 12  # tokens of garbage


class RequestBarrier:
    """Holds the first request of each until all n have asked, or until the patience of one of them ends."""

    def __init__(self, n: int, patience: float) -> None:
        self.n, self.patience, self.most, self._all = n, patience, 0, asyncio.Event()

    async def wait_for_all(self) -> None:
        if not self._all.is_set():
            self.most += 1
            if self.most == self.n:
                self._all.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.patience):
                    await self._all.wait()
            self._all.set()


@dataclass
class ScriptedPolicy:
    """An engine that says what its script says. `drawn`: each request with what was drawn
    for it; each token has a logprob of its own.
    """

    tokenizer: Any
    task: Task
    script: Script
    most: int
    meeting: RequestBarrier | None = None
    dies: bool = False
    drawn: list[tuple[Request, Completion]] = field(default_factory=list)
    seconds: float = 0.0  # in here
    asked: int = 0

    async def generate(self, request: Request) -> Completion:
        began, turn = time.perf_counter(), self.asked
        self.asked += 1
        if self.dies:
            raise EngineError("the engine of this check ends here")
        if turn >= self.most:
            raise EnvError(f"it asks for reply {turn + 1} of at most {self.most}")
        if self.meeting is not None and not turn:
            await self.meeting.wait_for_all()
        await asyncio.sleep(0)
        done = self._scripted_completion(request, turn)
        self.drawn.append((request, done))
        self.seconds += time.perf_counter() - began
        return done

    def _scripted_completion(self, request: Request, turn: int) -> Completion:
        said, sampling = self.script(self.task, turn), request.sampling
        end = self.tokenizer.eos_token_id
        tokens = said if isinstance(said, list) else [*self.tokenizer.encode(said, add_special_tokens=False), end]
        tokens = list(tokens[: sampling.max_tokens])
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        finish = "stop" if tokens[-1:] == [end] else "length"
        for stop in (s for s in sampling.stop if isinstance(s, str) and s in text):
            while stop in self.tokenizer.decode(tokens[:-1], skip_special_tokens=True):
                tokens.pop()
            text, finish = text[: text.index(stop)], "stop"
        logprobs = [-1.0 - turn - 1e-4 * i for i in range(len(tokens))]
        return Completion(tokens, logprobs, [turn] * len(tokens), finish, len(request.tokens), text=text)  # type: ignore[arg-type]


class WatchedChat(TokenChat):
    """Counts replies, also those that are no longer computed because the conversation is full."""

    most, replies = RUNAWAY, 0

    async def reply(self) -> Completion:
        self.replies += 1
        if self.replies > self.most:
            raise EnvError(f"it asks for reply {self.replies} of at most {self.most}")
        return await super().reply()


@dataclass
class ScriptedEpisode:
    """One episode of one script: what it left, or why it did not end."""

    script: str
    task: Task
    trajectories: list[Trajectory]
    actor: ScriptedPolicy
    fault: str = ""
    seconds: float = 0.0  # without the engine's

    @property
    def episode_label(self) -> str:
        return f"script '{self.script}', task {self.task.id}"

    @property
    def environment_tokens(self) -> list[list[int]]:
        """What the environment gave, of each trajectory."""
        return [[token for token, mine in zip(t.tokens, t.mask) if not mine] for t in self.trajectories]

    def find_misrecording(self) -> str:
        """Law 5: each run of the policy's tokens is one of its replies, to the letter,
        behind the tokens that it was given.
        """
        for t in self.trajectories:
            if not len(t.tokens) == len(t.mask) == len(t.logprobs) == len(t.versions):
                return "tokens, mask, logprobs and versions differ in length"
            at = 0
            while at < len(t.mask):
                if not t.mask[at]:
                    if t.versions[at] != -1 or t.logprobs[at]:
                        return f"token {at} was given and has a logprob or a version"
                    at += 1
                    continue
                found = [
                    d
                    for r, d in self.actor.drawn
                    if d.tokens and r.tokens == t.tokens[:at] and d.versions[0] == t.versions[at]
                ]
                end = at + len(found[0].tokens) if found else at
                if (
                    not found
                    or t.tokens[at:end] != found[0].tokens
                    or t.logprobs[at:end] != found[0].logprobs
                    or not all(t.mask[at:end])
                ):
                    return f"token {at} counts as the policy's, and no reply that it gave there begins so"
                at = end
        return ""


@dataclass
class ScriptedStage:
    """Where scripts are played: `await stage.play_episode("gold", task, script)`."""

    env: Any
    tokenizer: Any
    sampling: Sampling
    max_context: int
    system: str | None = None
    timeout: float = 60.0
    sight: ImageProcessorConfig | None = None

    @property
    def max_turns(self) -> int:
        turns = self.env.turns if isinstance(self.env, MultiTurnEnv) else None
        return turns if isinstance(turns, int) and turns < RUNAWAY else RUNAWAY

    async def play_episode(
        self, name: str, task: Task, script: Script, *, meeting: RequestBarrier | None = None, dies: bool = False
    ) -> ScriptedEpisode:
        actor = ScriptedPolicy(self.tokenizer, task, script, self.max_turns, meeting, dies)
        chat = WatchedChat(
            self.tokenizer,
            actor.generate,
            sampling=self.sampling,
            key=lambda turn: turn,
            max_context=self.max_context,
            system=self.system,
            sight=self.sight,
        )
        chat.most = self.max_turns
        played, began = ScriptedEpisode(name, task, [], actor), time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                played.trajectories = assign_parents(await chat.episode.finish(await episode_of(self.env, task, chat)))
        except TimeoutError as error:
            played.fault = f"it did not end within {self.timeout:g} s" if limit.expired() else f"TimeoutError: {error}"
        except Exception as error:  # an environment raises whatever it likes
            played.fault = "" if dies else f"{type(error).__name__}: {error}"
        if meeting is not None and not actor.asked:
            await meeting.wait_for_all()
        played.seconds = time.perf_counter() - began - actor.seconds
        broken = next((t.outcome.reason for t in played.trajectories if isinstance(t.outcome, EnvFault)), "")
        played.fault = played.fault or broken
        return played


def knows_gold(env: Any, task: Task) -> bool:
    """Whether there is something to play as gold. DataError of `gold(task)`: the environment has none for this task."""
    if isinstance(env, GoldEnv):
        with suppress(DataError):
            return bool(list(env.gold(task)))
        return False
    return task.data.get("answer") not in (None, "")


def build_scripts(tokenizer: Any, tasks: Sequence[Task], env: Any) -> dict[str, Script]:
    """What a policy may do, at its best and worst. Gold is the environment's own
    `gold(task)`, a list of replies, or the task's answer.
    """
    plain = [i for i in range(len(tokenizer)) if i not in set(tokenizer.all_special_ids)]
    answers = list(
        dict.fromkeys(str(task.data["answer"]) for task in tasks if task.data.get("answer") not in (None, ""))
    )
    wrong_calls = _wrong_calls(tokenizer, env, tasks[0])

    def random_tokens(task: Task, turn: int, n: int) -> list[int]:
        return random.Random(f"{task.id}/{turn}").choices(plain, k=n)

    def gold_reply(task: Task, turn: int) -> str:
        if isinstance(env, GoldEnv):
            replies = list(env.gold(task))
            return str(replies[min(turn, len(replies) - 1)])
        return str(task.data["answer"])

    def wrong_answer(task: Task, turn: int) -> str:
        return next((answer for answer in answers if answer != str(task.data.get("answer"))), "I do not know")

    return {
        "gold": gold_reply,
        "empty": lambda task, turn: "",
        "wrong": wrong_answer,
        "garbage": lambda task, turn: [*random_tokens(task, turn, FEW), tokenizer.eos_token_id],
        "long": lambda task, turn: random_tokens(task, turn, 1 << 14),
        "calls": lambda task, turn: wrong_calls[turn % len(wrong_calls)],
    }


def _wrong_calls(tokenizer: Any, env: Any, task: Task) -> list[str]:
    """As the template writes calls: a tool that is not there, arguments that do not fit, and what cannot be read."""
    form = Template(tokenizer).call_format
    opens, closes, key = (
        (form.opens, form.closes, form.arguments)
        if isinstance(form, JsonCalls)
        else ("<tool_call>", "</tool_call>", "arguments")
    )
    schemas: Schemas = ()
    with suppress(Exception):  # an episode will say it
        schemas = env.prompt(task)[1]
    names = [schema["function"]["name"] for schema in schemas] or ["none"]
    unfit = [json.dumps({"name": name, key: {"no such": [[]]}}) for name in ("no_such_tool", *names)]
    written = [*unfit, '{"name": "a", ', "[" * 200]
    return [f"{opens}{one}{closes}" for one in written]
