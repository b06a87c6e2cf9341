"""Steps of a policy that draws numbers and not tokens: the denoising steps of a flow, the actions in a world.

K steps of one trajectory · D dimensions of a point · O numbers of an observation · A of an action
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

SCALARS = 4  # numbers of a flow's step beside its two points


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousSteps:
    """K steps, each of which read numbers `x` and drew numbers `drawn`.

    A step of a flow, in D dimensions, drew a point from a Gaussian around what the model says of another one:

        drawn ~ N(scale_x·x + scale_v·v(x, sigma), std²)          v: the velocity of the flow, the only learned part

    A denoising step draws the next point of its chain; a step of flow matching (`scale_x = 0, scale_v = std = 1`) has
    the velocity that leads to a data point in the place of what was drawn, so its log-density is the loss.

    A step in a world read an observation and drew an action: its numbers, or of actions that are counted its number.

    rows      float32: [K, 2·D + 4] x, drawn, sigma, scale_x, scale_v, std of a flow; [K, O + A] x, drawn in a world
    observed  O; 0 for a flow
    after     [O] what the world showed behind the last step where the episode was cut off and had not ended; else None
    """

    rows: np.ndarray
    observed: int = 0
    after: np.ndarray | None = None

    are_densities: ClassVar[bool] = True  # their log-probabilities, which may be above 0

    def __post_init__(self) -> None:
        rows, width = self.rows, self.rows.shape[-1]
        fits = width > self.observed if self.observed else width % 2 == 0 and width > SCALARS
        if rows.ndim != 2 or rows.dtype != np.float32 or not fits:
            wanted = f"[K, {self.observed} + A]" if self.observed else f"[K, 2·D + {SCALARS}]"
            raise ValueError(f"steps of {rows.dtype} {list(rows.shape)}: they are float32 {wanted}")
        if self.after is not None and self.after.shape != (self.observed,):
            raise ValueError(f"behind the last step {list(self.after.shape)} numbers: a world shows {self.observed}")

    @classmethod
    def of(cls, x: Any, drawn: Any, *, sigma: Any, scale_x: Any, scale_v: Any, std: Any) -> ContinuousSteps:
        """Of a flow: [K, D], [K, D] and four numbers of each step, or one for all of them."""
        x = np.asarray(x, np.float32)
        scalars = [np.broadcast_to(np.asarray(s, np.float32), len(x))[:, None] for s in (sigma, scale_x, scale_v, std)]
        return cls(np.concatenate([x, np.asarray(drawn, np.float32), *scalars], 1))

    @classmethod
    def from_array(cls, stored: np.ndarray, layout: int = 0) -> ContinuousSteps:
        """The inverse of `stored` and `layout`."""
        if layout >= 0:
            return cls(stored, layout)
        return cls(stored[:-1], -layout, stored[-1, :-layout])

    @property
    def stored(self) -> np.ndarray:
        """One array for a file: the rows, and where there is one, `after` in a row of its own."""
        if self.after is None:
            return self.rows
        last = np.zeros((1, self.rows.shape[1]), np.float32)
        last[0, : self.observed] = self.after
        return np.concatenate([self.rows, last])

    @property
    def layout(self) -> int:
        """How `stored` is read: `observed`, below 0 where the last row is `after`."""
        return self.observed if self.after is None else -self.observed

    @property
    def copied(self) -> int:
        """Tokens that training computes again: none."""
        return 0

    @property
    def dim(self) -> int:
        """D or A: how many numbers a step drew."""
        width = self.rows.shape[1]
        return width - self.observed if self.observed else (width - SCALARS) // 2

    @property
    def x(self) -> np.ndarray:
        """[K, D] where a flow is asked for its velocity, or [K, O] what a world showed."""
        return self.rows[:, : self.observed or self.dim]

    @property
    def drawn(self) -> np.ndarray:
        """[K, D] or [K, A] what each step drew."""
        first = self.observed or self.dim
        return self.rows[:, first : first + self.dim]

    @property
    def sigma(self) -> np.ndarray:
        """[K] noise level of x in a flow: 1 is noise alone, 0 a data point."""
        return self.rows[:, -SCALARS]

    @property
    def coefficients(self) -> np.ndarray:
        """[K, 3] scale_x, scale_v and std of a flow's Gaussian."""
        return self.rows[:, -SCALARS + 1 :]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> ContinuousSteps:
        """A part of them; `after` stays with the last one."""
        return ContinuousSteps(
            self.rows[part], self.observed, self.after if part.indices(len(self))[1] == len(self) else None
        )

    def __add__(self, more: ContinuousSteps) -> ContinuousSteps:
        if (more.dim, more.observed) != (self.dim, self.observed):
            raise ValueError(f"steps of {more.dim} dimensions behind steps of {self.dim}: one trajectory has one space")
        return ContinuousSteps(np.concatenate([self.rows, more.rows]), self.observed, more.after)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ContinuousSteps)
            and self.layout == other.layout
            and np.array_equal(self.stored, other.stored)
        )

    __hash__ = None  # type: ignore[assignment]
