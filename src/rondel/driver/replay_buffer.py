"""Groups that are trained a second time: a few of every step come back in a later one, while their lag allows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from rondel.core.events import Event, GroupsTaken, Replayed, emit
from rondel.core.types import Group
from rondel.runtime.journal import store


@dataclass
class ReplayBuffer:
    """`ReplayBuffer(groups=4, max_lag=2, seed=0)`: 4 of the groups of every step are drawn, without replacement, and
    each comes back once.

    A group that was lag versions old at its step t comes back at t + d, d drawn from 1 .. max_lag - lag: so it is never
    older than that (law 2), and one that was as old already does not come back. max_lag is loop.max_staleness, the
    bound of every other group, or beyond it for a row that corrects for who drew a token.
    What is drawn depends on the seed and the group's number alone, so a resumed or repeated run draws the same.
    """

    groups: int
    max_lag: int
    seed: int
    step: int = 0  # the one that is being prepared
    kept: dict[int, list[Group]] = field(default_factory=dict)  # by step, those that are still to come back

    def on_event(self, event: Event) -> None:
        """The learner took a batch."""
        if isinstance(event, GroupsTaken):
            self.record_step(event.step, event.groups)

    def record_step(self, step: int, groups: list[Group]) -> None:
        self.step = step
        self.kept[step] = [group for group in self._draw_groups(groups) if self._replay_delay(group, step)]
        for t, own in self.kept.items():
            self.kept[t] = [group for group in own if t + self._replay_delay(group, t) >= step]
        self.kept = {t: own for t, own in self.kept.items() if own and t <= step}

    def restore_steps(self, folder: Path, steps: Iterable[int]) -> None:
        """What a run that goes on has trained before."""
        stored = set(store.stored_steps(folder))
        for step in list(steps)[-self.max_lag :]:
            if step in stored:
                self.record_step(step, store.groups_of(store.read_step(folder, step)))

    def due_groups(self) -> list[Group]:
        """Who comes back in this step, in the order of their numbers."""
        before = [(t, group) for t, own in self.kept.items() for group in own]
        found = [group for t, group in before if t + self._replay_delay(group, t) == self.step]
        if found:
            oldest = max(self.step - 1 - group.born for group in found)
            emit(Replayed(self.step, sorted(group.id for group in found), oldest))
        return sorted(found, key=lambda group: group.id)

    def _draw_groups(self, own: list[Group]) -> list[Group]:
        return sorted(own, key=lambda group: self._stable_hash(group, "which"))[: self.groups]

    def _replay_delay(self, group: Group, t: int) -> int:
        """Steps until it comes back; 0: never. The version that step t trains is t - 1."""
        room = self.max_lag - (t - 1 - group.born)
        return 1 + self._stable_hash(group, "when") % room if room > 0 else 0

    def _stable_hash(self, group: Group, what: str) -> int:
        return int.from_bytes(blake2b(f"{self.seed}/{group.id}/{what}".encode(), digest_size=8).digest(), "little")
