"""The routes, whose key is whose session, and answers that nobody computes for an agent that has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rondel.generate.envs.gateway import anthropic, openai, responses
from rondel.generate.envs.gateway.errors import GatewayRefusal, refusal
from rondel.generate.envs.gateway.fields import ChatFields, parse

if TYPE_CHECKING:
    from rondel.generate.envs.gateway.session import GatewaySession

    Answer = Callable[[GatewaySession, ChatFields], Awaitable[dict[str, Any]]]
    Chunks = Callable[[dict[str, Any], dict[str, Any]], Iterator[bytes]]
SHARED = {  # by what Anthropic's clients append, to their own base_url or to OpenAI's
    "messages": (anthropic.messages, anthropic.chunks),
    "messages/count_tokens": (anthropic.count_tokens, anthropic.chunks),
}
ENDPOINTS: dict[str, tuple[Answer, Chunks]] = {
    "/v1/chat/completions": (openai.chat, openai.chat_chunks),
    "/v1/completions": (openai.completion, openai.completion_chunks),
    "/v1/responses": (responses.response, responses.chunks),
    **{f"{base}/{name}": how for name, how in SHARED.items() for base in ("/v1", "/v1/v1")},
}
LARGEST = 64 << 20  # bytes of a body
LEFT = 499  # nobody reads this


def build(sessions: dict[str, GatewaySession], warn: Callable[[str, str], None]) -> Starlette:
    """The ASGI application over the sessions that are open."""

    def session_of(request: Request) -> GatewaySession:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        keys = [given.strip()] * (kind.lower() == "bearer") + [request.headers.get("x-api-key", "")]
        key = next((key for key in keys if key in sessions), None)  # some clients send a word of their own as the other
        if key is None:
            raise GatewayRefusal(
                401,
                "no episode has this API key: it is the one that the agent was given, and ends with its episode",
                "invalid_api_key",
            )
        return sessions[key]

    def safely(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                said = refusal(error)
                shape = said.body("messages" in request.url.path or "anthropic-version" in request.headers)
                return JSONResponse(shape, said.status, headers={"x-should-retry": "false"})

        return endpoint

    def answering(answer: Answer, chunks: Chunks) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            session = session_of(request)
            body = parse(await _body(request))
            fields = ChatFields(body, session.chat.sampling, warn)
            options = fields.take("stream_options", dict, {})
            whole = await _while_it_waits(request, session, answer(session, fields))
            if not body.get("stream"):
                return JSONResponse(whole)
            stream = b"".join(chunks(whole, options))
            return Response(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})

        return handler

    async def models(request: Request) -> Response:
        session_of(request)
        name = request.path_params.get("name")
        listed = {
            "object": "list",
            "data": [openai.model("policy")],
            "has_more": False,
            "first_id": "policy",
            "last_id": "policy",
        }
        return JSONResponse(openai.model(name) if name else listed)

    async def nothing(request: Request) -> Response:
        raise GatewayRefusal(
            404,
            f"nothing is at {request.url.path[:200]}; this gateway has {', '.join([*ENDPOINTS][:4])} and /v1/models",
        )

    return Starlette(
        routes=[
            *(Route(path, safely(answering(*how)), methods=["POST"]) for path, how in ENDPOINTS.items()),
            Route("/v1/models", safely(models)),
            Route("/v1/models/{name:path}", safely(models)),
            Route("/{path:path}", safely(nothing), methods=["GET", "POST", "PUT", "DELETE"]),
        ]
    )


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST:
                raise GatewayRefusal(413, f"the body is larger than {LARGEST} bytes")
    except ClientDisconnect:
        raise GatewayRefusal(LEFT, "the agent left while it was sending") from None
    return bytes(body)


async def _while_it_waits(request: Request, session: GatewaySession, answer: Any) -> dict[str, Any]:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, left = session.begin(answer), asyncio.create_task(gone())
    try:
        await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        if not work.done():
            work.cancel()
        await asyncio.wait([work, left])
    if work.cancelled():
        raise (
            GatewayRefusal(401, "the episode is over", "invalid_api_key")
            if session.closed
            else GatewayRefusal(LEFT, "the agent left")
        )
    return work.result()
