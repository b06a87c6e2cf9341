"""The journal: nothing is lost, nothing counts twice."""

import json
import math
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kits.run_folder import group, step_events, write_run
from rondel.core.errors import CheckpointError, UserError
from rondel.core.events import (
    Admitted,
    Checkpointed,
    Checkpointing,
    Evaluating,
    Generating,
    GroupFinished,
    GroupsTaken,
    Resumed,
    StepDone,
    Warned,
)
from rondel.runtime.journal.log import Journal, read, read_history
from rondel.runtime.telemetry.card import card_of
from rondel.text.unicode import read_exact_json, write_json

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(TREES)
def test_decode_is_the_inverse_of_encode_and_the_text_is_strict_json(tree):
    text = write_json(tree)
    assert repr(read_exact_json(text)) == repr(tree)  # repr: NaN equals itself, -0.0 differs from 0.0
    assert "\n" not in text and "NaN" not in text.replace("\\", "").split('"')[::2]


def told(folder):
    """What the run says of itself, without sequence numbers and times."""
    drop = {"RunStarted", "Resumed", "Warned"}
    return [repr({k: v for k, v in e.items() if k not in ("n", "t")}) for e in read(folder) if e["kind"] not in drop]


@pytest.mark.slow
@pytest.mark.parametrize("crash_after", [1, 3, 5])
def test_an_interrupted_run_reads_as_if_it_had_not_been(tmp_path, crash_after):
    whole = write_run(tmp_path / "whole", steps=6)
    broken = write_run(tmp_path / "broken", steps=6, crash_after=crash_after)
    assert told(broken) == told(whole)
    assert len(read_history(broken)) > len(list(read(broken)))  # nothing was erased
    assert [e["message"] for e in read(broken) if e["kind"] == "Warned"] == ["slow disk"]


def test_a_crash_after_any_event_at_all(tmp_path):
    """Resume at the newest checkpoint, wherever the crash came. One thing stays lost: StepDone(k) of a crash between
    Checkpointed(k) and StepDone(k), because the resumed run begins with step k + 1."""
    whole = [e for step in range(1, 6) for e in step_events(step)]
    for cut in range(1, len(whole)):
        saved = [(at, e) for at, e in enumerate(whole[:cut]) if isinstance(e, Checkpointed)]
        at, last = saved[-1] if saved else (-1, Checkpointed(0, 0, "", 0.0))
        behind = 2 if last.step else 0  # Checkpointed(k), StepDone(k)
        journal = Journal(tmp_path / str(cut))
        for event in [*whole[:cut], Resumed(last.step, last.version, last.path), *whole[at + behind if saved else 0 :]]:
            journal.write(event)
        lost = bool(saved) and cut == at + 1
        expected = [*whole[: at + 1], *whole[at + 2 :]] if lost else whole
        assert [e["kind"] for e in read(tmp_path / str(cut)) if e["kind"] != "Resumed"] == [
            type(e).__name__ for e in expected
        ], cut


@pytest.mark.slow
def test_two_crashes_to_the_same_checkpoint(tmp_path):
    whole = write_run(tmp_path / "whole", steps=3)
    journal = Journal(tmp_path / "twice")
    first_life = step_events(1) + step_events(2) + step_events(3)
    second_life = [Resumed(2, 2, "c"), *step_events(3)[:4]]
    for event in [*first_life, *second_life, Resumed(2, 2, "c"), *step_events(3)]:
        journal.write(event)
    steps = [e["step"] for e in read(tmp_path / "twice") if e["kind"] == "StepDone"]
    assert steps == [1, 2, 3]
    numbers = [e["number"] for e in read(tmp_path / "twice") if e["kind"] == "GroupFinished"]
    assert numbers == [e["number"] for e in read(whole) if e["kind"] == "GroupFinished"] == [0, 1, 2, 3, 4, 5]


def test_rollouts_that_went_on_while_the_checkpoint_was_written(tmp_path):
    """Staleness 1: group 2 is in flight at the checkpoint, 3 is admitted and 2 finishes before its line is written."""
    journal = Journal(tmp_path)
    done = GroupFinished(2, "t", 0, True, "", [0.0], [3])
    again = GroupFinished(2, "t", 0, True, "", [1.0], [4])
    first = [
        Admitted(2, "t", 0),
        Admitted(3, "t", 0),
        done,
        Checkpointed(1, 1, "c", 0.1),
        StepDone(1, 1, {}, {}, {}),
        Admitted(4, "t", 1),
    ]
    for event in [*first, Resumed(1, 1, "c"), Admitted(3, "t", 0), again]:
        journal.write(event)
    events = list(read(tmp_path))
    assert [e["number"] for e in events if e["kind"] == "Admitted"] == [2, 3]
    assert [e["rewards"] for e in events if e["kind"] == "GroupFinished"] == [[1.0]]
    assert [e["step"] for e in events if e["kind"] == "StepDone"] == [1]


