"""The loop on a virtual clock: what a run would do on devices that are not here."""

from rondel.simulate.run import SimulatedWorld, simulate, world_of

__all__ = ["SimulatedWorld", "simulate", "world_of"]
