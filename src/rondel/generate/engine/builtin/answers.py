"""From a request to its answer, beside the steps of the engine: what cannot be answered is refused before it waits,
what a step drew is on file before anyone sees it and read again after a crash (law 15), and goes token by token to
those who listen, whole at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rondel.core.errors import EngineError, UserError
from rondel.core.protocols import Progress
from rondel.core.types import Completion, FinishReason, Request
from rondel.generate.engine.builtin.channels import open_channels

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.pages import PageAllocator
    from rondel.generate.engine.builtin.request import SequenceState
    from rondel.generate.engine.builtin.runner import ModelRunner
    from rondel.generate.engine.builtin.scheduler import Scheduler
    from rondel.models.loaded_model import LoadedModel
    from rondel.runtime.journal.wal import Drawn, Routes, TokenLog

FARTHEST = (1 << 16) - 2  # position whose number plus one fits 16 bits


class RequestValidator:
    """Checks of a request against the model, its cache and its draft model.

    leaving  adapters that are being removed: who asks for them would be in a step without them
    """

    def __init__(self, loaded: LoadedModel, runner: ModelRunner) -> None:
        self.loaded, self.runner = loaded, runner
        self.leaving = set[str]()

    def check_generation(self, request: Request) -> None:
        prompt, new = len(request.tokens), request.sampling.max_tokens
        if not prompt:
            raise UserError("an empty prompt: a language model needs at least one token to go on from")
        if prompt + new > self.loaded.max_context:
            raise UserError(
                f"{prompt} prompt tokens + max_tokens {new} exceed the model's context of {self.loaded.max_context}: "
                "shorten the prompt or lower max_tokens"
            )
        if prompt + new > self.runner.pages.count:
            raise UserError(
                f"{prompt} prompt tokens + max_tokens {new} do not fit into {self.runner.pages.count} cache pages: "
                f"raise engine.kv_pages"
            )
        if self.loaded.indexers and "experts" in request.wants and prompt + new > FARTHEST:
            raise UserError(
                f"{prompt} prompt tokens + max_tokens {new}: the keys that indexers choose are recorded up to position "
                f"{FARTHEST}; shorten the prompt, lower max_tokens, or set trainer.routing_replay = false"
            )
        self._check_tokens(request)

    def check_scoring(self, request: Request) -> None:
        if request.wants:
            raise UserError(f"score gives log-probabilities and nothing else, not {', '.join(sorted(request.wants))}")
        if not 1 <= len(request.tokens) <= self.loaded.max_context:
            raise UserError(
                f"{len(request.tokens)} tokens cannot be scored; this model carries 1 to {self.loaded.max_context}"
            )
        self._check_tokens(request)

    def _check_tokens(self, request: Request) -> None:
        """A token that does not exist would break the step of everyone; a wish that nobody reads would be a lie."""
        vocab = self.loaded.token_count
        named = [*request.sampling.logit_bias, *(s for s in request.sampling.stop if isinstance(s, int))]
        if strange := [t for t in named if not 0 <= t < vocab]:
            raise UserError(f"logit_bias or stop names token {strange[0]}: this model's tokens are 0 to {vocab - 1}")
        if strange := [t for t in request.tokens if not 0 <= t < vocab]:
            raise UserError(
                f"token {strange[0]} does not exist: this model's tokens are 0 to {vocab - 1}. Was the prompt made by "
                f"another tokenizer?"
            )
        if request.media:
            self.runner.eyes.check_request(request)
            if self.runner.draft is not None:
                raise UserError(
                    "images beside a draft model, which reads text alone: set engine.speculative.kind to 'ngram' or "
                    "'off'"
                )
        self.check_adapter(request)
        if "experts" in request.wants and not self.runner.records:
            why = "it was made without routes=True" if self.loaded.routers else "this model is dense"
            raise UserError(f"the engine records no routed experts: {why}")
        if wanted := request.wants - {"experts"}:
            open_channels(wanted, vocab)

    def check_adapter(self, request: Request) -> None:
        if request.adapter:
            self.check_served(request.adapter)

    def check_served(self, adapter: str) -> None:
        served = [] if self.loaded.bank is None else sorted(self.loaded.bank.served.keys() - self.leaving)
        if adapter not in served:
            raise UserError(
                f"the engine serves no adapter '{adapter}'; it serves "
                f"{', '.join(served) if served else 'the model alone'}"
            )


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
