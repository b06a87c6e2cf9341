"""What a trainer tells an engine, under SGLang's names and payloads. -> {"success": true, "message": ..., ...}"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from rondel.generate.engine.builtin import staged
from rondel.generate.engine.server.errors import Refusal
from rondel.generate.engine.server.fields import Fields, parse, read_body, read_fields
from rondel.generate.engine.server.service import Service
from rondel.words.errors import RondelError

PAUSES = {"hold": "hold", "in_place": "hold", "retract": "hold", "drain": "drain", "abort": "abort"}  # SGLang's names beside ours
TAGS = ("kv_cache", "weights", "cuda_graph")
LEASE = 600.0  # seconds after which a pause that nobody ended ends itself


def done(message: str, **more: Any) -> dict[str, Any]:
    return {"success": True, "message": message, **more}


async def fields_of(service: Service, request: Request) -> Fields:
    return await read_fields(request, service.limits.body)


# -- pause, abort, cache ---------------------------------------------------------------------------


async def pause_generation(service: Service, request: Request) -> dict[str, Any]:
    """hold or in_place: parked between two steps. retract: parked, caches dropped. drain: the begun ones end. abort: partial answers go out."""
    f = await fields_of(service, request)
    mode, lease = f.text("mode", "abort"), f.number("lease", LEASE, 0.001, 86400.0)
    f.end()
    if mode not in PAUSES:
        raise f.wrong("mode", f"it is one of {', '.join(PAUSES)}")
    await service.engine.pause(PAUSES[mode], lease)  # type: ignore[arg-type]
    if mode == "retract":
        await service.engine.flush()
    status = await service.engine.status()
    return done(f"paused ({mode}) for at most {lease:g} s", parked=status.parked)


async def continue_generation(service: Service, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    f.only("torch_empty_cache", True, False)  # SGLang's hint to its allocator
    f.end()
    await service.engine.resume()
    return done(f"the engine is {service.engine.state}")


async def abort_request(service: Service, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    rid, everything = f.text("rid"), f.flag("abort_all")
    f.end()
    if not (rid or everything):
        raise Refusal(400, "say which: rid = the request's id, or abort_all = true", param="rid")
    n = await service.engine.abort(lambda r: everything or r.id == rid)
    return done(f"{n} answers end here", aborted=n)


async def flush_cache(service: Service, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    f.end()
    freed = await _refused(409, service.engine.flush())
    return done(f"{freed} pages are free again", freed_pages=freed)


async def _refused(status: int, work: Any) -> Any:
    try:
        return await work
    except RondelError as error:
        raise Refusal(status, str(error)) from error


# -- memory ----------------------------------------------------------------------------------------


def _tags(f: Fields) -> tuple[str, ...]:
    tags = f.take("tags")
    f.end()
    if tags is None:
        return TAGS
    if not isinstance(tags, list) or not all(t in TAGS for t in tags if isinstance(t, str)) or not all(isinstance(t, str) for t in tags):
        raise f.wrong("tags", f"it must be a list of {', '.join(TAGS)}")
    return tuple(tags)


async def release_memory_occupation(service: Service, request: Request) -> dict[str, Any]:
    """Raises while requests run (law 8). Parked ones compute their context again afterwards."""
    tags, pages = _tags(await fields_of(service, request)), service.engine.pages
    before = pages.keys.bytes + pages.values.bytes
    await _refused(409, service.engine.sleep(tags))
    freed = before - pages.keys.bytes - pages.values.bytes
    return done(f"{freed} bytes of {', '.join(tags) or 'nothing'} are given back", freed_bytes=freed, asleep=sorted(tags))


async def resume_memory_occupation(service: Service, request: Request) -> dict[str, Any]:
    await service.engine.wake(_tags(await fields_of(service, request)))
    return done(f"the engine is {service.engine.state}")


# -- weights ---------------------------------------------------------------------------------------


def _version(service: Service, f: Fields) -> int:
    """SGLang's is a string; ours counts, so that staleness can be measured."""
    given = f.take("weight_version", service.engine.version + 1)
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 16:
        given = int(given)
    if type(given) is not int or not 0 <= given < 1 << 53:
        raise f.wrong("weight_version", "it must be a whole number; left out it is the next one")
    return given


