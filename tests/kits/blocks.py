"""Small block-diffusion models for tests, their engines, and what they must say, computed without any packing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kits.flows import run_here
from rondel.core.types import Group, Request, Sampling, Score, Task, Trajectory, sample_key
from rondel.core.unmasking_steps import ABSENT, MASKED, UnmaskingSteps
from rondel.generate.engine.blocks.engine import BlockEngine
from rondel.generate.envs.block_turn import mask_blocks
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel


def block_model(block: int = 4, steps: int = 3, **sizes: Any) -> LoadedModel:
    """A random llama whose distributions are far from even."""
    recipe = {
        "random": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,  # no whole vectors: what is left behind them has the same bits, too
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "block_diffusion": {"block": block, "steps": steps},
    }
    loaded = load_model({**recipe, **sizes}, dtype="float32")
    torch.manual_seed(3)
    for weight in loaded.model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return loaded


def engine(loaded: LoadedModel | None = None, **how: Any) -> BlockEngine:
    return BlockEngine(loaded or block_model(), run=run_here, **how)


def asked(i: int, *, most: int = 10, temperature: float = 1.0) -> Request:
    """Prompts of one to three tokens."""
    sampling = Sampling(max_tokens=most, temperature=temperature)
    return Request([5, 40 + i % 3, 9][: 1 + i % 3], sampling, key=sample_key(0, i, 0))


def of_completion(request: Request, done: Any) -> Trajectory:
    t = Trajectory(score=Score(1.0))
    t.extend(request.tokens)
    t.extend(done.tokens, logprobs=done.logprobs, versions=done.versions, steps=done.steps)
    return t


def unmasked_groups(seed: int = 0, block: int = 4) -> list[Group]:
    """Answers of 1 to 9 tokens, unmasked in random orders, and among them a demonstration."""
    noise = np.random.default_rng(seed)

    def drawn_steps(answer: np.ndarray) -> UnmaskingSteps:
        rows = np.full((len(answer), 1 + block), ABSENT, np.int32)
        for first in range(0, len(answer), block):
            own = answer[first : first + block]
            when = noise.integers(0, 3, len(own))
            for k, step in enumerate(when):
                rows[first + k, 0] = step
                rows[first + k, 1 : 1 + len(own)] = np.where(when < step, own, MASKED)
        return UnmaskingSteps(rows)

    def answer_of(prompt: list[int], n: int, shown: bool = False) -> Trajectory:
        answer = noise.integers(5, 100, n).astype(np.int32)
        steps = mask_blocks(answer, block, int(noise.integers(1 << 30))) if shown else drawn_steps(answer)
        t = Trajectory(score=Score(float(noise.normal())))
        t.extend(prompt)
        t.extend(answer.tolist(), logprobs=noise.uniform(-6, -3, n).tolist(), versions=[0] * n, steps=steps)
        return t

    def group(number: int, lengths: list[int]) -> Group:
        prompt = noise.integers(5, 100, number).tolist()
        return Group(number, Task(f"t{number}", "single_turn", {}), [answer_of(prompt, n) for n in lengths], 0)

    groups = [group(3, [1, 9, 2]), group(1, [4]), group(6, [5, 8, 5, 1])]
    groups[1].trajectories.append(answer_of(list(groups[1].trajectories[0].tokens[:1]), 7, shown=True))
    return groups


def plain_model(loaded: LoadedModel) -> Any:
    """The same weights in transformers' own model."""
    config = copy.deepcopy(loaded.model.config)
    config._attn_implementation = "eager"
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(loaded.model.state_dict())
    return theirs


def brute_force(theirs: Any, t: Trajectory) -> Tensor:
    """[K] log-probabilities of the written tokens, each by one pass of a plain model over the prompt, the whole blocks
    and the block in its state, under a mask that is written out.
    """
    assert isinstance(t.steps, UnmaskingSteps)
    hidden = theirs.config.block_diffusion["mask_token"]
    first, size, found = len(t.tokens) - len(t.steps), t.steps.block, []
    for k, state in enumerate(t.steps.seen):
        begin = first + k // size * size
        ids = [*t.tokens[:begin], *(hidden if s == MASKED else int(s) for s in state if s != ABSENT)]
        block = torch.tensor([at if at < first else first + (at - first) // size * size for at in range(len(ids))])
        at = torch.arange(len(ids))
        sees = (at[:, None] >= at) | (block[:, None] >= block) & (block >= first)
        mask = torch.zeros(len(ids), len(ids)).masked_fill(~sees, torch.finfo(torch.float32).min)
        logits = theirs(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, first + k].clone()
        logits[hidden] = -torch.inf
        found.append(logits.log_softmax(-1)[t.tokens[first + k]])
    return torch.stack(found)
