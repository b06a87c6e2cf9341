"""Several policies that are adapters on one base, behind the verbs of one engine: their requests are decoded together.

Request.policy = "critic" ──> Request.adapter = "critic"       a cache root of its own: (version, adapter, namespace)
frozen, no adapter        ──> the base alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rondel.core.errors import EngineError
from rondel.core.registry import suggest_name
from rondel.core.types import Completion, Request, TokenScores


class AdapterPolicyEngine:
    """`AdapterPolicyEngine(engine, {"policy": "policy", "critic": "critic", "rival": ""}, trained=["policy",
    "critic"])`: the adapter that each policy is, "" for the base. All that is not a request is the engine's own.
    """

    def __init__(self, engine: Any, adapters: Mapping[str, str], *, trained: list[str]) -> None:
        self.engine, self.adapters = engine, dict(adapters)
        self.trained = dict.fromkeys(trained, engine)

    async def generate(self, request: Request, **others: Any) -> Completion:
        return await self.engine.generate(self._as_adapter(request), **others)

    async def score(self, request: Request) -> TokenScores:
        return await self.engine.score(self._as_adapter(request))

    def _as_adapter(self, request: Request) -> Request:
        if request.policy not in self.adapters:
            raise EngineError(
                f"a request for the policy '{request.policy}', which this run does not "
                f"have.{suggest_name(request.policy, list(self.adapters))} It has {', '.join(self.adapters)}"
            )
        return replace(request, adapter=self.adapters[request.policy])

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        """An evaluation says which version was loaded."""
        self.engine.version = version

    def __getattr__(self, verb: str) -> Any:
        if verb == "engine":
            raise AttributeError(verb)
        return getattr(self.engine, verb)
