"""rondel card: the run answers for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    other: Annotated[str, typer.Argument(metavar="RUN2", help="With --diff: another one.", show_default=False)] = "",
    diff: Annotated[bool, typer.Option("--diff", help="Print only what differs between RUN and RUN2.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the page.")] = False,
) -> None:
    """Report on a run: before, after, and how.

    Writes card.md and card.json into the run folder and prints the card.
    """
    from rondel.runtime.journal.log import encode
    from rondel.runtime.telemetry.card import write_card
    from rondel.runtime.telemetry.comparing import compare, comparison
    from rondel.words.errors import UserError

    if diff != bool(other):
        raise UserError("two run folders and --diff go together: rondel card --diff RUN RUN2")
    card = write_card(folder)
    if diff:
        found = compare(card, write_card(other))
        print(encode(found) if as_json else comparison(folder, other, found).rstrip())
        return
    print((Path(folder) / ("card.json" if as_json else "card.md")).read_text(encoding="utf-8").rstrip())
