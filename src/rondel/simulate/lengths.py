"""How long answers are: drawn from a law, or from those that a run recorded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from rondel.core.errors import ConfigError, DataError

Lengths = Callable[[random.Random], float]


def log_normal(mean: float, sigma: float, most: float) -> Lengths:
    """exp(N(mu, sigma)) with this mean before it is cut at `most`; sigma = 0: all equal."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda draw: min(most, max(1.0, draw.lognormvariate(mu, sigma))) if sigma else mean


def long_tailed(short: float, share: float, times: float) -> Lengths:
    """`share` of the answers are `times` as long as the others."""
    return lambda draw: short * (times if draw.random() < share else 1.0)


def recorded_lengths(*folders: str | Path) -> Lengths:
    """One of the lengths in the journals of runs, each as likely."""
    found: list[int] = []
    for folder in folders:
        journal = Path(folder) / "journal.jsonl"
        if not journal.is_file():
            raise DataError(f"no journal at {journal}: --lengths takes the folder of a run, such as runs/tiny")
        for line in journal.read_text(encoding="utf-8").splitlines():
            if '"GroupFinished"' in line:
                found += json.loads(line).get("lengths", [])
    if not any(found):
        raise DataError(f"{', '.join(map(str, folders))} has no answers yet: let the run take a step, or give --sigma")
    return lambda draw: max(1, draw.choice(found))


def parse_tail(text: str) -> tuple[float, float]:
    """ "0.1:8" -> (0.1, 8.0)."""
    try:
        share, times = map(float, text.split(":"))
    except ValueError as error:
        raise ConfigError(f"'{text}' is not SHARE:TIMES, such as 0.1:8 (one of ten, 8 times)") from error
    if not 0 <= share <= 1 or times <= 0:
        raise ConfigError(f"'{text}': SHARE is between 0 and 1, and TIMES more than 0")
    return share, times
