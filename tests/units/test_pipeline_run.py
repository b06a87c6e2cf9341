"""A pipeline goes on where it ended: skipped, resumed, refused or done again; killed twice it ends with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import tomli_w
import torch

from kits.nursery import fork_nursery
from kits.runs import FAST, RECIPE, context, final
from rondel.cli import main
from rondel.core.config.toml_reader import set_dotted
from rondel.core.errors import ConfigError, WorkerError
from rondel.core.events import subscribe
from rondel.pipeline.pipeline_file import read_pipeline
from rondel.pipeline.pipeline_run import run_pipeline, share_cores
from rondel.pipeline.pipeline_summary import summary_table, teacher_shares
from rondel.system.folder_lock import lock_folder

SHOWN = {"steps": 0, "warmup": {"steps": 2}}


def write_file(path: Path) -> Path:
    """Two supervised stages, a student of both, and an evaluation."""
    shared: dict = {}
    for dotted, value in (FAST | {"run.checkpoint.every": 2}).items():
        if not dotted.startswith("model."):
            set_dotted(shared, dotted, value)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    teachers = [{"path": "stage:start"}, {"path": "stage:other", "source": "single_turn", "weight": 2.0}]
    student = {"recipe": str(RECIPE), "algo": {"kind": "opd"}, "loop": {"steps": 4, "warmup": {"steps": 0}}}
    stages = {
        "exam": {"kind": "eval", "model": "stage:student"},
        "student": student | {"model": {"path": "stage:start", "teacher": teachers}},
        "other": {"recipe": str(RECIPE), "model": "stage:start", "loop": SHOWN},
        "start": {"recipe": str(RECIPE), "model": {"path": sizes}, "loop": SHOWN},
    }
    path.write_text(tomli_w.dumps({"folder": "unset", "shared": shared, "stages": stages}))
    return path


class InProcess:
    """A stage that is run to its end where it is begun, by the words of its command."""

    def __init__(self, words: list[str], log: Path, out: Path | None, cores: tuple[int, ...]) -> None:
        log.parent.mkdir(exist_ok=True)
        torch.manual_seed(0)  # processes of their own begin alike, too
        with (
            log.open("w") as said,
            (out or log).open("w" if out else "a") as told,
            contextlib.redirect_stdout(told),
            contextlib.redirect_stderr(said),
            pytest.raises(SystemExit) as end,
        ):
            main(words)
        self.code = end.value.code or 0

    def poll(self) -> int:
        return self.code

    def terminate(self) -> None: ...

    def wait(self) -> int:
        return self.code


def refuse_start(words, *_):
    raise AssertionError(f"begun again: {words}")


def run(file: Path, folder: Path, start=InProcess, redo=(), **changes):
    """-> the record, and what was told."""
    told: list[str] = []
    overrides = {"folder": str(folder)} | {key.replace("__", "."): value for key, value in changes.items()}
    return run_pipeline(read_pipeline(file, overrides), start=start, redo=redo, tell=told.append), told


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_file(tmp_path_factory.mktemp("pipeline") / "p.toml")


@pytest.fixture(scope="module")
def whole(file) -> Path:
    """The folder of one that nothing disturbed."""
    run(file, folder := file.parent / "whole")
    return folder


def _die(file: Path, folder: Path, moment: tuple[str, int], changes: dict) -> None:
    fork_nursery()
    kind, left = moment

    def count(event) -> None:
        nonlocal left
        left -= type(event).__name__ == kind
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    subscribe(count)
    run(file, folder, **changes)


@pytest.mark.slow
def test_killed_between_and_within_stages_it_ends_with_the_same_bits(file, whole, tmp_path):
    """And with one teacher in memory at a time, which is read for its own pass."""
    folder, changes = tmp_path / "killed", {"stages__student__trainer__memory__teachers": "one"}
    # behind the last event of "start" and before its record; and in the last step of "student", whose first two are kept
    for moment in (("RunEnded", 1), ("StepDone", 2 + 4)):
        child = context.Process(target=_die, args=(file, folder, moment, changes))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
    record, told = run(file, folder, **changes)
    assert [line.split("]")[1].split(":")[0].strip() for line in told] == [
        "start",
        "other",
        *["student"] * 2,
        *["exam"] * 2,
    ]
    assert sum("(done before)" in line for line in told) == 2 and "student: goes on, trains 4 steps" in told[2]
    for name in ("start", "other", "student"):
        ours, theirs = final(folder / name), final(whole / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), name
    for name, known in json.loads((whole / "pipeline.json").read_text())["stages"].items():
        assert record.stages[name]["held_out"] == known["held_out"] and record.stages[name]["steps"] == known["steps"]


@pytest.mark.slow
def test_what_is_finished_is_skipped_and_tabled(file, whole):
    record, told = run(file, whole, start=refuse_start)
    assert len(told) == 4 and all("(done before)" in line for line in told)
    assert [record.stages[name]["status"] for name in ("start", "other", "student", "exam")] == ["finished"] * 4
    table = summary_table(record)
    assert f"{whole}/student/checkpoints/step-000004" in table and "not done" not in table
    ((student, source, teacher, own, theirs),) = teacher_shares(record)
    assert (student, source, teacher) == ("student", "single_turn", "other") and "student has" in table
    scores = [
        json.loads((whole / name / "card.json").read_text())["eval_sets"][0]["score"] for name in ("student", "other")
    ]
    assert [own, theirs] == scores and "| student |" in (whole / "card.md").read_text()
    exam = json.loads((whole / "exam" / "evaluation.json").read_text())
    assert record.stages["exam"]["held_out"]["held_out"]["score"] == exam["score"] == scores[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages__other__loop__seed": 7}, r"other was begun with another recipe \(loop.seed: 0 -> 7\); student was begun"),
        ({"stages__exam__task__eval__n": 3}, r"exam was begun with another recipe \(task.eval.n: 0 -> 3\).* --redo exam "),
        ({"stages__student__loop__steps": 6}, r"^exam was begun from what student had, which will change"),
        ({"stages__student__loop__steps": 2}, r"student was trained for 4 steps, and its recipe says 2"),
    ],
)  # fmt: skip
def test_what_changed_is_refused(file, whole, changes, says):
    with pytest.raises(ConfigError, match=says):
        run(file, whole, start=refuse_start, **changes)


class Fails:
    def __init__(self, words, log, out, cores):
        log.parent.mkdir(exist_ok=True)
        log.write_text("a line\nerror: out of luck\n")

    def poll(self):
        return 1


@pytest.mark.slow
def test_what_fails_is_told_and_tried_again_and_what_was_done_again_is_kept(file, whole, tmp_path):
    folder = tmp_path / "copy"
    os.system(f"cp -r {whole} {folder}")  # its record names checkpoints of the other folder, which are as good
    with pytest.raises(
        WorkerError, match=r"the stage student failed: out of luck \(exit code 1; .*\); not begun: exam"
    ):
        run(file, folder, start=Fails, redo=["student"])
    assert (folder / "replaced" / "student-1" / "job.toml").is_file() and (folder / "replaced" / "exam-1").is_dir()
    stages = json.loads((folder / "pipeline.json").read_text())["stages"]
    assert stages["student"]["status"] == "failed" and "exam" not in stages and stages["other"]["status"] == "finished"
    with lock_folder(folder, "taken"), pytest.raises(ConfigError, match="another process works at the pipeline"):
        run(file, folder)
    with pytest.raises(ConfigError, match=r"other has finished, and .*step-000002 is gone"):
        manifest = folder / "other" / "checkpoints" / "step-000002" / "manifest.json"
        stages["other"]["checkpoint"]["path"] = str(manifest.parent)
        (folder / "pipeline.json").write_text(json.dumps({"stages": stages}))
        manifest.unlink()
        run(file, folder, start=refuse_start)


def test_cores_are_shared_by_those_side_by_side():
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    assert share_cores(1) == [()]
    if len(cores) > 1:
        first, second = share_cores(2)
        assert len(first) == len(second) == len(cores) // 2 and not set(first) & set(second)
