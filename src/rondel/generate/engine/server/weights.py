"""New weights for a server, under SGLang's names and payloads: a folder, a body, a
segment of shared memory. Never pickle.

Whatever the way, tensors are checked beside those that serve; a bad update leaves the old version serving (law 6).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from rondel.core.types import Manifest, Route
from rondel.generate.engine.builtin import staged_update
from rondel.generate.engine.server.fields import RequestFields, parse_body, read_body
from rondel.generate.engine.server.told import deliver_weights, exclusive_update, fields_of, version_of
from rondel.system.http.response import RequestRefusal

if TYPE_CHECKING:
    from rondel.generate.engine.server.service import GenerationService


async def _apply_update(
    service: GenerationService, f: RequestFields, deliver: Callable[..., Awaitable[int]]
) -> dict[str, Any]:
    """`deliver(keep=...)` -> the version served."""
    keep, abort = not f.read_flag("flush_cache", True), f.read_flag("abort_all_requests")
    f.refuse_unknown_fields()
    async with exclusive_update(service):
        return await deliver_weights(service, lambda: deliver(keep=keep), abort=abort)


async def update_weights_from_disk(service: GenerationService, request: Request) -> dict[str, Any]:
    """A folder on this machine. Requests in flight are parked meanwhile and go on, each token with its version."""
    f = await fields_of(service, request)
    path, version = f.read_string("model_path"), version_of(service, f)
    f.allow_only("load_format", "auto", "safetensors")
    for harmless in ("is_async", "torch_empty_cache", "recapture_cuda_graph"):
        f.allow_only(harmless, False, True)
    f.allow_only("keep_pause", False)
    f.allow_only("manifest", {})
    f.read_integer("token_step", 0, 0, 1 << 53)
    if not path or "\0" in path or len(path) > 4096:
        raise f.field_error("model_path", "it must name a folder")
    return await _apply_update(
        service,
        f,
        partial(
            staged_update.apply_update, service.engine, service.run, staged_update.from_disk, path, version=version
        ),
    )


async def update_weights_from_tensor(service: GenerationService, request: Request) -> dict[str, Any]:
    """All tensors as one safetensors file: as the body itself, or base64 in
    `serialized_named_tensors`. Never pickle.
    """
    most = 4096 + 2 * sum(p.numel() * p.element_size() for p in service.engine.loaded.model.parameters())
    body = await read_body(request, most + service.limits.body)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "application/octet-stream":
        asked = request.query_params
        back = asked.get("rollback")
        f = RequestFields(
            {
                "weight_version": asked.get("weight_version"),
                "rollback": back == "true" if back in ("true", "false") else back,
            }
        )
        return await _apply_update(service, f, _from_bytes(service, body, version_of(service, f)))
    if kind != "application/json":
        raise RequestRefusal(415, f"the body is '{kind or 'of no type'}'; send application/octet-stream, or JSON")
    f = RequestFields(parse_body(body))
    parts = f.read_strings("serialized_named_tensors", 1)
    f.allow_only("load_format", "safetensors")
    if len(parts) != 1:
        raise RequestRefusal(
            400,
            "serialized_named_tensors must be one base64 text of a safetensors file (pickle is never read); "
            "or send the file itself as application/octet-stream",
            param="serialized_named_tensors",
        )
    try:
        blob = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        raise RequestRefusal(400, "serialized_named_tensors is not base64", param="serialized_named_tensors") from None
    return await _apply_update(service, f, _from_bytes(service, blob, version_of(service, f)))


def _from_bytes(service: GenerationService, blob: bytes, version: int) -> Callable[..., Awaitable[int]]:
    return partial(
        staged_update.apply_update, service.engine, service.run, staged_update.from_bytes, blob, version=version
    )


async def update_weights_from_ipc(service: GenerationService, request: Request) -> dict[str, Any]:
    """A segment of shared memory that a process of this machine has written, read in place:
    `manifest` and `segment` of its publication.

    SGLang's payload are CUDA handles, pickled, on a ZMQ socket: unpickling runs what the
    other side wrote, so that way stays shut.
    """
    f = await fields_of(service, request)
    if f.read_field("zmq_handles") is not None:
        raise f.field_error(
            "zmq_handles",
            "what comes that way is pickled, and pickle is never read: send manifest and segment of shared memory",
        )
    if (segment := service.segment) is None:
        raise RequestRefusal(
            501, "this server maps no memory of others; use /update_weights_from_disk", code="not_implemented"
        )
    at = f.take_object("segment")
    path, size, number = (
        at.read_string("path", "") or "",
        at.read_integer("size", 0, 1, 1 << 50),
        at.read_integer("number", 0, 0, 1 << 60),
    )
    at.refuse_unknown_fields()
    try:
        manifest = Manifest.from_dict(f.read_field("manifest", {})).with_version(version_of(service, f))
    except ValueError as error:
        raise f.field_error("manifest", str(error)) from None

    async def deliver_segment(*, keep: bool) -> int:
        return await staged_update.deliver_update(
            service.engine, manifest, Route("ipc", segment(path, size, number)), keep=keep
        )

    return await _apply_update(service, f, deliver_segment)
