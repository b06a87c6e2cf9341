"""What a run has written stays whole: beside copies that a user made, after a power cut, on
a full disk and on one that became read-only.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kits.disks import FullDisk, PowerCut, ReadOnlyDisk, apart, small_disk
from kits.once import made_once
from kits.runs import context, events, final, run
from kits.sweeps import covering
from rondel.core.config.job import Job
from rondel.core.errors import CheckpointError, RondelError, SyncError, leaf_errors
from rondel.core.events import Checkpointed, subscribe
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk, complete_versions
from rondel.system.files import checkpoints_in, numbered_paths
from rondel.train.checkpoint import Checkpoints, find_flaw

SHORT = {
    "loop__warmup__steps": 0, "loop__steps": 8, "loop__groups_per_step": 2, "algo__group_size": 2, "run__checkpoint": {"every": 2, "keep": 1},
    "task__data": {"kind": "digits"}, "task__eval": {}, "model__path__num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Eight steps that nothing disturbs, with a checkpoint every second one, of which one is kept."""
    return made_once(tmp_path_factory, "disk", partial(run, **SHORT))


def same(folder: Path, whole: Path) -> bool:
    ours, theirs = final(folder), final(whole)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- what is the run's -----------------------------------------------------------------------------


def test_a_name_is_the_runs_only_as_the_run_writes_it(tmp_path):
    odd = [
        "step-best",
        "step-000005-keep",
        "step-5",
        "step-0000005",
        "step-000005.bak",
        "step-",
        "step-００００05",
        "xstep-000005",
    ]
    for name in [*odd, "step-999999", "step-000004", "step-1000000"]:
        (tmp_path / name).mkdir()
    assert list(numbered_paths(tmp_path, "step-")) == [4, 999999, 1000000]


@pytest.mark.slow
def test_what_a_user_copied_is_neither_resumed_from_nor_deleted(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    kept = folder / "checkpoints" / "step-000008"
    copies = [kept.with_name(name) for name in ("step-best", "step-000008-keep", "step-000003")]
    for copy in copies:
        shutil.copytree(kept, copy)
    run(folder, **SHORT | {"loop__steps": 10})
    assert [e["step"] for e in events(folder, "Resumed")] == [8]
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-000010", *(copy.name for copy in copies)}
    assert all(find_flaw(copy) is None for copy in copies)


@pytest.mark.slow
def test_a_copy_where_the_run_will_write_is_refused(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    kept = tmp_path / "run" / "checkpoints" / "step-000008"
    shutil.copytree(kept, kept.with_name("step-000010"))
    with pytest.raises(CheckpointError, match=r"step-000010 is a copy of step 8.*rename it"):
        run(tmp_path / "run", **SHORT | {"loop__steps": 10})


@pytest.mark.slow
def test_the_newest_is_that_of_the_highest_number(whole, tmp_path):
    for step in (999998, 1000000):
        copy = tmp_path / f"step-{step:06d}"
        shutil.copytree(whole / "checkpoints" / "step-000008", copy)
        (copy / "manifest.json").write_text(
            (copy / "manifest.json").read_text().replace('"step": 8', f'"step": {step}', 1)
        )
    found = Checkpoints(tmp_path, 1).find_latest()
    assert found is not None and found[0].name == "step-1000000"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "corrupt"])
def test_a_run_whose_checkpoints_are_all_lost_does_not_begin_anew(whole, tmp_path, how):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    if how == "gone":
        shutil.rmtree(folder / "checkpoints")
    else:
        (folder / "checkpoints" / "step-000008" / "model.safetensors").write_bytes(b"")
    journal = (folder / "journal.jsonl").read_bytes()
    said = "journal tells of one after step 8" if how == "gone" else r"step-000008: model.safetensors has 0 bytes"
    with pytest.raises(CheckpointError, match=f"{said}.*--run.folder"):
        run(folder, **SHORT | {"loop__steps": 10})
    assert (folder / "journal.jsonl").read_bytes() == journal


