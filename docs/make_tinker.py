"""Calls every public method of the tinker SDK's clients against `rondel serve --training` and writes the table of
docs/tinker.md: `python docs/make_tinker.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).with_name("tinker.md")
BEGIN, END = "<!-- methods: written by docs/make_tinker.py -->\n", "<!-- end of methods -->\n"
KEY = "tml-docs"


def table(told: Mapping[tuple[str, str], str]) -> str:
    """A method and its `_async` twin on one line."""
    answered = sum(said == "answered" for said in told.values())
    lines = [f"{answered} of {len(told)} methods are answered.\n", "| client | method | |", "|---|---|---|"]
    for (client, name), said in told.items():
        if name.endswith("_async") and (client, name.removesuffix("_async")) in told:
            continue
        twin = told.get((client, f"{name}_async"))
        shown = f"`{name}`" + (", `_async`" if twin is not None else "")
        words = said if twin in (None, said) else f"{said}; async: {twin}"
        lines.append(f"| {client} | {shown} | {words} |")
    return "\n".join(lines) + "\n"


def call_methods() -> dict[tuple[str, str], str]:
    sys.path.insert(0, str(PAGE.parents[1] / "tests"))
    from kits.engine import SIZE, tiny
    from kits.serve import Server
    from kits.tinker_methods import call_all
    from rondel.models.random_model import CHAT
    from rondel.models.save import save_model

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        loaded = tiny("llama", **SIZE)
        loaded.tokenizer.chat_template = CHAT
        save_model(loaded, place / "base")
        words = ["--training", "--folder", str(place / "kept"), "--name", str(place / "base")]
        server = Server(place / "base", place, *words, key=KEY)
        try:
            return call_all(f"http://127.0.0.1:{server.port}", KEY, str(place / "base"))
        finally:
            server.stop()


def page(told: Mapping[tuple[str, str], str]) -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table(told) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(call_methods()), encoding="utf-8")
