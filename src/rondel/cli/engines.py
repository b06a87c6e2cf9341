"""rondel engines: how many engines a run has, while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    count: Annotated[int, typer.Argument(metavar="N", help="Engines that it shall have from now on.")],
) -> None:
    """Give a run more engines of its own, or fewer.

    It starts or ends them within seconds and says so. What one that leaves has begun goes to the others.
    """
    from rondel.driver.elastic_engines import EVERY, ask_for_engines

    ask_for_engines(Path(folder), count)
    print(f"{folder} was asked for {count} engine{'s' * (count != 1)}; a run that goes on reads it every {EVERY:g} s")
