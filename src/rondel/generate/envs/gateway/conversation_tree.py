"""The conversations of one episode, told apart by what the agent sends.

request = messages so far + new ones           a branch knows them all     the new ones are appended to it
                                               it knows the first turns    another branch, with copies of their tokens
                                               nobody knows any            another branch, rendered whole; so it is
                                                                           where task.env.drift = "branch" finds drift

o──o──o──o        the agent goes on and on
   └──o──o        history rewritten after the first turn, or asked again: a fork
o──o              another system message, other tools: a sub-agent
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rondel.core.types import FinishReason, Trajectory
from rondel.generate.envs.chat import ConversationMark, TokenChat


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredTurn:
    """One of the policy that has been answered with. length: of the branch's `said` up
    to its end; tail: its stop string.
    """

    length: int
    mark: ConversationMark
    tail: str = ""


@dataclass(slots=True, eq=False)
class ConversationBranch:
    """`said` is what an agent sends to go on: keys of messages, a text, or token ids."""

    chat: TokenChat
    said: Any
    tools: list[dict[str, Any]]
    turns: list[AnsweredTurn]
    busy: bool = False

    def shared_turns(self, said: Any, tools: list[dict[str, Any]]) -> int:
        """How many turns of this branch `said` begins with; something must follow them."""
        if type(said) is not type(self.said) or tools != self.tools:
            return 0
        shared = min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.said, said))), len(said) - 1)
        return sum(turn.length <= shared for turn in self.turns)


class ConversationTree:
    """`root` is a conversation in which nothing has been said."""

    def __init__(self, root: TokenChat) -> None:
        self.root, self.branches = root, list[ConversationBranch]()

    def open_branch(
        self,
        said: Any,
        tools: list[dict[str, Any]],
        drifts: Callable[[ConversationBranch], bool] = lambda branch: False,
    ) -> ConversationBranch:
        """The branch to write in: its turns are those that `said` begins with. `drifts`: whether the template writes
        them otherwise, and what is asked is to be rendered whole.
        """
        found, known = None, 0
        for branch in self.branches:
            n = branch.shared_turns(said, tools)
            free = n == len(branch.turns) and not branch.busy
            if n and (n > known or (n == known and free)):
                found, known = branch, n
        if found is None:
            found = ConversationBranch(self.root.fork(), said[:0], tools, [])
        elif known == len(found.turns) and not found.busy:
            if not drifts(found):
                return found
            found = ConversationBranch(self.root.fork(), said[:0], tools, [])
        else:
            turns = found.turns[:known]
            found = ConversationBranch(found.chat.fork(turns[-1].mark), found.said[: turns[-1].length], tools, turns)
            if drifts(found):
                found = ConversationBranch(self.root.fork(), said[:0], tools, [])
        self.branches.append(found)
        return found

    def undo_turn(self, branch: ConversationBranch, finish_reason: FinishReason | None = None) -> None:
        """A turn that came to nothing leaves no trace, but perhaps why the branch ends there."""
        if not branch.turns or self._has_continuation(branch):
            self.branches.remove(branch)
            return
        timings = branch.chat.trajectory.timings
        branch.chat = branch.chat.fork(branch.turns[-1].mark)
        branch.chat.trajectory.timings = timings
        if finish_reason is not None:
            branch.chat.trajectory.finish_reason = finish_reason

    def leaf_trajectories(self) -> list[Trajectory]:
        """One for each leaf, whose prefix is in it whole; in the order in which they were opened."""
        return [
            b.chat.trajectory
            for b in self.branches
            if b.turns and not self._has_continuation(b) and b.chat.trajectory.written
        ]

    def _has_continuation(self, branch: ConversationBranch) -> bool:
        """Whether another branch goes on from where this one ends."""
        return any(branch.turns[-1] in other.turns for other in self.branches if other is not branch)