def test_versions_that_a_user_copied_are_neither_served_nor_deleted(tmp_path):
    disk, delta = FromDisk(tmp_path, keep=1), Delta(tmp_path, keep=1)
    for transport in (disk, delta):
        for version in (1, 2, 1000000):
            transport.publish(*_published(transport, version))
            (tmp_path / f"v-{version:06d}-keep").mkdir(exist_ok=True)
    assert list(complete_versions(tmp_path)) == [1000000] and list(numbered_paths(tmp_path, "d-")) == [1000000]
    assert len(list(tmp_path.glob("v-*-keep"))) == 3


def _published(transport, version):
    from rondel.core.types import Route, TensorInfo

    tensor = torch.full((4,), float(version))
    return (
        Route("disk" if isinstance(transport, FromDisk) else "delta"),
        version,
        [(TensorInfo("a", (4,), "float32", "0"), tensor)],
    )


# -- power -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_power_cut_at_any_moment_leaves_the_last_checkpoint(whole, tmp_path, monkeypatch):
    """Before and after every fsync, and before every change of a name; from two of
    those the run goes on, to the same bits.
    """
    folder, rng, saved, moments = tmp_path / "run", random.Random(0), [0], [0]
    folder.mkdir()
    disk = PowerCut(folder)

    def moment() -> None:
        image = disk.image(tmp_path / "image", rng)
        sound = [step for step, path in checkpoints_in(image / "checkpoints").items() if find_flaw(path) is None]
        assert max(sound, default=0) >= saved[0], f"checkpoint {saved[0]} was told of, and is gone"
        if saved[0]:
            assert Job.read(image / "job.toml").run.folder == str(folder)
        moments[0] += 1
        image.rename(tmp_path / f"image-{moments[0]}") if moments[0] in (11, 100) else shutil.rmtree(image)

    stop = subscribe(lambda event: saved.__setitem__(0, event.step) if isinstance(event, Checkpointed) else None)
    try:
        with disk.watched(moment, monkeypatch):
            run(folder, **SHORT)
    finally:
        stop()
    assert same(folder, whole) and moments[0] >= 100
    images = list(tmp_path.glob("image-*"))
    assert len(images) == 2, moments
    for image in images:
        run(image, **SHORT)
        assert same(image, whole)
        assert [e["step"] for e in events(image, "StepDone")][-1] == 8


# -- killed, full, and read-only ---------------------------------------------------------------------

MOMENTS = 20
MANY_TIMES = pytest.mark.parametrize("times", covering([3, MOMENTS], [3]))


@pytest.mark.slow
@MANY_TIMES
def test_a_kill_at_any_moment_leaves_the_last_checkpoint(whole, tmp_path, times):
    """In one run after another, by the clock; each goes on, to the same bits."""
    folder, rng, kills, length = tmp_path / "run", random.Random(2), 0, 1.0
    while kills < times:
        child = context.Process(target=run, args=(folder,), kwargs=SHORT)
        child.start()
        began = time.monotonic()
        child.join(rng.uniform(0.0, length))
        child.kill()
        child.join()
        made = folder / "journal.jsonl"
        saved = max((e["step"] for e in events(folder, "Checkpointed")), default=0) if made.exists() else 0
        found = Checkpoints(folder / "checkpoints", 1).find_latest() if (folder / "checkpoints").exists() else None
        assert (found[1]["step"] if found else 0) >= saved
        if child.exitcode == 0:  # it was complete before the kill: begin another one
            assert same(folder, whole)
            length = time.monotonic() - began
            shutil.rmtree(folder)
            continue
        assert child.exitcode == -9
        kills += 1
    run(folder, **SHORT)
    assert same(folder, whole)


def in_own_mounts(outside: Path, work: Callable[..., None], *given: object) -> None:
    """`work(disk, ...)` in a process with a small disk of its own; what it raises is raised here."""
    child = context.Process(target=_in_own_mounts, args=(outside, work, given))
    child.start()
    child.join(300)
    child.kill()
    told = (outside / "told").read_text() if (outside / "told").exists() else f"the process ended with {child.exitcode}"
    if told == "no mounts":
        pytest.skip("this machine allows no mounts: it needs root, or user namespaces")
    assert told == "", told


