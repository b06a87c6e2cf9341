"""Small policies of actions for tests, and their engines."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from kits.flows import run_here
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import Group, Request, Sampling, Score, Task, Trajectory, sample_key
from rondel.generate.engine.control.engine import ControlEngine
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel


def policy(*, discrete: bool = True, observed: int = 4, actions: int = 3, **sizes: Any) -> LoadedModel:
    """A random policy of which no layer is near to 0."""
    given = {"observation_size": observed, "action_size": actions, "discrete": discrete, "hidden_size": 16, **sizes}
    loaded = load_model({"random": "mlp_policy", "seed": 0, **given})
    torch.nn.init.normal_(loaded.model.act.weight, std=0.5)
    if not discrete:
        torch.nn.init.constant_(loaded.model.log_std, -0.4)
    return loaded


def chunk_policy(*, observed: int = 4, **sizes: Any) -> LoadedModel:
    """A random policy of chunks of 2 actions of 3 numbers, in 3 denoising steps; its weights depend on nothing else."""
    given = {
        "observation_size": observed,
        "action_size": 3,
        "chunk": 2,
        "denoising_steps": 3,
        "hidden_size": 16,
        **sizes,
    }
    loaded = load_model({"random": "flow_policy", "seed": 0, **given})
    torch.nn.init.normal_(loaded.model.act.weight, std=0.5)
    return loaded


class VlaPolicy:
    """`vla_policy("qwen3_vl")`: a random model of chunks as above, from pictures of 28·28 pixels, of which no layer is near
    to 0."""

    backbone: ClassVar[dict[str, Any]] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 7},
    }
    sizes: ClassVar[dict[str, Any]] = {
        "observation_size": 28 * 28 * 3,
        "action_size": 3,
        "discrete": False,
        "chunk": 2,
        "denoising_steps": 3,
        "hidden_size": 16,
        "frame": [28, 28],
    }

    def __call__(self, family: str = "qwen2_5_vl", reads: str = "last") -> LoadedModel:
        tower = dict(self.backbone["vision_config"])
        if family == "qwen2_vl":
            tower = {"depth": 1, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7}
        if family == "qwen3_vl":
            tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        backbone = {"random": family, **self.backbone, "vision_config": tower}
        loaded = load_model({"random": "flow_vla", "seed": 0, "backbone": backbone, "reads": reads, **self.sizes})
        torch.manual_seed(1)
        for parameter in loaded.model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5 * parameter[0].numel() ** -0.5)
        return loaded


vla_policy = VlaPolicy()


def pictured(i: int, *, temperature: float = 1.0) -> Request:
    shown = np.random.default_rng(i).integers(0, 256, 28 * 28 * 3).astype(np.float32)
    sampling = Sampling(max_tokens=1, temperature=temperature)
    return Request([10 + i, 20, 30], sampling, key=sample_key(0, i, 0), observation=shown)


POLICIES = {"choices": policy, "numbers": lambda: policy(discrete=False), "chunks": chunk_policy}


def engine(loaded: LoadedModel | None = None, **how: Any) -> ControlEngine:
    return ControlEngine(loaded or policy(), run=run_here, **how)


def asked(i: int, *, temperature: float = 1.0, observed: int = 4) -> Request:
    shown = np.random.default_rng(i).normal(size=observed).astype(np.float32)
    return Request([0], Sampling(max_tokens=1, temperature=temperature), key=sample_key(0, i, 0), observation=shown)


def acted_groups(loaded: LoadedModel, seed: int = 0) -> list[Group]:
    """Episodes of 1 to 9 actions, some of them cut off, a group of one among them."""
    noise, config = np.random.default_rng(seed), loaded.model.config

    def episode(n: int) -> Trajectory:
        rows = noise.normal(size=(n, config.observation_size + loaded.head.dim)).astype(np.float32)
        if config.discrete:
            rows[:, -1] = noise.integers(config.action_size, size=n)
        after = noise.normal(size=config.observation_size).astype(np.float32) if n % 2 else None
        rewards = noise.normal(size=n).tolist()
        t = Trajectory(score=Score(sum(rewards), steps=tuple(enumerate(rewards, 1))))
        t.extend([0])
        steps = ContinuousSteps(rows, config.observation_size, after)
        t.extend(range(n), logprobs=noise.normal(-1, 0.3, n).tolist(), versions=[0] * n, steps=steps)
        return t

    def group(number: int, lengths: list[int]) -> Group:
        return Group(number, Task(f"t{number}", "control", {}), [episode(n) for n in lengths], 0)

    return [group(3, [1, 9, 2]), group(1, [4]), group(6, [5, 5, 5, 1]), group(2, [7, 3])]
