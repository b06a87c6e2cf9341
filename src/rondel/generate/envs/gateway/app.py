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
from rondel.generate.envs.gateway.errors import GatewayRefusal, to_refusal
from rondel.generate.envs.gateway.fields import ChatFields, parse_body

if TYPE_CHECKING:
    from rondel.generate.envs.gateway.session import GatewaySession

    Answer = Callable[[GatewaySession, ChatFields], Awaitable[dict[str, Any]]]
    Chunks = Callable[[dict[str, Any], dict[str, Any]], Iterator[bytes]]
SHARED = {  # by what Anthropic's clients append, to their own base_url or to OpenAI's
    "messages": (anthropic.create_message, anthropic.stream_chunks),
    "messages/count_tokens": (anthropic.count_tokens, anthropic.stream_chunks),
}
ENDPOINTS: dict[str, tuple[Answer, Chunks]] = {
    "/v1/chat/completions": (openai.create_chat_completion, openai.chat_chunks),
    "/v1/completions": (openai.create_completion, openai.completion_chunks),
    "/v1/responses": (responses.build_response, responses.stream_chunks),
    **{f"{base}/{name}": how for name, how in SHARED.items() for base in ("/v1", "/v1/v1")},
}
LARGEST = 64 << 20  # bytes of a body
LEFT = 499  # nobody reads this


def build_app(sessions: dict[str, GatewaySession], warn: Callable[[str, str], None]) -> Starlette:
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

    def catch_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                said = to_refusal(error)
                shape = said.response_body("messages" in request.url.path or "anthropic-version" in request.headers)
                return JSONResponse(shape, said.status, headers={"x-should-retry": "false"})

        return endpoint

    def make_answer_handler(answer: Answer, chunks: Chunks) -> Callable[[Request], Awaitable[Response]]:
        async def handle_request(request: Request) -> Response:
            session = session_of(request)
            body = parse_body(await _read_body(request))
            fields = ChatFields(body, session.chat.sampling, warn)
            options = fields.read_field("stream_options", dict, {})
            whole = await _while_it_waits(request, session, answer(session, fields))
            if not body.get("stream"):
                return JSONResponse(whole)
            stream = b"".join(chunks(whole, options))
            return Response(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})

        return handle_request

    async def list_models(request: Request) -> Response:
        session_of(request)
        name = request.path_params.get("name")
        listed = {
            "object": "list",
            "data": [openai.model_card("policy")],
            "has_more": False,
            "first_id": "policy",
            "last_id": "policy",
        }
        return JSONResponse(openai.model_card(name) if name else listed)

    async def not_found(request: Request) -> Response:
        raise GatewayRefusal(
            404,
            f"nothing is at {request.url.path[:200]}; this gateway has {', '.join([*ENDPOINTS][:4])} and /v1/models",
        )

    return Starlette(
        routes=[
            *(
                Route(path, catch_errors(make_answer_handler(*how)), methods=["POST"])
                for path, how in ENDPOINTS.items()
            ),
            Route("/v1/models", catch_errors(list_models)),
            Route("/v1/models/{name:path}", catch_errors(list_models)),
            Route("/{path:path}", catch_errors(not_found), methods=["GET", "POST", "PUT", "DELETE"]),
        ]
    )


async def _read_body(request: Request) -> bytes:
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
    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, left = session.start_task(answer), asyncio.create_task(wait_for_disconnect())
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
