"""Where metrics go. A sink is made as `kind(folder, after=step)`: a resumed run passes its
checkpoint's step, and nothing is doubled.
-1, the default, keeps nothing of an earlier attempt.

The text sinks rewrite their file without the rows that are about to be repeated;
TensorBoard opens a new event file that tells the viewer to hide what older files say from step + 1 on.
"""

from __future__ import annotations

import csv
import inspect
import math
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rondel.core.config.section import split_kind
from rondel.core.errors import ConfigError, RondelError, disk_refusal
from rondel.core.protocols import Sink
from rondel.core.registry import find_registered
from rondel.runtime.telemetry.prometheus import PrometheusSink
from rondel.runtime.telemetry.trackers import MLflow, Trackio, WandB
from rondel.system.files import guard_write, make_folder, replace_file
from rondel.text.unicode import read_exact_json, write_json


class TensorBoard:
    """`tensorboard --logdir RUN/tensorboard`. Writes the file format directly: needs
    the tensorboard package, not torch.
    """

    def __init__(self, folder: str | Path, after: int = -1) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        path = Path(folder) / "tensorboard"
        older = sorted(path.glob("events.*"))
        self._writer = EventFileWriter(str(path))
        if older and max(path.glob("events.*")) == older[-1]:  # a viewer reads them by name: second, process, count
            self._writer.close()
            next(file for file in path.glob("events.*") if file not in older).unlink()
            time.sleep(1.0 - time.time() % 1.0)
            self._writer = EventFileWriter(str(path))
        if older:
            self._write_event(after + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write_event(step, summary=Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write_event(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))


class JsonLines:
    """`metrics.jsonl`: one object a row, {"step": 3, "score/reward_mean": 0.41, ...}."""

    def __init__(self, folder: str | Path, after: int = -1) -> None:
        path = Path(folder) / "metrics.jsonl"
        _rewrite_lines(
            path, (line for line in _whole_lines(path) if (row := _parse_line(line)) and row["step"] <= after)
        )
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        line = write_json({"step": step, **metrics}) + "\n"
        with guard_write(self._file.name, len(line)):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Csv:
    """`metrics.csv`, long form: step,name,value. A step may have other metrics than the one before it."""

    HEADER = "step,name,value\n"

    def __init__(self, folder: str | Path, after: int = -1) -> None:
        path = Path(folder) / "metrics.csv"
        kept = (
            line for line in _whole_lines(path) if (step := line.partition(",")[0]).isdigit() and int(step) <= after
        )
        _rewrite_lines(path, (self.HEADER, *kept))
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        with guard_write(self._file.name):
            csv.writer(self._file, lineterminator="\n").writerows(
                (step, name, repr(float(value))) for name, value in metrics.items()
            )
            self._file.flush()

    def close(self) -> None:
        self._file.close()


SINKS: dict[str, Any] = {
    "tensorboard": TensorBoard,
    "jsonl": JsonLines,
    "csv": Csv,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
    "prometheus": PrometheusSink,
}


TRACES = "opentelemetry"  # it reads events instead of rows: see otel.py


def open_sinks(sinks: Iterable[str | dict[str, Any]], folder: str | Path, after: int = -1) -> list[RunSink]:
    """The sinks of `run.sinks`, without the one of the traces; the user's own is "module:name" and is made in the same
    way, with the settings of its table.
    """
    return [RunSink(kind, settings, folder, after) for kind, settings in sink_tables(sinks)]


class RunSink:
    """One sink of a run, opened anew where the run goes back to a checkpoint: what it repeats is not told twice."""

    def __init__(self, kind: str, settings: dict[str, Any], folder: str | Path, after: int) -> None:
        self.name = f"the sink '{kind}'"
        self._open = partial(_open_sink, kind, settings, folder)
        self.sink = self._open(after)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.sink.write(step, metrics)

    def go_back(self, after: int) -> None:
        self.sink.close()
        self.sink = self._open(after)

    def close(self) -> None:
        self.sink.close()


def sink_tables(sinks: Iterable[str | dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(kind, settings) of each sink that takes rows of metrics."""
    return [(kind, settings) for kind, settings in (split_kind(entry, "") for entry in sinks) if kind != TRACES]


def traces_address(sinks: Iterable[str | dict[str, Any]]) -> str:
    """The url of { kind = "opentelemetry", url = ... }; "" where it has none, or the recipe does not name it."""
    for kind, settings in (split_kind(entry, "") for entry in sinks):
        if kind == TRACES:
            if odd := settings.keys() - {"url"}:
                raise ConfigError(f"run.sinks: '{TRACES}' has no setting '{min(odd)}'. It has: url")
            if not isinstance(url := settings.get("url", ""), str):
                raise ConfigError(f'run.sinks: url = {url!r} of "{TRACES}" is no text, such as "http://127.0.0.1:4318"')
            return url
    return ""


def _open_sink(kind: str, settings: dict[str, Any], folder: str | Path, after: int) -> Sink:
    make = find_registered("run.sinks:", kind, {**SINKS, TRACES: None})
    try:
        inspect.signature(make).bind(folder, after=after, **settings)
    except TypeError as error:
        raise ConfigError(f"run.sinks: '{kind}' cannot be made from {settings or 'no settings'}: {error}") from error
    except ValueError:  # written in C
        pass
    try:
        return make(folder, after=after, **settings)
    except RondelError:
        raise
    except Exception as error:
        what = f"run.sinks: opening '{kind}' in {folder}"
        raise ConfigError(
            disk_refusal(error, what) or f"{what} raised {type(error).__name__}: {error}; leave it out, or mend it"
        ) from error


def _whole_lines(path: Path) -> list[str]:
    """The whole lines of a file; a torn last one is left out."""
    if not path.exists():
        return []
    return [line + "\n" for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        row = read_exact_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and not math.isnan(row.get("step", math.nan)) else None


def _rewrite_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the file by these of its lines, atomically."""
    make_folder(path.parent)
    with guard_write(path):
        replace_file(path, "".join(lines))
