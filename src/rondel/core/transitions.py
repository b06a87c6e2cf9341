"""What a world did at a step, as numbers: the rows of a learned model of a world, and who is who in its episodes.

O numbers of an observation · D numbers of an action as the world takes it: the number of a counted one, or A numbers
"""

from __future__ import annotations

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import BESIDE

# agents that make no attempt at a task: their scores are in no reward
IMAGINED = f"{BESIDE}imagined"  # the policy, acting in a learned model of the world
OBSERVED = f"{BESIDE}observed"  # what the world itself did, from which the model learns
PREDICTED = f"{BESIDE}predicted"  # what the model drew
REMEMBERED = f"{BESIDE}remembered"  # what the world did in earlier steps

EXTRA = 3  # numbers that a transition has beside the change of the observation: member, reward, end
EVERYONE = -1.0  # the member of a transition that the world made and no member drew


def transition_rows(
    observed: np.ndarray, actions: np.ndarray, after: np.ndarray, rewards: np.ndarray, ended: np.ndarray
) -> np.ndarray:
    """[T, O + D + O + 3] float32: observation, action | member, change of the observation, reward, whether it ended.
    [T, O], [T, D], [T, O], [T], [T]
    """
    everyone = np.full((len(observed), 1), EVERYONE)
    columns = (observed, actions, everyone, after - observed, rewards[:, None], ended[:, None])
    return np.concatenate(columns, 1).astype(np.float32)


def transitions(rows: np.ndarray, observed: int) -> ContinuousSteps:
    """`rows` as the steps of a policy that reads observation and action; observed: O."""
    return ContinuousSteps(rows, rows.shape[1] - observed - EXTRA)


def split_drawn(drawn: np.ndarray) -> tuple[np.ndarray, float, bool]:
    """(change [O], reward, ended) of [O + 3] numbers that a model drew."""
    return drawn[1:-2], float(drawn[-2]), bool(drawn[-1] > 0.5)


def is_observed(steps: ContinuousSteps) -> bool:
    """Whether the world made these transitions, and not its model."""
    return bool((steps.drawn[:, 0] == EVERYONE).all())
