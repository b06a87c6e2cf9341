"""Several rows in one step: each sample is trained by the row of its stream, and each row counts
its own samples only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm


@dataclass(frozen=True)
class Mixture:
    """L = L_main + sum over streams of weight·L_row, each over its own samples with its own denominators.

    So what one stream brings, or how long its answers are, changes the weight of no other.
    A sample's stream is the source of its task, or its environment; streams that are
    not named here belong to the main row.

    >>> Mixture(GRPO, {"demonstrations": (SFT, 0.1)})  # doctest: +SKIP
    """

    main: Algorithm
    streams: dict[str, tuple[Algorithm, float]] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        return self.main.needs.union(*(row.needs for row, _ in self.streams.values()))

    def split_by_row(self, of: list[str]) -> list[tuple[Algorithm, float, list[int]]]:
        """Each row with its weight and the places of its samples among `of`, the streams of all
        samples; rows without any are left out.
        """
        own = {name: [i for i, stream in enumerate(of) if stream == name] for name in self.streams}
        rest = [i for i, stream in enumerate(of) if stream not in self.streams]
        found = [(self.main, 1.0, rest), *((row, weight, own[name]) for name, (row, weight) in self.streams.items())]
        return [share for share in found if share[2]]
