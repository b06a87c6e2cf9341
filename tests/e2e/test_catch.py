"""A vision-language model that plays Catch from pictures: episodes of several pictures, under the laws of any run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kits.once import made_once
from kits.runs import CATCH, check, events, final, run, run_and_die, steps
from kits.train import apart, batch, gradient, row, shuffled, trainer
from rondel.core.types import Task
from rondel.driver import replay
from rondel.models.load import load_model, tokenizer_of
from rondel.runtime.journal import store

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")
from rondel.generate.envs.catch import Catch, follow_ball  # noqa: E402
from rondel.generate.envs.experts import DemonstratedGym  # noqa: E402
from rondel.generate.envs.token_worlds import TokenWorlds  # noqa: E402

WORLD = "rondel.generate.envs.catch:Catch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 supervised steps, then 3 of GRPO with 2 groups of 4 episodes of 3 turns."""
    return made_once(tmp_path_factory, "catch", partial(run, recipe=CATCH))


@pytest.mark.slow
def test_each_turn_has_its_picture_and_its_action(folder: Path) -> None:
    """Laws 1, 2, 4 and 5: ledger and lag; each picture is what the world renders behind the actions so far, each written
    token is what the world took and paid, and engine and trainer agree on its probability."""
    rows = check(folder, staleness=0, total=5, groups=2)
    assert all(e["metrics"]["train/gap_max"] < 1e-4 for e in events(folder, "StepDone") if e["step"] > 2)
    assert all(len(row["media"]) == 3 for row in rows)
    tokenizer, sight, _ = tokenizer_of(str(folder / "checkpoints" / "step-000003"))
    assert sight is not None
    for group in store.groups_of(store.read_step(folder, 5)):
        for t in group.trajectories:
            world = TokenWorlds(frames=True, pixels=112)(WORLD)()
            shown, _ = world.reset(seed=group.task.data["seed"])
            said = [tokenizer.decode([token]) for token, own in zip(t.tokens, t.mask, strict=True) if own]
            paid = []
            for place, text in zip(t.media, said, strict=True):
                assert np.array_equal(place.image.pixels, shown[0]["image"])
                shown, reward, *_ = world.step(text)
                paid.append(reward)
            assert [value for _, value in t.score.steps] == paid and t.score.value == sum(paid)


@pytest.mark.slow
def test_the_gradient_is_the_same_for_any_split(folder: Path) -> None:
    """Law 3, over episodes of three pictures each, those of a stored step."""
    algo = row("grpo", entropy={"coef": 0.02})
    t = trainer(load_model(str(folder / "checkpoints" / "step-000003"), dtype="float32"), algo)
    b = batch(store.groups_of(store.read_step(folder, 4)), algo)
    whole = gradient(t, b, algo)
    assert whole.norm() > 1e-4
    cuts = [gradient(t, b, algo, micro_tokens=n) for n in (1, 60, 150)]
    cuts += [gradient(t, shuffled(b, seed, whole_groups=not seed), algo, micro_tokens=100) for seed in (0, 1)]
    assert max(apart(cut, whole) for cut in cuts) <= 1e-6


def without_gap(folder: Path) -> list[tuple]:
    """What every step measured but how far the engine was from the trainer: turns that are read again behind a kill are
    read in other company, which is worth a last bit of a logprob.
    """
    apart = ("train/gap_", "train/mismatch_")
    return [
        (*of, {k: v for k, v in told.items() if not k.startswith(apart)}, ledger) for *of, told, ledger in steps(folder)
    ]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits_and_a_step_is_trained_again(folder: Path, tmp_path: Path) -> None:
    """Law 9: episodes that were under way are played again by the log, picture by picture."""
    assert run_and_die(tmp_path / "run", ("StepDone", 4), recipe=CATCH) == -9
    run(tmp_path / "run", recipe=CATCH)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert without_gap(tmp_path / "run") == without_gap(folder)
    for step in store.stored_steps(folder):
        mine, whole = store.read_step(tmp_path / "run", step), store.read_step(folder, step)
        assert [(r["tokens"], r["media"]) for r in mine] == [(r["tokens"], r["media"]) for r in whole]
    found, [done] = replay.replay(folder, 5), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == 5]
    same = [name for name in found if not name.endswith("_s")]
    assert len(same) > 10 and {name: found[name] for name in same} == {name: done[name] for name in same}


@pytest.mark.slow
def test_stale_episodes_apart_keep_the_books(tmp_path: Path) -> None:
    run(tmp_path / "run", recipe=CATCH, loop__max_staleness=1, place__kind="split", place__cluster="local")
    check(tmp_path / "run", staleness=1, total=5, groups=2)


@pytest.mark.slow
def test_at_lr_0_nothing_moves(tmp_path: Path) -> None:
    run(tmp_path / "run", recipe=CATCH, loop__warmup__steps=0, loop__steps=2, trainer__lr=0.0)
    done = [e["metrics"] for e in events(tmp_path / "run", "StepDone")]
    assert max(m["train/gap_max"] for m in done) < 1e-5
    assert all(m["train/ratio_max_deviation"] == m["train/weights_changed"] == 0 for m in done)


def test_who_follows_the_ball_catches_it_and_who_does_not_look_catches_one_in_four() -> None:
    expert = DemonstratedGym(follow_ball, TokenWorlds(), turns=3)
    caught = {"it": 0, "left": 0, "stay": 0}
    for seed in range(200):
        for name, actions in (
            ("left", "000"),
            ("stay", "111"),
            ("it", expert.gold(Task("", "", {"world": WORLD, "seed": seed}))),
        ):
            world = Catch()
            world.reset(seed=seed)
            ends = [world.step(int(action)) for action in actions]
            assert [ended for *_, ended, _, _ in ends] == [False, False, True] and ends[0][1] == ends[1][1] == 0
            caught[name] += int(ends[2][1])
    assert caught["it"] == 200 and all(abs(n / 200 - 0.25) < 0.1 for n in (caught["left"], caught["stay"]))


def test_what_it_renders_is_where_ball_and_paddle_are() -> None:
    world = Catch(size=4, render_mode="rgb_array")
    for seed in range(5):
        (row, ball, paddle), _ = world.reset(seed=seed)
        frame = world.render()
        assert frame.shape == (112, 112, 3) and row == 0
        lit = np.argwhere(frame[::28, ::28].any(-1)).tolist()
        assert lit == [[0, ball], [3, paddle]]
