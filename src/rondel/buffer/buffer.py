"""Between Filter and Train: admission, deadlines, refunds, the ledger. The only room that knows S.

    admit ──> waiting ──claim──> rolling ──put──> finished ──take──> taken ──settle──> trained
                                    └──drop──> filtered(rule) | failed(reason)   (the place is refunded)

P groups per step · S max_staleness · v version (counts consumed batches) · open = waiting, rolling or finished
Admit while open < (S + 1)·P, less the places of the batch at v that are gone: those picked
so far, and all P once `take` has returned, even if it returned fewer. A group born at b
is trained at v <= b + S, so a batch is a
slot of P places before a deadline, and all deadlines can be kept as long as, for every
b, (open groups born at b or before) <=
P·(batches from now to b + S). `take` picks the oldest finished group whose absence from the
batches after it keeps this true: whoever is
slow is overtaken until its deadline, and then waited for. S = 0 makes every group due at
once, so synchronous training is a consequence.

While engines still fetch v, who is admitted is born at v - 1 and must be trained a batch earlier: open < S·P less the
same.

X oversample > 0: admit X more, and take whoever has finished. Who would be older than S is late: at the advance of v
its place is refunded, and its task is lost (and counted), or asked again from the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rondel.buffer.flow_control import SHORT, AdmissionRule, make_waiters
from rondel.buffer.groups import GroupLedger, OpenGroups
from rondel.buffer.state import decode, encode
from rondel.core.errors import LawError
from rondel.core.events import Admitted, emit
from rondel.core.schedule_gate import ScheduleGate
from rondel.core.types import Group, Slot, Task

LATE = "late"


class Buffer:
    """All flow control of the system.

    groups_per_step  P, groups in one training step
    max_staleness    S, how many versions may pass between a group's admission and its training; 0 is synchronous
    window           at most so far past an unfinished group does `take` look, in admission numbers: 1 is
                     first in, first out. None: no limit
    oversample       X, groups begun beyond those of which each is certain to be trained in time
    retry            whether the task of a late group is asked again
    max_refills      a step gives up refilling after this many times P dropped groups
    patience         seconds without any change after which a wait is an error (law 10)
    gate             of a schedule that is kept, asked before, told after whatever changes what a batch will be
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int = 0,
        window: int | None = None,
        oversample: int = 0,
        retry: bool = False,
        version: int = 0,
        max_refills: int = 20,
        patience: float = 1800.0,
        gate: ScheduleGate | None = None,
    ) -> None:
        self.rule = AdmissionRule(groups_per_step, max_staleness, window, oversample, max_refills)
        self.version, self.retry = version, retry
        self.counts, self.groups = GroupLedger(), OpenGroups()
        self.waiters = make_waiters(gate, patience, lambda: f"{self.groups.describe()}, version {self.version}")
        self._serving: int | None = None  # what engines serve while they still fetch a newer version
        self._batch_complete = False  # take() has returned the batch of this version
        self._closed = False

    # -- the feed's side -------------------------------------------------------------------------

    def has_room(self) -> bool:
        if self.rule.is_exhausted(self.counts.dropped):
            return False
        gone = self.rule.groups_per_step if self._batch_complete else len(self.groups.taken)
        behind = (self.version - self.birth_version) * self.rule.groups_per_step  # places that come too late for it
        return len(self.groups.born) < self.rule.max_open_groups - gone - behind

    @property
    def birth_version(self) -> int:
        """Of who is admitted now: no newer than what engines serve."""
        return self.version if self._serving is None else self._serving

    async def wait_for_room(self) -> None:
        """Wait until the inequality holds."""
        await self.waiters.wait_until(self.has_room, who="feed", waits_for="room in the buffer")

    async def admit(self, task: Task) -> Slot:
        """Wait until the inequality holds, then give the task its number and its birth version."""
        await self.waiters.take_turn(
            "admit",
            lambda: self.counts.admitted if self.has_room() else None,
            who="feed",
            waits_for="room in the buffer",
        )
        return self._admit_task(task)

    def _admit_task(self, task: Task) -> Slot:
        slot = Slot(self.counts.admitted, task, self.birth_version)
        self.counts.admitted += 1
        self.groups.admit(slot)
        self.waiters.wake_one("roll")
        emit(Admitted(slot.number, task.id, slot.born))
        return slot

    async def close(self) -> None:
        """No more tasks will come: what is in flight is finished, and the last batch may be short."""
        await self.waiters.pass_gate("close", self.counts.admitted, who="feed")
        self._closed = True
        self.waiters.wake_all("roll")
        self.waiters.wake_one("learner")

    # -- the rollouts' side ----------------------------------------------------------------------

    async def claim(self) -> Slot | None:
        """The next slot to work on; None once the tasks have ended."""

        def first_waiting() -> int | None:
            waiting = self.groups.waiting
            return waiting[0].number if waiting else SHORT if self._closed else None

        if await self.waiters.take_turn("claim", first_waiting, who="roll", waits_for="a task") == SHORT:
            return None
        return self.groups.claim_first()

    async def put(self, slot: Slot, group: Group) -> None:
        await self.waiters.pass_gate("put", slot.number, who="roll")
        self.groups.end_rolling(slot)
        if self.rule.is_late(slot.born, self.version):
            return self._refund_late(slot)
        self.groups.finish(slot.number, group)
        self.waiters.wake_one("learner")

    async def drop(self, slot: Slot, reason: str, *, failed: bool = False) -> None:
        """The group ends here; its place is refunded, so the feed admits another task."""
        await self.waiters.pass_gate("drop", slot.number, who="roll")
        self.groups.end_rolling(slot)
        if self.rule.is_late(slot.born, self.version):
            return self._refund_late(slot)
        self.groups.close(slot.number)
        self.counts.record_dropped(reason, failed=failed)
        self.waiters.wake_one("feed")
        self.waiters.wake_one("learner")

    def _refund_late(self, *late: Slot) -> None:
        """The place of each is refunded, and taken again at once if its task is asked again: its
        number, and so its noise, is a new one.
        """
        for slot in late:
            self.groups.close(slot.number)
            self.counts.record_late(LATE)
            if self.retry:
                self.counts.retried += 1
                self._admit_task(slot.task)
            self.waiters.wake_one("feed")
            self.waiters.wake_one("learner")

    # -- the learner's side ----------------------------------------------------------------------

    async def take(self) -> list[Group]:
        """The next P groups that finish, as far as the deadlines of the others allow; fewer
        only at the end or when refills ran out.
        """
        if self.groups.taken:
            raise LawError("take() before the groups of the last step were settled")
        picked: list[Group] = []
        while len(picked) < self.rule.groups_per_step:
            number = await self.waiters.take_turn("pick", self.next_pick, who="learner", waits_for="finished groups")
            if number == SHORT:
                break
            picked.append(self.groups.pick(number))
        if self.rule.is_exhausted(self.counts.dropped):
            self.counts.explain_short_batch(len(picked))
        self._batch_complete = True  # a short batch leaves its other places empty: whoever took them would be late
        self.counts.dropped = 0
        picked.sort(key=lambda group: group.id)  # a batch does not depend on who ended first
        self.rule.check_lag(picked, self.version)
        return picked

    def next_pick(self) -> int | None:
        """The number of the group that `take` picks now; SHORT if none will come for this step, None: it waits."""
        return self.rule.next_pick(
            self.groups, self.version, ended=self._closed or self.rule.is_exhausted(self.counts.dropped)
        )

    def settle_groups(self, *, failed: str = "", outcomes: Mapping[int, str] | None = None) -> None:
        """Book the taken groups: trained, or failed for the given reason; those of `outcomes` for their own, "" where
        they were trained. Nobody is woken, nothing is admitted.

        A failed batch was consumed all the same, so its places are not refunded: v counts batches.
        """
        reasons = Counter((outcomes or {}).get(number, failed) for number in self.groups.taken)
        for reason, groups in reasons.items():
            self.counts.record_consumed(groups, failed=reason)
        self.groups.taken.clear()
        self.ledger()

    def begin_delivery(self) -> None:
        """Engines go on serving what they serve now, also beyond the next advance, until `end_delivery`."""
        assert self._serving is None, "two deliveries at a time"
        self._serving = self.version

    def end_delivery(self) -> None:
        """Engines serve the newest version."""
        self._serving = None
        self.waiters.wake_one("feed")

    async def advance(self, version: int) -> None:
        """`version` is the trainer's from now on, and served unless it is still being delivered: room appears, the feed
        wakes, and who is late by now goes.
        """
        await self.waiters.pass_gate("advance", version, who="learner")
        self.version, self._batch_complete = version, False
        self._refund_late(*self.rule.remove_late(self.groups, version))
        self.waiters.wake_one("feed")
        self.waiters.wake_all("late")

    # -- the ledger ------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        """Law 1: issued = trained + filtered + failed + in flight; raises LawError where it is not."""
        return self.counts.balanced_entries(self.groups.in_flight)

    def state_dict(self, version: int, *, encoded: bool = True) -> dict[str, Any]:
        """What a resume needs, with `version` serving: finished groups whole, also those that a step
        has picked and not trained, unfinished ones as tasks that are started again. Finished groups change no more:
        with
        `encoded` false who writes them encodes one after the other, and not on the event loop (`state.encode`)."""
        groups = self.groups
        finished = [group for _, group in sorted((groups.finished | groups.taken).items())]
        return {
            "version": version,
            **self.counts.state_dict(),
            "unfinished": [asdict(slot) for slot in groups.unfinished()],
            "finished": [encode(group) if encoded else group for group in finished],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self.counts.load_state_dict(state)
        unfinished = [Slot(s["number"], Task(**s["task"]), s["born"]) for s in state["unfinished"]]
        self.groups.restore(unfinished, [decode(row) for row in state["finished"]], self.counts.admitted)
        # the checkpoint was written before the advance
        self._refund_late(*self.rule.remove_late(self.groups, self.version))
        self.ledger()
