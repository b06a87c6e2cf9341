"""What the world did in earlier steps, from which the model of it learns again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rondel.core.events import Event, GroupsTaken
from rondel.core.transitions import OBSERVED, REMEMBERED
from rondel.core.types import Group, Trajectory
from rondel.runtime.journal import store


@dataclass
class TransitionMemory:
    """`TransitionMemory(4000)`: the newest observed episodes of earlier steps that have so many transitions together.

    They train the model of the world alone, which is what the world did, whatever policy acted: no lag bounds them.
    Nothing is drawn, so a resumed or repeated run remembers the same.
    """

    most: int
    step: int = 0  # the one that is being prepared
    taken: dict[int, list[Group]] = field(default_factory=dict)  # by step, as far back as is remembered

    def on_event(self, event: Event) -> None:
        """The learner took a batch."""
        if isinstance(event, GroupsTaken):
            self.record_step(event.step, event.groups)

    def record_step(self, step: int, groups: list[Group]) -> None:
        """Of each group what was observed; steps that are no longer remembered are given up."""
        self.step = step
        self.taken[step] = [replace(group, trajectories=_observed(group)) for group in groups]
        kept, n = dict[int, list[Group]](), 0
        for t in sorted(self.taken, reverse=True):
            if t < step - 1 and n >= self.most:  # the step that comes remembers this one, too
                break
            kept[t] = self.taken[t]
            n += _count(kept[t]) if t < step else 0
        self.taken = dict(sorted(kept.items()))

    def restore_steps(self, folder: Path, steps: Iterable[int]) -> None:
        """What a run that goes on has trained before."""
        stored, n, found = set(store.stored_steps(folder)), 0, list[int]()
        for step in sorted(stored.intersection(steps), reverse=True):
            found.append(step)
            n += _count([replace(g, trajectories=_observed(g)) for g in store.groups_of(store.read_step(folder, step))])
            if n >= self.most:
                break
        for step in sorted(found):
            self.record_step(step, store.groups_of(store.read_step(folder, step)))

    def due_groups(self) -> list[Group]:
        """Whole groups, the newest first until there are enough, in the order of their numbers."""
        found, n = list[Group](), 0
        for t in sorted((t for t in self.taken if t < self.step), reverse=True):
            for group in sorted(self.taken[t], key=lambda group: -group.id):
                if n < self.most:
                    found.append(group)
                    n += _count([group])
        return sorted(found, key=lambda group: group.id)


def _observed(group: Group) -> list[Trajectory]:
    return [replace(t, agent=REMEMBERED) for t in group.trajectories if t.agent == OBSERVED]


def _count(groups: list[Group]) -> int:
    return sum(t.written for group in groups for t in group.trajectories)
