"""Sizes of a block-diffusion model, as they stand in its config.json under "block_diffusion"."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rondel.core.errors import ModelError

KEY = "block_diffusion"
BLOCK = 8  # tokens of a block where a recipe does not say


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """`BlockSettings(block=8, steps=4, mask_token=105)`: 8 tokens are unmasked in 4 steps, two in each.

    block       B, positions that are filled in together
    steps       S, passes in which a block is filled in; 1 draws all its tokens at once, B one after the other
    mask_token  id of the mask, which is read and never drawn
    """

    block: int
    steps: int
    mask_token: int

    def count_at(self, masked: int, step: int) -> int:
        """How many of the masked positions are drawn in a step, so that the last step draws the last of them."""
        return -(-masked // max(1, self.steps - step))


def add_block_settings(config: Any, table: Any, *, first: int) -> None:
    """Write the recipe's table into the config of a random model. `first`: the smallest id that no token has."""
    if not isinstance(table, dict) or (odd := sorted({*table} - {"block", "steps", "mask_token"})):
        what = f"has no '{odd[0]}'" if isinstance(table, dict) else f"= {table!r} is no table"
        raise ModelError(f"model.path.{KEY} {what}: write {KEY} = {{ block = 8, steps = 4 }}")
    block: Any = table.get("block", BLOCK)
    steps: Any = table.get("steps", block)
    mask: Any = table.get("mask_token", "auto")
    for name, value in (("block", block), ("steps", steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"model.path.{KEY}.{name} = {value!r}: it is a whole number of at least 1")
    if steps > block:
        raise ModelError(f"model.path.{KEY}.steps = {steps} for a block of {block}: a step draws one token at least")
    mask = config.vocab_size - 1 if mask == "auto" else mask
    if not isinstance(mask, int) or not first <= mask < config.vocab_size:
        raise ModelError(
            f"model.path.{KEY}.mask_token = {mask!r}: take an id that no token has, from {first} to "
            f'{config.vocab_size - 1}, or "auto"'
        )
    setattr(config, KEY, asdict(BlockSettings(block=block, steps=steps, mask_token=mask)))


def block_settings(config: Any) -> BlockSettings:
    """Of a loaded config that has them."""
    return BlockSettings(**getattr(config, KEY))


def block_of(path: str | dict[str, Any]) -> int:
    """B of a model.path that has blocks."""
    if isinstance(path, dict):
        return int(path[KEY].get("block", BLOCK))
    return int(json.loads((Path(path).expanduser() / "config.json").read_text())[KEY]["block"])


def has_blocks(path: str | dict[str, Any]) -> bool:
    """Whether model.path is a block-diffusion model: by its table, or by the config.json in its folder."""
    if isinstance(path, dict):
        return path.get(KEY) is not None
    try:
        return json.loads((Path(path).expanduser() / "config.json").read_text()).get(KEY) is not None
    except (OSError, ValueError, AttributeError):
        return False
