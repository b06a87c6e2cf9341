"""Trackers of others: told every number once, also by a run that is resumed. Their packages
are ten-line fakes of the calls that are made; where the real one is installed it is used, offline."""

import importlib.util
import sys
import urllib.request
from types import ModuleType, SimpleNamespace

import pytest

from kits.run_folder import write_run
from kits.runs import run
from rondel.core.errors import ConfigError
from rondel.runtime.telemetry.prometheus import PrometheusSink
from rondel.runtime.telemetry.sinks import open_sinks

ROW = {"score/reward_mean": 0.5, "train/loss": float("nan"), "time/step": 2.0}


class FakeTracker(ModuleType):
    """wandb's and trackio's init, log, finish, and the part of MlflowClient that is used."""

    def __init__(self, name):
        super().__init__(name)
        self.told, self.opened, self.ended, self.step = [], [], 0, 0
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (step, key, value), Param=lambda key, value: (key, value)
        )
        self.MlflowClient = lambda tracking_uri: self
        self.get_experiment_by_name = lambda name: None
        self.create_experiment = lambda name: "0"

    def init(self, **how):
        self.opened.append(how)
        return self

    def log(self, metrics, step):
        self.told += [(step, key, value) for key, value in metrics.items()]

    def finish(self):
        self.ended += 1

    def create_run(self, experiment, run_name):
        self.opened.append({"id": f"run-{len(self.opened)}", "name": run_name})
        return SimpleNamespace(info=SimpleNamespace(run_id=self.opened[-1]["id"]))

    def log_batch(self, run_id, metrics=(), params=()):
        self.told += metrics

    def update_run(self, run_id, status): ...

    def set_terminated(self, run_id):
        self.ended += 1


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_every_number_once_and_a_resume_goes_on(tmp_path, monkeypatch, kind):
    fake = FakeTracker(kind)
    monkeypatch.setitem(sys.modules, kind, fake)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    folder = write_run(tmp_path / "mine")
    (sink,) = open_sinks([kind], folder)
    for step in (1, 2, 3):
        sink.write(step, ROW)
    sink.write(3, {"eval/score": 0.25})
    sink.close()
    told = [(step, "score/reward_mean", 0.5) for step in (1, 2, 3)]
    assert [t for t in fake.told if t[1] == "score/reward_mean"] == told and (3, "eval/score", 0.25) in fake.told
    assert not any(key == "train/loss" for _, key, _ in fake.told), "what is no number is not told"
    (again,) = open_sinks([kind], folder, after=1)
    assert again.sink.id == sink.sink.id
    for step in (2, 3, 4):
        again.write(step, ROW)
    again.close()
    assert {step for step, key, _ in fake.told if key == "time/step"} == {1, 2, 3, 4} and fake.ended == 2
    assert all(len([t for t in fake.told if t[:2] == (step, "time/step")]) == 1 for step in (1, 2, 3, 4))
    (new,) = open_sinks([kind], folder)
    assert new.sink.id != sink.sink.id, "a run from its beginning is another one"
    if kind == "wandb":
        first = fake.opened[0]
        assert (
            first["mode"] == "offline"
            and first["name"] == "mine"
            and first["config"]["loop"]["steps"] == 6
            and first["resume"] == "allow"
        )


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_an_evaluation_that_a_stop_came_before_is_told_by_the_resumed_run(tmp_path, monkeypatch, kind):
    """Step 3 was told, then the run was stopped; resumed from step 3 it only evaluates, from step 2 it repeats it."""
    fake = FakeTracker(kind)
    monkeypatch.setitem(sys.modules, kind, fake)
    folder = write_run(tmp_path / "mine")
    (sink,) = open_sinks([kind], folder)
    for step in (1, 2, 3):
        sink.write(step, ROW)
    sink.write(3, {"eval/score": 0.25})
    sink.go_back(3)
    sink.write(3, {"eval/score": 0.25})
    sink.write(3, {"eval/aime/score": 0.5})
    sink.go_back(2)
    for row in (ROW, {"eval/score": 0.25}, {"eval/aime/score": 0.5}, {"eval/late": 1.0}):
        sink.write(3, row)
    sink.close()
    names = ("score/reward_mean", "time/step", "eval/score", "eval/aime/score", "eval/late")
    assert sorted(key for step, key, _ in fake.told if step == 3) == sorted(names)


