"""A request: who sends it, its body within a limit, and whether its client is still there."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request

from rondel.system.http.response import GONE, RequestRefusal

READING = 60.0  # seconds in which a body must have arrived


def bearer_token(request: Request) -> str:
    """The key of `Authorization: Bearer KEY`, or nothing."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def keys_match(given: str, key: str) -> bool:
    """Compare in a time that does not tell how much of the key is right."""
    return hmac.compare_digest(given.encode(), key.encode())


def from_a_web_page(request: Request) -> bool:
    """Without a key, any page open in a browser on this machine could steer a server;
    programs send none of these headers.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    try:
        if origin is not None and urlsplit(origin).netloc != host:
            return True
        return (urlsplit(f"//{host}").hostname or "localhost") not in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return True


async def read_body(request: Request, limit: int, *, remedy: str = "") -> bytes:
    """The whole body; more than `limit` bytes are refused before they are held."""
    too_large = RequestRefusal(413, f"the body is larger than {limit} bytes{remedy}", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(READING):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise RequestRefusal(408, f"the body did not arrive within {READING:g} s") from None
    except ClientDisconnect:
        raise RequestRefusal(GONE, "the client left while it was sending") from None
    return bytes(body)


async def wait_for_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def finish_or_cancel(work: asyncio.Task[Any], receive: Any) -> None:
    """Return when `work` is done. It is cancelled if its client leaves, or whoever waits here is cancelled."""
    left = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, left):
            task.cancel()
        await asyncio.wait([work, left])
