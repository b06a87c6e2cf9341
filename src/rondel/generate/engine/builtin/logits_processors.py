"""What changes logits before the temperature, in this order: bias, penalties, grammar,
min_tokens. Only rows that ask for it are touched.

Indices are flat: `at` are rows of the logits, `ids` tokens, one entry for each value that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rondel.generate.engine.builtin.grammar import apply_grammar_masks
from rondel.generate.engine.builtin.request import SequenceState

Rows = list[tuple[int, SequenceState]]


def process_logits(logits: Tensor, rows: Rows) -> None:
    """Logits [B, V] in place; `rows` are those whose sampling is shaped."""
    add_bias(logits, [(row, live) for row, live in rows if live.request.sampling.logit_bias])
    apply_penalties(logits, [(row, live) for row, live in rows if live.request.sampling.has_penalties])
    broken = apply_grammar_masks(
        logits, [(row, live.constraint, _drawn_tokens(live)) for row, live in rows if live.constraint is not None]
    )
    for row, live in rows:
        live.fault = broken.get(row)
    forbid_ends(
        logits, [(row, live) for row, live in rows if live.written < live.request.sampling.min_tokens and live.ends]
    )


def add_bias(logits: Tensor, rows: Rows) -> None:
    if rows:
        at, ids = _flat_indices(logits, rows, lambda live: live.request.sampling.logit_bias)
        values = [value for _, live in rows for value in live.request.sampling.logit_bias.values()]
        logits[at, ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def apply_penalties(logits: Tensor, rows: Rows) -> None:
    """Repetition: l / r where l > 0, l * r elsewhere, for every token of the context (as transformers' processor).
    Presence: l - p once, frequency: l - f for each time, for the tokens that this sample drew, continued ones included.
    """

    def penalty_amounts(
        name: str, rows: Rows, tokens: Callable[[SequenceState], list[int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        at, ids = _flat_indices(logits, rows, tokens)
        amounts = [getattr(live.request.sampling, name) for _, live in rows for _ in tokens(live)]
        return at, ids, torch.tensor(amounts, dtype=logits.dtype, device=logits.device)

    # A token that occurs twice is read before it is written, so both occurrences write the same value.
    if repeated := [(row, live) for row, live in rows if live.request.sampling.repetition_penalty != 1]:
        at, ids, penalty = penalty_amounts("repetition_penalty", repeated, lambda live: live.tokens)
        values = logits[at, ids]
        logits[at, ids] = torch.where(values > 0, values / penalty, values * penalty)
    if present := [(row, live) for row, live in rows if live.request.sampling.presence_penalty and live.noise_counter]:
        at, ids, penalty = penalty_amounts("presence_penalty", present, _drawn_tokens)
        logits[at, ids] = logits[at, ids] - penalty
    if frequent := [
        (row, live) for row, live in rows if live.request.sampling.frequency_penalty and live.noise_counter
    ]:
        at, ids, penalty = penalty_amounts("frequency_penalty", frequent, _drawn_tokens)
        logits.index_put_((at, ids), -penalty, accumulate=True)


def forbid_ends(logits: Tensor, rows: Rows) -> None:
    """Before min_tokens no end token is drawn, unless a grammar leaves nothing else: its text is whole then."""
    if not rows:
        return
    at, ids = _flat_indices(logits, rows, lambda live: live.ends)
    before = logits[at, ids]
    logits[at, ids] = float("-inf")
    whole = {row for row, live in rows if live.constraint is not None and logits[row].amax() == float("-inf")}
    if whole:
        back = torch.tensor([row in whole for row in at.tolist()], device=logits.device)
        logits[at[back], ids[back]] = before[back]


def _drawn_tokens(live: SequenceState) -> list[int]:
    return live.tokens[len(live.tokens) - live.noise_counter :]


def _flat_indices(
    logits: Tensor, rows: Rows, tokens: Callable[[SequenceState], Iterable[int]]
) -> tuple[Tensor, Tensor]:
    lists = [(row, list(tokens(live))) for row, live in rows]
    at = [row for row, ids in lists for _ in ids]
    return torch.tensor(at, device=logits.device), torch.tensor(
        [i for _, ids in lists for i in ids], device=logits.device
    )
