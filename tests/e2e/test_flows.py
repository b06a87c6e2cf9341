"""A flow in the loop: the same journal, store, checkpoints and replay as of a model of text, and it learns."""

from __future__ import annotations

import base64
import json
from functools import partial

import pytest
import torch

from kits.once import made_once
from kits.runs import DIGITS, FLOW, VIDEO, check, events, final, run, run_and_die, steps, tiny
from rondel.checks.recipe_check import check as check_recipe
from rondel.cli import export, main, view
from rondel.cli.view import token_pieces
from rondel.core.errors import UserError
from rondel.core.types import Score
from rondel.dashboard.rollouts import read_answer, run_images
from rondel.driver import replay
from rondel.models.load import load_model
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal import store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """4 steps of flow matching, 6 of RL."""
    return made_once(tmp_path_factory, "flow", partial(run, recipe=FLOW))


@pytest.mark.slow
def test_ledger_versions_and_lag_are_those_of_any_run(folder):
    rows = check(folder, staleness=0, total=10)
    assert len(rows) == 4 * 4 + 6 * 4 * 4
    assert all(e["metrics"]["train/gap_max"] < 1e-6 for e in events(folder, "StepDone") if e["step"] > 4)


def assert_stored_as_drawn(folder, step):
    """Law 5: a chain has no gap, and its recorded densities are those of the weights that drew it."""
    loaded, seen = load_model(str(folder / "checkpoints" / f"step-{step - 1:06d}")), 0
    for group in store.groups_of(store.read_step(folder, step)):
        for t in group.trajectories:
            assert (t.steps.x[1:] == t.steps.drawn[:-1]).all() and isinstance(t.score, Score)
            prompt = [token for token, wrote in zip(t.tokens, t.mask) if not wrote]
            with torch.no_grad():
                density = loaded.head.evaluate_steps(PackedSteps.of([t.steps.rows], [prompt], "cpu"))[0]
            assert density.tolist() == [p for p, wrote in zip(t.logprobs, t.mask) if wrote]
            seen += 1
    assert seen == 16


def chains(folder):
    """Of each stored step, each group: what its trajectories have drawn."""
    stored = [store.groups_of(store.read_step(folder, step)) for step in store.stored_steps(folder)]
    return [[[t.steps for t in group.trajectories] for group in groups] for groups in stored]


@pytest.mark.slow
def test_the_stored_points_are_those_that_were_drawn(folder):
    assert_stored_as_drawn(folder, 10)


@pytest.mark.slow
def test_a_step_is_recomputed_from_its_stored_rollouts(folder):
    found, [done] = replay.replay(folder, 10), [e["metrics"] for e in events(folder, "StepDone") if e["step"] == 10]
    same = [name for name in found if not name.endswith("_s")]
    assert len(same) > 10 and {name: found[name] for name in same} == {name: done[name] for name in same}


@pytest.mark.slow
def test_what_it_learned_is_told_from_its_stored_points(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "flows", str(folder), "--steps", "2", "--json"])
    assert not end.value.code
    told = json.loads(capsys.readouterr().out.splitlines()[-1])[str(folder)]
    spreads = []
    for group in store.groups_of(store.read_step(folder, 5)):
        points = torch.tensor([t.steps.drawn[-1].tolist() for t in group.trajectories])
        spreads.append(float((points - points.mean(0)).square().sum(1).mean().sqrt()))
    assert told["steps"] == 6 and told["spread"][0] == pytest.approx(sum(spreads) / len(spreads), abs=1e-3)
    last = [row["reward"] for step in (9, 10) for row in store.read_step(folder, step)]
    assert told["reward"][2] == pytest.approx(sum(last) / len(last), abs=1e-3)


