"""The token log of steps: after a crash a request goes on from the step that it had reached (law 15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rondel.generate.engine.stepwise.step_request import StepRequest
    from rondel.runtime.journal.wal import TokenLog


class StepLog:
    """Each step is a row of the log, its token the number of the step. What it drew stands where a mixture's routes do,
    [1, 1, 2·D] halves of its float32 numbers; without a log nothing is kept.
    """

    def __init__(self, log: TokenLog | None) -> None:
        self.log = log

    def restore(self, chain: StepRequest) -> None:
        """Mark a new chain, and give it the steps that it had drawn in an earlier life."""
        request = chain.request
        if self.log is None or not request.key or request.namespace or request.wants:
            return
        chain.mark = self.log.context_hash(chain.prompt)
        for found in self.log.recall_tokens(request.key, chain.mark, first=chain.step):
            if chain.is_whole or found.routes is None or found.routes[0] != chain.step:
                break
            halves = np.asarray(found.routes[1]).astype(np.uint16).reshape(-1)
            if len(halves) != 2 * len(chain.point):
                break  # of a run with another model
            chain.append(halves.view(np.float32), found.logprob, found.version)

    def record_step(self, chains: Sequence[StepRequest], drawn: list[tuple[np.ndarray, float]], version: int) -> None:
        """The step that these chains take together, before anyone sees it."""
        if self.log is None:
            return
        rows, points = [], []
        for chain, (point, density) in zip(chains, drawn, strict=True):
            if chain.mark:
                rows.append((chain.request.key, chain.step, chain.mark, density, chain.step, version))
                halves = np.ascontiguousarray(point, np.float32).view(np.uint16)
                points.append((chain.step, halves.reshape(1, 1, -1)))
        self.log.write(rows, points)

    def record_version(self, version: int, root: str) -> None:
        if self.log is not None:
            self.log.record_version(version, root)
