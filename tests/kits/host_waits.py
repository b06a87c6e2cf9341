"""Who makes the host wait for a device: tensors that came of the weights stand for those of a device."""

import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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


class BlockingUploads(TorchFunctionMode):
    """Copies of ordinary memory to the device, for which CUDA's host waits: tensors made on a device, moves that are not
    asynchronous, lists as indices.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        made = name == "tensor" and kwargs.get("device") is not None
        moved = name in ("to", "cpu") and not kwargs.get("non_blocking") and isinstance((*args, 0)[1], torch.device)
        listed = name in ("__getitem__", "__setitem__") and isinstance(args[1], list)
        if made or moved or listed:
            self.found.append(f"{name} at {caller()}")
        return function(*args, **kwargs)


def address(x):
    """None of what is empty."""
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr() or None


def caller():
    ours = [f for f in traceback.extract_stack() if "/rondel/" in f.filename]
    return f"{ours[-1].filename.rsplit('/rondel/', 1)[1]}:{ours[-1].lineno}" if ours else "autograd"
