"""What is said to an agent whose request cannot be served, in the shape of the API that it speaks."""

from __future__ import annotations

from rondel.core.errors import UserError
from rondel.system.http.response import RequestRefusal


class TooLong(RequestRefusal):
    """The conversation has outgrown the context: said in words that agents look for in both APIs."""

    def __init__(self, most: int) -> None:
        text = (
            f"prompt is too long: this model's maximum context length is {most} tokens, "
            "and the messages leave no room for an answer"
        )
        super().__init__(400, text, code="context_length_exceeded")


def to_refusal(error: Exception) -> RequestRefusal:
    """Whatever else went wrong, as an answer: what a template cannot write is the
    request's fault, the rest is this side's.
    """
    if isinstance(error, RequestRefusal):
        return error
    return RequestRefusal(400 if isinstance(error, UserError) else 500, f"{type(error).__name__}: {error}")