def test_wandb_takes_what_is_late_with_its_next_step(tmp_path, monkeypatch):
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (sink,) = open_sinks(["wandb"], write_run(tmp_path / "mine"))
    sink.write(3, ROW)
    sink.go_back(3)
    fake.step = 4  # where a run that is resumed goes on
    sink.write(3, {"eval/score": 0.25})
    assert fake.told[-1] == (4, "eval/score", 0.25)


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_what_is_not_installed_is_said_before_the_run(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=f'"{kind}", which is not installed: pip install'):
        open_sinks([kind], tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="not installed")
def test_the_real_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (sink,) = open_sinks(["wandb"], write_run(tmp_path))
    sink.write(1, ROW)
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_prometheus_finds_the_newest_row():
    parser = pytest.importorskip("prometheus_client.parser")
    sink = PrometheusSink(0)
    try:
        sink.write(3, {"score/reward_mean": 0.25, "time/engine-0/idle": 1.5})
        sink.write(3, {"eval/score": 0.75})
        page = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10).read().decode()
        found = {s.name: s.value for family in parser.text_string_to_metric_families(page) for s in family.samples}
        assert found == {
            "rondel_step": 3,
            "rondel_score_reward_mean": 0.25,
            "rondel_time_engine_0_idle": 1.5,
            "rondel_eval_score": 0.75,
        }
        assert "HELP rondel_score_reward_mean mean over" in page
        sink.write(4, {"score/reward_mean": 0.5})
        with pytest.raises(ConfigError, match="choose another port"):
            PrometheusSink(sink.port)
    finally:
        sink.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=2)


@pytest.mark.slow
def test_a_run_is_scraped_while_it_goes_on(tmp_path):
    import socket

    from rondel.core.events import Checkpointed, subscribe

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pages = []

    def look(event):
        if isinstance(event, Checkpointed):
            pages.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode())

    end = subscribe(look)
    try:
        run(tmp_path, loop__warmup__steps=1, loop__steps=2, run__sinks=[{"kind": "prometheus", "port": port}])
    finally:
        end()
    assert "rondel_step 3.0" in pages[-1] and "rondel_time_engine_generate" in pages[-1]


def in_steps(folder, kind):
    """A run of three steps, resumed after the first."""
    (sink,) = open_sinks([kind], folder)
    for step in (1, 2, 3):
        sink.write(step, ROW)
    sink.close()
    (again,) = open_sinks([kind], folder, after=1)
    again.write(3, ROW)
    again.write(4, ROW)
    again.write(4, {"eval/score": 0.25})
    again.close()
    assert again.sink.id == sink.sink.id
    return sink.sink.id


def test_the_real_mlflow_keeps_every_number_in_the_run_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = write_run(tmp_path / "mine")
    number = in_steps(folder, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    assert [(m.step, m.value) for m in client.get_metric_history(number, "score/reward_mean")] == [
        (s, 0.5) for s in (1, 2, 3, 4)
    ]
    assert [(m.step, m.value) for m in client.get_metric_history(number, "eval/score")] == [(4, 0.25)]
    found = client.get_run(number)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED") and "train/loss" not in found.data.metrics
    assert found.data.params["loop.steps"] == "6"


def test_the_real_trackio_keeps_every_number_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    trackio = pytest.importorskip("trackio")
    number = in_steps(write_run(tmp_path / "mine"), "trackio")
    (run,) = [each for each in trackio.Api().runs("rondel") if each.name == number]
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("rondel", number)
    assert [(r["step"], r["score/reward_mean"]) for r in rows if "score/reward_mean" in r] == [
        (s, 0.5) for s in (1, 2, 3, 4)
    ]
    assert [(r["step"], r["eval/score"]) for r in rows if "eval/score" in r] == [(4, 0.25)]
    assert run.config["loop"]["steps"] == 6
