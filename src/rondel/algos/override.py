"""A component with its knobs changed by a recipe. The knobs are the fields of its
dataclass, and their annotations are the types.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rondel.algos.component import LossTerm
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


# what the trainer can give a loss term, as fields of its TokenBatch; a critic's values belong to a row with a critic
TERM_NEEDS = frozenset({"advantages", "behavior_logprobs", "proximal_logprobs", "ref_logprobs"})


def loss_terms(given: Any) -> tuple[LossTerm, ...]:
    """The terms of your own that a recipe names."""
    if not (isinstance(given, list | tuple) and all(isinstance(term, dict) and "kind" in term for term in given)):
        raise ConfigError(f"algo.terms = {given!r}; write algo.terms = [{{ kind = 'module:MyTerm', coef = 0.1 }}]")
    terms = []
    for i, section in enumerate(given):
        path, knobs = f"algo.terms[{i}]", {name: value for name, value in section.items() if name != "kind"}
        cls = find_registered(f"{path}.kind", section["kind"], {})
        if not (isinstance(cls, type) and issubclass(cls, LossTerm)):
            raise ConfigError(
                f"{path}.kind = '{section['kind']}' is {cls!r}; it must be a frozen dataclass that derives from "
                f"rondel.algos.component.LossTerm"
            )
        terms.append(override_knobs(cls(), knobs, {}, path))
        if odd := sorted(terms[-1].needs - TERM_NEEDS):
            raise ConfigError(
                f"{path}.kind = '{section['kind']}' needs {', '.join(odd)}; a loss term may need "
                f"{', '.join(sorted(TERM_NEEDS))}"
            )
    if len({term.name for term in terms}) < len(terms):
        raise ConfigError(f"algo.terms has a term twice: {', '.join(term.name for term in terms)}; each has one metric")
    return tuple(terms)


def checked_bool(name: str, value: Any) -> bool:
    """True or false, and nothing that Python takes for it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r} is not true or false")
    return value


def filter_names(names: Any) -> tuple[str, ...]:
    """A list of names."""
    if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"[algo] filters = {names!r} is not a list of names; write filters = ['signal']")
    return tuple(names)


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
