"""The fields of a chat: messages, what its template is told, and the tools that are offered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import DataError
from rondel.generate.chat_apis.messages import canonical_messages, read_tool_calls
from rondel.generate.engine.server.fields import RequestFields, shorten_json
from rondel.generate.pictures import parse_image_part
from rondel.system.http.response import RequestRefusal

TEMPLATE_OWN = frozenset(  # a template of the client's own would be code that runs here, and as long as it likes
    {"tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
    | {"chat_template", "conversation", "messages", "tokenizer_kwargs", "return_assistant_tokens_mask"}
    | {"padding", "truncation", "max_length"}
)
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(f: RequestFields, given: Any) -> list[dict[str, Any]]:
    """Contents as plain text, a list of text parts joined; or as parts, where a user or a tool shows an image."""
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise f.field_error("messages", "it must be a list of objects with role and content, at least one")
    out = []
    for i, message in enumerate(given):
        where, content = f"messages[{i}]", message.get("content")
        if message.get("role") not in ROLES:
            raise RequestRefusal(400, f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        if content is None and message.get("tool_calls"):
            content = ""
        read = {
            **message,
            "content": _read_content(content, f"{where}.content", images=message["role"] in ("user", "tool")),
        }
        if calls := read.pop("tool_calls", None):
            read["tool_calls"] = read_tool_calls(calls, where)
        if message["role"] == "tool":
            read["tool_call_id"] = str(message.get("tool_call_id", ""))
        out.append(read)
    return canonical_messages(out)


def _read_content(content: Any, where: str, *, images: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    kinds = ("text", "image_url") if images else ("text",)
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") in kinds for p in content):
        raise RequestRefusal(
            400, f"{where} must be a string or a list of parts of type {' or '.join(kinds)}", param=where
        )
    parts = []
    for part in content:
        if part["type"] == "image_url":
            parts.append(_read_image(part, where))
        elif isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise RequestRefusal(400, f"{where} has a part of type text without a text", param=where)
    return parts if any(p["type"] == "image" for p in parts) else "".join(p["text"] for p in parts)


def _read_image(part: dict[str, Any], where: str) -> dict[str, Any]:
    url = part.get("image_url")
    if isinstance(url, dict) and url.get("detail") not in (None, "auto", "high"):
        rule = "an image is shown as large as the model takes it; leave it out, or send a smaller image"
        raise RequestRefusal(
            400, f"{where} has an image with detail = {shorten_json(url['detail'])}; {rule}", param=where
        )
    try:
        return parse_image_part(part, where)
    except DataError as error:
        raise RequestRefusal(400, str(error), param=where, code="invalid_image") from None


def read_template_fields(f: RequestFields, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """vLLM's fields: what else a chat template is told, and whether the last message is the beginning of the answer."""
    more = f.read_field("chat_template_kwargs", {})
    if not isinstance(more, dict) or more.keys() & TEMPLATE_OWN:
        raise f.field_error("chat_template_kwargs", f"it is an object without {', '.join(sorted(TEMPLATE_OWN))}")
    goes_on = f.read_flag("continue_final_message")
    f.allow_only("add_generation_prompt", not goes_on)
    if goes_on and messages[-1]["role"] != "assistant":
        raise f.field_error("continue_final_message", "the last message must be the assistant's")
    return more, goes_on


@dataclass(slots=True)
class OfferedTools:
    """The tools of one request.

    functions  as templates want them
    required   whether an answer must call one of them, and which may be called then
    parallel   whether an answer may call several
    """

    functions: list[dict[str, Any]]
    required: list[str] = field(default_factory=list)
    parallel: bool = True


def read_tools(f: RequestFields) -> OfferedTools | None:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""
    given, choice = f.read_field("tools"), f.read_field("tool_choice", "auto")
    parallel = f.read_flag("parallel_tool_calls", True)
    if given is None:
        if choice not in ("auto", "none"):
            raise f.field_error("tool_choice", "there are no tools to choose from")
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise f.field_error("tools", "it must be a list of objects")
    functions = [_read_function(f, tool) for tool in given]
    names = [tool["function"]["name"] for tool in functions]
    if choice == "none" or not functions:
        return None
    if choice == "auto":
        return OfferedTools(functions, [], parallel)
    if choice == "required":
        return OfferedTools(functions, names, parallel)
    chosen = choice.get("function") if isinstance(choice, dict) else None
    name = str((chosen if isinstance(chosen, dict) else choice if isinstance(choice, dict) else {}).get("name"))
    if name not in names:
        raise f.field_error(
            "tool_choice", f"it is 'auto', 'none', 'required' or one of the functions {', '.join(names)}"
        )
    return OfferedTools(functions, [name], parallel=False)


def _read_function(f: RequestFields, tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise f.field_error("tools", "a tool is {'type': 'function', 'function': {'name': ..., 'parameters': ...}}")
    if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters", {}), dict | None):
        raise f.field_error("tools", "a function has a name, and a JSON schema as its parameters")
    return {"type": "function", "function": {k: v for k, v in function.items() if k != "strict" and v is not None}}
