"""The next decode step, planned and begun before the host has read the one in front of it (SGLang's overlap schedule).

    device   step n ............. | step n+1 ............ | step n+2 ....
    host     plan, launch n+1     | read n, deliver, plan, launch n+2
                      `- its tokens are those that step n draws, taken on the device

At most one step is begun that has not been asked for. A request that ends in step n has a row in step n+1 all the same;
what that row draws is thrown away, and its page is written before whoever gets it next writes it: the device keeps
order. Whatever has to know the token first is planned in the plain order: prompts, requests to admit, grammars,
penalties, drafts, images, recurrent states, top-p, and what is recorded beside tokens and routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.generate.engine.builtin.pages import last_page
from rondel.generate.engine.builtin.request import StepPlan

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.request import SequenceState
    from rondel.generate.engine.builtin.scheduler import Scheduler


class DecodeAhead:
    """
    plan   the step that was begun and not yet read
    steps  how many were begun so; rows that were for nobody: `wasted`
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.plan: StepPlan | None = None
        self.steps = self.wasted = 0

    def take_plan(self) -> StepPlan | None:
        """The step that was begun, for those who are still there: each has the page of its newest token now, as if it
        were planned here.
        """
        begun, self.plan = self.plan, None
        if begun is None:
            return None
        here = [live for live in begun.decoding if live.row >= 0]
        for live in here:
            live.pages.append(live.ahead.pop())
        self.wasted += len(begun.decoding) - len(here)
        return StepPlan([], here)

    def plan_after(self, plan: StepPlan) -> StepPlan | None:
        """The step after this one, which is not read: one more token of each that goes on for all the host knows. None
        where the plain order must decide. Only free pages are taken; nobody is evicted or retracted for it.
        """
        s = self.scheduler
        going = [live for live in plan.decoding if live.written + 1 < live.request.sampling.max_tokens]
        admits = bool(s.waiting) and (len(going) < len(s.running) or len(s.running) < s.limit)
        whole = not plan.chunks and len(plan.decoding) == len(s.running)
        if not going or admits or not whole or s.pages.free_count < len(going) or not all(map(_is_free, going)):
            return None
        for live in going:
            live.ahead = s.pages.allocate_pages(1, last_page(live))
        self.steps += 1
        self.plan = StepPlan([], going)
        return self.plan


def _is_free(live: SequenceState) -> bool:
    """Whether its next step can be computed by a device that alone knows its newest token."""
    return live.draws_plainly and live.request.sampling.top_p == 1 and live.gaze is None and live.request.lines is None
