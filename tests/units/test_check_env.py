"""`rondel check-env` finds each fault by name, and finds none where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kits.runs import tiny
from rondel.assemble import check_env
from rondel.cli import main
from rondel.driver import event_loop_watchdog

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def checked(tmp_path, env, *, patience=0.3, **changes):
    return check_env(tiny(tmp_path, task__env=env, **changes), n=6, patience=patience)


@pytest.fixture
def unhurried(monkeypatch):
    """Where nothing is to be found: on a busy machine a loop stands still, and episodes meet late, for seconds."""
    monkeypatch.setattr(event_loop_watchdog, "LATE", 60.0)
    return {"patience": 30.0}


def bad(found):
    return {f.what for f in found.findings if not f.ok}


def test_a_good_environment_passes(tmp_path, unhurried):
    found = checked(tmp_path, "kits.rehearsed_envs:Good", **unhurried)
    assert found.ok and bad(found) == set(), found.findings
    assert found.figures["turns"] == 2 and found.figures["score_max"] == 1 and found.figures["differ"] == 0
    assert {"env_median_s", "env_p95_s", "together"} <= found.figures.keys()


@pytest.mark.parametrize(
    ("env", "what", "said"),
    [
        ("GoldFails", {"gold", "empty", "wrong"}, "score as much as gold ones"),
        ("WrongScores", {"wrong"}, "1 wrong answers|wrong answers score as much as gold ones"),
        ("Raises", {"runs"}, "ValueError: invalid literal"),
        ("Blocks", {"blocking"}, "rehearsed_envs.py:"),
        ("Grows", {"budget"}, "tokens, the context holds 64"),
        ("Chatters", {"runs", "budget"}, "of at most 2"),
        ("TakesTurns", {"together"}, "of 4 episodes begun at once 1 asked"),
        ("Masks", {"record"}, "token 0 counts as the policy's"),
        ("Infinite", {"failures", "empty", "wrong"}, "returned inf"),
    ],
)
def test_a_fault_is_found_by_its_name(tmp_path, env, what, said, request):
    by_the_clock = what & {"blocking", "together"}  # on a busy machine one of these is found beside the other
    hurry = {} if by_the_clock else request.getfixturevalue("unhurried")
    found = checked(tmp_path, f"kits.rehearsed_envs:{env}", **hurry)
    assert not found.ok and bad(found) & what, found.findings
    assert bad(found) <= what | {"gold"} | ({"blocking", "together"} if by_the_clock else set())
    assert any(part in f.message for f in found.findings if not f.ok for part in said.split("|")), found.findings
    assert all(f.remedy for f in found.findings if not f.ok)


def test_gold_below_the_maximum_that_an_environment_names_is_a_warning(tmp_path, unhurried):
    for env, told in (
        ("Good", "score the maximum seen, 1"),
        ("GoldFallsShort", "score less than the reward's maximum, 2"),
    ):
        found = checked(tmp_path, f"kits.rehearsed_envs:{env}", **unhurried)
        [gold] = [f for f in found.findings if f.what == "gold"]
        assert found.ok and told in gold.message and gold.warning == (env == "GoldFallsShort")


def test_a_reward_is_asked_where_the_environment_does_not_score(tmp_path, unhurried):
    found = checked(tmp_path, "single_turn", **unhurried)
    assert found.ok and found.figures["reward_p95_s"] > 0 and found.figures["turns"] == 1
    wrong = checked(tmp_path, "single_turn", **unhurried, task__reward={"kind": "format", "tag": "answer"})
    assert bad(wrong) == {"empty", "wrong"}, "whatever has no tag scores alike"


def test_tools_are_counted_to_their_close(tmp_path, unhurried):
    how = {
        "model__path__max_position_embeddings": 2048,
        "engine__sampling__max_tokens": 200,
    }
    found = checked(tmp_path, {"kind": "tools", "tools": ["kits.rehearsed_envs:Notes"]}, **unhurried, **how)
    assert found.ok and " Notes" in next(f.message for f in found.findings if f.what == "closed"), found.findings
    found = checked(tmp_path, {"kind": "tools", "tools": ["kits.rehearsed_envs:Sticks"]}, **how)
    assert "runs" in bad(found) and any("it does not close" in f.message for f in found.findings)


def test_a_world_without_answers_has_no_gold(tmp_path, monkeypatch, unhurried):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    data = {"kind": "gym", "name": "guess_world:make", "n": 6}
    found = checked(tmp_path, {"kind": "gym", "turns": 3}, **unhurried, task__data=data)
    assert found.ok and "gold was not tried" in next(f.message for f in found.findings if f.what == "gold")


def test_a_recipe_that_cannot_be_is_a_finding(tmp_path):
    found = checked(tmp_path, "singel_turn")
    assert bad(found) == {"recipe"} and "Did you mean 'single_turn'" in found.findings[0].message


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as end:
            main(["check-env", *words])
        return end.value.code or 0, *capsys.readouterr()

    code, out, _ = call("guess:Guess", "--data", '{ kind = "guess:numbers" }', "--n", "5", "--json")
    said = json.loads(out)
    assert code == 0 and said["ok"] and said["figures"]["tasks"] == 5
    code, out, _ = call("kits.rehearsed_envs:WrongScores", "--data", '{ kind = "digits" }', "--n", "3")
    assert code == 1 and "✗ wrong" in out and "do: " in out and "1 of " in out
    code, _, err = call("guess:Guess")
    assert code == 1 and "--data" in err
