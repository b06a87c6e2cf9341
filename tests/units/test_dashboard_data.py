"""What the dashboard tells is what the run told: the same rows as `diagnose` folds, the same
findings, whatever became of the journal meanwhile.
"""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from kits.diagnose import FAULTS, write
from kits.run_folder import group, write_run
from kits.sweeps import covering
from rondel.core.errors import UserError
from rondel.core.events import GroupsTaken, Resident, RunStarted, StepDone, WorkerTime
from rondel.dashboard import plan_api, rollouts
from rondel.dashboard.columns import MetricColumns, MetricRow, StepGrid
from rondel.dashboard.pages import DashboardPages, build_app
from rondel.dashboard.run import DashboardRun
from rondel.dashboard.sample import read_sampled_columns
from rondel.dashboard.tail import FileTail, kind_of
from rondel.dashboard.views import findings_view, run_states
from rondel.planner.plan import make_plan
from rondel.planner.workload import what_if
from rondel.runtime.journal.log import Journal
from rondel.runtime.journal.store import annotate_step
from rondel.runtime.telemetry.card import card_of, write_card
from rondel.runtime.telemetry.diagnose import diagnose, findings, read_story

ROOT = Path(__file__).parents[2]
HOSTILE = '<img src=x onerror="window.pwned=1"></script><b>&amp;\u202e'


def read(folder) -> DashboardRun:
    run = DashboardRun(folder, findings)
    while run.poll_journal():
        pass
    return run


def client(*folders, key="") -> TestClient:
    return TestClient(
        build_app(DashboardPages([read(f) for f in folders], make_plan, key)), base_url="http://127.0.0.1"
    )


# -- rows and findings -------------------------------------------------------------------------------


def test_a_card_older_than_the_journal_is_made_anew(tmp_path):
    folder = write_run(tmp_path / "run", steps=2)
    write_card(folder)
    asked = client(folder)
    assert asked.get("/api/card").json()["written"] is True
    with (folder / "journal.jsonl").open("a") as file:  # it goes on, or was looked at while it did
        file.write('{"n": 999, "t": 1e10, "kind": "Warned", "message": "slow disk"}\n')
    os.utime(folder / "card.json", ns=(0, 0))
    told = asked.get("/api/card").json()
    assert told["written"] is False and "slow disk" in told["card"]["warnings"]


def test_the_histogram_of_lag_has_no_supervised_step(tmp_path):
    """One of two groups has lag 1; the supervised step's does not count, as in the card."""
    events = [
        RunStarted("", "", {}),
        GroupsTaken(1, 0, [group(0, 0, [])]),
        StepDone(1, 1, {}, {}, {}),
        GroupsTaken(2, 1, [group(1, 1, []), group(2, 0, [])]),
        StepDone(2, 2, {}, {}, {}),
    ]
    journal = Journal(tmp_path)
    for event in events:
        journal.write(event)
    journal.close()
    (tmp_path / "job.toml").write_text("[loop]\nsteps = 1\nmax_staleness = 1\nwarmup = { steps = 1 }\n")
    assert client(tmp_path).get("/api/books").json()["lags"] == {"0": 0.5, "1": 0.5}
    assert "(50% at 0, 50% at 1)" in card_of(tmp_path)["questions"]["on-policy or measured lag"]


def test_rows_are_those_of_the_story(tmp_path):
    write(tmp_path)
    run, story = read(tmp_path), read_story(tmp_path)
    rows = [dict(MetricRow(run.columns, i)) for i in range(len(run.columns))]
    assert rows == [s.row for s in story.steps] and list(run.columns.steps) == [s.number for s in story.steps]
    assert run.columns.series("train/entropy") == story.series("train/entropy") and run.state == "complete"


@pytest.mark.parametrize("fault", FAULTS)
def test_findings_are_those_of_diagnose(tmp_path, fault):
    write(tmp_path, **FAULTS[fault][0])
    assert [(f["name"], f["evidence"]) for f in read(tmp_path).ranked_findings()] == [
        (f.name, f.evidence) for f in diagnose(tmp_path)
    ]


