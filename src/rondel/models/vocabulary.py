"""Models that read each other's tokens: a draft, a critic, a teacher."""

from __future__ import annotations

from typing import Any, Protocol

from rondel.core.errors import ConfigError


class NamedModel(Protocol):
    """A model, or what is known of it."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...


def same_words(loaded: NamedModel, other: NamedModel, *, who: str, remedy: str) -> None:
    """Token 17 of `other` must be token 17 of the model; ConfigError says which is not, of `who`."""
    ours, theirs = loaded.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    odd = sorted(word for word in ours.keys() | theirs.keys() if ours.get(word) != theirs.get(word))
    if odd:
        raise ConfigError(
            f"{who} has another vocabulary than '{loaded.name}': {len(odd)} words differ, first {odd[0]!r} "
            f"({theirs.get(odd[0], 'missing')} there, {ours.get(odd[0], 'missing')} here). {remedy}"
        )
