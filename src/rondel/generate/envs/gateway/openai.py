"""/v1/chat/completions, /v1/completions and /v1/models, as OpenAI's clients expect them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rondel.generate.chat_apis.chat_request import ChatReply, ChatRequest
from rondel.generate.chat_apis.fields import ChatFields, read_functions
from rondel.generate.chat_apis.messages import ROLES, Messages, content_of, read_tool_calls, text_of
from rondel.system.http.response import RequestRefusal, sse_event
from rondel.text.tokenization import HALF

if TYPE_CHECKING:
    from rondel.generate.envs.gateway.session import GatewaySession


def read_messages(given: list[Any]) -> Messages:
    out: Messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        if role is None:
            raise RequestRefusal(400, f"{where}.role must be one of {', '.join(ROLES)}")
        read: dict[str, Any] = {
            "role": role,
            "content": text_of(message.get("content"), where)
            if role in ("system", "assistant")
            else content_of(message.get("content"), where),
        }
        if role == "assistant" and (calls := message.get("tool_calls")):
            read["tool_calls"] = read_tool_calls(calls, where)
        if role == "tool":
            read["tool_call_id"] = str(message.get("tool_call_id", ""))
        out.append(read)
    return out


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    given = tool.get("function")
    return {k: given.get(k) for k in ("name", "description", "parameters")} if isinstance(given, dict) else {}


async def create_chat_completion(session: GatewaySession, f: ChatFields) -> dict[str, Any]:
    said = read_messages(f.read_field("messages", list, []))
    tools = read_functions(f.read_field("tools", list, []), function_of)
    logprobs = f.read_field("logprobs", bool, False)
    asked = f.read_chat_request(said, tools, limit=("max_completion_tokens", "max_tokens"))
    replies = await session.generate_replies(asked)
    choices = []
    for i, reply in enumerate(replies):
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text or (None if reply.calls else ""),
            "refusal": None,
        }
        if reply.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for id, name, given in reply.calls
            ]
        content = [
            {"token": t, "logprob": lp, "bytes": None if HALF in t else list(t.encode()), "top_logprobs": []}
            for t, lp in token_logprobs(session, reply)
        ]
        finish = "tool_calls" if reply.calls else "length" if reply.is_truncated else "stop"
        told = {"content": content, "refusal": None} if logprobs else None
        choices.append({"index": i, "message": message, "logprobs": told, "finish_reason": finish})
    return {**_response_header("chatcmpl", "chat.completion", f), "choices": choices, "usage": token_usage([replies])}


def chat_chunks(whole: dict[str, Any], options: dict[str, Any]) -> Iterator[bytes]:
    """The answer as a stream: it is sent when it is whole, since only then is it certain what is a call."""
    head = {**{k: v for k, v in whole.items() if k not in ("choices", "usage")}, "object": "chat.completion.chunk"}
    for choice in whole["choices"]:
        message, index = choice["message"], choice["index"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        said: list[dict[str, Any]] = [{"role": "assistant", "content": "" if message["content"] is not None else None}]
        said += [{"content": message["content"]}] * bool(message["content"]) + [
            {"tool_calls": [call]} for call in calls
        ]
        for i, delta in enumerate(said):
            logprobs = choice["logprobs"] if i == len(said) - 1 else None
            yield sse_event(
                {**head, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}
            )
        yield sse_event(
            {
                **head,
                "choices": [{"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}],
            }
        )
    if options.get("include_usage"):
        yield sse_event({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


async def create_completion(session: GatewaySession, f: ChatFields) -> dict[str, Any]:
    prompt = f.read_field("prompt", (str, list), "")
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    size = len(session.chat.tokenizer)
    for one in prompts:
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(type(t) is int and 0 <= t < size for t in one)
        ):
            raise RequestRefusal(400, f"prompt must be a text, a list of token ids below {size}, or a list of either")
    if not all(prompts):
        raise RequestRefusal(400, "there is nothing to answer: one of the prompts is empty")
    logprobs = f.read_field("logprobs", int)
    asked = f.read_chat_request(prompts and prompts[0], limit=("max_tokens",))
    families = await session.generate_families(
        [ChatRequest(one, [], asked.max_tokens, asked.stop, asked.n) for one in prompts]
    )
    replies = [reply for family in families for reply in family]
    choices = []
    for i, reply in enumerate(replies):
        texts, values = zip(*token_logprobs(session, reply)) if reply.done.tokens else ((), ())
        offsets = [len("".join(texts[:k])) for k in range(len(texts))]
        told = (
            {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
            if logprobs is not None
            else None
        )
        choices.append(
            {
                "index": i,
                "text": reply.text,
                "logprobs": told,
                "finish_reason": "length" if reply.is_truncated else "stop",
            }
        )
    return {**_response_header("cmpl", "text_completion", f), "choices": choices, "usage": token_usage(families)}


def completion_chunks(whole: dict[str, Any], options: dict[str, Any]) -> Iterator[bytes]:
    head = {k: v for k, v in whole.items() if k not in ("choices", "usage")}
    for choice in whole["choices"]:
        yield sse_event({**head, "choices": [choice]})
    if options.get("include_usage"):
        yield sse_event({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def model_card(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
    } | {"owned_by": "rondel"}


def token_logprobs(session: GatewaySession, reply: ChatReply) -> list[tuple[str, float]]:
    """What was drawn, with the log-probability it was drawn with."""
    return [(session.chat.tokenizer.decode([t]), lp) for t, lp in zip(reply.done.tokens, reply.done.logprobs)]


def token_usage(families: list[list[ChatReply]]) -> dict[str, Any]:
    """Each prompt counts once however many answers it gets."""
    prompt = sum(replies[0].prompt for replies in families)
    written = sum(len(reply.done.tokens) for replies in families for reply in replies)
    cached = sum(min(reply.done.cached_tokens for reply in replies) for replies in families)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _response_header(prefix: str, kind: str, f: ChatFields) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": str(f.body.get("model", "policy")),
    }
