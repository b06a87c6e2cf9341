"""The run card: measured numbers, honest intervals, a page that reads well."""

import json
import math
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.run_folder import evaluated, write_run
from kits.runs import events, run, tiny
from rondel.assemble.facts import devices_of, tasks_digest
from rondel.cli import main
from rondel.cli.train import closing_summary
from rondel.core.errors import UserError
from rondel.core.types import Task
from rondel.dashboard.rollouts import read_answer, rollout_table
from rondel.driver.evaluation import score_interval
from rondel.runtime.journal.log import read_history
from rondel.runtime.telemetry.card import (
    _interval_verdict,
    answer_questions,
    card_of,
    compared_intervals,
    count_shared_tokens,
    normal_interval,
    render_markdown,
    run_summary,
    shared_text,
    sparkline,
    wilson_interval,
    write_card,
)
from rondel.runtime.telemetry.comparison import compare_cards, render_comparison
from rondel.runtime.telemetry.scores import is_share


@pytest.mark.parametrize(
    "successes, n, low, high",
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662), (0, 0, 0.0, 1.0)],
)
def test_wilson_against_published_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)  # 81 of 263: Newcombe 1998, method 3


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_equation_and_is_symmetric(case):
    k, n = case
    low, high = wilson_interval(k, n)
    assert low <= k / n <= high or math.isclose(low, k / n, abs_tol=1e-12) or math.isclose(high, k / n)
    for end in {low, high} - {0.0, 1.0}:
        assert (end - k / n) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / n, rel=1e-6)
    assert wilson_interval(n - k, n) == pytest.approx((1 - high, 1 - low))


def test_the_interval_of_a_mean_of_numbers_of_any_size():
    low, high = normal_interval([-1.0, 3.0, 2.0, 4.0])
    assert (low, high) == pytest.approx((2 - 1.959964 * math.sqrt(14 / 3 / 4), 2 + 1.959964 * math.sqrt(14 / 3 / 4)))
    assert normal_interval([7.0]) == (7.0, 7.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_interval_of_graded_rewards_stays_between_0_and_1(rewards):
    low, high = wilson_interval(sum(rewards), len(rewards))
    mean = sum(rewards) / len(rewards)
    assert 0 <= low <= mean + 1e-9 and mean - 1e-9 <= high <= 1


def test_wilson_refuses_nonsense():
    with pytest.raises(ValueError, match="11 successes of 10"):
        wilson_interval(11, 10)


def test_sparkline():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([1, math.nan, 2]) == "▁ █" and sparkline([]) == "" and sparkline([5, 5]) == "▁▁"
    assert len(sparkline(list(range(1000)))) == 60


def test_the_card_of_an_interrupted_run_counts_its_work_once(tmp_path):
    card = write_card(write_run(tmp_path, steps=4, crash_after=3))
    assert card == write_card(tmp_path) | {"seconds": card["seconds"]}
    before, after = card["eval_before"], card["eval_after"]
    assert (before["score"], before["step"], after["score"], after["step"], after["version"]) == (0.2, 0, 0.6, 4, 4)
    assert (card["steps"], card["trained_groups"], card["resumes"], card["ended"]) == (4, 8, 1, "complete")
    assert card["rewards"] == pytest.approx([(1 + step / 10) / 3 for step in range(1, 5)])
    assert card["warnings"] == ["slow disk"] and card["seconds"] >= 0
    json.loads((tmp_path / "card.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_nine_questions_are_answered_from_measurement(tmp_path):
    answers = write_card(write_run(tmp_path))["questions"]
    assert len(answers) == 9
    text = " | ".join(answers.values())
    for fact in (
        "rondel 0.1.0, torch 2.13.0",
        "engine builtin",
        "placement shared",
        "cpu",
        "compute float32",
        "2.0e-06",
        "1.0e-07",
    ):
        assert fact in text, fact
    assert "on-policy: all 8 trained groups" in text and "cap 0" in text and "4 answers a task" in text
    assert answers["where the time went"] == "wait 50.0%, train 37.5%, sync 12.5%"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("single_turn", "one turn of"),
        ({"kind": "tools", "turns": 3}, "at most 3 turns of"),
        ("mine:Env", "as many turns as it takes of"),
    ],
)
def test_the_turns_of_an_environment_are_those_that_are_known(env, said):
    asked = answer_questions([], {"task": {"env": env}, "engine": {"sampling": {"max_tokens": 7}}}, {})
    assert f", {said} at most 7 tokens" in asked["multi-turn budgets"]


def test_the_page_reads_well(tmp_path):
    write_card(write_run(tmp_path))
    page = (tmp_path / "card.md").read_text()
    assert "| before | 20.0% | 10.0% to 30.0% | 48 | 0 |" in page
    assert "| after | 60.0% | 50.0% to 70.0% | 48 | 4 |" in page
    assert "The intervals do not overlap" in page and "The answer is `7`." in page and "▁▃▆█" in page


def test_a_mean_reward_above_1_is_no_percentage(tmp_path):
    card = write_card(write_run(tmp_path, scale=3.0))
    page = (tmp_path / "card.md").read_text()
    assert card["score_is_share"] is False and "| mean reward | 95 % interval | tasks |" in page
    assert "| before | 0.6 | 0.3 to 0.9 | 48 | 0 |" in page and "| after | 1.8 | 1.5 to 2.1 | 48 | 4 |" in page
    said = closing_summary("runs/a", card)
    assert "before     0.6   95 % interval 0.3 to 0.9 " in said and "after      1.8   95 % interval 1.5 to 2.1 " in said
    assert is_share({"score": 0.4, "low": 0.1, "high": 0.7}) and not is_share(
        {"score": 0.873, "low": 0.54, "high": 1.2}
    )
    assert not is_share({"score": 0.4, "low": 0.3, "high": 0.5, "reward_min": -1.0, "reward_max": 1.0})


def test_a_run_that_has_only_begun_still_has_a_card(tmp_path):
    write_run(tmp_path, steps=2)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "job.toml").unlink()
    card = write_card(tmp_path)
    assert (
        card["eval_after"] is None and card["steps"] == 0 and card["questions"]["group size"].startswith("not recorded")
    )
    assert "shows no effect" in (tmp_path / "card.md").read_text()


