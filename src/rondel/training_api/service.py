"""One base, an adapter for each client: what is asked at the same time is computed together.

forward of a ─┐
forward of b ─┼─> micro-batches of both ─> one pass ─> losses of a and of b ─> their own gradients
sample of c ──────────────────────────> the engine, between two passes
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.errors import TrainError, UserError
from rondel.core.types import Request, Sampling, sample_key
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_bank_files import read_weights, save_weights
from rondel.models.adapter_head import adapted_logprobs
from rondel.models.adapter_rows import HEAD
from rondel.models.loaded_model import LoadedModel
from rondel.train.logprobs import logprob_and_entropy
from rondel.training_api.backend import Adam, AdapterSpec, Example, Losses, Sampled, SampleSettings
from rondel.training_api.losses import Loss, loss_named
from rondel.training_api.packing import Owned, PackedExamples, micro_batches, pack_examples
from rondel.training_api.trained_adapter import TrainedAdapter

ALPHA = 32.0  # scale = ALPHA / rank: a learning rate then means about the same at every rank


@dataclass(slots=True, eq=False)
class _Asked:
    """One call of `forward` on its way.

    adds  a part of its gradient has been added
    left  nobody waits for it any more: what is left of it is not computed, and what was added of it goes
    """

    adapter: TrainedAdapter
    examples: Sequence[Example]
    loss: Loss
    config: dict[str, float]
    backward: bool
    done: asyncio.Future[Losses]
    adds: bool = False
    left: bool = False
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


Place = tuple[_Asked, int]  # an example of a call


class AdapterService:
    """TrainingBackend of one model in this process. `run` executes a function on the device's thread, where the
    engine's passes run, too.

    micro_tokens   of one pass: bounds the memory of its activations
    cache_tokens   that one request may have in the engine
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: BuiltinEngine,
        *,
        run: Callable[..., Awaitable[Any]],
        name: str,
        micro_tokens: int = 2048,
        cache_tokens: int = 0,
    ) -> None:
        self.loaded, self.engine, self._run = loaded, engine, run
        self.bank = loaded.bank if isinstance(loaded.bank, AdapterBank) else AdapterBank(loaded)
        self.base_model, self.max_context, self.micro_tokens = name, loaded.max_context, micro_tokens
        self._room = min(cache_tokens or loaded.max_context, loaded.max_context)
        self._trained: dict[str, TrainedAdapter] = {}
        self._waiting: list[_Asked] = []
        self._worker: asyncio.Task[None] | None = None
        self._sampled = 0
        self._adding = False  # the pass that is computed has begun to add gradients

    # -- adapters --------------------------------------------------------------------------------

    async def create_adapter(self, adapter: str, spec: AdapterSpec) -> None:
        if adapter in self._trained:
            raise UserError(f"adapter '{adapter}' exists already")
        if not 1 <= spec.rank <= min(512, *(min(sizes) for name, sizes in self.bank.sizes.items() if name != HEAD)):
            raise UserError(f"rank = {spec.rank}; it must be positive and below the width of the layers, at most 512")
        if self.loaded.routers and spec.mlp:
            raise UserError(
                f"'{self.base_model}' is a mixture of experts, whose experts an adapter cannot reach: train_mlp = False"
            )

        def create() -> TrainedAdapter:
            kinds = {"attention": spec.attention, "mlp": spec.mlp, "head": spec.unembed}
            return TrainedAdapter(
                self.bank.create_adapter(adapter, rank=spec.rank, alpha=ALPHA, seed=spec.seed, **kinds)
            )

        self._trained[adapter] = await self._run(create)

    async def drop_adapter(self, adapter: str) -> None:
        self._adapter(adapter)
        del self._trained[adapter]

    async def optim_step(self, adapter: str, adam: Adam) -> dict[str, float]:
        return await self._run(self._adapter(adapter).step, adam)

    async def save(self, adapter: str, folder: Path, *, optimizer: bool) -> None:
        trained = self._adapter(adapter)

        def save() -> None:
            save_weights(self.loaded, trained.weights, folder)
            if optimizer:
                trained.save_moments(folder)

        await self._run(save)

    async def load(self, adapter: str, folder: Path, *, optimizer: bool) -> None:
        trained = self._adapter(adapter)

        def load() -> None:
            trained.load(read_weights(self.loaded, adapter, folder), folder if optimizer else None)

        await self._run(load)

    async def serve_adapter(self, name: str, folder: Path) -> None:
        await self._run(self.bank.load, name, folder)

    async def drop_served(self, name: str) -> None:
        await self.engine.remove_adapter(name)

    def _adapter(self, name: str) -> TrainedAdapter:
        if name not in self._trained:
            raise UserError(f"there is no adapter '{name}'; it may have been unloaded")
        return self._trained[name]

    # -- gradients -------------------------------------------------------------------------------

    async def forward(
        self, adapter: str, examples: Sequence[Example], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Losses:
        trained = self._adapter(adapter)
        self._check_examples(examples)
        chosen, complete = loss_named(loss, config, examples)
        done: asyncio.Future[Losses] = asyncio.get_running_loop().create_future()
        asked = _Asked(trained, examples, chosen, complete, backward, done)
        self._waiting.append(asked)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            asked.left = True
            while not done.done():  # its client's next request must not find half of its gradient
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            if not done.cancelled():
                done.exception()  # nobody asks for it any more
            raise

    def _check_examples(self, examples: Sequence[Example]) -> None:
        if not examples:
            raise UserError("there is nothing to compute: no example was sent")
        tokens = self.loaded.token_count
        for i, example in enumerate(examples):
            n, shape = len(example.tokens), example.targets.shape
            if not 1 <= n <= self.max_context:
                raise UserError(f"example {i} has {n} tokens; this model reads 1 to {self.max_context}")
            if not shape or shape[0] != n or len(shape) > 2 or 0 in shape:
                raise UserError(f"example {i}: target_tokens has shape {list(shape)}; it is [{n}] or [{n}, K]")
            for what, ids, limit in (
                ("token", np.asarray(example.tokens), tokens),
                ("target", example.targets, self.loaded.vocabulary),
            ):
                if ids.min() < 0 or ids.max() >= limit:
                    raise UserError(
                        f"example {i} has the {what} {ids.min() if ids.min() < 0 else ids.max()}: this model's are 0 "
                        f"to {limit - 1}. Was it made by another tokenizer?"
                    )
            if strange := [key for key, array in example.inputs.items() if not np.isfinite(array).all()]:
                raise UserError(f"example {i}: {strange[0]} has a number that is not finite")

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # who asks in the same turn of the loop is computed together
            asked, self._waiting = self._waiting, []
            for backward in (False, True):
                calls = [call for call in asked if call.backward is backward]
                places = [(call, i) for call in calls for i in range(len(call.examples))]
                for part in micro_batches([self._owned(place) for place in places], self.micro_tokens):
                    await self._compute([places[i] for i in part], backward)
                for call in calls:
                    if call.left and not call.done.done():
                        if call.adds:
                            await self._run(call.adapter.drop_gradient)
                        call.done.cancel()
                    elif not call.done.done():
                        call.adapter.added += backward
                        call.done.set_result(_losses_of(call))

    @staticmethod
    def _owned(place: Place) -> Owned:
        call, i = place
        return call.adapter.weights, call.examples[i]

    async def _compute(self, places: list[Place], backward: bool) -> None:
        places = [(call, i) for call, i in places if not (call.left or call.done.done())]
        if not places:
            return
        try:
            await self._run(self._pass, places, backward)
        except Exception as fault:
            calls = list(dict.fromkeys(call for call, _ in places))
            if len(calls) > 1 and not self._adding:  # one of them must not spoil the others
                for one in calls:
                    await self._compute([place for place in places if place[0] is one], backward)
                return
            for call in calls:  # a part of it may have been added
                await self._run(call.adapter.drop_gradient)
                call.done.set_exception(
                    TrainError(f"{fault}: the gradient that was added since the last optim_step is gone")
                    if backward
                    else fault
                )

    def _pass(self, places: list[Place], backward: bool) -> None:
        """One packed pass; gradients are added only where every number of it is finite."""
        self._adding = False
        packed = pack_examples([self._owned(place) for place in places], self.loaded.device)
        with torch.set_grad_enabled(backward), self.bank.use(packed.runs):
            hidden = self.loaded.hidden_states(packed.tokens, packed.positions, packed.layout)
            logprobs = self._logprobs(hidden, packed)
            total = logprobs.new_zeros(())
            for (call, i), where in zip(places, packed.places, strict=True):
                z = logprobs[torch.from_numpy(where).to(logprobs.device)]
                given = {
                    key: torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(z.device)
                    for key, array in call.examples[i].inputs.items()
                }
                value = call.loss.value(z, given, call.config)
                call.logprobs[i], call.losses[i] = z.detach(), value.detach()
                total = total + value.sum()
            if not bool(torch.isfinite(total)):
                raise TrainError(f"the loss is {float(total.detach())}")
            if backward and total.requires_grad:
                self._adding = True
                for call, _ in places:
                    call.adds = True
                total.backward()

    def _logprobs(self, hidden: Tensor, packed: PackedExamples) -> Tensor:
        """[M] of the wanted targets."""
        parts, first = [], 0
        for adapter, n in packed.owners:
            rows, targets = packed.rows[first : first + n], packed.targets[first : first + n]
            first += n
            own = hidden.index_select(0, rows)
            if HEAD in adapter.layers:
                parts.append(adapted_logprobs(own, targets, self.loaded.head, *adapter.layers[HEAD], adapter.scale))
            else:
                parts.append(logprob_and_entropy(own, targets, self.loaded.head)[0])
        return torch.cat(parts)

    # -- samples ---------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], adapter: str | None, settings: SampleSettings) -> Sampled:
        room = self._room - len(prompt)
        if room < 1:
            raise UserError(f"a prompt of {len(prompt)} tokens leaves no room: this server takes {self._room} in all")
        sampling = Sampling(
            temperature=settings.temperature,
            top_k=max(0, settings.top_k),
            top_p=settings.top_p,
            max_tokens=room if settings.max_tokens is None else settings.max_tokens,
            stop=(*settings.stop_tokens, *settings.stop_texts),
        )
        number, self._sampled = self._sampled, self._sampled + 1
        seed, place = (0, number) if settings.seed is None else (settings.seed, -1)
        first = set[str]()
        if settings.prompt_logprobs:
            first.add("prompt_logprobs")
        if settings.top_prompt_logprobs:
            first.add(f"prompt_top_logprobs:{settings.top_prompt_logprobs}")
        one = Request(list(prompt), sampling, adapter=adapter or "")
        done = await asyncio.gather(
            *(
                self.engine.generate(
                    replace(one, key=sample_key(seed, place, i), wants=frozenset(first if i == 0 else ()))
                )
                for i in range(settings.n)
            )
        )
        if any(c.finish_reason == "abort" for c in done):
            raise UserError(f"'{adapter}' was deleted or overwritten while an answer was written with it: ask anew")
        told, tops = done[0].prompt_logprobs, done[0].prompt_top_logprobs
        return Sampled(
            [(list(c.tokens), list(c.logprobs), "length" if c.finish_reason == "length" else "stop") for c in done],
            None if told is None else [None, *told[1:]],
            None if tops is None else [None, *tops[1:]],
        )

    async def close(self) -> None:
        if self._worker is not None and not self._worker.done():
            await self._worker


def _losses_of(call: _Asked) -> Losses:
    outputs = [
        {"logprobs": call.logprobs[i].cpu().numpy(), "elementwise_loss": call.losses[i].cpu().numpy()}
        for i in range(len(call.examples))
    ]
    total = sum(float(loss.double().sum()) for loss in call.losses.values())
    return Losses(outputs, {"loss:sum": total})
