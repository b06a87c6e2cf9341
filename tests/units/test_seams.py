"""What a recipe names as "module:name": made with its settings, run, and refused early where it cannot be."""

from __future__ import annotations

import ast
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from kits.runs import events, run, tiny
from rondel.algos.scored_samples import ScoredSamples
from rondel.assemble import build
from rondel.assemble.components import judge_of
from rondel.assemble.rows import rows_of
from rondel.core import protocols
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Group, Sampling, Score, Task, TensorInfo, Trajectory
from rondel.driver.rollouts import batch_function
from rondel.runtime.journal import store
from rondel.sync import transport_of
from rondel.train.pack import batch_of

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


@pytest.mark.slow
def test_an_environment_is_made_with_the_settings_of_its_table(tmp_path):
    parts = build(tiny(tmp_path / "run", task__env={"kind": "my_env:SecondThought", "hint": "Once more."}, **FEW))
    parts.close()
    assert parts.env.hint == "Once more."


@pytest.mark.slow
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
    "a run that is not async": (
        {"kind": "theirs:Waits"},
        r"run of 'theirs:Waits' is not async.* async def run\(task, chat\)",
    ),
    "a function that is not async": ("theirs:ask", r"ask of 'theirs:ask' is not async.* async def ask\(task, chat\)"),
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
        "class Waits:\n    def run(self, task, chat): pass\n"
        "def ask(task, chat): pass\n"
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


# -- task.filters, algo.shaping, algo.batch ----------------------------------------------------------


def group_of(*rewards: float) -> Group:
    done = [Trajectory(score=Score(reward)) for reward in rewards]
    return Group(0, Task("t", "single_turn", {}), done, 0)


def judged(tmp_path, entry, *rewards: float):
    job = tiny(tmp_path / "run", task__filters=[entry], **FEW)
    return judge_of(job, rows_of(job))(group_of(*rewards))


def test_a_filter_is_made_with_its_settings(tmp_path):
    entry = {"kind": "my_filter:TooEasy", "above": 0.6}
    assert judged(tmp_path, entry, 1.0, 0.5).reason == "too easy" and judged(tmp_path, entry, 0.5, 0.5).keep
    assert judged(tmp_path, "my_filter:TooEasy", 1.0, 0.5).keep, "the bound is 0.9 unless set"


def test_a_filter_may_be_a_function(tmp_path):
    write_module(
        tmp_path,
        "from rondel.core.types import Verdict\n"
        "def small(group, most=3): return Verdict(len(group.rewards) <= most, 'large')\n",
    )
    assert judged(tmp_path, "theirs:small", 1.0, 0.0).keep
    assert judged(tmp_path, {"kind": "theirs:small", "most": 1}, 1.0, 0.0).reason == "large"


def test_a_filter_that_returns_no_verdict_is_told(tmp_path):
    write_module(tmp_path, "def odd(group): return True\n")
    with pytest.raises(ConfigError, match=r"'theirs:odd' returned True; return a Verdict\(keep, reason\)"):
        judged(tmp_path, "theirs:odd", 1.0, 0.0)