def _in_own_mounts(outside: Path, work: Callable[..., None], given: tuple) -> None:
    told = "no mounts"
    try:
        if apart() and small_disk(outside / "disk", 6 << 20):
            work(outside / "disk", *given)
            told = ""
    except BaseException:
        told = traceback.format_exc()
    (outside / "told").write_text(told)


@pytest.mark.slow
@pytest.mark.parametrize("disk", [FullDisk, ReadOnlyDisk])
@MANY_TIMES
def test_a_disk_that_refuses_at_any_moment_is_named_and_the_run_goes_on(whole, tmp_path, disk, times):
    """In one run, at a random event: the error has path, reason and remedy, and what was whole stays whole."""
    in_own_mounts(tmp_path, _strikes, whole, disk, times)


def _strikes(at: Path, whole: Path, kind: type[FullDisk] | type[ReadOnlyDisk], times: int) -> None:
    folder, rng = at / "run", random.Random(1)
    folder.mkdir()
    disk, struck = kind(folder if kind is ReadOnlyDisk else at), 0
    while struck < times:
        wait = [rng.randint(1, 24)]

        def strike(event, wait=wait) -> None:
            wait[0] -= 1
            if wait[0] == 0:
                disk.strike(rng)

        saved = (
            max((e["step"] for e in events(folder, "Checkpointed")), default=0)
            if (folder / "journal.jsonl").exists()
            else 0
        )
        stop = subscribe(strike)
        try:
            run(folder, **SHORT)
            error = None
        except BaseException as raised:
            error = raised
        finally:
            stop()
            disk.mend()
        found = Checkpoints(folder / "checkpoints", 1).find_latest()
        assert (found[1]["step"] if found else 0) >= saved
        if error is None:
            assert same(folder, whole)
            shutil.rmtree(folder)
            folder.mkdir()
            continue
        struck += 1
        assert all(isinstance(leaf, RondelError) for leaf in leaf_errors(error)), traceback.format_exception(error)
        said = " ".join(map(str, leaf_errors(error)))
        assert str(folder) in said and all(word in said for word in kind.words), said
        assert kind is ReadOnlyDisk or "are wanted" in said, said
    run(folder, **SHORT)
    assert same(folder, whole)


@pytest.mark.slow
def test_a_run_that_is_read_only_can_be_read(whole, tmp_path):
    in_own_mounts(tmp_path, _read, whole)


def _read(disk: Path, whole: Path) -> None:
    from rondel.cli import main
    from rondel.dashboard.run import DashboardRun
    from rondel.runtime.telemetry.diagnose import findings

    folder = disk / "run"
    shutil.copytree(whole, folder)
    (folder / "card.md").unlink()
    ReadOnlyDisk(folder).strike(random.Random(0))
    for words in (["card"], ["card", "--json"], ["diagnose"], ["view"], ["trace", "-o", str(disk / "trace.json")]):
        said, noted = io.StringIO(), io.StringIO()
        with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(said), contextlib.redirect_stderr(noted):
            main([words[0], str(folder), *words[1:]])
        assert not end.value.code and said.getvalue(), noted.getvalue()
        assert ("the card is only shown: writing" in noted.getvalue()) == (words[0] == "card")
    seen = DashboardRun(folder, findings)
    while seen.poll_journal():
        pass
    assert seen.state == "complete" and seen.step == 8


@pytest.mark.slow
def test_shared_memory_that_is_full_is_an_error_and_ends_no_process(tmp_path):
    in_own_mounts(tmp_path, _share)


def _share(disk: Path) -> None:
    from rondel.sync import from_ipc

    from_ipc.SHARED = disk
    transport = from_ipc.FromIpc(named=True)
    route, version, [(row, tensor)] = _published(transport, 1)
    row, tensor = replace(row, shape=(4 << 20,)), tensor.repeat(1 << 20)
    with pytest.raises(SyncError, match=f"{disk}.*the disk is full, 16.8 MB are wanted: free some space"):
        transport.publish(route, version, [(row, tensor)])
