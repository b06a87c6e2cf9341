"""The engine's side of the token log: what every step drew is on file before anyone sees it, and read again after a
crash (law 15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rondel.core.types import FinishReason

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.pages import PageAllocator
    from rondel.generate.engine.builtin.request import SequenceState
    from rondel.runtime.journal.wal import Drawn, Routes, TokenLog


class SequenceLog:
    """Tokens of marked sequences, written and read again; without a log no sequence is marked."""

    def __init__(self, log: TokenLog | None, pages: PageAllocator) -> None:
        self.log, self.pages = log, pages

    def mark_context(self, live: SequenceState) -> None:
        """From here on its tokens are logged, if another life could ask for them."""
        request = live.request
        if self.log is not None and request.key and not request.namespace and not request.wants - {"experts"}:
            live.mark = self.log.context_hash(live.cache_keys[: live.prompt - request.continuation])

    def restore_tokens(self, live: SequenceState) -> FinishReason | None:
        """The tokens that this sample had drawn before a crash, and their routes if it wants
        them. -> why it needs no more, if so.
        """
        if self.log is None or not live.mark:
            return None
        pieces: list[np.ndarray] = []
        reason = None
        for found in self.log.recall_tokens(live.request.key, live.mark, first=live.request.continuation):
            if "experts" in live.request.wants:
                if found.routes is None or found.routes[0] > live.logged:
                    break  # it was drawn when nobody wanted them
                # the first of a continued piece tells those before it once more: the earliest stay
                first, routes = found.routes
                pieces.append(routes[live.logged - first :])
                live.logged = max(live.logged, first + len(routes))
            live.restore_token(found.token, found.logprob, found.version)
            if reason := live.check_finish():
                break
        if pieces:
            live.routes = np.concatenate(pieces).astype(np.uint16)
        return reason

    def record_step(self, drawn: list[tuple[SequenceState, int, float]], version: int) -> None:
        """All tokens of the step. Guesses that are drawn behind an end are passed over when they are read."""
        if self.log is None:
            return
        more: dict[SequenceState, int] = {}
        rows: list[Drawn] = []
        routes: list[Routes | None] = []
        for live, token, logprob in drawn:
            if live.mark and live.fault is None:
                more[live] = nth = more.get(live, -1) + 1
                rows.append((live.request.key, live.noise_counter + nth, live.mark, logprob, token, version))
                routes.append(self._routes_of(live, live.computed_tokens + nth))
        self.log.write(rows, routes)

    def _routes_of(self, live: SequenceState, upto: int) -> Routes | None:
        """Of what was computed of it since the last token that was logged."""
        if "experts" not in live.request.wants or self.pages.routes is None:
            return None
        first, live.logged = live.logged, upto
        return first, live.routes_from(first, upto, self.pages.routes)

    def record_version(self, version: int, root: str) -> None:
        if self.log is not None:
            self.log.record_version(version, root)
