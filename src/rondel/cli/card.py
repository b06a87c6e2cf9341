"""rondel card: the run answers for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print card.json instead of the page.")] = False,
) -> None:
    """Report on a run: before, after, and how.

    Writes card.md and card.json into the run folder and prints the card.
    """
    from rondel.runtime.telemetry.card import write_card

    write_card(folder)
    print((Path(folder) / ("card.json" if as_json else "card.md")).read_text(encoding="utf-8").rstrip())
