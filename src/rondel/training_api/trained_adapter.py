"""An adapter that is trained: its weights, its gradient, its moments, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rondel.core.errors import TrainError, UserError, error_boundary
from rondel.models.adapter_rows import AdapterWeights
from rondel.training_api.backend import Adam

MOMENTS = "optimizer.safetensors"


class TrainedAdapter:
    """AdamW (arXiv:1711.05101) over A and B in float32. `added`: forward passes whose gradient waits for a step."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.weights, self.added = weights, 0
        self.parameters = {
            f"{layer}.{part}": tensor.requires_grad_(True)
            for layer, pair in weights.layers.items()
            for part, tensor in zip("AB", pair, strict=True)
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0)

    def drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.added = 0

    def step(self, adam: Adam) -> dict[str, float]:
        """One step with the gradient that was added. TrainError where it is not finite: it is gone then,
        nothing moved."""
        if not self.added:
            raise UserError("there is no gradient: call forward_backward before optim_step")
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        if norm != norm or norm == float("inf"):
            self.drop_gradient()
            raise TrainError(f"the norm of the gradient is {norm}: the gradient is gone, nothing has moved")
        if 0 < adam.clip < norm:
            torch._foreach_mul_(gradients, adam.clip / norm)
        settings = {
            "lr": adam.lr,
            "betas": (adam.beta1, adam.beta2),
            "eps": adam.eps,
            "weight_decay": adam.weight_decay,
        }
        self.optimizer.param_groups[0].update(settings)
        self.optimizer.step()
        self.drop_gradient()
        return {"optim/grad_norm": norm, "optim/lr": adam.lr}

    def save_moments(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        steps = 0
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            if state:
                steps = int(state["step"])
                tensors[f"{name}.exp_avg"], tensors[f"{name}.exp_avg_sq"] = state["exp_avg"], state["exp_avg_sq"]
        save_file(
            {k: t.detach().cpu().contiguous() for k, t in tensors.items()},
            folder / MOMENTS,
            {"rondel": json.dumps({"steps": steps})},
        )

    def load(self, weights: AdapterWeights, folder: Path | None) -> None:
        """Take over the numbers of `weights`, which must have the same layers and rank, and the moments in `folder`."""
        mine, theirs = self.weights, weights
        shapes = [{name: (a.shape, b.shape) for name, (a, b) in w.layers.items()} for w in (mine, theirs)]
        if shapes[0] != shapes[1] or mine.scale != theirs.scale:
            raise UserError(
                f"these weights are of rank {theirs.rank} on {len(theirs.layers)} layers, the adapter of this client "
                f"of rank {mine.rank} on {len(mine.layers)}: create it from the state instead of loading into it"
            )
        moments = None if folder is None else self._read_moments(folder)
        with torch.no_grad():
            for layer, pair in mine.layers.items():
                for own, given in zip(pair, theirs.layers[layer], strict=True):
                    own.copy_(given)
        self.optimizer.state.clear()
        self.drop_gradient()
        if moments is not None:
            steps, tensors = moments
            for name, parameter in self.parameters.items():
                if f"{name}.exp_avg" in tensors:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(float(steps)),
                        "exp_avg": tensors[f"{name}.exp_avg"],
                        "exp_avg_sq": tensors[f"{name}.exp_avg_sq"],
                    }

    def _read_moments(self, folder: Path) -> tuple[int, dict[str, Tensor]]:
        if not (folder / MOMENTS).is_file():
            raise UserError("this state holds no moments of an optimizer: load it without them")
        tensors: dict[str, Tensor] = {}
        with error_boundary(TrainError, f"reading '{folder / MOMENTS}'"), safe_open(folder / MOMENTS, "pt") as file:
            steps = json.loads(file.metadata()["rondel"])["steps"]
            for key in file.keys():  # noqa: SIM118  # a file, no mapping
                name = key.removesuffix(".exp_avg_sq").removesuffix(".exp_avg")
                parameter = self.parameters.get(name)
                tensors[key] = file.get_tensor(key)
                if parameter is None or tensors[key].shape != parameter.shape:
                    raise TrainError(f"'{folder / MOMENTS}' holds {key}, which this adapter has not")
                tensors[key] = tensors[key].to(parameter.device)
        return steps, tensors
