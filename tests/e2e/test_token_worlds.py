"""Actions as tokens: a model of pictures and text that is shown what a world renders and writes the bin of an action."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kits.gym_worlds import Column
from kits.runs import CARTPOLE, check, events, tiny
from rondel.assemble import train
from rondel.assemble.components import build
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, UserError
from rondel.core.types import Task
from rondel.generate.envs.experts import DemonstratedGym, balance_cartpole
from rondel.generate.envs.frame_worlds import shrunk
from rondel.generate.envs.token_worlds import TokenWorlds
from rondel.models.load import tokenizer_of
from rondel.runtime.journal import store

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
VISION = Path(__file__).parents[2] / "recipes" / "vision.toml"
ENV = {"kind": "control", "actions": "tokens", "turns": 3, "bins": 4, "frames": True, "pixels": 28}
DATA = {"kind": "gym", "name": "kits.gym_worlds:Column", "n": 50}


@pytest.mark.slow
def test_a_model_that_looks_acts_in_a_world(tmp_path):
    """Laws 1, 2, 4 and 5: each turn has its picture, and its token's bin is what the world took and paid."""
    changes = {
        "model.path.max_position_embeddings": 256, "task": {"env": ENV, "data": DATA}, "loop.warmup": {}, "loop.steps": 2,
        "loop.groups_per_step": 2, "algo.group_size": 3, "engine.sampling.max_tokens": 1, "place.threads": 1,
        "run.checkpoint.every": 0, "run.sinks": [], "run.folder": str(tmp_path / "run"),
    }  # fmt: skip
    job = Job.read(VISION, changes)
    train(job, quiet=True)
    rows = check(tmp_path / "run", staleness=0, total=2, size=3)
    assert all(e["metrics"]["train/gap_max"] < 1e-4 for e in events(tmp_path / "run", "StepDone"))
    tokenizer, _, _ = tokenizer_of(job.model.path)
    world, bins = Column(render_mode="rgb_array"), TokenWorlds(bins=4)("kits.gym_worlds:Column")()
    for group in store.groups_of(store.read_step(tmp_path / "run", 1)):
        world.reset(seed=group.task.data["seed"])
        for t in group.trajectories:
            world.reset(seed=group.task.data["seed"])
            said = [tokenizer.decode([token]) for token, own in zip(t.tokens, t.mask, strict=True) if own]
            paid = [world.step(bins.read(text))[1] for text in said]
            assert len(said) == 3
            assert [value for _, value in t.score.steps] == pytest.approx(paid)
    assert all(len(row["media"]) == 3 for row in rows)


@pytest.mark.slow
def test_a_model_of_text_reads_numbers_and_acts(tmp_path):
    """CartPole: each turn's token is the action that the world took, and the next turn shows what came of it."""
    data = {"kind": "gym", "name": "CartPole-v1", "n": 50, "eval_seed": 1000, "eval_n": 2}
    env = {"kind": "control", "actions": "tokens", "turns": 6}
    changes = {
        "task": {"env": env, "data": data}, "loop.warmup": {}, "loop.steps": 2, "loop.groups_per_step": 2,
        "algo.group_size": 3, "engine.sampling.max_tokens": 1, "model.path.max_position_embeddings": 256,
        "place.threads": 1, "run.checkpoint.every": 0, "run.sinks": [], "run.folder": str(tmp_path / "run"),
    }  # fmt: skip
    job = Job.read(RECIPE, changes)
    train(job, quiet=True)
    rows = check(tmp_path / "run", staleness=0, total=2, size=3)
    assert all(e["metrics"]["train/gap_max"] < 1e-4 for e in events(tmp_path / "run", "StepDone"))
    assert {sum(row["mask"]) for row in rows} == {6}
    tokenizer, _, _ = tokenizer_of(job.model.path)
    for row in rows:
        world = TokenWorlds()("CartPole-v1")()
        seen = [world.reset(seed=row["task_data"]["seed"])[0]]
        for token, own in zip(row["tokens"], row["mask"], strict=True):
            if own:
                seen.append(world.step(tokenizer.decode([token]))[0])
        text = tokenizer.decode(row["tokens"])
        assert all(f"<user>{shown}<assistant>" in text for shown in seen[:-1])


