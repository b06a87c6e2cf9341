"""/tokenize, /detokenize and /version, in vLLM's shapes."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request

from rondel.generate.engine.server.chat_fields import read_messages, read_template_fields, read_tools
from rondel.generate.engine.server.fields import RequestFields
from rondel.generate.engine.server.sampling_fields import BIGGEST, read_prompts
from rondel.generate.engine.server.service import GenerationRequest, GenerationService
from rondel.generate.engine.server.told import fields_of


async def tokenize(service: GenerationService, request: Request) -> dict[str, Any]:
    """Of `prompt`, or of `messages` with `tools` as the chat template writes them. -> tokens, count, max_model_len."""
    f = await fields_of(service, request)
    f.read_string("model")
    add_special, texts = f.read_flag("add_special_tokens", True), f.read_flag("return_token_strs")
    if (given := f.read_field("messages")) is not None:
        asked = GenerationRequest(messages=read_messages(f, given), tools=read_tools(f))
        asked.template, asked.goes_on = read_template_fields(f, asked.messages or [])
        f.refuse_unknown_fields()
        tokens = (await service.prepare_samples(asked)).answers[0].prompt
    else:
        (prompt,) = read_prompts(f, f.read_string("prompt", ""))
        f.refuse_unknown_fields()
        covered = service.special.cover_control_tokens(prompt)
        tokens = await service.off_loop(partial(service.special.encode, covered, add_special_tokens=add_special))
    return {
        "count": len(tokens),
        "max_model_len": service.max_context_tokens,
        "tokens": tokens,
        "token_strs": service.tokenizer.convert_ids_to_tokens(tokens) if texts else None,
    }


async def detokenize(service: GenerationService, request: Request) -> dict[str, Any]:
    f: RequestFields = await fields_of(service, request)
    f.read_string("model")
    tokens = f.read_field("tokens", [])
    size = len(service.tokenizer)
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < min(size, BIGGEST) for t in tokens):
        raise f.field_error("tokens", f"it must be a list of token ids below {size}")
    f.refuse_unknown_fields()
    return {"prompt": await service.off_loop(partial(service.tokenizer.decode, tokens))}


async def get_version(service: GenerationService, request: Request) -> dict[str, Any]:
    return {"version": version("rondel")}
