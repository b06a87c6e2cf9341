"""One form for what clients write in many ways: a message that is sent back is known
again, and one that was changed is not.

what differs between two sendings of the same message       what is made of it
content as a text, or as a list of text parts                a text
arguments of a call as JSON that was written anew            an object; 3.0 is 3, the order of keys says nothing
ids of calls                                                 places: the first call of a message is call00001
white space around what the assistant said or thought        gone, in the comparison only
None for ""                                                  ""
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from rondel.core.errors import DataError
from rondel.generate.pictures import parse_image_part
from rondel.system.http.response import RequestRefusal

Messages = list[dict[str, Any]]
# OpenAI's, and ours
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

IMAGES = ("image", "image_url", "input_image")
LONG = 1 << 14  # characters
THOUGHT = re.compile(r"\s*(</?think>)\s*")  # clients take thoughts out and put them in again


def text_of(content: Any, where: str, joined: str = "") -> str:
    """A text, or parts of it."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRefusal(400, f"{where}.content must be a text or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type", "nothing") if isinstance(part, dict) else type(part).__name__
            raise RequestRefusal(400, f"{where}.content has a part of type '{kind}'; the policy reads text only")
        texts.append(part["text"])
    return joined.join(texts)


def content_of(content: Any, where: str, joined: str = "") -> str | list[dict[str, Any]]:
    """The same with images among the parts, each a data: URL: what an agent names is neither
    fetched nor read from this machine's files.
    """
    if not isinstance(content, list) or not any(isinstance(p, dict) and p.get("type") in IMAGES for p in content):
        return text_of(content, where, joined)
    try:
        return [
            parse_image_part(part, f"{where}.content")
            if isinstance(part, dict) and part.get("type") in IMAGES
            else {"type": "text", "text": text_of([part], where)}
            for part in content
        ]
    except DataError as error:
        raise RequestRefusal(400, str(error)) from None


def call_of(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call in an assistant's message. Arguments that are no JSON stay the text that they are."""
    if not isinstance(name, str):
        raise RequestRefusal(400, "a tool call without a name")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments else {}
    return {"id": str(id), "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tool_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """The calls in an assistant's message, as OpenAI writes them."""
    if not isinstance(given, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in given
    ):
        raise RequestRefusal(400, f"{where}.tool_calls must be a list of objects, each with a function")
    return [call_of(call.get("id"), call["function"].get("name"), call["function"].get("arguments")) for call in given]


def canonical_messages(messages: Messages) -> Messages:
    """What templates are given: ids of calls are places, and an answer names the tool it comes from."""
    out: Messages = []
    asked: dict[str, tuple[str, str]] = {}
    for message in messages:
        role = message["role"]
        if role == "assistant" and (calls := message.get("tool_calls")):
            asked = {call["id"]: (f"call{i:05d}", call["function"]["name"]) for i, call in enumerate(calls, 1)}
            out.append({**message, "tool_calls": [{**call, "id": asked[call["id"]][0]} for call in calls]})
        elif role == "tool":
            place, name = asked.get(message["tool_call_id"], (message["tool_call_id"], ""))
            out.append({**message, "tool_call_id": place, **({"name": name} if name else {})})
        else:
            out.append(message)
    return out


def key_of(message: dict[str, Any]) -> str:
    """Equal for two messages that are the same. What was given is compared to the
    letter: another letter is another token.
    """
    if message["role"] == "assistant":
        message = {**message, "content": THOUGHT.sub(r"\1", message["content"]).strip()}
    key = json.dumps(_normalize_numbers(message), sort_keys=True)
    # an image is long, and is sent again with every request
    return key if len(key) < LONG else blake2b(key.encode()).hexdigest()


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalize_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
