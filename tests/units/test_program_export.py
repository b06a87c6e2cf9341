"""Policies as programs of torch: what they compute, and that torch alone runs them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kits import control
from rondel.models.packed_steps import PackedSteps
from rondel.models.program_export import export_program


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "chunks"])
def test_a_program_acts_as_the_policy_does(tmp_path, kind):
    """Any number of observations; every operation is one of torch's own."""
    loaded = control.POLICIES[kind]()
    traced = torch.export.load(export_program(loaded.model, tmp_path))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls and all(str(target).startswith("aten.") for target in calls)
    run = traced.module()
    for n in (1, 7):
        seen = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
        steps = PackedSteps.of([seen], [[0]], "cpu")
        if kind == "numbers":
            drawn, _ = loaded.head.draw(steps, np.zeros(n, np.float32), np.zeros((n, 3)))
            assert np.allclose(run(torch.from_numpy(seen)).detach().numpy(), drawn, atol=1e-6)
            continue
        noise = np.random.default_rng(3).normal(size=(n, loaded.head.dim)).astype(np.float32)
        drawn, _ = loaded.head.draw(steps, np.zeros(n, np.float32), noise)
        found = run(torch.from_numpy(seen), torch.from_numpy(noise[:, : loaded.head.point]))
        assert np.allclose(found.detach().numpy(), drawn[:, -loaded.head.point :].reshape(n, 2, 3), atol=1e-6)
