"""How much may fail before a run stops, and how long it waits for the world to mend: what is
left after failures is not trained for ever as if nothing were wrong (law 11)."""

from __future__ import annotations

import asyncio

from rondel.core.clocks import running_time
from rondel.core.events import Warned, emit
from rondel.core.failure_rate import RecentOutcomes
from rondel.core.types import Failed, Score


class FailureBudget:
    """`FailureBudget(0.2, patience=600)`: more than a fifth of the last 200 answers have no score ->
    the run pauses, and stops after ten minutes.

        failing ──> pause: whoever fails waits, and one asks again every 1, 2, 4 .. 30 s ──> an answer with a score: all ask again, and go on
                                                       └──> patience is over: `spent` is set, and `why` says of what

    Without patience it is spent at once; a budget of 1.0 never is.
    """

    def __init__(self, most: float = 1.0, patience: float = 0.0, *, first: float = 1.0) -> None:
        self.most, self.patience, self.first = most, patience, first
        self.spent, self.why, self.recent = asyncio.Event(), "", RecentOutcomes()
        self.over = asyncio.Event()  # the pause, one way or the other
        self.since: float | None = None  # when it began
        self.asked = self.first  # seconds until one asks again
        self.asking = False

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing has to be counted: any share may fail."""
        return self.most >= 1

    def count_score(self, score: Score | Failed | None) -> None:
        failed = isinstance(score, Failed)
        self.recent.append(f"{score.reason} {score.detail}".strip() if isinstance(score, Failed) else "")
        if failed and not self.why and self.since is None and (share := self.recent.failures_above(self.most)):
            told = (
                f"{share.failed} of the last {share.of} answers have no score, {share.times} of them: {share.most:.300}"
            )
            self._give_up(told) if not self.patience else self._begin_pause(told)

    async def should_retry(self, score: Score | Failed | None) -> bool:
        """Whether to ask for a score once more; counts what there is. While the run pauses it
        returns when it is this one's turn, or all is well.
        """
        if not isinstance(score, Failed):
            self._end_pause()
        if self.since is None:
            self.count_score(score)
        while self.since is not None and not self.why:
            if running_time() - self.since > self.patience:
                self._give_up(f"{self.told}; it has waited {self.patience:g} s (task.reward.patience)")
            elif not self.asking:
                return await self._ask_again()
            else:
                await self._wait_until_over(self.asked)
                if self.since is None:
                    return True
        return False

    async def _ask_again(self) -> bool:
        self.asking = True
        try:
            await self._wait_until_over(self.asked)
            self.asked = min(2 * self.asked, 30 * self.first)
        finally:
            self.asking = False
        return True

    async def _wait_until_over(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            pass

    def _begin_pause(self, told: str) -> None:
        self.told, self.since = told, running_time()
        self.over.clear()
        emit(
            Warned(
                f"paused: {told}. Whatever failed is asked for again until it works, for {self.patience:g} s "
                f"(task.reward.patience); then the run stops"
            )
        )

    def _end_pause(self) -> None:
        if self.since is not None and not self.why:
            emit(Warned(f"going on after a pause of {running_time() - self.since:.0f} s: there are scores again"))
            self.since, self.asked, self.recent = None, self.first, RecentOutcomes()
            self.over.set()

    def _give_up(self, told: str) -> None:
        self.why = told
        self.over.set()
        self.spent.set()