def test_what_is_written_is_the_middle_of_a_bin():
    world = TokenWorlds(bins=4)("kits.gym_worlds:Aim")()
    shown, _ = world.reset(seed=0)
    assert shown == " ".join(f"{number:.2f}" for number in (world.world.aim, 0.0))
    for said, wanted in (
        ("0 3", (-0.75, 1.5)),
        ("bin 2, then 99", (0.25, 1.5)),
        ("1", (-0.25, 0.5)),
        ("?", (0.25, 0.5)),
    ):
        assert world.read(said).tolist() == pytest.approx(wanted), said
    counted = TokenWorlds()("kits.gym_worlds:Choices")()
    assert [counted.read(said).tolist() for said in ("3", "4", "x")] == [[3.0], [3.0], [2.0]]
    with pytest.raises(ConfigError, match="without bounds"):
        TokenWorlds()("kits.gym_worlds:Boundless")()
    with pytest.raises(ConfigError, match="render"):
        TokenWorlds(frames=True)("kits.gym_worlds:Aim")()


def test_an_action_is_written_as_it_is_read():
    aim = TokenWorlds(bins=4)("kits.gym_worlds:Aim")()
    for said in ("0 3", "2 1", "3 0"):
        assert aim.write(aim.read(said)) == said
    assert aim.write([-9, 9]) == "0 3"
    counted = TokenWorlds()("CartPole-v1")()
    assert [counted.write(action) for action in (0, 1)] == ["0", "1"]


@pytest.mark.slow
def test_an_expert_is_copied(tmp_path):
    """The supervised phase shows whole episodes of the controller, whose actions are what is trained; it balances the
    pole for 500 steps, from any seed."""
    tokens = TokenWorlds()
    assert all(
        len(DemonstratedGym(balance_cartpole, tokens, turns=500).gold(task)) == 500
        for task in (Task("", "", {"world": "CartPole-v1", "seed": seed}) for seed in range(3))
    )
    data = {"kind": "gym", "name": "CartPole-v1", "n": 50}
    env = {"kind": "control", "actions": "tokens", "turns": 3, "expert": "cartpole"}
    changes = {
        "task": {"env": env, "data": data}, "loop.warmup": {"steps": 1, "groups_per_step": 2}, "loop.steps": 0,
        "engine.sampling.max_tokens": 1, "model.path.max_position_embeddings": 128, "model.path.num_hidden_layers": 1,
        "place.threads": 1, "run.checkpoint.every": 0, "run.sinks": [], "run.folder": str(tmp_path / "run"),
    }  # fmt: skip
    job = Job.read(RECIPE, changes)
    train(job, quiet=True)
    tokenizer, _, _ = tokenizer_of(job.model.path)
    for row in store.read_step(tmp_path / "run", 1):
        world = tokens("CartPole-v1")()
        shown, _ = world.world.reset(seed=row["task_data"]["seed"])
        said = [tokenizer.decode([token]) for token, own in zip(row["tokens"], row["mask"], strict=True) if own]
        assert len(said) == 3
        for text in said:
            assert text == str(balance_cartpole(shown))
            shown = world.world.step(int(text))[0]


def test_a_picture_is_the_mean_of_squares():
    frame = np.random.default_rng(0).integers(0, 255, (10, 7, 3), dtype=np.uint8)
    small = shrunk(frame, 5)
    assert small.shape == (5, 3, 3)
    assert small[4, 2].tolist() == frame[8:10, 4:6].reshape(4, 3).mean(0).round().tolist()
    assert np.array_equal(shrunk(frame, 10), frame)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"task__env": {"kind": "control", "actions": "tokens"}}, "the model draws arrays"),
        ({"task__env": ENV, "model__path": {"random": "llama"}}, "pictures to a model of text alone"),
        (
            {"task__env": {"kind": "control", "expert": "cartpole"}},
            "expert is copied by flow matching: take flow_policy",
        ),
        (
            {
                "task__env": {"kind": "control", "actions": "tokens"},
                "model__path": {"random": "llama"},
                "algo__mask_truncated": True,
            },
            "algo.mask_truncated leaves out",
        ),
        ({"task__env": {"kind": "control", "bins": 4}}, 'bins is of actions = "tokens"'),
        ({"task__env": {"kind": "control", "actions": "tokens", "pixels": 4}}, "pixels is of frames"),
        ({"task__env": {"kind": "control", "actions": "tokens", "model": {}}}, "model imagines arrays"),
    ],
)
def test_what_it_cannot_have_is_refused(tmp_path, changes, why):
    with pytest.raises(UserError, match=why):
        build(tiny(tmp_path, recipe=CARTPOLE, **changes)).close()
