"""Writes the table of keys into docs/recipe.md from the models of core/config: `python docs/make_recipe.py`.

A test compares (tests/laws/test_law_16_docs.py), so the page cannot rot. A key's meaning is its description there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from rondel.core.config.algorithm import BesideConfig
from rondel.core.config.environment import ENV_TABLES, EpisodeBudgetConfig, EpisodeConfig, ImaginationConfig
from rondel.core.config.job import Job
from rondel.core.config.model import NumberFormatConfig, TeacherConfig
from rondel.core.config.place import EnginesConfig
from rondel.core.config.policy import PolicyConfig
from rondel.core.config.reward import RewardCallConfig
from rondel.core.config.sandbox import SANDBOX_TABLES
from rondel.core.config.section import ConfigSection, SettingsTable
from rondel.core.config.trainer import StaticShapesConfig

PAGE = Path(__file__).with_name("recipe.md")
TABLES: dict[str, type[BaseModel]] = {  # beside those of keys that are tables throughout
    **{f'task.env, kind = "{name}"': model for name, model in ENV_TABLES.items()},
    "task.env, beside those of its kind": EpisodeConfig,
    "task.env.budget": EpisodeBudgetConfig,
    "task.env.model": ImaginationConfig,
    **{
        f'sandbox of task.env and task.reward, kind = "{" or ".join(kinds)}"': SANDBOX_TABLES[kinds[0]]
        for kinds in (
            ("process", "namespaces", "bubblewrap"),
            ("container",),
            ("gvisor",),
            ("microvm", "vm"),
            ("http",),
        )
    },
    "task.reward, beside those of its kind": RewardCallConfig,
    "place.engines, as a table": EnginesConfig,
    "trainer.micro_tokens, as a table": StaticShapesConfig,
    "model.format, as a table": NumberFormatConfig,
    "an entry of model.teacher": TeacherConfig,
    "an entry of algo.beside": BesideConfig,
    "policies.NAME": PolicyConfig,
}
BEGIN, END = "<!-- keys: written by docs/make_recipe.py -->\n", "<!-- end of keys -->\n"


def keys(section: type[BaseModel] = Job, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, field) of every key. A table of settings is one key; its settings have a table of their own."""
    rows: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, ConfigSection) and not is_table(inner):
            rows += keys(inner, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", field))
    return rows


def setting_tables() -> dict[str, type[BaseModel]]:
    """The tables of settings, by the key that they are the value of."""
    return {key: field.annotation for key, field in keys() if is_table(field.annotation)} | TABLES


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, SettingsTable)


def table() -> str:
    """Every key with type, default and meaning, a table a section."""
    known = keys()
    lines: list[str] = []
    for key, field in known:
        section = key.partition(".")[0]
        if f"## {section}" not in lines:
            lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        told = field.description
        assert told, f"{key} has no description in core/config"
        row = section == "algo" and key != "algo.sources" and field.default == {}
        cells = (f"`{key}`", kind(field), "of the row" if row else default(field), told)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for title, model in setting_tables().items():
        lines += ["", f"### settings of {title}", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            assert field.description, f"{title}: {name} has no description in core/config"
            cells = (f"`{name}`", kind(field), default(field), field.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def kind(field: Any) -> str:
    """int, 1 or more · "hold", "drain" or "abort" · text or table"""
    return kind_text(field.annotation, field.metadata)


def kind_text(annotation: Any, rules: list[Any]) -> str:
    """float, above 0, at most 1"""
    words = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    found = [word.format(getattr(rule, name)) for rule in rules for name, word in words.items() if hasattr(rule, name)]
    return ", ".join([spell(annotation), *found])


def rules_of(given: Any) -> list[Any]:
    """The bounds inside a Field that annotates a type."""
    return list(getattr(given, "metadata", [given]))


def spell(annotation: Any) -> str:
    plain = {int: "int", float: "float", str: "text", bool: "true or false"}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{ " + ", ".join(annotation.model_fields) + " }"
    if get_origin(annotation) is Annotated:
        return kind_text(*get_args(annotation)[:1], [r for m in get_args(annotation)[1:] for r in rules_of(m)])
    inner = [a for a in get_args(annotation) if a is not type(None)]
    text = str(annotation)
    if text.startswith("typing.Literal"):
        return " or ".join(f'"{value}"' for value in inner)
    if text.startswith("dict"):
        return "table"
    if text.startswith("list"):
        return f"list of {spell(inner[0])}"
    if text.startswith("tuple"):
        return f"list of {len(inner)}, each {spell(inner[0])}"
    return " or ".join(map(spell, inner))


def default(field: Any) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{json.dumps(value)}`"


def page() -> str:
    """The page as it should be: the text around the table stays."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    settings = sum(len(model.model_fields) for model in setting_tables().values())
    print(f"{len(keys())} keys; {settings} settings in {len(setting_tables())} tables")
