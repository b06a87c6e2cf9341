"""Measures every family of tests/kits/families.py and writes the table of
docs/families.md: `python docs/make_families.py`.

Tests compare line by line (tests/parity/test_families.py), so the page cannot rot.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).with_name("families.md")
BEGIN, END = "<!-- families: written by docs/make_families.py -->\n", "<!-- end of families -->\n"
HEADING = "| family | greedy | raw logprob gap | routing replay | note |\n|---|---|---|---|---|\n"


def page() -> str:
    """The page as it should be: the text around the table stays."""
    sys.path.insert(0, str(PAGE.parents[1] / "tests"))
    from kits.families import FAMILIES, REFUSED, row

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table = HEADING + "".join(row(kind) + "\n" for kind in sorted([*FAMILIES, *REFUSED]))
    return before + BEGIN + table + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