@pytest.mark.parametrize("scale, unit", [(1.0, "share"), (3.0, "reward")])
def test_a_score_is_a_share_only_where_rewards_are(tmp_path, scale, unit):
    told = client(write_run(tmp_path, scale=scale)).get("/api/state").json()
    assert told["runs"][0]["head"]["eval"]["unit"] == unit
    assert {m["name"]: m["unit"] for m in told["metrics"]}["eval/score"] == unit


def test_no_verdict_on_half_a_journal(tmp_path, monkeypatch):
    """A run that is complete does not look dead while its journal is being read; the
    badge counts what the findings view lists.
    """
    monkeypatch.setattr(FileTail.read_lines, "__defaults__", (4096,))
    write(tmp_path, **FAULTS["held out falls, trained rises"][0])
    run, states = DashboardRun(tmp_path, findings), []
    while run.poll_journal():
        told = run_states([run])[0]
        states.append(told["state"])
        page = findings_view(run)
        assert sum(told["alarms"][s] for s in ("error", "warning", "note")) == len(page["findings"]) and page[
            "reading"
        ] == (states[-1] == "reading")
        assert states[-1] != "reading" or not page["findings"]
    assert (
        len(states) > 5
        and set(states[:-1]) == {"reading"}
        and states[-1] == "complete"
        and len(findings_view(run)["findings"]) == 1
    )


def test_memory_of_phases_and_of_workers_is_told_apart(tmp_path):
    write(tmp_path, workers=lambda s: [
        Resident({"train": 40}, {"train": {"weights": 10, "kv_cache": 20}}), WorkerTime("engine-0", {"idle": 1.0}, memory={"rss": 99, "kv": 7})
    ])  # fmt: skip
    told = client(tmp_path).get("/api/books?run=0").json()
    assert told["memory"] == {"train": {"peak": 40, "weights": 10, "kv_cache": 20}} and told["workers"] == {
        "engine-0": {"rss": 99, "kv": 7}
    }


@pytest.mark.parametrize("bound", [1e-6, 1e-2])
def test_the_bound_of_the_gap_is_that_of_the_run(tmp_path, bound):
    write(tmp_path, facts={"mismatch_bound": bound})
    assert client(tmp_path).get("/api/state").json()["runs"][0]["head"]["gap"]["k3"]["bound"] == bound


def test_a_resumed_run_is_told_once(tmp_path):
    run, story = read(write_run(tmp_path, steps=5, crash_after=3)), read_story(tmp_path)
    assert list(run.columns.steps) == [s.number for s in story.steps] == [1, 2, 3, 4, 5]
    assert run.story.resumes == story.resumes == [2] and run.story.lives == 2
    for name in ("train/entropy", "score/reward_mean", "time/step", "loop/lag_mean"):
        assert run.columns.series(name) == story.series(name)


def test_accounts_are_100_percent_of_what_was_told(tmp_path):
    run = read(write_run(tmp_path))
    assert (
        run.time_accounts(1) == {"controller": {"wait": 8.0, "train": 6.0, "sync": 2.0}}
        and run.columns.sum_between("time/step", 1) == 16.0
    )


# -- the file ------------------------------------------------------------------------------------------


def test_a_journal_that_grows_tears_shrinks_and_is_replaced(tmp_path):
    whole = (write_run(tmp_path / "a") / "journal.jsonl").read_bytes()
    folder, path = tmp_path / "b", tmp_path / "b" / "journal.jsonl"
    folder.mkdir()
    run = DashboardRun(folder, findings)
    assert not run.poll_journal() and run.state == "nothing yet"
    (folder / "job.toml").write_text("[loop]\nsteps = 4\n")  # the page was open before the run was begun
    steps = set()
    for size in (10, 700, 1500, 4000, len(whole)):
        path.write_bytes(b"") if not path.exists() else None
        with path.open("r+b") as file:
            file.write(whole[:size])
        while run.poll_journal():
            steps.add(len(run.columns))
    assert len(run.columns) == 4 and run.damaged == 0 and len(steps) > 1 and run.planned_steps == 4
    path.write_bytes(whole[:1500])  # a crash tore what was written, the writer cut it off
    assert run.poll_journal() and run.step < 4
    (folder / "new").write_bytes(whole)
    (folder / "new").replace(path)  # another file under the same name
    while run.poll_journal():
        pass
    assert run.step == 4
    with path.open("ab") as file:
        file.write(b'{"n":1,"t":2.0,"kind":"StepDone"}\nnonsense\n{"n":3,"t":')
    assert run.poll_journal() and run.damaged == 2 and run.step == 4


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path, given, written = tmp_path / "j", [], b""
    tail, lines = FileTail(path), [b"x" * n for n in (1, 5, 300, 2, 40)] * 3
    for at, line in enumerate(lines):
        written += line + b"\n"
        path.touch()
        with path.open("r+b") as file:  # the same file grows, at times in the middle of a line
            file.write(written[: -(at % 2) or None])
        tail.was_replaced()
        while got := tail.read_lines(stretch=16):
            given += got
    assert given == lines


