"""Tiny mixtures of experts, and the routes that a plain forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kits.engine import SIZE
from rondel.core.types import Completion, Group, Score, Task, Trajectory
from rondel.models.loaded_model import LoadedModel
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.routing_tape import RoutingTape

EXPERTS = {"num_experts_per_tok": 2}
LATENT = dict(
    num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, num_hidden_layers=3,
)  # fmt: skip
MOES = {
    "mixtral": SIZE | EXPERTS | {"num_local_experts": 8},
    "qwen3_moe": SIZE
    | EXPERTS
    | {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "deepseek_v3": SIZE | LATENT | EXPERTS,
}


def forward(loaded: LoadedModel, tokens: list[int], tape: RoutingTape | None = None) -> torch.Tensor:
    n = len(tokens)
    return loaded.hidden_states(torch.tensor(tokens), torch.arange(n), PackedLayout([PackedSegment(0, n)]), tape)


@torch.no_grad()
def own_routes(loaded: LoadedModel, tokens: list[int]) -> np.ndarray:
    tape = RoutingTape(loaded.routers)
    forward(loaded, tokens, tape)
    return tape.recorded_routes.sort(-1).values.numpy()


def group_of(prompt_tokens: list[int], outs: Sequence[Completion]) -> Group:
    """Answers with their records, scored 0 and 1 in turn."""
    members = []
    for i, out in enumerate(outs):
        t = Trajectory(score=Score(float(i % 2)), experts=out.experts)
        t.extend(prompt_tokens)
        t.extend(out.tokens, logprobs=out.logprobs, versions=out.versions)
        members.append(t)
    return Group(0, Task("0", "single_turn", {}), members, 0)
