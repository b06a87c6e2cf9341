"""rondel import: a recipe from a peer's config, and by name what it cannot say."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.core.errors import ConfigError
from rondel.core.registry import suggest_name
from rondel.system.files import make_folder, write_text


class PeerFramework(StrEnum):
    """The peers whose configs are read."""

    trl = "trl"
    verl = "verl"
    openrlhf = "openrlhf"


def run(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="YAML, JSON, a script with the command, or the command itself in quotes."
        ),
    ],
    framework: Annotated[PeerFramework, typer.Option("--from", help="Whose config it is.")],
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="RECIPE.toml", help="Where the recipe goes; it is printed if left out."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The recipe and all lists as one JSON object.")] = False,
) -> None:
    """Translate a peer's config into a recipe.

    Each line names the key it comes from. What has no equivalent, another default or
    must be decided is listed on stderr.
    """
    from rondel.core.config.job import Job
    from rondel.importing.render import render_lists, render_recipe
    from rondel.importing.translate import nest_lines

    report, source = import_config(framework.value, config)
    Job.parse(nest_lines(report.lines), source)
    text = render_recipe(report, source)
    if out:
        path = Path(out)
        if path.exists():
            raise ConfigError(f"{path} exists; name another file with -o, or remove it")
        make_folder(path.parent)
        write_text(path, text)
    if as_json:
        known = {"translated", "same", "missing", "unknown"}
        print(
            json.dumps({"recipe": text} | {f.name: getattr(report, f.name) for f in fields(report) if f.name in known})
        )
    elif not out:
        print(text, end="")
    else:
        print(f"{out}: {len(report.lines)} lines; next: rondel check {out}")
    if told := render_lists(report):
        print(told, file=sys.stderr)


def import_config(framework: str, config: str) -> tuple[Any, str]:
    """(the report, a name for where the config came from)."""
    from rondel.importing.openrlhf import OPENRLHF
    from rondel.importing.read import read_config
    from rondel.importing.translate import translate_config
    from rondel.importing.trl import TRL
    from rondel.importing.verl import VERL

    path = Path(config)
    peer = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF}[framework]
    if len(config) < 4096 and path.is_file():
        text, source = path.read_text(encoding="utf-8", errors="replace"), path.name
    elif " " in config.strip() or "=" in config:
        text, source = config, "a command line"
    else:
        near = suggest_name(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ConfigError(f"no config at {config}.{near}")
    given = read_config(framework, text, path.parent if source == path.name else Path())
    if not given:
        raise ConfigError(
            f"{source} sets no key of {framework}; --from names whose config it is: trl, verl or openrlhf"
        )
    return translate_config(peer, given, RecipeTable()), source


class RecipeTable:
    """The rows that exist here, for the translation, which must not know torch."""

    def __init__(self) -> None:
        from rondel.algos.table import TABLE

        self.names = TABLE.keys()

    def rejection_reason(self, section: dict[str, Any]) -> str:
        from rondel.algos.table import resolve_algorithm

        try:
            resolve_algorithm(section)
        except ConfigError as error:
            return str(error)
        return ""

    def row_knobs(self, section: dict[str, Any]) -> dict[str, Any]:
        from rondel.algos.table import FAMILIES, resolve_algorithm

        out: dict[str, Any] = {}
        for family, part in resolve_algorithm(section).parts.items():
            kind = next((name for name, cls in FAMILIES[family].items() if cls is type(part)), "")
            out |= {f"{family}.kind": kind} | {
                f"{family}.{knob.name}": getattr(part, knob.name) for knob in fields(part)
            }
        return out
