"""/v1/models, /v1/completions and /v1/chat/completions in OpenAI's shapes.

Beside them, where a trainer asks with `return_token_ids`: token_ids and weight_versions of
every choice, prompt_token_ids of the reply. `weight_version` is always there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rondel.core.errors import DataError
from rondel.generate.engine.builtin.text import HALF
from rondel.generate.engine.server.answers import AnswerDelta, SampleAnswer
from rondel.generate.engine.server.fields import RequestFields, shorten_json
from rondel.generate.engine.server.sampling_fields import BIGGEST, read_draw, read_prompts, read_seed
from rondel.generate.engine.server.service import GenerationRequest, GenerationService
from rondel.generate.pictures import parse_image_part
from rondel.system.http.response import RequestRefusal
from rondel.text.special_tokens import SPLIT

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_completion(f: RequestFields, service: GenerationService) -> CompletionReply:
    """OpenAI's text completion: `prompt` is a string, token ids, or a list of either. Control
    tokens that a string spells are text, unless it says split_special_tokens = false."""
    prompt = f.read_field("prompt")
    asked = _read_common_fields(f, service, default_tokens=16)
    asked.prompts, asked.split = read_prompts(f, prompt), f.read_flag(SPLIT, True)
    top = f.read_integer("logprobs", None, 0, 5)
    f.allow_only("echo", False)
    f.allow_only("suffix", "")
    f.allow_only("best_of", 1, asked.n)
    return _build_reply(f, service, asked, chat=False, logprobs=top is not None, top=top or 0)


def read_chat(f: RequestFields, service: GenerationService) -> CompletionReply:
    """OpenAI's chat: messages go through the model's own template, `tools` with them."""
    messages = _read_messages(f, f.read_field("messages"))
    asked = _read_common_fields(f, service, default_tokens=None)
    asked.messages, asked.tools = messages, f.read_field("tools")
    if asked.tools is not None and not (
        isinstance(asked.tools, list) and all(isinstance(t, dict) for t in asked.tools)
    ):
        raise f.field_error("tools", "it must be a list of objects")
    f.allow_only("tool_choice", "auto", "none")
    if f.read_field("tool_choice") == "none":
        asked.tools = None
    f.allow_only("parallel_tool_calls", True)
    asked.draw["grammar"] = _response_grammar(f)
    f.allow_only("modalities", ["text"])
    logprobs = f.read_flag("logprobs")
    top = f.read_integer("top_logprobs", 0, 0, 20)
    if top and not logprobs:
        raise f.field_error("top_logprobs", "it needs logprobs = true")
    return _build_reply(f, service, asked, chat=True, logprobs=logprobs, top=top)


def _read_common_fields(
    f: RequestFields, service: GenerationService, *, default_tokens: int | None
) -> GenerationRequest:
    model = f.read_string("model", service.name)
    if model != service.name:
        raise RequestRefusal(
            404,
            f"no model '{str(model)[:200]}' here; this server serves '{service.name}'",
            param="model",
            code="model_not_found",
        )
    draw = read_draw(f)
    draw["min_tokens"] = f.read_integer("min_tokens", 0, 0, BIGGEST)
    old, new = f.read_integer("max_tokens", None, 1, BIGGEST), f.read_integer("max_completion_tokens", None, 1, BIGGEST)
    if None not in (old, new) and old != new:
        raise f.field_error("max_tokens", f"max_completion_tokens says {new}; give one of the two")
    return GenerationRequest(
        draw=draw,
        max_tokens=new or old or default_tokens,
        n=f.read_integer("n", 1, 1, service.limits.samples),
        seed=read_seed(f),
        id=f.read_string("rid") or "",
        stream=f.read_flag("stream"),
    )


def _response_grammar(f: RequestFields) -> dict[str, Any] | None:
    """OpenAI's response_format as Sampling's grammar."""
    wanted = f.take_object("response_format")
    kind = wanted.read_string("type", "text")
    if kind == "json_schema":
        schema = wanted.take_object("json_schema")
        for says in ("name", "description"):
            schema.read_string(says)
        schema.read_flag("strict", True)
        given = schema.read_field("schema")
        schema.refuse_unknown_fields()
        if not isinstance(given, dict):
            raise schema.field_error("schema", "it must be an object")
        return {"json_schema": given}
    wanted.refuse_unknown_fields()
    if kind not in ("text", "json_object"):
        raise wanted.field_error("type", "it is one of text, json_object, json_schema")
    return {"json_schema": {"type": "object"}} if kind == "json_object" else None


def _read_messages(f: RequestFields, given: Any) -> list[dict[str, Any]]:
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
        out.append(
            {
                **message,
                "content": _read_content(content, f"{where}.content", images=message["role"] in ("user", "tool")),
            }
        )
    return out


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


def _build_reply(
    f: RequestFields, service: GenerationService, asked: GenerationRequest, *, chat: bool, logprobs: bool, top: int
) -> CompletionReply:
    options = f.take_object("stream_options")
    usage = options.read_flag("include_usage")
    options.refuse_unknown_fields()
    token_ids = f.read_flag("return_token_ids")
    f.refuse_unknown_fields()
    asked.top = top
    asked.id = asked.id or f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
    return CompletionReply(service, asked, chat, logprobs, token_ids, usage)


@dataclass(slots=True)
class CompletionReply:
    """What is answered to one request, at once or in chunks."""

    service: GenerationService
    asked: GenerationRequest
    chat: bool
    logprobs: bool
    token_ids: bool
    usage_at_end: bool

    def response_body(self, answers: list[SampleAnswer]) -> dict[str, Any]:
        choices = []
        for a in answers:
            said = (
                {"message": {"role": "assistant", "content": a.text, "refusal": None}}
                if self.chat
                else {"text": a.text}
            )
            choices.append(
                {"index": a.index, **said, **self._token_fields(AnswerDelta(a, a.text, 0, len(a.tokens), ends=True))}
            )
        prompts = {"prompt_token_ids": answers[0].prompt} if self.token_ids else {}
        return {
            **self._response_header(chunk=False),
            **prompts,
            "choices": choices,
            "usage": self._token_usage(answers),
        }

    def begin_stream(self, answers: list[SampleAnswer]) -> Iterator[dict[str, Any]]:
        """A chat stream opens each choice with its role."""
        prompts = {"prompt_token_ids": answers[0].prompt} if self.token_ids else {}
        if self.chat:
            for a in answers:
                role = {
                    "index": a.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                yield {**self._response_header(), **prompts, "choices": [role]}

    def stream_chunk(self, piece: AnswerDelta) -> dict[str, Any]:
        said: dict[str, Any] = (
            {"delta": {"content": piece.text} if piece.text or not piece.ends else {}}
            if self.chat
            else {"text": piece.text}
        )
        return {
            **self._response_header(),
            "choices": [{"index": piece.answer.index, **said, **self._token_fields(piece)}],
        }

    def end_stream(self, answers: list[SampleAnswer]) -> Iterator[dict[str, Any]]:
        if self.usage_at_end:
            yield {**self._response_header(), "choices": [], "usage": self._token_usage(answers)}

    def _response_header(self, *, chunk: bool = True) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.asked.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.service.name,
            "weight_version": self.service.engine.version,
        }

    def _token_fields(self, piece: AnswerDelta) -> dict[str, Any]:
        a, part = piece.answer, slice(piece.first, piece.last)
        out: dict[str, Any] = {
            "finish_reason": a.completion.finish_reason if piece.ends and a.completion else None,
            "logprobs": self._logprob_fields(a, part) if self.logprobs else None,
        }
        if self.token_ids:
            out |= {"token_ids": a.tokens[part], "weight_versions": a.versions[part]}
        return out

    def _logprob_fields(self, a: SampleAnswer, part: slice) -> dict[str, Any]:
        texts, tops = [self._decode_token(t) for t in a.tokens[part]], a.top[part]
        if not self.chat:
            offsets = [0]
            for text in texts:
                offsets.append(offsets[-1] + len(text))
            likely = [{self._decode_token(t): lp for t, lp in top} for top in tops] or None
            return {
                "tokens": texts,
                "token_logprobs": a.logprobs[part],
                "top_logprobs": likely,
                "text_offset": offsets[:-1],
            }
        rows = zip(texts, a.logprobs[part], tops or [[]] * len(texts))
        content = [
            {**_token_logprob(text, lp), "top_logprobs": [_token_logprob(self._decode_token(t), v) for t, v in top]}
            for text, lp, top in rows
        ]
        return {"content": content, "refusal": None}

    def _decode_token(self, token: int) -> str:
        return self.service.engine.loaded.tokenizer.decode([token])

    def _token_usage(self, answers: list[SampleAnswer]) -> dict[str, Any]:
        """A prompt counts once however many answers it gets; what the first of them found cached was cached."""
        families = [answers[i : i + self.asked.n] for i in range(0, len(answers), self.asked.n)]
        prompt, written = sum(len(family[0].prompt) for family in families), sum(len(a.tokens) for a in answers)
        cached = sum(min(a.completion.cached_tokens if a.completion else 0 for a in family) for family in families)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    """Half a character has no bytes to tell: the decoder has replaced them."""
    return {"token": text, "logprob": logprob, "bytes": None if HALF in text else list(text.encode())}


def model_list(service: GenerationService, born: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(service, born)]}


def model_card(service: GenerationService, born: int) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": born,
        "owned_by": "rondel",
        "max_model_len": service.max_context_tokens,
    }
