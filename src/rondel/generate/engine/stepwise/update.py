"""The engine's side of a commit: what is not the weights themselves, for an engine that answers in steps."""

from __future__ import annotations

from typing import Any

from rondel.core.types import Commit
from rondel.generate.engine.builtin.engine_update import EngineUpdate
from rondel.models.main_grad import weights_changed


class StepwiseUpdate(EngineUpdate):
    """The transaction of the token engine, whose commit has no draft to forget."""

    def __init__(self, engine: Any) -> None:
        """`engine`: a StepwiseEngine, which is its own serving loop."""
        super().__init__(engine.arrivals, engine.lifecycle, engine)
        self.engine = engine

    async def _commit(self, commit: Commit) -> None:
        engine = self.engine
        await engine.run(engine.arrivals.commit_update, commit)
        weights_changed()
        engine.forget_weights()
        engine.lifecycle.version, engine.lifecycle.broken = commit.version, ""
        engine.log.record_version(commit.version, commit.root)
        engine.wake_up()

    def _report_version(self) -> None:
        account = self.engine.account
        if steps := account.counts["steps"]:
            account.counts["room"] = steps * self.engine.max_running
        account.report_time({"kv_cache": self.engine.cache_bytes})
