"""A draft that is trained beside the policy: the policy does not notice, the acceptance does."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.drafts import LITTLE, MODEL, drafted
from kits.engine import all_of, ask, prompt, tiny, twin
from kits.runs import balances, events, run, run_and_die
from kits.train import awkward_groups, batch, bits, inline, model, row, step
from kits.train import trainer as plain_trainer
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.core.events import Speculated, subscribe
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.runtime.telemetry.metrics import from_guesses
from rondel.train.checkpoint import bytes_needed, load_trainer, save_trainer
from rondel.train.draft import DraftTrainer
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer

SMALL = {"random": "llama", **LITTLE, "hidden_size": 32, "intermediate_size": 32, "seed": 2}


def with_draft(lr: float = 1e-3, loaded=None) -> LocalTrainer:
    settings = TrainSettings(lr=1e-3, start_probe=0)
    return LocalTrainer(loaded or model(), settings, run=inline, draft=DraftTrainer(tiny("llama", **LITTLE), lr=lr))


# -- the policy --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_is_the_same_to_the_bit(dtype):
    algo = row()
    alone, beside = plain_trainer(model("llama", dtype)), with_draft(loaded=model("llama", dtype))
    for seed in range(3):
        before = [p.detach().clone() for p in beside.draft.loaded.model.parameters()]
        a, b = (step(t, batch(awkward_groups(seed), algo), algo) for t in (alone, beside))
        assert bits(alone) == bits(beside)
        assert {k: v for k, v in a.metrics.items() if not k.endswith("_s")} == {
            k: v for k, v in b.metrics.items() if not k.endswith("_s") and k != "train/draft_loss"
        }
        assert any(not torch.equal(x, y) for x, y in zip(before, beside.draft.loaded.model.parameters()))


@pytest.mark.slow
def test_the_loss_is_the_mean_cross_entropy_of_what_was_written():
    algo = row()
    b, t = batch(awkward_groups(1), algo), with_draft(lr=0.0)
    told = step(t, b, algo).metrics["train/draft_loss"]
    total = 0.0
    with torch.no_grad():
        for s in b.samples:
            tokens = torch.from_numpy(s.tokens)
            hidden = t.draft.loaded.hidden_states(
                tokens, torch.arange(len(tokens)), PackedLayout([PackedSegment(0, len(tokens))])
            )
            logp = t.draft.loaded.head.logits(hidden).double().log_softmax(-1)
            total -= float(sum(logp[at - 1, s.tokens[at]] for at in s.trainable))
    assert told == pytest.approx(total / b.total_tokens, rel=1e-6)
    assert not t.draft.weights.optimizers[0].state or all(
        torch.equal(a, c) for a, c in zip(t.draft.loaded.model.parameters(), tiny("llama", **LITTLE).model.parameters())
    )  # lr = 0 moves nothing


# -- acceptance --------------------------------------------------------------------------------------


def rollouts(policy, draft, version: int):
    """16 groups of 4 answers, rewarded for even tokens. -> (groups, share of accepted guesses)."""
    e = drafted(policy, draft, k=3, max_running=64)
    requests = [ask(prompt(100 * version + i // 4, 8), key=1000 * version + i, n=24) for i in range(64)]
    done = asyncio.run(all_of(e, requests))
    trajectories = []
    for r, c in zip(requests, done):
        t = Trajectory(score=Score(sum(token % 2 == 0 for token in c.tokens) / 24))
        t.extend(r.tokens)
        t.extend(c.tokens, logprobs=c.logprobs, versions=c.versions)
        trajectories.append(t)
    groups = [Group(g, Task(str(g), "fake", {}), trajectories[4 * g : 4 * g + 4], 0) for g in range(16)]
    return groups, e.speculation.accepted / e.speculation.proposed


def acceptance_of(lr: float, steps: int) -> list[float]:
    """RL moves the policy away from where the draft began, step by step."""
    policy, draft, algo, shares = twin(MODEL), twin(MODEL), row(), []
    t = LocalTrainer(policy, TrainSettings(lr=4e-3, start_probe=0), run=inline, draft=DraftTrainer(draft, lr=lr))
    for version in range(steps):
        groups, share = rollouts(policy, draft, version)
        shares.append(share)
        step(t, batch(groups, algo), algo)
    return shares


@pytest.mark.slow
@pytest.mark.sweep  # it learns; what it learns from is above
@pytest.mark.parametrize("steps", [5, 10])
def test_acceptance_rises_against_a_frozen_draft_as_the_policy_drifts(steps):
    """How far they come apart after ten steps; that they do shows after five."""
    frozen, learning = acceptance_of(0.0, steps), acceptance_of(4e-3, steps)
    print("ACCEPTED frozen", [round(x, 2) for x in frozen], "trained", [round(x, 2) for x in learning])
    assert frozen[0] == learning[0] > 0.99
    assert steps < 10 or (frozen[-1] < 0.2 and learning[-1] > 0.8)
    assert all(b > a + 0.05 for a, b in zip(frozen[3:], learning[3:]))


# -- checkpoints and whole runs ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_holds_the_draft(tmp_path):
    algo, t = row(), with_draft()
    step(t, batch(awkward_groups(1), algo), algo)
    assert bytes_needed(t) > bytes_needed(plain_trainer())
    save_trainer(t, tmp_path)
    other = with_draft()
    load_trainer(other, tmp_path)
    step(t, batch(awkward_groups(2), algo), algo), step(other, batch(awkward_groups(2), algo), algo)
    assert bits(other) == bits(t)
    for a, b in zip(t.draft.loaded.model.parameters(), other.draft.loaded.model.parameters()):
        assert torch.equal(a, b)


def test_a_checkpoint_without_a_draft_says_so(tmp_path):
    save_trainer(plain_trainer(), tmp_path)
    told = []
    stop = subscribe(told.append)
    load_trainer(with_draft(), tmp_path)
    stop()
    assert len(told) == 1 and "holds no draft" in told[0].message


DRAFT = {"kind": "draft", "k": 2, "lr": 1e-2, "model": SMALL | {"max_position_embeddings": 64}}


@pytest.mark.slow
def test_a_run_with_a_draft_and_its_resume(tmp_path):
    folder = tmp_path / "run"
    how = {"engine__speculative": DRAFT, "loop__warmup__steps": 6, "loop__steps": 3}
    assert run_and_die(folder, ("StepDone", 8), **how) == -9
    saved = sorted((folder / "checkpoints").glob("step-*"))[-1]
    assert "draft.safetensors" in json.loads((saved / "manifest.json").read_text())["files"]
    run(folder, **how)
    done = events(folder, "StepDone")
    assert done[-1]["step"] == 9 and balances(done[-1]["ledger"])
    losses = [e["metrics"]["train/draft_loss"] for e in done]
    # six supervised steps; then a policy that is nearly uniform
    assert losses[5] < losses[0] - 0.1 and all(np.isfinite(losses))
    assert max(e["metrics"].get("train/gap_max", 0.0) for e in done) < 1e-4  # law 4 as the trainer sees it
    guessed = events(folder, "Speculated")
    assert sum(e["proposed"] for e in guessed) > 0
    final = load_file(sorted((folder / "checkpoints").glob("step-*"))[-1] / "draft.safetensors")
    assert any(name.startswith("exp_avg.") for name in final)


@pytest.mark.slow
def test_a_run_that_looks_up_writes_what_one_without_writes(tmp_path):
    """Long forced answers in float32, so that there is something to look up: the tokens of the
    first step are the same.
    """
    how = {
        "engine__sampling": {"max_tokens": 24, "ignore_eos": True, "temperature": 0.6},
        "loop__steps": 1,
        "loop__warmup__steps": 0,
    }
    run(tmp_path / "off", **how)
    run(tmp_path / "on", **how, engine__speculative={"kind": "ngram"})
    assert sum(e["rounds"] for e in events(tmp_path / "on", "Speculated")) > 0 and not events(
        tmp_path / "off", "Speculated"
    )
    first = [[r["tokens"] for r in store.read_step(tmp_path / name, 1)] for name in ("off", "on")]
    assert first[0] == first[1]


def test_the_metrics_of_a_step():
    told = [Speculated(10, 40, 20), Speculated(10, 20, 10)]
    assert (
        from_guesses(told) == {"generate/guess_acceptance": 0.5, "generate/tokens_per_round": 2.5}
        and from_guesses([]) == {}
    )


# -- what a recipe may say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted, says",
    [
        ({"kind": "lookahead"}, "'off', 'ngram' or 'draft'"),
        ({"kind": "draft"}, "needs a model"),
        ({"kind": "ngram", "model": "x"}, 'model has no effect with kind = "ngram"'),
        ({"kind": "ngram", "lr": 1e-3}, 'lr has no effect with kind = "ngram"'),
        ({"k": 2}, 'k has no effect with kind = "off"'),
        ({"kind": "ngram", "k": 0}, "greater than or equal to 1"),
        ({"kind": "ngram", "n": 3}, "unknown key 'engine.speculative.n'"),
    ],
)
def test_what_means_nothing_is_refused(wanted, says):
    tree = {"model": {"path": "x"}, "task": {"data": {}}, "loop": {"steps": 1}, "run": {"folder": "x"}}
    with pytest.raises(ConfigError, match=says):
        Job.parse(tree | {"engine": {"speculative": wanted}})


@pytest.mark.slow
def test_a_draft_of_another_family_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="carries 32 positions and 'random-llama' 64"):
        run(tmp_path / "run", engine__speculative=DRAFT | {"model": SMALL | {"max_position_embeddings": 32}})


def test_a_draft_that_split_placement_would_not_train_is_refused_at_the_start(tmp_path):
    """It was neither trained nor stored, and the card said that it learned."""
    with pytest.raises(
        ConfigError, match=r"engine.speculative.lr = 0.01 with place.kind = \"split\".* Set engine.speculative.lr = 0"
    ):
        run(tmp_path / "run", engine__speculative=DRAFT, place__kind="split", place__cluster="local")
