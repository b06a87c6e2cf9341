"""Faults that pydantic found, as sentences with the key, the value and the remedy."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rondel.core.config.renamed_keys import MOVED_KEYS, SYNONYMS
from rondel.core.config.section import SettingsFault
from rondel.core.registry import suggest_name

SHOWN = 12  # keys of a table that are listed where none is near


def explain_faults(error: ValidationError, root: type[BaseModel], prefix: str = "") -> list[str]:
    """One row for each wrong key. `prefix`: where the table of `root` stands in the recipe."""
    rows: list[str] = []
    found: dict[str, int] = {}  # of a key with several kinds of values: the row that says what is wrong with the first
    for fault in error.errors():
        where = [str(part) for part in fault["loc"] if not _is_kind(part)]
        dotted, value = prefix + ".".join(where), fault.get("input")
        said = f"{fault['msg'][0].lower()}{fault['msg'][1:]}"
        if fault["type"] == "extra_forbidden" and dotted in MOVED_KEYS:
            rows.append(f"'{dotted}' is no key any more; in its place stands {MOVED_KEYS[dotted]}")
        elif fault["type"] == "extra_forbidden":
            synonym = f" Did you mean '{SYNONYMS[where[-1]]}'?" if where[-1] in SYNONYMS else ""
            known = _known_keys(fault["loc"][:-1], root)
            near = synonym or suggest_name(where[-1], known)
            near = near or (f" Known: {', '.join(known)}" if 0 < len(known) <= SHOWN else "")
            rows.append(f"unknown key '{dotted}'.{near}")
        elif fault["type"] == "missing":
            rows.append(f"'{dotted}' is missing; add it to the recipe or pass --{dotted}=...")
        elif isinstance(value, str) and fault["type"] in ("float_type", "int_type"):
            rows.append(f"{dotted} = '{value}' is a string; write the number without quotes")
        elif fault["type"] == "value_error" and isinstance(fault["ctx"]["error"], SettingsFault):
            rows.append(explain_settings(fault["ctx"]["error"]))
        elif fault["type"] == "value_error":
            rows.append(f"{dotted.rstrip('.')}: {fault['ctx']['error']}".removeprefix(": "))
        elif dotted in found:
            rows[found[dotted]] += f"; or {said}"
            continue
        else:
            rows.append(f"{dotted} = {_truncate_repr(value)}: {said}")
        found.setdefault(dotted, len(rows) - 1)
    return list(dict.fromkeys(rows))


def explain_settings(fault: SettingsFault) -> str:
    """The fault of one table, with the whole name of each wrong key."""
    return "; ".join(explain_faults(fault.found, fault.model, f"{fault.where}."))


def _is_kind(part: int | str) -> bool:
    """Whether a part of pydantic's location names a member of a union and not a key."""
    return part in ("int", "float", "str", "bool", "constrained-int") or (isinstance(part, str) and "[" in part)


def _truncate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _known_keys(where: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """The keys of a section, or of an entry of a table or a list of such: policies.critic, algo.beside.0."""
    section: Any = root
    for name in where:
        found = _nested_sections(section)
        if found and name in found[0].model_fields and section is found[0]:
            section = found[0].model_fields[str(name)].annotation
        elif found:  # the name of an entry, or its number
            section = found[0]
    return list(found[0].model_fields) if (found := _nested_sections(section)) else []


def _nested_sections(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation: dict[str, PolicyConfig] -> [PolicyConfig]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _nested_sections(inner)]
