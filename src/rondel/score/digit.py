"""The probability that the image which a flow drew shows the digit it was asked for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.digits import SIDE, load_digit_images
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Task, Trajectory


class Digit:
    """p(digit | last image), of a logistic regression that is fitted to scikit-learn's digits when the run begins.

    digit  the wanted one; None is that of the prompt
    """

    def __init__(self, *, digit: int | None = None) -> None:
        if digit not in (None, *range(10)):
            raise ConfigError(f"reward 'digit': digit = {digit!r}; it is one from 0 to 9, or left out for the prompt's")
        self.digit, self.classifier = digit, fit_classifier()

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        steps = trajectory.steps
        if not isinstance(steps, ContinuousSteps) or steps.dim != SIDE * SIDE:
            raise ValueError(f"reward 'digit' wants an image of {SIDE}·{SIDE} pixels, which a flow draws")
        wanted = str(task.data.get("prompt", "")) if self.digit is None else str(self.digit)
        if wanted not in (digits := [str(digit) for digit in range(10)]):
            raise DataError(f"reward 'digit': the prompt of task {task.id} is no digit: {wanted!r:.40}")
        image = steps.drawn[-1].astype("float64")[None]
        return float(self.classifier.predict_proba(image)[0, digits.index(wanted)])


@lru_cache(1)
def fit_classifier() -> Any:
    """Ten classes on all images, by L-BFGS, which draws nothing at random: each fit has the same weights."""
    images, labels = load_digit_images()
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=500).fit(images, labels)
