"""What a person sees while a run works: one line a step, and one line that moves in between.

    step  12/40   reward 0.41   signal 63 %   entropy 1.21   KL 0.004   lag 0   gap 2e-06
          length 18   cut 2 %   7.4 s: wait 61 %

On a terminal the last line is live; elsewhere (a file, a pipe, CI) every line is plain,
and movement is told every ten seconds.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from rondel.core.events import (
    Advised,
    Checkpointed,
    Evaluated,
    Evaluating,
    Event,
    Generating,
    GroupFinished,
    GroupsTaken,
    Resumed,
    RunEnded,
    RunStarted,
    StepDone,
    Warned,
)
from rondel.core.types import POLICY
from rondel.runtime.telemetry.metrics import StepMetrics
from rondel.runtime.telemetry.scores import failure_text, interval_text, is_share, score_text, within_unit
from rondel.system.streams import PatientStream
from rondel.text.unicode import visible_text

LEGEND = (
    "reward: mean score · signal: groups whose rewards differ, only these teach · KL: distance to the start\n"
    "lag: the weights' age at training, in versions, and its limit · gap: largest |log p(trainer) - log p(engine)|\n"
    "length: tokens in an answer · cut: answers that hit max_tokens · wait: for rollouts"
)
SUPERVISED_LEGEND = (
    "supervised: the steps of loop.warmup, on the tasks' own answers · loss: mean -log p of their tokens"
)
COLUMNS = {  # title -> (metric, format)
    "reward": ("score/reward_mean", "{:.3f}"),
    "signal": ("filter/signal_fraction", "{:.0%}"),
    "entropy": ("train/entropy", "{:.2f}"),
    "KL": ("train/kl_to_start", "{:.2g}"),
    "lag": ("loop/lag_mean", "{:.2g}"),
    "gap": ("train/gap_max", "{:.0e}"),
    "length": ("generate/length_mean", "{:.0f}"),
    "cut": ("generate/truncated_fraction", "{:.0%}"),
}


SUPERVISED = {"loss": ("train/loss", "{:.3f}"), "entropy": COLUMNS["entropy"]}


class ProgressPrinter:
    """A reader of events, and a context: `with Progress(steps=40) as progress: subscribe(progress.read)`.

    steps    how many the run will do
    quiet    only warnings, on stderr
    console  where to write; for tests
    every    seconds between two signs of life where no terminal is
    """

    def __init__(self, steps: int, *, quiet: bool = False, console: Console | None = None, every: float = 10.0) -> None:
        self.steps, self.quiet, self.every = steps, quiet, every
        self.console = console or Console(file=cast(IO[str], PatientStream(sys.stdout, self._handle_closed_output)))
        self.live = self.console.is_terminal and not quiet
        self._status: Status | None = None
        self._metrics = StepMetrics(self._print_row)
        self._warned: set[str] = set()
        self._step, self._finished, self._last_sign = 0, 0, time.monotonic()
        self._supervised = False  # the last step
        self._evaluating: Evaluating | None = None  # what is being evaluated
        self._main_set = ""  # of several held-out sets the first
        self._share = True  # no reward outside [0, 1] was seen

    def __enter__(self) -> ProgressPrinter:
        if self.live:
            self._status = self.console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    @property
    def kinds(self) -> tuple[type[Event], ...]:
        """What it has to hear of: all, or warnings alone where it is quiet."""
        return (Warned,) if self.quiet else ()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Warned):
            return self._print_warning(event.message)
        if self.quiet:
            return
        match event:
            case RunStarted():
                self.print_line(f"run folder {event.folder}", style="bold")
                self.print_line(LEGEND, style="dim")
            case Resumed():
                self._step, self._finished, self._evaluating = event.step, 0, None
                self.print_line(f"resumed at step {event.step} from {event.checkpoint or 'the start'}", style="bold")
            case GroupFinished():
                self._finished += 1
                self._share = self._share and within_unit(event.rewards)
            case GroupsTaken():
                self._step, self._finished = event.step, 0
                self._show_status(
                    f"step {event.step}/{self.steps}: training on {sum(len(g.trajectories) for g in event.groups)} "
                    f"answers"
                )
            case Generating():
                self._print_generating(event)
            case Evaluating():
                self._evaluating = event if event.done < event.total else None
                self._show_status(_evaluation_status(event))
            case Evaluated():
                self._print_evaluation(event)
            case Advised():
                self.print_line(f"  {event.message}", style="dim")
            case Checkpointed():
                self.print_line(f"saved {event.path}", style="dim")
            case RunEnded():
                self.print_line(
                    f"{event.reason} after step {event.step}, {_format_duration(event.seconds)}", style="bold"
                )
        self._metrics.on_event(event)
        if isinstance(event, StepDone) and event.note:
            self.print_line(f"  refused in step {event.step}: {event.note}", style="yellow")

    # -- one line a step -------------------------------------------------------------------------

    def _print_evaluation(self, event: Evaluated) -> None:
        self._share = share = self._share and is_share(asdict(event))
        score, interval = score_text(event.score, share), interval_text(event.low, event.high, share)
        failed = f", {n} {failure_text(event.request)}" if (n := event.request.get("failed")) else ""
        what = "" if share else "mean reward "
        self._main_set = self._main_set or event.profile
        whose = "" if event.profile == self._main_set else f" on {event.profile}"
        draws = f", {event.draws} draws each" if event.draws > 1 else ""
        self.print_line(
            f"eval after step {event.step}{whose}: {what}{score}  (95 % interval {interval}, {event.n} tasks{draws}, "
            f"{event.seconds:.0f} s{failed})",
            style="cyan",
        )
        if event.metrics:
            told = ", ".join(f"{name} {value:.3g}" for name, (value, _, _) in event.metrics.items())
            self.print_line(f"     {told}", style="cyan")

    def _print_row(self, step: int, row: dict[str, float]) -> None:
        if any(name.startswith("eval/") for name in row):
            return
        supervised = "loop/supervised" in row
        if supervised and not self._supervised:
            self.print_line(SUPERVISED_LEGEND, style="dim")
        self._supervised = supervised
        columns = SUPERVISED if supervised else COLUMNS
        cells = [
            f"{title} {style.format(row[name])}{_format_limit(title, row)}"
            for title, (name, style) in columns.items()
            if name in row
        ]
        label = [f"step {step:>{len(str(self.steps))}}/{self.steps}", *["supervised"] * supervised]
        self.print_line("   ".join([*label, *cells, *_format_policies(row), _format_phases(row)]))
        doing = "supervised" if supervised else "generating"
        self._show_status(f"step {step + 1}/{self.steps}: {doing}" if step < self.steps else "finishing")

    # -- the line that moves ---------------------------------------------------------------------

    def _print_generating(self, beat: Generating) -> None:
        speed = f"{beat.tokens / beat.seconds:.0f} tokens/s" if beat.seconds > 0 else "starting"
        if self._evaluating is not None:
            self._show_status(f"{_evaluation_status(self._evaluating)}, {speed}")
            return
        doing = f"{beat.running} answers being written, {beat.waiting} waiting, {self._finished} groups finished"
        self._show_status(f"step {min(self._step + 1, self.steps)}/{self.steps}: {speed}, {doing}")

    def _show_status(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(visible_text(text)))
        elif not self.live and time.monotonic() - self._last_sign >= self.every:
            self.print_line("... " + text)

    def print_line(self, text: str, style: str = "") -> None:
        self._last_sign = time.monotonic()
        self.console.print(visible_text(text), style=style, soft_wrap=True, markup=False, highlight=False)

    def _print_warning(self, message: str) -> None:
        if message in self._warned:
            return
        self._warned.add(message)
        if self.quiet:
            print(visible_text(f"warning: {message}"), file=PatientStream(sys.stderr, lambda error: None))
        else:
            self.print_line(f"warning: {message}", style="yellow")

    def _handle_closed_output(self, error: OSError) -> None:
        """The reader of the output is gone, `head` say: the run goes on."""
        self.live = False
        stderr = PatientStream(sys.stderr, lambda error: None)
        print(
            f"warning: the output cannot be written ({error.strerror}); the run goes on, and its journal has all of it",
            file=stderr,
        )


def _evaluation_status(event: Evaluating) -> str:
    return f"eval after step {event.step}: {event.profile}, {event.done} of {event.total} answers"


def _format_policies(row: dict[str, float]) -> list[str]:
    """critic: reward 0.400, entropy 1.21, gap 2e-06: of each policy beside the main one."""
    names = [name for metric in row if (name := metric.removesuffix("/reward_mean")) not in (metric, "score", POLICY)]
    shown = {title: COLUMNS[title] for title in ("entropy", "KL", "gap")}
    cells = {title: (metric.removeprefix("train/"), style) for title, (metric, style) in shown.items()}
    cells = {"reward": ("reward_mean", "{:.3f}"), **cells}
    return [
        f"{name}: "
        + ", ".join(
            f"{title} {style.format(row[f'{name}/{what}'])}"
            for title, (what, style) in cells.items()
            if f"{name}/{what}" in row
        )
        for name in names
    ]


def _format_limit(title: str, row: dict[str, float]) -> str:
    """lag 0.5/1: never without what it may be at most."""
    return f"/{row['loop/lag_limit']:g}" if title == "lag" and row.get("loop/lag_limit") else ""


def _format_phases(row: dict[str, Any]) -> str:
    """7.4 s: wait 61 %, train 30 %, other 9 %"""
    phases = {
        name.removeprefix("time/"): seconds
        for name, seconds in row.items()
        if name.startswith("time/") and name.count("/") == 1
    }
    total = phases.pop("step", 0.0) or sum(phases.values())
    if not total:
        return ""
    large = {name: s for name, s in sorted(phases.items(), key=lambda p: -p[1]) if s >= 0.05 * total}
    rest = total - sum(large.values())
    shares = [f"{name} {s / total:.0%}" for name, s in large.items()] + (
        [f"other {rest / total:.0%}"] if rest >= 0.005 * total else []
    )
    return f"{total:.1f} s: " + ", ".join(shares)


def _format_duration(seconds: float) -> str:
    """95.0 -> '1 min 35 s'"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
