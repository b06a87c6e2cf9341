"""Rewards against closed forms; the pool's clock, its workers, and the check before a run."""

import asyncio
import io
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.virtual_time import VirtualClockLoop
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score import build_reward
from rondel.score.clock import CallClocks
from rondel.score.jobs import ScoreJob
from rondel.score.number import last_number
from rondel.score.pool import RewardPool
from rondel.score.preflight import check_reward
from rondel.score.result import check_group, check_score, read_score
from rondel.score.worker import serve_calls

EXAMPLES = Path(__file__).parents[2] / "examples"


def task(answer, **data):
    return Task("t/1", "single_turn", {"prompt": "?", "answer": answer, **data})


def said(text):
    return Trajectory(text=text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("3 + 4 = 7.", 7),
        ("so x = -3", -3),
        ("5-3", 3),
        ("f(2)-3", 3),
        ("\u22124", -4),
        ("1,234,567 apples", 1234567),
        ("1,234.5", 1234.5),
        ("12,34", 34),
        ("1234,567", 567),
        (".5", 0.5),
        ("-$5", -5),
        ("3/4.", 0.75),
        ("-3/4", -0.75),
        ("1.5e3", 1500),
        ("the answer is 7.\n", 7),
        ("7/0", None),
        ("none", None),
        ("", None),
        ("9e99999", 99999),
        ("9" * 20000, None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == value


def test_number_is_exact_and_takes_a_tolerance():
    assert build_reward("number")(said("0.1"), task(0.1)) == 1.0
    assert build_reward("number")(said("1/3"), task("0.3333333333333333")) == 0.0
    assert build_reward({"kind": "number", "tolerance": 0.001})(said("1/3"), task("0.3333333333333333")) == 1.0
    assert build_reward("number")(said("I do not know"), task(3)) == 0.0
    assert build_reward("number")(said("72"), task("48 + 24 = 72 #### 72")) == 1.0
    with pytest.raises(ValueError, match="no number"):
        build_reward("number")(said("7"), task("seven"))


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("a^2-4", "It is $(a+2)(a-2)$.", 1.0),
        ("a^2-4", "It is $(a+2)(a+2)$.", 0.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\boxed{7}", "so $7$", 1.0),
        ("7", "", 0.0),
        ("7", r"$\frac{1}{", 0.0),
    ],
)
def test_math(gold, text, value):
    assert build_reward("math")(said(text), task(gold)) == value


def test_math_gold_that_cannot_be_read_is_a_fault_and_no_zero():
    with pytest.raises(ValueError, match="cannot read the gold answer"):
        build_reward("math")(said("7"), task(""))


def test_format():
    one = build_reward({"kind": "format", "tag": "answer"})
    assert [
        one(said(t), task(1))
        for t in ("<answer>1</answer>", "</answer>1<answer>", "<answer>1</answer><answer>2</answer>", "1")
    ] == [
        1,
        0,
        0,
        0,
    ]
    assert build_reward({"kind": "format", "pattern": r"#### \d+$"})(said("so\n#### 12"), task(1)) == 1.0
    with pytest.raises(ConfigError, match="one of tag"):
        build_reward("format")


@pytest.mark.slow
def test_reasoning_gym_uses_the_scorer_of_the_data_set():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("countdown", size=1, seed=1)[0]
    other = task(entry["answer"], entry=entry)
    assert build_reward("reasoning_gym")(said(entry["answer"]), other) == 1.0
    assert build_reward("reasoning_gym")(said("1 + 1"), other) < 1.0
    sums = gym.create_dataset("chain_sum", size=1, seed=1)[0]
    answer = sums["answer"]
    assert (
        build_reward({"kind": "reasoning_gym", "extract": "last_number"})(
            said(f"It is {answer}."), task(answer, entry=sums)
        )
        == 1.0
    )
    assert (
        build_reward({"kind": "reasoning_gym", "extract": "tag"})(
            said(f"<answer> {answer} </answer>"), task(answer, entry=sums)
        )
        == 1.0
    )


def test_combine_reports_weighted_parts_that_add_up():
    spec = {
        "kind": "combine",
        "parts": {"correct": "number", "format": {"kind": "format", "tag": "answer", "weight": 0.2}},
    }
    with RewardPool(spec) as pool:
        score = asyncio.run(pool.score(said("<answer>7</answer>"), task(7)))
    assert score == Score(1.2, {"correct": 1.0, "format": 0.2})


def test_reading_what_a_reward_returned():
    assert read_score(1) == Score(1.0) and read_score(True) == Score(1.0)
    assert read_score({"a": 1.0, "b": -0.5}) == Score(0.5, {"a": 1.0, "b": -0.5})
    assert read_score({"a": 1.0, "total": 0.25}) == Score(0.25, {"a": 1.0})
    assert [read_score(x).reason for x in (None, float("nan"), float("inf"), "1.0", [1.0], {}, {"a": None})] == [
        "returned None", "returned nan", "returned inf", "returned str", "returned list", "returned no parts", "returned None",
    ]  # fmt: skip


def test_numbers_of_numpy_and_torch_are_the_numbers_that_they_hold():
    for two in (np.float32(2), np.int8(2), np.array(2), torch.tensor(2.0), torch.tensor(2, dtype=torch.bfloat16)):
        assert read_score(two) == Score(2.0) and read_score({"a": two}) == Score(2.0, {"a": 2.0})
        assert read_score([(3, two)]) == Score(2.0, {}, ((3, 2.0),))
    for right in (np.bool_(True), np.array(True), torch.tensor(True)):
        assert read_score(right) == Score(1.0) and read_score({"a": right}) == Score(1.0, {"a": 1.0})
    unread = (np.array([1.0]), np.float32("nan"), np.str_("1"), torch.ones(1))
    assert [read_score(one).reason for one in unread] == [
        "returned ndarray", "returned nan", "returned str", "returned Tensor",
    ]  # fmt: skip
    answers = [said("a"), said("b")]
    for both in (np.array([0.5, 1.0]), torch.tensor([0.5, 1.0])):
        assert check_group(both, answers) == [Score(0.5), Score(1.0)]
    assert {one.reason for one in check_group(np.ones((2, 1)), answers)} == {"graded another group"}


def test_a_reward_that_needs_no_gold_passes_the_check():
    with RewardPool({"kind": "format", "pattern": ".*"}) as pool:
        [finding] = asyncio.run(check_reward(pool, [Task("t/1", "x", {"prompt": "write a poem"})]))
    assert finding.ok and "not tried; the reward answered all 1 calls" in finding.message


def test_reading_what_was_earned_on_the_way():
    assert read_score([(3, 0.5), [7, 1]]) == Score(1.5, {}, ((3, 0.5), (7, 1.0)))
    assert read_score({"right": 1.0, "turns": [(3, 0.5), (7, -1.0)]}) == Score(
        0.5, {"right": 1.0, "turns": -0.5}, ((3, 0.5), (7, -1.0))
    )
    assert read_score({"turns": [(3, 0.5)], "total": 2.0}) == Score(2.0, {"turns": 0.5}, ((3, 0.5),))
    assert read_score(Score(2.0, {"a": 1.0}, ((3, 0.5),))) == Score(2.0, {"a": 1.0}, ((3, 0.5),))
    bad = [
        [],
        [3, 0.5],
        [(3.0, 0.5)],
        [(True, 0.5)],
        [(3, float("nan"))],
        {"turns": [(3, None)]},
        Score(1.0, steps=((3, float("inf")),)),
    ]
    assert [(failed.reason, failed.detail) for failed in map(read_score, bad)] == [
        ("returned list", "steps are a list of (position, value), at least one"),
        ("returned list", "steps are a list of (position, value), at least one"),
        ("misplaced a reward", "position 3.0 is not a whole number"),
        ("misplaced a reward", "position True is not a whole number"),
        ("returned nan", "at position 3"),
        ("returned None", "in part 'turns': at position 3"),
        ("returned inf", "in a Score"),
    ]


def two_turns() -> Trajectory:
    """Positions 0 and 1 were given, 2 to 4 written, 5 and 6 observed, 7 written, 8 observed."""
    t = Trajectory(text="7")
    t.extend([1, 2])
    t.extend([3, 4, 5], logprobs=[-1.0] * 3, versions=[0] * 3)
    t.extend([6, 7])
    t.extend([8], logprobs=[-1.0], versions=[0])
    t.extend([9])
    return t


@pytest.mark.parametrize(
    ("score", "earned"),
    [
        (Score(2.0), [0.0, 0.0, 0.0, 2.0]),
        (Score(1.0, steps=((6, 1.0),)), [0.0, 0.0, 1.0, 0.0]),
        (Score(3.5, steps=((2, 0.5), (5, 1.0), (6, -1.0), (8, 1.0))), [0.5, 0.0, 0.0, 3.0]),
    ],
)
def test_a_step_counts_for_the_token_that_was_written_before_it(score, earned):
    assert score.token_rewards(two_turns().mask) == earned and sum(earned) == score.value


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.floats(-9, 9),
    st.lists(st.tuples(st.integers(0, 19), st.floats(-9, 9)), max_size=6),
)
def test_no_reward_is_lost_and_no_position_forgiven(mask, value, steps):
    score, first = Score(value, steps=tuple(steps)), mask.index(True) if True in mask else len(mask)
    if all(first <= position < len(mask) for position, _ in steps):
        earned = score.token_rewards(mask)
        assert len(earned) == sum(mask) and (not earned or sum(earned) == pytest.approx(value, abs=1e-9))
        # reached by the steps up to the next written token
        for i, at in enumerate(i for i, written in enumerate(mask) if written):
            until = next((j for j in range(at + 1, len(mask)) if mask[j]), len(mask))
            rest = value - sum(v for _, v in steps) if i == len(earned) - 1 else 0.0
            assert earned[i] == pytest.approx(sum(v for p, v in steps if at <= p < until) + rest, abs=1e-9)
    else:
        with pytest.raises(ValueError, match="at position"):
            score.token_rewards(mask)


