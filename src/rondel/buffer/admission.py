"""The arithmetic of staleness: who is admitted, who may be picked, who is late. Values only; nothing waits here."""

from __future__ import annotations

from dataclasses import dataclass

from rondel.buffer.open_groups import OpenGroups
from rondel.core.errors import LawError, UserError
from rondel.core.types import Group, Slot

SHORT = -1  # instead of a group's number: the batch stays as short as it is


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """`AdmissionRule(groups_per_step=4, max_staleness=1)`: at most 8 groups are open at once.

    groups_per_step, max_staleness, window, oversample, max_refills: see `Buffer`
    """

    groups_per_step: int
    max_staleness: int = 0
    window: int | None = None
    oversample: int = 0
    max_refills: int = 20

    def __post_init__(self) -> None:
        widest = self.max_staleness * self.groups_per_step + 1
        if self.window is not None and not 1 <= self.window <= widest:
            raise UserError(
                f"loop.window = {self.window}, but with max_staleness = {self.max_staleness} and groups_per_step = "
                f"{self.groups_per_step} it must lie in [1, {widest}]; leave it at 'auto'"
            )

    @property
    def max_open_groups(self) -> int:
        """How many groups can be written at once."""
        return (self.max_staleness + 1) * self.groups_per_step + self.oversample

    def is_late(self, born: int, version: int) -> bool:
        return self.oversample > 0 and version - born > self.max_staleness

    def is_exhausted(self, dropped: int) -> bool:
        """Whether a step has dropped so many groups that it is refilled no more."""
        return dropped > self.max_refills * self.groups_per_step

    def may_pick(self, number: int, groups: OpenGroups, version: int) -> bool:
        """Whether this finished group can go into the batch at `version` and every older one still keeps its deadline."""
        if self.oversample:
            return True
        if self.window is not None and number >= groups.first_open() + self.window:
            return False
        left, older = self.groups_per_step - len(groups.taken) - 1, 0
        for born in sorted(groups.births):
            if born >= groups.born[number]:
                break
            older += groups.births[born]
            if older > left + (born + self.max_staleness - version) * self.groups_per_step:
                return False
        return True

    def next_pick(self, groups: OpenGroups, version: int, *, ended: bool) -> int | None:
        """The oldest finished group, unless a place must be kept for older ones that have not finished; SHORT if none
        will come for this step. `ended`: nothing more is admitted.
        """
        if (number := groups.oldest_finished()) is None:
            return SHORT if ended and groups.are_all_taken else None
        return number if self.may_pick(number, groups, version) else None

    def remove_late(self, groups: OpenGroups, version: int) -> list[Slot]:
        """Those that nobody works on, taken out; they are still open."""
        return groups.remove_idle(lambda born: self.is_late(born, version))

    def check_lag(self, picked: list[Group], version: int) -> None:
        for group in picked:
            if version - group.born > self.max_staleness:
                raise LawError(
                    f"group {group.id} is {version - group.born} versions old; at most {self.max_staleness} are "
                    f"allowed (loop.max_staleness)"
                )
