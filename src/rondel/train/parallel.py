"""Who computes which part of a batch. Every rank holds the whole batch, so every
denominator is global before any split (law 3).

    micro-batches  0 1 2 3 4      rank 0:  0  2  4      rank 1:  1  3 (0)     idle: makes the pass,
                   since all ranks gather the weights
                                                                               for it together, and counts nothing
What one rank found out about its tokens is exchanged, so that all of them go on with the same batch. The weights of all
go to one transport: of several ranks by train/weight_publisher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from rondel.core.protocols import SeveralWays
from rondel.core.tensor_parts import TensorPart
from rondel.core.types import Manifest, Route
from rondel.models import names
from rondel.train.loss_scale import loss_scale_of
from rondel.train.optim import MasterWeights

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.models.collectives import RankGroup
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.pack import MicroBatches, PackedBatch, TrainBatch

T = TypeVar("T")


class SingleRank:
    """One rank: everything is its own.

    rank, size             among all processes of the trainer
    data_rank, data_size   among those that take different samples; the others of a data rank compute the same together
    stages                 of layers, one behind the other: each waits for the fullest micro-batch
    tensor                 the ranks over which each matrix is cut, if it is
    """

    rank, size = 0, 1
    data_rank, data_size = 0, 1
    stages = 1
    tensor: RankGroup | None = None

    @property
    def is_leader(self) -> bool:
        """Writes what all of them have."""
        return self.rank == 0

    def shard_model(self, loaded: LoadedModel) -> LoadedModel:
        """The model as this rank keeps it."""
        return loaded

    def make_masters(self, model: nn.Module, **how: Any) -> MasterWeights:
        """Masters and optimizers of what this rank keeps of a model; `how` as `MasterWeights` has it."""
        return MasterWeights(model, loss_scale=loss_scale_of(model), **how)

    def full_weights(self, model: nn.Module, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor in the compute dtype) of everything a receiver needs, or `only` of these names."""
        return ((name, t) for name, t in names.named_weights(model) if only is None or name in only)

    def held_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor in the compute dtype) of what this rank holds of them; nothing is gathered."""
        return names.named_weights(model)

    def weight_parts(self, model: nn.Module) -> dict[str, TensorPart]:
        """Which numbers of which weights this rank holds."""
        return {name: TensorPart.whole(tensor.shape) for name, tensor in names.named_weights(model)}

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return values

    def run_passes(
        self, packs: MicroBatches, forward: Callable[[PackedBatch, bool], T], backward: Callable[[T, bool], None]
    ) -> None:
        """The passes of an update: what `forward` makes of each micro-batch is for `backward`; both are told whether
        it is the last one.
        """
        for number, packed in enumerate(packs, 1):
            backward(forward(packed, number == len(packs)), number == len(packs))

    def begin_pass(self, model: nn.Module, *, last: bool) -> None:
        """Before a forward pass with a gradient, and before its backward pass; `last`: of the update."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """What each rank says, in their order."""
        return [value]

    def gather_data_ranks(self, value: Any) -> list[Any]:
        """What each data rank says, and each stage of it: once, where several ranks compute the same."""
        return [value]

    def gather_arrays(self, values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """What each data rank measured, and each stage of it, [n] in fp32 on the host under any names: travels as one
        array a rank.
        """
        return [values]

    def exchange_tokens(self, batch: TrainBatch, mine: Iterable[int], *names: str) -> None:
        """Give the others what this rank found out about the tokens of its samples: the named fields of TokenBatch."""
        if self.size == 1:
            return
        known = {i: batch.samples[i].known for i in sorted(set(mine))}
        found: dict[str, Tensor] = {}
        for i, tokens in known.items():
            for name in names:
                value = getattr(tokens, name)
                parts = value if name in ("teachers", "margins") else {"": value}
                found |= {f"{i} {name} {number}": part.flatten() for number, part in parts.items()}
        for theirs in self.gather_arrays(found):
            for key, values in theirs.items():
                at, name, number = key.split(" ")
                tokens = batch.samples[int(at)].known
                if number:
                    getattr(tokens, name)[int(number)] = values
                else:
                    n = len(tokens.sample)
                    setattr(tokens, name, values if len(values) == n else values.view(n, -1))

    def exchange_hidden_states(self, batch: TrainBatch, mine: Iterable[int], number: int, like: Tensor) -> None:
        """Give the others the hidden states [m, D] of a teacher that this rank computed; `like` [V, D]: its head."""
        if self.size == 1:
            return
        found = {str(i): batch.samples[i].hidden[number].flatten() for i in sorted(set(mine))}
        for theirs in self.gather_arrays(found):
            for at, states in theirs.items():
                batch.samples[int(at)].hidden[number] = states.view(-1, like.shape[1]).to(like.dtype)

    @contextmanager
    def collective_section(self, verb: str) -> Iterator[None]:
        """What all ranks do at the same time: a wait for one that does not come ends with a name."""
        yield

    def close(self) -> None:
        pass


ALONE = SingleRank()


class WeightPublisher:
    """Gives the weights of a trainer of one rank to its transport. Weights in a number format travel as codes and
    scales, each from the whole tensor.

    masters  of the trainer: what it rounds, too, is encoded from them
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: SingleRank,
        transport: Transport | None,
        masters: MasterWeights | None = None,
    ) -> None:
        self.loaded, self.ranks, self.transport, self._masters = loaded, ranks, transport, masters

    def publish(self, route: Route, version: int) -> tuple[Manifest, Route] | None:
        """What the update consists of, and the way it takes; None on a rank that only gives its shards."""
        transport = self._way_of(route)
        manifest, route = transport.publish(route, version, names.describe_tensors(self._whole_tensors(transport)))
        return replace(manifest, base=names.base_digest(self.loaded.model)), route

    def send(self, route: Route) -> None:
        """The tensors themselves, where the transport carries them after the engines said yes."""
        transport = self._way_of(route)
        transport.send(route, self._whole_tensors(transport))

    def require_transport(self) -> Transport:
        assert self.transport is not None, "the trainer was built without a transport"
        return self.transport

    def _way_of(self, route: Route) -> Transport:
        transport = self.require_transport()
        return transport.way_of(route) if isinstance(transport, SeveralWays) else transport

    def _whole_tensors(self, transport: Transport) -> Iterator[tuple[str, Tensor]]:
        """One at a time, under the names that the transport carries."""
        model, tensors = self.loaded.model, self._gather_tensors()
        if (encoding := names.encoding_of(model)) is not None:
            return encoding.publish(model, tensors, checkpoint=transport.names == "checkpoint")
        return names.published_tensors(model, tensors) if transport.names == "checkpoint" else tensors

    def _gather_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Of what the trainer rounds before it travels in a number format, its masters."""
        model, masters = self.loaded.model, self._masters
        if masters is None or not masters.formatted_names or names.encoding_of(model) is None:
            return self.ranks.full_weights(model)
        plain = {name for name, _ in names.named_weights(model)} - masters.formatted_names
        return chain(self.ranks.full_weights(model, plain), _rounded_masters(masters))


def _rounded_masters(weights: MasterWeights) -> Iterator[tuple[str, Tensor]]:
    """Whole masters of the parameters that lie in a number format here; all ranks ask."""
    for i, name in enumerate(weights.names):
        if name in weights.formatted_names:
            yield name, weights.gather_full(i, weights.read_master(i))
