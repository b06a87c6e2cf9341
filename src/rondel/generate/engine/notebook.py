"""`rondel.Engine`: the built-in engine's synchronous face, usable alone in a script or notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from rondel.core.errors import EngineError, UserError
from rondel.core.registry import find_registered
from rondel.core.types import Completion, Request, Sampling, sample_key
from rondel.generate.engine.blocks import BLOCK_ENGINE
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models.aligned_numerics import align_numerics
from rondel.models.cuda_graphs import serving_pass
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.step_head import refuse_step_head
from rondel.text.tokenization import special_tokens
from rondel.text.unicode import valid_unicode

GUESSES = 4  # at most, of a request in one step


def speculation_of(how: str, *, dtype: str, device: str) -> SpeculativeDecoder | None:
    """ "off", "ngram" or "draft:MODEL"."""
    kind, _, model = how.partition(":")
    if kind == "draft" and model:
        return SpeculativeDecoder(GUESSES, DraftModel(load_model(model, dtype=dtype, device=device)))
    if how not in ("off", "ngram"):
        raise UserError(
            f"speculative = '{how}'; it is off, ngram or draft:MODEL, a smaller model with the same tokenizer"
        )
    return SpeculativeDecoder(GUESSES) if kind == "ngram" else None


def _is_prompt(prompt: Any) -> bool:
    """Text, or token ids: whole numbers in a list, a tuple, an array or a tensor."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, Mapping | bytes) or not hasattr(prompt, "__len__") or not hasattr(prompt, "__getitem__"):
        return False
    return all(hasattr(token, "__index__") and not isinstance(token, bool) for token in prompt)


def check_prompts(prompts: Iterable[Any]) -> None:
    """Every one a text or token ids; else a UserError with what to call instead."""
    for prompt in prompts:
        if _is_prompt(prompt):
            continue
        alone = isinstance(prompt, Mapping)
        first = prompt if alone else next(iter(prompt), None) if isinstance(prompt, list) else None
        if isinstance(first, Mapping) and "role" in first:
            raise UserError(
                "engine.generate was given chat messages; it takes texts or lists of token ids. Use "
                f"engine.chat({'[messages]' if alone else 'conversations'}) for messages"
            )
        raise UserError(f"a prompt is a text or a list of token ids, and {prompt!r:.80} is neither")


class Engine:
    """`engine = Engine.load("smollm2-135m"); outs = engine.generate(["3 + 4 ="], Sampling(n=4)); outs[0][2].text`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_pages: int = 32768,
        max_running: int = 64,
        compile: bool = False,
        speculation: SpeculativeDecoder | None = None,
    ) -> None:
        self.loaded = loaded
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rondel-engine", daemon=True)
        self._thread.start()
        self._device = ThreadPoolExecutor(1, "rondel-device")
        try:
            if loaded.blocks is not None:
                if compile or speculation is not None:
                    raise UserError(
                        f"compile and speculative are of models that write token after token, and '{loaded.name}' "
                        "fills in blocks of masks: leave them out"
                    )
                found = find_registered("engine", BLOCK_ENGINE, {})
                self._engine: Any = found(loaded, run=self._run_on_device, max_running=max_running)
                return
            compiled = self._device.submit(serving_pass, loaded, max_running).result() if compile else None
            self._engine = BuiltinEngine(
                loaded,
                run=self._run_on_device,
                kv_pages=kv_pages,
                max_running=max_running,
                compiled=compiled,
                speculation=speculation,
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        path: str | dict[str, Any],
        *,
        dtype: str = "auto",
        device: str = "auto",
        numerics: str = "fast",
        speculative: str = "off",
        **settings: Any,
    ) -> Engine:
        """A folder, hub id, GGUF file, "smollm2-135m", or { random = ... }, on the GPU if there is one.

        numerics      "aligned": the same bits whatever else is in the batch, and in the trainer; "rounded": a model of
                      16 bits rounds its residual stream and logits, too
        speculative   "ngram", or "draft:MODEL" with a smaller model of the same tokenizer: guess ahead;
                      no token changes its distribution
        settings      kv_pages, max_running, compile; of a model of blocks max_running
        """
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if numerics not in ("fast", "aligned", "rounded"):
            raise UserError(f"numerics = '{numerics}'; it is fast, aligned or rounded")

        def load_models() -> tuple[LoadedModel, SpeculativeDecoder | None]:
            loaded = load_model(path, dtype=dtype, device=where)
            refuse_step_head(loaded.name, loaded.head)
            if numerics == "aligned":
                align_numerics(loaded)
            if numerics == "rounded":
                loaded.round_sums()
            return loaded, speculation_of(speculative, dtype=dtype, device=where)

        # its threads end with it: arithmetic on the caller's thread would halve the engine's speed
        with ThreadPoolExecutor(1) as aside:
            loaded, speculation = aside.submit(load_models).result()
        return cls(loaded, speculation=speculation, **settings)

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        sampling: Sampling | None = None,
        *,
        wants: Iterable[str] = (),
        split_special_tokens: bool = True,
    ) -> list[list[Completion]]:
        """outs[i][j] is sample j of prompt i. Sample j of prompt i draws the same noise whatever else is in the batch.

        `wants` are streams beside the tokens: {"raw_logprobs", "top_logprobs:5", "prompt_logprobs", "support"}.
        Control tokens that a text spells are text; split_special_tokens = False means them, as
        in a prompt that a template has written.
        """
        sampling = sampling or Sampling()
        if self._loop.is_closed():
            raise EngineError("this engine is closed; load another")
        if isinstance(prompts, str) or any(isinstance(p, int) for p in prompts):
            raise UserError("prompts is one prompt; give a list of them: engine.generate([prompt])")
        check_prompts(prompts)
        special = special_tokens(self.tokenizer)
        rows = [
            special.encode_text(valid_unicode(p), split=split_special_tokens, add_special_tokens=True)
            if isinstance(p, str)
            else list(p)
            for p in prompts
        ]
        single = replace(sampling, n=1)
        more = frozenset(wants)
        jobs = [
            Request(row, single, key=sample_key(sampling.seed, i, j), wants=more)
            for i, row in enumerate(rows)
            for j in range(sampling.n)
        ]
        waiting = asyncio.run_coroutine_threadsafe(self._generate_all(jobs), self._loop)
        try:
            flat = waiting.result()
        finally:
            waiting.cancel()  # interrupted: the engine need not go on
        return [flat[i * sampling.n : (i + 1) * sampling.n] for i in range(len(rows))]

    def chat(
        self, conversations: list[list[dict[str, Any]]], sampling: Sampling | None = None, *, wants: Iterable[str] = ()
    ) -> list[list[Completion]]:
        """What the assistant says next in each of the conversations, `[{"role": "user",
        "content": "..."}]`, through the model's template.
        """
        if conversations and isinstance(conversations[0], dict):
            raise UserError("conversations is one conversation; give a list of them: engine.chat([messages])")
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(f"'{self.loaded.name}' has no chat template; give engine.generate its prompts as text")
        special = special_tokens(self.tokenizer)
        covered = [special.cover_messages(valid_unicode(messages)) for messages in conversations]
        rows = [
            special.encode(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            for messages in covered
        ]
        return self.generate(rows, sampling, wants=wants)

    async def _generate_all(self, jobs: list[Request]) -> list[Completion]:
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

    async def _run_on_device(self, function: Any, *args: Any) -> Any:
        return await self._loop.run_in_executor(self._device, function, *args)
