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

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rondel.core.errors import EnvError, UserError, unwrap_exception_group
from rondel.core.protocols import Chat
from rondel.core.types import Score, Task, Trajectory


async def episode_of(env: Any, task: Task, chat: Chat) -> list[Trajectory]:
    """The trajectories of one episode, always as a list. Of errors that end a task group of
    the environment's, the root cause is raised.
    """
    with unwrap_exception_group():
        return as_trajectories(await env.run(task, chat))


def as_trajectories(episode: Any) -> list[Trajectory]:
    """What an environment returned, always as a list."""
    found = list(episode) if isinstance(episode, list | tuple) else [episode]
    if odd := [one for one in found if not isinstance(one, Trajectory)]:
        raise UserError(
            f"the environment returned {'nothing' if odd[0] is None else f'a {type(odd[0]).__name__}'}; an episode is a "
            f"trajectory or a list "
            "of them: end its run with `return chat.trajectory`"
        )
    if not found:
        raise EnvError(
            "the environment returned an empty list; an episode is at least one trajectory, be it without a token"
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
    found: list[Trajectory] = []
    for episode in episodes:
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
