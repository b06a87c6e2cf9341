"""The groups of a run: where each one is between its admission and the end of its step, and what became of all.

waiting ──claim──> rolling ──finish──> finished ──pick──> taken ──settle──> nobody's
└───────────────── open ─────────────────────┘

The ledger (law 1) counts all of them: each one admitted is trained, filtered, failed or in flight.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from rondel.core.errors import LawError, RewardError, UserError
from rondel.core.events import Warned, emit
from rondel.core.types import Group, Slot


class OpenGroups:
    """The groups that are not settled yet, by where they are.

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


class GroupLedger:
    """What became of the groups of a run.

    admitted   groups that were given a number; also the next number
    refunded   of those, how many gave their place back: filtered, failed or late
    retried    of those, how many had a task that was asked again
    trained    groups that were in a step
    details    the last message of each reason to fail
    dropped    groups that were filtered or failed since the last batch was taken
    """

    def __init__(self) -> None:
        self.admitted = self.refunded = self.trained = self.retried = self.dropped = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.details: dict[str, str] = {}

    def record_dropped(self, reason: str, *, failed: bool) -> None:
        (self.failed if failed else self.filtered)[reason] += 1
        self.refunded += 1
        self.dropped += 1

    def record_late(self, reason: str) -> None:
        """A late group gives its place back and does not count as dropped."""
        self.filtered[reason] += 1
        self.refunded += 1

    def record_consumed(self, groups: int, *, failed: str) -> None:
        """Groups of a batch were trained, or failed for the given reason."""
        if failed:
            self.failed[failed] += groups
        else:
            self.trained += groups

    def balanced_entries(self, in_flight: int) -> dict[str, int]:
        book = {
            "issued": self.admitted,
            "trained": self.trained,
            "in_flight": in_flight,
            **{f"filtered/{rule}": n for rule, n in self.filtered.items()},
            **{f"failed/{reason}": n for reason, n in self.failed.items()},
        }
        if 2 * book["issued"] != sum(book.values()):
            raise LawError(f"the ledger does not balance: {book}")
        return book

    def explain_short_batch(self, size: int) -> None:
        """Why a batch stayed short when refills ran out: an error if nothing is left to train on."""
        reasons = ", ".join(f"{n} {r}" for r, n in (self.filtered + self.failed).most_common(3))
        if not size and self.failed.total() > self.filtered.total():
            reason = self.failed.most_common(1)[0][0]
            raise RewardError(
                f"no group survived, because too few answers have a score: {self.dropped} were dropped in "
                f"one step ({reasons}); the last one said: "
                f"{self.details.get(reason) or reason}. Mend the reward or the environment (`rondel check RUN.toml` "
                f"tries it), and give the same "
                "command again"
            )
        if not size:
            raise UserError(
                f"no group survived the filters: {self.dropped} were dropped in one step ({reasons}). There "
                f"is no signal to train on: "
                "try an easier task or a larger group_size; `rondel check` measures how many groups have mixed rewards"
            )
        emit(Warned(f"a short batch of {size} groups: {self.dropped} were dropped in one step ({reasons})"))

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": [self.admitted, self.refunded, self.trained, self.retried],
            "filtered": dict(self.filtered),
            "failed": dict(self.failed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.admitted, self.refunded, self.trained, self.retried = state["counts"]
        self.filtered, self.failed = Counter(state["filtered"]), Counter(state["failed"])
