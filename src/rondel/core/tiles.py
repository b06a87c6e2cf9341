"""Images that are cut into square tiles of one size: how many, and which tokens stand around them (Idefics 3, SmolVLM).

scaled to `longest`, then to whole tiles      written, ░ a run of placeholders of one tile
┌───┬───┬───┐                                 <around><row_1_col_1>░<around><row_1_col_2>░<around><row_1_col_3>░\\n
│1,1│1,2│1,3│   and the whole image once      <around><row_2_col_1>░<around><row_2_col_2>░<around><row_2_col_3>░\\n
├───┼───┼───┤   more, in one tile             \\n<around><global-img>░<around>
└───┴───┴───┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST = 4096  # pixels a side of an image that is cut
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class TileConfig:
    """
    side     pixels a side of a tile
    longest  pixels to which the longest side is scaled before it is cut; None: an image is one tile
    """

    side: int
    longest: int | None

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of an image before it is cut: its longest side is `longest`, the other one even."""
        assert self.longest is not None, "an image that is not cut"
        wide, high = _fit_longest(width, height, self.longest)
        wide, high = (wide, high + high % 2) if width >= height else (wide + wide % 2, high)
        return (wide, high) if max(wide, high) <= MOST else _fit_longest(wide, high, MOST)

    def cut_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of whole tiles."""
        longest = math.ceil(max(width, height) / self.side) * self.side
        wide, high = _fit_longest(width, height, longest)
        return math.ceil(wide / self.side) * self.side, math.ceil(high / self.side) * self.side

    def tile_grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles of an image of any size; (0, 0) for one that is a single tile."""
        if self.longest is None:
            return 0, 0
        wide, high = self.cut_size(*self.scaled_size(width, height))
        return (0, 0) if (wide, high) == (self.side, self.side) else (high // self.side, wide // self.side)

    def tile_count(self, width: int, height: int) -> int:
        """Tiles that are seen of an image of any size, the whole one among them."""
        return math.prod(self.tile_grid(width, height)) + 1

    def written(self, rows: int, columns: int, slot: str) -> str:
        """What stands for an image of so many tiles, a placeholder for each; 0 and 0 for one that is a single tile."""
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{slot}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join([*lines, "\n" * bool(lines), f"{AROUND}{WHOLE}{slot}{AROUND}"])


def _fit_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """(width, height) with this longest side; the other one is rounded down as transformers' processors do."""
    ratio = width / height
    if width >= height:
        return longest, max(1, int(longest / ratio))
    return max(1, int(longest * ratio)), longest
