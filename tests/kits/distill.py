"""A teacher, answers of the policy, and the exact reverse KL between the two."""

from __future__ import annotations

import asyncio
from itertools import accumulate

import torch

from kits.engine import all_of, ask, engine
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.train.pack import TrainBatch


def rollouts(loaded, number: int) -> list[Group]:
    """The policy's own answers to a few prompts; every reward is 0."""
    asked = [ask([5 + i, 11, 23], key=1000 * number + 16 * i + s, n=6) for i in range(4) for s in range(16)]
    done = asyncio.run(all_of(engine(loaded, max_running=64), asked))
    groups = [Group(i, Task(f"t{i}", "fake", {}), [], 0) for i in range(4)]
    for n, (request, completion) in enumerate(zip(asked, done)):
        t = Trajectory()
        t.extend(list(request.tokens))
        t.extend(completion.tokens, logprobs=completion.logprobs, versions=completion.versions)
        t.score = Score(0.0)
        groups[n // 16].trajectories.append(t)
    return groups


@torch.no_grad()
def reverse_kl(loaded, teacher, b: TrainBatch) -> float:
    """Exact, over the whole vocabulary, at every context in which the policy wrote: all samples in one pass."""
    tokens = torch.cat([torch.tensor(sample.tokens) for sample in b.samples])
    at = torch.cat([torch.arange(len(sample.tokens)) for sample in b.samples])
    starts = [0, *accumulate(len(sample.tokens) for sample in b.samples)]
    layout = PackedLayout([PackedSegment(start, len(x.tokens)) for start, x in zip(starts, b.samples)])
    written = torch.cat([torch.as_tensor(x.trainable) + start - 1 for start, x in zip(starts, b.samples)])
    ours, theirs = (
        m.head.logits(m.hidden_states(tokens, at, layout)[written]).double().log_softmax(-1) for m in (loaded, teacher)
    )
    return float((ours.exp() * (ours - theirs)).sum()) / len(written)


TEACHER = {
    "random": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
