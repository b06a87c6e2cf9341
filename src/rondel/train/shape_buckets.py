"""The few shapes that the passes of a trainer may have, so that a compiler or a recorder of graphs meets each once.

a micro-batch      430 tokens, 391 of them to be trained
smallest that      512 x 512         82 tokens and 121 targets of padding: they are seen by no other token, weigh 0
holds both                           in the loss, and count in no figure but `train/padding_share`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rondel.core.errors import TrainError
from rondel.core.events import Warned, emit

MOST = 6  # shapes that "auto" chooses
LEAST = 32  # tokens of the smallest of them


class ShapeBucket(NamedTuple):
    """`ShapeBucket(512, 256)` holds micro-batches of at most 512 tokens, of which at most 256 are trained."""

    tokens: int
    targets: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.targets}"

    def holds(self, tokens: int, targets: int) -> bool:
        return tokens <= self.tokens and targets <= self.targets


def buckets_upto(budget: int) -> tuple[ShapeBucket, ...]:
    """Powers of two up to the budget of a micro-batch, which is rounded up; at most `MOST`."""
    largest = max(LEAST, 1 << (budget - 1).bit_length())
    sizes = [largest >> k for k in range(MOST) if largest >> k >= LEAST]
    return tuple(ShapeBucket(size, size) for size in reversed(sizes))


class ShapeBuckets:
    """The shapes of a run, and how often each was met.

    grows   whether a sample that none holds may add one: those of "auto"
    """

    def __init__(self, buckets: Sequence[tuple[int, int]], *, grows: bool) -> None:
        self.given, self.grows = sorted(ShapeBucket(*b) for b in buckets), grows
        self.buckets = list(self.given)  # and those that were added
        self._met: Counter[ShapeBucket] = Counter()  # in the passes since `take_metrics`
        self._real = self._computed = 0

    @property
    def most_targets(self) -> int:
        """Of a micro-batch of several samples."""
        return max(b.targets for b in self.given)

    def choose(self, tokens: int, targets: int, whose: str) -> ShapeBucket:
        """The smallest that holds so many. `whose` names the samples, for the error."""
        found = next((b for b in self.given if b.holds(tokens, targets)), None)
        return self._added_bucket(tokens, targets, whose) if found is None else found

    def count_pass(self, shape: ShapeBucket, tokens: int) -> None:
        """A pass of this shape will run, with so many real tokens. An error where no bucket has it."""
        if shape not in self.buckets:
            known = ", ".join(map(str, self.buckets))
            raise TrainError(
                f"a pass of the shape {shape} is outside of the static shapes {known}: it would be compiled again. "
                "This is a fault of Rondel, please report it; trainer.micro_tokens without buckets trains the same"
            )
        self._met[shape] += 1
        self._real, self._computed = self._real + tokens, self._computed + shape.tokens

    def take_metrics(self) -> dict[str, float]:
        """Of the passes since the last call: shapes, passes of each, and which share of the tokens was padding."""
        out = {"train/shapes": float(len(self._met))} | {f"train/shape_{b}": float(n) for b, n in self._met.items()}
        if self._computed:
            out["train/padding_share"] = 1 - self._real / self._computed
        self._met.clear()
        self._real = self._computed = 0
        return out

    def _added_bucket(self, tokens: int, targets: int, whose: str) -> ShapeBucket:
        """Its size depends on the samples alone: a resumed run, which begins with the given ones, chooses the same."""
        known = ", ".join(map(str, self.buckets))
        told = f"{whose} has {tokens} tokens, {targets} of them to be trained, and the static shapes are {known}"
        if not self.grows:
            raise TrainError(
                f"{told}. No sample is cut: add a larger one to trainer.micro_tokens.buckets, let it be 'auto', or "
                "lower engine.sampling.max_tokens"
            )
        size = 1 << (max(tokens, targets) - 1).bit_length()
        found = ShapeBucket(size, size)
        if found not in self.buckets:
            emit(Warned(f"{told}: {found} is added. Raise trainer.micro_tokens.most to have it from the start"))
            self.buckets.append(found)
        return found
