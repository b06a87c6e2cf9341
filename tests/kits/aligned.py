"""Models with aligned numerics, requests of awkward lengths, and the batch that they become."""

from __future__ import annotations

import torch

from kits.engine import SIZE, ask, prompt
from kits.train import batch, row
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel

WIDE = SIZE | {"head_dim": 16}


FAMILIES = {
    "llama": SIZE,
    "qwen3": WIDE,
    "gemma2": WIDE
    | {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 24},
    "granite_swa": WIDE | {"attention_multiplier": 0.2, "sliding_window": 8},  # with attention sinks
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
}


DTYPES = ["float32", "bfloat16"]


def model(kind: str, dtype: str) -> LoadedModel:
    loaded = load_model({"random": kind, "seed": 3, **FAMILIES[kind]}, dtype=dtype)
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    align_numerics(loaded)
    return loaded


def requests(temperature: float = 1.0):
    """Three groups of four with common prompts of awkward lengths, two of which begin alike, and a stranger."""
    prompts = [prompt(0, 1), prompt(1, 37), prompt(1, 37)[:21] + prompt(2, 69)]
    asks = [
        ask(asked, key=10 * g + s, n=new, temperature=temperature)
        for g, asked in enumerate(prompts)
        for s, new in enumerate((3, 30 if g == 1 else 12, 9, 1))
    ]
    return [*asks, ask(prompt(9, 64), key=99, n=9, temperature=temperature)]


def told(done):
    return [(c.tokens, c.logprobs) for c in done]


def batch_of(asks, done):
    """What the engine wrote, as the trainer's batch; siblings share their prompt."""
    groups: dict[tuple, list[Trajectory]] = {}
    for request, c in zip(asks, done, strict=True):
        t = Trajectory()
        t.extend(request.tokens)
        t.extend(c.tokens, logprobs=c.logprobs, versions=c.versions)
        t.score = Score(float(len(c.tokens) % 3))
        groups.setdefault(tuple(request.tokens), []).append(t)
    return batch([Group(i, Task(f"t{i}", "fake", {}), ts, 0) for i, ts in enumerate(groups.values())], row())
