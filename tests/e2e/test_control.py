"""A policy of actions in the loop: the same journal, store, checkpoints, replay and resume as of a model of text."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from functools import partial

import numpy as np
import pytest
import torch

from kits.once import made_once
from kits.runs import CARTPOLE, PENDULUM, check, events, final, run, run_and_die, steps, tiny
from rondel.checks.recipe_check import check as check_recipe
from rondel.cli import export, main
from rondel.core.errors import EnvError, UserError
from rondel.driver import replay
from rondel.generate.envs.control import Control
from rondel.generate.envs.hosted_world import open_hosted
from rondel.generate.envs.worlds import WorldSource, call_world, open_world
from rondel.models.load import load_model
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal import store

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """4 steps of PPO, 4 episodes each, which are cut off after 12 actions."""
    return made_once(tmp_path_factory, "control", partial(run, recipe=CARTPOLE))


@pytest.mark.slow
def test_ledger_versions_and_lag_are_those_of_any_run(folder):
    rows = check(folder, staleness=0, total=4, size=1)
    assert len(rows) == 4 * 4
    assert all(e["metrics"]["train/gap_max"] < 1e-5 for e in events(folder, "StepDone"))
    [first] = [e for e in events(folder, "StepDone") if e["step"] == 1]
    assert first["metrics"]["train/tokens"] == sum(sum(row["mask"]) for row in rows[:4])


@pytest.mark.slow
def test_the_stored_actions_are_those_that_the_world_took(folder):
    """Law 5, of actions: played again from its seed, the world shows what is stored, and pays it; recorded densities
    are those of the weights that drew them."""
    loaded, world, cut = load_model(str(folder / "checkpoints" / "step-000003")), gymnasium.make("CartPole-v1"), 0
    for group in store.groups_of(store.read_step(folder, 4)):
        for t in group.trajectories:
            shown, _ = world.reset(seed=group.task.data["seed"])
            rewards, ended = [], False
            for x, drawn, token in zip(t.steps.x, t.steps.drawn, list(t.tokens)[1:], strict=True):
                assert not ended and np.array_equal(x, shown) and drawn.tolist() == [token]
                shown, reward, ended, _, _ = world.step(token)
                rewards.append(reward)
            assert t.score.value == sum(rewards) and t.score.steps == tuple(enumerate(rewards, 1))
            assert (t.finish_reason == "stop") == ended == (t.steps.after is None)
            if not ended:
                assert len(rewards) == 12 and np.array_equal(t.steps.after, shown)
                cut += 1
            with torch.no_grad():
                density = loaded.head.evaluate_steps(PackedSteps.of([t.steps.rows], [[0]], "cpu"))[0]
            assert density.tolist() == pytest.approx(list(t.logprobs)[1:], abs=1e-6)
    assert cut


@pytest.mark.slow
def test_a_step_is_recomputed_from_its_stored_rollouts(folder):
    """Values behind a cut episode among them: they are part of what the critic learns."""
    found, [done] = replay.replay(folder, 4), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == 4]
    same = [name for name in found if not name.endswith("_s")]
    assert len(same) > 10 and {name: found[name] for name in same} == {name: done[name] for name in same}
    assert "train/value_loss" in same


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path):
    """Law 9: episodes that were under way are played again by the log, and go on."""
    assert run_and_die(tmp_path / "run", ("StepDone", 2), recipe=CARTPOLE) == -9
    run(tmp_path / "run", recipe=CARTPOLE)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(folder)


@pytest.mark.slow
def test_stale_episodes_apart_keep_the_books(tmp_path):
    run(tmp_path / "run", recipe=CARTPOLE, loop__max_staleness=1, place__kind="split", place__cluster="local")
    rows = check(tmp_path / "run", staleness=1, total=4, size=1)
    assert max(row["trained_at"] - row["born"] for row in rows) == 1


@pytest.mark.slow
def test_numbers_as_actions_are_learned_by_grpo(tmp_path):
    """Episodes of one seed are a group. The distance to the aim falls from where an untrained policy is."""
    run(
        tmp_path / "run",
        recipe=CARTPOLE,
        task__data={"kind": "gym", "name": "kits.gym_worlds:Aim", "n": 500},
        model__path={"random": "mlp_policy", "hidden_size": 16, "num_hidden_layers": 1},
        algo={"kind": "grpo", "group_size": 8},
        loop__groups_per_step=4,
        loop__steps=8,
        loop__epochs=6,
        trainer__lr=2e-2,
        trainer__critic={},
        run__checkpoint__every=0,
    )
    rewards = [np.mean([row["reward"] for row in store.read_step(tmp_path / "run", step)]) for step in range(1, 9)]
    assert np.mean(rewards[-2:]) > 0.75 * np.mean(rewards[:2])  # they are below 0


@pytest.mark.slow
def test_a_world_of_mujoco_is_played(tmp_path):
    pytest.importorskip("mujoco", reason="MuJoCo is not installed: rondel[control]")
    run(tmp_path / "run", recipe=PENDULUM, loop__steps=1, task__env__turns=20, task__data__n=20)
    rows = check(tmp_path / "run", staleness=0, total=1, size=1)
    assert all(row["steps"].shape[1] == 5 and set(row["step_rewards"]) <= {0.0, 1.0} for row in rows)


@pytest.mark.slow
@pytest.mark.sweep  # the command that it starts is in law 16, what it reads of a run in the tests above
def test_how_soon_it_has_solved_its_world_is_told(capsys):
    """Of a target that the first steps reach; `tests/e2e/test_bench.py` leaves it to this one."""
    sets = ["--set", "loop.steps=3", "--set", "model.path.hidden_size=16", "--set", "task.data.n=100"]
    sets += ["--set", "task.data.eval_n=2", "--set", "task.env.turns=30"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "control", "--target", "5", *sets, "--at", "1", "100000", "--at-seconds", "0.01", "--json"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not end.value.code and told["rondel_steps"] >= 8 * 3 * 5 and told["rondel_seconds"] > 0
    assert told["rondel_returns_at_1_actions"] == told["rondel_returns_at_0.01_s"] != [None]
    assert told["rondel_returns_at_100000_actions"] == [None]


@pytest.mark.slow
def test_its_recipe_is_checked(folder, tmp_path):
    found = {f.what: f for f in check_recipe(tiny(tmp_path, recipe=CARTPOLE, task__env__turns=100))}
    assert all(f.ok for f in found.values()), found
    export.run(folder, tmp_path / "exported", False, "", False)
    assert "torch.export.load" in (tmp_path / "exported" / "README.md").read_text()
    act = torch.export.load(tmp_path / "exported" / "program.pt2").module()
    model, seen = load_model(str(tmp_path / "exported")).model, torch.randn(5, 4)
    assert torch.allclose(act(seen), model.act(model(seen)), atol=1e-6)


GYM = {"kind": "gym", "name": "CartPole-v1", "n": 10}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"task__env": "single_turn"}, "reads text"),
        ({"task__data": {"kind": "digits"}}, "plays worlds"),
        ({"task__env": {"kind": "control", "budget": {"turns": 3}}}, r"task\.env\.turns"),
        ({"engine__sampling__top_k": 5}, "top_k"),
        ({"algo": {"kind": "opd"}, "trainer__critic": {}}, "a teacher"),
        ({"model__adapter__kind": "lora"}, "adapter"),
        ({"model__path": {"random": "llama"}}, "draws no actions"),
        ({"model__path__observation_size": 3}, "wants 4"),
        ({"model__path__hidden_size": 20}, "multiple of 16"),
        ({"model__dtype": "bfloat16"}, "need float32"),
        ({"loop__warmup__steps": 3}, "copies answers"),
        ({"task__reward": "math"}, "the world pays"),
        ({"task__system": "be kind"}, "task.system is text"),
        (
            {"task__data": GYM | {"name": "kits.gym_worlds:Aim"}, "algo__surrogate": {"kind": "divergence_mask"}},
            "densities",
        ),
        ({"algo__mask_truncated": True}, "algo.mask_truncated leaves out answers .* cuts it off is often the best"),
        ({"task__filters": ["truncated"]}, 'the filter "truncated" leaves out'),
        ({"task__filters": [{"kind": "truncated"}]}, 'the filter "truncated" leaves out'),
        ({"task__data__name": "NoWorld-v0"}, "cannot be made"),
        ({"task__data": GYM | {"name": "kits.gym_worlds:Words"}}, "laid flat"),
    ],
)
def test_what_it_cannot_have_is_refused(tmp_path, changes, why):
    from rondel.assemble.components import build

    with pytest.raises(UserError, match=why):
        build(tiny(tmp_path, recipe=CARTPOLE, **changes)).close()


def test_a_world_that_breaks_is_no_reward(tmp_path):
    """It is played once more, then the episode has no score, which is counted."""
    with pytest.raises(EnvError, match="Broken' raised RuntimeError: a wheel"):
        world, spaces = open_world("kits.gym_worlds:Broken", {})
        call_world("kits.gym_worlds:Broken", world.step, spaces.action(np.float32([0, 0])))


@pytest.mark.slow
def test_worlds_on_threads_step_side_by_side(tmp_path):
    """Each waits for the other three, and the episodes are those of worlds on the event loop."""
    settings = {"loop__steps": 2, "run__checkpoint__every": 0, "recipe": CARTPOLE}
    for name, threads in (("Aim", False), ("Meeting", True)):
        data = {"kind": "gym", "name": f"kits.gym_worlds:{name}", "n": 50}
        env = {"kind": "control", "turns": 12, "threads": threads}
        run(tmp_path / name, task__data=data, task__env=env, **settings)
    loop, threads = ([store.read_step(tmp_path / name, step) for step in (1, 2)] for name in ("Aim", "Meeting"))
    for plain, apart in zip([*loop[0], *loop[1]], [*threads[0], *threads[1]], strict=True):
        assert np.array_equal(plain["steps"], apart["steps"]) and plain["step_rewards"] == apart["step_rewards"]
    assert torch.equal(
        *(torch.tensor([m["train/loss"] for *_, m, _ in steps(tmp_path / n)]) for n in ("Aim", "Meeting"))
    )


@pytest.mark.slow
def test_a_run_over_processes_has_the_bits_of_one_without(tmp_path):
    settings = {"loop__steps": 2, "run__checkpoint__every": 0, "recipe": CARTPOLE}
    settings["task__data"] = {"kind": "gym", "name": "kits.gym_worlds:Aim", "n": 50, "eval_seed": 1000, "eval_n": 2}
    for n in (0, 2):
        run(tmp_path / str(n), task__env={"kind": "control", "turns": 12, "processes": n}, **settings)
    ours, theirs = final(tmp_path / "2"), final(tmp_path / "0")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "2") == steps(tmp_path / "0")
    own = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert "serve_worlds" not in own


def test_a_world_on_a_thread_that_breaks_is_an_error_of_the_world():
    env, world = Control(threads=True), open_hosted(WorldSource("kits.gym_worlds:Broken", {}))
    with pytest.raises(EnvError, match="Broken' raised RuntimeError: a wheel"):
        asyncio.run(env._call(world.take, np.zeros((1, 2), np.float32), 1))


@pytest.mark.parametrize("shown", ["nan", "inf"])
def test_a_world_that_shows_no_number_is_at_fault(tmp_path, shown):
    """One episode of it is an error of the world, where the engine blamed its weights and the run was over."""
    world, _ = open_world("kits.gym_worlds:Blind", {"shown": shown})
    assert np.isfinite(world.reset(seed=1)[0]).all() and not np.isfinite(world.reset(seed=2)[0]).all()
    data = {"kind": "gym", "name": "kits.gym_worlds:Blind", "n": 50, "args": {"shown": shown}}
    run(tmp_path, recipe=CARTPOLE, task__data=data, loop__steps=2, run__checkpoint__every=0)
    rows = [row for step in (1, 2) for row in store.read_step(tmp_path, step)]
    assert len(rows) == 8 and all(row["task_data"]["seed"] % 4 != 2 for row in rows)
    assert steps(tmp_path)[-1][-1]["issued"] > 8 and not events(tmp_path, "Warned")


def test_an_episode_that_fails_is_no_better_than_the_worst(tmp_path):
    """The world pays less than nothing, and one of the four episodes that are measured shows nan: 0 would be the best."""
    name = {"name": "kits.gym_worlds:Blind", "n": 50, "eval_seed": 1000, "eval_n": 4}
    run(tmp_path, recipe=CARTPOLE, task__data={"kind": "gym"} | name, loop__steps=1, run__checkpoint__every=0)
    for e in events(tmp_path, "Evaluated"):
        known = [row["reward"] for row in e["samples"] if row["reward"] is not None]
        assert e["request"]["failed"] == 4 - len(known) == 1 and max(known) < 0
        assert e["score"] == pytest.approx((sum(known) + min(known)) / 4) and e["request"]["failed_as"] == min(known)


def test_spaces_are_laid_flat_and_actions_stay_in_bounds():
    world, spaces = open_world("kits.gym_worlds:Choices", {"last": 2})
    shown, _ = world.reset(seed=1)
    assert spaces.flatten(shown).tolist() == [np.float32(world.aim), 0.0, 0.0, 1.0, 0.0]
    assert (spaces.observed, spaces.actions, spaces.action(np.float32([3]))) == (5, 4, 8)
    _, spaces = open_world("kits.gym_worlds:Aim", {})
    assert spaces.action(np.float32([-3, 1.5])).tolist() == [-1.0, 1.5] and spaces.observed == 2
