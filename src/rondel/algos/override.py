"""A component with its knobs changed by a recipe. The knobs are the fields of its
dataclass, and their annotations are the types.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rondel.core.errors import ConfigError
from rondel.core.registry import find_registered, suggest_name

NUMBERS = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    dict[str, float]: "a table of numbers by name",
}


def override_knobs(part: Any, section: Any, known: dict[str, type], path: str) -> Any:
    """`part` with the knobs of `section`; its "kind" chooses another class of the
    family, which then starts from its defaults.
    """
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path} = {section!r} is not a table; write {path} = {{ kind = ... }} or set one of its knobs: "
            f"{_knob_list(type(part))}"
        )
    knobs = dict(section)
    if "kind" in knobs and "kind" not in _knob_names(type(part)):
        part = _select_kind(part, knobs.pop("kind"), known, path)
    for knob, value in knobs.items():
        _check_knob(type(part), knob, value, known, path)
    try:
        return replace(part, **knobs)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _select_kind(part: Any, kind: Any, known: dict[str, type], path: str) -> Any:
    if not isinstance(kind, str):
        raise ConfigError(f"{path}.kind = {kind!r} is not a text; known: {', '.join(known)}")
    cls = find_registered(f"{path}.kind", kind, known)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ConfigError(f"{path}.kind = '{kind}' must be a dataclass whose fields are its knobs, and is {cls!r}")
    return part if cls is type(part) else cls()


def _check_knob(cls: type, knob: str, value: Any, known: dict[str, type], path: str) -> None:
    if knob not in _knob_names(cls):
        owners = [kind for kind, other in known.items() if knob in _knob_names(other)]
        hint = f" It is a knob of kind = '{owners[0]}'." if owners else suggest_name(knob, _knob_names(cls))
        raise ConfigError(f"{path}.{knob}: {cls.__name__} has no such knob.{hint} Its knobs: {_knob_list(cls)}.")
    annotation = get_type_hints(cls)[knob]
    options = [option for option in _union_members(annotation) if option is not NoneType]
    if not any(_matches_type(value, option) for option in options):
        wanted = " or ".join(NUMBERS.get(option, str(option)) for option in options)
        quoted = f" (write {value} without quotes)" if isinstance(value, str) and str not in options else ""
        raise ConfigError(f"{path}.{knob} = {value!r} is not {wanted}{quoted}")


def _union_members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _matches_type(value: Any, option: type) -> bool:
    if option is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and value == value
        )  # infinity is a bound that is none; NaN is no number
    if get_origin(option) is dict:
        return isinstance(value, dict) and all(
            isinstance(name, str) and _matches_type(number, float) for name, number in value.items()
        )
    return type(value) is option


def _knob_names(cls: type) -> list[str]:
    return [f.name for f in fields(cls)]


def _knob_list(cls: type) -> str:
    return ", ".join(_knob_names(cls)) or "none"
