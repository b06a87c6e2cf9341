"""An episode of several trajectories, laid beside those of its siblings.

    planner     ████████████████         the episode's first: scored by the reward, or by the environment
    planner     ██████▒▒▒▒▒▒             a branch: its harness rewrote the history, and both share the
                first tokens, the score and the credit
    searcher    ░░░░░░░░░░░              another agent: with the same score or one of its own,
                compared with the searchers of other episodes

A branch is a whole walk from the first token to its last one; tokens that several walks
share are trained in each (and computed once).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rondel.core.errors import ConfigError, DataError, EnvError, UserError, root_cause
from rondel.core.protocols import Chat
from rondel.core.types import DATA, DROPPED, GREEDY, POLICY, Failed, Ok, OutOfBudget, Sampling, Score, Task, Trajectory
from rondel.text.tokenization import LONG, beside_loop

if TYPE_CHECKING:
    from rondel.generate.envs.episode_budget import EpisodeBudget
    from rondel.generate.template import Messages


WIDEST = 4096  # tokens that one is drawn from where others were cut: 16 kB a token of an answer
DriftPolicy = Literal["keep", "branch", "refuse"]


class CommandRecorder(Protocol):
    def record(self, episode: int, n: int, command: Any, *, exit: int, folder: str) -> None: ...


class TurnWatcher(Protocol):
    """What is told of the policy's turns: `turn` around one, with the key of its request, `end_turn` behind it."""

    def turn(self, chat: Any, key: int) -> AbstractContextManager[None]: ...
    def end_turn(self, chat: Any) -> None: ...


@dataclass
class EpisodeState:
    """What the conversations of one episode share, and what becomes of them when it ends.

    drift    "keep"    the tokens that were written go on; the first difference is found when the episode ends
             "branch"  what is rendered anew begins another trajectory, which shares the score of the episode
             "refuse"  the episode is a fault of its environment, which names the difference

    `shots` are messages that stand before an agent's first ones, by its name. `commands` keeps what was run in
    sandboxes, for an episode that is played again after a crash. `chats` are the conversations (TokenChat) in which the
    policy was asked. `drops`: an episode whose budget is used up has no score. `watcher` hears of the policy's turns
    while they are written. `is_measured`: by an evaluation, or as a baseline; it is not trained.
    """

    budget: EpisodeBudget | None = None
    drift: DriftPolicy = "keep"
    drops: bool = False
    commands: CommandRecorder | None = None
    chats: list[Any] = field(default_factory=list)
    watcher: TurnWatcher | None = None
    is_measured: bool = False
    shots: Mapping[str, Messages] = field(default_factory=dict)

    @property
    def is_out_of_budget(self) -> bool:
        return self.budget is not None and bool(self.budget.over)

    @contextmanager
    def watched_turn(self, chat: Any, key: int) -> Iterator[None]:
        with nullcontext() if self.watcher is None else self.watcher.turn(chat, key):
            yield

    def end_turn(self, chat: Any) -> None:
        if self.watcher is not None:
            self.watcher.end_turn(chat)

    async def finish(self, episode: list[Trajectory]) -> list[Trajectory]:
        """The trajectories of the episode with those that were closed on the way, behind the others; each with its
        drift, and with the budget that ended it.
        """
        of = {id(chat.trajectory): chat for chat in self.chats}
        found, closed = list[Trajectory](), list[Trajectory]()
        for trajectory in episode:
            chat = of.get(id(trajectory))
            if chat is None:
                found.append(trajectory)
                continue
            if trajectory.drift is None:
                long = len(trajectory.tokens) > LONG  # others have their turn on the event loop
                trajectory.drift = await beside_loop(chat.find_drift) if long else chat.find_drift()
            found.append(_last_written(chat))
            closed += chat.closed
        if self.budget is not None and self.budget.over:
            for trajectory in found:
                if isinstance(trajectory.outcome, Ok):
                    trajectory.outcome = OutOfBudget(self.budget.over)
                    trajectory.score = Failed(DROPPED, self.budget.over) if self.drops else trajectory.score
        self.chats.clear()
        return found + closed

    async def rescue(self) -> list[Trajectory]:
        """What was written in an episode whose environment could not go on without its budget."""
        written = [chat.trajectory for chat in self.chats if chat.trajectory.written or chat.closed]
        return await self.finish(written or [Trajectory()])


def _last_written(chat: Any) -> Trajectory:
    """The trajectory of a conversation; where nothing was written behind its last branch, the one before with its
    text and its score."""
    last: Trajectory = chat.trajectory
    if last.written or not chat.closed:
        return last
    before: Trajectory = chat.closed.pop()
    before.text, before.conversation, before.score = last.text, last.conversation, last.score
    before.outcome, before.finish_reason = last.outcome, last.finish_reason
    return before