def test_kinds_are_read_without_reading_the_event():
    assert kind_of(b'{"n":17,"t":1795264617.1,"kind":"StepDone","step":3') == "StepDone"
    assert kind_of(b'{"n":17,"t":1,"text":"' + b"y" * 99 + b'"kind":"StepDone"}') == kind_of(b"") == ""


def test_a_sample_has_exact_rows(tmp_path):
    write(tmp_path, steps=24)
    whole = {s.number: s.row for s in read_story(tmp_path).steps}
    found = read_sampled_columns(tmp_path / "journal.jsonl", places=9)
    assert 5 <= len(found) < 24 and found.steps[-1] == 24
    for i, step in enumerate(found.steps):
        assert dict(MetricRow(found, i)) == pytest.approx(whole[step])


# -- curves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 7, 40, 500])
def test_a_curve_on_a_grid_is_mean_and_extremes_of_each_cell(points):
    rng, columns = np.random.default_rng(0), MetricColumns()
    told = {step: rng.normal() for step in range(3, 120) if step % 5}
    for step in range(3, 120):
        columns.add_row(step, {"b": 1.0} | ({"a": told[step]} if step in told else {}))
    grid = StepGrid(1, 130, points)
    drawn = columns.curve_on_grid("a", grid)
    assert len(grid.cell_centers()) == grid.cells <= points and columns.curve_on_grid("none", grid) is None
    for cell, x in enumerate(grid.cell_centers()):
        first = 1 + cell * grid.width
        assert first <= x <= first + grid.width - 1
        inside = [v for step, v in told.items() if first <= step < first + grid.width]
        expected = (
            {"mean": np.mean(inside), "low": min(inside), "high": max(inside)} if inside else dict.fromkeys(drawn)
        )
        for what, values in drawn.items():
            assert values[cell] == (pytest.approx(expected[what], rel=1e-4) if inside else None)


def test_a_step_told_again_voids_what_followed():
    columns = MetricColumns()
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0)):
        columns.add_row(step, {"a": value})
    assert columns.series("a") == [(1, 1.0), (2, 5.0)] and columns.last_value("a") == 5.0


# -- answers -------------------------------------------------------------------------------------------


def test_answers_of_a_step_and_one_of_them(tmp_path):
    write_run(tmp_path)
    told = rollouts.rollout_table(tmp_path, None)
    assert told["step"] == 4 and len(told["rows"]) == 8 and told["stored"] == [1, 4, 4]
    first = told["rows"][0]
    assert first["length"] == 8 and first["gap"] is not None and told["rows"][2]["error"] == "timeout"
    one = rollouts.read_answer(tmp_path, 4, 0)
    written = [t for t in one["tokens"] if t[1]]
    assert (
        one["of"] == 13 and len(written) == 8 and max(abs(t[3] - t[4]) for t in written) == pytest.approx(first["gap"])
    )
    annotate_step(tmp_path, 4, trainer_logprobs={(6, 0): [-9.0] * 13})  # the file is another one now
    assert rollouts.read_answer(tmp_path, 4, 0)["tokens"][-1][4] == -9.0
    with pytest.raises(UserError, match="8 answers and no number 99"):
        rollouts.read_answer(tmp_path, 4, 99)


def test_tokens_are_spelled_by_what_they_add():
    letters = [b"a", b" b", "é".encode()[:1], "é".encode()[1:], b"\n"]

    def spell(ids):
        return b"".join(letters[i] for i in ids).decode(errors="replace")

    assert rollouts.token_texts([0, 1, 2, 3, 4, 0], spell, 0, 6) == ["a", " b", "", "é", "\n", "a"]
    assert "".join(rollouts.token_texts([0, 1, 2, 3, 4] * 20, spell, 50, 100)) == spell([0, 1, 2, 3, 4] * 10)