async def _update(service: Service, read: Callable[..., Any], source: Any, version: int, f: Fields) -> dict[str, Any]:
    keep, abort = not f.flag("flush_cache", True), f.flag("abort_all_requests")
    f.end()
    if service.updating.locked():
        raise Refusal(409, "another update is on its way; ask again when it is done")
    async with service.updating:
        if abort:
            await service.engine.abort(lambda _: True)
        parked = service.open
        try:
            served = await staged.update(service.engine, service.run, read, source, version=version, keep=keep)
        except RondelError as error:
            old = service.engine.state != "refusing"
            raise Refusal(400 if old else 500, f"{error}{f'; version {service.engine.version} goes on serving' if old else ''}") from error
    return done(f"version {served} serves", weight_version=str(served), num_paused_requests=parked)


async def update_weights_from_disk(service: Service, request: Request) -> dict[str, Any]:
    """A folder on this machine. Requests in flight are parked meanwhile and go on, each token with its version."""
    f = await fields_of(service, request)
    path, version = f.text("model_path"), _version(service, f)
    f.only("load_format", "auto", "safetensors")
    for harmless in ("is_async", "torch_empty_cache", "recapture_cuda_graph"):
        f.only(harmless, False, True)
    f.only("keep_pause", False)
    f.only("manifest", {})
    f.whole("token_step", 0, 0, 1 << 53)
    if not path or "\0" in path or len(path) > 4096:
        raise f.wrong("model_path", "it must name a folder")
    return await _update(service, staged.from_disk, path, version, f)


async def update_weights_from_tensor(service: Service, request: Request) -> dict[str, Any]:
    """All tensors as one safetensors file: as the body itself, or base64 in `serialized_named_tensors`. Never pickle."""
    most = 4096 + 2 * sum(p.numel() * p.element_size() for p in service.engine.loaded.model.parameters())
    body = await read_body(request, most + service.limits.body)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "application/octet-stream":
        f = Fields({k: v for k, v in request.query_params.items() if k == "weight_version"})
        return await _update(service, staged.from_bytes, body, _version(service, f), f)
    if kind != "application/json":
        raise Refusal(415, f"the body is '{kind or 'of no type'}'; send application/octet-stream, or JSON")
    f = Fields(parse(body))
    parts = f.texts("serialized_named_tensors", 1)
    f.only("load_format", "safetensors")
    if len(parts) != 1:
        raise Refusal(
            400,
            "serialized_named_tensors must be one base64 text of a safetensors file (pickle is never read); "
            "or send the file itself as application/octet-stream",
            param="serialized_named_tensors",
        )
    try:
        blob = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, "serialized_named_tensors is not base64", param="serialized_named_tensors") from None
    return await _update(service, staged.from_bytes, blob, _version(service, f), f)


def missing(transport: str) -> Any:
    async def update(service: Service, request: Request) -> dict[str, Any]:
        raise Refusal(
            501,
            f"weights over {transport} are not carried by this server yet; use /update_weights_from_disk or /update_weights_from_tensor",
            code="not_implemented",
        )

    return update


# -- facts -----------------------------------------------------------------------------------------


async def get_weight_version(service: Service, request: Request) -> dict[str, Any]:
    return {"weight_version": str(service.engine.version)}


async def get_model_info(service: Service, request: Request) -> dict[str, Any]:
    loaded = service.engine.loaded
    return {
        "model_path": loaded.name,
        "tokenizer_path": loaded.name,
        "is_generation": True,
        "model_type": loaded.model.config.model_type,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "max_model_len": service.room,
        "weight_version": str(service.engine.version),
    }


async def get_server_info(service: Service, request: Request) -> dict[str, Any]:
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
            "context": service.room,
        },
    }