@pytest.mark.slow
def test_every_second_step_is_trained(tmp_path):
    """Counted back from the last one, whose point is scored; each keeps the density that it was drawn with."""
    env = {"kind": "flow", "every": 2}
    run(
        tmp_path / "run",
        recipe=FLOW,
        loop__steps=1,
        loop__warmup__steps=0,
        task__env=env,
        engine__sampling__max_tokens=5,
    )
    rows = check(tmp_path / "run", staleness=0, total=1)
    assert all([token for token, wrote in zip(r["tokens"], r["mask"]) if wrote] == [0, 2, 4] for r in rows)
    [done] = events(tmp_path / "run", "StepDone")
    assert done["metrics"]["train/tokens"] == 4 * 4 * 3 and done["metrics"]["train/gap_max"] < 1e-6


@pytest.mark.slow
def test_the_distance_to_the_reference_has_a_closed_form(tmp_path):
    """0 before the first update and more behind it, as the estimate; the same numbers from the stored rollouts."""
    kl = {"kind": "closed_form", "coef": 0.1}
    run(tmp_path / "run", recipe=FLOW, loop__steps=3, loop__warmup__steps=0, algo__kl=kl, run__checkpoint__every=1)
    told = [e["metrics"]["train/kl_ref"] for e in events(tmp_path / "run", "StepDone")]
    assert told[0] == 0.0 and told[2] > told[1] > 0.0
    assert replay.replay(tmp_path / "run", 3)["train/kl_ref"] == told[2]


NOISED = {"task__env": {"kind": "flow", "shared_noise": True}, "loop__steps": 3, "loop__warmup__steps": 0}


@pytest.mark.slow
def test_the_chains_of_a_group_begin_with_one_noise(tmp_path):
    """`shared_noise`: no two groups have the same."""
    run(tmp_path / "whole", recipe=FLOW, **NOISED)
    begins = {}
    for step in store.stored_steps(tmp_path / "whole"):
        for group in store.groups_of(store.read_step(tmp_path / "whole", step)):
            firsts = {t.steps.x[0].tobytes() for t in group.trajectories}
            assert len(firsts) == 1 and len({t.steps.drawn[-1].tobytes() for t in group.trajectories}) == 4
            begins[group.id] = firsts.pop()
    assert len(begins) == 12 and len(set(begins.values())) == 12


@pytest.mark.slow
@pytest.mark.sweep  # chains that are killed are below; noise that is shared comes from the number of the group, as its own does
def test_the_chains_of_a_group_that_was_killed_begin_with_its_noise(tmp_path):
    run(tmp_path / "whole", recipe=FLOW, **NOISED)
    assert run_and_die(tmp_path / "cut", ("StepDone", 2), recipe=FLOW, **NOISED) == -9
    run(tmp_path / "cut", recipe=FLOW, **NOISED)
    ours, theirs = final(tmp_path / "cut"), final(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_its_recipe_is_checked_and_its_points_are_shown(folder, tmp_path):
    found = {f.what: f for f in check_recipe(tiny(tmp_path, recipe=FLOW))}
    assert all(f.ok for f in found.values()), found
    assert "reads points" in found["reward"].message and "under other noise" in found["tasks"].message
    [row, *_] = store.read_step(folder, 10)
    said = token_pieces(row, lambda ids: "-".join(map(str, ids)))
    assert said[-1] == (True, row["text"]) and len(row["text"].split()) == 2
    export.run(folder, tmp_path / "exported", False, "", False)
    assert "torch.randn(N, 2)" in (tmp_path / "exported" / "README.md").read_text()
    velocity = torch.export.load(tmp_path / "exported" / "program.pt2").module()
    model, prompt = load_model(str(tmp_path / "exported")).model, torch.tensor([4, 9, 5])
    x, sigma = torch.randn(5, 2), torch.rand(5)
    wanted = model(x, sigma, model.embed(prompt).mean(0).expand(5, -1))
    assert torch.allclose(velocity(x, sigma, prompt), wanted, atol=1e-6)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path):
    """Law 9: in the middle of RL, between two checkpoints; chains go on from the points that they had reached."""
    assert run_and_die(tmp_path / "run", ("StepDone", 8), recipe=FLOW) == -9
    run(tmp_path / "run", recipe=FLOW)
    ours, theirs = final(tmp_path / "run"), final(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(folder)
    assert chains(tmp_path / "run") == chains(folder)


def transformer(recipe):
    """Settings of a small run of images or of videos."""
    changes = {"recipe": recipe, "model__path__num_hidden_layers": 1, "model__path__num_attention_heads": 2}
    if recipe == DIGITS:
        pytest.importorskip("sklearn", reason="scikit-learn is not installed: rondel[digits]")
        return changes
    # nothing moves yet as a prompt says
    return changes | {"task__reward": {"kind": "near", "points": [[1.0] * 64], "width": 9.0}}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DIGITS, VIDEO], ids=["digits", "video"])
