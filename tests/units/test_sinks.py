"""No sink ends a run: one that fails is told once and left out. The journal and the
rollouts, which a resumed run depends on, are none.
"""

from __future__ import annotations

import io
import sys

import pytest

from kits.runs import events, tiny
from rondel.assemble import train
from rondel.core.errors import CheckpointError
from rondel.core.events import Event, RunStarted, StepDone, Warned, drop_on_failure, emit, subscribe, warn_aloud
from rondel.runtime.journal.log import Journal

SINKS = """
class Sink:
    def __init__(self, folder, after=-1):
        self.steps = 0
    def write(self, step, metrics):
        self.steps += 1
        if self.steps > 1:
            raise ConnectionError("the tracker is down")
    def close(self):
        raise OSError("nor can it be closed")
"""


class Gone(io.StringIO):
    """A terminal that takes nothing more after its first words."""

    def write(self, text: str) -> int:
        if self.tell() > 400:
            raise ValueError("nobody reads")
        return super().write(text)


def heard(*kinds: type[Event]):
    """-> (what is heard of these kinds, how to end it)"""
    found: list[Event] = []
    return found, subscribe(lambda event: found.append(event) if isinstance(event, kinds) else None)


@pytest.mark.slow
def test_a_run_outlives_its_tracker_and_its_terminal(tmp_path, monkeypatch):
    (tmp_path / "tracked.py").write_text(SINKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    terminal = Gone()
    monkeypatch.setattr(sys, "stdout", terminal)
    folder = tmp_path / "run"
    train(tiny(folder, loop__warmup__steps=0, loop__steps=3, run__sinks=["tracked:Sink", "jsonl"]))
    said = [e["message"] for e in events(folder, "Warned") if "left out" in e["message"]]
    assert len(said) == len(set(said)) == 3
    assert any(
        text.startswith("the sink 'tracked:Sink' is left out") and "the tracker is down" in text for text in said
    )
    assert any(text.startswith("the end of the sink 'tracked:Sink'") for text in said)
    assert (
        any(text.startswith("the console is left out") and "nobody reads" in text for text in said)
        and terminal.getvalue()
    )
    assert [e["step"] for e in events(folder, "StepDone")] == [1, 2, 3] and events(folder, "RunEnded")
    # three steps and two evaluations: one sink's end is not another's
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_sink_that_fails_is_told_once_and_not_asked_again(capsys):
    asked = []

    def breaks(event: Event) -> None:
        asked.append(event)
        raise ValueError("\ud83d\x1b[2J")

    told, stop = heard(Warned)
    ends = [subscribe(drop_on_failure("the console", breaks, tell=warn_aloud)), stop]
    for _ in range(5):
        emit(StepDone(1, 1, {}, {}, {}))
    for end in ends:
        end()
    assert len(asked) == 1 and len(told) == 1 and "the console is left out from here on" in told[0].message
    assert (
        capsys.readouterr().err
        == "warning: the console is left out from here on, and the run goes on: ValueError: \\ud83d\\x1b[2J\n"
    )


@pytest.mark.parametrize("order", [0, 1])
def test_two_that_fail_at_each_others_news_end(order):
    """Each is told of the other's end, and may fail at that."""

    def breaks(event: Event) -> None:
        raise ValueError("no")

    told, stop = heard(Warned)
    readers = [drop_on_failure("a", breaks), drop_on_failure("b", breaks)]
    ends = [subscribe(reader) for reader in (readers if order else reversed(readers))]
    emit(RunStarted("x", "h"))
    emit(RunStarted("x", "h"))
    for end in (*ends, stop):
        end()
    assert sorted(event.message[:1] for event in told) == ["a", "b"]


def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path):
    """Also where it fails at what a sink that can be done without had to say."""
    journal = Journal(tmp_path)
    says = drop_on_failure("b", lambda event: emit(Warned("seen")) if isinstance(event, StepDone) else None)
    ends = [subscribe(says), subscribe(journal.write)]
    emit(Warned("fine"))
    journal.close()
    try:
        for event in (Warned("lost"), StepDone(1, 1, {}, {}, {})):
            with pytest.raises(CheckpointError, match="writing"):
                emit(event)
    finally:
        for end in ends:
            end()