def test_a_task_at_two_steps(tmp_path):
    write_run(tmp_path)
    assert rollouts.steps_of(tmp_path, "sum/4", 2) == [3]
    assert rollouts.word_diff("the sum is 7.", "the sum was 7.") == [
        ("same", "the sum "),
        ("gone", "is"),
        ("new", "was"),
        ("same", " 7."),
    ]
    assert rollouts.compare_groups(tmp_path, "sum/4", 3, 3)["diff"] == [("same", "the <b>sum</b> is 1.0")]
    with pytest.raises(UserError, match="step 1 has no answer to sum/4"):
        rollouts.compare_groups(tmp_path, "sum/4", 1, 3)


# -- planner -------------------------------------------------------------------------------------------


def test_the_sliders_ask_the_planner(tmp_path):
    assert plan_api.answer_plan_query({"model": "14b", "gpus": "8", "place": "split"}, make_plan)["plan"] == make_plan(
        what_if(["model=14b", "hardware=h100", "gpus=8", "place=split"])
    )
    for wrong in ({"model": "/etc"}, {"hardware": "abacus"}, {"gpus": "0"}, {"trainers": "a"}):
        with pytest.raises(UserError):
            plan_api.answer_plan_query(wrong, make_plan)


# -- the server ----------------------------------------------------------------------------------------


def test_every_answer_is_told_and_nothing_but_ours_may_run(tmp_path):
    asked = client(write_run(tmp_path / "a"), write(tmp_path / "b"))
    for path in (
        "state",
        "series?name=train/entropy&points=3",
        "books",
        "time",
        "findings",
        "card",
        "rollouts",
        "answer?step=4&at=1",
        "plan",
    ):
        reply = asked.get(f"/api/{path}")
        assert reply.status_code == 200, reply.text
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in reply.headers["content-security-policy"]
    assert "inline" not in reply.headers["content-security-policy"]
    curves = asked.get("/api/series?name=train/entropy&name=train/loss&points=3").json()
    assert len(curves["x"]) == 3 and [sorted(c) for c in curves["runs"]] == [["train/entropy"], ["train/entropy"]]
    assert asked.get("/api/plan?run=1&gpus=64").status_code == 400  # a recipe that was written by hand for this test
    for path in ("series?points=x", "books?run=7", "answer?step=99&at=0"):
        assert asked.get(f"/api/{path}").status_code == 400 and "error" in asked.get(f"/api/{path}").json()
    assert asked.get("/page/../pages.py").status_code == asked.get("/page/%2e%2e/pages.py").status_code == 404


