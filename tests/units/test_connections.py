"""Clients that send half of a request: what a server of ours waits for, and for how long."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.requests import Request

from rondel.system.http.request import bearer_token, finish_or_cancel, keys_match, read_body
from rondel.system.http.response import RequestRefusal
from rondel.system.http.server import HttpServer, PatientConnection, bind_socket

WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def app(scope, receive, send):
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving():
    with bind_socket("127.0.0.1", 0, api_key="") as sock:
        ready = asyncio.Event()
        server = HttpServer(app, sock, drain=60, ready=ready.set)
        work = asyncio.create_task(server.serve())
        await ready.wait()
        try:
            yield server, work, sock.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(work, 20)


async def closed(reader) -> bytes:
    """What came until the server closed."""
    return await asyncio.wait_for(reader.read(), 20)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "])
def test_headers_that_do_not_come_are_not_waited_for(monkeypatch, sent):
    monkeypatch.setattr(PatientConnection, "HEADERS", 0.3)

    async def work():
        async with serving() as (_, _, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await closed(reader) == b""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)  # nor those of a later request
            writer.write(WHOLE)
            assert await reader.readuntil(b"ok")
            writer.write(sent or b"G")
            assert await closed(reader) == b""

    asyncio.run(work())


@pytest.mark.slow
def test_a_body_has_its_own_time(monkeypatch):
    monkeypatch.setattr(PatientConnection, "HEADERS", 0.3)

    async def work():
        async with serving() as (_, _, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
            with suppress(TimeoutError):
                raise AssertionError(await asyncio.wait_for(reader.read(1), 1.0))
            writer.write(b"b")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    asyncio.run(work())


@pytest.mark.slow
def test_the_end_waits_for_no_half_of_a_request():
    async def work():
        async with serving() as (server, work, port):
            halves = [WHOLE[:9], WHOLE[:-2], b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"]
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in halves]
            for (_, writer), half in zip(opened, halves):
                writer.write(half)
            await asyncio.sleep(0.3)
            server.should_exit = True
            await asyncio.wait_for(work, 20)  # of the 60 that are for answers
            assert [await closed(reader) for reader, _ in opened] == [b""] * 3

    asyncio.run(work())


@pytest.mark.parametrize("turns", range(5))
def test_the_end_waits_for_no_client_that_connects_just_then(turns):
    """Accepted by the loop, not yet known to the server when it closes what it knows."""

    async def work():
        with bind_socket("127.0.0.1", 0, api_key="") as sock:
            server = HttpServer(app, sock, drain=60)
            await server.open()
            with socket.create_connection(sock.getsockname()) as late:  # no turn of the loop between here and there
                late.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
                for _ in range(turns):
                    await asyncio.sleep(0)
                await asyncio.wait_for(server.close(), 20)  # of the 60 that are for answers

    asyncio.run(work())


# -- requests: what every server of ours reads in the same way --------------------------------------------


def request_of(headers=(), messages=()):
    queue = list(messages)

    async def receive():
        if not queue:
            await asyncio.Event().wait()
        return queue.pop(0)

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers]}
    return Request(scope, receive)


@pytest.mark.parametrize(
    "header, key",
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("abc", ""), ("Basic abc", ""), ("Bearer", ""), ("Bearerabc", "")],
)
def test_a_key_is_a_bearer_token(header, key):
    found = bearer_token(request_of([("authorization", header)]))
    assert found == key and keys_match(found, "abc") == (key == "abc")


def test_a_body_is_whole_small_and_in_time(monkeypatch):
    monkeypatch.setattr("rondel.system.http.request.READING", 0.2)
    part = {"type": "http.request", "body": b"12345", "more_body": True}
    end = {"type": "http.request", "body": b"6", "more_body": False}
    assert asyncio.run(read_body(request_of(messages=[part, end]), 6)) == b"123456"
    for status, request in (
        (413, request_of(messages=[part, end])),
        (413, request_of([("content-length", "6")])),
        (408, request_of(messages=[part])),
        (499, request_of(messages=[part, {"type": "http.disconnect"}])),
    ):
        with pytest.raises(RequestRefusal) as told:
            asyncio.run(read_body(request, 5))
        assert told.value.status == status


@pytest.mark.parametrize("leaves", [False, True])
def test_work_ends_with_its_client(leaves):
    async def main():
        work = asyncio.create_task(asyncio.sleep(60 if leaves else 0.01, "done"))
        gone = [{"type": "http.request"}, {"type": "http.disconnect"}]
        await finish_or_cancel(work, request_of(messages=gone if leaves else []).receive)
        assert work.cancelled() if leaves else work.result() == "done"

    asyncio.run(main())


def test_a_server_inside_another_loop_opens_and_closes():
    async def main():
        with bind_socket("127.0.0.1", 0, api_key="") as sock:
            server = HttpServer(app, sock, drain=1)
            await server.open()
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(WHOLE)
            answer = await reader.readuntil(b"ok")
            assert answer.startswith(b"HTTP/1.1 200") and b"server:" not in answer.lower()
            await server.close()
            assert await closed(reader) == b""

    asyncio.run(main())
