"""Tiny models, groups made of numbers, and the trainer without a loop, for the tests of train/."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from rondel.algos.table import Algorithm, resolve_algorithm
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.generate.envs.episode import assign_parents, join_episodes
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.train.annotate import compute_advantages
from rondel.train.critic import Critic
from rondel.train.pack import TrainBatch, batch_of
from rondel.train.settings import TrainSettings
from rondel.train.static_passes import make_static_passes
from rondel.train.step import LocalTrainer
from rondel.train.step_metrics import StepMetricSums
from rondel.train.teachers import Teacher

torch.set_num_threads(1)
SMALL = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
KINDS = {
    "llama": {},
    "shallow": {"random": "llama", "num_hidden_layers": 1},
    "tied": {"random": "llama", "tie_word_embeddings": True},
    "deep": {"random": "llama", "num_hidden_layers": 5, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mixture": {"random": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deep_mixture": {"random": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 2.0,
    },
}


@cache
def _model(kind: str, dtype: str) -> LoadedModel:
    loaded = load_model({"random": kind, **SMALL, **KINDS[kind]}, dtype="float32")
    with torch.no_grad():
        for parameter in loaded.model.parameters():  # far from the flat start, where mistakes would cancel
            parameter.mul_(3.0) if parameter.ndim >= 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    loaded.model.to(getattr(torch, dtype))
    return loaded


def model(kind: str = "llama", dtype: str = "float32") -> LoadedModel:
    """A fresh copy of a tiny random model."""
    return copy.deepcopy(_model(kind, dtype))


def trajectory(
    pieces: Sequence[tuple[int, int]],
    rng: np.random.Generator,
    *,
    prompt: Sequence[int] = (),
    reward: float | None = None,
) -> Trajectory:
    """`pieces` are (length, mask) behind the prompt: [(3, 1), (2, 0), (4, 1)] is an episode of two turns."""
    t = Trajectory()
    t.extend(list(prompt))
    for length, written in pieces:
        tokens = rng.integers(5, 100, length).tolist()
        if written:
            t.extend(tokens, logprobs=(-rng.uniform(2.0, 7.0, length)).tolist(), versions=[0] * length)
        else:
            t.extend(tokens)
    t.score = Score(float(rng.normal()) if reward is None else reward)
    return t


def awkward_groups(seed: int = 0) -> list[Group]:
    """Long and short completions, single tokens, a group of one, siblings that asked differently, several turns."""
    rng = np.random.default_rng(seed)

    def group(number: int, rows: list[tuple[list[int], list[tuple[int, int]]]]) -> Group:
        return Group(
            number,
            Task(f"t{number}", "fake", {}),
            [trajectory(pieces, rng, prompt=prompt) for prompt, pieces in rows],
            0,
        )

    def prompt(n: int) -> list[int]:
        return rng.integers(5, 100, n).tolist()

    a, b, c, d, e = prompt(9), prompt(4), prompt(1), prompt(7), prompt(6)
    return [
        group(3, [(a, [(1, 1)]), (a, [(30, 1)]), (a, [(2, 1)]), (a, [(1, 1)])]),
        group(7, [(b, [(5, 1)])]),
        group(8, [(d, [(3, 1)]), (d[:4] + prompt(5), [(6, 1)]), (d[:4], [(2, 1)]), (prompt(3), [(4, 1)])]),
        group(
            11, [(e, [(3, 1), (4, 0), (2, 1)]), (e, [(5, 1), (2, 0), (1, 1), (3, 0)]), (e, [(1, 1), (1, 0), (1, 1)])]
        ),
        group(12, [(c, [(1, 1)]), (c, [(8, 1)])]),
    ]


def fork(of: Trajectory, at: int, pieces: list[tuple[int, int]], rng: np.random.Generator) -> Trajectory:
    """Another walk, with the first `at` tokens of this one."""
    out = Trajectory(of.tokens[:at], of.mask[:at], of.logprobs[:at], of.versions[:at], agent=of.agent)
    rest = trajectory(pieces, rng)
    out.tokens, out.mask = out.tokens + rest.tokens, out.mask + rest.mask
    out.logprobs, out.versions = out.logprobs + rest.logprobs, out.versions + rest.versions
    return out


def forked_group(seed: int = 0, number: int = 3) -> Group:
    """Three episodes to one prompt: one with branches of branches, one plain, one whose branch ends inside another."""
    rng = np.random.default_rng(seed)
    asked = rng.integers(5, 100, 6).tolist()
    one, two, three = (trajectory([(7, 1), (3, 0), (5, 1), (2, 0), (4, 1)], rng, prompt=asked) for _ in range(3))
    late = fork(one, 17, [(2, 0), (3, 1)], rng)
    episodes = [
        [
            one,
            late,
            fork(late, 17, [(1, 0), (2, 1)], rng),
            fork(one, 9, [(4, 1)], rng),
            trajectory([(3, 1)], rng, prompt=[9, 8, 7]),
        ],
        [two],
        [three, fork(three, 21, [], rng)],
    ]
    for score, episode in zip((1.0, 0.0, 0.5), episodes):
        for branch in episode:
            branch.score = None
        episode[0].score = Score(score)
    group = Group(number, Task(f"t{number}", "fake", {}), join_episodes(map(assign_parents, episodes)), 0)
    for t in group.trajectories:
        t.score = t.score if t.parent is None else group.trajectories[t.parent].score
    return group


def row(kind: str = "grpo", **knobs: Any) -> Algorithm:
    return resolve_algorithm({"kind": kind, **knobs}).bounded(8)


def batch(groups: list[Group], algo: Algorithm) -> TrainBatch:
    """With its advantages, where they are made of rewards alone."""
    b = batch_of(groups)
    needs = algo.needs & {"values", "ref_logprobs", "teacher_logprobs"} | algo.advantage.needs & {"proximal_logprobs"}
    if not needs:
        compute_advantages(b, algo)
    return b


async def inline(function, *args):
    """The trainer's device is this thread."""
    return function(*args)


