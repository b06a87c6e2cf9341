"""Several held-out sets with several draws: in training, on the command line, on the page; and the best checkpoint."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace

import pytest

from kits.run_folder import evaluated
from kits.runs import events, run, run_and_die, tiny
from rondel.core.errors import ConfigError, DataError, UserError
from rondel.driver.best_checkpoint import BestCheckpoint
from rondel.generate.envs.sources import load_evaluation_sets, load_tasks
from rondel.runtime.telemetry.metrics import StepMetrics
from rondel.system.run_weights import find_run_weights
from rondel.train.checkpoint import Checkpoints

ROWS = [{"prompt": "1 + 1 + 1 =", "answer": "3"}, {"prompt": "0 + 2 + 2 =", "answer": "4"}]
SETS = {"threes": {"kind": "list", "rows": ROWS}}
DRAWS = {
    "task__eval__samples": 4,
    "task__eval__sets": SETS,
    "task__eval__n": 6,
    "loop__steps": 3,
    "task__eval__every": 1,
}


def best_of(folder):
    return json.loads((folder / "checkpoints" / "best.json").read_text())


BEST = {**DRAWS, "run__checkpoint__best": "eval/score", "run__checkpoint__keep": 1, "loop__warmup__steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, **BEST)
    return folder


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run that keeps its best checkpoint, among others
def test_a_killed_run_keeps_the_same_best_checkpoint(whole, tmp_path):
    assert run_and_die(tmp_path / "cut", ("StepDone", 4), **BEST) == -9
    run(tmp_path / "cut", **BEST)
    assert best_of(tmp_path / "cut") == best_of(whole)


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoint(whole, capsys):
    """eval and the run compute the same numbers."""
    from rondel.cli import main

    told = [e for e in events(whole, "Evaluated")]
    assert [e["profile"] for e in told[:2]] == ["held_out", "threes"] and told[0]["draws"] == 4
    scores = {e["step"]: e["score"] for e in told if e["profile"] == "held_out" and e["step"]}
    best = best_of(whole)
    assert best["value"] == max(scores.values()) == scores[best["step"]]
    assert best["step"] == min(step for step, score in scores.items() if score == best["value"])  # the first of equals
    assert {p.name for p in (whole / "checkpoints").glob("step-*")} == {f"step-{s:06d}" for s in {best["step"], 5}}

    with pytest.raises(SystemExit) as ended:
        main(["eval", str(whole), "--best", "--json", "--k", "1,4", "--set", 'more={ kind = "digits" }'])
    assert ended.value.code == 0
    result = json.loads(capsys.readouterr().out)
    then = [e for e in told if e["step"] == best["step"]]
    assert (result["score"], result["step"]) == (best["value"], best["step"])
    assert result["metrics"]["pass@4"] == then[0]["metrics"]["pass@4"] and "pass@2" not in result["metrics"]
    assert [other["profile"] for other in result["sets"]] == ["threes", "more"]
    assert result["sets"][0]["score"] == then[1]["score"]
    page = (whole / "evaluations" / f"step-{best['step']:06d}.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page and page.count("<h2>") == 3
    for picture in re.findall(r"<svg.*?</svg>", page, re.S):
        from xml.etree import ElementTree

        ElementTree.fromstring(picture)


@pytest.mark.slow
def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(whole, tmp_path):
    """SIGTERM in the middle of it: the step is in a checkpoint, so the resumed run has to evaluate it, or never would."""
    told = [(e["step"], e["profile"], e["score"]) for e in events(whole, "Evaluated")]
    of_each = sum(e["n"] * e["draws"] + 1 for e in events(whole, "Evaluated") if e["step"] == 0)
    moment = ("Evaluating", of_each + 2)  # the first answer of the second evaluation
    assert run_and_die(tmp_path / "cut", moment, signal.SIGTERM, **BEST) == 128 + signal.SIGTERM
    before = events(tmp_path / "cut", "Evaluated")
    assert {e["step"] for e in before} == {0} and events(tmp_path / "cut", "Checkpointed")[-1]["step"] == told[2][0]
    run(tmp_path / "cut", **BEST)
    assert [(e["step"], e["profile"], e["score"]) for e in events(tmp_path / "cut", "Evaluated")] == told
    assert best_of(tmp_path / "cut") == best_of(whole)


def test_a_run_takes_every_key_of_an_evaluation_with_several_draws(tmp_path):
    given = {"task__eval__k": [2], "task__eval__pass_reward": 0.5, "task__eval__samples": 2, "task__eval__n": 2}
    run(tmp_path / "run", **given, loop__warmup__steps=0, loop__steps=1)
    assert {*events(tmp_path / "run", "Evaluated")[-1]["metrics"]} >= {"avg@2", "pass@2"}


def test_metrics_of_several_sets():
    rows = []
    metrics = StepMetrics(lambda step, row: rows.append(row))
    one = evaluated(2, 2, 0.5)
    metrics.on_event(replace(one, metrics={"pass@4": [0.75, 0.6, 0.9]}))
    metrics.on_event(replace(one, profile="aime", score=0.25, low=0.2, high=0.3))
    assert rows[0]["eval/score"] == 0.5 and rows[0]["eval/greedy/pass@4"] == 0.75
    assert rows[1] == {"eval/aime/score": 0.25, "eval/aime/low": 0.2, "eval/aime/high": 0.3}


def test_a_set_takes_its_content_from_training():
    tasks = load_tasks({"kind": "digits", "holdout": 10}, env="single_turn")
    table = {"kind": "list", "rows": [{"prompt": tasks.train[0].data["prompt"], "answer": "2"}]}
    cleaned = load_evaluation_sets({"a": table}, tasks, env="single_turn")
    assert cleaned.leaked == tasks.leaked + 1 and len(cleaned.train) == len(tasks.train) - 1
    assert len(cleaned.evaluated) == len(tasks.held_out) + 1
    assert len(load_evaluation_sets({"a": table}, tasks, env="single_turn", trains=False).train) == len(tasks.train)
    with pytest.raises(DataError, match="nothing to train on"):
        load_evaluation_sets({"a": {"kind": "digits"}}, tasks, env="single_turn")
    with pytest.raises(ConfigError, match="needs a kind"):
        load_evaluation_sets({"a": {}}, tasks, env="single_turn")
    with pytest.raises(ConfigError, match="has no meaning"):
        load_evaluation_sets({"a": {"kind": "digits", "holdout": 3}}, tasks, env="single_turn")


def test_a_fault_of_a_set_is_told_of_the_set():
    """And not of task.data, which is read in the same way."""
    tasks = load_tasks({"kind": "digits", "holdout": 10}, env="single_turn")
    for table, key in (
        ({"kind": "list", "rows": [], "env": "tools"}, "env is no setting of kind 'list'"),
        ({"kind": "lst"}, "kind 'lst' does not exist"),
        ({"kind": "list"}, "rows is missing"),
    ):
        with pytest.raises(ConfigError, match=rf"task.eval.sets.sums.{key}") as error:
            load_evaluation_sets({"sums": table}, tasks, env="single_turn")
        assert "task.data" not in str(error.value) and error.value.page


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run__checkpoint__best": "eval/scor"}, "eval/score"),
        ({"run__checkpoint__best": "eval/held_out/pass@3", **DRAWS}, "eval/held_out/pass@2"),
        ({"run__checkpoint__best": "eval/score", "task__data__holdout": 0}, "no tasks are held out"),
    ],
)
def test_a_best_metric_that_no_evaluation_brings_is_refused(tmp_path, changes, why):
    from rondel.driver.best_checkpoint import refuse_unknown_metric

    job = tiny(tmp_path, **changes)
    sets = ["held_out", *job.task.eval.sets] if job.task.data["holdout"] else []
    with pytest.raises(ConfigError, match=why):
        refuse_unknown_metric(job.run.checkpoint.best, sets, job.task.eval)


def test_the_best_goes_only_when_a_better_one_is_whole(tmp_path):
    store = Checkpoints(tmp_path, 1, keeps_best=True)
    best = BestCheckpoint("eval/score", ["greedy"], store)
    for step, score in ((0, 0.9), (1, 0.2), (2, 0.5), (3, 0.5), (4, 0.1)):
        best.note_evaluation(evaluated(step, step, score))
        best.note_evaluation(replace(evaluated(step, step, 1.0), profile="other"))
        assert best.improved_at(step) == (step in (1, 2))
        best.state_at(step)
    assert best.best == {"step": 2, "metric": "eval/score", "value": 0.5} and store.pinned == 2
    best.publish()
    best.restore(best.best)  # its folder is not there
    assert best.best is None and not (tmp_path / "best.json").exists() and store.pinned is None


def test_which_weights_a_word_means(tmp_path):
    assert find_run_weights("smollm2-135m").model == "smollm2-135m"
    (tmp_path / "job.toml").write_text("")
    with pytest.raises(UserError, match="has no checkpoint yet; train it first"):
        find_run_weights(str(tmp_path))
    for step in (4, 12):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"step": step}))
    assert find_run_weights(str(tmp_path)).step == 12 == find_run_weights(str(folder)).step
    assert find_run_weights(str(folder)).run == tmp_path
    with pytest.raises(UserError, match="keeps no best checkpoint"):
        find_run_weights(str(tmp_path), best=True)
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": 4}')
    assert find_run_weights(str(tmp_path), best=True).model.endswith("step-000004")
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": 5}')
    with pytest.raises(UserError, match="names step 5, whose checkpoint is gone"):
        find_run_weights(str(tmp_path), best=True)
    with pytest.raises(UserError, match="is no run folder"):
        find_run_weights("smollm2-135m", best=True)


def test_words_of_the_command_line():
    from rondel.cli.eval import _parse_numbers, _parse_set
    from rondel.cli.serve import _parse_model

    assert _parse_set("a={ kind = 'digits' }") == ("a", {"kind": "digits"})
    assert _parse_set("a=x.jsonl")[1]["kind"] == "jsonl"
    for words in ("a", "a=", "a=x.txt", "a={"):
        with pytest.raises(UserError, match="--set"):
            _parse_set(words)
    with pytest.raises(UserError, match="--k 1,x"):
        _parse_numbers("1,x")
    assert _parse_model("smollm2-135m") == "smollm2-135m" and _parse_model("{ random = 'llama' }") == {
        "random": "llama"
    }


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        ([[{"role": "user", "content": "hi"}]], r"chat messages.*Use engine\.chat\(conversations\)"),
        ([{"role": "user", "content": "hi"}], r"chat messages.*Use engine\.chat\(\[messages\]\)"),
        ([["a", "b"]], "text or a list of token ids"),
        ([None], "is neither"),
        ([[1.5]], "is neither"),
    ],
)
def test_prompts_that_are_no_prompts_are_named(prompts, why):
    from rondel.generate.engine.notebook import check_prompts

    with pytest.raises(UserError, match=why):
        check_prompts(prompts)
