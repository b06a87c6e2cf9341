"""A pipeline file becomes whole recipes in an order in which they can run, or one error before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondel.core.errors import ConfigError, UserError
from rondel.pipeline.pipeline_file import order_stages, overlay, read_pipeline
from rondel.pipeline.pipeline_plan import plan_pipeline, plan_table, schedule_stages
from rondel.pipeline.preflight import check_pipeline
from rondel.planner.plan import make_plan

ROOT = Path(__file__).parents[2]
BASE = """
folder = "out"
[shared]
model = "stage:start"
task = { data = { kind = "digits", holdout = 10 }, reward = "number" }
loop = { steps = 2, groups_per_step = 4 }
[stages.exam]
kind = "eval"
model = "stage:student"
[stages.student]
algo = { kind = "opd", group_size = 4 }
model = { path = "stage:start", teacher = [{ path = "stage:math", source = "single_turn" }] }
[stages.math]
loop = { steps = 3 }
algo = { group_size = 4 }
[stages.start]
recipe = "start.toml"
model = { path = { random = "llama", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4 } }
loop = { warmup = { steps = 5 } }
"""
START = """
[model]
path = "somewhere"
[task.data]
kind = "jsonl"
path = "rows.jsonl"
[loop]
passes = 2
[trainer]
lr = 3e-3
[run]
folder = "elsewhere"
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.toml").write_text(START)

    def read_text(text: str = BASE, **overrides):
        (tmp_path / "p.toml").write_text(text)
        return read_pipeline("p.toml", {key.replace("__", "."): value for key, value in overrides.items()})

    return read_text


def test_stages_are_whole_recipes_in_an_order_that_can_run(read):
    found = read(parallel=3, stages__math__trainer__lr=0.5)
    assert list(found.stages) == ["start", "math", "student", "exam"] and found.parallel == 3
    start, math, student, exam = found.stages.values()
    assert start.job.trainer.lr == 3e-3 and start.job.loop.steps == 2 and start.job.loop.passes is None
    assert start.job.task.data == {"kind": "digits", "holdout": 10}, "a table of another kind replaces the whole one"
    assert start.steps == 7 and math.steps == 3 and math.job.trainer.lr == 0.5
    assert math.inputs == ("start",) and student.needs == ("start", "math") and exam.needs == ("student",)
    assert student.job.run.folder == "out/student" and start.origin == Path("start.toml")
    assert exam.job.task.data == student.job.task.data and exam.job.algo.kind == "grpo" and not exam.job.model.teachers
    resolved = student.resolve(lambda name: f"runs/{name}")["model"]
    assert resolved["path"] == "runs/start" and resolved["teacher"][0]["path"] == "runs/math"
    assert found.dependents({"math"}) == {"math", "student", "exam"}
    check_pipeline(found)


def test_tables_are_laid_over_each_other():
    under = {"a": 1, "b": {"kind": "x", "n": 2, "m": {"k": 1}}, "c": {"random": "llama", "size": 4}, "d": {"e": 1}}
    over = {"b": {"kind": "y", "p": 3}, "c": {"size": 8}, "d": "text"}
    assert overlay(under, over) == {
        "a": 1,
        "b": {"kind": "y", "p": 3},
        "c": {"random": "llama", "size": 8},
        "d": "text",
    }
    assert overlay(under, {"b": {"m": {"j": 2}}})["b"] == {"kind": "x", "n": 2, "m": {"k": 1, "j": 2}}
    assert under["c"]["size"] == 4, "nothing is changed in place"


def test_the_order_is_that_of_the_file_where_it_can_be():
    needs = {"c": ("a",), "b": (), "a": (), "d": ("c", "b")}
    assert order_stages(Path("p"), needs) == ["b", "a", "c", "d"]
    with pytest.raises(ConfigError, match=r"a -> b -> a"):
        order_stages(Path("p"), {"a": ("b",), "b": ("a", "c"), "c": ()})


