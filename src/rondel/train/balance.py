"""Micro-batches of equal size for several ranks: all wait for the fullest, so the fullest
should hold as little as can be.

    load of a micro-batch = own tokens of its samples + the prompt of every family it has
    samples of + the root of every tree of families

A family is siblings that share a prompt; a tree is families whose prompts begin alike,
and its root is what they have in common. Families are dealt whole, the largest first, each to
the emptiest micro-batch. Then samples move from the
fullest to emptier ones, or change places with theirs, while that lowers the fullest: a
family is split only where that pays for computing its prompt twice.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

ENOUGH = 1.01  # times the mean: no further search below it


@dataclass(slots=True)
class MicroBatchBin:
    """One micro-batch while it is filled: its samples by family, and what it costs to compute."""

    load: int = 0
    families: dict[int, list[int]] = field(default_factory=dict)

    @property
    def samples(self) -> list[int]:
        return sorted(i for members in self.families.values() for i in members)


@dataclass(slots=True)
class PromptFamilies:
    """own [N] tokens of each sample beside its family's prompt; family [N] its number; by
    family its prompt's tokens beyond the root and the number of its tree; tokens of the root by tree."""

    own: list[int]
    family: list[int]
    prompt: list[int]
    tree: list[int] = field(default_factory=list)  # none: every family for itself
    root: list[int] = field(default_factory=list)

    def packed_cost(self, members: Iterable[int]) -> int:
        members = list(members)
        families = {self.family[i] for i in members}
        return sum(self.own[i] for i in members) + sum(self.prompt[f] for f in families) + self.root_tokens(families)

    def root_tokens(self, families: Iterable[int]) -> int:
        return sum(self.root[t] for t in {self.tree[f] for f in families}) if self.root else 0

    def load_change(self, place: MicroBatchBin, out: list[int], into: list[int]) -> int:
        """By how much the load of `place` grows if `out` leave it and `into` join it."""
        counts = {f: len(members) for f, members in place.families.items()}
        moved = Counter(self.family[i] for i in into)
        moved.subtract(self.family[i] for i in out)
        grown = sum(self.own[i] for i in into) - sum(self.own[i] for i in out)
        left = {f for f, n in moved.items() if f in counts and counts[f] + n == 0}
        joined = {f for f, n in moved.items() if f not in counts and n > 0}
        grown += sum(self.prompt[f] for f in joined) - sum(self.prompt[f] for f in left)
        if self.root and (left or joined):
            grown += self.root_tokens((counts.keys() - left) | joined) - self.root_tokens(counts)
        return grown

    def move_samples(self, source: MicroBatchBin, goal: MicroBatchBin, there: list[int], back: list[int]) -> None:
        for a, b, members in ((source, goal, there), (goal, source, back)):
            a.load, b.load = a.load + self.load_change(a, members, []), b.load + self.load_change(b, [], members)
            for i in members:
                a.families[self.family[i]].remove(i)
                if not a.families[self.family[i]]:
                    del a.families[self.family[i]]
                b.families.setdefault(self.family[i], []).append(i)


def in_order(families: PromptFamilies, budget: int, *, filled: bool = False) -> list[list[int]]:
    """-> samples of each micro-batch, neighbours together, in parts of nearly equal size: a
    small last one would still pay for a whole pass over the gradients. `filled`: each as full as the budget allows."""
    if not families.own:
        return []
    total = families.packed_cost(range(len(families.own)))
    most = max(families.packed_cost([i]) for i in range(len(families.own)))
    budget = budget if filled else min(budget, -(-total // -(-total // budget)) + most)
    cuts: list[list[int]] = [[]]
    here: set[int] = set()
    cost = 0
    for i, f in enumerate(families.family):
        n = families.own[i]
        if f not in here:
            n += families.prompt[f] + families.root_tokens(here | {f}) - families.root_tokens(here)
        if cuts[-1] and cost + n > budget:
            cuts.append([])
            here, cost, n = set(), 0, families.packed_cost([i])
        cuts[-1].append(i)
        here.add(f)
        cost += n
    return cuts


def balance_micro_batches(families: PromptFamilies, *, budget: int, ranks: int) -> list[list[int]]:
    """-> samples of each micro-batch, the fullest first; as many for every rank as fit
    its budget, fewer only where samples are.

    A micro-batch of one sample may exceed the budget, no other does. The same on every rank.
    """
    own = families.own
    each = max(1, -(-families.packed_cost(range(len(own))) // (budget * ranks)))
    while True:
        bins = _deal_samples(families, each * ranks)
        _even_out(families, bins)
        if each * ranks >= len(own) or all(b.load <= budget or len(b.samples) == 1 for b in bins):
            return [b.samples for b in sorted(bins, key=lambda b: (-b.load, b.samples)) if b.families]
        each += 1


def _deal_samples(families: PromptFamilies, n: int) -> list[MicroBatchBin]:
    bins = [MicroBatchBin() for _ in range(n)]
    heap = [(0, k) for k in range(n)]
    members: dict[int, list[int]] = {}
    for i, f in enumerate(families.family):
        members.setdefault(f, []).append(i)
    for f, own in sorted(members.items(), key=lambda item: (-families.packed_cost(item[1]), item[0])):
        load, k = heapq.heappop(heap)
        bins[k].families[f] = list(own)
        bins[k].load = load + families.packed_cost(own)
        heapq.heappush(heap, (bins[k].load, k))
    return bins


def _even_out(families: PromptFamilies, bins: list[MicroBatchBin]) -> None:
    """Lower the fullest while that can be done; one that cannot be lowered (a single long
    sample) is left, and the others go on.
    """
    left = list(bins)
    while len(left) > 1:
        left.sort(key=lambda b: b.load)
        if left[-1].load <= ENOUGH * sum(b.load for b in left) / len(left):
            return
        if not any(_rebalance_bins(families, left[-1], other) for other in left[:-1]):
            left.pop()


def _rebalance_bins(families: PromptFamilies, full: MicroBatchBin, other: MicroBatchBin) -> bool:
    """Move or swap the samples or families that leave the fuller of both as empty as can
    be. -> whether that is less than before.
    """
    best, chosen = full.load, None
    for there, back in _swap_candidates(families, full, other):
        after = max(
            full.load + families.load_change(full, there, back), other.load + families.load_change(other, back, there)
        )
        if after < best:
            best, chosen = after, (there, back)
    if chosen is None:
        return False
    families.move_samples(full, other, *chosen)
    return True


def _swap_candidates(
    families: PromptFamilies, full: MicroBatchBin, other: MicroBatchBin
) -> Iterator[tuple[list[int], list[int]]]:
    own = families.own
    half = (full.load - other.load) / 2
    theirs = sorted((own[i], i) for i in other.samples)
    whole = list(other.families.values())
    for members in full.families.values():
        yield members[:], []
        yield from ((members[:], others[:]) for others in whole)
        several, amount = [], 0.0
        for i in sorted(members, key=lambda i: (-own[i], i)):
            yield [i], []
            at = bisect_left(theirs, (own[i] - half, -1))
            for _, j in theirs[max(0, at - 1) : at + 1]:
                yield [i], [j]
            if amount + own[i] <= half:
                several.append(i)
                amount += own[i]
        if len(several) > 1:
            yield several, []
