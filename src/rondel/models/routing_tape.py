"""Which experts a MoE's routers chose, and the same choice once more (routing replay).

A router computes scores, takes the top k and normalises what it took. Only the middle
changes here: while a tape is in force its `topk` over the experts returns the
recorded ones, with the model's own scores of
them; everything before and after is the model's own code, so gradients flow through the gates as always.

    record   engine, every step: [T new tokens, layers, k]        replay   trainer: the
             same rows, each layer exactly once

Indexers of sparse attention (models/indexer.py) choose keys, and their choice is recorded in the same way: as positions
plus one (0 for none), in as many rows of k numbers more as they take.

    rows     router 0 ... router n-1 | indexer 0: ceil(width / k) rows | indexer 1 ...

A router that looks its experts up by token (hash routing) chooses nothing, and leaves no record.

Without it rounding sends tokens to other experts in the trainer than in the engine, and
the ratio of the two policies is noise.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rondel.core.errors import LawError, ModelError


class RoutingTape:
    """Routes [T, L, K] of the tokens of one forward pass: what was recorded, or what is to be replayed.

    `layers` routers, and `indexers` that choose at most `width` keys a token. `own`: the routers that are here, where
    others are on other stages of a pipeline; what those choose is not on this tape.
    """

    def __init__(
        self,
        layers: int,
        routes: Tensor | None = None,
        *,
        indexers: int = 0,
        width: int = 0,
        own: frozenset[int] | None = None,
    ) -> None:
        self.layers, self.routes, self.indexers, self.width = layers, routes, indexers, width
        self.own = frozenset(range(layers)) if own is None else own
        self.rows: list[Tensor | None] = [None] * layers
        self.keys: list[Tensor | None] = [None] * indexers
        self.flips: list[Tensor] = [
            torch.zeros(0)
        ] * layers  # of each layer: share of a token's own choice that the record does not hold [T]
        self.margins: list[Tensor] = [torch.zeros(0)] * layers  # of each layer that replays: s_k - s_(k+1) [T]
        self.experts = [0] * layers  # of each layer: among how many its router chose

    def repeated(self) -> RoutingTape:
        """The same routes, for a second run."""
        return RoutingTape(self.layers, self.routes, indexers=self.indexers, width=self.width, own=self.own)

    def check_records(self) -> None:
        """Every router here has chosen, and every indexer."""
        if missing := [i for i, row in enumerate(self.rows) if row is None and i in self.own]:
            raise LawError(
                f"router {missing[0]} of {self.layers} left no record: it did not run, or it chooses without topk"
            )
        if missing := [i for i, chosen in enumerate(self.keys) if chosen is None]:
            raise LawError(f"indexer {missing[0]} of {self.indexers} left no record: it did not run")

    @property
    def recorded_routes(self) -> Tensor:
        """[T, L, K] int64."""
        self.check_records()
        routes = torch.stack([row for row in self.rows if row is not None], 1)
        if not self.width:
            return routes
        pieces = [
            F.pad(chosen + 1, (0, -self.width % routes.shape[2])).unflatten(1, (-1, routes.shape[2]))
            for chosen in self.keys
            if chosen is not None
        ]
        return torch.cat([routes, *pieces], 1)

    def restore_records(self, recorded: Tensor) -> None:
        """Take over what was recorded elsewhere: [T, L, K], as `recorded_routes` of such a tape gives it."""
        self.rows = [recorded[:, layer] for layer in range(self.layers)]
        each = -(-self.width // recorded.shape[2])  # rows of an indexer
        kept = recorded[:, self.layers :].unflatten(1, (self.indexers, each)) if self.indexers else recorded[:, :0]
        self.keys = [kept[:, i].flatten(1)[:, : self.width] - 1 for i in range(self.indexers)]

    def expert_counts(self) -> dict[int, Tensor]:
        """Of each layer here, tokens that went to each of its experts: [E] int64."""
        taken = {i: self.rows[i] if self.routes is None else self.routes[:, i] for i in sorted(self.own)}
        return {i: row.flatten().bincount(minlength=self.experts[i]) for i, row in taken.items() if row is not None}

    def select_experts(self, layer: int, own: Tensor) -> Tensor:
        """What layer's topk [T, K] becomes. Every record is used exactly once."""
        theirs = self._recorded_once(self.rows, "router", layer, own)
        if theirs is None:
            return own
        theirs = theirs[:, layer]
        self.flips[layer] = 1 - (own[:, :, None] == theirs[:, None]).any(-1).float().mean(-1)
        return theirs

    def select_keys(self, indexer: int, own: Tensor) -> Tensor:
        """What an indexer's choice [T, width] becomes. Every record is used exactly once."""
        theirs = self._recorded_once(self.keys, "indexer", indexer, own)
        if theirs is None or theirs.shape[1] == self.layers:  # no context was longer than a choice
            return own
        rows = -(-self.width // theirs.shape[2])
        first = self.layers + indexer * rows
        return theirs[:, first : first + rows].flatten(1)[:, : self.width] - 1

    def _recorded_once(self, kept: list[Tensor | None], what: str, number: int, own: Tensor) -> Tensor | None:
        """Keep `own`. -> all routes on its device, if they are to be replayed."""
        if kept[number] is not None:
            raise LawError(f"{what} {number} chose twice in one forward pass: its record must be used exactly once")
        kept[number] = own
        if self.routes is None:
            return None
        if len(self.routes) != len(own):
            raise LawError(f"{what} {number} has {len(own)} tokens, the record {len(self.routes)}")
        return self.routes.to(own.device)


_here = threading.local()


@contextmanager
def use_tape(tape: RoutingTape | None) -> Iterator[RoutingTape | None]:
    """Routers called inside record on `tape`, or replay from it. Leaving it checks that every record was used."""
    outer = getattr(_here, "tape", None)
    _here.tape = tape
    try:
        yield tape
    finally:
        _here.tape = outer
    if tape is not None:
        tape.check_records()


def current_tape() -> RoutingTape | None:
    """The tape in force."""
    return getattr(_here, "tape", None)


def repeated_tape() -> AbstractContextManager[None]:
    """For a second run of some of the layers, later: the routes of the tape now in force, or of none."""
    tape = current_tape()
    again = tape.repeated() if tape is not None else None

    @contextmanager
    def in_force() -> Iterator[None]:
        outer = getattr(_here, "tape", None)
        _here.tape = again
        try:
            yield
        finally:
            _here.tape = outer

    return in_force()


class _Choice(TorchFunctionMode):
    """Inside one router: its topk over all experts takes what the tape says."""

    def __init__(self, tape: RoutingTape, layer: int, experts: int, k: int, axes: int) -> None:
        super().__init__()
        self.tape, self.layer, self.experts, self.k, self.axes = tape, layer, experts, k, axes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func not in (torch.topk, Tensor.topk)
            or out[1].ndim != self.axes
            or args[0].shape[-1] != self.experts
            or out[1].shape[-1] != self.k
        ):
            return out
        chosen = self.tape.select_experts(self.layer, out[1].detach().flatten(0, -2))
        if self.tape.routes is None:
            return out
        if self.k < self.experts:  # by how much the last that was taken was ahead of the first that was not
            ahead = args[0].detach().flatten(0, -2).topk(self.k + 1).values.float()
            self.tape.margins[self.layer] = ahead[:, -2] - ahead[:, -1]
        chosen = chosen.view_as(out[1])
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class _TwoMaxima(TorchFunctionMode):
    """Inside a sparse mixer (phimoe, arXiv:2409.12136): it takes the largest score, and then the largest of the rest.

    The threshold below which an expert weighs nothing stays that of the model's own largest score.
    """

    def __init__(self, tape: RoutingTape, layer: int) -> None:
        super().__init__()
        self.tape, self.layer = tape, layer
        self.own: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not Tensor.max or not isinstance(out, tuple):
            return out
        self.own.append(out[1].detach())
        if len(self.own) == 2:
            self.tape.select_experts(self.layer, torch.cat(self.own, -1))
        if self.tape.routes is None:
            return out
        column = len(self.own) - 1
        return out[0], self.tape.routes[:, self.layer, column : column + 1].to(out[1].device)


