"""Broken data, rewards and folders: each one readable error with a remedy, no traceback, a
non-zero exit, nothing lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kits.command_line import SMALL, TINY, broken, say
from kits.sweeps import covering
from rondel.cli import main


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


@pytest.mark.parametrize("overrides", [["--loop.warmup.steps=1"], ["--algo.beside=[{ kind = 'sft' }]"]])
def test_demonstrations_that_are_no_text(capfd, tmp_path, overrides):
    """TRL's completions are lists of messages: their Python was learned."""
    rows = [f'{{"prompt": "{a} + 4 =", "completion": [{{"role": "assistant", "content": "7"}}]}}\n' for a in (3, 5)]
    (tmp_path / "tasks.jsonl").write_text("".join(rows))
    data = f'{{ kind = "jsonl", path = "{tmp_path / "tasks.jsonl"}", answer = "completion" }}'
    line = broken(capfd, tmp_path, *overrides, recipe=recipe(tmp_path, data))
    assert "is a list" in line and "give a text" in line, line


MOE = "--model.path={ random = 'qwen3_moe', hidden_size = 32, num_hidden_layers = 1, moe_intermediate_size = 32, num_experts = 4, num_experts_per_tok = 2, num_attention_heads = 4, num_key_value_heads = 2 }"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shown",
    covering(
        [["--algo.kind=luffy", "--algo.guides=1"], ["--algo.beside=[{ kind = 'sft' }]"]],
        [["--algo.kind=luffy", "--algo.guides=1"]],
    ),
)
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


# late, gone, and no number; what raises or returns something else is the same failure of a call (tests/units/test_graded.py)
@pytest.mark.slow
@pytest.mark.parametrize("name", covering(REWARDS, ["hangs", "kills its process", "returns NaN"]))
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


@pytest.mark.slow
def test_a_reward_that_cannot_be_imported(capfd, tmp_path, monkeypatch):
    (tmp_path / "half_reward.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    assert "not_installed_anywhere" in broken(capfd, tmp_path, "--task.reward=half_reward:grade")


@pytest.mark.slow
def test_check_finds_a_reward_that_gives_gold_nothing(capfd, tmp_path, monkeypatch):
    (tmp_path / "zero_reward.py").write_text("def grade(trajectory, task):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["check", str(TINY), f"--run.folder={tmp_path / 'run'}", *SMALL, "--task.reward=zero_reward:grade"])
    assert end.value.code == 1
    assert "✗ reward: " in capfd.readouterr().out


@pytest.mark.slow
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


@pytest.mark.slow
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
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "journal.jsonl").touch()
    for words, said in {
        ("eval", "/nowhere/model"): "'/nowhere/model' is no run folder, so it is read as a model: name the tasks",
        ("view", str(tmp_path / "begun")): "none are stored yet",
        ("view", str(tmp_path)): "holds no journal.jsonl, so it is not a run folder",
        ("view", str(tmp_path / "missing")): "no run folder at",
        ("card", str(tmp_path / "missing")): "missing",
        ("bench", "stpe"): "Did you mean 'step'?",
    }.items():
        code, err = say(capfd, *words)
        assert code == 1 and said in err and "Traceback" not in err, err


SILENT = """
async def play(task, chat):
    chat.give([{"role": "user", "content": task.data["prompt"]}])
    return chat.trajectory
"""


def test_a_policy_that_never_writes_ends_the_run_in_its_first_step(capfd, tmp_path, monkeypatch):
    """It ended as a success, with a reward of nobody's answers."""
    (tmp_path / "silent_env.py").write_text(SILENT)
    monkeypatch.chdir(tmp_path)
    line = broken(capfd, tmp_path, "--task.env=silent_env:play", "--task.eval.n=1")
    assert "the policy wrote nothing in the 4 answers of a step" in line and "await chat.reply()" in line, line
    with pytest.raises(SystemExit):
        main(["diagnose", str(tmp_path / "run")])
    assert "the policy wrote nothing" in capfd.readouterr().out
