"""A policy whose denoising steps draw chunks of actions, in the loop."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from kits.gym_worlds import Aim
from kits.once import made_once
from kits.runs import PENDULUM_CHUNKS, check, events, final, run, run_and_die, steps, tiny
from rondel.checks.recipe_check import check as check_recipe
from rondel.core.errors import UserError
from rondel.driver import replay
from rondel.models.load import load_model
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal import store

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")

AIM = {"kind": "gym", "name": "kits.gym_worlds:Aim", "args": {"last": 7}, "n": 500, "eval_seed": 1000, "eval_n": 2}
WORLD = {"recipe": PENDULUM_CHUNKS, "task__data": AIM, "task__env__turns": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """4 steps of PPO, 4 episodes each, of two chunks of 2 actions and one that is cut off after its first action."""
    return made_once(tmp_path_factory, "chunks", partial(run, **WORLD))


@pytest.mark.slow
def test_ledger_versions_and_lag_are_those_of_any_run(folder):
    """Laws 1 and 2: a chunk is one token."""
    rows = check(folder, staleness=0, total=4, size=1)
    assert len(rows) == 4 * 4 and {sum(row["mask"]) for row in rows} == {3}
    assert {tuple(row["versions"][1:]) for row in rows} == {(v,) * 3 for v in range(4)}
    assert all(e["metrics"]["train/gap_max"] < 1e-5 for e in events(folder, "StepDone"))


@pytest.mark.slow
def test_the_stored_chunks_are_those_that_the_world_took(folder):
    """Laws 4 and 5: played again from its seed, the world shows what is stored before each chunk, and pays its actions;
    recorded densities are those of the weights that drew them."""
    loaded, world = load_model(str(folder / "checkpoints" / "step-000003")), Aim(last=7)
    for group in store.groups_of(store.read_step(folder, 4)):
        for t in group.trajectories:
            shown, _ = world.reset(seed=group.task.data["seed"])
            rewards = []
            for x, drawn in zip(t.steps.x, t.steps.drawn, strict=True):
                assert np.array_equal(x, shown.reshape(-1)) and len(drawn) == 5 * 4
                rewards.append(0.0)
                for action in drawn[-4:].reshape(2, 2)[: 5 - world.at]:
                    shown, reward, *_ = world.step(np.clip(action, *([-1, -2], [1, 2])).astype(np.float32))
                    rewards[-1] += reward
            assert world.at == 5 and t.finish_reason == "length" and np.array_equal(t.steps.after, shown.reshape(-1))
            assert [value for _, value in t.score.steps] == pytest.approx(rewards, rel=1e-12)
            assert t.score.value == pytest.approx(sum(rewards), rel=1e-12) and "5 steps in 3 chunks" in t.text
            with torch.no_grad():
                packed = PackedSteps.of([t.steps.rows], [[0]], "cpu")
                density = loaded.head.evaluate_steps(packed, temperature=0.5)[0]
            assert density.tolist() == pytest.approx(list(t.logprobs)[1:], abs=1e-5)


@pytest.mark.slow
def test_a_step_is_recomputed_from_its_stored_rollouts(folder):
    found, [done] = replay.replay(folder, 4), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == 4]
    same = [name for name in found if not name.endswith("_s")]
    assert "train/value_loss" in same and {name: found[name] for name in same} == {name: done[name] for name in same}


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path):
    """Law 9: chunks that were drawn come from the log, the others are drawn again by their keys."""
    assert run_and_die(tmp_path / "run", ("StepDone", 2), **WORLD) == -9
    run(tmp_path / "run", **WORLD)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(folder)


@pytest.mark.slow
def test_stale_chunks_apart_keep_the_books(tmp_path):
    """Laws 1 and 2 with S = 1: a chunk has the version of the weights whose denoising steps drew it, and every chunk of an
    episode that began before an update may have one of two."""
    run(tmp_path / "run", **WORLD, loop__max_staleness=1, place__kind="split", place__cluster="local")
    rows = check(tmp_path / "run", staleness=1, total=4, size=1)
    assert len(rows) == 4 * 4 and {sum(row["mask"]) for row in rows} == {3}
    assert max(row["trained_at"] - min(row["versions"][1:]) for row in rows) == 1


@pytest.mark.slow
def test_chunks_are_learned_by_grpo_from_worlds_that_end_within_one(tmp_path):
    """The distance to the aim falls from where an untrained policy is."""
    changes = {"task__data": AIM | {"args": {"last": 3}}, "algo": {"kind": "grpo", "group_size": 8}}
    changes |= {"loop__groups_per_step": 4, "loop__steps": 8, "loop__epochs": 6, "run__checkpoint__every": 0}
    run(tmp_path / "run", **WORLD | changes, trainer__lr=1e-2, trainer__critic={})
    rows = [store.read_step(tmp_path / "run", step) for step in range(1, 9)]
    assert all(sum(row["mask"]) == 2 and row["finish_reason"] == "stop" for own in rows for row in own)
    rewards = [np.mean([row["reward"] for row in own]) for own in rows]
    assert np.mean(rewards[-2:]) > 0.75 * np.mean(rewards[:2])  # they are below 0


@pytest.mark.slow
def test_its_recipe_is_checked(tmp_path):
    pytest.importorskip("mujoco", reason="MuJoCo is not installed: rondel[control]")
    found = {f.what: f for f in check_recipe(tiny(tmp_path, recipe=PENDULUM_CHUNKS, task__env__turns=60))}
    assert all(f.ok for f in found.values()), found


MODEL = {"model": {"random": "mlp_world"}, "agents": ["world.observed", "world.predicted"]}
IMAGINED = {"kind": "control", "model": {"policy": "world"}}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"task__data": AIM | {"name": "kits.gym_worlds:Choices"}}, r'takes one of 4 actions: take \{ random = "mlp_policy'),
        ({"model__path__chunk": 0}, "chunk = 0 of model.path: take a whole number"),
        ({"model__path__denoising_steps": 1.5}, "denoising_steps = 1.5 of model.path"),
        ({"model__path__action_size": 3}, "wants 2"),
        ({"algo__entropy": {"coef": 0.01}}, "the noise of a step is set, not learned"),
        ({"task__env": IMAGINED, "policies": {"world": MODEL}}, "draws chunks of actions"),
    ],
)  # fmt: skip
def test_what_it_cannot_have_is_refused(tmp_path, changes, why):
    from rondel.assemble.components import build

    with pytest.raises(UserError, match=why):
        build(tiny(tmp_path, **WORLD | changes)).close()
