"""/generate under SGLang's names: text or input_ids in, text, output_ids and meta_info out. A
stream repeats the text so far, as theirs does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rondel.generate.engine.server.answers import AnswerDelta, SampleAnswer
from rondel.generate.engine.server.fields import RequestFields, shorten_json
from rondel.generate.engine.server.sampling_fields import BIGGEST, read_draw, read_prompts, read_seed
from rondel.generate.engine.server.service import GenerationRequest, GenerationService
from rondel.system.http.response import RequestRefusal
from rondel.text.tokenization import SPLIT

HARMLESS = frozenset(
    {"log_metrics", "priority", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
)
NAMED = "image_data"
BASE64 = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")


def read_generate(f: RequestFields, service: GenerationService) -> NativeReply:
    text, ids = f.read_field("text"), f.read_field("input_ids")
    if (text is None) == (ids is None):
        raise RequestRefusal(400, "give either text or input_ids", param="text")
    name, given = ("text", text) if ids is None else ("input_ids", ids)
    prompts = read_prompts(f, given, name)
    many = isinstance(given, list) and not isinstance(given[0], int)
    p = f.take_object("sampling_params")
    draw = read_draw(p, hottest=100.0)
    draw["min_tokens"] = p.read_integer("min_new_tokens", 0, 0, BIGGEST)
    p.allow_only("skip_special_tokens", True)
    p.allow_only("spaces_between_special_tokens", True)
    p.allow_only("no_stop_trim", False)
    schema, regex = p.read_string("json_schema"), p.read_string("regex")
    if schema is not None and regex is not None:
        raise p.field_error("regex", "there is a json_schema, too; give one of them")
    draw["grammar"] = {"json_schema": schema} if schema is not None else {"regex": regex} if regex is not None else None
    for unknown in ("ebnf", "structural_tag", "custom_params", "stop_regex"):
        p.allow_only(unknown)
    rid = f.read_field("rid")
    if rid is not None and not isinstance(rid, str):
        raise f.field_error("rid", "it must be a string; samples and prompts of one request share it")
    asked = GenerationRequest(
        prompts=prompts,
        images=_read_images(f, len(prompts), many=many),
        split=f.read_flag(SPLIT, True),
        draw=draw,
        max_tokens=p.read_integer("max_new_tokens", 128, 1, BIGGEST),
        n=p.read_integer("n", 1, 1, service.limits.samples),
        seed=read_seed(p, "sampling_seed"),
        id=rid or uuid4().hex,
        adapter=service.adapter_called(f.read_string("lora_path")),
        stream=f.read_flag("stream"),
    )
    p.refuse_unknown_fields()
    logprobs = f.read_flag("return_logprob")
    start, top = f.read_integer("logprob_start_len", -1, -1, 0), f.read_integer("top_logprobs_num", 0, 0, 20)
    if logprobs:
        asked.top, asked.wants = top, frozenset({"prompt_logprobs"} if start == 0 else ())
    f.allow_only("return_text_in_logprobs", False)
    for unknown in ("token_ids_logprob", "video_data", "audio_data", "session_params", "input_embeds"):
        f.allow_only(unknown)
    f.allow_only("return_hidden_states", False)
    if f.read_flag("return_routed_experts"):
        if service.experts is None:
            raise f.field_error(
                "return_routed_experts",
                "this server records none: of a mixture of experts start it with --enable-return-routed-experts",
            )
        asked.wants |= {"experts"}
    f.refuse_unknown_fields()
    return NativeReply(service, asked, logprobs, many or asked.n > 1)


def _read_images(f: RequestFields, prompts: int, *, many: bool) -> list[list[str]]:
    """`image_data`: one image or a list of them, of several prompts a list for each;
    each is a data: URL, or base64 alone.
    """
    given = f.read_field("image_data")
    if given is None:
        return []
    rows = given if many else [given]
    if not isinstance(rows, list) or len(rows) != prompts:
        raise RequestRefusal(
            400,
            f"image_data of {prompts} prompts must be a list of {prompts}, each an image, a list of images or null",
            param=NAMED,
        )
    return [
        [_image_url(one) for one in (row if isinstance(row, list) else [row])] if row is not None else []
        for row in rows
    ]


def _image_url(image: Any) -> str:
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not (url.startswith("data:image/") or BASE64.fullmatch(url[:100])):
        said = f"image_data has {shorten_json(url) if not isinstance(url, str) else repr(url[:60])}"
        raise RequestRefusal(
            400, f"{said}; an image is sent whole, as data:image/png;base64,... or its base64 alone", param=NAMED
        )
    return url if url.startswith("data:") else f"data:image/png;base64,{url}"


@dataclass(slots=True)
class NativeReply:
    service: GenerationService
    asked: GenerationRequest
    logprobs: bool
    many: bool

    def response_body(self, answers: list[SampleAnswer]) -> Any:
        rows = [self._sample_row(a, a.text) for a in answers]
        return rows if self.many else rows[0]

    def begin_stream(self, answers: list[SampleAnswer]) -> Iterator[dict[str, Any]]:
        return iter(())

    def stream_chunk(self, piece: AnswerDelta) -> dict[str, Any]:
        a = piece.answer
        return self._sample_row(a, a.text, piece.last, ends=piece.ends) | ({"index": a.index} if self.many else {})

    def end_stream(self, answers: list[SampleAnswer]) -> Iterator[dict[str, Any]]:
        return iter(())

    def _sample_row(self, a: SampleAnswer, text: str, upto: int | None = None, *, ends: bool = True) -> dict[str, Any]:
        tokens, versions = a.tokens[:upto], a.versions[:upto]
        meta: dict[str, Any] = {
            "id": self.asked.id,
            "finish_reason": self._finish_reason(a) if ends else None,
            "prompt_tokens": len(a.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": a.completion.cached_tokens if a.completion else 0,
            "weight_version": str(versions[-1] if versions else self.service.engine.version),
            "weight_versions": versions,
        }
        if a.completion:
            meta["e2e_latency"] = a.completion.timings.get("total", 0.0)
            if ends and self.service.experts is not None and a.completion.experts is not None:
                meta["routed_experts"] = self.service.experts.encode(a.completion.experts)
        if self.logprobs:
            meta["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(a.logprobs, tokens)]
            if self.asked.top:
                meta["output_top_logprobs"] = [[[lp, t, None] for t, lp in top] for top in a.top[:upto]]
            if a.completion and (given := a.completion.prompt_logprobs):
                meta["input_token_logprobs"] = [
                    [lp if i else None, t, None] for i, (lp, t) in enumerate(zip(given, a.prompt))
                ]
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    def _finish_reason(self, a: SampleAnswer) -> dict[str, Any]:
        reason = a.completion.finish_reason if a.completion else "abort"
        match reason:
            case "stop":
                whole = self.service.engine.loaded.tokenizer.decode(a.tokens, skip_special_tokens=True)
                strings = (stop for stop in a.stops if whole.startswith(stop, len(a.text)))
                return {"type": "stop", "matched": next(strings, a.tokens[-1] if a.tokens else None)}
            case "length":
                return {"type": "length", "length": len(a.tokens)}
        return {"type": "abort", "message": "aborted; tokens, logprobs and versions up to here are returned"}
