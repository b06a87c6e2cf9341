"""Where the requests of a replayed run stand in the engine: under every version they are taken exactly as far as in
the recorded run.

A request's `lines` are the places where it stood still then: (version, tokens computed, tokens written). One without
lines is not replayed, and an engine that has seen none with lines has no gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING

from rondel.core.errors import LawError

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.request import SequenceState


class ReplayGate:
    """Gate of the sequences that run and wait; `retract(live,
    version)` sends one back to the queue without its cache."""

    def __init__(
        self,
        running: Iterable[SequenceState],
        waiting: Iterable[SequenceState],
        retract: Callable[[SequenceState, int], None],
    ) -> None:
        self._running, self._waiting, self._retract = running, waiting, retract

    def is_behind(self, version: int) -> bool:
        """Whether anyone has not yet come as far as in the run that is replayed."""
        everyone = chain(self._running, self._waiting)
        return any(live.request.lines is not None and not live.stands_still(version) for live in everyone)

    def follow_lines(self, version: int) -> None:
        """Requests make for the next line behind the one they have reached; where their cache was lost, it is
        lost again.
        """
        for live in [*self._running, *self._waiting]:
            for at, computed, written in (live.request.lines or ())[live.line :]:
                if at > version or (at == version and (computed or live.written != written)):
                    break
                if at < version and (live.computed_tokens, live.written) != (computed, written):
                    raise LawError(
                        f"version {version} came when a request stood at {live.computed_tokens} computed, "
                        f"{live.written} written tokens; in the run that is replayed version {at} took it to "
                        f"{computed}, {written}"
                    )
                if live.computed_tokens and not computed:
                    self._retract(live, version)
                live.line += 1