def trainer(
    loaded: LoadedModel | None = None,
    algo: Algorithm | None = None,
    *,
    teacher: LoadedModel | None = None,
    **settings: Any,
) -> LocalTrainer:
    loaded, chosen = loaded or model(), TrainSettings(**{"lr": 1e-3, "critic_lr": 1e-3, "start_probe": 0, **settings})
    needs = algo.needs if algo else frozenset()
    return LocalTrainer(
        loaded,
        chosen,
        run=inline,
        needs=needs,
        critic=Critic(loaded, chosen) if "values" in needs else None,
        teachers=[Teacher(teacher)] if teacher else [],
        static=make_static_passes(loaded, chosen) if chosen.shapes else None,
    )


def step(t: LocalTrainer, b: TrainBatch, algo: Algorithm):
    return asyncio.run(t.step(b, algo))


def bits(t: LocalTrainer) -> list[bytes]:
    """Everything that a refused step must not touch."""
    moments = [t.weights.moments(i) for i in range(len(t.weights.masters))]
    tensors = [*t.weights.compute, *t.weights.masters, *(state[name] for state in moments for name in sorted(state))]
    return [x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors]


def gradient(
    t, b: TrainBatch, algo, *, micro_tokens: int = 10**6, share: bool = True, noted: bool = False
) -> torch.Tensor:
    """All masters' gradients of one update, in one vector; `noted`: its proximal logprobs are with
    the samples already.
    """
    object.__setattr__(t.settings, "micro_tokens", micro_tokens)
    object.__setattr__(t.settings, "share_prompts", share)
    t.weights.zero_grad()
    if not noted:
        t._annotate(b, algo.needs)
        compute_advantages(b, algo)
    t._accumulate_gradients(b, algo, StepMetricSums(), proximal_noted=noted)
    return (
        torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in t.weights.masters])
        .double()
        .clone()
    )


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def make_stale(b: TrainBatch, rng: np.random.Generator) -> None:
    """Proximal and behavior elsewhere than the policy that was noted, and some samples demonstrations."""
    for s in b.samples:
        own = s.known.proximal.numpy()
        s.known.behavior = torch.as_tensor(own + rng.normal(0, 0.2, len(own)).astype(np.float32))
        s.known.proximal = torch.as_tensor(own + rng.normal(0, 0.2, len(own)).astype(np.float32))
        s.guided = bool(rng.integers(2))


def shuffled(b: TrainBatch, seed: int, *, whole_groups: bool) -> TrainBatch:
    rng, samples = random.Random(seed), list(b.samples)
    if not whole_groups:
        rng.shuffle(samples)
        return TrainBatch(samples)
    groups = {s.group: [x for x in samples if x.group == s.group] for s in samples}
    order = list(groups)
    rng.shuffle(order)
    return TrainBatch([s for g in order for s in rng.sample(groups[g], len(groups[g]))])
