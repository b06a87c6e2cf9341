"""A process that steps worlds, one verb after the other, for those that compute in Python
and let no thread run meanwhile."""

from __future__ import annotations

from multiprocessing.connection import Connection

from rondel.core.errors import EnvError, RondelError
from rondel.generate.envs.hosted_world import HostedWorld, open_hosted


def serve_worlds(connection: Connection) -> None:
    """Answer (number, verb, world, given) with (number, result, error) until the other end is closed. A verb is "open",
    "reset", "take" or "close"."""
    worlds: dict[int, HostedWorld] = {}
    while True:
        try:
            number, verb, world, given = connection.recv()
        except (EOFError, OSError):
            break
        found, error = None, None
        try:
            if verb == "open":
                worlds[world] = open_hosted(given[0])
                found = worlds[world].spaces
            elif verb == "close":
                worlds.pop(world).close()
            else:
                found = getattr(worlds[world], verb)(*given)
        except RondelError as raised:
            error = raised
        except Exception as raised:  # as a result: a fault of one world ends no other
            error = EnvError(f"{verb} of a world raised {type(raised).__name__}: {raised}")
        try:
            connection.send((number, found, error))
        except OSError:
            break
    for own in worlds.values():
        own.close()