def test_who_may_look(tmp_path):
    asked = client(write_run(tmp_path))
    assert asked.get("/api/state").status_code == 200
    assert asked.get("/api/state", headers={"host": "evil.example"}).status_code == 403
    assert asked.get("/api/state", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    asked = client(tmp_path, key="k3y")
    assert asked.get("/").status_code == asked.get("/api/state").status_code == 401
    assert asked.get("/?key=wrong").status_code == 401
    assert asked.get("/api/state", headers={"authorization": "Bearer k3y"}).status_code == 200
    assert asked.get("/?key=k3y").status_code == 200 and asked.get("/api/state").status_code == 200  # by the cookie
    ((name, token),) = asked.cookies.items()
    assert name == "rondel_dashboard_80" and "k3y" not in token and len(token) > 32  # a session's own, and not the key
    asked.cookies.clear()
    assert asked.get("/api/state", headers={"cookie": f"{name}={token}"}).status_code == 200
    assert asked.get("/api/state", headers={"cookie": f"{name}=k3y"}).status_code == 401
    assert (
        client(tmp_path, key="k3y").get("/api/state", headers={"cookie": f"{name}={token}"}).status_code == 401
    )  # it ends with its process


HUGE = ["9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "9" * 5000]
ASKED = {
    "series?name=score/reward_mean": ("first", "last", "points"), "books": ("first", "last"), "time": ("first", "last", "steps"),
    "rollouts": ("step",), "answer?step=1": ("step", "at", "first"), "frames?step=1": ("step", "at"), "steps_of?task=sum/0": ("step",), "beside?task=sum/0": ("a", "b", "pick_a", "pick_b"),
    "plan": ("gpus", "prompts", "output", "lora", "image", "reference", "critic"),
}  # fmt: skip


@pytest.mark.slow
def test_no_number_is_too_large_to_ask_with(tmp_path):
    asked = client(write_run(tmp_path))
    for path, names in ASKED.items():
        for name, value in ((name, value) for name in names for value in HUGE):
            reply = asked.get(f"/api/{path}{'&' if '?' in path else '?'}{name}={value}")
            assert reply.status_code == 400 and "bug of ours" not in reply.text, (path, name, reply.text[:200])


@pytest.mark.slow
@pytest.mark.parametrize("values", covering([HUGE, HUGE[::3]], [HUGE[::3]]), ids=["all", "just too large and far"])
def test_no_number_of_a_run_is_too_large_to_show(tmp_path, values):
    """A journal, a recipe and a card that were edited: every integer of each kind of event in turn, and all at once."""
    lines = (write_run(tmp_path) / "journal.jsonl").read_text().splitlines()
    kinds = {kind_of(line.encode()): i for i, line in enumerate(lines)}
    for value in values:
        for i in kinds.values():
            edited = [*lines]
            edited[i] = re.sub(r"(?<=[:\[,])\d+(?=[,\]}])", value, lines[i])
            (tmp_path / "journal.jsonl").write_text("\n".join(edited) + "\n")
            asked = client(tmp_path)
            for path in ("state", "series?name=score/reward_mean", "books", "time", "findings", "card"):
                assert asked.get(f"/api/{path}").status_code in (200, 400), (
                    lines[i][:60],
                    path,
                    asked.get(f"/api/{path}").text[:200],
                )
    (tmp_path / "card.json").write_text('{"steps": ' + HUGE[-1] + "}")
    (tmp_path / "job.toml").write_text(f"[loop]\nsteps = {HUGE[-1]}\n")
    asked = client(tmp_path)
    assert "is no card" in asked.get("/api/card").json()["error"]
    assert asked.get("/api/state").status_code == 200 and asked.get("/api/plan?run=0").status_code == 400


ANOTHER_TYPE = [None, "x", {}, [None], 1.5, {"a": {"$float": "nan"}}]


@pytest.mark.slow
@pytest.mark.parametrize("types", covering([1, len(ANOTHER_TYPE)], [1]))
def test_no_event_of_another_type_is_an_error_of_the_page(tmp_path, types):
    """Every field of each kind of event in turn, each with so many of the types: the one that is next in turn, or all."""
    turns = itertools.cycle(ANOTHER_TYPE)
    lines = (write_run(tmp_path) / "journal.jsonl").read_text().splitlines()
    kinds = {kind_of(line.encode()): i for i, line in enumerate(lines)}
    for i in kinds.values():
        event = json.loads(lines[i])
        for field, value in itertools.product(sorted(event.keys() - {"kind"}), itertools.islice(turns, types)):
            edited = [*lines[:i], json.dumps(event | {field: value}), *lines[i + 1 :]]
            (tmp_path / "journal.jsonl").write_text("\n".join(edited) + "\n")
            asked = client(tmp_path)
            for path in ("state", "time", "card"):
                reply = asked.get(f"/api/{path}")
                assert reply.status_code in (200, 400), (event["kind"], field, value, path, reply.text[:200])


@pytest.mark.slow
def test_no_torch_is_needed():
    code = "import sys, rondel.dashboard.server, rondel.cli.dashboard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_others_made_is_as_they_shipped_it():
    """Fetched with `npm pack`; whoever takes a new version writes it here too."""
    vendor = ROOT / "src/rondel/dashboard/vendor"
    told = json.loads((vendor / "versions.json").read_text())
    assert told.keys() == {p.name for p in vendor.iterdir()} - {"versions.json"}
    assert {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in told} == {
        n: t["sha256"] for n, t in told.items()
    }
    packages = {t["package"].split("@")[0] for t in told.values()}
    assert packages == {t["package"].split("@")[0] for name, t in told.items() if name.endswith("LICENSE")}


def test_the_page_asks_nobody_else():
    for path in (ROOT / "src/rondel/dashboard/page").iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text and "innerHTML" not in text and "eval(" not in text and "onclick=" not in text, (
            path.name
        )
