"""Metrics, sinks and progress: the numbers against hand counts, and nothing doubled after a resume."""

import csv
import io
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from kits.run_folder import evaluated, finished, group, step_events
from kits.runs import events, run
from rondel.core.errors import ConfigError, WorkerError
from rondel.core.events import (
    Evaluating,
    Generating,
    GroupFinished,
    GroupsTaken,
    Resumed,
    RunEnded,
    RunStarted,
    StepDone,
    Warned,
    emit,
    subscribe,
)
from rondel.runtime.telemetry.metrics import SCHEMA, StepMetrics, from_groups, from_taken, metric_meaning
from rondel.runtime.telemetry.progress import ProgressPrinter
from rondel.runtime.telemetry.sinks import open_sinks


def test_a_reader_hears_the_kinds_that_it_named_until_it_is_removed():
    told = {"all": [], "some": []}
    ends = [subscribe(told["all"].append), subscribe(told["some"].append, Warned, RunEnded)]
    events = [Warned("one"), RunStarted("runs/a", "", {}), RunEnded(1, 1, "all steps done", 0.5)]
    for event in events:
        emit(event)
    for end in [*ends, *ends]:
        end()
    emit(Warned("two"))
    assert told == {"all": events, "some": [events[0], events[2]]}


def test_one_step_by_hand():
    row = from_groups(
        [
            GroupFinished(0, "a", 0, True, "", [1.0, 0.0, 1.0], [1, 2, 3, 4], failed=1, truncated=2),
            GroupFinished(1, "b", 0, False, "unanimous", [1.0, 1.0, 1.0, 1.0], [5, 6, 7, 8]),
        ]
    )
    assert row["score/reward_mean"] == pytest.approx(6 / 7)
    assert row["score/reward_std"] == pytest.approx(math.sqrt(6 / 7 * 1 / 7))
    assert (row["score/reward_min"], row["score/reward_max"]) == (0.0, 1.0)
    assert row["score/failed_fraction"] == 1 / 8
    assert row["filter/signal_fraction"] == row["filter/dropped_fraction"] == 1 / 2
    assert (row["generate/length_mean"], row["generate/length_p95"], row["generate/length_max"]) == (4.5, 8, 8)
    assert (row["generate/tokens"], row["generate/truncated_fraction"]) == (36, 2 / 8)


def test_a_failed_reward_is_no_zero_and_nothing_is_no_number():
    assert "score/reward_mean" not in from_groups([GroupFinished(0, "a", 0, False, "failed", [], [3, 3], failed=2)])
    assert from_groups([]) == {}
    single = from_groups([GroupFinished(i, "a", 0, True, "", [float(i)], [3]) for i in range(2)])
    assert "filter/signal_fraction" not in single and single["score/reward_mean"] == 0.5, "a critic compares no answers"


def test_every_source_has_its_mean_reward_and_a_column_of_the_data_is_no_source():
    row = from_groups(
        [
            GroupFinished(i, "a", 0, True, "", [float(i)], [1], source=name)
            for i, name in enumerate(("sums", "code", "sums"))
        ]
    )
    assert (row["score/reward_of_sums"], row["score/reward_of_code"]) == (1.0, 1.0)
    many = from_groups([GroupFinished(i, "a", 0, True, "", [1.0], [1], source=f"page {i}") for i in range(100)])
    assert not [name for name in many if "reward_of" in name]


def test_lag_is_measured_at_consumption():
    row = from_taken(
        GroupsTaken(4, 3, [group(0, 3, [1.0]), group(1, 2, [1.0]), group(2, 2, [1.0]), group(3, 1, [1.0])], 2)
    )
    assert row.pop("loop/lag_limit") == 2
    assert row == {
        "loop/lag_mean": 1.0,
        "loop/lag_max": 2,
        "loop/lag_is_0": 0.25,
        "loop/lag_is_1": 0.5,
        "loop/lag_is_2": 0.25,
    }


def test_each_step_is_one_complete_row_and_every_name_is_in_the_schema():
    rows = []
    reader = StepMetrics(lambda step, row: rows.append((step, row)))
    for event in [evaluated(0, 0, 0.2), *step_events(1), *step_events(2)]:
        reader.on_event(event)
    assert [step for step, _ in rows] == [0, 1, 2]
    assert rows[0][1] == {"eval/score": 0.2, "eval/low": 0.1, "eval/high": pytest.approx(0.3)}
    for name in rows[2][1]:
        assert metric_meaning(name) is not None, name
    assert rows[2][1]["score/reward_mean"] == pytest.approx((1.0 + 0.0 + 0.2) / 3)  # of step 2 alone
    assert rows[2][1]["time/step"] == 4.0 and rows[2][1]["ledger/trained"] == 4
    assert rows[2][1]["loop/tokens_per_second"] == 2 * 4 * 8 / 4.0
    assert rows[2][1]["train/entropy"] == 1.0 and rows[2][1]["sync/probe_gap"] == 1e-7


