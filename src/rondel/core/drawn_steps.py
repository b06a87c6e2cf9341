"""Steps that stand beside the tokens of a trajectory, by what they are stored as."""

from __future__ import annotations

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.unmasking_steps import UnmaskingSteps

DrawnSteps = ContinuousSteps | UnmaskingSteps


def steps_from_rows(stored: np.ndarray, layout: int = 0) -> DrawnSteps:
    """The inverse of their `stored` and `layout`: points and actions are float32, blocks of masks int32."""
    return UnmaskingSteps(stored) if stored.dtype == np.int32 else ContinuousSteps.from_array(stored, layout)