def test_a_step_out_of_place_is_a_failure_of_the_reward():
    turns = two_turns()
    for position, why in (
        (9, "at position 9 of 9 tokens"),
        (-1, "at position -1 of 9 tokens"),
        (1, "wrote nothing before 2"),
    ):
        failed = check_score(read_score([(position, 1.0)]), turns)
        assert failed.reason == "misplaced a reward" and why in failed.detail
    assert check_score(read_score([(8, 1.0)]), turns) == Score(1.0, {}, ((8, 1.0),)) and check_score(
        Failed("timeout"), turns
    ) == Failed("timeout")
    assert isinstance(
        check_score(read_score([(8, 1.0)]), Trajectory(text="7")), Score
    )  # `rondel check` asks about texts
    # of an environment that scores by itself
    assert check_score(Score(float("nan")), turns) == Failed("returned nan", "in a Score")


def test_steps_come_through_the_worker_and_through_a_combination():
    spec = {"kind": "combine", "parts": {"right": "number", "turns": {"kind": "kits.rewards:turns", "weight": 0.5}}}
    with RewardPool(spec) as pool:
        assert asyncio.run(pool.score(two_turns(), task(7))) == Score(
            2.0, {"right": 1.0, "turns": 1.0}, ((4, 0.5), (7, 0.5))
        )
        failed = asyncio.run(pool.score(said("7"), task(7)))
    assert isinstance(failed, Failed) and "part 'turns' returned list" in failed.detail


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("numbr", "Did you mean 'number'"),
        ("no_such_module:grade", "no module 'no_such_module'"),
        ("my_reward:grad", "Did you mean 'grade'"),
        ({"kind": "number", "tolerence": 1}, "tolerence"),
        ({"tolerance": 1}, "no 'kind'"),
    ],
)
def test_a_reward_that_cannot_be_built_is_an_error_at_once(spec, message, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(ConfigError, match=message):
        RewardPool(spec)


@pytest.mark.slow
def test_the_example_reward(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with RewardPool({"kind": "my_reward:grade", "brevity": 0.1}, workers=2) as pool:
        findings = asyncio.run(check_reward(pool, [task("7"), Task("t/2", "x", {"answer": "12"})]))
        assert all(f.ok for f in findings), findings
        assert asyncio.run(pool.score(said("It is 7."), task("7"))) == Score(1.1, {"correct": 1.0, "brevity": 0.1})
    assert len((EXAMPLES / "my_reward.py").read_text().splitlines()) <= 30


def reward_file(folder, body):
    (folder / "theirs.py").write_text(body)


@pytest.mark.slow
def test_built_once_a_worker_async_and_without_torch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward_file(
        tmp_path,
        "import asyncio, os, sys\n"
        "class Theirs:\n"
        "    built = 0\n"
        "    def __init__(self, bonus): Theirs.built += 1; self.bonus = bonus; print('noise on stdout')\n"
        "    async def __call__(self, trajectory, task):\n"
        "        await asyncio.sleep(0); print('more noise')\n"
        "        return {'built': Theirs.built, 'torch': 'torch' in sys.modules or 'transformers' in sys.modules, 'pid': os.getpid()}\n",
    )
    with RewardPool({"kind": "theirs:Theirs", "bonus": 1}) as pool:
        scores = [asyncio.run(pool.score(said("x"), task(1))) for _ in range(3)]
    assert [s.parts["built"] for s in scores] == [1, 1, 1]
    assert [s.parts["torch"] for s in scores] == [0, 0, 0]
    assert len({s.parts["pid"] for s in scores}) == 1 and scores[0].parts["pid"] != os.getpid()


@pytest.mark.slow
def test_the_clock_starts_in_the_worker_and_not_in_the_queue(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward_file(tmp_path, "import time\ndef slow(trajectory, task): time.sleep(0.2); return 1.0\n")

    async def burst(pool):
        return await asyncio.gather(*(pool.score(said("x"), task(1)) for _ in range(6)))

    with RewardPool("theirs:slow", timeout=0.7) as pool:  # the last one waits 1.0 s for its worker
        assert asyncio.run(burst(pool)) == [Score(1.0)] * 6


@pytest.mark.slow
def test_workers_run_beside_each_other_and_beside_the_loop(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward_file(tmp_path, "import time\ndef slow(trajectory, task): time.sleep(0.4); return 1.0\n")

    async def both(pool):
        await asyncio.gather(*(pool.score(said("x"), task(1)) for _ in range(4)))  # hire everyone
        start, ticks = time.perf_counter(), 0
        scores = asyncio.gather(*(pool.score(said("x"), task(1)) for _ in range(4)))
        while not scores.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return time.perf_counter() - start, ticks

    with RewardPool("theirs:slow", workers=4) as pool:
        seconds, ticks = asyncio.run(both(pool))
    assert seconds < 1.2 and ticks >= 10  # one after the other they take 1.6 s


@pytest.mark.slow
def test_an_unguarded_script_does_not_start_itself_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\nprint('started')\nfrom rondel.score.pool import RewardPool\nfrom rondel.core.types import "
        "Task, Trajectory\n"
        "pool = RewardPool('number')\nprint(asyncio.run(pool.score(Trajectory(text='7'), Task('t', 'x', "
        "{'answer': '7'}))))\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout.splitlines() == ["started", "Score(value=1.0, parts={}, steps=())"], run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "bad"),
    [
        ("return 0.0", {"empty", "wrong"}),
        ("return float(trajectory.text == '')", {"gold", "empty", "wrong"}),
        ("return float(task.data['answer'] == '7' and trajectory.text == '7')", {"gold", "empty", "wrong"}),
        ("return float(bool(trajectory.text))", {"wrong"}),
        ("return float(trajectory.text == task.data['answer'])", set()),
        ("raise RuntimeError('no')", {"failures", "gold"}),
    ],
)
def test_preflight_tells_a_bad_reward(tmp_path, monkeypatch, body, bad):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward_file(tmp_path, f"def grade(trajectory, task):\n    {body}\n")
    with RewardPool("theirs:grade") as pool:
        findings = asyncio.run(check_reward(pool, [task("7"), Task("t/2", "x", {"answer": "12"})]))
    assert {f.what for f in findings if not f.ok} == bad, findings
    assert all(f.remedy for f in findings if not f.ok)


def test_preflight_warns_of_gold_below_the_maximum_that_a_reward_names():
    form = {"correct": "number", "form": {"kind": "format", "tag": "answer", "weight": 0.2}}
    both = {"kind": "by", "field": "of", "parts": {"a": {"kind": "combine", "parts": form}, "b": "number"}}
    for spec, maximum in (
        ("number", 1.0),
        ({"kind": "citation", "answer": 0.75}, 1.25),
        ({"kind": "combine", "parts": form}, 1.2),
        ({"kind": "combine", "parts": {**form, "length": {"kind": "format", "tag": "a", "weight": -1.0}}}, None),
        (both, None),
    ):
        assert getattr(build_reward(spec), "maximum", None) == maximum
    with RewardPool({"kind": "combine", "parts": form}) as pool:
        found = {f.what: f for f in asyncio.run(check_reward(pool, [task("7"), Task("t/2", "x", {"answer": "12"})]))}
    gold = found["gold"]
    assert (
        gold.ok
        and gold.warning
        and gold.message.startswith("2 of 2 gold answers score less than the reward's maximum, 1.2")
    )


def test_preflight_without_answers_says_so():
    with RewardPool("number") as pool:
        (finding,) = asyncio.run(check_reward(pool, [Task("t/1", "x", {"prompt": "?"})]))
    assert not finding.ok and "not tried" in finding.message


def test_a_task_that_cannot_be_sent_is_a_failure():
    with RewardPool("number") as pool:
        result = asyncio.run(pool.score(said("7"), task("7", oops=lambda: 0)))
        assert isinstance(result, Failed) and result.reason == "task cannot be sent"
        assert asyncio.run(pool.score(said("7"), task("7"))) == Score(1.0)


def told_apart(tmp_path, monkeypatch, texts, **settings):
    """Results of many calls at once, after enough of them that several share a message."""
    monkeypatch.syspath_prepend(str(tmp_path))
    reward_file(
        tmp_path,
        "import os, time\n"
        "def grade(trajectory, task):\n"
        "    match trajectory.text:\n"
        "        case 'hang': time.sleep(60)\n"
        "        case 'die': os._exit(3)\n"
        "        case 'raise': raise SystemExit('no')\n"
        "        case 'long': return [(i, 1.0) for i in range(20_000)]\n"
        "        case text: return float(text[:9])\n",
    )

    async def burst(pool):
        await asyncio.gather(*(pool.score(said("1"), task(1)) for _ in range(100)))
        return await asyncio.gather(*(pool.score(said(text), task(1)) for text in texts))

    with RewardPool("theirs:grade", alarm=1.0, **settings) as pool:
        return asyncio.run(burst(pool))


@pytest.mark.slow
def test_who_shares_a_message_with_a_late_call_is_asked_again(tmp_path, monkeypatch):
    texts = [str(i) for i in range(300)]
    texts[5], texts[40], texts[41], texts[200], texts[299] = "hang", "die", "raise", "hang", "die"
    results = told_apart(tmp_path, monkeypatch, texts, workers=2, timeout=0.5)
    wrong = {i: r.reason for i, r in enumerate(results) if isinstance(r, Failed)}
    assert wrong == {5: "timeout", 40: "worker died", 41: "raised SystemExit", 200: "timeout", 299: "worker died"}
    assert [r.value for i, r in enumerate(results) if i not in wrong] == [
        float(i) for i in range(300) if i not in wrong
    ]


@pytest.mark.slow
def test_neither_long_jobs_nor_long_replies_stop_a_message(tmp_path, monkeypatch):
    """Both pipes are full at once: 48 jobs of 64 kB on the way there, replies of 300 kB on the way back."""
    texts = ["long" if i % 8 == 0 else f"{i:09d}" + " " * 65536 for i in range(48)]
    results = told_apart(tmp_path, monkeypatch, texts, timeout=10.0)
    assert [r.value for r in results] == [20_000.0 if i % 8 == 0 else float(i) for i in range(48)]


@pytest.mark.slow
def test_a_pool_that_is_closed_leaves_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward_file(tmp_path, "import time\ndef slow(trajectory, task): time.sleep(60)\n")

    async def closed_early(pool):
        asked = [asyncio.ensure_future(pool.score(said("x"), task(1))) for _ in range(5)]
        await asyncio.sleep(0.1)
        pool.close()
        return await asyncio.wait_for(asyncio.gather(*asked), 10)

    results = asyncio.run(closed_early(RewardPool("theirs:slow", workers=2, timeout=30)))
    assert {r.reason for r in results} <= {"worker died", "pool closed"}


def test_a_field_of_the_task_names_its_reward():
    reward = build_reward({"kind": "by", "parts": {"sums": "number", "form": {"kind": "format", "pattern": "^ok"}}})

    def asked(text, **data):
        t = Trajectory(text=text)
        return asyncio.run(reward(t, Task("t", "e", {"answer": "7", **data})))

    assert asked("it is 7", source="sums").value == 1.0 and asked("it is 7", source="form").value == 0.0
    assert asked("ok 8", source="sums").value == 0.0 and asked("ok 8", source="form").value == 1.0
    with pytest.raises(DataError, match="has source = None, and reward 'by' has parts for: sums, form"):
        asked("x")
    with pytest.raises(ConfigError, match="has no parts"):
        build_reward({"kind": "by", "parts": {}})


def score_at_once(spec, jobs: list[tuple[str, Task]], timeout: float) -> list[dict]:
    """What a reward process answers to calls that come together, on a clock that the machine's load does not move."""
    said, done = {}, asyncio.Event()

    def answer(message):
        if "number" in message:
            said[message["number"]] = message
            if len(said) == len(jobs):
                done.set()

    async def serve():
        told = [pickle.dumps(ScoreJob(n, Trajectory(text=text), task)) for n, (text, task) in enumerate(jobs)]
        serving = asyncio.create_task(serve_calls(build_reward(spec), io.BytesIO(b"".join(told)), answer, timeout))
        await asyncio.wait_for(done.wait(), 1000.0)
        serving.cancel()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(serve())
    return [said[n] for n in range(len(jobs))]


@pytest.mark.parametrize("counted", [True, False], ids=["", "planted fault"])
@pytest.mark.parametrize("kind", ["combine", "by"])
def test_a_synchronous_part_is_on_no_other_calls_clock(kind, counted, monkeypatch):
    """Eight calls share an event loop, on which the synchronous part of each stands for 0.06 s. The planted fault: it is
    on all clocks.
    """
    if not counted:
        monkeypatch.setattr(CallClocks, "extend_deadlines", lambda *_: None)
    parts = {"waiting": "kits.rewards:Waiting", "blocking": "kits.rewards:blocking"}
    if kind == "by":
        parts = {name: "kits.rewards:blocking" if name == "b" else "kits.rewards:Waiting" for name in "wb"}
    spec = {"kind": kind, "parts": parts} | ({"field": "of"} if kind == "by" else {})
    waits = range(8) if kind == "combine" else [9.5] * 8  # times 0.02 s
    jobs = [(str(wait), Task("t", "x", {"prompt": "?", "of": "wb"[n >= 4]})) for n, wait in enumerate(waits)]
    late = ["reason" in told for told in score_at_once(spec, jobs, timeout=0.2)]
    assert any(late) != counted


def test_beside_a_synchronous_part_a_hang_is_still_late():
    spec = {"kind": "combine", "parts": {"late": "kits.rewards:Late", "blocking": "kits.rewards:blocking"}}
    jobs = [(text, Task("t", "x", {})) for text in ("late", "a", "b", "c")]
    late, *others = score_at_once(spec, jobs, timeout=0.2)
    assert (late["reason"], late["detail"]) == ("timeout", "no answer within 0.2 s")
    assert [told["value"] for told in others] == [2.0] * 3
