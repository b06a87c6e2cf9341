"""/v1/messages, as Anthropic's clients expect it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rondel.generate.chat_apis.fields import ChatFields, read_functions
from rondel.generate.chat_apis.messages import Messages, call_of, content_of, text_of
from rondel.system.http.response import RequestRefusal, sse_event

if TYPE_CHECKING:
    from rondel.generate.chat_apis.chat_request import ChatSession

ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
THOUGHTS = ("thinking", "redacted_thinking")  # of another model: the policy has written none


def read_messages(system: Any, given: list[Any]) -> Messages:
    """A user's message may hold answers of tools: each becomes a message of its own, before what the user says."""
    out: Messages = [{"role": "system", "content": text_of(system, "system", "\n")}] if system else []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise RequestRefusal(400, f"{where}.role must be user or assistant")
        role, content = message["role"], message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        if not all(isinstance(block, dict) for block in blocks):
            raise RequestRefusal(400, f"{where}.content must be a text or a list of blocks")
        calls = [
            call_of(b.get("id"), b.get("name"), b.get("input") or {}) for b in blocks if b.get("type") == "tool_use"
        ]
        answers = [b for b in blocks if b.get("type") == "tool_result"]
        words = [b for b in blocks if b.get("type") not in ("tool_use", "tool_result", *THOUGHTS)]
        out += [
            {"role": "tool", "tool_call_id": str(b.get("tool_use_id", "")), "content": _read_tool_result(b, where)}
            for b in answers
        ]
        if words or role == "assistant" or not answers:
            read = {
                "role": role,
                "content": content_of(_inline_images(words), where, "\n")
                if role == "user"
                else text_of(words, where, "\n"),
            }
            out.append({**read, "tool_calls": calls} if calls and role == "assistant" else read)
    if out and out[-1]["role"] == "assistant":
        raise RequestRefusal(
            400, "the last message is the assistant's: the policy begins its answers itself; end with a user's message"
        )
    return out


def _read_tool_result(block: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
    """What a tool said, and what it showed."""
    content = content_of(_inline_images(block.get("content")), where, "\n")
    if not block.get("is_error"):
        return content
    return f"error: {content}" if isinstance(content, str) else [{"type": "text", "text": "error: "}, *content]


def _inline_images(content: Any) -> Any:
    """Blocks whose images are data: URLs, as the rest of this house has them."""
    if not isinstance(content, list):
        return content
    out = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "image":
            source = block.get("source")
            source = source if isinstance(source, dict) else {}
            sent_whole = source.get("type") == "base64" and isinstance(source.get("data"), str)
            kind = source.get("media_type", "image/png")
            address = source.get("url", source.get("file_id", source.get("type")))
            block = {"type": "image", "image": f"data:{kind};base64,{source['data']}" if sent_whole else address}
        out.append(block)
    return out


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}


async def count_tokens(session: ChatSession, f: ChatFields) -> dict[str, Any]:
    """Of a conversation as if it were new; nothing is asked of the policy."""
    said = read_messages(f.read_field("system", (str, list)), f.read_field("messages", list, []))
    if not said:
        raise RequestRefusal(400, "there is nothing to count")
    return {
        "input_tokens": await session.count_tokens(said, read_functions(f.read_field("tools", list, []), function_of))
    }


async def create_message(session: ChatSession, f: ChatFields) -> dict[str, Any]:
    said = read_messages(f.read_field("system", (str, list)), f.read_field("messages", list, []))
    tools = read_functions(f.read_field("tools", list, []), function_of)
    (reply,) = await session.generate_replies(
        f.read_chat_request(said, tools, limit=("max_tokens",), stop="stop_sequences")
    )
    content: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text else []
    content += [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in reply.calls]
    stop = (
        "tool_use"
        if reply.calls
        else "max_tokens"
        if reply.is_truncated
        else "stop_sequence"
        if reply.stopped
        else "end_turn"
    )
    cached = reply.done.cached_tokens
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": str(f.body.get("model", "policy")),
        "content": content,
        "stop_reason": stop,
        "stop_sequence": reply.stopped or None,
        "usage": {
            "input_tokens": reply.prompt - cached,
            "output_tokens": len(reply.done.tokens),
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        },
    }


def stream_chunks(whole: dict[str, Any], options: dict[str, Any]) -> Iterator[bytes]:
    def make_event(kind: str, **data: Any) -> bytes:
        return sse_event({"type": kind, **data}, kind)

    ends = {"stop_reason": None, "stop_sequence": None}
    yield make_event(
        "message_start", message={**whole, **ends, "content": [], "usage": {**whole["usage"], "output_tokens": 0}}
    )
    for i, block in enumerate(whole["content"]):
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield make_event("content_block_start", index=i, content_block=empty)
        yield make_event("content_block_delta", index=i, delta=delta)
        yield make_event("content_block_stop", index=i)
    yield make_event(
        "message_delta", delta={k: whole[k] for k in ends}, usage={"output_tokens": whole["usage"]["output_tokens"]}
    )
    yield make_event("message_stop")


def error_body(refusal: RequestRefusal) -> dict[str, Any]:
    kind = ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}
