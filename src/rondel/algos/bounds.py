"""What the knobs of several parts must obey."""

from __future__ import annotations

from rondel.core.errors import ConfigError

LARGEST = 1e6  # of a weight in the loss, where a few thousandths to a few units are common


def check_weight(name: str, value: float, below_zero: str) -> None:
    """Of a part of the loss: not negative, because of what it would then do, and small enough for float32."""
    if not value >= 0:
        raise ConfigError(
            f"{name} = {value}; it must not be negative: that would drive the policy away from {below_zero}"
        )
    if value > LARGEST:
        raise ConfigError(f"{name} = {value:g}; it must not exceed {LARGEST:g}: the loss would overflow")


def check_shares(**knobs: float) -> None:
    """Of what lies in the future."""
    for name, value in knobs.items():
        if not 0 <= value <= 1:
            raise ConfigError(
                f"{name} = {value}; it must lie in [0, 1], or what is far away would count for more than what is near"
            )
