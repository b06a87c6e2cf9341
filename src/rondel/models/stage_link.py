"""Messages between the stages of a pipeline: one rank's way to the stages before and behind it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rondel.models.collectives import RankGroup


class StageLink:
    """Messages of a rank to the stages before and behind it, in two groups, so that neither direction waits for the
    other.
    """

    def __init__(self, forward: RankGroup, backward: RankGroup, device: torch.device, *, leads: bool = True) -> None:
        """`leads`: it begins with the first of all ranks, which writes checkpoints and publishes weights."""
        self.ranks, self.back, self.device, self.leads = forward, backward, device, leads
        self.index, self.size = forward.index, forward.size
        self._under_way: list[tuple[Any, Tensor]] = []  # sends, whose tensors must stay

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    @property
    def next(self) -> int:
        """The stage behind this one; the first one behind the last, for its next chunk."""
        return (self.index + 1) % self.size

    @property
    def before(self) -> int:
        return (self.index - 1) % self.size

    def send(self, x: Tensor, to: int, group: RankGroup) -> None:
        """Without waiting for it to arrive."""
        x = x.detach().contiguous()
        self._under_way = [(work, held) for work, held in self._under_way if not work.is_completed()]
        while len(self._under_way) > 8 * self.size:  # a pass without a gradient: the next stage is slower
            self._under_way.pop(0)[0].wait()
        self._under_way.append((dist.isend(x, group=group.group, group_dst=to), x))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, group: RankGroup) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(x, group=group.group, group_src=source)
        return x

    def send_object(self, value: Any, to: int) -> None:
        dist.send_object_list([value], group=self.ranks.group, group_dst=to, device=self.device)

    def receive_object(self, source: int) -> Any:
        told = [None]
        dist.recv_object_list(told, group=self.ranks.group, group_src=source, device=self.device)
        return told[0]

    def broadcast_last(self, values: Tensor) -> Tensor:
        """Send what the last stage has in `values` to all of them, in place. -> values."""
        dist.broadcast(values, group=self.ranks.group, group_src=self.size - 1)
        return values

    def collect(
        self, own: Iterable[tuple[str, dict[str, Tensor]]], shared: Container[str]
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Tensors by the name of their parameter, those of all stages on the first one, in the order of the stages;
        every stage asks, and goes through its own. `shared`: names that the first stage has, too. Where this pipeline
        does not begin with the rank that writes, none travels.
        """
        if not self.leads:
            yield from own
        elif self.index == 0:
            yield from own
            for stage in range(1, self.size):
                while (told := self.receive_object(stage)) is not None:
                    name, forms = told
                    yield (
                        name,
                        {k: self.receive(shape, dtype, stage, self.ranks) for k, (shape, dtype) in forms.items()},
                    )
        else:
            for name, tensors in own:
                if name not in shared:
                    self.send_object((name, {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}), 0)
                    for t in tensors.values():
                        dist.send(t.detach().to(self.device).contiguous(), group=self.ranks.group, group_dst=0)
                yield name, tensors
            self.send_object(None, 0)

    def sum_ends(self, x: Tensor) -> None:
        """In place, over the first and the last stage."""
        other = self.size - 1 if self.index == 0 else 0
        self.send(x.clone(), other, self.ranks if self.index == 0 else self.back)
        x += self.receive(tuple(x.shape), x.dtype, other, self.back if self.index == 0 else self.ranks)
