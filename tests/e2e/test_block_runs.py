"""A block-diffusion model in the loop: the same journal, store, checkpoints and replay as of any model of text."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kits.blocks import brute_force, plain_model
from kits.once import made_once
from kits.runs import BLOCKS, check, events, final, run, run_and_die, steps, tiny
from rondel.assemble.components import build
from rondel.checks.recipe_check import check as check_recipe
from rondel.cli import export
from rondel.core.errors import ConfigError, UserError
from rondel.core.types import Sampling
from rondel.core.unmasking_steps import SHOWN
from rondel.driver import replay
from rondel.generate.engine.notebook import Engine
from rondel.models.load import load_model
from rondel.runtime.journal import store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """2 supervised steps, 4 of RL."""
    return made_once(tmp_path_factory, "blocks", partial(run, recipe=BLOCKS, loop__warmup__steps=2, loop__steps=4))


@pytest.mark.slow
def test_ledger_versions_and_lag_are_those_of_any_run(folder):
    """Laws 1 to 3: and what the engine drew has the trainer's log-probability."""
    rows = check(folder, staleness=0, total=6)
    assert len(rows) == 2 * 8 + 4 * 4 * 4
    assert all(e["metrics"]["train/gap_max"] < 1e-5 for e in events(folder, "StepDone") if e["step"] > 2)


@pytest.mark.slow
def test_the_stored_blocks_are_those_that_were_seen(folder):
    """Law 5: a recorded log-probability is that of the weights that drew the token, of the block as it is stored."""
    [checkpoint] = [path for path in (folder / "checkpoints").iterdir() if path.name == "step-000003"]
    other, seen = plain_model(load_model(str(checkpoint), dtype="float32")), 0
    for group in store.groups_of(store.read_step(folder, 4)):
        for t in group.trajectories:
            drawn = torch.tensor([p for p, wrote in zip(t.logprobs, t.mask) if wrote])
            assert torch.allclose(brute_force(other, t), drawn, rtol=0, atol=1e-5)
            seen += 1
    assert seen == 16
    [shown, *_] = store.groups_of(store.read_step(folder, 1))
    [t] = shown.trajectories
    assert set(t.steps.step) == {SHOWN} and t.written == 4 and t.tokens[-1] == 0, "full of end tokens"


@pytest.mark.slow
def test_a_step_is_recomputed_from_its_stored_rollouts(folder):
    found, [done] = replay.replay(folder, 6), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == 6]
    same = [name for name in found if not name.endswith("_s")]
    assert len(same) > 10 and {name: found[name] for name in same} == {name: done[name] for name in same}


@pytest.mark.slow
def test_what_is_not_carried_over_is_refused(folder, tmp_path):
    for changes, why in (
        ({"engine__compile": True}, "one more token"),
        ({"model__adapter": {"kind": "lora"}}, r"model\.adapter"),
        ({"algo__kind": "ppo"}, "a critic"),
        ({"engine__speculative": {"kind": "ngram"}}, "guesses"),
        ({"task__env": {"kind": "tools", "tools": ["calculator"]}}, "several turns"),
        ({"engine__sampling": {"max_tokens": 4, "top_p": 0.9}}, "top_p"),
    ):
        with pytest.raises(ConfigError, match=why):
            build(tiny(tmp_path, recipe=BLOCKS, **changes))


@pytest.mark.slow
def test_its_model_is_exported_and_answers_in_a_notebook(folder, tmp_path):
    export.run(folder, tmp_path / "exported", False, "", False)
    assert "rondel.Engine.load" in (tmp_path / "exported" / "README.md").read_text()
    engine = Engine.load(str(tmp_path / "exported"), device="cpu")
    try:
        (one,), (two,) = (engine.generate([[5, 40]], Sampling(max_tokens=6, seed=3))[0] for _ in range(2))
        assert one.tokens == two.tokens and 0 < len(one.tokens) <= 6
    finally:
        engine.close()
    with pytest.raises(UserError, match="leave them out"):
        Engine.load(str(tmp_path / "exported"), device="cpu", speculative="ngram")


@pytest.mark.slow
def test_its_recipe_is_checked(tmp_path):
    found = {f.what: f for f in check_recipe(tiny(tmp_path, recipe=BLOCKS))}
    assert all(f.ok for f in found.values()), found


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path):
    """Law 9: in the middle of RL, between two checkpoints; texts go on behind their last whole block."""
    own = {"recipe": BLOCKS, "loop__warmup__steps": 2, "loop__steps": 4}
    assert run_and_die(tmp_path / "run", ("StepDone", 5), **own) == -9
    run(tmp_path / "run", **own)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(folder)


@pytest.mark.slow
def test_stale_steps_apart_keep_the_books(tmp_path):
    own = {"loop__warmup__steps": 2, "loop__steps": 3, "loop__max_staleness": 1, "place__kind": "split"}
    run(tmp_path / "run", recipe=BLOCKS, place__cluster="local", **own)
    rows = check(tmp_path / "run", staleness=1, total=5, block=4)
    assert max(row["trained_at"] - row["born"] for row in rows) == 1
