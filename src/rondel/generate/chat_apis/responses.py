"""/v1/responses, as OpenAI's clients expect it: the same conversation, told as a list of items."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rondel.generate.chat_apis.fields import ChatFields, read_functions
from rondel.generate.chat_apis.messages import ROLES, Messages, call_of, content_of, text_of
from rondel.system.http.response import RequestRefusal, sse_event

if TYPE_CHECKING:
    from rondel.generate.chat_apis.chat_request import ChatSession


def read_items(given: str | list[Any]) -> Messages:
    """What the assistant said and what it called are items of their own; here they are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    out: Messages = []

    def last_assistant_message() -> dict[str, Any]:
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        match kind:
            case "message":
                role = ROLES.get(str(item.get("role")))
                if role is None:
                    raise RequestRefusal(400, f"{where}.role must be one of {', '.join(ROLES)}")
                out.append(
                    {"role": role, "content": (content_of if role == "user" else text_of)(item.get("content"), where)}
                )
            case "function_call":
                call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
                last_assistant_message().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                out.append(
                    {
                        "role": "tool",
                        "tool_call_id": str(item.get("call_id", "")),
                        "content": content_of(item.get("output"), where),
                    }
                )
            case "reasoning":  # of another model: the policy has written none
                pass
            case _:
                raise RequestRefusal(
                    400, f"{where} is of type '{kind}'; the policy reads messages, function calls and their outputs"
                )
    return out


async def build_response(session: ChatSession, f: ChatFields) -> dict[str, Any]:
    said = read_items(f.read_field("input", (str, list), []))
    if before := f.read_field("previous_response_id", str):
        if before not in session.stored:
            raise RequestRefusal(
                400,
                f"previous_response_id = '{before[:80]}' is not known here",
                code="previous_response_not_found",
            )
        said = [*session.stored[before], *said]
    instructions = f.read_field("instructions", str)
    tools = read_functions(
        f.read_field("tools", list, []), lambda tool: {k: tool.get(k) for k in ("name", "description", "parameters")}
    )
    system = [{"role": "system", "content": instructions}] if instructions else []
    (reply,) = await session.generate_replies(
        f.read_chat_request([*system, *said], tools, limit=("max_output_tokens",))
    )
    name, status = f"resp_{uuid4().hex}", "incomplete" if reply.is_truncated else "completed"
    session.stored[name] = [*said, reply.assistant_message]
    output: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "status": status, "content": [part]}
        )
    for id, function, given in reply.calls:
        call = {
            "id": f"fc_{uuid4().hex}",
            "call_id": id,
            "name": function,
            "arguments": json.dumps(given),
            "status": "completed",
        }
        output.append({"type": "function_call", **call})
    written, cached = len(reply.done.tokens), reply.done.cached_tokens
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.is_truncated else None,
        "instructions": instructions,
        "metadata": {},
        "model": str(f.body.get("model", "policy")),
        "output": output,
        "parallel_tool_calls": f.parallel,
        "previous_response_id": before,
        "temperature": f.sampling.temperature,
        "top_p": f.sampling.top_p,
        "tool_choice": "auto",
        "tools": f.body.get("tools") or [],
        "usage": {
            "input_tokens": reply.prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt + written,
        },
    }


def stream_chunks(whole: dict[str, Any], options: dict[str, Any]) -> Iterator[bytes]:
    number = -1

    def make_event(kind: str, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return sse_event({"type": f"response.{kind}", "sequence_number": number, **data}, f"response.{kind}")

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield make_event("created", response=begun)
    yield make_event("in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        at: dict[str, Any] = {"output_index": i, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield make_event("output_item.added", output_index=i, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "message":
            (part,), inside = item["content"], {**at, "content_index": 0}
            yield make_event("content_part.added", **inside, part={**part, "text": ""})
            yield make_event("output_text.delta", **inside, delta=part["text"], logprobs=[])
            yield make_event("output_text.done", **inside, text=part["text"], logprobs=[])
            yield make_event("content_part.done", **inside, part=part)
        else:
            yield make_event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield make_event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        yield make_event("output_item.done", output_index=i, item=item)
    yield make_event("completed" if whole["status"] == "completed" else "incomplete", response=whole)
