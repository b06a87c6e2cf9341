"""Broken recipes, data and rewards: each one readable error with a remedy, no traceback, a
non-zero exit, nothing lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rondel.cli import main

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"
SMALL = [
    "--loop.warmup.steps=0",
    "--loop.steps=2",
    "--loop.groups_per_step=2",
    "--algo.group_size=2",
    "--run.sinks=[]",
    "--place.threads=1",
    "--loop.max_refills=1",
]


def say(capfd, *words: str) -> tuple[int, str]:
    """Run the command line; -> (exit code, what it said on stderr)."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code or 0, capfd.readouterr().err


def broken(capfd, tmp_path, *overrides: str, verb: str = "train", recipe: Path = TINY) -> str:
    code, err = say(capfd, verb, str(recipe), f"--run.folder={tmp_path / 'run'}", *SMALL, *overrides)
    assert code == 1, err
    assert "Traceback" not in err and "bug of ours" not in err
    (line,) = [row for row in err.splitlines() if row.startswith("error:")]
    return line


RECIPES = {
    "unknown key": (["--trainer.lrr=1e-5"], "unknown key 'trainer.lrr'. Did you mean 'lr'?"),
    "unknown section": (["--trianer.lr=1e-5"], "unknown key 'trianer'. Did you mean 'trainer'?"),
    "a string for a number": (["--trainer.lr='1e-5'"], "is a string; write the number without quotes"),
    "a float for a count": (["--loop.steps=2.5"], "loop.steps = 2.5"),
    "a negative rate": (["--trainer.lr=-1"], "greater than or equal to 0"),
    "a choice that does not exist": (["--loop.in_flight=hodl"], "'hold', 'drain' or 'abort'"),
    "a word that is no override": (["--loop.steps", "3"], "--section.key=value"),
    "an unknown algorithm": (["--algo.kind=grop"], "Did you mean 'grpo'?"),
    "an unknown knob": (["--algo.kind=grpo", "--algo.surrogate.hihg=0.3"], "Did you mean 'high'?"),
    "control tokens that no task spells": (
        ["--task.data.split_special_tokens=false"],
        "split_special_tokens = false has no effect",
    ),
    "a row whose demonstrations nobody gives": (["--algo.kind=luffy"], "set algo.guides = 1"),
    "demonstrations that nobody reads": (["--algo.guides=1"], "use kind = 'luffy'"),
    "a row without its teacher": (["--algo.kind=opd"], "name one with model.teacher"),
    "a teacher without a row": (['--model.teacher="somewhere"'], "model.teacher has no effect"),
    "a reference before the supervised phase": (
        ["--algo.kl.coef=0.1", "--loop.warmup.steps=2"],
        "algo.kl.coef with loop.warmup",
    ),
    "pairs scored by a reference before it": (
        ["--algo.kind=online_dpo", "--loop.warmup.steps=2"],
        "kind = 'online_dpo' with loop.warmup",
    ),
    "rewards beside rewards": (['--algo.beside=[{ kind = "grpo" }]'], "Use kind = 'sft'"),
    "a row of parts and a reward without": (["--algo.kind=gdpo"], "reads the parts of the reward, which are: none"),
    "a knob without effect": (["--algo.kl.kind=k2"], "coef"),
    "an unknown reward": (["--task.reward=nubmer"], "Did you mean 'number'?"),
    "a reward module that is not there": (["--task.reward=nowhere:grade"], "nowhere"),
    "an unknown environment": (["--task.env=single_trun"], "Did you mean 'single_turn'?"),
    "an unknown filter": (["--task.filters=['singal']"], "Did you mean 'signal'?"),
    "an unknown sink": (["--run.sinks=['tensorbord']"], "Did you mean 'tensorboard'?"),
    "a key that allowed one value": (["--trainer.kind=fsdp"], "'trainer.kind' is no key any more"),
    "a key that has moved": (["--task.turns=3"], 'in its place stands task.env = { kind = "tools", turns = ... }'),
    "an unknown setting of an environment": (
        ["--task.env.sufix=x"],
        "unknown key 'task.env.sufix'. Did you mean 'suffix'?",
    ),
    "an example that is held out": (
        ['--task.data={ kind = "digits", holdout = 54 }', '--task.env.examples=[{ prompt = "1+2=", answer = "3" }]'],
        "its evaluation would only read",
    ),
    "an example without its answer": (
        ['--task.env.examples=[{ prompt = "1+2=" }]'],
        "'task.env.examples.0.answer' is missing",
    ),
    "evaluations of nothing": (
        ['--task.data={ kind = "digits" }', "--task.eval.every=5"],
        "task.eval.every has no effect: no tasks are held out",
    ),
    "an unknown engine": (["--engine.kind=vlm"], "engine 'vlm' does not exist"),
    "an unknown kind of data": (["--task.data={ kind = 'josnl', path = 'x' }"], "Did you mean 'jsonl'?"),
    "greedy rollouts": (["--engine.sampling.temperature=0.0"], "Use 1.0"),
    "a truncation that leaves nearly all": (
        ["--engine.sampling.top_k=5000"],
        "top_k = 5000; at most 4096 are recorded for the trainer",
    ),
    "penalised sampling": (["--engine.sampling.repetition_penalty=1.1"], "repetition_penalty is not for training"),
    "a grammar in training": (
        ["--engine.sampling.grammar={ regex = '[0-9]+' }"],
        "task.eval.sampling = { grammar = ... }",
    ),
    "an unknown way to sample": (["--task.eval.sampling={ topp = 0.9 }"], "Did you mean 'top_p'?"),
    "an impossible way to sample": (
        ["--task.eval.sampling={ top_p = 'much' }"],
        "task.eval.sampling = {'top_p': 'much'}",
    ),
    "a regex that is none": (["--task.eval.sampling={ grammar = { regex = 'a(b' } }"], "invalid regex"),
    "a group of one": (["--algo.group_size=1"], "no baseline"),
    "a window that S = 0 forbids": (["--loop.window=3"], "leave it at 'auto'"),
    "a GPU that is not there": (["--place.device=cuda"], "rondel doctor"),
    "a model folder that is not there": (["--model.path=/nowhere/model"], "no model folder at /nowhere/model"),
    "an unknown model family": (["--model.path={ random = 'lama' }"], "lama"),
    "a family that cannot be carried": (["--model.path={ random = 'bloom' }"], "ALiBi"),
    "a cache smaller than a request": (["--engine.kv_pages=5"], "raise engine.kv_pages"),
    "a prompt longer than the context": (["--engine.sampling.max_tokens=62"], "exceeds the model's context"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(capfd, tmp_path, name):
    overrides, said = RECIPES[name]
    if name == "an unknown model family" and not torch_has_no_family("lama"):
        pytest.skip("transformers knows it now")
    line = broken(capfd, tmp_path, *overrides)
    assert said in line, line


def torch_has_no_family(kind: str) -> bool:
    from transformers import CONFIG_MAPPING

    return kind not in CONFIG_MAPPING


def recipe(tmp_path: Path, data: str) -> Path:
    """The tiny recipe on other data, none of which is held out."""
    text = TINY.read_text()
    line = next(row for row in text.splitlines() if row.startswith("data ="))
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(line, f"data = {data}").replace("eval = { every = 10 }\n", ""))
    return path


FILES = {
    "a data file that is not there": (None, "no file"),
    "empty data": ("", "empty"),
    "a line that is no JSON": ('{"prompt": "1", "answer": "1"}\n{"prompt": \n', ":2"),
    "a field that is missing": ('{"prompt": "1", "answr": "1"}\n', "answr"),
    "a prompt that is no text": ('{"prompt": 5, "answer": "1"}\n', "prompt"),
}


@pytest.mark.parametrize("name", FILES)
def test_data_files(capfd, tmp_path, name):
    content, said = FILES[name]
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    line = broken(
        capfd, tmp_path, recipe=recipe(tmp_path, f'{{ kind = "jsonl", path = "{tmp_path / "tasks.jsonl"}" }}')
    )
    assert said in line, line


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["--algo.kind=luffy", "--algo.guides=1"], "algo.guides"),
        (["--loop.warmup.steps=1"], "loop.warmup"),
        (["--algo.beside=[{ kind = 'sft' }]"], "algo.beside"),
    ],
)
def test_demonstrations_of_tasks_without_answers(capfd, tmp_path, overrides, key):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "3 + 4 =", "level": 1}\n{"prompt": "5 + 4 =", "level": 1}\n')
    data = f'{{ kind = "jsonl", path = "{tmp_path / "tasks.jsonl"}", answer = "" }}'
    line = broken(capfd, tmp_path, *overrides, recipe=recipe(tmp_path, data))
    assert f"{key}: task " in line and "has no 'answer' to show; it has: " in line and "level" in line, line


