"""What a trainer tells an engine, under SGLang's names and payloads. -> {"success": true, "message": ..., ...}"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from rondel.core.errors import RondelError
from rondel.generate.engine.server.fields import RequestFields
from rondel.generate.engine.server.told import fields_of, success_reply
from rondel.system.http.response import RequestRefusal

if TYPE_CHECKING:
    from rondel.generate.engine.server.service import GenerationService

# SGLang's names beside ours
PAUSES = {"hold": "hold", "in_place": "hold", "retract": "hold", "drain": "drain", "abort": "abort"}
TAGS = ("kv_cache", "weights", "cuda_graph")
LEASE = 600.0  # seconds after which a pause that nobody ended ends itself


# -- pause, abort, cache ---------------------------------------------------------------------------


async def pause_generation(service: GenerationService, request: Request) -> dict[str, Any]:
    """hold or in_place: parked between two steps. retract: parked, caches dropped. drain: the
    begun ones end. abort: partial answers go out.
    """
    f = await fields_of(service, request)
    mode, lease = f.read_string("mode", "abort"), f.take_number("lease", LEASE, 0.001, 86400.0)
    f.refuse_unknown_fields()
    if mode not in PAUSES:
        raise f.field_error("mode", f"it is one of {', '.join(PAUSES)}")
    await service.engine.pause(PAUSES[mode], lease)  # type: ignore[arg-type]
    if mode == "retract":
        await service.engine.flush_cache()
    status = await service.engine.status()
    return success_reply(f"paused ({mode}) for at most {lease:g} s", parked=status.parked)


async def continue_generation(service: GenerationService, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    f.allow_only("torch_empty_cache", True, False)  # SGLang's hint to its allocator
    f.refuse_unknown_fields()
    await service.engine.resume()
    return success_reply(f"the engine is {service.engine.state}")


async def abort_request(service: GenerationService, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    rid, everything = f.read_string("rid"), f.read_flag("abort_all")
    f.refuse_unknown_fields()
    if not (rid or everything):
        raise RequestRefusal(400, "say which: rid = the request's id, or abort_all = true", param="rid")
    n = await service.engine.abort(lambda r: everything or r.id == rid)
    return success_reply(f"{n} answers end here", aborted=n)


async def flush_cache(service: GenerationService, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    f.refuse_unknown_fields()
    freed = await _await_or_refuse(409, service.engine.flush_cache())
    return success_reply(f"{freed} pages are free again", freed_pages=freed)


async def _await_or_refuse(status: int, work: Any) -> Any:
    try:
        return await work
    except RondelError as error:
        raise RequestRefusal(status, str(error)) from error


# -- memory ----------------------------------------------------------------------------------------


def _parse_tags(f: RequestFields) -> tuple[str, ...]:
    tags = f.read_field("tags")
    f.refuse_unknown_fields()
    if tags is None:
        return TAGS
    if (
        not isinstance(tags, list)
        or not all(t in TAGS for t in tags if isinstance(t, str))
        or not all(isinstance(t, str) for t in tags)
    ):
        raise f.field_error("tags", f"it must be a list of {', '.join(TAGS)}")
    return tuple(tags)


async def release_memory_occupation(service: GenerationService, request: Request) -> dict[str, Any]:
    """Raises while requests run (law 8). Parked ones compute their context again afterwards."""
    tags = _parse_tags(await fields_of(service, request))
    before = sum((await service.engine.status()).memory.values())
    await _await_or_refuse(409, service.engine.sleep(tags))
    freed = before - sum((await service.engine.status()).memory.values())
    return success_reply(
        f"{freed} bytes of {', '.join(tags) or 'nothing'} are given back", freed_bytes=freed, asleep=sorted(tags)
    )


async def resume_memory_occupation(service: GenerationService, request: Request) -> dict[str, Any]:
    await service.engine.wake(_parse_tags(await fields_of(service, request)))
    return success_reply(f"the engine is {service.engine.state}")


# -- facts -----------------------------------------------------------------------------------------


async def get_weight_version(service: GenerationService, request: Request) -> dict[str, Any]:
    return {"weight_version": str(service.engine.version)}


async def get_model_info(service: GenerationService, request: Request) -> dict[str, Any]:
    loaded = service.engine.loaded
    return {
        "model_path": loaded.name,
        "tokenizer_path": loaded.name,
        "is_generation": True,
        "model_type": loaded.model.config.model_type,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "max_model_len": service.max_context_tokens,
        "weight_version": str(service.engine.version),
    }


async def get_server_info(service: GenerationService, request: Request) -> dict[str, Any]:
    s = await service.engine.status()
    limits = service.limits
    return {
        "model": service.name,
        "weight_version": str(s.version),
        "state": "draining" if service.draining else s.state,
        "open": service.open,
        "running": s.running,
        "waiting": s.waiting,
        "parked": s.parked,
        "pages": {"free": s.pages_free, "cached": s.pages_cached, "total": s.pages_total},
        "capabilities": sorted(s.capabilities),
        "limits": {
            "body": limits.body,
            "samples": limits.samples,
            "queue": limits.queue,
            "deadline": limits.deadline,
            "context": service.max_context_tokens,
        },
    }
