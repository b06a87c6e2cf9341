"""Text from outside: valid where it is read, visible where it is shown, and no terminal obeys it."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kits.run_folder import finished, group, step_events, write_run
from rondel.cli import main
from rondel.cli.check_env import print_findings
from rondel.core.events import GroupsTaken, Warned
from rondel.core.types import Trajectory
from rondel.runtime.journal.log import Journal, read_history
from rondel.runtime.journal.store import RolloutStore
from rondel.runtime.telemetry.progress import ProgressPrinter
from rondel.score.preflight import CheckFinding
from rondel.text.unicode import read_json, valid_unicode, visible_text, write_json

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202egnp.exe \r overwritten \ud83d"
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ANY = st.text(st.characters(codec=None, categories=None), max_size=20)


@settings(max_examples=80, deadline=None)
@given(text=ANY, other=ANY)
def test_what_is_made_valid_is_what_utf8_can_write_and_nothing_else_changes(text, other):
    made = valid_unicode({text: [other, (text, 1, None, 2.5, True)]})
    json.dumps(made, ensure_ascii=False).encode()
    ((key, (first, (again, *rest))),) = made.items()
    assert key == again and rest == [1, None, 2.5, True] and valid_unicode(made) == made
    for before, after in ((text, key), (other, first)):
        assert after == before or any(0xD800 <= ord(c) < 0xE000 for c in before)
        assert after.replace("\ufffd", "") == "".join(
            c for c in joined(before) if not 0xD800 <= ord(c) < 0xE000
        ).replace("\ufffd", "")


def joined(text: str) -> str:
    """Halves that meet are one character."""
    return re.sub(
        "[\ud800-\udbff][\udc00-\udfff]", lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text
    )


def test_valid_by_example():
    assert (
        valid_unicode("a\ud83db") == "a\ufffdb"
        and valid_unicode("\ud83d\ude00") == "\U0001f600"
        and valid_unicode("é \U0001f600") == "é \U0001f600"
    )
    image = object()
    assert valid_unicode([{"image": image, "\udc00": b"\xff"}]) == [{"image": image, "\ufffd": b"\xff"}]


def test_json_is_read_as_valid_text():
    assert read_json('{"\\ud83d": "\\ud83d\\ude00", "\\\\ud83d": 1}') == {"\ufffd": "\U0001f600", "\\ud83d": 1}
    assert read_json(b"\xef\xbb\xbf[1]") == [1]
    for raw in (b'"\xed\xa0\x80"', b"\xff", "{"):
        with pytest.raises(ValueError):
            read_json(raw)


@settings(max_examples=50, deadline=None)
@given(text=ANY)
def test_nothing_that_a_terminal_obeys_is_left(text):
    shown = visible_text(text)
    assert not OBEYED.search(shown) and visible_text(shown) == shown
    shown.encode()
    assert shown.count("\n") == text.count("\n") and shown.count("\t") == text.count("\t")


def test_visible_by_example():
    assert visible_text("a\x1b[2Jb\n\té\u202e\x9b\ud83d") == "a\\x1b[2Jb\n\té\\u202e\\x9b\\ud83d"


@pytest.fixture
def folder(tmp_path):
    """A run in which everything that others write is hostile."""
    write_run(tmp_path)
    hostile = group(99, 4, [1.0, 0.0])
    hostile.task.data.update(prompt=HOSTILE, answer=HOSTILE)
    hostile.trajectories = [Trajectory(text=HOSTILE, score=t.score, agent=HOSTILE, tokens=t.tokens, mask=t.mask, logprobs=t.logprobs, versions=t.versions) for t in hostile.trajectories]  # fmt: skip
    store, journal = RolloutStore(tmp_path), Journal(tmp_path)
    for event in (finished(hostile), GroupsTaken(5, 4, [hostile]), Warned(HOSTILE), *step_events(6)):
        store.write(event)
        journal.write(event)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    for event in told:
        if event["kind"] == "Evaluated":
            event["samples"] = [{"prompt": HOSTILE, "text": HOSTILE, "answer": HOSTILE, "reward": 1.0}]
    journal.close()
    store.close()
    (tmp_path / "journal.jsonl").write_text("".join(write_json(event) + "\n" for event in told))
    return tmp_path


@pytest.mark.parametrize("words", [["view", "--step", "5"], ["card"], ["diagnose"], ["card", "--diff"]], ids=" ".join)
def test_no_verb_lets_the_text_of_a_run_reach_the_terminal_raw(folder, capsys, words):
    verb, *more = words
    other = [str(write_run(folder / "other"))] if "--diff" in more else []
    with pytest.raises(SystemExit) as end:
        main([verb, str(folder), *other, *more])
    said = capsys.readouterr()
    assert not end.value.code, said.err
    assert not OBEYED.search(said.out + said.err) and ("\\x1b[2J" in said.out or verb == "diagnose" or other)


def test_what_a_journal_says_is_valid_text(folder):
    assert [e["message"] for e in read_history(folder) if e["kind"] == "Warned"] == [valid_unicode(HOSTILE)]


def test_errors_and_findings_are_shown_visibly(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["view", str(tmp_path / HOSTILE[:8])])
    print_findings([CheckFinding(HOSTILE, False, HOSTILE, HOSTILE)])
    said = capsys.readouterr()
    assert not OBEYED.search(said.out + said.err) and "\\x1b[2J" in said.out and "\\x1b[2J" in said.err


@pytest.mark.parametrize("quiet", [False, True])
def test_the_console_outlives_text_that_it_cannot_write(capsys, quiet):
    """A stream that refuses half a character, as UTF-8 does: the next events are shown, too."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with ProgressPrinter(2, quiet=quiet, console=Console(file=out, width=200)) as progress:
        for event in (Warned(HOSTILE), *step_events(1)):
            progress.on_event(event)
    out.flush()
    said = out.buffer.getvalue().decode() + capsys.readouterr().err
    assert "warning: \\x1b[2J" in said and ("step 1/2" in said) == (not quiet) and not OBEYED.search(said)
