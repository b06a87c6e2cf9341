"""rondel card: the run answers for itself."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rondel.text.unicode import visible_text


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    other: Annotated[str, typer.Argument(metavar="RUN2", help="With --diff: another one.", show_default=False)] = "",
    diff: Annotated[bool, typer.Option("--diff", help="Print only what differs between RUN and RUN2.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the page.")] = False,
) -> None:
    """Report on a run: before, after, and how.

    Writes card.md and card.json into the run folder, if it can be written to, and prints the card.
    """
    from rondel.core.errors import CheckpointError, UserError
    from rondel.runtime.telemetry.card import card_of, render_markdown, save_card
    from rondel.runtime.telemetry.comparison import compare_cards, render_comparison
    from rondel.text.unicode import write_json

    if diff != bool(other):
        raise UserError("two run folders and --diff go together: rondel card --diff RUN RUN2")
    cards = [card_of(each) for each in (folder, other) if each]
    for each, card in zip((folder, other), cards):
        try:
            save_card(each, card)
        except CheckpointError as error:
            print(f"note: the card is only shown: {error}", file=sys.stderr)
    if diff:
        found = compare_cards(*cards)
        print(write_json(found) if as_json else visible_text(render_comparison(folder, other, found).rstrip()))
        return
    print((write_json(cards[0]) if as_json else visible_text(render_markdown(cards[0]))).rstrip())
