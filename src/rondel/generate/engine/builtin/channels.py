"""What a request may ask for beside its tokens (`Request.wants`). None of it changes what is drawn.

raw_logprobs      of the drawn tokens under the model alone: temperature 1, before anything changed the logits
top_logprobs:K    the K most likely tokens there, with their log-probabilities
prompt_logprobs   of the given tokens, computed with one extra pass over the prompt, whatever the cache holds
prompt_top_logprobs:K    the K most likely tokens at each of them, from the same pass
support           the ids that a token was drawn from where truncation, a grammar or min_tokens
                  cut some off
behavior_top:K    the K most likely tokens of the distribution that was drawn from, temperature and truncation
                  included, with their log-probabilities
behavior_draws:M  M more draws from that distribution, with replacement, by noise of their own, in the same column
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.errors import UserError
from rondel.generate.engine.builtin.sampler import draw_beside, draw_more

MOST_RECORDED = 1 << 20  # tokens beside each draw; of a smaller vocabulary all are the likeliest
# wants of so many
COUNTED = {
    "top_logprobs": "k",
    "prompt_top_logprobs": "prompt_k",
    "behavior_top": "behavior_k",
    "behavior_draws": "draws",
}
COLUMN = {"behavior_draws": "behavior_top"}  # whose answer stands in another's column


@dataclass(slots=True)
class TokenChannels:
    """A list for each that was asked for, under the names of `Completion`."""

    raw_logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    support: list[list[int] | None] | None = None
    behavior_top: list[tuple[np.ndarray, np.ndarray]] | None = None
    k: int = 0
    behavior_k: int = 0
    prompt_k: int = 0
    draws: int = 0

    @property
    def reads_raw(self) -> bool:
        return self.raw_logprobs is not None or self.top_logprobs is not None

    def token_lists(self) -> dict[str, Any]:
        names = ("raw_logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "support", "behavior_top")
        return {name: getattr(self, name) for name in names}


def open_channels(wants: frozenset[str], vocab: int) -> TokenChannels:
    """A wish that nobody reads would be a lie, so an unknown one is an error."""
    channels, unknown = TokenChannels(), []
    for want in sorted(wants):
        name, _, number = want.partition(":")
        if name in COUNTED:
            most = MOST_RECORDED if name.startswith("behavior") else vocab
            if not (number.isdecimal() and 1 <= int(number) <= most):
                raise UserError(f"'{want}': write how many, as in {name}:5, at least 1 and at most {most}")
            if getattr(channels, COLUMN.get(name, name)) is not None:
                raise UserError(f"'{want}' beside another want that fills the same column: ask for one of them")
            setattr(channels, COLUMN.get(name, name), [])
            setattr(channels, COUNTED[name], int(number))
        elif want in ("raw_logprobs", "prompt_logprobs", "support"):
            setattr(channels, want, [])
        else:
            unknown.append(want)
    if unknown:
        raise UserError(
            f"the built-in engine has no {', '.join(unknown)}; it has raw_logprobs, top_logprobs:K, prompt_logprobs, "
            f"prompt_top_logprobs:K, support, behavior_top:K, behavior_draws:M"
        )
    return channels


def note_raw(logprobs: Tensor, tokens: list[int], channels: list[TokenChannels]) -> None:
    """Raw log-probabilities [R, V], and the tokens that were drawn in these rows."""
    values, ids = logprobs.topk(max(1, max(c.k for c in channels)))
    for row, top, best, token, channel in zip(logprobs, values.tolist(), ids.tolist(), tokens, channels):
        if channel.raw_logprobs is not None:
            channel.raw_logprobs.append(float(row[token]))
        if channel.top_logprobs is not None:
            channel.top_logprobs.append(list(zip(best, top))[: channel.k])


def note_behavior(weights: Tensor, channels: TokenChannels, key: int, t: int) -> None:
    """Of unnormalised weights [V] that token t of a sample was drawn with: the likeliest, fewer where fewer could be
    drawn; or more draws.
    """
    if channels.behavior_top is None:
        return
    if channels.draws:
        drawn, logs = draw_more(weights, draw_beside(key, t, channels.draws))
        channels.behavior_top.append((drawn.int().cpu().numpy(), logs.float().cpu().numpy()))
        return
    values, ids = weights.topk(min(channels.behavior_k, len(weights)))
    logprobs = (values.double() / weights.sum(dtype=torch.float64)).log()
    found = values > 0
    channels.behavior_top.append((ids[found].int().cpu().numpy(), logprobs[found].float().cpu().numpy()))
