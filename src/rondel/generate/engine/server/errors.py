"""Errors of the engine as answers over HTTP, with the value, the rule and the remedy."""

from __future__ import annotations

from starlette.responses import JSONResponse

from rondel.core.errors import EngineError, RondelError, StalledError, UserError
from rondel.system.http.response import RequestRefusal


def refusal_response(refusal: RequestRefusal, *, control: bool = False) -> JSONResponse:
    """Control endpoints say it in SGLang's way, too."""
    also = {"success": False, "message": refusal.message} if control else {}
    return JSONResponse({**also, **refusal.response_body}, refusal.status, headers=refusal.headers)


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
