"""`python -m rondel.dashboard.frame_process RUN STEP AT`: the frames of one episode, or why there are none, as JSON.

It ends with the process at the other end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from rondel.cli.episode_frames import actions_per_step, frame_grid, picture_shape
from rondel.core.errors import RondelError
from rondel.dashboard.rollouts import find_row
from rondel.runtime.journal.log import read_recipe
from rondel.runtime.telemetry.drawn_images import png_address


def main(folder: str, step: str, at: str) -> None:
    """What libraries print goes to standard error, the one answer to standard output."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        threading.Thread(target=_end_with_input, daemon=True).start()
        try:
            recipe, row = read_recipe(folder), find_row(Path(folder), int(step), int(at))
            image = frame_grid([row], actions_per_step(folder, recipe), picture_shape(folder, recipe))
            told = {"png": png_address(image)}
        except RondelError as error:
            told = {"error": str(error)}
        answer.write(json.dumps(told))


def _end_with_input() -> None:
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
