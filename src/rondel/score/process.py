"""A process reward: each step of the answer gets a value, from a model with a head
for tokens or from a function of yours.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.registry import import_attribute, one_of
from rondel.core.types import Failed, Score, Task, Trajectory, Turn
from rondel.score.answer_text import asked_of, turns_of
from rondel.score.model import RewardModel
from rondel.text.unicode import valid_unicode

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
    "last": lambda values: values[-1],
    "sum": math.fsum,
}


def steps_of(text: str, separator: str) -> list[tuple[str, int]]:
    """(step, its end in characters): steps_of("a\\n\\nbc", "\\n\\n") -> [("a", 1), ("bc", 5)]. Empty steps are none."""
    found, at = [], 0
    for piece in text.split(separator):
        end = at + len(piece)
        if piece.strip():
            found.append((piece, end))
        at = end + len(separator)
    return found


class TokenModel(RewardModel):
    """A token classifier; of two labels the second is "right", and its probability is the value."""

    auto = "AutoModelForTokenClassification"

    def _score_head(self) -> Any:
        head = getattr(self.model, "score", None)
        if self.model.config.num_labels not in (1, 2) or head is None or self.body is None:
            raise ConfigError(
                f"process reward model {self.path!r} is a {type(self.model).__name__} with "
                f"{self.model.config.num_labels} labels; a decoder with one or "
                "two labels is needed, and a head called 'score'"
            )
        return head

    def reward_values(self, said_NK: Any) -> Any:
        return said_NK[:, 0] if said_NK.shape[1] == 1 else said_NK.softmax(-1)[:, 1]


class ProcessReward:
    """The aggregate of the steps' values, or, with `tokenizer`, each value at the last token of its step.

    path or scorer   a token classifier, or "module:name": `(steps, task) -> values`, plain or async
    separator        of steps, and what the model reads after each: its value stands at that token
    aggregate        min, mean, last or sum. Placed values add up to it, so only mean and sum can be placed
    tokenizer        of the policy, by which a character's place becomes a token's
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        scorer: str | None = None,
        separator: str = "\n\n",
        aggregate: str = "min",
        tokenizer: str | None = None,
        together: int = 64,
        **settings: Any,
    ) -> None:
        one_of("process reward: aggregate", aggregate, AGGREGATES)
        if (path is None) == (scorer is None) or (scorer and settings):
            raise ConfigError(
                "reward 'process' needs one of path = 'model' (and its settings) or scorer = 'module:name'"
            )
        if not separator:
            raise ConfigError("reward 'process': separator is empty; steps are split by it")
        if tokenizer and aggregate not in ("mean", "sum"):
            raise ConfigError(
                f"reward 'process': values that are placed at tokens add up, so aggregate = '{aggregate}' needs no "
                f"tokenizer; or use sum or mean"
            )
        self.separator, self.aggregate, self.together = separator, aggregate, max(2, together)
        self.scorer = import_attribute("process scorer", scorer) if scorer else None
        self.model = TokenModel(path=path, together=together, **settings) if path else None
        self.counts: dict[str, float] = self.model.counts if self.model else {}
        self.naps = self.model is not None and self.model.naps
        self.tokenizer: Any = None
        if tokenizer:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def load_to_device(self) -> None:
        if self.model:
            self.model.load_to_device()

    async def wake(self) -> None:
        if self.model:
            await self.model.wake()

    async def sleep(self) -> None:
        if self.model:
            await self.model.sleep()

    @property
    def memory(self) -> int:
        return self.model.memory if self.model else 0

    async def __call__(self, trajectory: Trajectory, task: Task) -> Score | Failed:
        turns = turns_of(trajectory)
        of = [steps_of(turn.text, self.separator) if turn.written else [] for turn in turns]
        steps = [step for own in of for step in own]
        if not steps:
            return Failed("answer has no steps")
        if self.scorer:
            returned = await asyncio.to_thread(self.scorer, [step for step, _ in steps], task)
            values = await returned if inspect.isawaitable(returned) else returned
        else:
            values = await self._by_model(asked_of(trajectory, task), turns, of)
        if isinstance(values, Failed):
            return values
        values = list(values)
        if len(values) != len(steps) or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            return Failed("steps were not valued", f"{len(steps)} steps got {values!s:.120}")
        total = AGGREGATES[self.aggregate](values)
        if self.tokenizer is None or not trajectory.tokens:
            return Score(total)
        share = 1.0 if self.aggregate == "sum" else 1 / len(values)
        places = [
            place
            for turn, own in zip(turns, of)
            for place in self._step_tokens(trajectory, turn, [end for _, end in own])
        ]
        return Score(total, steps=tuple((place, share * value) for place, value in zip(places, values)))

    async def _by_model(
        self, asked: list[dict[str, str]], turns: list[Turn], of: list[list[tuple[str, int]]]
    ) -> list[float] | Failed:
        """The value of a step stands at the last token of the separator behind it. What was
        asked stands before the first step, and what tools and users said between the turns where they said it."""
        assert self.model
        model, special = self.model, self.model.special
        question = "\n".join(message["content"] for message in asked)
        ids = special.encode(
            special.cover_control_tokens(valid_unicode(question)) + self.separator, add_special_tokens=True
        )
        ends = []
        for turn, steps in zip(turns, of):
            for text in [step for step, _ in steps] if turn.written else [turn.text]:
                ids += special.encode(special.cover_control_tokens(valid_unicode(text)) + self.separator)
                ends += [len(ids) - 1] * turn.written
        if len(ids) > model.most:
            return Failed(
                "text does not fit the reward model", f"it has {len(ids)} tokens, and the model reads {model.most}"
            )
        said = await model._batcher(ids)
        return [said[end] for end in ends]

    def _step_tokens(self, trajectory: Trajectory, turn: Turn, ends: list[int]) -> list[int]:
        """For each character of a turn behind a step, the token that the policy wrote it with.
        Tokens are decoded, never the text encoded.
        """
        written = [at for at in range(turn.start, turn.end) if trajectory.mask[at]] if ends else []
        tokens = [trajectory.tokens[at] for at in written]
        counts = range(1, len(written) + 1)
        places = [
            bisect_left(counts, end, key=lambda n: len(self.tokenizer.decode(tokens[:n], skip_special_tokens=True)))
            for end in ends
        ]
        return [written[min(place, len(written) - 1)] for place in places]
