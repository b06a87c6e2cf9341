"""The body of a request: read with a limit, parsed strictly, and every field asked for by name and type.

What nobody asked for is refused: a field that is dropped silently is an answer to another question.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

from starlette.requests import Request

from rondel.core.registry import suggest_name
from rondel.system.http.request import read_body
from rondel.system.http.response import RequestRefusal

BODY_REMEDY = ", this server's limit (rondel serve --max-body)"


async def read_fields(request: Request, limit: int, *, ignored: Collection[str] = ()) -> RequestFields:
    """An empty body is {}: SGLang's clients call some control endpoints without one."""
    body = await read_body(request, limit, remedy=BODY_REMEDY)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if body and kind != "application/json" and not kind.endswith("+json"):
        raise RequestRefusal(
            415, f"the body is '{kind or 'of no type'}'; send JSON with the header Content-Type: application/json"
        )
    return RequestFields(parse_body(body) if body.strip() else {}, ignored=ignored)


def parse_body(body: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no number beyond a double, no half of a surrogate pair, nesting that fits the stack."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_not_a_number, parse_float=_parse_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RequestRefusal(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise RequestRefusal(400, "the body is not valid UTF-8") from None
    except ValueError as error:
        raise RequestRefusal(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestRefusal(400, f"the body is a JSON {type(value).__name__}; it must be an object")
    return value


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is beyond a double")
    return value


def shorten_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


class RequestFields:
    """`f.whole("n", 1, 1, 128)`: the value if it is given and right, the default if it is
    missing or null, else a refusal that names it.
    """

    def __init__(self, body: dict[str, Any], *, ignored: Collection[str] = (), within: str = "") -> None:
        self._body, self._known, self._within = {k: v for k, v in body.items() if v is not None}, set(ignored), within

    def read_field(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        return self._body.get(name, default)

    def field_error(self, name: str, rule: str) -> RequestRefusal:
        return RequestRefusal(
            400, f"{self._within}{name} = {shorten_json(self._body.get(name))}; {rule}", param=f"{self._within}{name}"
        )

    def read_string(self, name: str, default: str | None = None) -> str | None:
        value = self.read_field(name, default)
        if value is not None and not isinstance(value, str):
            raise self.field_error(name, "it must be a string")
        return value

    def read_flag(self, name: str, default: bool = False) -> bool:
        value = self.read_field(name, default)
        if not isinstance(value, bool):
            raise self.field_error(name, "it must be true or false")
        return value

    def read_integer(self, name: str, default: int | None, low: int, high: int) -> Any:
        value = self.read_field(name, default)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise self.field_error(name, f"it must be a whole number from {low} to {high}")
        return value

    def take_number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.read_field(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.field_error(name, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def read_strings(self, name: str, most: int) -> tuple[str, ...]:
        """A string or a list of them."""
        value = self.read_field(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or len(value) > most or not all(isinstance(v, str) and v for v in value):
            raise self.field_error(name, f"it must be a string or a list of at most {most}, none of them empty")
        return tuple(value)

    def read_integers(self, name: str, most: int) -> tuple[int, ...]:
        value = self.read_field(name, [])
        if (
            not isinstance(value, list)
            or len(value) > most
            or not all(type(v) is int and abs(v) < 1 << 31 for v in value)
        ):
            raise self.field_error(name, f"it must be a list of at most {most} whole numbers")
        return tuple(value)

    def take_object(self, name: str) -> RequestFields:
        value = self.read_field(name, {})
        if not isinstance(value, dict):
            raise self.field_error(name, "it must be an object")
        return RequestFields(value, within=f"{self._within}{name}.")

    def allow_only(self, name: str, *allowed: Any) -> None:
        """A field that this server knows and does not offer: a value that would change nothing passes."""
        value = self.read_field(name)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            raise self.field_error(
                name,
                f"this server does not offer it{f' beyond {shorten_json(allowed[0])}' if allowed else ''}; leave it "
                "out",
            )

    def refuse_unknown_fields(self) -> None:
        """Every field has been asked for, or the request is refused by the first that has not."""
        if unknown := sorted(self._body.keys() - self._known):
            name = f"{self._within}{unknown[0][:80]}"
            raise RequestRefusal(
                400,
                f"no field '{name}' here.{suggest_name(unknown[0][:80], sorted(self._known))}",
                param=name,
                code="unknown_field",
            )