def test_what_a_resume_repeats_is_not_counted_twice():
    rows = []
    reader = StepMetrics(lambda step, row: rows.append(row))
    for event in [*step_events(1)[:4], Resumed(0, 0, ""), *step_events(1)]:
        reader.on_event(event)
    assert rows[0]["generate/tokens"] == 2 * 4 * 8


def test_who_was_late_is_counted_in_the_step_and_phase_in_which_it_was():
    """Two supervised steps of 8 groups, then steps of 4 with one late each; a resumed run, whose ledger counts from the
    beginning, does not know the step before."""
    told: list[float | None] = []
    reader = StepMetrics(lambda step, row: told.append(row.get("loop/late_fraction")))

    def end_step(step: int, trained: int, late: int, *, supervised: bool = False) -> None:
        reader.on_event(GroupFinished(step, "t", 0, True, "", [1.0], [3], supervised=supervised))
        ledger = {"issued": trained + late, "trained": trained, "in_flight": 0, "filtered/late": late}
        reader.on_event(StepDone(step, step, {}, {"step": 1.0}, ledger))

    end_step(1, 8, 0, supervised=True)
    end_step(2, 16, 0, supervised=True)
    end_step(3, 4, 1)
    end_step(4, 8, 2)
    reader.on_event(Resumed(4, 4, "checkpoints/step-000004"))
    end_step(5, 12, 2)
    end_step(6, 16, 3)
    assert told == [None, None, 0.2, 0.2, None, 0.2]


def test_the_schema_has_a_stage_a_unit_and_a_meaning():
    for name, (unit, what) in SCHEMA.items():
        assert (
            name.split("/")[0] in {"generate", "score", "filter", "train", "sync", "loop", "eval", "episode"}
            and unit
            and what
        )


def read_back(kind, folder):
    if kind == "jsonl":
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(row.pop("step"), row) for row in rows]
    if kind == "csv":
        with (folder / "metrics.csv").open() as file:
            return [(int(r["step"]), {r["name"]: float(r["value"])}) for r in csv.DictReader(file)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(s.step, {"a/b": s.value}) for s in EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("a/b")]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard"])
def test_a_resume_doubles_nothing_in_any_sink(tmp_path, kind):
    [sink] = open_sinks([kind], tmp_path)
    for step in range(4):
        sink.write(step, {"a/b": float(step)})
    sink.close()
    [sink] = open_sinks([kind], tmp_path, after=2)
    sink.write(3, {"a/b": 30.0})
    sink.close()
    assert read_back(kind, tmp_path) == [(0, {"a/b": 0.0}), (1, {"a/b": 1.0}), (2, {"a/b": 2.0}), (3, {"a/b": 30.0})]
    [sink] = open_sinks([kind], tmp_path)  # a new beginning
    sink.write(0, {"a/b": 7.0})
    sink.close()
    assert read_back(kind, tmp_path) == [(0, {"a/b": 7.0})]


def test_a_run_that_goes_back_without_ending_doubles_nothing(tmp_path):
    """It lost a rank of its trainer after step 2 and goes on from its beginning."""
    lost = [WorkerError("worker trainer-0 ended")]

    def lose_rank(event):
        if event.step == 2 and lost:
            raise lost.pop()

    end = subscribe(lose_rank, StepDone)
    kinds = ["csv", "jsonl", "tensorboard"]
    try:
        run(tmp_path / "run", loop__warmup__steps=0, loop__steps=3, loop__groups_per_step=2, run__sinks=kinds)
    finally:
        end()
    assert not lost and len(events(tmp_path / "run", "Resumed")) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "time/step" in row] == [1, 2, 3]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert [int(r["step"]) for r in csv.DictReader(file) if r["name"] == "time/step"] == [1, 2, 3]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("time/step")
    assert [scalar.step for scalar in told] == [1, 2, 3]


def test_a_resume_in_the_same_second_is_read_behind_what_it_follows(tmp_path, monkeypatch):
    """Event files are read by their names, in which the tenth of a process stands before its ninth."""
    from tensorboard.summary.writer import event_file_writer

    count = event_file_writer.AtomicCounter(9)
    monkeypatch.setattr(event_file_writer, "_global_uid", count)
    for after, value in ((-1, 1.0), (-1, 7.0)):
        [sink] = open_sinks(["tensorboard"], tmp_path, after=after)
        sink.write(0, {"a/b": value})
        sink.close()
    assert (
        read_back("tensorboard", tmp_path) == [(0, {"a/b": 7.0})] and len([*(tmp_path / "tensorboard").iterdir()]) == 2
    )


def test_torn_lines_of_text_sinks_are_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"a":1.0}\nnoise\n{"a":2}\n{"step":2,"a"')
    open_sinks(["jsonl"], tmp_path, after=5)[0].close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1,"a":1.0}\n'


def test_an_unknown_sink_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        open_sinks(["tensorbord"], tmp_path)


