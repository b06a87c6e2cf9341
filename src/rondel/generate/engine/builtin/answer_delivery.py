"""Delivery of what was drawn: token by token to those who listen, whole at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rondel.core.errors import EngineError
from rondel.core.protocols import Progress
from rondel.core.types import Completion, FinishReason

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.request import SequenceState
    from rondel.generate.engine.builtin.scheduler import Scheduler
    from rondel.models.loaded_model import LoadedModel


def written_so_far(sequences: Iterable[SequenceState], known: Mapping[int, int]) -> Progress:
    """Of those whose keys are asked for: what each has written behind the tokens that are known, and where it begins.
    One that has fewer than are known, because it was begun again, is told whole.
    """
    found: Progress = {}
    for live in sequences:
        if (key := live.request.key) in known:
            first = live.prompt - live.request.continuation
            n = min(known[key], len(live.tokens) - first)
            n = n if n == known[key] else 0
            found[key] = (n, live.tokens[first + n :])
    return found


class AnswerDelivery:
    """Delivery between two steps; a sequence that ends leaves the scheduler here."""

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler) -> None:
        self.loaded, self.scheduler = loaded, scheduler

    def deliver_token(self, live: SequenceState, token: int, logprob: float, version: int) -> None:
        if live.fault is not None:
            self.scheduler.release_sequence(live, version)
            return live.finish(live.fault)
        live.first = live.first or time.perf_counter()
        live.append_token(token, logprob, version)
        reason = live.check_finish()
        if live.heard is not None:
            top = live.channels.top_logprobs if live.channels is not None else None
            try:
                live.heard(token, logprob, version, top[-1] if top else None)
            except Exception as error:  # a listener that raises ends its own request, not the step of everyone
                live.finish(EngineError(f"what listens to the tokens broke: {type(error).__name__}: {error}"))
                reason = "abort"
        if reason:
            self.finish_sequence(live, reason, version)

    def finish_sequence(self, live: SequenceState, reason: FinishReason, version: int) -> None:
        live.keep_routes(self.scheduler.pages.routes)
        live.append_version_span(version)
        completion = self.build_completion(live, reason)
        self.scheduler.release_sequence(live, version)
        live.finish(completion)

    def build_completion(self, live: SequenceState, reason: FinishReason) -> Completion:
        """Its text is decoded by whoever waits for it, unless a stop string has cut it."""
        completion = live.to_completion(reason)
        if "experts" in live.request.wants:
            completion.experts = live.routes
        completion.text = live.said
        return completion
