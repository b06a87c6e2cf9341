"""Steps that stand beside the tokens of a trajectory, by what they are stored as."""

from __future__ import annotations

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.unmasking_steps import UnmaskingSteps

DrawnSteps = ContinuousSteps | UnmaskingSteps


def steps_from_rows(rows: np.ndarray) -> DrawnSteps:
    """Points of a flow are float32, blocks of masks int32."""
    return UnmaskingSteps(rows) if rows.dtype == np.int32 else ContinuousSteps(rows)
