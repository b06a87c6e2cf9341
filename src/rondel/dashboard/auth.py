"""Who may look, and what their browser may run: every answer forbids scripts and styles that are
not ours, so what a run wrote can only ever be text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rondel.system.http.request import bearer_token, from_a_web_page, keys_match

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class DashboardAuth:
    """Who may look: with a key whoever brings it, as a Bearer token or once as ?key= in a
    browser; else programs and pages of this machine only.

    A browser keeps the token of a session, which ends with this process, and never the key,
    which may open more than this page. Its cookie is named by the port, for browsers tell no ports apart.
    """

    def __init__(self, app: Any, key: str, opening: Callable[[], None]) -> None:
        self.app, self.key, self.opening = app, key, opening
        self.session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        if scope["path"] == "/":
            self.opening()
        answer = self._refuse_or_login(Request(scope))
        await (answer or self.app)(scope, receive, send_with_headers)

    def _refuse_or_login(self, request: Request) -> Response | None:
        key = self.key
        if not key:
            return Response("this page is for the machine that it runs on", 403) if from_a_web_page(request) else None
        given = request.query_params.get("key", "")
        if given and keys_match(given, key):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_cookie_name(request), self.session, httponly=True, samesite="strict")
            return answer
        cookie = request.cookies.get(_cookie_name(request), "")
        if keys_match(cookie, self.session) or keys_match(bearer_token(request), key):
            return None
        return Response("this dashboard wants its key: open the address that it printed, with ?key=", 401)


def _cookie_name(request: Request) -> str:
    return f"rondel_dashboard_{request.scope['server'][1]}"
