"""Which task comes when: mixtures by their weights, curricula by difficulty and by pass
rate, and nothing of it is lost in a resume.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.runs import events, final, run, run_and_die, tiny
from rondel.core.errors import ConfigError, DataError
from rondel.core.events import GroupFinished, StepDone, subscribe
from rondel.core.types import Task
from rondel.generate.envs.curriculum import EasyFirst, band, build_curriculum, priority
from rondel.generate.envs.order import MixedOrder, PureOrder, ShuffledOrder
from rondel.generate.envs.sources import load_tasks

TASKS = [Task(f"t{i}", "e", {"prompt": f"{i}", "level": (7 * i) % 10}) for i in range(10)]


class Counting(PureOrder):
    def __init__(self, name: str) -> None:
        self.name = name

    def task_at(self, n: int) -> Task:
        return Task(f"{self.name}{n}", "e", {})


@pytest.mark.slow
@given(st.lists(st.integers(1, 9) | st.floats(0.1, 9), min_size=2, max_size=4), st.integers(1, 2500))
def test_a_mixture_keeps_its_weights_at_every_moment_and_skips_nothing(weights, n):
    mixed = MixedOrder([(w, Counting("abcd"[i])) for i, w in enumerate(weights)])
    ids = [mixed.task_at(i).id for i in range(n)]
    for i, weight in enumerate(weights):
        own = [id for id in ids if id[0] == "abcd"[i]]
        assert own == [f"{'abcd'[i]}{k}" for k in range(len(own))]  # its own order, without a gap
        assert abs(len(own) - n * weight / sum(weights)) <= len(weights) + n * 2e-3 * (
            not float(sum(weights)).is_integer()
        )
    assert mixed.task_at(10**12).id[0] in "abcd"


def finished(number: int, task: str, rewards: list[float]) -> GroupFinished:
    return GroupFinished(number, task, 0, True, "", rewards, [1] * len(rewards))


def step(order, number: int, results: dict[str, list[float]], *, backwards: bool = False) -> None:
    ended = [finished(i, task, rewards) for i, (task, rewards) in enumerate(results.items())]
    for event in reversed(ended) if backwards else ended:
        order.on_event(event)
    order.on_event(StepDone(number, number, {}, {}, {}, ""))


@pytest.mark.slow
def test_priority_draws_in_proportion_to_what_fails():
    """Chi-square of 20,000 draws against (1 - s_i) / sum, s_i = i/10."""
    order = priority(TASKS, 3, floor=0.01)
    step(order, 1, {t.id: [1.0] * i + [0.0] * (10 - i) for i, t in enumerate(TASKS)})
    counts = Counter(order.task_at(n).id for n in range(20_000))
    weights = [1 - i / 10 for i in range(10)]
    expected = [20_000 * w / sum(weights) for w in weights]
    chi = sum((counts[t.id] - e) ** 2 / e for t, e in zip(TASKS, expected))
    assert chi < 27.9  # 99.9 % of chi-square with 9 degrees of freedom


def test_a_band_leaves_what_always_or_never_succeeds_to_the_floor():
    order = band(TASKS, 0, low=0.25, high=0.75, floor=0.1)
    assert len({order.task_at(n).id for n in range(200)}) == 10  # nobody knows them yet
    step(order, 1, {"t0": [0, 0], "t1": [1, 1], "t2": [0, 1], "t3": [-5.0, 9.0]})
    counts = Counter(order.task_at(n).id for n in range(8_200))
    assert all(abs(counts[t] - 100) < 60 for t in ("t0", "t1")) and all(
        abs(counts[f"t{i}"] - 1000) < 150 for i in range(2, 10)
    )


def test_rates_forget_by_halves_change_between_versions_only_and_do_not_depend_on_who_ends_first():
    results = {"t0": [1.0, 0.0], "t1": [1.0, 1.0]}
    one, other = priority(TASKS, 0), priority(TASKS, 0)
    before = [one.task_at(n).id for n in range(50)]
    one.on_event(finished(0, "t0", [1.0, 0.0]))
    assert [one.task_at(n).id for n in range(50)] == before and one.rates == {}
    one = priority(TASKS, 0)
    step(one, 1, results)
    step(other, 1, results, backwards=True)
    step(one, 2, {"t0": [0.0, 0.0]})
    step(other, 2, {"t0": [0.0, 0.0]})
    assert one.state_dict() == other.state_dict() == {"t0": 0.25, "t1": 1.0}
    again = priority(TASKS, 0)
    again.load(json.loads(json.dumps(one.state_dict())))
    assert [again.task_at(n).id for n in range(300)] == [one.task_at(n).id for n in range(300)]


def test_easy_first_widens_from_the_easiest():
    order = EasyFirst(TASKS, 0, by="level", start=0.2, admissions=1000)
    levels = [order.task_at(n).data["level"] for n in range(3000)]
    assert set(levels[:50]) == {0, 1, 2} - {2} | set(levels[:50]) and max(levels[:100]) <= 2 and max(levels[:500]) <= 6
    counts = Counter(levels[1000:])
    assert set(counts) == set(range(10)) and all(abs(c - 200) < 60 for c in counts.values())
    hardest = EasyFirst(TASKS, 0, by="-level", start=0.1, admissions=1000)
    assert hardest.task_at(0).data["level"] == 9
    with pytest.raises(DataError, match="task t0 has None; every task needs a number there"):
        EasyFirst(TASKS, 0, by="lvl", admissions=10)


def test_bad_settings_say_what_to_write():
    for spec, said in [
        ({"kind": "hardest"}, "does not exist"),
        ({"kind": "priority", "flor": 1}, "cannot be made from"),
        ({"kind": "band", "low": 0.9, "high": 0.1}, "0 <= low < high <= 1"),
        ({"kind": "band", "floor": 0}, "would never be seen again"),
        ({"kind": "easy_first", "by": "level"}, "admissions"),
    ]:
        with pytest.raises(ConfigError, match=said):
            build_curriculum(TASKS, 0, spec)
    assert isinstance(build_curriculum(TASKS, 0, {}), ShuffledOrder)


def source(name: str, prompts: list[str], **more) -> dict:
    return {"source": name, "kind": "list", "rows": [{"prompt": p, "answer": "1"} for p in prompts], **more}


def test_the_first_held_out_tasks_of_a_mixture_are_some_of_every_source():
    """task.eval.n = 4 measured the first source alone; each has its share of the first n, as of all."""
    sums = source("sums", [f"add {n}" for n in range(40)], holdout=12)
    counts = source("counts", [f"count to {n}" for n in range(10)], holdout=4)
    tasks = load_tasks({"kind": "mix", "sources": [sums, counts]}, env="x")
    held = [task.data["source"] for task in tasks.held_out]
    assert held.count("sums") == 12 and held.count("counts") == 4
    for n in (4, 8, 12):
        assert held[:n].count("counts") == n // 4


def test_a_mixture_of_data_sets_never_trains_on_what_any_of_them_holds_out():
    a = source("a", [f"{i} + {i + 1}" for i in range(20)], holdout=5, weight=3)
    b = source("b", [f"{i + 1} + {i}" for i in range(20)] + ["own"])
    tasks = load_tasks({"kind": "mix", "sources": [a, b]}, env="e")
    assert len(tasks.held_out) == 5 and {t.data["source"] for t in tasks.held_out} == {"a"}
    held = {frozenset(t.data["prompt"].split(" + ")) for t in tasks.held_out}
    assert all(frozenset(t.data["prompt"].split(" + ")) not in held for t in tasks.train)
    assert [(w, len(own)) for w, own in tasks.sources] == [(3, 15), (1, 16)] and tasks.leaked == 5
    twice = load_tasks({"kind": "mix", "sources": [source("a", ["x", "y"]), source("b", ["y", "z"])]}, env="e")
    assert [t.data["prompt"] for t in twice.train] == ["x", "y", "z"] and twice.duplicates == 1
    for bad, said in [
        ({"sources": [source("a", ["x"])]}, "two or more"),
        ({"sources": [source("a", ["x"]), source("a", ["y"])]}, "a name of its own"),
        ({"sources": [source("a", ["x"]), source("b", ["y"], weight=0)]}, "positive number"),
        ({"sources": [source("a", ["x"]), source("b", ["y"])], "holdout": 3}, "belongs to a source"),
        ({"sources": [source("a", ["x"]), source("b", ["x"])]}, "nothing is left of source 'b'"),
    ]:
        with pytest.raises((ConfigError, DataError), match=said):
            load_tasks({"kind": "mix", **bad}, env="e")


def test_rows_are_kept_by_their_fields():
    rows = [{"prompt": f"p{i}", "answer": "1", "rate": i / 10, "info": {"topic": "ab"[i % 2]}} for i in range(10)]
    data = {"kind": "list", "rows": rows}
    kept = load_tasks({**data, "where": {"rate": [0.2, 0.6], "info.topic": "a"}}, env="e").train
    assert [t.data["prompt"] for t in kept] == ["p2", "p4", "p6"]
    with pytest.raises(DataError, match=r"no 'rat'.*Did you mean 'rate'"):
        load_tasks({**data, "where": {"rat": 1}}, env="e")
    with pytest.raises(DataError, match="keeps none of 10 rows"):
        load_tasks({**data, "where": {"rate": [2, 3]}}, env="e")
    with pytest.raises(ConfigError, match="two ends"):
        load_tasks({**data, "where": {"rate": [2]}}, env="e")


def test_a_training_task_that_quotes_an_evaluation_task_is_left_out(tmp_path):
    """Thirteen words in a row; what stands in many training tasks is a form of words, not a leak."""
    form = "please read the following problem carefully and give only the final number as answer"
    story = "a train leaves the old station at seven and travels to the northern harbour in"
    own = [f"{form}: how many legs have {i} ants" for i in range(12)]

    def write(name: str, prompts: list[str]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
        return str(path)

    train = write("train.jsonl", [*own, f"Once more: {story.upper()} 5 hours. When?", "short"])
    held = write("held.jsonl", [f"{form}: {story} 3 hours, when does it arrive?"])
    found = load_tasks({"kind": "jsonl", "path": train, "eval_path": held}, env="e")
    assert [t.data["prompt"] for t in found.train] == [*own, "short"] and found.leaked == 1
    assert len(load_tasks({"kind": "jsonl", "path": train, "eval_path": held, "ngram": 0}, env="e").train) == 14


CURRICULUM = {"task__curriculum": {"kind": "priority"}, "run__checkpoint__every": 2, "engine__numerics": "aligned"}


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run that has this among others
def test_a_run_killed_in_its_curriculum_ends_where_the_whole_one_ends(tmp_path):
    """Law 9: the tasks of the steps after the kill are drawn by the rates of all steps before it."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, **CURRICULUM)
    assert run_and_die(cut, ("StepDone", 11), **CURRICULUM) == -9
    run(cut, **CURRICULUM)
    admitted = [{e["number"]: e["task"] for e in events(folder, "Admitted")} for folder in (whole, cut)]
    assert admitted[0] == admitted[1]
    assert len(set(admitted[0].values())) < len(admitted[0])  # some came back before an epoch was over
    one, other = final(whole), final(cut)
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.slow
def test_a_checkpoint_of_a_stale_run_has_what_its_curriculum_has_heard_since_the_last_step(tmp_path):
    """Groups 8 to 11 finish beside the evaluation of step 2: the checkpoint has them, and they finish no second time."""
    from rondel.assemble import train

    late, evaluating, ended = {8, 9, 10, 11}, asyncio.Event(), asyncio.Event()
    finished: set[int] = set()

    def note(event) -> None:
        if isinstance(event, GroupFinished) and event.number in late:
            finished.add(event.number)
            if finished == late:
                ended.set()

    def built(parts) -> None:
        plain = parts.engine.generate

        async def generate(request):
            kind, _, number = request.id.partition("-")
            if kind == "group" and int(number) in late:
                await evaluating.wait()
            elif kind != "group" and parts.trainer.step_number == 2:
                evaluating.set()
                await ended.wait()
            return await plain(request)

        parts.engine.generate = generate

    stale = {"loop__max_staleness": 1, "loop__warmup__steps": 0, "algo__correction": {"kind": "importance"}}
    stale |= {"loop__steps": 3, "task__eval__every": 2, "run__checkpoint__every": 2, "task__filters": []}
    stop = subscribe(note)
    train(tiny(tmp_path, **CURRICULUM | stale), quiet=True, built=built)
    stop()
    state = json.loads((tmp_path / "checkpoints" / "step-000002" / "state.json").read_text())
    kept = {group["task"]["id"] for group in state["buffer"]["finished"] if group["id"] in late}
    before = {e["task"] for e in events(tmp_path, "GroupFinished") if e["number"] < 8}
    assert kept - before and kept <= state["order"].keys()


@pytest.mark.slow
def test_how_hard_tasks_are_is_written_as_tasks_that_can_be_kept_by_it(tmp_path, capsys):
    """rondel eval --rates: each training task tried as in training; the file is data, and `where` reads its rates."""
    from rondel.cli import main

    run(tmp_path / "run", loop__warmup__steps=1, loop__steps=1)
    out = tmp_path / "rated.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path / "run"), "--rates", str(out), "--samples", "4"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 89 and all(0 <= row["pass_rate"] <= 1 and row["answer"] for row in rows)
    assert len({row["pass_rate"] for row in rows}) > 1 and f"{out}: 89 tasks, 4 tries each" in told
    kept = load_tasks({"kind": "jsonl", "path": str(out), "where": {"pass_rate": [0.1, 1.0]}}, env="e").train
    assert 0 < len(kept) == sum(row["pass_rate"] >= 0.1 for row in rows) < 89
