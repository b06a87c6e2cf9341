"""One update of the weights that the engine serves: begin -> route -> commit, or abort.

Data beside the weights that serve: whatever fails before the commit leaves the old
version serving, and requests run until then. Data over them: requests are parked first, and if
anything fails, the engine refuses until a good update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rondel.core.errors import SyncError
from rondel.core.events import Advised, emit
from rondel.core.types import Abort, Begin, Commit, Message, Route
from rondel.models.main_grad import weights_changed

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.adapter_receiver import AdapterReceiver
    from rondel.generate.engine.builtin.lifecycle import EngineLifecycle
    from rondel.generate.engine.builtin.serving_loop import ServingLoop
    from rondel.generate.engine.builtin.weight_receiver import WeightReceiver


class EngineUpdate:
    """The engine's part of an update: everything but the weights themselves, which are the receiver's."""

    def __init__(
        self,
        arrivals: WeightReceiver | AdapterReceiver,
        lifecycle: EngineLifecycle,
        serving: ServingLoop,
        weights: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`weights`: bytes of those that are the engine's own, by name."""
        self.arrivals, self.lifecycle, self.serving, self._weights = arrivals, lifecycle, serving, weights
        self._retracted = 0  # of the scheduler, when the account was told last

    async def receive(self, message: Message) -> None:
        beside = (
            message.beside
            if isinstance(message, Begin)
            else isinstance(message, Route) and not self.arrivals.is_overwriting
        )
        if self.serving.is_busy and not beside and not isinstance(message, Abort):
            raise SyncError("weights arrived while requests run: pause the engine first")
        try:
            match message:
                case Begin():
                    self.arrivals.begin_update(message, self.lifecycle.version)
                    self.serving.update_account()
                case Route():
                    await self.arrivals.receive_data(message, self.serving.run)
                case Commit():
                    await self._commit(message)
                    self._report_version()
                case Abort(reason=reason) if not self.arrivals.drop_update():
                    self.lifecycle.broken = f"the update was aborted ({reason})"
        except BaseException as error:
            why = str(error) or type(error).__name__
            if not (whole := self.arrivals.drop_update()):
                self.lifecycle.broken = why
            if not isinstance(error, Exception):
                raise
            raise SyncError(why if whole else f"{why}; the engine refuses to generate until a good update") from error

    async def _commit(self, commit: Commit) -> None:
        scheduler, runner = self.serving.scheduler, self.serving.runner
        await self.serving.run(self.arrivals.commit_update, commit)
        if commit.version <= self.lifecycle.version:
            # other weights under a name that was used: nothing computed so far may be matched
            scheduler.drop_cache(self.lifecycle.version)
        weights_changed()
        if runner.loaded.sight is not None:
            runner.eyes.forget_features()
        before, self.lifecycle.version = self.lifecycle.version, commit.version
        scheduler.new_version(commit.version, before)
        self.serving.log.record_version(commit.version, commit.root)
        if runner.draft is not None:
            runner.draft.forget_cache()  # it learns with the policy
        self.lifecycle.broken = ""
        self.serving.wake_up()

    def _report_version(self) -> None:
        """Once a version: `requests` of `room` were decoded together."""
        account, scheduler = self.serving.account, self.serving.scheduler
        if steps := account.counts["steps"]:
            account.counts["room"] = steps * scheduler.max_running
            account.counts["retracted"] = scheduler.retracted - self._retracted
            self._retracted = scheduler.retracted
        own = {f"engine {name}": n for name, n in self._weights().items()}
        account.report_time({"kv_cache": self.serving.runner.cache_bytes, **own})
        concurrency = self.serving.concurrency
        if concurrency is not None and (found := concurrency.settled_limit()):
            emit(Advised(self.lifecycle.version, *found))