def test_an_empty_journal_and_a_missing_folder_are_readable_errors(tmp_path):
    (tmp_path / "journal.jsonl").write_text("")
    with pytest.raises(UserError, match="the run has not started"):
        write_card(tmp_path)
    with pytest.raises(UserError, match="no run folder at"):
        write_card(tmp_path / "nowhere")


# -- two runs -----------------------------------------------------------------------------------------


def test_only_what_differs_is_shown(tmp_path):
    a, b = (write_card(write_run(tmp_path / name, steps=steps)) for name, steps in (("a", 4), ("b", 6)))
    assert compare_cards(a, a) == {} and "No difference" in render_comparison("a", "a", {})
    found = compare_cards(a, b)
    assert found.keys() == {"results", "answers"}, "one recipe, one machine"
    assert found["results"]["steps"] == (4, 6) and found["results"]["ledger.trained"] == (8, 12)
    other = b | {
        "recipe": {**b["recipe"], "loop": {**b["recipe"]["loop"], "seed": 7}},
        "data": {"digests": {"train": "ab"}},
    }
    found = compare_cards(b, other)
    assert found == {"recipe": {"loop.seed": (None, 7)}, "data": {"digests.train": (None, "ab")}}
    assert "| loop.seed |  | 7 |" in render_comparison("b", "c", found)


