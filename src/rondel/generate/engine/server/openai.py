"""/v1/models, /v1/completions and /v1/chat/completions in OpenAI's shapes.

Beside them, where a trainer asks with `return_token_ids`: token_ids and weight_versions of
every choice, prompt_token_ids of the reply. `weight_version` is always there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rondel.generate.engine.builtin.text import HALF
from rondel.generate.engine.server.answers import AnswerDelta, SampleAnswer
from rondel.generate.engine.server.chat_fields import read_messages, read_template_fields, read_tools
from rondel.generate.engine.server.fields import RequestFields
from rondel.generate.engine.server.sampling_fields import BIGGEST, read_draw, read_prompts, read_seed
from rondel.generate.engine.server.service import GenerationRequest, GenerationService
from rondel.generate.engine.server.tool_calls import CallReader, call_fields, call_grammar
from rondel.text.tokenization import SPLIT

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)


def read_completion(f: RequestFields, service: GenerationService) -> CompletionReply:
    """OpenAI's text completion: `prompt` is a string, token ids, or a list of either. Control
    tokens that a string spells are text, unless it says split_special_tokens = false."""
    prompt = f.read_field("prompt")
    asked = _read_common_fields(f, service, default_tokens=16)
    asked.prompts, asked.split = read_prompts(f, prompt), f.read_flag(SPLIT, True)
    top = f.read_integer("logprobs", None, 0, 5)
    asked.echo = f.read_flag("echo")
    if asked.echo and asked.stream:
        raise f.field_error("echo", "a stream tells what is new: ask without stream, or without echo")
    if asked.echo and top is not None:
        asked.wants |= {"prompt_logprobs", *([f"prompt_top_logprobs:{top}"] if top else [])}
    f.allow_only("suffix", "")
    f.allow_only("best_of", 1, asked.n)
    return _build_reply(f, service, asked, chat=False, logprobs=top is not None, top=top or 0)


def read_chat(f: RequestFields, service: GenerationService) -> CompletionReply:
    """OpenAI's chat: messages go through the model's own template, `tools` with them."""
    messages = read_messages(f, f.read_field("messages"))
    asked = _read_common_fields(f, service, default_tokens=None)
    asked.messages, asked.tools = messages, read_tools(f)
    asked.template, asked.goes_on = read_template_fields(f, messages)
    grammar = _response_grammar(f)
    if grammar and asked.draw["grammar"]:
        raise f.field_error("response_format", "structured_outputs says it, too; give one of the two")
    asked.draw["grammar"] = asked.draw["grammar"] or grammar
    if asked.tools and asked.tools.required:
        if asked.draw["grammar"]:
            raise f.field_error("tool_choice", "an answer cannot be a call and have another form, too")
        asked.draw["grammar"] = call_grammar(asked.tools, service.call_format, service.tokenizer)
    f.allow_only("modalities", ["text"])
    logprobs = f.read_flag("logprobs")
    top = f.read_integer("top_logprobs", 0, 0, 20)
    if top and not logprobs:
        raise f.field_error("top_logprobs", "it needs logprobs = true")
    return _build_reply(f, service, asked, chat=True, logprobs=logprobs, top=top)


def _read_common_fields(
    f: RequestFields, service: GenerationService, *, default_tokens: int | None
) -> GenerationRequest:
    adapter = service.adapter_called(f.read_string("model", service.name))
    draw = read_draw(f)
    draw["min_tokens"] = f.read_integer("min_tokens", 0, 0, BIGGEST)
    draw["grammar"] = _structured_grammar(f)
    old, new = f.read_integer("max_tokens", None, 0, BIGGEST), f.read_integer("max_completion_tokens", None, 0, BIGGEST)
    if None not in (old, new) and old != new:
        raise f.field_error("max_tokens", f"max_completion_tokens says {new}; give one of the two")
    limit = default_tokens if (given := old if new is None else new) is None else given
    told = f.read_integer("prompt_logprobs", None, 0, 20)
    wants = set[str]() if told is None else {"prompt_logprobs"} | ({f"prompt_top_logprobs:{told}"} if told else set())
    return GenerationRequest(
        draw=draw,
        max_tokens=limit,
        wants=frozenset(wants),
        tells_prompt=told is not None,
        n=f.read_integer("n", 1, 1, service.limits.samples),
        seed=read_seed(f),
        id=f.read_string("rid") or "",
        adapter=adapter,
        stream=f.read_flag("stream"),
    )


def _structured_grammar(f: RequestFields) -> dict[str, Any] | None:
    """vLLM's structured_outputs as Sampling's grammar."""
    wanted = f.take_object("structured_outputs")
    found: list[dict[str, Any]] = []
    if (schema := wanted.read_field("json")) is not None:
        found.append({"json_schema": schema})
    if wanted.read_flag("json_object"):
        found.append({"json_schema": {"type": "object"}})
    found += [{kind: text} for kind in ("regex", "grammar") if (text := wanted.read_string(kind)) is not None]
    if choices := wanted.read_strings("choice", 1024):
        found.append({"grammar": f"start: {' | '.join(json.dumps(choice) for choice in choices)}\n"})
    wanted.refuse_unknown_fields()
    if len(found) > 1:
        raise f.field_error("structured_outputs", "give one of json, json_object, regex, grammar, choice")
    return found[0] if found else None


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


def _build_reply(
    f: RequestFields, service: GenerationService, asked: GenerationRequest, *, chat: bool, logprobs: bool, top: int
) -> CompletionReply:
    options = f.take_object("stream_options")
    usage = options.read_flag("include_usage")
    options.refuse_unknown_fields()
    token_ids = f.read_flag("return_token_ids")
    f.refuse_unknown_fields()
    if asked.max_tokens == 0:
        if asked.stream:
            raise f.field_error("max_tokens", "a stream of no tokens; ask without stream")
        asked.draw["min_tokens"], asked.keeps = 0, 0
        asked.max_tokens = 1  # what is computed anyway is not told
    asked.top = top
    asked.id = asked.id or f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
    calls = CallReader(service.call_format, service.tokenizer, asked.tools) if asked.tools else None
    return CompletionReply(service, asked, chat, logprobs, token_ids, usage, calls)


@dataclass(slots=True)
class CompletionReply:
    """What is answered to one request, at once or in chunks."""

    service: GenerationService
    asked: GenerationRequest
    chat: bool
    logprobs: bool
    token_ids: bool
    usage_at_end: bool
    calls: CallReader | None = None

    def response_body(self, answers: list[SampleAnswer]) -> dict[str, Any]:
        choices = []
        for a in answers:
            if self.asked.keeps is not None:
                a.cut_to(self.asked.keeps)
            text, called = self.calls.split(a) if self.calls else (a.text, [])
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text or (None if called else ""),
                "refusal": None,
            }
            if called:
                message["tool_calls"] = call_fields(self.asked.id, a.index, called)
            said = {"message": message} if self.chat else {"text": self._echoed_text(a) + text}
            choice = {"index": a.index, **said, **self._token_fields(AnswerDelta(a, text, 0, len(a.tokens), ends=True))}
            if called:
                choice["finish_reason"] = "tool_calls"
            if self.asked.tells_prompt:
                choice["prompt_logprobs"] = self._prompt_logprobs(a)
            choices.append(choice)
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
        text = self.calls.next_text(piece) if self.calls else piece.text
        delta: dict[str, Any] = {"content": text} if text or not piece.ends else {}
        called = self.calls.split(piece.answer)[1] if self.calls and piece.ends else []
        if called:
            delta["tool_calls"] = call_fields(self.asked.id, piece.answer.index, called, streamed=True)
        said: dict[str, Any] = {"delta": delta} if self.chat else {"text": text}
        choice = {"index": piece.answer.index, **said, **self._token_fields(piece)}
        if called:
            choice["finish_reason"] = "tool_calls"
        return {**self._response_header(), "choices": [choice]}

    def _echoed_text(self, a: SampleAnswer) -> str:
        return self.service.tokenizer.decode(a.prompt, skip_special_tokens=True) if self.asked.echo else ""

    def _prompt_logprobs(self, a: SampleAnswer) -> list[dict[str, Any] | None]:
        """vLLM's: for each token of the prompt but the first, it and the likeliest by their ids."""
        known = a.completion.prompt_logprobs if a.completion else None
        tops = (a.completion.prompt_top_logprobs if a.completion else None) or [[] for _ in a.prompt]
        rows: list[dict[str, Any] | None] = [None]
        for token, logprob, top in list(zip(a.prompt, known or [], tops))[1:]:
            ranked = {t: (lp, rank) for rank, (t, lp) in enumerate(top, 1)}
            told = {token: ranked.get(token, (logprob, None)), **ranked}
            rows.append(
                {
                    str(t): {"logprob": lp, "rank": rank, "decoded_token": self._decode_token(t)}
                    for t, (lp, rank) in told.items()
                }
            )
        return rows

    def end_stream(self, answers: list[SampleAnswer]) -> Iterator[dict[str, Any]]:
        if self.usage_at_end:
            yield {**self._response_header(), "choices": [], "usage": self._token_usage(answers)}

    def _response_header(self, *, chunk: bool = True) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.asked.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.asked.adapter or self.service.name,
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
            logprobs: list[float | None] = list(a.logprobs[part])
            likely: list[dict[str, float] | None] = [self._by_text(top) for top in tops]
            if self.asked.echo and a.completion:  # the first token has nothing before it
                given = a.completion.prompt_top_logprobs or []
                texts = [self._decode_token(t) for t in a.prompt] + texts
                logprobs = [None, *(a.completion.prompt_logprobs or [])[1:], *logprobs]
                likely = [None, *map(self._by_text, given[1:]), *likely] if given else likely
            offsets = [0]
            for text in texts:
                offsets.append(offsets[-1] + len(text))
            return {
                "tokens": texts,
                "token_logprobs": logprobs,
                "top_logprobs": likely or None,
                "text_offset": offsets[:-1],
            }
        rows = zip(texts, a.logprobs[part], tops or [[]] * len(texts))
        content = [
            {**_token_logprob(text, lp), "top_logprobs": [_token_logprob(self._decode_token(t), v) for t, v in top]}
            for text, lp, top in rows
        ]
        return {"content": content, "refusal": None}

    def _by_text(self, top: list[tuple[int, float]]) -> dict[str, float]:
        """Pieces of a character are told by their names in the vocabulary, for all of them are decoded alike."""
        texts = [self._decode_token(t) for t, _ in top]
        names = self.service.tokenizer.convert_ids_to_tokens([t for t, _ in top])
        return {name if HALF in text else text: lp for text, name, (_, lp) in zip(texts, names, top)}

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
    return {"object": "list", "data": [model_card(service, name, born) for name in (service.name, *service.adapters)]}


def card_of(name: str, born: int) -> dict[str, Any]:
    """What is told of any model."""
    return {"id": name, "object": "model", "created": born, "owned_by": "rondel", "root": name}


def model_card(service: GenerationService, name: str, born: int) -> dict[str, Any]:
    """Of the model, or of an adapter on it."""
    return {
        **card_of(name, born),
        "parent": None if name == service.name else service.name,
        "max_model_len": service.max_context_tokens,
    }
