"""recipes/code.toml and recipes/repository.toml: what they ask can be done, what is wrong earns nothing, and a step runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kits.repositories import environment, needs_walls, read_by_policy, scripted_chat, the_task
from rondel.core.config.job import Job
from rondel.core.registry import import_attribute
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.repository.reader import load_task
from rondel.runtime.journal.store import read_step
from rondel.runtime.sandbox.box import Sandbox
from rondel.score.code import Code

ROOT = Path(__file__).parents[2]
TINY = {
    "model.path": {
        "random": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 1024,
    },
    "loop.steps": 1, "loop.groups_per_step": 1, "algo.group_size": 2, "engine.sampling.max_tokens": 4, "task.eval.n": 1,
    "task.data.holdout": 1, "place.threads": 1, "run.sinks": [], "trainer.micro_tokens": 4096,
}  # fmt: skip


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def make_repositories(folder, **settings):
    import_attribute("examples", "small_repositories:main")(folder, **settings)


LAZY = ("x", "-x", "abs(x)", "0", "1", "True", "False", "None", "x * x")  # of any number, whatever is asked


def passes(code, test):
    known = {}
    exec(code, known)
    try:
        exec(test, known)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
def test_no_lazy_answer_passes():
    for row in import_attribute("task.data", "functions:functions")():
        (test,) = row["tests"]
        assert passes(row["answer"], test)
        assert [lazy for lazy in LAZY if passes(f"def f(x): return {lazy}", test)] == [], row["answer"]


def test_no_lazy_line_mends_a_small_repository(tmp_path):
    make_repositories(tmp_path, n=40)
    for folder in tmp_path.iterdir():
        name, check = (folder / "statement.md").read_text().split()[0], (folder / "hidden" / "check.py").read_text()
        test = check.partition("\n")[2]
        assert [lazy for lazy in LAZY if passes(f"def {name}(x): return {lazy}", test)] == [], folder
        (added,) = (line[1:] for line in (folder / "gold.patch").read_text().splitlines() if line.startswith("+ "))
        assert passes(f"def {name}(x):\n{added}", test)


@pytest.mark.slow
@needs_walls
def test_functions_are_told_from_their_neighbours():
    rows = list(import_attribute("task.data", "functions:functions")())
    judge = Code(sandbox=Sandbox(), packages=[], credit="all")
    for i, row in enumerate(rows[::28]):
        task = Task(f"t{i}", "functions", row)
        assert judge(Trajectory(text=row["answer"]), task).value == 1.0
        other = next(r["answer"] for r in rows if r["answer"] != row["answer"])
        assert judge(Trajectory(text=other), task).value == 0.0
    assert len({row["prompt"] for row in rows}) == len(rows) == 169


@pytest.mark.slow
@needs_walls
def test_a_small_repository_is_mended_by_its_line_and_by_no_other(tmp_path):
    """The agent shows the policy the wrong line, and writes what it says; the hidden check decides."""
    pytest.importorskip("starlette")
    make_repositories(tmp_path / "tasks", n=1, seed=3)
    task = the_task(tmp_path / "tasks")
    own = load_task(task.data["repository"])
    removed, added = (
        next(line[1:].strip() for line in own.gold.splitlines() if line.startswith(f"{sign} ")) for sign in "-+"
    )
    env = environment(agent=["python3", "{files}/agent.py"], agent_files=ROOT / "examples" / "mender")
    for line, worth in ((added, 1.0), (removed, 0.0), ("return 0", 0.0)):
        talk, policy = scripted_chat(line)
        assert asyncio.run(env.run(task, talk)).score.value == worth
    text = read_by_policy(policy)
    assert text.count("Correct the last line:") == 2 and removed in text and added not in text


def test_no_two_small_repositories_have_the_same_function(tmp_path):
    make_repositories(tmp_path, n=30)
    added = [
        "".join(line for line in (folder / "gold.patch").read_text().splitlines() if line.startswith("+ "))
        for folder in tmp_path.iterdir()
    ]
    statements = {(folder / "statement.md").read_text() for folder in tmp_path.iterdir()}
    assert len(set(added)) == len(statements) == 30


@needs_walls
@pytest.mark.slow
@pytest.mark.parametrize("name", ["code", "repository"])
def test_one_step_of_the_recipe(name, tmp_path, monkeypatch):
    from rondel.assemble import train

    monkeypatch.chdir(ROOT)
    changes = TINY | {"run.folder": str(tmp_path / "run")}
    if name == "repository":
        pytest.importorskip("starlette")
        make_repositories(tmp_path / "tasks", n=3)
        changes["task.data.path"] = str(tmp_path / "tasks")
    train(Job.read(ROOT / "recipes" / f"{name}.toml", changes), quiet=True)
    assert [row["reward"] for row in read_step(tmp_path / "run", 1)] == [0.0, 0.0]