MOE = "--model.path={ random = 'qwen3_moe', hidden_size = 32, num_hidden_layers = 1, moe_intermediate_size = 32, num_experts = 4, num_experts_per_tok = 2, num_attention_heads = 4, num_key_value_heads = 2 }"


@pytest.mark.slow
@pytest.mark.parametrize("shown", [["--algo.kind=luffy", "--algo.guides=1"], ["--algo.beside=[{ kind = 'sft' }]"]])
def test_demonstrations_beside_a_mixture_of_experts_that_replays(capfd, tmp_path, shown):
    """They have no routes; without the replay the same recipe trains."""
    line = broken(capfd, tmp_path, MOE, *shown)
    assert "with routing replay" in line and "trainer.routing_replay = false" in line, line
    main_ok(
        capfd,
        "train",
        str(TINY),
        f"--run.folder={tmp_path / 'run'}",
        *SMALL,
        MOE,
        *shown,
        "--trainer.routing_replay=false",
        "--quiet",
    )


def test_files_that_are_no_recipes(capfd, tmp_path):
    (tmp_path / "recipe.toml").write_text("[model\n")
    assert "is not TOML" in broken(capfd, tmp_path, recipe=tmp_path / "recipe.toml")
    assert "Did you mean 'recipe.toml'?" in broken(capfd, tmp_path, recipe=tmp_path / "recpie.toml")
    (tmp_path / "recipe.toml").write_text("[loop]\nsteps = 1\n")
    assert "'model' is missing" in broken(capfd, tmp_path, recipe=tmp_path / "recipe.toml")


