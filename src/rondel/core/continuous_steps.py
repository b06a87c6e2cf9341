"""Steps of a policy that draws points and not tokens: the denoising steps of a flow.

K steps of one trajectory · D dimensions of a point
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

SCALARS = 4  # numbers of a step beside its two points


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousSteps:
    """K steps in D dimensions. Each drew a point from a Gaussian around what the model says of another one:

        drawn ~ N(scale_x·x + scale_v·v(x, sigma), std²)          v: the velocity of the flow, the only learned part

    A denoising step draws the next point of its chain; a step of flow matching (`scale_x = 0, scale_v = std = 1`) has
    the velocity that leads to a data point in the place of what was drawn, so its log-density is the loss.

    rows   [K, 2·D + 4] float32: x, drawn, sigma, scale_x, scale_v, std
    """

    rows: np.ndarray

    are_densities: ClassVar[bool] = True  # their log-probabilities, which may be above 0

    def __post_init__(self) -> None:
        if (
            self.rows.ndim != 2
            or self.rows.dtype != np.float32
            or self.rows.shape[1] % 2
            or self.rows.shape[1] <= SCALARS
        ):
            raise ValueError(
                f"steps of {self.rows.dtype} {list(self.rows.shape)}: they are float32 [K, 2·D + {SCALARS}]"
            )

    @classmethod
    def of(cls, x: Any, drawn: Any, *, sigma: Any, scale_x: Any, scale_v: Any, std: Any) -> ContinuousSteps:
        """[K, D], [K, D] and four numbers of each step, or one for all of them."""
        x = np.asarray(x, np.float32)
        scalars = [np.broadcast_to(np.asarray(s, np.float32), len(x))[:, None] for s in (sigma, scale_x, scale_v, std)]
        return cls(np.concatenate([x, np.asarray(drawn, np.float32), *scalars], 1))

    @property
    def copied(self) -> int:
        """Tokens that training computes again: none."""
        return 0

    @property
    def dim(self) -> int:
        """D"""
        return (self.rows.shape[1] - SCALARS) // 2

    @property
    def x(self) -> np.ndarray:
        """[K, D] where the model is asked for its velocity."""
        return self.rows[:, : self.dim]

    @property
    def drawn(self) -> np.ndarray:
        """[K, D] what each step drew."""
        return self.rows[:, self.dim : 2 * self.dim]

    @property
    def sigma(self) -> np.ndarray:
        """[K] noise level of x: 1 is noise alone, 0 a data point."""
        return self.rows[:, -SCALARS]

    @property
    def coefficients(self) -> np.ndarray:
        """[K, 3] scale_x, scale_v and std of the Gaussian."""
        return self.rows[:, -SCALARS + 1 :]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> ContinuousSteps:
        return ContinuousSteps(self.rows[part])

    def __add__(self, more: ContinuousSteps) -> ContinuousSteps:
        if more.dim != self.dim:
            raise ValueError(f"steps of {more.dim} dimensions behind steps of {self.dim}: one trajectory has one space")
        return ContinuousSteps(np.concatenate([self.rows, more.rows]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContinuousSteps) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]