NO_TRAINING = "[stages.idle]\nloop = { steps = 0 }\nmodel = { path = 'gpt2' }"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"stage:math"', '"stage:maths"', r"stages.student needs the stage 'maths', .* Did you mean 'math'\?"),
        ("[stages.math]", '[stages.math]\nafter = ["exam"]', r"wait for each other: exam -> student -> math -> exam"),
        ("start.toml", "stort.toml", r"no recipe at stort.toml. Did you mean 'start.toml'\?"),
        ("[stages.math]", '[stages.math]\nrecipes = "x"', r"unknown key 'stages.math.recipes'. Did you mean 'recipe'\?"),
        ("{ steps = 3 }", "{ stepz = 3 }", r"p.toml: stages.math: unknown key 'loop.stepz'. Did you mean 'steps'\?"),
        ('"stage:math"', '"stage:exam"', r"wait for each other"),
        ("[stages.exam]", f"{NO_TRAINING}\n[stages.exam]\nafter = ['idle']", ""),
        ('path = "stage:math"', 'path = "runs/x/checkpoints/step-000003"', r"teacher\[0\].path = .* has not been trained"),
        ('path = "stage:math"', 'path = "runs/math"', r'or a stage, "stage:math"'),
        ('path = "stage:math"', 'path = { random = "llama" }', r"a teacher of random weights knows nothing"),
        ('source = "single_turn"', 'source = "sums"', r"stages.student: model.teacher\[0\].source = 'sums': no task has this"),
        ('kind = "opd"', 'kind = "grpo"', r"stages.student: model.teacher has no effect"),
        ("[stages.math]", "[stages.math]\nrun = { folder = 'x' }", r"the folder of a stage is out/math"),
        ("[stages.exam]", "[stages.exam]\nalgo = { kind = 'opd' }", r"stages.exam.algo has no effect"),
        ("[stages.exam]", "[stages.exam]\nloop = { seed = 1, steps = 3 }", r"stages.exam.loop.steps has no effect"),
        ('model = "stage:student"', 'model = { path = { random = "llama" } }\nrecipe = "start.toml"', r"exam.model is made of random"),
        ("[stages.math]", "[stages.logs]", r"cannot be called 'logs'"),
        ('reward = "number"', 'reward = "my:reward"', r"stages.start: .*my"),
        ("holdout = 10 }", "holdout = 0 }", r"stages.exam: it holds no tasks out"),
    ],
)  # fmt: skip
def test_faults_are_told_before_anything_runs(read, old, new, says):
    text = BASE.replace(old, new)
    assert text != BASE
    if not says:
        return check_pipeline(read(text)) and None
    with pytest.raises(UserError, match=says):
        check_pipeline(read(text))


@pytest.mark.parametrize(
    ("stage", "says"),
    [("idle", "idle trains nothing"), ("exam", "exam is an evaluation")],
)
def test_a_teacher_that_is_not_trained_is_refused(read, stage, says):
    text = BASE.replace('"stage:math"', f'"stage:{stage}"').replace('model = "stage:student"', 'model = "stage:math"')
    with pytest.raises(ConfigError, match=says):
        check_pipeline(read(f"{text}\n{NO_TRAINING}"))


def test_when_each_stage_could_begin():
    stages = {"a": ((), 2.0), "b": (("a",), 3.0), "c": (("a",), 4.0), "d": (("b", "c"), 1.0)}
    assert schedule_stages(1, stages) == {"a": 0.0, "b": 2.0, "c": 5.0, "d": 9.0}
    assert schedule_stages(2, stages) == {"a": 0.0, "b": 2.0, "c": 2.0, "d": 6.0}


def test_a_plan_has_the_planners_cost_of_each_stage(read):
    found = read(parallel=2)
    told = plan_pipeline(found, make_plan, ["hardware=h100"])
    rows = {row["name"]: row for row in told["stages"]}
    assert [row["steps"] for row in told["stages"]] == [7, 3, 2, None] and rows["math"]["hardware"] == "h100"
    assert rows["math"]["seconds"] == pytest.approx(3 * rows["math"]["step_seconds"])
    assert rows["student"]["memory"] > rows["math"]["memory"], "its teacher lies beside it"
    assert told["seconds"] == pytest.approx(sum(row["seconds"] for row in told["stages"])), "each needs the one before"
    assert "one after" not in plan_table(told) and "student" in plan_table(told)


def test_the_recipe_that_comes_with_rondel_is_read(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    found = read_pipeline(ROOT / "recipes" / "pipelines" / "specialists.toml")
    assert list(found.stages) == ["start", "reverse", "ascend", "largest", "student", "exam"]
    assert [t.source for t in found.stages["student"].job.model.teachers] == ["reverse", "ascend", "largest"]
    assert all(len(tasks.held_out) >= 100 for tasks in check_pipeline(found).values())
