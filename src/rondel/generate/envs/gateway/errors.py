"""What is said to an agent whose request cannot be served, in the shape of the API that it speaks."""

from __future__ import annotations

from typing import Any

from rondel.core.errors import UserError

OPENAI = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
ANTHROPIC = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}


class GatewayRefusal(Exception):
    """`GatewayRefusal(400, "n = 0; at least 1", code="...")`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message[:1000], code

    def response_body(self, anthropic: bool) -> dict[str, Any]:
        if anthropic:
            return {
                "type": "error",
                "error": {"type": ANTHROPIC.get(self.status, "invalid_request_error"), "message": self.message},
            }
        kind = OPENAI.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


class TooLong(GatewayRefusal):
    """The conversation has outgrown the context: said in words that agents look for in both APIs."""

    def __init__(self, most: int) -> None:
        text = f"prompt is too long: this model's maximum context length is {most} tokens, and the messages leave no room for an answer"
        super().__init__(400, text, "context_length_exceeded")


def to_refusal(error: Exception) -> GatewayRefusal:
    """Whatever else went wrong, as an answer: what a template cannot write is the
    request's fault, the rest is this side's.
    """
    if isinstance(error, GatewayRefusal):
        return error
    return GatewayRefusal(400 if isinstance(error, UserError) else 500, f"{type(error).__name__}: {error}")
