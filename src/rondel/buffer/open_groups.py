"""The groups between their admission and the end of their step, each in one of four places.

waiting ──claim──> rolling ──finish──> finished ──pick──> taken ──settle──> nobody's
└───────────────── open ─────────────────────┘
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable

from rondel.core.errors import LawError
from rondel.core.types import Group, Slot


class OpenGroups:
    """
    waiting, rolling, finished, taken   where a group is
    born                                number -> birth version of the open ones: waiting, rolling or finished
    births                              how many of those were born at each version
    """

    def __init__(self) -> None:
        self.waiting: deque[Slot] = deque()
        self.rolling: dict[int, Slot] = {}
        self.finished: dict[int, Group] = {}
        self.taken: dict[int, Group] = {}
        self.born: dict[int, int] = {}
        self.births: Counter[int] = Counter()
        self._head = 0  # no open number is less
        self._ripe: list[int] = []  # the finished numbers, as a heap; some are taken already

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.rolling) + len(self.finished) + len(self.taken)

    @property
    def are_all_taken(self) -> bool:
        return not self.waiting and not self.rolling and not self.finished

    def admit(self, slot: Slot) -> None:
        self.waiting.append(slot)
        self._record_opened(slot.number, slot.born)

    def claim_first(self) -> Slot:
        slot = self.waiting.popleft()
        self.rolling[slot.number] = slot
        return slot

    def end_rolling(self, slot: Slot) -> None:
        """Nobody works on it any more; it is open until it is picked or closed."""
        if self.rolling.pop(slot.number, None) is None:
            raise LawError(f"group {slot.number} was given back, but nobody had claimed it")

    def finish(self, number: int, group: Group) -> None:
        self.finished[number] = group
        heapq.heappush(self._ripe, number)

    def pick(self, number: int) -> Group:
        self.close(number)
        return self.taken.setdefault(number, self.finished.pop(number))

    def close(self, number: int) -> None:
        """It is not open any more: its place is another one's."""
        born = self.born.pop(number)
        self.births[born] -= 1
        if not self.births[born]:
            del self.births[born]

    def oldest_finished(self) -> int | None:
        while self._ripe and self._ripe[0] not in self.finished:
            heapq.heappop(self._ripe)
        return self._ripe[0] if self._ripe else None

    def first_open(self) -> int:
        """The least open number; only asked while there is one."""
        while self._head not in self.born:
            self._head += 1
        return self._head

    def remove_idle(self, is_late: Callable[[int], bool]) -> list[Slot]:
        """Those that wait or have finished and whose birth is too long ago, by number; they are still open."""
        late = [slot for slot in self.waiting if is_late(slot.born)]
        late += [Slot(n, group.task, group.born) for n, group in self.finished.items() if is_late(group.born)]
        for slot in late:
            if self.finished.pop(slot.number, None) is None:
                self.waiting.remove(slot)
        return sorted(late, key=lambda slot: slot.number)

    def unfinished(self) -> list[Slot]:
        return sorted([*self.waiting, *self.rolling.values()], key=lambda slot: slot.number)

    def describe(self) -> str:
        rolling = sorted(self.rolling)[:8]
        return f"{len(self.waiting)} tasks unclaimed, rolling {rolling}, {len(self.finished)} finished"

    def restore(self, unfinished: list[Slot], finished: list[Group], admitted: int) -> None:
        """What a checkpoint had: the unfinished ones wait again."""
        self.waiting.extend(unfinished)
        self.finished = {group.id: group for group in finished}
        self._ripe = sorted(self.finished)
        for slot in self.waiting:
            self._record_opened(slot.number, slot.born)
        for group in finished:
            self._record_opened(group.id, group.born)
        self._head = min(self.born, default=admitted)

    def _record_opened(self, number: int, born: int) -> None:
        self.born[number] = born
        self.births[born] += 1
