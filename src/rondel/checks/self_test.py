"""A few steps at lr = 0: whatever moves is a lie. It finds a broken log-probability before an hour is spent.

Each step has other groups, so every answer that was drawn passes once, and the optimizer takes several steps in a row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from rondel.checks.progress import Say, silent, slow_part
from rondel.core.types import POLICY, Group
from rondel.score.preflight import CheckFinding
from rondel.train.multi_policy import policy_metric

if TYPE_CHECKING:
    from rondel.assemble.run_components import Components
    from rondel.train.step import LocalTrainer

STEPS = 3
SMALL = 500_000_000  # weights; a larger model is stepped only when asked, since it needs the optimizer's memory
GAP = {"torch.float32": 1e-4, "torch.float16": 0.02, "torch.bfloat16": 0.1}  # mean |trainer - engine| in nats a token
OVERFLOWS = 16  # of float16, each of which halves the loss scale (train/loss_scale.py), before a step is a fault

WATCHED = ("train/ratio_max_deviation", "train/clip_fraction", "train/grad_norm", "train/gap_mean", "train/mismatch_k3")


async def self_test(
    parts: Components,
    groups: list[Group],
    prepare: Callable[[list[Group]], Awaitable[Any]],
    *,
    asked: bool,
    say: Say = silent,
) -> list[CheckFinding]:
    """One finding each: the ratio is 1, nothing is clipped, every weight keeps its bits, trainer and engine agree."""
    known, scored = {POLICY: parts.model_info, **parts.placed.others}, [g for g in groups if g.rewards]
    trainers = parts.placed.trainers
    weights = sum(known[name].parameters for name in trainers)
    if weights > SMALL and not asked:
        return [
            CheckFinding(
                "lr = 0", True, f"not run on {weights / 1e9:.1f} billion weights; rondel check --self-test runs it"
            )
        ]
    if not scored:
        return [
            CheckFinding("lr = 0", False, "no scored rollouts to train on", "look at the findings about the reward")
        ]
    settings = {name: trainer.main for name, trainer in trainers.items()}
    for trainer in trainers.values():
        trainer.main = trainer.main.at_rest()
    before, seen = [_weights_digest(trainer) for trainer in trainers.values()], list[dict[str, float]]()
    for number in range(STEPS):
        for _ in range(1 + OVERFLOWS):
            batch = await prepare(scored[number::STEPS] or scored)
            with slow_part(say, f"lr = 0: step {number + 1} of {STEPS}, {len(batch.samples)} answers"):
                async with parts.placed.devices.parked(), parts.placed.devices.training():
                    stats = await parts.trainer.step(batch, parts.algo)
            if not stats.note.startswith("overflow"):
                break
        if not stats.stepped:
            return [
                CheckFinding(
                    "lr = 0",
                    False,
                    f"a finite-check refused the step: {stats.note}",
                    "look at the rewards and the model's dtype",
                )
            ]
        seen.append(stats.metrics)
    changed = [_weights_digest(trainer) for trainer in trainers.values()] != before
    for name, trainer in trainers.items():
        trainer.main = settings[name]
    told = {
        watched: [m[own] for m in seen for name in trainers if (own := policy_metric(name, watched)) in m]
        for watched in WATCHED
    }
    worst = {watched: max(values) for watched, values in told.items() if values}
    return list(
        _list_findings(worst, changed=changed, gap=GAP[str(parts.model_info.dtype)], most=trainers[POLICY].alarm.most)
    )


def _list_findings(worst: dict[str, float], *, changed: bool, gap: float, most: float) -> Iterator[CheckFinding]:
    """What the largest number of all steps says."""
    ratio, clipped = worst.get("train/ratio_max_deviation", 0.0), worst.get("train/clip_fraction", 0.0)
    apart, k3 = worst.get("train/gap_mean"), worst.get("train/mismatch_k3", 0.0)
    anchor = "the proximal logprobs are not those of the policy: a pass is not deterministic, or dropout is on"
    yield CheckFinding("lr = 0: ratio", ratio <= gap, f"differs from 1 by at most {ratio:.1e}", anchor)
    yield CheckFinding("lr = 0: clip", clipped == 0, f"{clipped:.1%} of the tokens are clipped", anchor)
    kept = (
        f"{'CHANGED' if changed else 'the same bits'} after {STEPS} steps, gradient norm "
        f"{worst.get('train/grad_norm', 0.0):.1e}"
    )
    yield CheckFinding(
        "lr = 0: weights", not changed, kept, "something beside the optimizer writes weights: an own trainer or model?"
    )
    if apart is not None:
        told = f"mean |trainer - engine| {apart:.1e} nats a token (at most {gap:g}), K3 {k3:.1e} (at most {most:g})"
        remedy = (
            "engine and trainer disagree: model.dtype = 'float32' or engine.numerics = 'aligned' tells rounding "
            "from a bug"
        )
        yield CheckFinding("lr = 0: gap", apart < gap and k3 <= most, told, remedy)


def _weights_digest(trainer: LocalTrainer) -> bytes:
    """A digest of the masters and of the copies that the engine reads, and of the critic's."""
    digest = blake2b(digest_size=16)
    owners = [trainer.weights, *([trainer.critic.weights] if trainer.critic else [])]
    held = {t.data_ptr(): t for weights in owners for t in weights.compute}.values()
    for tensor in chain(held, (weights.read_master(i) for weights in owners for i in range(len(weights.names)))):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
