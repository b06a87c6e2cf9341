"""Rows learn the tiny task: from one supervised start, twelve steps, into a band around what was measured from there
(0.69 of 0.57; 0.59 with lr = 1e-9). `rondel bench rows` has every row, from several longer starts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from guess import Guess
from kits.once import made_once
from kits.runs import RECIPE
from kits.sweeps import covering
from kits.train import batch, row, step, trainer
from rondel.assemble import train
from rondel.core.config.job import Job
from rondel.core.types import Group, Sampling, Score
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.demonstrations import Demonstrate
from rondel.generate.envs.sources import load_tasks
from rondel.models.load import load_model
from rondel.models.save import save_model
from rondel.runtime.journal.log import read

pytestmark = pytest.mark.slow
# the others are left to `rondel bench rows`: with one update a step gspo and reinforce_pp end here where grpo does, to the digit
ROWS = {"grpo": 0, "dapo": 1, "cispo": 0, "rloo": 1}  # -> the seed of what follows the start
BAND = 0.66, 0.97  # mean reward of the last five steps
SHORT = {"loop.steps": 12, "loop.warmup.steps": 0, "algo.group_size": 8}
COMMON = {"run.sinks": [], "place.threads": 1, "run.checkpoint.every": 0, "task.data.holdout": 10, "task.eval.every": 0}


def learn(folder, changes, recipe=RECIPE) -> list[float]:
    """One run. -> the mean reward of each of its RL steps."""
    train(Job.read(recipe, {**COMMON, "run.folder": str(folder), **changes}), quiet=True)
    curve: list[float] = []
    rewards: list[float] = []
    for event in read(folder):
        if event["kind"] == "GroupFinished":
            rewards += event["rewards"]
        elif event["kind"] == "StepDone":
            if rewards:  # a supervised step has none
                curve.append(sum(rewards) / len(rewards))
            rewards = []
    return curve


def supervise(folder, steps=160, rows=32) -> None:
    """The supervised phase of the recipe without the loop around it: the trainer alone, over the same demonstrations."""
    job, algo = Job.read(RECIPE, COMMON), row("sft")
    loaded, tasks = load_model(job.model.path, dtype="float32"), load_tasks(job.task.data, env="single_turn").train
    shown = []
    for task in tasks:
        chat = TokenChat(loaded.tokenizer, None, sampling=Sampling(max_tokens=4), key=int, max_context=64)
        shown.append(asyncio.run(Demonstrate().run(task, chat)))
        shown[-1].score = Score(1.0)
    learner, chance = trainer(loaded, algo, lr=3e-3), random.Random(0)
    for _ in range(steps):
        groups = [Group(i, tasks[n], [shown[n]], 0) for i, n in enumerate(chance.sample(range(len(shown)), rows))]
        step(learner, batch(groups, algo), algo)
    save_model(loaded, folder)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a model that is right about half the time."""
    return made_once(tmp_path_factory, "start", supervise)


# what dapo adds to the loop (refills, a reward that is shaped, a count over the step's tokens) is in laws 3 and 9
@pytest.mark.parametrize(("kind", "seed"), covering(ROWS.items(), {("grpo", 0)}))
def test_a_row_learns(tmp_path, start, kind, seed):
    recipe = RECIPE if kind == "grpo" else RECIPE.with_name(f"{kind}.toml")
    curve = learn(tmp_path, SHORT | {"loop.seed": seed, "model.path": str(start)}, recipe)
    begin, end = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
    print(f"CURVE {kind}, seed {seed}: {begin:.2f} -> {end:.3f}")
    assert begin + 0.05 < end and BAND[0] <= end <= BAND[1]


def test_ppo_learns(tmp_path, start):
    """One answer a prompt and a critic that begins at nothing: the policy waits for it during the first five steps."""
    changes = {"loop.seed": 0, "loop.steps": 20, "loop.warmup.steps": 0, "loop.groups_per_step": 64}
    curve = learn(tmp_path, changes | {"model.path": str(start)}, RECIPE.with_name("ppo.toml"))
    begin, end = sum(curve[:5]) / 5, sum(curve[-10:]) / 10
    print(f"CURVE ppo: {begin:.2f} -> {end:.3f}")
    assert begin + 0.05 < end and BAND[0] <= end <= BAND[1]


def test_an_adapter_over_four_bits_learns(tmp_path, start):
    """From the same start, whose weights lie in 4 bits from then on."""
    adapter = {"model.adapter.kind": "qlora", "model.adapter.rank": 16, "model.adapter.alpha": 16, "trainer.lr": 2e-3}
    curve = learn(tmp_path, SHORT | {"loop.seed": 0, "loop.steps": 14, "model.path": str(start), **adapter})
    begin, end = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
    print(f"CURVE qlora: {begin:.2f} -> {end:.3f}")
    # rounding costs the start 0 to 0.05, by what it is on this processor: 0.58 -> 0.689 and 0.72 -> 0.785 were measured
    assert begin + 0.03 < end and BAND[0] - 0.05 <= end <= BAND[1]


class TwoGuesses(Guess):
    """For a number from 1 to 3: who asks for 2 and listens to the answer always wins."""

    turns = 2


def three(n: int = 60) -> Iterator[dict]:
    return ({"prompt": f"game {i}", "answer": 1 + i % 3} for i in range(n))


@pytest.mark.sweep  # tests/units/test_policies.py learns a game from its result alone; gradients over several turns are in law 3
def test_a_game_of_two_turns_is_learned_from_its_result_alone(tmp_path):
    """From random weights, without a demonstration. Measured on seeds 0 to 2: 0.01 to 0.03 -> 0.99."""
    small = {"model.path.hidden_size": 48, "model.path.intermediate_size": 96, "model.path.num_hidden_layers": 2}
    task = {
        "task.env": "test_learning:TwoGuesses",
        "task.data.kind": "test_learning:three",
        "engine.sampling.max_tokens": 1,
    }
    steps = {"loop.warmup.steps": 0, "loop.steps": 85, "loop.groups_per_step": 8, "trainer.lr": 8e-3}
    curve = learn(tmp_path, small | task | steps)
    print(f"CURVE game: {curve[0]:.2f} -> {sum(curve[-10:]) / 10:.3f}")
    assert sum(curve[:3]) / 3 < 0.3 and sum(curve[-10:]) / 10 > 0.9
