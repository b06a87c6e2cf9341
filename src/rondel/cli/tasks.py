"""rondel tasks: task data made on this machine, and checked."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rondel.cli.repository_tasks import check_repositories, make_repositories
from rondel.cli.search_tasks import CorpusSource, make_corpus
from rondel.cli.shop_tasks import make_shop
from rondel.core.errors import UserError


class TaskFamily(StrEnum):
    search = "search"
    repositories = "repositories"
    shop = "shop"
    check = "check"


def run(
    family: Annotated[
        TaskFamily,
        typer.Argument(
            help="search: a corpus, and questions that it answers. repositories: packages of PyPI with seeded bugs. "
            "shop: a shop's database, and users who want something of it. check: whether the repository tasks of PATH "
            "are good."
        ),
    ],
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="For check: a folder of tasks, or one.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where it is written.")] = None,
    source: Annotated[
        CorpusSource,
        typer.Option(
            help="Of search. debian: documentation packages, 51 MB to download; python: docstrings of what is "
            "installed; tables: short facts of the standard library; auto: debian where apt-get is there, else python."
        ),
    ] = CorpusSource.auto,
    most: Annotated[int | None, typer.Option(min=1, help="Of search: most passages.")] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="How many, of repositories (60) and of shop (2000).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of repositories and shop: equal seeds make equal folders.")] = 0,
    package: Annotated[list[str] | None, typer.Option("--package", help="Of these alone; may be repeated.")] = None,
    cache: Annotated[str, typer.Option("--cache", metavar="FOLDER", help="Where sdists are kept.")] = "",
    format: Annotated[str, typer.Option("--format", help="Of what is checked: rondel, harbor, ...")] = "auto",
    checkouts: Annotated[str, typer.Option("--checkouts", help="For rows of SWE-bench that are checked.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, of repository tasks.")] = False,
) -> None:
    """Make task data, or check repository tasks.

    search: task.env = { kind = "search", corpus = FOLDER } searches it, and task.data = { kind = "search_questions",
    corpus = FOLDER } asks. Nothing is installed; downloads are kept in FOLDER/packages. repositories: each task is
    written if its solution scores 1 and the untouched repository less; check exits with 1 if one does not. shop:
    task.env = { kind = "shop", path = FOLDER } is the shop, and task.data = { kind = "shop_tasks",
    path = FOLDER } its users.
    """
    if family is TaskFamily.check:
        check_repositories(path, format, checkouts, as_json)
    elif out is None:
        raise UserError("--out is missing: name a new folder")
    elif family is TaskFamily.search:
        make_corpus(out, source, most)
    elif family is TaskFamily.shop:
        make_shop(out, 2000 if n is None else n, seed)
    else:
        make_repositories(out, 60 if n is None else n, seed, package or [], cache, as_json)
