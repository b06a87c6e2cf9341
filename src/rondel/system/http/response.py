"""Answers that every server gives alike: a refusal in OpenAI's shape, an event of a stream."""

from __future__ import annotations

import json
from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
}
GONE = 499  # the client closed the connection: nobody reads this


class RequestRefusal(Exception):
    """`RequestRefusal(400, "n = 0; at least 1 sample", param="n")`. `param` is the field at
    fault, `code` what a program can match.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message[:1000], param, code, headers

    @property
    def response_body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def sse_event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
