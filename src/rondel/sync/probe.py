"""The probe of a weight update: after the commit trainer and engine must give the same tokens the same
log-probabilities.
"""

from __future__ import annotations

import math

import numpy as np

from rondel.core.errors import SyncError
from rondel.core.events import Warned, emit
from rondel.core.types import POLICY, TokenScores

# so many times the noise is a movement that an engine with the same weights shows, at least by half
CLEAR, HALF = 8, 0.5
GROWN, SHARE = 10, 0.02  # a gap so many times the first one, and such a part of what an update moves, is doubted


class ProbeComparison:
    """`gap = comparison.compare(ours, answer, version)`: what both sides say of the probe at each update, and what
    they said before.

    tolerance  largest allowed mean difference in nats a token
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._said: dict[str, list[float]] = {}  # what the trainer said at the last update, by policy
        self._usual: dict[str, float] = {}  # the gap after the first one
        # by policy and replica: version, trainer's and engine's logprobs at which it last followed; the largest gap of
        # those; who did not follow at the update before
        self._seen: dict[tuple[str, str], tuple[int, np.ndarray, np.ndarray]] = {}
        self._noise: dict[tuple[str, str], float] = {}
        self._doubted: set[tuple[str, str]] = set()

    def compare(self, ours: list[float], answer: TokenScores, version: int, policy: str = POLICY) -> float:
        """The trainer's logprobs and the engine's answer. -> mean difference in nats a token. Raises SyncError where
        it is above the tolerance, or where an engine's scores do not move as the trainer's do.
        """
        whose, theirs = of_policy(policy), answer.logprobs
        if len(theirs) != len(ours):
            raise SyncError(f"of the probe the trainer{whose} scored {len(ours)} tokens, the engine {len(theirs)}")
        # NaN wins; one unlikely token in bf16 may be off by a nat, the mean is not
        gap = float(np.abs(np.subtract(theirs, ours)).mean())
        if not gap <= self.tolerance:
            overflown = "" if math.isfinite(gap) else ": the weights have overflowed, lower trainer.lr"
            raise SyncError(
                f"after version {version} trainer and engine{whose} differ by {gap:.3g} nats a token on the probe "
                f"(limit {self.tolerance}){overflown}"
            )
        self._check_gap_growth(gap, ours, version, policy, whose)
        for name, one in (answer.replicas or {"": theirs}).items():
            self._check_follows(
                np.array(ours), np.array(one), version, policy, whose + (f" '{name}'" if name else ""), name
            )
        return gap

    def _check_follows(
        self, ours: np.ndarray, theirs: np.ndarray, version: int, policy: str, whose: str, replica: str
    ) -> None:
        """The engine's scores of the probe move as the trainer's do, once these have moved by more than noise.

        Since the version when it was last seen to follow the trainer's scores moved by d, the
        engine's by e. With the new weights e is d and noise, with the old ones e is noise, or 0 where
        the server computes the same again. So |d| below
        the noise adds up over updates and decides nothing; at once the noise no movement at all
        is enough, at `CLEAR` times the noise one of
        less than half, sum(sign(d) e) / sum |d|, twice in a row. The noise is the largest gap of the updates that it
        followed: that of the first one says little, for a policy that is still vague is scored alike by everybody.
        """
        who = policy, replica
        since, before, then = self._seen.setdefault(who, (version, ours, theirs))
        d, e = ours - before, theirs - then
        moved = float(np.abs(d).mean())
        noise = max(self._noise.get(who, 0.0), self._usual[policy], self.tolerance / 100)
        still = not e.any()
        if moved <= noise * (1 if still else CLEAR):
            return
        share = float((np.sign(d) * e).sum() / np.abs(d).sum())
        if share < HALF and not still and who not in self._doubted:
            self._doubted.add(who)
            return
        if share < HALF:
            raise SyncError(
                f"from version {since} to {version} the trainer's log-probabilities of the probe moved by {moved:.2g} "
                f"nats a token, and those of the "
                f"engine{whose} {'did not move' if still else f'followed by {share:.0%} of it'}: it acknowledges "
                f"weights and serves others. "
                "Check that the server loads what it is given (its log, its version, copies it keeps of the weights), "
                "and start it again"
            )
        self._seen[who] = version, ours, theirs
        self._noise[who] = max(self._noise.get(who, 0.0), float(np.abs(ours - theirs).mean()))
        self._doubted.discard(who)

    def _check_gap_growth(self, gap: float, ours: list[float], version: int, policy: str, whose: str) -> None:
        """A gap that has grown far beyond the first one and is a part of what the update itself
        moved: some of it may not have arrived.

        The first probe says little, where both sides began with the same weights; a tensor
        left behind shows as soon as they move.
        """
        before, self._said[policy] = self._said.get(policy), ours
        usual = self._usual.setdefault(policy, gap)
        if before is None:
            return
        moved = float(np.abs(np.subtract(ours, before)).mean())
        if gap > GROWN * max(usual, self.tolerance / 100) and gap > SHARE * moved:
            emit(
                Warned(
                    f"after version {version} trainer and engine{whose} differ by {gap:.1e} nats a token on the probe, "
                    f"at the first update by {usual:.1e}; "
                    f"the update moved it by {moved:.1e}. Does the engine take all tensors? One that it keeps a copy "
                    f"of would stay as it was"
                )
            )


def of_policy(name: str) -> str:
    """The same word in every message; none for the main policy."""
    return "" if name == POLICY else f" of '{name}'"
