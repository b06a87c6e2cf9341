"""How much may fail before a run stops: what is left after failures is not trained for ever as if nothing were wrong (law 11)."""

from __future__ import annotations

import asyncio

from rondel.words.recent import Recent
from rondel.words.types import Failed, Score


class Failures:
    """`Failures(0.2)`: `spent` is set when more than a fifth of the last 200 answers have no score; 1.0 never is more."""

    def __init__(self, most: float = 1.0) -> None:
        self.most, self.spent, self.why, self.recent = most, asyncio.Event(), "", Recent()

    def count(self, score: Score | Failed | None) -> None:
        failed = isinstance(score, Failed)
        self.recent.add(f"{score.reason} {score.detail}".strip() if isinstance(score, Failed) else "")
        if failed and not self.why and (share := self.recent.above(self.most)):
            self.why = f"{share.failed} of the last {share.of} answers have no score, {share.times} of them: {share.most:.300}"
            self.spent.set()
