"""lr = 0: whatever moves now is a lie. The check that finds a broken log-probability before an hour is spent."""

from __future__ import annotations

import pytest
import torch

from kits.runs import events, final, run, tiny
from rondel.assemble import build

FOUR = {"loop__warmup__steps": 0, "loop__steps": 4, "trainer__lr": 0.0, "trainer__optimizer__weight_decay": 0.1}
MODES = {
    "grpo": {"algo__kind": "grpo", "engine__sampling": {"temperature": 0.7, "max_tokens": 6}},
    "two updates": {"loop__updates_per_step": 2},
    "stale": {"loop__max_staleness": 1, "algo__correction": {"kind": "importance"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_nothing_moves_and_the_gap_stays_flat(tmp_path, name):
    parts = build(tiny(tmp_path / "start", **FOUR))
    start = {n: p.detach().clone() for n, p in parts.trainer.loaded.model.named_parameters()}
    parts.close()
    run(tmp_path / "run", **FOUR, **MODES[name])
    done = events(tmp_path / "run", "StepDone")
    metrics = [e["metrics"] for e in done]
    assert len(metrics) == 4 and any(m["train/grad_norm"] > 0 for m in metrics)
    assert max(m["train/gap_max"] for m in metrics) < 1e-5  # engine and trainer agree on every token
    assert all(m["train/ratio_max_deviation"] == 0 for m in metrics)
    assert all(
        m["train/clip_fraction"] == 0 and m["train/lr"] == 0 and m["train/weights_changed"] == 0 for m in metrics
    )
    assert max(m["train/kl_to_start"] for m in metrics) < 1e-9
    if name == "stale":
        assert max(abs(m["train/correction"] - 1) for m in metrics) < 1e-5
    after = final(tmp_path / "run")
    assert all(torch.equal(after[f"model/{n}"], p) for n, p in start.items())
    roots = {e["root"] for e in events(tmp_path / "run", "Synced")}
    # versions count batches, digests count moves
    assert len(roots) == 1 and [e["version"] for e in done] == list(range(1, 5))
