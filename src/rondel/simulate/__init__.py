"""The loop on a virtual clock: what a run would do on devices that are not here."""

from rondel.simulate.run import World, simulate, world_of

__all__ = ["World", "simulate", "world_of"]