@pytest.mark.slow
def test_what_it_takes_to_do_it_again(tmp_path, capsys):
    run(tmp_path, loop__warmup__steps=1, loop__steps=1, loop__seed=5)
    card = json.loads((tmp_path / "card.json").read_text())
    told = [(e["supervised"], len(e["rewards"])) for e in read_history(tmp_path) if e["kind"] == "GroupFinished"]
    assert set(told) == {(True, 0), (False, 4)} and told[-1] == (False, 4)
    assert card["rewards"][0] is None and "at step 2 to" in (tmp_path / "card.md").read_text()
    with pytest.raises(SystemExit):
        main(["view", str(tmp_path), "--step", "1", "--limit", "1"])
    said = capsys.readouterr().out
    assert "the task's own answer, not scored" in said and not any(word in said for word in ("reward", "gap", "lag"))
    first, second = (rollout_table(tmp_path, step)["rows"][0] for step in (1, 2))
    for name in ("reward", "gap", "lag"):
        assert first[name] is None and second[name] is not None
    assert {t[3] for t in read_answer(tmp_path, 1, 0)["tokens"]} == {None}
    assert (
        "largest K3 of fresh tokens in a step" in (said := " ".join(card["questions"].values()))
        and "a warning above 1e-06" in said
    )
    assert "on-policy: all 4 trained groups" in said, "demonstrations are not counted"
    assert (
        card["eval_supervised"]["step"] == 1 and "| after the supervised phase |" in (tmp_path / "card.md").read_text()
    )
    told = closing_summary(str(tmp_path), card | {"eval_after": card["eval_after"] | {"request": {}}})
    lines = told.splitlines()
    assert lines[1] == "held-out tasks, greedy" and [line.split("  ")[1] for line in lines[2:5]] == [
        "before",
        "after the supervised phase",
        "after",
    ]
    assert "tensorboard" not in told and "  correct " in told
    unscored = card | {"eval_after": card["eval_after"] | {"request": {"failed": 9}}}
    [after] = [line for line in closing_summary(str(tmp_path), unscored).splitlines() if "could not be scored" in line]
    assert after.startswith("  after ") and after.endswith(", 9 could not be scored and count as 0")
    assert (
        f"After step {card['eval_after']['step']}, 9 of the answers could not be scored and count as 0."
        in render_markdown(unscored)
    )
    assert "could not be scored" not in told + render_markdown(card)
    assert card["score_is_share"] and all(
        0 <= e["reward_min"] <= e["reward_max"] <= 1 for e in events(tmp_path, "Evaluated")
    )
    assert card["seeds"] == {"loop": 5} and "grpo" in card["loss"] and "A = (R - mean of its group)" in card["loss"]
    assert card["cost"]["devices"] == 1 and card["cost"]["device_hours"] == pytest.approx(
        card["seconds"] / 3600, abs=1e-4
    )
    assert all(len(card["data"]["digests"][name]) == 32 for name in ("train", "held_out"))
    assert (
        card["questions"]["routing replay"] == "none: a dense model"
        and "one turn of at most 4 tokens" in card["questions"]["multi-turn budgets"]
    )
    assert card["loss"] in (tmp_path / "card.md").read_text()


def test_the_digest_of_tasks_knows_content_and_not_order():
    tasks = [Task(f"t/{i}", "single_turn", {"prompt": f"{i} + 4 =", "answer": str(i + 4)}) for i in range(5)]
    assert tasks_digest(tasks) == tasks_digest(tasks[::-1]) != tasks_digest(tasks[:4])
    assert tasks_digest(tasks) != tasks_digest(
        [*tasks[:4], Task("t/4", "single_turn", {"prompt": "4 + 4 =", "answer": "9"})]
    )


def test_two_devices_cost_twice_as_much(tmp_path):
    job = tiny(tmp_path, place__kind="split", place__ranks=2, place__engines=3)
    assert devices_of(job) == 5 and devices_of(tiny(tmp_path)) == 1


def test_a_life_costs_its_own_devices():
    """One hour on four devices, then, after a night, half an hour on one."""

    def started(at, devices):
        return {"n": 0, "t": at, "kind": "RunStarted", "folder": "", "config_hash": "", "facts": {"devices": devices}}

    def said(at):
        return {"n": 0, "t": at, "kind": "Warned", "message": "slow disk"}

    card = run_summary([started(0.0, 4), said(3600.0), started(50_000.0, 1), said(51_800.0)], {})
    assert card["cost"] == {"device_hours": 4.5, "devices": 4} and card["seconds"] == 5400.0


def test_equal_rewards_tell_nothing_of_chance(tmp_path):
    """Four tasks at -0.5 each, then at 0.2 on average: the first interval has no width."""
    card = card_of(write_run(tmp_path / "run"))
    card["eval_before"] |= {"score": -0.5, "low": -0.5, "high": -0.5}
    told = render_markdown(card)
    assert "it cannot tell the difference from chance" in told and "larger than chance" not in told


