"""Several passes over one batch: against the proximal logprobs and the advantages of before the first."""

from __future__ import annotations

import pytest
import torch

from kits.runs import events, run
from kits.train import awkward_groups, batch, model, row, step, trainer
from rondel.core.events import Warned, subscribe
from rondel.train.annotate import compute_advantages
from rondel.train.step_metrics import StepMetricSums

ROW = {"kl": {"coef": 0.05}, "surrogate": {"high": 0.28}}
HOW = {"lr": 1e-2, "micro_tokens": 40}


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_two_epochs_are_two_passes_written_out(updates):
    algo = row("grpo", **ROW)
    once = trainer(model(), algo, epochs=2, updates_per_step=updates, **HOW)
    stats = step(once, batch(awkward_groups(), algo), algo)

    written, b = trainer(model(), algo, **HOW), batch(awkward_groups(), algo)
    parts = b.split_updates(updates)
    for part in parts:
        written._annotate(part, algo.needs | {"proximal_logprobs"})
    compute_advantages(b, algo)
    for part in (*parts, *parts):
        written.weights.zero_grad()
        written._accumulate_gradients(part, algo, StepMetricSums(), proximal_noted=True)
        written.weights.step(lr=HOW["lr"], clip=written.settings.clip, norm=written.weights.gradient_norm())
    assert all(torch.equal(p, q) for p, q in zip(once.weights.masters, written.weights.masters))
    assert stats.metrics["train/ratio_max_deviation"] > 0, (
        "the second pass is off-policy, and measured against the first"
    )


@pytest.mark.slow
def test_more_updates_than_groups_are_told_once():
    algo, told = row("grpo"), []
    t, b = trainer(model(), algo, updates_per_step=40, **HOW), batch(awkward_groups(), algo)
    groups = len({sample.group for sample in b.samples})
    forget = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    for _ in range(2):
        step(t, batch(awkward_groups(), algo), algo)
    forget()
    found = [one for one in told if "updates_per_step" in one]
    assert len(found) == 1 and found[0].startswith(f"step 1 makes {groups} updates and not loop.updates_per_step = 40")


@pytest.mark.slow
def test_a_second_epoch_moves_on_and_replays_to_the_bit(tmp_path):
    from rondel.assemble import replay

    how = {"loop__warmup__steps": 0, "loop__steps": 2, "loop__epochs": 2}
    run(tmp_path, **how)
    done = {e["step"]: e["metrics"] for e in events(tmp_path, "StepDone")}
    assert all(metrics["train/ratio_max_deviation"] > 0 for metrics in done.values())
    again = replay(tmp_path, 2)
    assert {name: again[name] for name in ("train/loss", "train/grad_norm")} == {
        n: done[2][n] for n in ("train/loss", "train/grad_norm")
    }
