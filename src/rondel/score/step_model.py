"""A model that values the steps of an answer, and goes on with a text of which it has read the beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import ConfigError
from rondel.score.model import CLOSE, RewardModel


@dataclass(eq=False)
class GrowingText:
    """A text that grows: its tokens so far, what the head says after each, and their keys and values. Where these were
    given up, because others need the memory, the next tokens are computed with all before them.
    """

    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    cache: Any = None

    def known_of(self, ids: list[int]) -> int:
        """How many of these tokens are valued: all of its own if they go on from them, else none."""
        n = len(self.ids)
        return n if ids[:n] == self.ids else 0


@dataclass(eq=False)
class TextRest:
    """A whole text, of which only what a growing one does not have is computed."""

    text: GrowingText
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids) - (self.text.known_of(self.ids) if self.text.cache is not None else 0)


class TokenModel(RewardModel):
    """A token classifier; of two labels the second is "right", and its probability is the value.

    pipelined       texts may grow: it reads on behind what it has read, where it is checked to read left to right
    cached_tokens   of all growing texts together, whose keys and values are kept
    """

    auto = "AutoModelForTokenClassification"

    def __init__(self, *, pipelined: bool = False, cached_tokens: int = 16384, **settings: Any) -> None:
        if cached_tokens < 1:
            raise ConfigError(f"reward 'process': cached_tokens = {cached_tokens}; at least 1 is needed")
        self.pipelined, self.cached_tokens, self.texts = pipelined, cached_tokens, set[GrowingText]()
        self._one = asyncio.Lock()
        super().__init__(**settings)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """One at a time, when the model is awake and nobody waits for a score."""
        async with self._one:
            while not (self._awake.is_set() and self._batcher.idle.is_set()):
                await self._awake.wait()
                await self._batcher.idle.wait()
            yield

    async def read_ahead(self, text: GrowingText, ids: list[int]) -> None:
        """Value these tokens. Where the kept texts leave no room, or the model fell asleep, nothing is done."""
        known = text.known_of(ids)
        others = sum(len(other.ids) for other in self.texts if other is not text and other.cache is not None)
        if known == len(ids) or others + len(ids) > self.cached_tokens or len(ids) > self.most:
            return
        if self._awake.is_set():
            self.texts.add(text)
            self.counts["model_tokens"] += len(ids) - known
            await asyncio.get_running_loop().run_in_executor(self._thread, self._read_on, text, ids)

    async def value_rest(self, text: GrowingText, ids: list[int]) -> list[float]:
        """What the head says after each token of a text that is whole now."""
        if text.known_of(ids) == len(ids):
            return text.values
        values: list[float] = await self._batcher(TextRest(text, ids) if text.cache is not None else ids)
        return values

    def drop_text(self, text: GrowingText) -> None:
        self.texts.discard(text)
        text.cache = None

    async def sleep(self) -> None:
        """The keys and values of growing texts leave the device with the weights; the values stay."""
        await super().sleep()
        for text in self.texts:
            text.cache = None

    def token_values(self, batch: list[Any]) -> list[list[float]]:
        whole = [ids for ids in batch if not isinstance(ids, TextRest)]
        computed = iter(super().token_values(whole)) if whole else iter(())
        return [self._read_on(rest.text, rest.ids) if isinstance(rest, TextRest) else next(computed) for rest in batch]

    def _read_on(self, text: GrowingText, ids: list[int]) -> list[float]:
        """Compute what is new of these tokens; a text that they do not go on from begins anew."""
        self._refuse_asleep()
        torch, known = self.torch, text.known_of(ids)
        if known == len(ids):
            return text.values
        if text.cache is None or not known:
            text.cache, first = self._new_cache(), 0
        else:
            first = known
        row = torch.tensor([ids[first:]], device=self.device)
        places = torch.arange(first, len(ids), device=self.device)[None]
        with torch.inference_mode():
            read = self.body(input_ids=row, position_ids=places, past_key_values=text.cache, use_cache=True)
            said_NK = self.head(read.last_hidden_state)[0]
        values = self.reward_values(said_NK.float()).tolist()
        text.values = text.values[:known] + values[known - first :]
        text.ids = list(ids)
        return text.values

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _wake_model(self) -> None:
        first = self.packs is None
        super()._wake_model()
        if first and self.pipelined and (why := self._why_not_pipelined()):
            raise ConfigError(
                f"process reward model {self.path!r} cannot value a step before the next one is written: {why}. Leave "
                f"pipelined out"
            )

    def _why_not_pipelined(self) -> str:
        """Tried at the start: what a text is worth in pieces, against the whole."""
        size = min(self.model.config.get_text_config().vocab_size, 1000)
        ids = [(7 * i + 3) % size for i in range(24)]
        close = CLOSE if self.model.dtype == self.torch.float32 else 0.1
        whole, begun, text = self._forward_batch([ids])[0], self._forward_batch([ids[:9]])[0], GrowingText()

        def differ(one: list[float], other: list[float]) -> bool:
            return any(abs(x - y) > close * max(1.0, abs(x)) for x, y in zip(one, other, strict=True))

        if differ(whole[:9], begun):
            return "what it says of a token depends on those behind it"
        try:
            for end in (9, 10, 24):
                values = self._read_on(text, ids[:end])
        except Exception as error:  # a family whose cache is of another kind raises whatever it likes
            return f"it does not read on ({type(error).__name__}: {error})"
        return "read in pieces it says something else" if differ(whole, values) else ""

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