def test_the_lag_is_that_of_trained_groups():
    """Not of the update that was refused (step 2), nor of the step in which the run ended (3)."""

    def taken(step, lag):
        return {"t": 0.0, "kind": "GroupsTaken", "step": step, "version": step, "numbers": [step], "born": [step - lag]}

    def done(step, note=""):
        told = {"metrics": {}, "seconds": {}, "ledger": {"trained": 1}, "note": note}
        return {"t": 0.0, "kind": "StepDone", "step": step, "version": step, **told}

    raw = [taken(1, 1), done(1), taken(2, 2), done(2, "gradient: not finite"), taken(3, 3)]
    told = run_summary(raw, {})["questions"]["on-policy or measured lag"]
    assert told.startswith("off-policy: lag mean 1.00, max 1 versions (100% at 1)")


def test_the_command_compares_two(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=6)
    for words, code, said in (
        (["--diff", str(a), str(b)], 0, "## Results"),
        (["--diff", str(a), str(b), "--json"], 0, '"steps":[4,6]'),
        ([str(a), str(b)], 1, "go together"),
        (["--diff", str(a)], 1, "go together"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["card", *words])
        told = capsys.readouterr()
        assert int(ended.value.code or 0) == code and said in told.out + told.err


def test_the_card_names_the_interval_and_has_every_set():
    """Several draws: the interval is not Wilson's, pass@k stands in the card, and so do the other sets."""

    def told(event, **changes):
        return {"kind": "Evaluated", "t": 0.0} | asdict(replace(event, **changes))

    drawn = {"draws": 4, "interval": "bootstrap over tasks", "metrics": {"pass@4": [0.75, 0.5, 0.9]}}
    raw = [
        told(evaluated(0, 0, 0.2), **drawn),
        told(evaluated(0, 0, 0.3), profile="aime", **drawn),
        told(evaluated(6, 6, 0.5), **drawn),
        told(evaluated(6, 6, 0.4, scale=2.0), profile="aime", **drawn | {"reward_max": 2.0}),
    ]
    card = run_summary(raw, {})
    assert card["eval_after"]["score"] == 0.5 and card["eval_after"]["metrics"] == drawn["metrics"]
    assert [(e["profile"], e["score"]) for e in card["eval_sets"]] == [("greedy", 0.5), ("aime", 0.8)]
    page = render_markdown(card)
    assert "95 % interval (bootstrap over tasks)" in page and "Wilson" not in page
    assert "| aime | mean reward | 0.8 |" in page and "| greedy | pass@4 | 75.0% | 50.0% to 90.0% |" in page
    old = [{k: v for k, v in e.items() if k not in drawn} for e in raw[::2]]
    assert "95 % interval (Wilson)" in render_markdown(run_summary(old, {}))
    assert "Every set" not in render_markdown(run_summary(old, {}))


def test_the_card_says_how_many_tokens_context_parallel_ranks_shared():
    """Over all steps, those without any among them; nothing where rows lay whole."""

    def step(shared: float | None) -> dict:
        return {
            "metrics": {"train/packed_tokens": 1000.0, **({} if shared is None else {"train/shared_tokens": shared})}
        }

    found = count_shared_tokens([step(250.0), step(None), step(150.0)])
    assert found == [400.0, 3000.0] and "13.3% of 3000" in shared_text(*found)
    assert count_shared_tokens([step(None)]) == []


def test_intervals_that_are_compared_are_made_in_one_way():
    """Before training every reward was 0 or 1, afterwards one was 3."""
    rng = random.Random(0)
    binary, wide = ([float(rng.random() < 0.4) for _ in range(50)] for _ in range(2))
    wide[0] = 3.0
    told = []
    for rewards in (binary, wide):
        low, high, how = score_interval(rewards, rewards, 1)
        told.append({"score": sum(rewards) / 50, "low": low, "high": high, "n": 50, "interval": how})
    assert [e["interval"] for e in told] == ["Wilson", "normal"]
    for found, rewards in zip(compared_intervals(*told), (binary, wide)):
        assert found == pytest.approx(normal_interval(rewards))
    assert compared_intervals(told[0], told[0]) == [wilson_interval(sum(binary), 50)] * 2
    none = {"score": 0.0, "low": 0.0, "high": wilson_interval(0, 50)[1], "n": 50, "interval": "Wilson"}
    below = {"score": -0.2, "low": -0.25, "high": -0.15, "n": 50, "interval": "normal"}
    assert "has no width" in _interval_verdict(none, below)
