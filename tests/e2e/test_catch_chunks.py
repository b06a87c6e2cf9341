"""A vision-language-action model that plays Catch by chunks of numbers, under the laws of any run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kits.once import made_once
from kits.runs import CATCH_CHUNKS, check, events, final, run, run_and_die, steps, tiny
from kits.train import apart, batch, gradient, row, shuffled, trainer
from rondel.assemble.components import build
from rondel.checks.recipe_check import check as check_recipe
from rondel.cli import view
from rondel.cli.episode_frames import actions_per_step, frame_grid, picture_shape
from rondel.core.errors import UserError
from rondel.driver import replay
from rondel.models.load import load_model
from rondel.models.model_export import export_model
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal import store
from rondel.runtime.journal.log import read_recipe
from rondel.runtime.telemetry.model_card import write_model_card

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")
from rondel.generate.envs.catch import SmoothCatch, reach_ball  # noqa: E402
from rondel.generate.envs.frame_worlds import open_frame_world  # noqa: E402

WORLD = "rondel.generate.envs.catch:SmoothCatch"


ALL = {"model__path__reads": "all", "loop__seed": 1}  # an expert that attends to keys and values of all tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 steps of flow matching, then 3 of GRPO with 2 groups of 4 episodes of 2 chunks."""
    return made_once(tmp_path_factory, "catch_chunks", partial(run, recipe=CATCH_CHUNKS))


