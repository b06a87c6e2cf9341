"""What is said to a client whose request cannot be served: OpenAI's shape, with the value, the rule and the remedy."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from rondel.core.errors import EngineError, RondelError, StalledError, UserError

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

    def to_response(self, *, control: bool = False) -> JSONResponse:
        """Control endpoints say it in SGLang's way, too."""
        also = {"success": False, "message": self.message} if control else {}
        return JSONResponse({**also, **self.response_body}, self.status, headers=self.headers)


def to_refusal(error: Exception, *, refusing: bool = False) -> RequestRefusal:
    """How an error of the engine is told over HTTP. One that serves others has an
    error only for what this request asked.
    """
    match error:
        case RequestRefusal():
            return error
        case UserError():
            return RequestRefusal(400, str(error))
        case StalledError():
            return RequestRefusal(504, str(error), code="deadline")
        case EngineError() if not refusing:
            return RequestRefusal(422, str(error), code="not_possible")
        case EngineError():
            return RequestRefusal(503, str(error), code="engine_refuses", headers={"Retry-After": "5"})
        case RondelError():
            return RequestRefusal(500, str(error))
    return RequestRefusal(500, f"{type(error).__name__}; this is a bug of ours, the server's stderr has its traceback")
