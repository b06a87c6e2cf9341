"""On a GPU the host waits for a micro-batch once: all that it wants to know leaves the device in one copy."""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kits.train as kit
import rondel.train.step as step_module

WAITS = ("nonzero", "masked_select", "unique", "equal", "is_nonzero")


class DeviceTensors(TorchDispatchMode):
    """Which storages hold something that the weights went into, as a device would, and who makes the host wait for one."""

    def __init__(self, weights):
        super().__init__()
        self.held = {address(x): x for x in weights}  # kept alive: no address is used twice
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = any(address(x) in self.held for x in inputs)
        name = function.overloadpacket.__name__
        by_mask = "index" in name and any(x.dtype == torch.bool for x in inputs[1:])
        in_backward = torch._C._current_graph_task_id() >= 0  # where gradients of constants are on the device, too
        reads = name == "_local_scalar_dense" and (on_device or in_backward)
        if reads or (on_device and (by_mask or name.startswith(WAITS))):
            self.waits.append(f"{name} at {caller()}")
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and on_device and address(x) is not None:
                self.held.setdefault(address(x), x if x.is_mkldnn else x.untyped_storage())
        return out


def address(x):
    """None of what is empty."""
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr() or None


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


def caller():
    ours = [f for f in traceback.extract_stack() if "/rondel/" in f.filename]
    return f"{ours[-1].filename.rsplit('/rondel/', 1)[1]}:{ours[-1].lineno}" if ours else "autograd"
