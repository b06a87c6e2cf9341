"""A learned model of a world in the loop: what was played, what was imagined, and what the model learned from."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from kits.once import made_once
from kits.runs import CARTPOLE_MODEL, check, events, final, run, run_and_die, steps, tiny
from rondel.checks.recipe_check import check as check_recipe
from rondel.core.errors import UserError
from rondel.driver import replay
from rondel.models.load import load_model
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal import store

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """4 steps of PPO, 4 episodes each of at most 12 actions, beside each of them 3 imagined ones of at most 4."""
    return made_once(tmp_path_factory, "worlds", partial(run, recipe=CARTPOLE_MODEL))


def by_agent(folder, step):
    found = {}
    for group in store.groups_of(store.read_step(folder, step)):
        for t in group.trajectories:
            found.setdefault(t.agent, []).append((group, t))
    return found


@pytest.mark.slow
def test_ledger_versions_and_lag_are_those_of_any_run(folder):
    """Laws 1 and 2, of all four kinds of trajectories; only what was played is a reward."""
    rows = check(folder, staleness=0, total=4, size=1)
    assert Counter(row["agent"] for row in rows) == {
        "": 16, "world.observed": 16, "world.imagined": 48, "world.predicted": 48
    }  # fmt: skip
    for done in events(folder, "StepDone"):
        told = {row["agent"]: 0 for row in rows}
        for row in store.read_step(folder, done["step"]):
            told[row["agent"]] += sum(row["mask"])
        m = done["metrics"]
        assert m["train/gap_max"] < 1e-5 and m["train/tokens"] == told[""] + told["world.imagined"]
        assert (m["world/real_steps"], m["world/imagined_steps"]) == (told["world.observed"], told["world.imagined"])
        assert told[""] == told["world.observed"] and told["world.imagined"] == told["world.predicted"]
    for finished in events(folder, "GroupFinished"):
        assert len(finished["rewards"]) == len(finished["lengths"]) == 1


@pytest.mark.slow
def test_the_model_learns_from_earlier_steps_too(folder):
    """At most 60 transitions, in whole episodes, beside those of the step."""
    for done in events(folder, "StepDone"):
        remembered = done["metrics"]["world/tokens"] - done["metrics"]["world/real_steps"]
        assert (remembered == 0) if done["step"] == 1 else 40 <= remembered < 60 + 12


@pytest.mark.slow
def test_what_is_stored_is_what_was_drawn(folder):
    """Laws 4 and 5: densities are those of the weights that drew, or scored; a branch begins where the policy was, and
    its next observation is what the model drew."""
    policy = load_model(str(folder / "checkpoints" / "step-000003"))
    world = load_model(str(folder / "checkpoints" / "step-000003" / "policies" / "world"))
    found = by_agent(folder, 4)
    for agent, loaded in (
        ("", policy),
        ("world.imagined", policy),
        ("world.observed", world),
        ("world.predicted", world),
    ):
        for _, t in found[agent]:
            with torch.no_grad():
                density = loaded.head.evaluate_steps(PackedSteps.of([t.steps.rows], [[0]], "cpu"))[0]
            assert density.tolist() == pytest.approx(list(t.logprobs)[1:], abs=1e-5, rel=1e-5)
            assert set(list(t.versions)[1:]) == {3}
    for (group, played), (_, observed) in zip(found[""], found["world.observed"], strict=True):
        rows = observed.steps.rows
        assert np.array_equal(rows[:, :4], played.steps.x) and rows[:, 4].tolist() == list(played.tokens)[1:]
        assert np.allclose(rows[:-1, :4] + rows[:-1, 6:10], played.steps.x[1:], atol=1e-6)
        assert rows[:, 10].tolist() == [value for _, value in played.score.steps]
        assert rows[:, 11].tolist() == [*[0.0] * (len(rows) - 1), float(played.finish_reason == "stop")]
        seen = {x.tobytes() for x in played.steps.x}
        mine = [[t for own, t in found[agent] if own is group] for agent in ("world.imagined", "world.predicted")]
        assert len(mine[0]) == 3
        for imagined, drawn in zip(*mine, strict=True):
            x, y = imagined.steps.x, drawn.steps.rows
            assert x[0].tobytes() in seen and len(x) <= 4
            assert np.array_equal(np.column_stack([x, imagined.steps.drawn]), y[:, :5])
            assert np.allclose(x[1:], x[:-1] + y[:-1, 6:10], atol=1e-6)
            assert [value for _, value in imagined.score.steps] == y[:, 10].tolist()
            assert (imagined.finish_reason == "stop") == (y[-1, 11] == 1) == (imagined.steps.after is None)


@pytest.mark.slow
def test_the_error_is_on_the_card(folder):
    card = (folder / "card.md").read_text()
    done = events(folder, "StepDone")[-1]["metrics"]
    assert "## Model of the world" in card and f"{done['world/error_1']:.3f}" in card
    real = sum(e["metrics"]["world/real_steps"] for e in events(folder, "StepDone"))
    assert f"{real:,.0f}" in card


@pytest.mark.slow
def test_a_step_is_recomputed_from_its_stored_rollouts(folder):
    found, [done] = replay.replay(folder, 4), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == 4]
    same = [name for name in found if not name.endswith("_s")]
    assert "world/loss" in same and {name: found[name] for name in same} == {name: done[name] for name in same}


@pytest.mark.slow
def test_its_recipe_is_checked(tmp_path):
    found = {f.what: f for f in check_recipe(tiny(tmp_path, recipe=CARTPOLE_MODEL, task__env__turns=60))}
    assert all(f.ok for f in found.values()), found


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path):
    """Law 9: what was under way is played and imagined again by the logs, and what is remembered comes from the store."""
    assert run_and_die(tmp_path / "run", ("StepDone", 2), recipe=CARTPOLE_MODEL) == -9
    run(tmp_path / "run", recipe=CARTPOLE_MODEL)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    last = "checkpoints/step-000004/policies/world/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (folder / last).read_bytes()
    assert steps(tmp_path / "run") == steps(folder)


@pytest.mark.slow
def test_a_trained_model_is_loaded_and_frozen(folder, tmp_path):
    """It is measured, and nothing trains it; one that is not trusted imagines nothing."""
    given = {"model": str(folder / "checkpoints" / "step-000004" / "policies" / "world"), "frozen": True}
    agents = ["world.observed", "world.predicted"]
    run(tmp_path / "run", recipe=CARTPOLE_MODEL, policies={"world": {**given, "agents": agents}}, loop__steps=1)
    [done] = events(tmp_path / "run", "StepDone")
    assert "world/loss" not in done["metrics"] and done["metrics"]["world/error_1"] > 0
    assert done["metrics"]["world/imagined_steps"] > 0
    run(tmp_path / "none", recipe=CARTPOLE_MODEL, task__env__model__trust=1e-9, loop__steps=1)
    assert {row["agent"] for row in store.read_step(tmp_path / "none", 1)} == {"", "world.observed"}


@pytest.mark.slow
def test_stale_episodes_apart_keep_the_books(tmp_path):
    run(tmp_path / "run", recipe=CARTPOLE_MODEL, loop__max_staleness=1, place__kind="split", place__cluster="local")
    check(tmp_path / "run", staleness=1, total=4, size=1)


AGENTS = ["world.observed", "world.predicted"]
WORLD = {"model": {"random": "mlp_world"}, "agents": AGENTS}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"policies": {}}, r'set \[policies.world\] model = \{ random = "mlp_world" \}'),
        ({"policies": {"world": WORLD | {"model": {"random": "mlp_policy"}}}}, "is no model of a world"),
        ({"policies": {"world": WORLD, "other": {}}}, "leave only world"),
        ({"policies": {"world": WORLD | {"agents": ["world.observed"]}}}, r'agents = \["world.observed", "world.pre'),
        ({"task__env": {"kind": "control"}}, "nothing is imagined with it"),
        ({"algo": {"kind": "grpo", "group_size": 4}, "trainer__critic": {}}, "has no critic"),
        ({"engine__sampling__temperature": 0.7}, "temperature 1"),
        ({"algo__mask_truncated": True}, "an episode that goes on until its world or task.env.turns cuts it off"),
        ({"model__path": {"random": "mlp_world"}}, "takes no actions of its own"),
        ({"policies": {"world": WORLD | {"model": {"random": "mlp_world", "hidden_size": 20}}}}, "multiple of 16"),
        ({"policies__world__model__observation_size": 3}, "policies.world.model has observation_size = 3"),
    ],
)  # fmt: skip
def test_what_it_cannot_have_is_refused(tmp_path, changes, why):
    from rondel.assemble.components import build

    with pytest.raises(UserError, match=why):
        build(tiny(tmp_path, recipe=CARTPOLE_MODEL, **changes)).close()