# how the classes end that choose experts with one topk
ROUTERS = (
    "TopKRouter",
    "TopkRouter",
    "TokenChoiceRouter",
    "Llama4Router",
    "Gemma4TextRouter",
    "MoEV1Gate",
    "TopKGating",
    "DbrxFFN",
    "ZayaRouter",
)


def router_names(model: Any) -> list[str]:
    """By their names, in the order of the tape."""
    return [name for name, module in model.named_modules() if type(module).__name__.endswith(ROUTERS)]


def install_routing_tape(model: Any) -> int:
    """Make a model's routers listen to the tape. -> how many there are; 0 for a dense model."""
    routers = [model.get_submodule(name) for name in router_names(model)]
    mixture = any(type(m).__name__.endswith("Experts") for m in model.modules())
    if not routers and (mixture or expert_count(model.config.get_text_config())):
        raise ModelError(
            f"model type '{model.config.model_type}' has experts, but no router of the kind that routing replay knows"
        )
    for layer, router in enumerate(routers):
        router.forward = functools.partial(_taped_forward, router, type(router).forward, layer)
    return len(routers)


def fill_hash_routers(model: Any) -> None:
    """Experts by token, drawn at random: transformers leaves the tables of a random model at zero."""
    for router in model.modules():
        if isinstance(table := getattr(router, "tid2eid", None), Tensor):
            drawn = torch.rand(len(table), router.weight.shape[0]).argsort(1)
            table.copy_(drawn[:, : table.shape[1]])


def expert_count(text: Any) -> int:
    """How many a layer has, under the names that families give it."""
    return next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(text, key, None))), 0
    )


def _taped_forward(router: Any, own: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
    tape = current_tape()
    if tape is None:
        return own(router, *args, **kwargs)
    tape.experts[layer] = _expert_count_of(router)
    if type(router).__name__ == "PhimoeTopKRouter":
        with _TwoMaxima(tape, layer):
            return own(router, *args, **kwargs)
    axes = 3 if type(router).__name__ == "ZayaRouter" else 2  # scores [1, T, E]; elsewhere those of groups have three
    with _Choice(tape, layer, tape.experts[layer], _experts_per_token(router), axes):
        return own(router, *args, **kwargs)


def _expert_count_of(router: Any) -> int:
    """How many experts it chooses among; longcat_flash and zaya count those that do nothing, too."""
    owners = (router, getattr(router, "config", None), getattr(router, "experts", None))
    keys = ("num_router_classes", "n_routed_experts", "num_experts")
    counts = (getattr(owner, key, None) for owner in owners for key in keys)
    return next((n for n in counts if isinstance(n, int)), None) or router.weight.shape[0]


def _experts_per_token(router: Any) -> int:
    return router.top_k if hasattr(router, "top_k") else router.config.top_k_experts