@pytest.mark.slow
def test_telemetry_needs_no_torch():
    code = (
        "import sys, tempfile; import rondel.runtime.telemetry.card, rondel.runtime.telemetry.progress, "
        "rondel.runtime.journal.store;"
        "from rondel.runtime.telemetry.sinks import open_sinks; open_sinks(['tensorboard'], "
        "tempfile.mkdtemp())[0].close();"
        "print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


def watch(events, *, terminal=False, **kwargs):
    out = io.StringIO()
    with ProgressPrinter(2, console=Console(file=out, force_terminal=terminal, width=80), **kwargs) as progress:
        for event in events:
            progress.on_event(event)
    return out.getvalue()


EVENTS = [
    RunStarted("runs/a", "h"),
    *step_events(1),
    evaluated(1, 1, 0.5),
    *step_events(2),
    RunEnded(2, 2, "complete", 95.0),
]


def test_progress_without_a_terminal_is_plain_lines_that_are_never_wrapped():
    text = watch(EVENTS)
    assert "\x1b" not in text and "\r" not in text
    [line] = [line for line in text.splitlines() if line.startswith("step 1/2")]
    assert "reward 0.367" in line and "signal 100%" in line and "gap 2e-06" in line
    assert line.endswith("4.0 s: wait 50%, train 38%, sync 12%")
    assert "eval after step 1: 50.0%  (95 % interval 40.0% to 60.0%, 48 tasks, 2 s)" in text
    for above in ([evaluated(1, 1, 0.5, scale=4.0)], [finished(group(0, 0, [0.5, 2.0])), evaluated(1, 1, 0.5)]):
        [line] = [line for line in watch(above).splitlines() if line.startswith("eval")]
        assert (
            line.startswith("eval after step 1: mean reward ")
            and "interval" in line
            and "%" not in line.replace("95 %", "")
        )
    assert text.splitlines()[-1] == "complete after step 2, 1 min 35 s"


SUPERVISED = [
    *(replace(finished(g), rewards=[], supervised=True) for g in (group(i, 0, [1.0]) for i in range(2))),
    GroupsTaken(1, 0, [replace(group(0, 0, [1.0], length=40), supervised=True)]),
    StepDone(1, 1, {"train/loss": 2.5, "train/entropy": 1.0}, {"train": 1.0, "step": 1.0}, {}),
]


def test_a_supervised_step_has_a_loss_and_no_reward():
    row = {}
    fold = StepMetrics(lambda step, told: row.update(told))
    for event in SUPERVISED:
        fold.on_event(event)
    assert row["loop/supervised"] == 1 and not [
        name for name in row if name.startswith(("score/", "filter/", "generate/"))
    ]
    legend, *_, line = watch(SUPERVISED).splitlines()
    assert legend.startswith("supervised: the steps of loop.warmup")
    assert line == "step 1/2   supervised   loss 2.500   entropy 1.00   1.0 s: train 100%"
    assert "supervised" not in watch([*SUPERVISED, *step_events(2)]).splitlines()[-1]


def test_movement_shows_while_a_long_generation_runs():
    beats = [Generating(8, 3, 100 * i, float(i)) for i in range(1, 4)]
    assert watch(beats, every=0.0).splitlines()[0] == (
        "... step 1/2: 100 tokens/s, 8 answers being written, 3 waiting, 0 groups finished"
    )
    assert watch(beats, every=60.0) == ""  # not more often than asked
    assert "100 tokens/s" in watch(beats, terminal=True)


def test_a_run_that_goes_back_begins_its_status_anew():
    """A worker is lost while three groups of a step have finished and an evaluation is under way."""
    lost = [*[GroupFinished(n, "t", 0, True, "", [1.0], [5]) for n in range(3)], Evaluating(2, "held_out", 3, 40)]
    lines = watch([*lost, Resumed(1, 1, "checkpoints/step-000001"), Generating(8, 3, 100, 1.0)], every=0.0).splitlines()
    assert lines[-1] == "... step 2/2: 100 tokens/s, 8 answers being written, 3 waiting, 0 groups finished"


def test_an_evaluation_shows_how_far_it_is():
    """Also where the engine's heartbeat comes in between, until its last answer."""
    told = [Evaluating(1, "held_out", 3, 40), Generating(8, 3, 100, 1.0), Evaluating(1, "held_out", 40, 40)]
    assert watch([*told, Generating(8, 3, 100, 1.0)], every=0.0).splitlines() == [
        "... eval after step 1: held_out, 3 of 40 answers",
        "... eval after step 1: held_out, 3 of 40 answers, 100 tokens/s",
        "... eval after step 1: held_out, 40 of 40 answers",
        "... step 1/2: 100 tokens/s, 8 answers being written, 3 waiting, 0 groups finished",
    ]
    assert watch(told, every=60.0) == ""
    assert "held_out, 3 of 40 answers, 100 tokens/s" in watch(told[:2], terminal=True)


def test_quiet_says_only_warnings_and_each_once(capsys):
    assert watch([*EVENTS, Warned("slow disk"), Warned("slow disk")], quiet=True) == ""
    assert capsys.readouterr().err == "warning: slow disk\n"
    assert watch([Warned("a [bold] disk"), Warned("a [bold] disk")]).count("warning: a [bold] disk") == 1


def test_a_step_that_was_refused_says_why():
    done = StepDone(1, 1, {}, {"train": 1.0, "step": 1.0}, {}, note="gradient not finite")
    assert "gradient not finite" in watch([done])
