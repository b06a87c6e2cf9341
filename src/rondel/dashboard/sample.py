"""A long journal at a glance: the rows of a few steps, spread evenly over the file,
long before the whole of it is read.

Each is exact: all events between two StepDones, folded as a live run folds them. A run that was
resumed tells some steps twice; the later one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rondel.dashboard.columns import MetricColumns
from rondel.dashboard.tail import kind_of
from rondel.runtime.telemetry.diagnose.story import ROWS, event_of
from rondel.runtime.telemetry.metrics import StepMetrics
from rondel.text.unicode import read_exact_json

PLACES = 200  # steps that are looked at
BLOCK, FAR = 1 << 15, 1 << 21  # bytes that are read at once, and at most, to find one whole step
READ = {*ROWS, "GroupsTaken"}


def read_sampled_columns(path: Path, places: int = PLACES) -> MetricColumns:
    columns = MetricColumns()
    size = path.stat().st_size
    with path.open("rb") as file:
        for place in range(places):
            _add_row(columns, _step_at(file, size * place // places))
        back = BLOCK
        while back < FAR and not _add_row(columns, _step_at(file, max(0, size - back), newest=True)):
            back *= 2
    return columns


def _add_row(columns: MetricColumns, told: tuple[int, dict[str, float]] | None) -> bool:
    if told is not None:
        columns.add_row(*told)
    return told is not None


def _step_at(file: BinaryIO, offset: int, newest: bool = False) -> tuple[int, dict[str, float]] | None:
    """The first whole step after this byte, or the last of those nearby; None where none ends within reach."""
    file.seek(offset)
    data, reach = b"", BLOCK
    while reach <= FAR:
        more = file.read(reach)
        data += more
        marks = list(_step_line_bounds(data))
        if len(marks) > 1 or not more:
            break
        reach *= 2
    if len(marks) < 2:
        return None
    (_, after), (_, until) = (marks[-2], marks[-1]) if newest else (marks[0], marks[1])
    rows: list[tuple[int, dict[str, float]]] = []
    metrics = StepMetrics(lambda step, row: rows.append((step, row)))
    for line in data[after:until].split(b"\n"):
        if kind_of(line) in READ and (told := _decode_event(line)):
            metrics.on_event(event_of(told))
    return rows[-1] if rows else None


def _step_line_bounds(data: bytes) -> Iterator[tuple[int, int]]:
    """(where it begins, where the next line does) of each whole StepDone."""
    at = data.find(b'"kind":"StepDone"')
    while at >= 0:
        end = data.find(b"\n", at) + 1
        if not end:
            return
        yield data.rfind(b"\n", 0, at) + 1, end
        at = data.find(b'"kind":"StepDone"', end)


def _decode_event(line: bytes) -> dict[str, Any] | None:
    try:
        return read_exact_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
