"""Adapters that come and go while a server runs, under the names and payloads of vLLM and SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from rondel.core.errors import ModelError
from rondel.generate.engine.server.told import fields_of, success_reply
from rondel.system.http.response import RequestRefusal

if TYPE_CHECKING:
    from rondel.generate.engine.server.service import GenerationService
    from rondel.models.adapter_rows import ServedAdapters


async def load_adapter(service: GenerationService, request: Request) -> dict[str, Any]:
    """{"lora_name": NAME, "lora_path": FOLDER}: requests whose model is NAME read it from now on. A name means one
    adapter: what is cached under it was computed with its weights.
    """
    f, bank = await fields_of(service, request), _bank_of(service)
    name, folder = f.read_string("lora_name"), f.read_string("lora_path")
    f.allow_only("pinned", False)
    f.refuse_unknown_fields()
    if not name or not folder:
        raise RequestRefusal(400, "lora_name and lora_path say which adapter it is and in which folder it lies")
    if name == service.name:
        raise RequestRefusal(409, f"'{name}' is the model's own name", param="lora_name")
    try:
        await service.run(bank.load, name, folder)
    except ModelError as error:
        raise RequestRefusal(400, str(error), param="lora_path") from error
    return success_reply(f"'{name}' is served", loaded_adapters=service.adapters)


async def unload_adapter(service: GenerationService, request: Request) -> dict[str, Any]:
    """{"lora_name": NAME}: its answers that are being written end here."""
    f, bank = await fields_of(service, request), _bank_of(service)
    name = f.read_string("lora_name")
    f.refuse_unknown_fields()
    if name not in bank.served:
        raise RequestRefusal(404, f"no adapter '{name}' is served; there are {', '.join(service.adapters) or 'none'}")
    await service.engine.remove_adapter(name)
    return success_reply(f"'{name}' is gone", loaded_adapters=service.adapters)


def _bank_of(service: GenerationService) -> ServedAdapters:
    if (bank := service.engine.loaded.bank) is None:
        raise RequestRefusal(
            409,
            "this server was started without adapters: rondel serve MODEL --adapter NAME=FOLDER, or --enable-adapters",
        )
    return bank