@pytest.fixture(scope="module")
def reading_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an expert that reads all."""
    return made_once(tmp_path_factory, "catch_chunks_all", partial(run, recipe=CATCH_CHUNKS, **ALL))


@pytest.mark.slow
def test_the_stored_chunks_are_those_that_the_world_took(folder: Path) -> None:
    """Laws 1, 2, 4 and 5: ledger and lag; each stored picture is what the world renders behind the actions so far, and pays
    for; trainer and engine agree on each density."""
    rows = check(folder, staleness=0, total=5, groups=2)
    assert {sum(row["mask"]) for row in rows} == {2}
    done = [e["metrics"] for e in events(folder, "StepDone")]
    assert all(m["train/gap_max"] == 0 for m in done[2:])
    loaded = load_model(str(folder / "checkpoints" / "step-000003"))
    told = loaded.tokenizer.encode("catch the ball")
    for number in (4, 5):
        for group in store.groups_of(store.read_step(folder, number)):
            for t in group.trajectories:
                world, spaces = open_frame_world(WORLD, {}, 56)
                shown, _ = world.reset(seed=group.task.data["seed"])
                paid = []
                for seen, drawn in zip(t.steps.x, t.steps.drawn, strict=True):
                    assert np.array_equal(seen, shown.reshape(-1))
                    paid.append(0.0)
                    for action in drawn[-2:]:
                        if world.world.row < 3:
                            shown, reward, *_ = world.step(spaces.action(action[None]))
                            paid[-1] += reward
                first = len(t.tokens) - 2
                assert list(t.score.steps) == list(enumerate(paid, first)) and t.score.value == sum(paid)
                assert t.tokens[1 : 1 + len(told)] == told and "3 steps in 2 chunks" in t.text
                if number == 4:
                    with torch.no_grad():
                        packed = PackedSteps.of([t.steps.rows], [t.tokens[:first]], "cpu")
                        density = loaded.head.evaluate_steps(packed, temperature=1.0)[0]
                    assert density.tolist() == pytest.approx(list(t.logprobs)[first:], abs=1e-5)


@pytest.mark.slow
def test_an_expert_that_reads_all_keeps_the_laws(reading_all: Path, tmp_path: Path) -> None:
    """Laws 1, 2, 3, 4 and 9: ledger and lag, the same bits in engine and trainer, behind a kill and from the store."""
    check(reading_all, staleness=0, total=5, groups=2)
    done = [e["metrics"] for e in events(reading_all, "StepDone")]
    assert all(m["train/gap_max"] == 0 for m in done[2:])
    assert any("expert" in name for name in final(reading_all))
    test_the_gradient_is_the_same_for_any_split(reading_all)
    test_a_step_is_recomputed_from_its_stored_rollouts(reading_all, 5)
    assert run_and_die(tmp_path / "run", ("StepDone", 4), recipe=CATCH_CHUNKS, **ALL) == -9
    run(tmp_path / "run", recipe=CATCH_CHUNKS, **ALL)
    ours, theirs = final(tmp_path / "run"), final(reading_all)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(reading_all)


@pytest.mark.slow
def test_the_gradient_is_the_same_for_any_split(folder: Path) -> None:
    """Law 3, over the episodes of a stored step."""
    algo = row("grpo")
    t = trainer(load_model(str(folder / "checkpoints" / "step-000003")), algo)
    b = batch(store.groups_of(store.read_step(folder, 4)), algo)
    whole = gradient(t, b, algo)
    assert whole.norm() > 1e-4
    cuts = [gradient(t, b, algo, micro_tokens=n) for n in (1, 60, 150)]
    cuts += [gradient(t, shuffled(b, seed, whole_groups=not seed), algo, micro_tokens=100) for seed in (0, 1)]
    assert max(apart(cut, whole) for cut in cuts) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("StepDone", 2), ("StepDone", 4)])
def test_a_killed_run_ends_with_the_same_bits(folder: Path, tmp_path: Path, moment: tuple[str, int]) -> None:
    """Law 9, out of the supervised phase and out of RL."""
    assert run_and_die(tmp_path / "run", moment, recipe=CATCH_CHUNKS) == -9
    run(tmp_path / "run", recipe=CATCH_CHUNKS)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(folder)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 5])
def test_a_step_is_recomputed_from_its_stored_rollouts(folder: Path, step: int) -> None:
    found, [done] = replay.replay(folder, step), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == step]
    same = [name for name in found if not name.endswith("_s")]
    assert len(same) > 5 and {name: found[name] for name in same} == {name: done[name] for name in same}


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["last", "all"])
def test_stale_chunks_apart_keep_the_books_with_a_critic(tmp_path: Path, reads: str) -> None:
    """Laws 1 and 2 with S = 1, and PPO, whose critic values the picture behind an episode that was cut off."""
    changes: dict[str, Any] = {"model__path__reads": reads}
    changes |= {"algo": {"kind": "ppo", "group_size": 4, "shaping": {"kind": "none"}}, "task__env__turns": 2}
    changes |= {
        "loop__max_staleness": 1,
        "place__kind": "split",
        "place__cluster": "local",
        "trainer__critic": {"lr": 1e-3},
    }
    run(tmp_path / "run", recipe=CATCH_CHUNKS, **changes)
    rows = check(tmp_path / "run", staleness=1, total=5, groups=2)
    assert {row["finish_reason"] for row in rows[8:]} == {"length"}
    assert all("train/value_loss" in e["metrics"] for e in events(tmp_path / "run", "StepDone") if e["step"] > 2)


@pytest.mark.slow
def test_a_frozen_tower_stays_as_it_is_and_at_lr_0_nothing_moves(folder: Path, tmp_path: Path) -> None:
    changes = {"model__vision__tower": "frozen", "loop__steps": 1}
    run(tmp_path / "run", recipe=CATCH_CHUNKS, **changes)
    moved, before = final(tmp_path / "run"), load_model(tiny(tmp_path, recipe=CATCH_CHUNKS).model.path | sizes()).model
    for name, weight in before.named_parameters():
        assert torch.equal(moved[f"model/{name}"], weight) == (".visual." in name), name
    run(tmp_path / "still", recipe=CATCH_CHUNKS, loop__warmup__steps=0, loop__steps=2, trainer__lr=0.0)
    done = [e["metrics"] for e in events(tmp_path / "still", "StepDone")]
    assert all(m["train/gap_max"] == m["train/ratio_max_deviation"] == m["train/weights_changed"] == 0 for m in done)


def sizes() -> dict:
    return {"observation_size": 56 * 56 * 3, "action_size": 1, "discrete": False, "frame": [56, 56]}


@pytest.mark.slow
def test_an_exported_folder_is_the_model_and_its_card_says_how_it_is_asked(folder: Path, tmp_path: Path) -> None:
    export_model(folder / "checkpoints" / "step-000005", tmp_path / "out")
    one, two = (load_model(str(p)) for p in (tmp_path / "out", folder / "checkpoints" / "step-000005"))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert not (tmp_path / "out" / "program.pt2").exists()
    assert (
        "rondel serve" in write_model_card(folder, 5, tmp_path / "out")
        and "instruction" in (tmp_path / "out" / "README.md").read_text()
    )


@pytest.mark.slow
def test_frames_are_the_pictures_that_it_read(folder: Path, tmp_path: Path) -> None:
    [group, _] = store.groups_of(store.read_step(folder, 5))
    shape = picture_shape(folder, read_recipe(folder))
    rows = [row for row in store.read_step(folder, 5) if row["group"] == group.id]
    grid = frame_grid(rows, actions_per_step(folder, read_recipe(folder)), shape)
    assert shape == (56, 56) and grid.shape == (4 * 57 + 1, 8 * 57 + 1, 3)
    for i, t in enumerate(group.trajectories):
        for j, seen in enumerate(t.steps.x):
            assert np.array_equal(grid[57 * i + 1 :, 57 * j + 1 :][:56, :56] * 255, seen.reshape(56, 56, 3))
    view.run(str(folder), step=5, png=str(tmp_path / "seen.png"))
    assert (tmp_path / "seen.png").read_bytes()[:4] == b"\x89PNG"


def test_who_reaches_for_the_ball_catches_it_and_who_does_not_look_catches_one_in_four() -> None:
    world, caught = SmoothCatch(), dict.fromkeys(("it", "left", "stay", "half"), 0)
    for seed in range(200):
        for name in caught:
            shown, _ = world.reset(seed=seed)
            ended, n = False, 0
            while not ended:
                plain = {"left": -1.0, "stay": 0.0, "half": 0.5}.get(name)
                action = reach_ball(shown) if plain is None else np.array([plain], np.float32)
                assert world.action_space.contains(action)
                shown, reward, ended, _, _ = world.step(action)
                n += 1
            assert n == 3
            caught[name] += int(reward)
    assert caught.pop("it") == 200 and all(n / 200 < 0.35 for n in caught.values())


def test_what_it_renders_is_where_ball_and_paddle_are() -> None:
    world = SmoothCatch(size=4, render_mode="rgb_array")
    (_, ball, paddle), _ = world.reset(seed=3)
    world.step(np.array([-0.25 if paddle else 0.25], np.float32))
    frame, place = world.render(), int(28 * world.paddle)
    assert frame[28, int(28 * ball)].any() and not frame[0].any() and frame[-1, place : place + 28].any(-1).all()
    assert frame[-1].any(-1).sum() == 28


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"task__env__frames": False}, "pixels is of frames = true"),
        ({"task__env": {"kind": "control", "instruction": "catch"}}, "reads pictures: set task.env.frames = true"),
        ({"task__env__instruction": ""}, "reads an instruction"),
        ({"model__vision": {"image_tokens": 4}}, "set task.env.pixels"),
        ({"model__path__chunk": 0}, "chunk = 0 of model.path"),
        ({"task__env__pixels": 40}, r"37·37 pixels for a backbone with cells of 14·14"),
        ({"model__path": {"random": "flow_policy"}}, "task.env.frames is of flow_vla"),
        ({"model__path": {"random": "mlp_policy"}}, "task.env.frames is of flow_vla"),
        ({"task__env__expert": ""}, "name a controller in task.env.expert"),
        ({"engine__sampling__max_tokens": 5}, "engine.sampling.max_tokens has no effect"),
        ({"task__env__actions": "tokens"}, "instruction is of actions"),
    ],
)  # fmt: skip
def test_what_it_cannot_have_is_refused(tmp_path: Path, changes: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        build(tiny(tmp_path, recipe=CATCH_CHUNKS, **changes)).close()


@pytest.mark.slow
def test_its_recipe_is_checked(tmp_path: Path) -> None:
    found = {f.what: f for f in check_recipe(tiny(tmp_path, recipe=CATCH_CHUNKS))}
    assert all(f.ok for f in found.values()) and "signal" in found, found
