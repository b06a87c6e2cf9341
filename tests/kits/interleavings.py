"""A small model checker: real coroutines, run once for every order in which what they wait for may happen.

What leaves a process (a message, its answer, the device's work) waits in a `World` until the explorer lets it happen, and
how: well, or as one of the faults that it may have. At each state the world's invariants are checked. The coroutines are
run anew for each path, and a state that was reached before is not explored again.

    found = explore(lambda world: my_scenario(world), faults=1)
    found.states, found.runs              or Violation, with the path that leads to it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

SETTLED = 14  # turns of the loop after which nothing moves by itself: chains of awaits are shorter


class Violation(AssertionError):
    """An invariant does not hold; the message has the path."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass
class World:
    """
    faults      how many may happen on one path
    free        everything happens at once, and well
    invariants  asked at every state; each returns what is wrong, or ""
    facts       what the state is beside the steps that happened; each returns something hashable
    alike       with which names the steps of participants begin that are interchangeable; `facts` are then theirs, in
                the same order
    """

    faults: int
    free: bool = False
    invariants: list[Callable[[], str]] = field(default_factory=list)
    facts: list[Callable[[], Any]] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    happened: list[tuple[str, str]] = field(default_factory=list)
    struck: set[str] = field(default_factory=set)  # by a fault, or by the cancellation while it was awaited
    _waiting: dict[str, tuple[asyncio.Future[str], tuple[str, ...]]] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)
    _cancel: Callable[[], object] | None = None

    async def step(self, name: str, *faults: str) -> str:
        """Waits until it happens. -> "" if well, or the fault."""
        if self.free:
            return ""
        self._count[name] = self._count.get(name, 0) + 1
        name = f"{name} ({self._count[name]})"
        future = asyncio.get_running_loop().create_future()
        self._waiting[name] = future, faults
        try:
            return await future
        finally:
            self._waiting.pop(name, None)

    async def cancellable(self, work: Awaitable[Any]) -> Any:
        """The explorer may cancel it once, anywhere."""
        task = asyncio.ensure_future(work)
        self._cancel = task.cancel
        try:
            return await task
        finally:
            self._cancel = None

    def let_all_happen(self) -> None:
        self.free = True
        for future, _ in list(self._waiting.values()):
            future.done() or future.set_result("")

    @property
    def options(self) -> list[tuple[str, str]]:
        left = self.faults - sum(bool(fault) for _, fault in self.happened)
        found = [(name, "") for name in sorted(self._waiting)]
        if left > 0:
            found += [(name, fault) for name in sorted(self._waiting) for fault in self._waiting[name][1]]
            found += [("the update", "cancelled")] if self._cancel else []
        return found

    @property
    def state(self) -> Any:
        """One for all that differ only in which of the `alike` is which: of their renamings the least."""
        facts = [fact() for fact in self.facts]
        found = []
        for order in permutations(range(len(self.alike))):
            named = {self.alike[old]: f"alike {new}" for new, old in enumerate(order)}

            def renamed(name: str, named: dict[str, str] = named) -> str:
                return next((new + name[len(old) :] for old, new in named.items() if name.startswith(old)), name)

            happened = tuple(sorted((renamed(name), fault) for name, fault in self.happened))
            own = tuple(facts[i] for i in order) if order else tuple(facts)
            found.append((happened, tuple(sorted(map(renamed, self._waiting))), own))
        return min(found, key=repr)

    def let_happen(self, name: str, fault: str) -> None:
        self.happened.append((name, fault))
        if fault:
            self.struck |= {name} if name in self._waiting else set(self._waiting)
        if (name, fault) == ("the update", "cancelled"):
            assert self._cancel is not None
            self._cancel()
            self._cancel = None
        else:
            self._waiting[name][0].set_result(fault)

    def check(self) -> None:
        for invariant in self.invariants:
            if wrong := invariant():
                raise Violation(self.tell(wrong))

    def tell(self, wrong: str) -> str:
        return "\n  ".join([f"{wrong}, after", *(f"{name}{fault and ': ' + fault}" for name, fault in self.happened)])


@dataclass
class Found:
    """runs: of the scenario. states: different ones. ends: paths that came to an end."""

    runs: int = 0
    ends: int = 0
    states: set[Any] = field(default_factory=set)


def explore(scenario: Callable[[World], Awaitable[None]], *, faults: int = 0, limit: int = 100_000) -> Found:
    """Every order and every fault, depth first. Violation with the path where an invariant or an assertion of the
    scenario fails, or where nobody can move.
    """
    found, todo = Found(), [[]]  # type: tuple[Found, list[list[int]]]
    while todo:
        found.runs += 1
        assert found.runs <= limit, f"more than {limit} runs"
        loop = VirtualLoop()
        try:
            todo += loop.run_until_complete(_run(scenario, World(faults), todo.pop(), found))
        finally:
            loop.close()
    return found


async def settle() -> None:
    for _ in range(SETTLED):
        await asyncio.sleep(0)


async def _run(
    scenario: Callable[[World], Awaitable[None]], world: World, path: list[int], found: Found
) -> list[list[int]]:
    """One path: `path` says which option to take, as far as it goes; then the first. -> the paths that part from it."""
    others: list[list[int]] = []
    taken: list[int] = []
    task = asyncio.ensure_future(scenario(world))
    try:
        while True:
            await settle()
            world.check()
            if world.free and not task.done():
                await asyncio.wait([task])
            if task.done():
                break
            options = world.options
            if len(taken) < len(path):
                choice = path[len(taken)]
            else:
                if not any(not fault for _, fault in options):
                    raise Violation(world.tell("nobody can move"))
                if (state := world.state) in found.states:
                    return others
                found.states.add(state)
                others += [[*taken, i] for i in range(1, len(options))]
                choice = 0
            taken.append(choice)
            world.let_happen(*options[choice])
        found.ends += 1
        error = task.exception()
        if error is not None:
            raise Violation(world.tell(str(error) or type(error).__name__)) from error
        return others
    finally:
        task.cancel()
        world.let_all_happen()
        await asyncio.gather(task, return_exceptions=True)