FILTERS = {
    "an unknown setting": ({"kind": "my_filter:TooEasy", "abvoe": 1.0}, r"no setting 'abvoe'. Did you mean 'above'\?"),
    "no call": ("theirs:Empty", r"has no method __call__\(group\); add it"),
    "a function of nothing": ("theirs:nothing", r"is called as f\(group\), and cannot be"),
    "a setting of ours that is none": ({"kind": "repetition", "sahre": 0.5}, r"'repetition' has no setting 'sahre'"),
    "no kind": ({"above": 0.5}, r"filter '' does not exist"),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_that_cannot_be_is_refused_early(tmp_path, name):
    write_module(tmp_path, "class Empty: pass\ndef nothing(): pass\n")
    entry, match = FILTERS[name]
    with pytest.raises(ConfigError, match=match):
        judged(tmp_path, entry, 1.0, 0.0)


def test_rewards_are_shaped_by_a_component_of_yours(tmp_path):
    job = tiny(tmp_path / "run", algo__shaping={"kind": "my_shaping:PerToken", "price": 0.1}, **FEW)
    rewards = torch.tensor([1.0, 0.0])
    scored = ScoredSamples(rewards, torch.tensor([0, 0]), torch.tensor([3, 5]))
    assert torch.allclose(rows_of(job).main.shaping(scored), torch.tensor([0.7, -0.5]))
    with pytest.raises(ConfigError, match=r"algo.shaping.prize: PerToken has no such knob. Did you mean 'price'"):
        rows_of(tiny(tmp_path / "run", algo__shaping={"kind": "my_shaping:PerToken", "prize": 0.1}, **FEW))


@pytest.mark.slow
def test_a_run_trains_what_is_left_of_its_batch(tmp_path):
    """Filter, shaping and batch of the examples in one run: answers of one token are not trained."""
    run(
        tmp_path,
        task__filters=[{"kind": "my_filter:TooEasy", "above": 2.0}],
        algo__shaping={"kind": "my_shaping:PerToken"},
        algo__batch="my_batch:without_short",
        **FEW,
    )
    rows = [row for step in (1, 2) for row in store.read_step(tmp_path, step)]
    lengths = {sum(row["mask"]): any(row["trainer_logprobs"]) for row in rows}
    assert len(rows) > 8 and all(trained for n, trained in lengths.items() if n > 1) and not lengths.get(1, False)


BATCHES = {
    "no such name": ("my_batch:without_long", r"my_batch has no 'without_long'"),
    "no module": ("without_short", r"algo.batch 'without_short' does not exist"),
    "a function of nothing": ("theirs:nothing", r"is called as f\(batch\), and cannot be"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_function_that_cannot_be_is_refused_early(tmp_path, name):
    write_module(tmp_path, "def nothing(): pass\n")
    kind, match = BATCHES[name]
    with pytest.raises(ConfigError, match=match):
        build(tiny(tmp_path / "run", algo__batch=kind, **FEW))


def test_a_batch_function_returns_a_batch(tmp_path):
    write_module(tmp_path, "def names(batch): return ['a']\ndef none(batch): batch.samples = []; return batch\n")
    for name, match in (("names", "returned a list; return a TrainBatch"), ("none", "a batch without samples")):
        with pytest.raises(DataError, match=match):
            batch_function(tiny(tmp_path / "run", algo__batch=f"theirs:{name}", **FEW))(batch_of([]))


# -- engine.kind -------------------------------------------------------------------------------------


class Gateway(BaseHTTPRequestHandler):
    """Answers as SGLang under /llm does."""

    def do_GET(self):
        self.answer({"data": [{"max_model_len": 32768}], "weight_version": "3"})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "stop"}, "prompt_tokens": 2}
        self.answer({"text": "x", "meta_info": meta})

    def answer(self, told):
        body = json.dumps(told).encode()
        self.send_response(200 if self.path.startswith("/llm/") else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


@pytest.mark.slow
def test_an_engine_of_yours_draws_tokens():
    import asyncio

    import my_engine

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        driver = my_engine.BehindGateway(f"http://127.0.0.1:{server.server_port}/")
        assert driver.open(Sampling()) == 8192
        drawn = asyncio.run(driver.draw_tokens([1, 2], [], Sampling(), 0, None))
        server.shutdown()
    assert (drawn.tokens, drawn.logprobs, drawn.finish) == ([7], [-0.5], "stop")


ENGINES = {
    "methods that are missing": ("theirs:Half", r"'theirs:Half' has no .*score.*; add what is missing: ServerDriver"),
    "a constructor without url": ("theirs:NoUrl", r"is called as f\(url\), and cannot be"),
    "no such name": ("my_engine:Behind", r"my_engine has no 'Behind'"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_cannot_be_is_refused_early(tmp_path, name):
    write_module(
        tmp_path,
        "import my_engine\nclass Half:\n    name = 'half'\n    def open(self, sampling): pass\n"
        "class NoUrl(my_engine.BehindGateway):\n    def __init__(self): pass\n",
    )
    kind, match = ENGINES[name]
    with pytest.raises(ConfigError, match=match):
        build(tiny(tmp_path / "run", engine__kind=kind, engine__url="http://127.0.0.1:9", place__kind="split", **FEW))


def test_every_example_of_a_seam_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("my_*.py")}
    assert {name: n for name, n in lines.items() if n > 30} == {}


def test_no_contract_holds_any():
    """What crosses a seam has a type of its own, a type parameter, or nothing is known of it (object)."""
    source = Path(protocols.__file__).read_text(encoding="utf-8")
    assert "Any" not in {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


# -- keys of earlier versions ------------------------------------------------------------------------


def test_a_folder_of_an_earlier_version_is_read(tmp_path):
    """Its job.toml names every key; those that were not set are no settings."""
    (tmp_path / "job.toml").write_text(
        '[model]\npath = "x"\n[model.adapter]\nkind = "lora"\ndropout = 0.0\n[loop]\nsteps = 1\n[run]\nfolder = "x"\n'
        'metrics_port = 9464\ntraces = ""\nsinks = ["csv"]\n[trainer]\nkind = "fsdp"\noffload = true\n[task]\nenv = "tools"\n'
        'data = { kind = "digits" }\nreward = "number"\nsuffix = "!"\nexamples = []\ntools = ["calculator"]\nturns = 3\n'
        "tool_timeout = 30.0\nagents = []\nagent_timeout = 600.0\nreward_timeout = 5.0\nreward_workers = 1\n"
        "max_failures = 0.2\npatience = 0.0\n[task.eval]\ntemperature = 0.5\nsampling = { top_p = 0.9 }\n"
    )
    job = Job.read(tmp_path / "job.toml")
    assert job.task.env == {"kind": "tools", "suffix": "!", "tools": ["calculator"], "turns": 3}
    assert job.task.reward == {"kind": "number", "timeout": 5.0, "max_failures": 0.2}
    assert job.task.reward_spec == "number" and job.task.reward_calls.timeout == 5.0
    assert job.task.eval.sampling == {"temperature": 0.5, "top_p": 0.9}
    assert job.trainer.memory.offload and job.trainer.memory.recompute == "none"
    assert job.run.sinks == ["csv", {"kind": "prometheus", "port": 9464}]
