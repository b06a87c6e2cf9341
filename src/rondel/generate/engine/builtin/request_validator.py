"""Requests that the engine could not answer as they are asked, refused before they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.core.errors import UserError
from rondel.core.types import Request
from rondel.generate.engine.builtin.channels import open_channels

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.runner import ModelRunner
    from rondel.models.loaded_model import LoadedModel

FARTHEST = (1 << 16) - 2  # position whose number plus one fits 16 bits


class RequestValidator:
    """Checks of a request against the model, its cache and its draft model."""

    def __init__(self, loaded: LoadedModel, runner: ModelRunner) -> None:
        self.loaded, self.runner = loaded, runner

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
        if request.adapter and (self.loaded.bank is None or request.adapter not in self.loaded.bank.served):
            served = [] if self.loaded.bank is None else sorted(self.loaded.bank.served)
            raise UserError(
                f"the engine serves no adapter '{request.adapter}'; it serves "
                f"{', '.join(served) if served else 'the model alone'}"
            )
        if "experts" in request.wants and not self.runner.records:
            why = "it was made without routes=True" if self.loaded.routers else "this model is dense"
            raise UserError(f"the engine records no routed experts: {why}")
        if wanted := request.wants - {"experts"}:
            open_channels(wanted, vocab)
