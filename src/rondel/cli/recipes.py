"""rondel recipes: the recipes and pipelines that come with Rondel."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from rondel.cli.package_files import shipped_folder
from rondel.core.errors import UserError
from rondel.core.registry import suggest_name
from rondel.system.files import write_text


def list_recipes() -> dict[str, Path]:
    """Name -> file; of a pipeline "pipelines/NAME"."""
    home = shipped_folder("recipes")
    if home is None:
        return {}
    found = sorted(home.glob("*.toml")) + sorted(home.glob("pipelines/*.toml"))
    return {path.relative_to(home).with_suffix("").as_posix(): path for path in found}


def run(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="Print this one.", autocompletion=lambda: list(list_recipes()), show_default=False
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write it, and the modules that it names beside it."),
    ] = None,
) -> None:
    """List the recipes that come with Rondel, or write one.

    rondel recipes quickstart -o recipe.toml
    """
    known = list_recipes()
    if not known:
        raise UserError("this installation has no recipes: install Rondel from its wheel or its source tree")
    if not name:
        if output is not None:
            raise UserError(f"-o {output} needs the name of a recipe: rondel recipes NAME -o {output}")
        left = max(map(len, known)) + 2
        wide = min(max(shutil.get_terminal_size((120, 24)).columns, left + 40), 120)
        for recipe, path in known.items():
            told = first_sentence(path.read_text(encoding="utf-8"))
            print(textwrap.fill(told, wide, initial_indent=f"{recipe:<{left}}", subsequent_indent=" " * left))
        print("\nrondel recipes NAME -o recipe.toml, then rondel train recipe.toml")
        return
    stem = name.removesuffix(".toml")
    if stem not in known:
        raise UserError(f"no recipe '{name}'.{suggest_name(stem, list(known))} Known: {', '.join(known)}")
    text = known[stem].read_text(encoding="utf-8")
    modules = named_examples(text)
    if output is None:
        print(text, end="")
        if modules:
            names = ", ".join(path.name for path in modules)
            print(f"it names {names}: rondel recipes {stem} -o recipe.toml writes both", file=sys.stderr)
        return
    files = {output: text} | {output.parent / path.name: path.read_text(encoding="utf-8") for path in modules}
    if there := [str(path) for path in files if path.exists()]:
        raise UserError(f"{', '.join(there)}: there already, and nothing was written; name another file")
    for path, content in files.items():
        write_text(path, content)
    verb = "pipeline" if "/" in stem else "train"
    print(f"wrote {', '.join(map(str, files))}\nrondel {verb} {output}")


def first_sentence(text: str) -> str:
    """The first sentence of the comment that a recipe begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.lstrip().splitlines())
    return re.split(r"(?<=[a-z0-9)`]{2}\.)\s", " ".join(line.lstrip("# ") for line in comment), maxsplit=1)[0]


def named_examples(text: str) -> list[Path]:
    """The modules of examples/ that a recipe names: `kind = "sums:sums"` is sums.py."""
    home = shipped_folder("examples")
    names = dict.fromkeys(re.findall(r'"(\w+):\w+"', text))
    return [path for name in names if home and (path := home / f"{name}.py").is_file()]