REWARDS = {
    "hangs": ("import time\ndef grade(trajectory, task):\n    time.sleep(600)\n", "timeout"),
    "raises": ("def grade(trajectory, task):\n    return 1 / 0\n", "ZeroDivisionError"),
    "returns NaN": ("def grade(trajectory, task):\n    return float('nan')\n", "nan"),
    "returns nothing": ("def grade(trajectory, task):\n    pass\n", "None"),
    "kills its process": ("import os\ndef grade(trajectory, task):\n    os._exit(3)\n", "worker died"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that(capfd, tmp_path, monkeypatch, name):
    """The run ends with the diagnosis; no failure was ever a number, and the rollouts are in the journal."""
    source, said = REWARDS[name]
    (tmp_path / "broken_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    line = broken(
        capfd,
        tmp_path,
        "--task.reward=broken_reward:grade",
        "--task.reward.timeout=0.5",
        "--task.eval.n=1",
        "--task.reward.workers=2",
    )
    assert said in line and "no group survived" in line and "Mend the reward" in line and "easier task" not in line, (
        line
    )
    events = [json.loads(row) for row in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    groups = [e for e in events if e["kind"] == "GroupFinished"]
    assert groups and all(e["rewards"] == [] and not e["kept"] for e in groups)


def test_a_reward_that_cannot_be_imported(capfd, tmp_path, monkeypatch):
    (tmp_path / "half_reward.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    assert "not_installed_anywhere" in broken(capfd, tmp_path, "--task.reward=half_reward:grade")


def test_check_finds_a_reward_that_gives_gold_nothing(capfd, tmp_path, monkeypatch):
    (tmp_path / "zero_reward.py").write_text("def grade(trajectory, task):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["check", str(TINY), f"--run.folder={tmp_path / 'run'}", *SMALL, "--task.reward=zero_reward:grade"])
    assert end.value.code == 1
    assert "✗ reward: " in capfd.readouterr().out


def test_no_disk(capfd, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "free some space" in broken(capfd, tmp_path)


def test_a_folder_in_use(capfd, tmp_path):
    from filelock import FileLock

    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        assert "another process is training" in broken(capfd, tmp_path)


def test_a_changed_recipe_shows_what_changed_and_loses_nothing(capfd, tmp_path):
    main_ok(capfd, "train", str(TINY), f"--run.folder={tmp_path / 'run'}", *SMALL, "--quiet")
    before = sorted(os.listdir(tmp_path / "run"))
    assert "trainer.lr" in broken(capfd, tmp_path, "--trainer.lr=5e-4")
    assert sorted(os.listdir(tmp_path / "run")) == before
    code, err = say(capfd, "replay", str(tmp_path / "run"), "--step", "99")
    assert code == 1 and "finished: 1 to 2" in err
    code, err = say(capfd, "view", str(tmp_path / "run"), "--step", "99")
    assert code == 1 and "Traceback" not in err


def main_ok(capfd, *words: str) -> None:
    try:
        main(list(words))
    except SystemExit as end:
        assert not end.code, capfd.readouterr().err


def test_other_verbs(capfd, tmp_path):
    for words, said in {
        ("eval", "/nowhere/model"): "name the tasks",
        ("view", str(tmp_path)): "none are stored yet",
        ("card", str(tmp_path / "missing")): "missing",
        ("bench", "stpe"): "Did you mean 'step'?",
    }.items():
        code, err = say(capfd, *words)
        assert code == 1 and said in err and "Traceback" not in err, err
