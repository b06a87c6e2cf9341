"""Rewards that an untrained model earns now and then."""


def parity(trajectory, task) -> float:
    """1 for an odd number of characters: about half of all answers."""
    return float(len(trajectory.text) % 2)
