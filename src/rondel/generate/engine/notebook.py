"""`rondel.Engine`: the built-in engine's synchronous face, usable alone in a script or notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models.load import Loaded, load
from rondel.words.errors import EngineError, UserError
from rondel.words.types import Completion, Request, Sampling, sample_key


class Engine:
    """`engine = Engine.load("smollm2-135m"); outs = engine.generate(["3 + 4 ="], Sampling(n=4)); outs[0][2].text`."""

    def __init__(self, loaded: Loaded, *, kv_pages: int = 32768, max_running: int = 64) -> None:
        self.loaded = loaded
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rondel-engine", daemon=True)
        self._thread.start()
        self._device = ThreadPoolExecutor(1, "rondel-device")
        self._engine = BuiltinEngine(loaded, run=self._run, kv_pages=kv_pages, max_running=max_running)

    @classmethod
    def load(cls, path: str | dict[str, Any], *, dtype: str = "auto", device: str = "auto", **settings: Any) -> Engine:
        """A folder, hub id, GGUF file, "smollm2-135m", or { random = ... }, on the GPU if there is one."""
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        with ThreadPoolExecutor(1) as aside:  # its threads end with it: arithmetic on the caller's thread would halve the engine's speed
            loaded = aside.submit(load, path, dtype=dtype, device=where).result()
        return cls(loaded, **settings)

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    def generate(
        self, prompts: list[str] | list[list[int]], sampling: Sampling | None = None, *, wants: Iterable[str] = ()
    ) -> list[list[Completion]]:
        """outs[i][j] is sample j of prompt i. Sample j of prompt i draws the same noise whatever else is in the batch.

        `wants` are streams beside the tokens: {"raw_logprobs", "top_logprobs:5", "prompt_logprobs", "support"}.
        """
        sampling = sampling or Sampling()
        if self._loop.is_closed():
            raise EngineError("this engine is closed; load another")
        if isinstance(prompts, str) or any(isinstance(p, int) for p in prompts):
            raise UserError("prompts is one prompt; give a list of them: engine.generate([prompt])")
        rows = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        single = replace(sampling, n=1)
        more = frozenset(wants)
        jobs = [
            Request(row, single, key=sample_key(sampling.seed, i, j), wants=more) for i, row in enumerate(rows) for j in range(sampling.n)
        ]
        waiting = asyncio.run_coroutine_threadsafe(self._all(jobs), self._loop)
        try:
            flat = waiting.result()
        finally:
            waiting.cancel()  # interrupted: the engine need not go on
        return [flat[i * sampling.n : (i + 1) * sampling.n] for i in range(len(rows))]

    async def _all(self, jobs: list[Request]) -> list[Completion]:
        """All or none: when one request is refused, the others end."""
        tasks = [asyncio.ensure_future(self._engine.generate(job)) for job in jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Requests in flight are given up. Closing twice is closing once."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._device.shutdown()
        self._loop.close()

    async def _run(self, function: Any, *args: Any) -> Any:
        return await self._loop.run_in_executor(self._device, function, *args)
