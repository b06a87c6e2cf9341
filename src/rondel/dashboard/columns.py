"""The rows of a run by metric: one array of numbers a name, so that 10^5 steps of 80 metrics are
64 MB, and a curve of them is a few calls of numpy.

steps   [N]   the step of each row, ascending
values  name -> [N], NaN where a row has no such number
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping

import numpy as np

MISSING = math.nan


class MetricColumns:
    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def add_row(self, step: int, row: Mapping[str, float]) -> None:
        """A step that is told again takes the place of what was told of it and of all later ones."""
        if self.steps and step <= self.steps[-1]:
            self.back_to(step - 1)
        before = len(self.steps)
        self.steps.append(step)
        for name, value in row.items():
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = array("d", [MISSING]) * before
            column.append(value)
        for column in self.values.values():
            if len(column) == before:
                column.append(MISSING)

    def back_to(self, step: int) -> None:
        """Forget every row after this step."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:]
        for column in self.values.values():
            del column[keep:]

    def last_value(self, name: str) -> float | None:
        """The newest number of a metric."""
        for value in reversed(self.values.get(name, ())):
            if value == value:
                return value
        return None

    def series(self, name: str, first: int = 0) -> list[tuple[int, float]]:
        """(step, value) of every row that has it, from step `first`."""
        if name not in self.values:
            return []
        steps, values = self._values_between(name, first, None)
        there = ~np.isnan(values)
        return list(zip(steps[there].tolist(), values[there].tolist()))

    def value_range(self, name: str) -> list[float]:
        """Its smallest and largest number; [] where it has none."""
        values = np.array(self.values.get(name, ()), dtype=np.float64)
        known = values[~np.isnan(values)]
        return [float(known.min()), float(known.max())] if len(known) else []

    def sum_between(self, name: str, first: int, last: int | None = None) -> float:
        return float(np.nansum(self._values_between(name, first, last)[1])) if name in self.values else 0.0

    def _values_between(self, name: str, first: int, last: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Copies: an array that numpy looks into cannot grow."""
        a, b = bisect_left(self.steps, first), len(self.steps) if last is None else bisect_right(self.steps, last)
        return np.array(self.steps[a:b], dtype=np.int64), np.array(self.values[name][a:b], dtype=np.float64)

    def curve_on_grid(self, name: str, grid: StepGrid) -> dict[str, list[float | None]] | None:
        """The curve of a metric on a grid: the mean of each cell, and its extremes where a cell has several steps."""
        if name not in self.values:
            return None
        steps, values = self._values_between(name, grid.first, grid.last)
        there = np.isfinite(values)
        if not there.any():
            return None
        cells, values = (steps[there] - grid.first) // grid.width, values[there]
        starts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
        counts = np.diff(np.r_[starts, len(cells)])
        out = {"mean": np.add.reduceat(values, starts) / counts}
        if grid.width > 1:
            out |= {"low": np.minimum.reduceat(values, starts), "high": np.maximum.reduceat(values, starts)}
        return {what: _scatter_cells(cells[starts], numbers, grid.cells) for what, numbers in out.items()}


def _scatter_cells(cells: np.ndarray, numbers: np.ndarray, n: int) -> list[float | None]:
    out: list[float | None] = [None] * n
    for cell, number in zip(cells.tolist(), numbers.tolist()):
        out[cell] = float(f"{number:.5g}")
    return out


class StepGrid:
    """Cells of `width` steps from `first` to `last`, at most `points` of them: runs beside each
    other are drawn on one.
    """

    def __init__(self, first: int, last: int, points: int) -> None:
        self.first, self.last = first, max(first, last)
        self.width = max(1, math.ceil((self.last - first + 1) / max(1, points)))
        self.cells = (self.last - first) // self.width + 1

    def cell_centers(self) -> list[float]:
        """The middle of each cell; of the last one, the middle of what there is."""
        starts = range(self.first, self.last + 1, self.width)
        return [(a + min(a + self.width - 1, self.last)) / 2 for a in starts]


class MetricRow(Mapping[str, float]):
    """One row again, as the fold made it."""

    __slots__ = ("_at", "_of")

    def __init__(self, of: MetricColumns, at: int) -> None:
        self._of, self._at = of, at

    def __getitem__(self, name: str) -> float:
        value = self._of.values[name][self._at]
        if value != value:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name, column in self._of.values.items() if column[self._at] == column[self._at])

    def __len__(self) -> int:
        return sum(1 for _ in self)
