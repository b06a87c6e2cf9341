"""rondel plan: what it answers, how it refuses, and that it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from run_kit import RECIPE

from rondel.cli import main
from rondel.planner.hardware import calibration_file, remember, this_machine
from rondel.planner.plan import plan
from rondel.planner.setting import what_if
from rondel.planner.shapes import shape


def ask(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


def test_a_recipe_and_what_if(capsys):
    code, out, _ = ask(capsys, str(RECIPE), "--json")
    told = json.loads(out)
    assert code == 0 and told["fits"] and told["model"]["parameters"] == 324960
    code, out, _ = ask(capsys, str(RECIPE), "--loop.groups_per_step=4", "--what-if", "model=70b", "gpus=64", "hardware=h100", "--json")
    told = json.loads(out)
    assert (told["work"]["prompts"], told["devices"]["count"], told["devices"]["hardware"]) == (4, 64, "h100")
    assert told["model"]["parameters"] == shape("70b").parameters


def test_the_table_says_what_dominates(capsys):
    code, out, _ = ask(capsys, "--what-if", "model=70b gpus=64 output=16k group=8 prompts=256")
    assert code == 0 and "too much; activations is" in out and "together they fit: " in out
    assert "assumed" in out and "rollout-bound" in out and "sync      distributed, 2.82 s" in out


@pytest.mark.parametrize(
    "words, says",
    [
        (["--what-if", "modle=7b"], "Did you mean 'model'?"),
        (["--what-if", "model=7bb"], "no shape is known of '7bb'. Did you mean '7b'?"),
        (["--what-if", "model=7b", "hardware=h1000"], "Did you mean 'h100'?"),
        (["--what-if", "model=7b", "gpus=0"], "it is at least 1"),
        (["--what-if", "model=7b", "gpus=many"], "'many' is not a value of gpus"),
        (["--what-if", "model=7b", "place=split"], "place = split needs at least 2 devices"),
        (["--what-if", "gpus=8"], "needs a model"),
        ([], "a recipe or a model is needed"),
    ],
)
def test_what_cannot_be_planned(capsys, words, says):
    code, _, err = ask(capsys, *words)
    assert code == 1 and says in err and err.count("\n") == 1


def test_it_starts_without_torch():
    program = (
        "import sys, rondel.cli as cli\n"
        "try: cli.main(['plan', '--what-if', 'model=7b', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_more_of_everything_never_takes_less():
    """More tokens, more prompts, a larger model: no step gets shorter; more devices: none gets longer."""
    base = ["model=7b", "gpus=8"]
    step = plan(what_if(base))["step_seconds"]
    for more in ("output=8k", "prompts=64", "group=32", "model=32b", "checkpointing=yes", "reference=7b", "critic=7b"):
        assert plan(what_if([*base, more]))["step_seconds"] > step, more
    assert plan(what_if(["model=7b", "gpus=16"]))["step_seconds"] < step
    assert plan(what_if([*base, "hardware=b200"]))["step_seconds"] < step


def test_what_was_measured_is_used(tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path))
    guess = this_machine()
    assert remember(replace(guess, flops=123e9, source="measured")) == calibration_file()
    assert this_machine().flops == 123e9 and this_machine().memory == guess.memory
    calibration_file().write_text("{}")
    with pytest.raises(ValueError, match="delete it"):
        this_machine()