async def episode_of(env: Any, task: Task, chat: Chat) -> list[Trajectory]:
    """The trajectories of one episode, always as a list. Of errors that end a task group of
    the environment's, the root cause is raised.
    """
    try:
        return as_trajectories(await env.run(task, chat))
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def as_trajectories(episode: Any) -> list[Trajectory]:
    """What an environment returned, always as a list."""
    found = list(episode) if isinstance(episode, list | tuple) else [episode]
    if odd := [one for one in found if not isinstance(one, Trajectory)]:
        raise UserError(
            f"the environment returned {'nothing' if odd[0] is None else f'a {type(odd[0]).__name__}'}; an episode is "
            "a trajectory or a list of them: end its run with `return chat.trajectory`"
        )
    if not found:
        raise EnvError(
            "the environment returned an empty list; an episode is at least one trajectory, be it without a token"
        )
    if len({id(one) for one in found}) < len(found):
        raise UserError(
            f"the environment returned {len(found)} trajectories, and some are the same one, which would be trained "
            "twice: name each conversation of the episode once"
        )
    return found


def assign_parents(episode: list[Trajectory]) -> list[Trajectory]:
    """The same by agents, with every branch's `parent`: the first of an agent in which
    something was written is its root, and so is whoever brings a score of its own. Others in
    which nothing was written are left out."""
    found: list[Trajectory] = []
    for agent in dict.fromkeys(t.agent for t in episode):
        root = len(found)
        for trajectory in sorted((t for t in episode if t.agent == agent), key=lambda t: t.written == 0):
            if len(found) == root or trajectory.written:
                trajectory.parent = root if len(found) > root and trajectory.score is None else None
                found.append(trajectory)
    return found


def join_episodes(episodes: Iterable[list[Trajectory]]) -> list[Trajectory]:
    """All of them as a group has them: parents count from its first trajectory."""
    found, seen = list[Trajectory](), set[int]()
    for episode in episodes:
        if seen & (own := {id(one) for one in episode}):
            raise UserError(
                "the environment returned the same trajectory for two episodes, which run at the same time in one "
                "object: keep chat and trajectory in variables of run(), and not in self"
            )
        seen |= own
        first = len(found)
        for trajectory in episode:
            trajectory.parent = None if trajectory.parent is None else trajectory.parent + first
            found.append(trajectory)
    return found


def share_scores(episode: list[Trajectory]) -> None:
    """Who has no score of its own has that of its root, or else of the episode's first:
    without what was earned at places of those tokens.
    """
    for trajectory in episode:
        if trajectory.score is None:
            score = episode[trajectory.parent or 0].score or episode[0].score
            trajectory.score = replace(score, steps=()) if isinstance(score, Score) else score


# -- what an episode must be to be trained ---------------------------------------------------------


def refuse_miscast(trajectory: Trajectory, cast: dict[str, str]) -> None:
    """What an agent says was drawn by the weights that play it, and trains no others."""
    plays = cast.get(trajectory.agent, POLICY)
    if trajectory.written and trajectory.policy != plays:
        raise DataError(
            f"agent '{trajectory.agent}' is played by '{plays}', and what it said was written by "
            f"'{trajectory.policy}': an environment names its "
            f'agents before they speak, chat.beside("{trajectory.agent}") or chat.trajectory.agent = '
            f'"{trajectory.agent}"'
        )


def refuse_untrainable(sampling: Sampling) -> None:
    """Law 4: what is trained was drawn from a distribution that the trainer can compute again."""
    if names := sampling.untrainable_settings:
        raise ConfigError(
            f"samples drawn with {names} cannot be trained: the trainer recomputes logits, temperature, top_k, "
            "top_p and min_p, and nothing else. "
            "Train with temperature above 0 and no penalties, bias, grammar or min_tokens; task.eval.sampling "
            "may use them all"
        )
    if sampling.top_k > WIDEST:
        raise ConfigError(f"engine.sampling.top_k = {sampling.top_k}; {_recording_hint()}")


def refuse_other_temperature(sampling: Sampling, trained: float) -> None:
    """The same of an environment that draws at a temperature of its own: the trainer divides by that of the run."""
    if sampling.temperature != trained:
        raise ConfigError(
            f"an environment draws at temperature {sampling.temperature:g}, and the policy is trained at {trained:g}: "
            "the trainer would compute other log-probabilities than those of the draw. Set "
            f"engine.sampling.temperature = {sampling.temperature:g}, or leave chat.sampling.temperature as it is"
        )


def refuse_wide(support: list[Any | None], sampling: Sampling) -> None:
    """The trainer reads which tokens could be drawn, of every token: what is nearly
    the vocabulary would fill the memory.
    """
    widest = max((len(ids) for ids in support if ids is not None), default=0)
    if widest > WIDEST:
        raise ConfigError(
            f"engine.sampling.top_k = {sampling.top_k}, top_p = {sampling.top_p}, min_p = {sampling.min_p} left {widest} "
            f"tokens to draw one from; {_recording_hint()}"
        )


def refuse_without_support(trajectory: Trajectory, sampling: Sampling) -> None:
    if (
        sampling.truncates_support
        and trajectory.support is None
        and trajectory.written
        and trajectory.policy not in (DATA, GREEDY)
    ):
        raise DataError(
            "a trajectory without the tokens that its own were drawn from, under top_k, top_p or min_p: an environment "
            "that builds trajectories itself must hand Completion.support to extend(); or set engine.sampling.top_k = 0, "
            "top_p = 1 and min_p = 0"
        )


def _recording_hint() -> str:
    return (
        f"at most {WIDEST} are recorded for the trainer. Set engine.sampling.top_k = {WIDEST // 2}, or top_k = 0, "
        "top_p = 1 and min_p = 0 for the whole vocabulary"
    )
