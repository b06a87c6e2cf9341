"""Every benchmark but the longest runs, as small as it goes, and ends with one JSON
object: what figures are quoted from must not rot.
"""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path

import pytest

from kits import forked
from kits.runs import run
from kits.sweeps import covering

HERE = Path(__file__).parents[2] / "benchmarks"
TINY = " ".join(
    f"--set {change}"
    for change in (
        "model.path.hidden_size=32", "model.path.intermediate_size=64", "model.path.num_hidden_layers=2", "place.threads=1",
        "loop.groups_per_step=2", "algo.group_size=2", "loop.warmup.groups_per_step=2",
    )
)  # fmt: skip
SMALL = {
    "activations": "--model {model} --tokens 32 --recompute layers --activations disk --case",
    "controller": "--rollouts 200 --hours 1",
    "dashboard": "--events 1000 --repeat 1",
    "decode": "--model {model} --running 1 --new 4 --rounds 1 --profile 0 --threads 1 --eager",
    "engine_ranks": "--families llama --speed {model} --running 2 --new 4 --rounds 1",
    "long_answers": "--tokens 20000 --samples 2 --steps 1 --ranks 2",
    "families": "--families lfm2 --steps 2 --warmup 2 --rollout lfm2 --prompt 16 --new 2 --groups 1 --group 2 --rounds 1 "
    "--set loop.groups_per_step=2 --set algo.group_size=2 --set loop.warmup.groups_per_step=2",
    "formats": f"--formats int4,engine:fp8:encoded --seeds 1 --steps 2 --warmup 2 {TINY}",
    "gae": "--samples 2 --tokens 64 --repeat 1",
    "generate": "--model {model} --groups 1 --group 2 --repeat 1 --work equal --eager",
    "gpu": "--size tiny --running 1,2 --context 8 --new 4 --rounds 1 --prompt 16",
    "kernels": "--size tiny --rounds 1 --only gate fp8",
    "memory": f"{HERE.parent}/recipes/tiny.toml --loop.steps=1 --loop.warmup.steps=1 {TINY.replace('--set ', '--')}",
    "mesh": "--meshes pp=2 --families llama --rows grpo --groups 1 --samples 2",
    "parity": "--model {model} --prompts 1 --samples 1 --new 4",
    "placements": f"--placements split-colocate --rounds 1 --steps 3 --tokens 4 --hidden 32 {TINY}",
    "plan": "--steps 2",
    "precision": "--model {model} --modes rounded engine:int4:encoded --prompts 1 --samples 2 --new 4 --steps 1 --running 1 --rounds 1",
    "process_rewards": "--answers 2 --new 24 --hidden 32 --layers 2 --latency 0.01 --pairs 1 --cases 'judge at once'",
    "prefix": "--model {model} --prompt 16 --completion 4 --group 2 --repeat 1",
    "rewards": "--calls 50 --repeat 1",
    "sandbox": "--calls 2",
    "sandboxes": "--boxes 2 --kinds namespaces",
    "rows": f"--rows grpo --seeds 1 --steps 2 --warmup 2 {TINY}",
    "simulated": f"--rounds 1 --steps 2 --staleness 0 --groups 2 --tokens 4 --hidden 32 {TINY}",
    "speculative": "--model {model} --kind copy --running 1 --new 8 --pairs 1",
    "staleness": f"--rows decoupled --bounds auto --staleness 1 --seeds 1 --steps 2 --final 2 --warmup 2 {TINY}",
    "static_shapes": f"--steps 2 --rounds 1 --micro 32 {TINY} --set engine.sampling.max_tokens=2",
    "step": "--model {model} --prompts 1 --group 2 --new 4 --steps 2",
    "sync_overlap": f"--hidden 32 --layers 2 --tokens 4 --pairs 2 --block 2 {TINY}",
    "tails": f"--rounds 1 --steps 4 --staleness 1 {TINY} --set engine.sampling.max_tokens=16",
    "telemetry": f"--steps 2 --set loop.warmup.steps=2 {TINY}",
    "transports": "--size 1m --kinds ipc --updates 1",
    "wal": "--blocks 4",
    "weight_parts": "--mesh shards=2 --hidden 64 --layers 2 --pairs 1",
}
PROCESSES = {  # more interpreters, which import torch, and what the compiler has to do: `make sweeps`
    "adapters": "--model {model} --clients 2 --steps 1 --samples 2 --new 4 --threads 1",
    "contention": "--model {model} --pairs 1 --prompts 1 --group 2 --new 4",
    "engine_ranks, requests apart": "--requests-apart --families mixtral",
    "engine_ranks, pictures": "--pictures 2 --running 1 --new 4 --rounds 1",
    "overlap": f"--rounds 1 --steps 4 --tokens 4 --clock 0.02 --hidden 32 {TINY}",
    "mesh, in turn": "--meshes tp=2 tp=2,overlap=true --families llama --rows grpo --groups 1 --samples 2 --pairs 1",
    "activations, each case apart": "--model {model} --tokens 32 --recompute layers --activations disk",
    "decode, compiled": "--model {model} --running 1 --new 4 --rounds 1 --profile 0 --threads 1",
    "process_rewards, by a model": "--answers 2 --new 24 --hidden 32 --layers 2 --latency 0.01 --pairs 1 --cases model",
}
# the harness of whole runs, that of ranks, and what takes a part of a second: "decode", "parity", "prefix" and "speculative" have an
# engine and a model. The others run through one of these, or do what has tests of its own (activations, transports, a dashboard's
# pages, a controller's memory), and take seconds each: `make sweeps`
CHOSEN = {"rows", "mesh", "decode", "gae", "parity", "prefix", "rewards", "speculative", "wal"}
ELSEWHERE = {
    "chaos": "minutes; by hand",
    "control": "tests/e2e/test_control.py runs it on one seed, among the sweeps",
    "flows": "tests/e2e/test_flows.py asks it about a run",
    "kill_resume": "tests/laws/test_law_09_resume.py runs it among the sweeps",
    "mesh_kills": "tests/e2e/test_chaos.py makes two",
    "repository_kills": "tests/units/test_repository_kills.py runs a smaller one",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny one with its tokenizer, as a run leaves it."""
    folder = tmp_path_factory.mktemp("model")
    run(
        folder,
        loop__warmup__steps=1,
        loop__steps=0,
        model__path__max_position_embeddings=2048,
        model__path__vocab_size=400,
        model__path__num_hidden_layers=1,
    )
    return max((folder / "checkpoints").glob("step-*"))


def test_all_are_named():
    named = SMALL.keys() | ELSEWHERE.keys() | {name.partition(",")[0] for name in PROCESSES}
    assert {p.stem for p in HERE.glob("[!_]*.py")} == named


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL.keys() - CHOSEN))
def test_what_is_left_to_the_sweeps_is_imported(name, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    assert callable(importlib.import_module(name).main)


@pytest.mark.slow
@pytest.mark.parametrize("name", covering([*SMALL, *PROCESSES], CHOSEN))
def test_it_runs(name, model):
    words = shlex.split((SMALL | PROCESSES)[name].format(model=model))
    done = forked.run(["bench", name.partition(",")[0], *words, "--json"])
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(told, dict)
    if name == "mesh":  # the other axes are in test_mesh.py
        cell = told["pp=2"]["llama grpo"]
        assert cell["moved"] == pytest.approx(cell["formula"], rel=0.01)
    if name == "controller":  # of 4,900 samples: if they stayed, it would be 40 MB and more
        assert told["samples"] > 4500 and told["rss_mb_per_hour"] < 15
    if name == "placements":
        [run] = told.values()
        assert run["issued"] == run["trained"] == 6 and run["unaccounted"] == 0
        assert all(0 <= run[name] <= 1 for name in ("place_0", "place_1", "engine", "trainer", "reward_model"))
