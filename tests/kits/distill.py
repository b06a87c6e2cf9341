"""A teacher, answers of the policy, and the exact reverse KL between the two."""

from __future__ import annotations

import asyncio

import torch

from kits.engine import all_of, ask, engine
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.train.pack import TrainBatch


def rollouts(loaded, number: int) -> list[Group]:
    """The policy's own answers to a few prompts; every reward is 0."""
    asked = [ask([5 + i, 11, 23], key=1000 * number + 16 * i + s, n=6) for i in range(4) for s in range(16)]
    done = asyncio.run(all_of(engine(loaded), asked))
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
    """Exact, over the whole vocabulary, at every context in which the policy wrote."""
    total, count = 0.0, 0
    for sample in b.samples:
        tokens, at = torch.tensor(sample.tokens), torch.arange(len(sample.tokens))
        ours, theirs = (
            m.head.logits(m.hidden_states(tokens, at, PackedLayout([PackedSegment(0, len(at))])))
            .double()
            .log_softmax(-1)[sample.trainable - 1]
            for m in (loaded, teacher)
        )
        total, count = total + float((ours.exp() * (ours - theirs)).sum()), count + len(sample.trainable)
    return total / count


TEACHER = {
    "random": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