def test_a_killed_run_of_a_transformer_ends_with_the_same_bits(recipe, tmp_path):
    """Law 9, of images and of videos: a killed step of RL is drawn again by its keys, and paid again by its reward, and
    what is stored of it was drawn (law 5)."""
    changes = transformer(recipe) | {"loop__warmup__steps": 2, "loop__steps": 4}
    run(tmp_path / "whole", **changes)
    assert run_and_die(tmp_path / "run", ("StepDone", 5), **changes) == -9
    run(tmp_path / "run", **changes)
    ours, theirs = final(tmp_path / "run"), final(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    check(tmp_path / "run", staleness=0, total=6)
    assert_stored_as_drawn(tmp_path / "run", 4)
    assert chains(tmp_path / "run") == chains(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [FLOW, DIGITS, VIDEO], ids=["points", "digits", "video"])
def test_stale_steps_apart_keep_the_books(recipe, tmp_path):
    """Laws 1 and 2 with S = 1."""
    changes = {"recipe": FLOW} if recipe == FLOW else transformer(recipe) | {"loop__warmup__steps": 2, "loop__steps": 3}
    run(tmp_path / "run", **changes, loop__max_staleness=1, place__kind="split", place__cluster="local")
    rows = check(tmp_path / "run", staleness=1, total=10 if recipe == FLOW else 5)
    assert max(row["trained_at"] - row["born"] for row in rows) == 1


@pytest.mark.slow
def test_the_data_term_of_ddrl_stands_beside(tmp_path):
    """DDRL: 0.01 of the loss of flow matching, on data points of every step."""
    beside = [{"kind": "sft", "weight": 0.01, "groups_per_step": 2}]
    run(tmp_path / "run", recipe=FLOW, loop__steps=2, loop__warmup__steps=0, algo__kind="ddrl", algo__beside=beside)
    check(tmp_path / "run", staleness=0, total=2)
    assert [e["metrics"]["train/tokens"] for e in events(tmp_path / "run", "StepDone")] == [4 * 4 * 4 + 2 * 8] * 2


@pytest.mark.slow
def test_digits_are_drawn_and_shown(tmp_path, capsys):
    """A diffusion transformer, scikit-learn's images and a classifier as reward, in the loop of any run."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: rondel[digits]")
    run(tmp_path / "run", recipe=DIGITS, model__path__num_hidden_layers=1, loop__warmup__steps=2, loop__steps=2)
    rows = check(tmp_path / "run", staleness=0, total=4)
    assert all(0 <= row["reward"] <= 1 for row in rows if row["reward"] is not None)
    done = [e["metrics"] for e in events(tmp_path / "run", "StepDone")]
    assert all(m["train/gap_max"] < 1e-5 for m in done[2:])
    view.run(str(tmp_path / "run"), step=4, png=str(tmp_path / "grid.png"), limit=1)
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert "16 points are nearest to" in capsys.readouterr().out
    shown = run_images(tmp_path / "run")
    assert (shown["first"], shown["last"]) == (3, 4) and shown["png"].startswith("data:image/png;base64,")
    assert read_answer(tmp_path / "run", 4, 0)["image"].startswith("data:image/png")
    assert "![above: the first step, below: the last one](images.png)" in (tmp_path / "run/card.md").read_text()
    wanted = base64.b64decode(shown["png"].partition(",")[2])
    assert (tmp_path / "run/images.png").read_bytes() == wanted, "the card's is the dashboard's"
    with pytest.raises(UserError, match="of a step of RL"):
        view.run(str(tmp_path / "run"), step=1, png=str(tmp_path / "grid.png"), limit=1)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"task__env": "single_turn"}, "reads text"),
        ({"engine__sampling__top_k": 5}, "top_k"),
        ({"algo__entropy": {"coef": 0.1}}, "noise of a step is set"),
        ({"algo__kind": "ppo"}, "a critic"),
        ({"algo__kl": {"kind": "closed_form", "coef": 0.1}}, "before its supervised phase"),
        (
            {
                "algo__kl": {"kind": "closed_form", "coef": 0.1},
                "place__mesh": {"cp": 2},
                "place__kind": "split",
                "loop__warmup__steps": 0,
                "model__path": {"random": "flow_dit", "dim": 16},
            },
            "which the ranks of cp cut up",
        ),
        (
            {
                "algo__kl": {"kind": "closed_form", "coef": 0.1},
                "loop__warmup__steps": 0,
                "model__path": "smollm2-135m",
            },
            "Gaussian steps of a flow",
        ),
        ({"model__adapter__kind": "lora"}, "adapter"),
        ({"model__path": "smollm2-135m"}, "writes tokens"),
        ({"place__kind": "split", "place__mesh": {"pp": 2}}, "in replicas, shards, cp, tp; leave pp out"),
        ({"place__kind": "split", "place__mesh": {"tp": 2}}, "no attention heads that ranks could share"),
        (
            {
                "place__kind": "split",
                "place__mesh": {"tp": 2, "overlap": True},
                "model__path": {"random": "flow_dit", "dim": 4},
            },
            "leave overlap out",
        ),
        ({"place__kind": "split", "place__mesh": {"cp": 2}}, "no tokens that ranks could share"),
        ({"place__kind": "split", "place__mesh": {"cp": 2, "cp_attention": "ring"}}, "leave cp_attention out"),
        ({"task__env__budget__tokens": 2}, "budget counts text"),
        ({"algo__kind": "dppo_kl"}, "algo.surrogate of 'dppo_kl' compares probabilities"),
        ({"algo__kind": "drpo"}, "densities, which are none"),
        ({"algo__correction": {"kind": "binary_kl_mask"}, "loop__max_staleness": 1}, "algo.correction of 'flow_grpo'"),
        ({"engine__numerics": "aligned"}, "engine.numerics"),
        ({"model__dtype": "bfloat16"}, "need float32"),
        ({"task__reward": {"kind": "near", "points": [[0.0], [1.0, 2.0]]}}, "equal length"),
        ({"task__data__args": {"moods": 3}}, "moods"),
        (
            {"model__path": {"random": "flow_mlp", "dim": 3}},
            "'ring' have 2 numbers, and the flow of model.path draws 3",
        ),
    ],
)
def test_what_is_about_tokens_is_refused(tmp_path, changes, why):
    from rondel.assemble.components import build

    with pytest.raises(UserError, match=why):
        build(tiny(tmp_path, recipe=FLOW, **changes))


@pytest.mark.slow
def test_it_is_evaluated_under_noise_of_its_own(folder, capsys):
    """`rondel eval` of a flow: the prompts that it knows, drawn anew."""
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(folder), "--draws", "4", "--json"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ended.value.code == 0 and told["n"] == 1 and told["draws"] == 4 and 0 <= told["score"] <= 1
    trained = {row["text"] for step in store.stored_steps(folder) for row in store.read_step(folder, step)}
    assert told["samples"] and not {sample["text"] for sample in told["samples"]} & trained
