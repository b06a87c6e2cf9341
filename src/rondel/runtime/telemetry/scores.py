"""Scores as text: percent where every reward that was seen lies in [0, 1], else plain numbers.
A mean reward of 1.27 is no share of anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def within_unit(rewards: Iterable[float]) -> bool:
    """Whether all of them lie in [0, 1]."""
    return all(0 <= reward <= 1 for reward in rewards)


def is_share(evaluation: Mapping[str, Any]) -> bool:
    """Whether the score of one evaluation may be read as a share: by its smallest and largest
    reward, in older journals by its interval.
    """
    ends = [evaluation.get(name) for name in ("reward_min", "reward_max")]
    return within_unit(
        end for end in (*ends, evaluation["score"], evaluation["low"], evaluation["high"]) if end is not None
    )


def score_text(score: float, share: bool) -> str:
    """`score_text(0.873, True)` is "87.3%", `score_text(1.2734, False)` "1.273"."""
    return f"{score:.1%}" if share else f"{score:.4g}"


def interval_text(low: float, high: float, share: bool) -> str:
    """`interval_text(0.54, 1.2, False)` is "0.54 to 1.2"."""
    return f"{score_text(low, share)} to {score_text(high, share)}"


def failure_text(request: Mapping[str, Any]) -> str:
    """How answers that could not be scored count, by the request of their evaluation: as 0, or as the lowest reward."""
    return f"could not be scored and count as {request.get('failed_as', 0):g}"
