"""The routes, whose key is whose session, and answers that nobody computes for an agent that has left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rondel.generate.chat_apis import anthropic, responses
from rondel.generate.chat_apis.fields import ChatFields, parse_body
from rondel.generate.envs.gateway import openai
from rondel.generate.envs.gateway.errors import to_refusal
from rondel.system.http.request import bearer_token, finish_or_cancel, read_body
from rondel.system.http.response import GONE, RequestRefusal

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


def build_app(sessions: dict[str, GatewaySession], warn: Callable[[str, str], None]) -> Starlette:
    """The ASGI application over the sessions that are open."""

    def session_of(request: Request) -> GatewaySession:
        keys = (bearer_token(request), request.headers.get("x-api-key", ""))
        # some clients send a word of their own as the other; looked up by its hash, so no time tells a part of a key
        key = next((key for key in keys if key in sessions), None)
        if key is None:
            raise RequestRefusal(
                401,
                "no episode has this API key: it is the one that the agent was given, and ends with its episode",
                code="invalid_api_key",
            )
        return sessions[key]

    def catch_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                said = to_refusal(error)
                anthropic_client = "messages" in request.url.path or "anthropic-version" in request.headers
                shape = anthropic.error_body(said) if anthropic_client else said.response_body
                return JSONResponse(shape, said.status, headers={"x-should-retry": "false"})

        return endpoint

    def make_answer_handler(answer: Answer, chunks: Chunks) -> Callable[[Request], Awaitable[Response]]:
        async def handle_request(request: Request) -> Response:
            session = session_of(request)
            body = parse_body(await read_body(request, LARGEST))
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
        raise RequestRefusal(
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


async def _while_it_waits(request: Request, session: GatewaySession, answer: Any) -> dict[str, Any]:
    work = session.start_task(answer)
    await finish_or_cancel(work, request.receive)
    if work.cancelled():
        raise (
            RequestRefusal(401, "the episode is over", code="invalid_api_key")
            if session.closed
            else RequestRefusal(GONE, "the agent left")
        )
    return work.result()
