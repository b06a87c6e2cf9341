"""Law 12, config: an unknown key, a key that is set and not read, and an option without effect are errors; an unknown
name comes with the nearest known one. A key tagged *performance* leaves results equal.

The knobs of a row are in tests/units/test_table.py, files and folders in tests/e2e/test_broken_inputs.py.
"""

from __future__ import annotations

import pytest
import tomli_w

from kits.command_line import broken
from kits.runs import CARTPOLE, events, run, tiny
from rondel.assemble import train
from rondel.core.config.differences import without_none
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError

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
    "a family that cannot be carried": (["--model.path={ random = 'codegen' }"], "attention interface"),
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


# -- keys that nothing reads -----------------------------------------------------------------------


IDLE = {  # set, and read by nothing in a run like this one; or refused because of another key
    "place.patience": ({"place__patience": 5.0}, "place.patience"),
    "loop.oversample.late": ({"loop__oversample__late": "retry"}, "late"),
    "policies.critic": ({"policies__critic": {}}, "policies.critic"),
    "task.eval.every": ({"task__data__holdout": 0, "task__eval__every": 3}, "task.eval.every"),
    "engine.speculative.k": ({"engine__speculative__k": 2}, "k has no effect"),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", IDLE)
def test_a_set_key_that_nothing_reads_is_an_error(tmp_path, key):
    changes, match = IDLE[key]
    with pytest.raises(ConfigError, match=match):
        train(tiny(tmp_path, loop__warmup__steps=0, **changes), quiet=True)


@pytest.mark.slow
def test_workers_tell_what_they_read(tmp_path):
    """A split run has no section that is read on trust: what its workers read is counted there."""
    job = tiny(
        tmp_path, place__kind="split", loop__warmup__steps=0, loop__steps=1, trainer__optimizer__weight_decay=0.1
    )
    train(job, quiet=True)
    assert job.unread_keys() == [] and "weight_decay" in job.trainer.optimizer._read
    fresh = tiny(tmp_path, trainer__optimizer__weight_decay=0.1)
    assert "trainer.optimizer.weight_decay" in fresh.unread_keys()
    fresh.mark_read(job.read_keys())
    assert fresh.unread_keys() == ["loop.warmup.lr"], "that run had no such phase"


def test_a_value_without_a_bound_is_kept_by_the_run(tmp_path):
    """`inf` in the recipe is `inf` in job.toml: what reads a run later (replay, eval, resume) has its values."""
    job = tiny(tmp_path, recipe=CARTPOLE, trainer__clip=float("inf"))
    written = tmp_path / "job.toml"
    written.write_text(tomli_w.dumps(without_none(job.to_dict())))
    again = Job.read(written)
    assert again.trainer.clip == again.algo.value["clip"] == float("inf") and again.digest() == job.digest()


# -- keys for performance --------------------------------------------------------------------------


SHORT = {"loop__warmup__steps": 0, "loop__steps": 2, "engine__max_running": 8, "engine__numerics": "aligned"}


@pytest.mark.slow
def test_results_are_those_of_a_run_without(tmp_path):
    """A performance key (law 12): the clock apart, every number of the run is the same, though it felt its limit."""

    def told(kind, **more):
        folder = tmp_path / kind
        run(folder, **SHORT, engine__concurrency=kind, **more)
        done = [
            (e["step"], e["version"], e["ledger"], {k: v for k, v in e["metrics"].items() if not k.endswith("_s")})
            for e in events(folder, "StepDone")
        ]
        asked = sum(
            e["counts"].get("steps", 0) for e in events(folder, "WorkerTime") if e["worker"].startswith("engine")
        )
        return done, asked

    (fixed, steps), (auto, more) = told("fixed"), told("auto")
    assert fixed == auto
    assert more > steps, "it did decode fewer together"
