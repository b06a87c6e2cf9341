"""Small models of a world for tests, their engines, and what such models learn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kits.flows import run_here
from rondel.core.transitions import OBSERVED, PREDICTED, transition_rows, transitions
from rondel.core.types import Group, Request, Sampling, Score, Task, Trajectory, sample_key
from rondel.generate.engine.control.world_engine import WorldEngine
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel


def world_model(*, discrete: bool = True, **sizes: Any) -> LoadedModel:
    """Of three members, in which no layer is near to 0."""
    given = {"observation_size": 4, "action_size": 3, "discrete": discrete, "ensemble": 3, "hidden_size": 16}
    scale = {"centre": [0.1] * 4, "spread": [2.0, 1.0, 0.5, 1.0], "step": [0.1, 1.0, 0.5, 0.2, 2.0]}
    loaded = load_model({"random": "mlp_world", "seed": 0, "num_hidden_layers": 1, **given, **scale, **sizes})
    for member in loaded.model.members:
        torch.nn.init.normal_(member.mean.weight, std=0.3)
        torch.nn.init.normal_(member.log_std.weight, std=0.3)
        torch.nn.init.normal_(member.end.weight, std=0.5)
    return loaded


def world_engine(loaded: LoadedModel | None = None, **how: Any) -> WorldEngine:
    return WorldEngine(loaded or world_model(), run=run_here, **how)


def asked(i: int, *, discrete: bool = True) -> Request:
    """For what follows an action."""
    noise = np.random.default_rng(i)
    action = [noise.integers(3)] if discrete else noise.normal(size=3)
    shown = np.concatenate([noise.normal(size=4), action]).astype(np.float32)
    return Request([0], Sampling(max_tokens=1), key=sample_key(0, i, 0), policy="world", observation=shown)


def observed_rows(n: int, seed: int = 0, *, discrete: bool = True) -> np.ndarray:
    """[n, O + D + O + 3] an episode of a linear world, which ends it."""
    noise = np.random.default_rng(seed)
    actions = noise.integers(3, size=(n, 1)).astype(float) if discrete else noise.normal(size=(n, 3))
    seen = [noise.normal(size=4)]
    for action in actions:
        seen.append(0.9 * seen[-1] + 0.1 * action.sum() + 0.05 * noise.normal(size=4))
    path = np.array(seen, np.float32)
    return transition_rows(path[:-1], actions, path[1:], noise.normal(size=n), np.arange(n) == n - 1)


def learned_groups(loaded: LoadedModel, seed: int = 0) -> list[Group]:
    """Observed episodes of 1 to 9 transitions, and one that the model drew."""
    discrete = loaded.model.config.discrete

    def episode(n: int, number: int, agent: str = OBSERVED) -> Trajectory:
        rows = observed_rows(n, seed + number, discrete=discrete)
        if agent == PREDICTED:
            rows[:, loaded.head.observed] = np.arange(n) % 3
        t = Trajectory(policy="world", agent=agent, score=Score(0.5, {"error_1": 0.25 * n}))
        t.extend([0])
        t.extend([0] * n, logprobs=[-1.0] * n, versions=[0] * n, steps=transitions(rows, 4))
        return t

    def group(number: int, lengths: list[int]) -> Group:
        return Group(number, Task(f"t{number}", "control", {}), [episode(n, number) for n in lengths], 0)

    drawn = Group(5, Task("t5", "control", {}), [episode(3, 5), episode(4, 6, PREDICTED)], 0)
    return [group(3, [1, 9, 2]), group(1, [4]), drawn, group(2, [7, 3])]
