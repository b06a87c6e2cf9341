"""What a recipe names as "module:name": made with its settings, run, and refused early where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from run_kit import events, run, tiny

from rondel.assemble import build
from rondel.core.config import Job
from rondel.core.errors import ConfigError
from rondel.core.types import TensorInfo
from rondel.sync import transport_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = {"loop__warmup__steps": 0, "loop__steps": 2, "task__eval__n": 2}


@pytest.fixture(autouse=True)
def examples(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir()
    yield
    sys.modules.pop("theirs", None)


def write_module(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules" / "theirs.py").write_text(text)


# -- task.env ----------------------------------------------------------------------------------------


def test_an_environment_is_made_with_the_settings_of_its_table(tmp_path):
    parts = build(tiny(tmp_path / "run", task__env={"kind": "my_env:SecondThought", "hint": "Once more."}, **FEW))
    parts.close()
    assert parts.env.hint == "Once more."


def test_an_environment_that_is_a_function_gets_its_settings_with_every_call(tmp_path):
    write_module(tmp_path, "async def play(task, chat, *, word):\n    return word\n")
    parts = build(tiny(tmp_path / "run", task__env={"kind": "theirs:play", "word": "hello"}, **FEW))
    parts.close()
    assert parts.env.function.keywords == {"word": "hello"}


ENVS = {
    "an unknown setting": ({"kind": "my_env:SecondThought", "hnt": "x"}, r"no setting 'hnt'. Did you mean 'hint'\?"),
    "a setting that is missing": ({"kind": "theirs:Needs"}, r"needs level: task.env = { kind = .*, level = ... }"),
    "no run": ({"kind": "theirs:Empty"}, r"'theirs:Empty' has no method run\(task, chat\); add it"),
    "a run of one argument": (
        {"kind": "theirs:Short"},
        r"run of 'theirs:Short' is called as f\(task, chat\), and cannot",
    ),
    "a constructor that raises": ({"kind": "theirs:Raises"}, r"task.env: making 'theirs:Raises': RuntimeError: no key"),
    "no such module": ("nowhere:Env", r"no module 'nowhere'"),
    "no such name": ("theirs:Shrt", r"theirs has no 'Shrt'. Did you mean 'Short'\?"),
    "a function without the setting": ({"kind": "theirs:play", "word": 1}, r"'theirs:play' has no setting 'word'"),
}


@pytest.mark.parametrize("name", ENVS)
def test_an_environment_that_cannot_be_is_refused_early(tmp_path, name):
    write_module(
        tmp_path,
        "class Needs:\n    def __init__(self, level): pass\n    async def run(self, task, chat): pass\n"
        "class Empty: pass\n"
        "class Short:\n    async def run(self, task): pass\n"
        "class Raises:\n    def __init__(self): raise RuntimeError('no key')\n"
        "async def play(task, chat): pass\n",
    )
    env, match = ENVS[name]
    with pytest.raises(ConfigError, match=match):
        build(tiny(tmp_path / "run", task__env=env, **FEW))


def test_settings_of_an_environment_of_ours_are_typed():
    tree = {"model": {"path": "x"}, "task": {"data": {}}, "loop": {"steps": 1}, "run": {"folder": "x"}}
    for settings, match in (
        ({"turns": 0, "tools": ["calculator"]}, r"task.env.turns = 0: input should be greater"),
        ({"turns": 3}, r"'task.env.tools' is missing; .* --task.env.tools="),
        ({"tools": ["calculator"], "agent": "x:y"}, r"unknown key 'task.env.agent'"),
    ):
        with pytest.raises(ConfigError, match=match):
            Job.parse(tree | {"task": {"data": {}, "env": {"kind": "tools", **settings}}})


# -- sync.kind ---------------------------------------------------------------------------------------


def test_a_transport_of_yours_moves_every_bit(tmp_path):
    import asyncio

    ends = [transport_of("my_transport:OneFile", folder=tmp_path / "weights") for _ in range(2)]
    weights = {"a": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.bfloat16)}
    rows = [(TensorInfo(name, tuple(t.shape), str(t.dtype), "digest"), t) for name, t in weights.items()]
    manifest, route = ends[0].publish(asyncio.run(ends[0].plan_route(None, [])), 1, rows)
    came = dict(ends[1].receive(route, manifest, {}))
    assert manifest.version == 1 and all(torch.equal(came[name], t) for name, t in weights.items())


@pytest.mark.slow
def test_a_run_sends_its_weights_by_a_transport_of_yours(tmp_path):
    run(tmp_path, place__kind="split", sync__kind="my_transport:OneFile", **FEW)
    assert [e["version"] for e in events(tmp_path, "Synced")][-1] == 2
    assert (tmp_path / "weights" / "newest.pt").is_file()


TRANSPORTS = {
    "no verbs": ("theirs:Empty", r"'theirs:Empty' has no method plan_route\(trainer, engines\); add it"),
    "no choice of when": ("theirs:Odd", r"holds of 'theirs:Odd' is None; set it to one of never, begin, commit"),
    "no such name": ("my_transport:TwoFiles", r"my_transport has no 'TwoFiles'"),
    "a value": ("math:pi", r"is 3.14159.*, and no function or class"),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_that_cannot_be_is_refused_early(tmp_path, name):
    verbs = "plan_route(self, trainer, engines)", "publish(self, route, version, weights)", "send(self, route, weights)"
    verbs += "receive(self, route, manifest, mine)", "close(self)"
    body = "".join(f"    def {verb}: pass\n" for verb in verbs)
    write_module(tmp_path, f"class Empty: pass\nclass Odd:\n{body}")
    kind, match = TRANSPORTS[name]
    with pytest.raises(ConfigError, match=match):
        transport_of(kind, folder=tmp_path)


# -- keys of earlier versions ------------------------------------------------------------------------


def test_a_folder_of_an_earlier_version_is_read(tmp_path):
    """Its job.toml names every key; those that were not set are no settings."""
    (tmp_path / "job.toml").write_text(
        '[model]\npath = "x"\n[model.adapter]\nkind = "lora"\ndropout = 0.0\n[loop]\nsteps = 1\n[run]\nfolder = "x"\n'
        'metrics_port = 9464\ntraces = ""\nsinks = ["csv"]\n[trainer]\nkind = "fsdp"\n[task]\nenv = "tools"\n'
        'data = { kind = "digits" }\nreward = "number"\nsuffix = "!"\nexamples = []\ntools = ["calculator"]\nturns = 3\n'
        "tool_timeout = 30.0\nagents = []\nagent_timeout = 600.0\nreward_timeout = 5.0\nreward_workers = 1\n"
        "max_failures = 0.2\npatience = 0.0\n[task.eval]\ntemperature = 0.5\nsampling = { top_p = 0.9 }\n"
    )
    job = Job.read(tmp_path / "job.toml")
    assert job.task.env == {"kind": "tools", "suffix": "!", "tools": ["calculator"], "turns": 3}
    assert job.task.reward == {"kind": "number", "timeout": 5.0, "max_failures": 0.2}
    assert job.task.reward_spec == "number" and job.task.reward_calls.timeout == 5.0
    assert job.task.eval.sampling == {"temperature": 0.5, "top_p": 0.9}
    assert job.run.sinks == ["csv", {"kind": "prometheus", "port": 9464}]
