"""On a GPU the host waits for a micro-batch once: all that it wants to know leaves the device in one copy."""

import pytest
import torch

import kits.train as kit
import rondel.train.step as step_module
from kits.host_waits import DeviceTensors


@pytest.mark.slow
@pytest.mark.parametrize("kind, more", [("grpo", {"entropy": {"coef": 0.01}}), ("gspo", {}), ("dapo", {})])
def test_the_host_waits_once_a_micro_batch(monkeypatch, kind, more):
    row = kit.row(kind, **more)
    trainer, copies = kit.trainer(algo=row, micro_tokens=24), []
    device = DeviceTensors(trainer.loaded.model.parameters())
    copy = step_module._to_host

    def copy_to_host(values):
        with torch.utils._python_dispatch._disable_current_modes():
            found = copy(values)
            copies.append(len(device.waits))
            return {name: value.clone() for name, value in found.items()}

    monkeypatch.setattr(step_module, "_to_host", copy_to_host)
    own, sums = kit.batch(kit.awkward_groups(), row), step_module.StepMetricSums()
    trainer._annotate(own, row.needs)
    with device:
        trainer._accumulate_gradients(own, row, sums, proximal_noted="proximal_logprobs" in row.needs)
    assert len(copies) > 3
    assert not device.waits, set(device.waits)
