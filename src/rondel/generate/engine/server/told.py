"""What control endpoints share: their fields, their answer, and one update at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from rondel.core.errors import RondelError
from rondel.generate.engine.server.fields import RequestFields, read_fields
from rondel.system.http.request import wait_for_disconnect
from rondel.system.http.response import GONE, RequestRefusal

if TYPE_CHECKING:
    from rondel.generate.engine.server.service import GenerationService


def success_reply(message: str, **more: Any) -> dict[str, Any]:
    return {"success": True, "message": message, **more}


async def fields_of(service: GenerationService, request: Request) -> RequestFields:
    return await read_fields(request, service.limits.body)


def version_of(service: GenerationService, f: RequestFields) -> int:
    """SGLang's is a string; ours counts, so that staleness can be measured. An older one is
    refused: it is late, unless `rollback` says it is meant.
    """
    given = f.read_field("weight_version", service.engine.version + 1)
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 16:
        given = int(given)
    if type(given) is not int or not 0 <= given < 1 << 53:
        raise f.field_error("weight_version", "it must be a whole number; left out it is the next one")
    if not f.read_flag("rollback") and given < service.engine.version:
        raise RequestRefusal(
            409,
            f"weight_version = {given}, and {service.engine.version} serves: who goes back to an older version says so "
            f"with rollback = true",
            param="weight_version",
        )
    return given


@asynccontextmanager
async def exclusive_update(service: GenerationService) -> AsyncIterator[None]:
    """One at a time; what goes wrong is told with what serves now."""
    if service.updating.locked():
        raise RequestRefusal(409, "another update is on its way; ask again when it is done")
    async with service.updating, errors_as_refusals(service):
        yield


@asynccontextmanager
async def errors_as_refusals(service: GenerationService) -> AsyncIterator[None]:
    """What goes wrong is told with what serves now."""
    try:
        yield
    except RondelError as error:
        old = service.engine.state != "refusing"
        raise RequestRefusal(
            400 if old else 500, f"{error}{f'; version {service.engine.version} goes on serving' if old else ''}"
        ) from error


@asynccontextmanager
async def client_lifetime(request: Request) -> AsyncIterator[None]:
    """What is done inside ends with the client that asked for it."""
    task = asyncio.current_task()
    assert task is not None

    async def cancel_on_disconnect() -> None:
        await wait_for_disconnect(request.receive)
        task.cancel()

    left = asyncio.create_task(cancel_on_disconnect())
    try:
        yield
    except asyncio.CancelledError:
        if not left.done():
            raise  # by somebody else
        task.uncancel()
        raise RequestRefusal(GONE, "the client left") from None
    finally:
        left.cancel()


async def deliver_weights(
    service: GenerationService, deliver: Callable[[], Awaitable[int]], *, abort: bool
) -> dict[str, Any]:
    if abort:
        await service.engine.abort(lambda _: True)
    parked = service.open
    version = await deliver()
    return success_reply(f"version {version} serves", weight_version=str(version), num_paused_requests=parked)
