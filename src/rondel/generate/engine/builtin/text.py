"""Stop strings: the text of a sample as it grows, and where in it a string begins that ends the sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rondel.core.errors import UserError

HALF = "\ufffd"  # how a decoder shows bytes that are not yet a character
PATIENCE = 8  # tokens; a character has at most 4 bytes, so what is not one by then never will be


@dataclass(slots=True)
class IncrementalDetokenizer:
    """
    tokens   ... _from ... _read ... newest
    text     | in `text` |  decoded twice: with and without the newest, because a token's text depends on the one before
    """

    decode: Callable[[list[int]], str]
    stops: tuple[str, ...]
    text: str = ""
    first: int = 0  # where this request's own text begins; before it stands what a continuation had written
    _from: int = 0
    _read: int = 0

    def find_stop(self, tokens: list[int]) -> str | None:
        """All tokens so far -> this request's text before the stop string that the newest completes, or None."""
        known = len(self.text)
        before, now = self.decode(tokens[self._from : self._read]), self.decode(tokens[self._from :])
        if now.endswith(HALF) and len(tokens) - self._read <= PATIENCE:
            return None
        self.text += now[len(before) :]
        self._from, self._read = self._read, len(tokens)
        found = first_stop(self.text, self.stops, known)
        return self.text[self.first : found] if found is not None else None


def first_stop(text: str, stops: tuple[str, ...], known: int) -> int | None:
    """Where the first of the strings begins that the text completed after its first `known` characters."""
    return min((at for stop in stops if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0), default=None)


def open_reader(tokenizer: Any, stops: tuple[str, ...], drawn: list[int]) -> IncrementalDetokenizer:
    """A reader that has read what a continuation drew."""
    reader = IncrementalDetokenizer(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), stops)
    for n in range(1, len(drawn) + 1):
        reader.find_stop(drawn[:n])
    reader.first = len(reader.text)
    return reader


def split_stops(tokenizer: Any, stop: tuple[int | str, ...]) -> tuple[frozenset[int], tuple[str, ...]]:
    """-> (ids, strings). A special token never appears in the text, so its name is taken as its id."""
    ids, strings = {s for s in stop if isinstance(s, int)}, [s for s in stop if isinstance(s, str)]
    special = special_ids(tokenizer) if strings else {}
    for s in strings:
        inside = [name for name in special if name in s and name != s]
        if inside and s not in special:
            raise UserError(
                f"the stop string {s!r} holds the special token {inside[0]!r}, which is not in the text; give that "
                f"token alone"
            )
    return frozenset(ids | {special[s] for s in strings if s in special}), tuple(s for s in strings if s not in special)


def special_ids(tokenizer: Any) -> dict[str, int]:
    """{name: id} of the tokens that never appear in the text."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
