"""The ledger of a run's groups (law 1): each one admitted is trained, filtered, failed or in flight."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rondel.core.errors import LawError, RewardError, UserError
from rondel.core.events import Warned, emit


class GroupLedger:
    """
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
        """A batch was trained, or failed for the given reason."""
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
