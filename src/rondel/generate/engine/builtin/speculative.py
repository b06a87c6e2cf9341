"""Speculative decoding: cheap guesses at the next tokens, all looked at in one pass of the
model, and only what it would have drawn stays.

    tokens   ... written | newest | guess guess guess        1 + k new tokens, logits at each of them
    drawn                | yes    | yes   no                 two guesses agree: three tokens in one
                         step, the third guess is dropped

lookup   what followed the longest earlier occurrence of the newest tokens (arXiv:2304.04487; no
         model, nothing to train). Such a guess is certain of itself, so accepting it with min(1,
         p/q) = p(x) is the same as drawing from
         p and looking whether x came out: the tokens are those of plain decoding, noise included.
draft    a smaller model draws x from q; x stays with probability min(1, p(x)/q(x)), else the
         token is drawn from what p has more than q: (p - q)+ normalised (arXiv:2211.17192,
         arXiv:2302.01318). The tokens are others,
         their distribution is p exactly.

The stored logprob is always log p (law 4). V vocabulary · R rows · k guesses of one round
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rondel.core.errors import ConfigError
from rondel.generate.engine.builtin.ngrams import NgramIndex

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.draft import DraftModel
    from rondel.generate.engine.builtin.request import SequenceState, StepPlan
    from rondel.generate.engine.builtin.scheduler import Scheduler
    from rondel.models.loaded_model import LoadedModel

MEMORY = 0.99  # what a step's measurement keeps of its weight one step later
PROBE = 32  # steps after which the other choice is tried once


# -- guesses without a model ---------------------------------------------------------------------


# -- which guesses stay --------------------------------------------------------------------------


def expected_tokens(alpha: float, k: int) -> float:
    """Mean tokens of a round of k guesses, each accepted with probability alpha: 1 + alpha + ... + alpha^k."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


# -- whether it pays -----------------------------------------------------------------------------


@dataclass(slots=True)
class SpeculationController:
    """How many guesses are worth their time: the k that maximises tokens a second, 0 where plain decoding is faster.

    tokens of a step    running + guessing · (expected(alpha, k) - 1)
    seconds of a step   a + b · (running + guessing · k) + c · k        a, b by least squares, c
                        of the draft; old steps fade

    Every PROBE steps the other choice is made once: otherwise neither a, b nor alpha could be known again.
    Example: Pays(4).choose(running=1, guessing=1) -> 4, before anything was measured.
    """

    k: int  # the most
    alpha: float = 0.7  # share of the looked-at guesses that stay
    a: float = 1.0
    b: float = 0.0  # until two kinds of steps were seen, more tokens cost nothing: it tries
    c: float = 0.0
    steps: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of 1, x, y, x², xy

    def choose_draft_length(self, running: int, guessing: int) -> int:
        """Asked once a step that could guess; `guessing` of the `running` requests have something to try."""
        self.steps += 1
        best = max(range(self.k + 1), key=lambda k: (self._token_rate(k, running, guessing), -k))
        if self.steps % PROBE == 0:
            return 0 if best else max(1, self.k // 2)
        return best

    def _token_rate(self, k: int, running: int, guessing: int) -> float:
        tokens = running + guessing * (expected_tokens(self.alpha, k) - 1)
        return tokens / (self.a + self.b * (running + guessing * k) + self.c * k)

    def record_step_time(self, tokens: int, seconds: float, *, k: int = 0, draft: float = 0.0) -> None:
        """A step that only decoded fed so many tokens; `draft` seconds of it were spent on guessing k deep."""
        for i, value in enumerate((1.0, tokens, seconds - draft, tokens * tokens, tokens * (seconds - draft))):
            self._sums[i] = MEMORY * self._sums[i] + value
        n, x, y, xx, xy = self._sums
        spread = xx / n - (x / n) ** 2
        if spread > 0.05:
            self.b = max(0.0, (xy / n - x / n * y / n) / spread)
        self.a = max(1e-9, y / n - self.b * x / n)
        if k:
            self.c += (draft / k - self.c) * (0.2 if self.c else 1.0)

    def update_acceptance(self, looked_at: int, accepted: int) -> None:
        """Guesses up to and with the first rejected one were looked at."""
        if looked_at:
            self.alpha += (1 - 0.95**looked_at) * (accepted / looked_at - self.alpha)


# -- of one engine -------------------------------------------------------------------------------


class SpeculativeDecoder:
    """Guesses for the requests of a step, and what became of them. Without a draft they
    come from the request's own tokens.
    """

    def __init__(self, k: int, draft: DraftModel | None = None, *, always: bool = False) -> None:
        """`always` guesses whether it pays or not: for tests and measurements."""
        self.pays, self.draft, self.always = SpeculationController(k), draft, always
        self.rounds = self.proposed = self.accepted = 0  # counters
        self.told = (0, 0, 0)  # as an event last told them

    def attach_model(self, loaded: LoadedModel, pages: int) -> None:
        """For the engine of this model."""
        for which in [loaded, *([self.draft.loaded] if self.draft else [])]:
            if which.state_bytes:
                raise ConfigError(
                    f"engine.speculative: '{which.name}' has recurrent layers, whose state cannot be taken back when a "
                    f'guess is wrong; set engine.speculative.kind = "off"'
                )
        if self.draft is not None:
            self.draft.allocate_pools(loaded, pages)

    def propose_drafts(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Reserve pages for guesses where there is room for nothing more urgent; look-ups are
        made here, a draft's guesses on its device.
        """
        if self.draft is not None and self.draft.broken:
            return
        guesses: list[tuple[SequenceState, int, list[int]]] = []
        for live in plan.decoding:
            # the last token of a round is never a guess
            most = min(self.pays.k, live.request.sampling.max_tokens - live.written - 1)
            if most < 1 or not live.draws_plainly:
                continue
            if self.draft is not None:
                guesses.append((live, most, []))
                continue
            live.grams = live.grams or NgramIndex()
            if guess := live.grams.draft_tokens(live.tokens, most):
                guesses.append((live, most, guess))
        if not guesses:
            return
        k = self.pays.k if self.always else self.pays.choose_draft_length(len(plan.decoding), len(guesses))
        for live, most, guess in guesses:
            n = scheduler.caches[live.owner].reserve_ahead(live, min(k, most))
            live.guess = guess[:n]

    def record_step(self, plan: StepPlan, drawn: list[tuple[SequenceState, int, float]], seconds: float) -> None:
        """What the step brought, before it is delivered."""
        came: dict[SequenceState, int] = {}
        for live, _, _ in drawn:
            came[live] = came.get(live, 0) + 1
        guessed = [live for live in plan.decoding if live.guess]
        for live in guessed:
            n = came[live] - 1
            self.rounds += 1
            self.proposed += len(live.guess)
            self.accepted += n
            self.pays.update_acceptance(min(n + 1, len(live.guess)), n)
        if not plan.chunks:
            deepest = max((len(live.guess) for live in guessed), default=0)
            self.pays.record_step_time(
                plan.tokens,
                seconds,
                k=deepest if self.draft else 0,
                draft=self.draft.seconds if self.draft and guessed else 0.0,
            )

    def take_new_counts(self) -> tuple[int, int, int]:
        """(rounds, proposed, accepted) since it was last asked."""
        now = (self.rounds, self.proposed, self.accepted)
        rounds, proposed, accepted = (a - b for a, b in zip(now, self.told))
        self.told = now
        return rounds, proposed, accepted
