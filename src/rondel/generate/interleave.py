"""Images and videos in the rows of a data set: where they stand in a question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rondel.core.errors import DataError

Messages = list[dict[str, Any]]
MARK = re.compile(r"<(image|video)>")  # in a text, where one of its row's images or videos stands


def interleave_media(asked: Any, given: Mapping[str, Sequence[dict[str, Any]]]) -> Messages:
    """A question with its images and videos as messages: each in place of an "<image>" or "<video>" of the text, or
    all of a kind before the last user's words. `given`: parts by kind, "image" and "video".
    """
    messages: Messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(m) for m in asked]
    texts = [m["content"] for m in messages if isinstance(m.get("content"), str)]
    marks = {kind: sum(text.count(f"<{kind}>") for text in texts) for kind in given}
    for kind, parts in given.items():
        if marks[kind] not in (0, len(parts)):
            raise DataError(f"{marks[kind]} times <{kind}> in the question, and {len(parts)} {kind}s: one for each")
    left = {kind: iter(parts) for kind, parts in given.items() if marks[kind]}
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and any(f"<{kind}>" in content for kind in left):
            message["content"] = list(_interleave(content, left))
    if before := [part for kind, parts in given.items() if not marks[kind] for part in parts]:
        last = next((m for m in reversed(messages) if m.get("role") == "user"), messages[-1])
        own = last["content"]
        last["content"] = [*before, *([{"type": "text", "text": own}] if isinstance(own, str) else own)]
    return messages


def _interleave(text: str, left: dict[str, Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    at = 0
    for found in MARK.finditer(text):
        if found[1] in left:
            if found.start() > at:
                yield {"type": "text", "text": text[at : found.start()]}
            yield next(left[found[1]])
            at = found.end()
    if text[at:]:
        yield {"type": "text", "text": text[at:]}