def test_a_crash_between_a_checkpoint_and_its_line(tmp_path):
    journal = Journal(tmp_path)
    for event in [*step_events(1), *step_events(2)[:-2], Resumed(2, 2, "c"), *step_events(3)]:
        journal.write(event)
    numbers = [e["number"] for e in read(tmp_path) if e["kind"] == "GroupFinished"]
    assert numbers == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("named", [True, False], ids=["its line was written", "killed before its line"])
def test_groups_that_finished_before_a_checkpoint_count_whenever_the_crash_came(tmp_path, named):
    """Staleness 1: 1 and 2 have finished when the state is taken, and 3 finishes while it is being written."""
    journal = Journal(tmp_path)
    done = [GroupFinished(n, "t", 0, True, "", [0.0], [3]) for n in range(4)]
    first = [
        *(Admitted(n, "t", 0) for n in range(4)),
        done[0],
        StepDone(1, 1, {}, {}, {}),
        *done[1:3],
        Checkpointing(2),
        done[3],
        Admitted(4, "t", 1),
    ]
    ended = [Checkpointed(2, 2, "c", 0.1), StepDone(2, 2, {}, {}, {})] if named else []
    for event in [*first, *ended, Resumed(2, 2, "c"), Admitted(4, "t", 1)]:
        journal.write(event)
    events = list(read(tmp_path))
    assert [e["number"] for e in events if e["kind"] == "Admitted"] == [0, 1, 2, 3, 4]
    assert [e["number"] for e in events if e["kind"] == "GroupFinished"] == [0, 1, 2]


def test_a_torn_last_line_is_ignored_and_then_cut_off(tmp_path):
    journal = Journal(tmp_path)
    for event in step_events(1):
        journal.write(event)
    journal.close()
    before = repr(list(read(tmp_path)))  # repr: NaN equals itself
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    for torn in (b'{"n": 99, "t', b"\0\0\0\n", b'{"n": 99}\n{"n"'):
        path.write_bytes(whole + torn)
        assert repr(list(read(tmp_path))) == before
        Journal(tmp_path).close()
        assert path.read_bytes() == whole
    again = Journal(tmp_path)
    again.write(Warned("on"))
    assert [e["n"] for e in read(tmp_path)] == list(range(whole.count(b"\n") + 1))


def test_a_damaged_middle_is_an_error_with_its_line(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "journal.jsonl"
    lines = path.read_text().split("\n")
    lines[2] = "?"
    path.write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=r"journal\.jsonl line 3 "):
        list(read(tmp_path))


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(UserError, match="no run folder at"):
        list(read(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no journal"):
        list(read(tmp_path))


def test_groups_stay_out_and_their_numbers_stay_in(tmp_path):
    journal = Journal(tmp_path)
    journal.write(GroupsTaken(1, 5, [group(7, 4, [1.0]), group(9, 5, [0.0])]))
    journal.write(Generating(1, 2, 3, 0.1))
    journal.write(Evaluating(1, "held_out", 2, 3))
    [event] = read(tmp_path)
    assert {k: event[k] for k in ("step", "version", "numbers", "born")} == {
        "step": 1,
        "version": 5,
        "numbers": [7, 9],
        "born": [4, 5],
    }
    assert "tokens" not in event and "groups" not in event


def test_not_a_number_survives(tmp_path):
    Journal(tmp_path).write(StepDone(1, 1, {"a": math.nan, "b": math.inf}, {}, {}))
    [event] = read(tmp_path)
    assert math.isnan(event["metrics"]["a"]) and event["metrics"]["b"] == math.inf
    assert "NaN" not in (tmp_path / "journal.jsonl").read_text()


def test_a_checkpoint_is_on_the_disk_and_with_durability_disk_every_step(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", calls.append)
    for durability, expected in (("process", 1), ("disk", 2)):
        journal = Journal(tmp_path / durability, durability)
        calls.clear()
        for event in step_events(2):  # one Checkpointed, one StepDone
            journal.write(event)
        assert len(calls) == expected


def test_a_clock_that_is_set_makes_no_line_later_and_no_card_longer(tmp_path, monkeypatch):
    journal, jump = Journal(tmp_path), 30 * 24 * 3600.0
    for step in range(1, 4):
        for event in step_events(step):
            journal.write(event)
        plain = time.time()
        monkeypatch.setattr(time, "time", lambda plain=plain: plain + jump)
    times = [event["t"] for event in read(tmp_path)]
    assert times == sorted(times) and times[-1] - times[0] < 60
    assert card_of(tmp_path)["seconds"] < 60


@pytest.mark.parametrize(
    "change, says",
    [
        ({"step": "three"}, "the step of a StepDone is 'three', and no int"),
        ({"metrics": [1]}, "the metrics of a StepDone"),
        ({"metrics": {"train/loss": "low"}}, "and no dict\\[str, float\\]"),
        ({"metrics": None}, "is None"),
        ({"ledger": {"admitted": {}}}, "the ledger of a StepDone"),
    ],
)
def test_a_line_with_another_type_is_named_and_not_read_on(tmp_path, change, says):
    write_run(tmp_path)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "StepDone")
    lines[at] = json.dumps(json.loads(lines[at]) | change)
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError, match=f"line {at + 1} is not an event \\(.*{says}"):
        list(read(tmp_path))
