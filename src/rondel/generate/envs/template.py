"""How a tokenizer's chat template writes an opening, a later message, and the end of a turn: always as tokens.

A conversation is a buffer of tokens that only grows, so a later message is rendered behind a fixed dummy conversation D and D's
tokens are cut off again (SPEC G2). What the policy wrote is never part of what is rendered.

    opening   encode(tpl(messages, gen_prompt=True))
    later     encode(tpl(D + messages, gen_prompt=True))[len(encode(tpl(D))):]
    tail      what the template puts after an assistant's content: "<|im_end|>\\n" as tokens
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from rondel.words.errors import DataError

Messages = list[dict[str, str]]

SYSTEM = {"role": "system", "content": "s"}  # given, so that no template injects its own
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
DUMMIES = ([SYSTEM, USER], [USER], [SYSTEM, USER, ASSISTANT], [USER, ASSISTANT])  # some templates refuse a system, some two users in a row


class Template:
    """`Template(tok).opening([{"role": "user", "content": "3 + 4 ="}])` -> [1, 4093, ...]. No template: the bare contents."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.plain = not getattr(tokenizer, "chat_template", None)

    def opening(self, messages: Messages) -> list[int]:
        """The first messages, up to where the policy starts to write."""
        return self._bare(messages, opening=True) if self.plain else self._render(messages)

    def later(self, messages: Messages) -> list[int]:
        """Messages that follow a finished turn of the policy, up to where it writes again."""
        if self.plain:
            return self._bare(messages, opening=False)
        refused = ""
        for dummy in DUMMIES:
            try:
                prefix, whole = self._render(dummy, prompt=False), self._render([*dummy, *messages])
            except Exception as error:  # a template refuses a role order by raising whatever it likes
                refused = f"{type(error).__name__}: {error}"
                continue
            if whole[: len(prefix)] == prefix:
                return whole[len(prefix) :]
        roles = ", ".join(m.get("role", "?") for m in messages)
        raise DataError(
            f"the chat template cannot append messages ({roles}): behind every dummy conversation it rewrites what came before"
            f"{' or raises ' + refused if refused else ''}; use roles it knows, or a template that only appends"
        )

    @cached_property
    def tail(self) -> list[int]:
        """What ends an assistant's turn: the common end of two conversations that differ only in the assistant's words."""
        if self.plain:
            return []
        for pair in ("x7", "ab", "01"):  # a small vocabulary may read two letters as the same unknown token
            one, two = (self._render([USER, {"role": "assistant", "content": letter}], prompt=False) for letter in pair)
            if one != two:
                common = sum(1 for _ in takewhile(lambda ends: ends[0] == ends[1], zip(reversed(one), reversed(two))))
                return one[len(one) - common :]
        raise DataError(
            "the chat template writes different answers alike, so the end of a turn cannot be told; look at how it uses 'content'"
        )

    def missing_tail(self, tokens: list[int]) -> list[int]:
        """The part of the tail that `tokens` (a turn as the policy left it) does not already end with."""
        have = next((k for k in range(len(self.tail), 0, -1) if tokens[-k:] == self.tail[:k]), 0)
        return self.tail[have:]

    def _render(self, messages: Messages, *, prompt: bool = True) -> list[int]:
        return list(_rendered(self.tokenizer, json.dumps(messages), prompt))

    def _bare(self, messages: Messages, *, opening: bool) -> list[int]:
        return list(self.tokenizer.encode("".join(m["content"] for m in messages), add_special_tokens=opening))


@lru_cache(maxsize=4096)
def _rendered(tokenizer: Any, messages: str, prompt: bool) -> tuple[int, ...]:
    """Siblings ask for the same opening; a template is slow enough to render it once."""
    return tuple(tokenizer.apply_chat_template(json.loads(messages), tokenize=True, add_generation_prompt=prompt, return_dict=False))
