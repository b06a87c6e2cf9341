"""Frozen models that say of every token how likely it was: one for all, one for each
source, or several whose opinions are weighed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from rondel.core.errors import TrainError
from rondel.system.process_memory import release_freed_memory
from rondel.train.pack import PackedBatch, TrainBatch, TrainSample
from rondel.train.teacher_distributions import TeacherDistribution, TeacherOpinion

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class Teacher:
    """loaded   None: it is served elsewhere, and the batch brings what it said, or it is the policy, or it is read
    read     reads its weights from its files, for its own pass only; None: it lies in memory, or elsewhere
    weight   among those that teach the same sample
    source   whose tasks it knows; None: all
    is_policy    it is the policy itself, by the weights that begin the step
    """

    loaded: LoadedModel | None
    weight: float = 1.0
    source: str | None = None
    is_policy: bool = False
    read: Callable[[], LoadedModel] | None = None

    def applies_to(self, stream: str) -> bool:
        return self.source in (None, stream)

    def over_ranks(self, shard: Callable[[LoadedModel], LoadedModel]) -> Teacher:
        """The same, of which each rank holds what `shard` leaves it; one that is read is tried at once."""
        if self.loaded is not None:
            return replace(self, loaded=shard(self.loaded))
        if (read := self.read) is None:
            return self

        def read_part() -> LoadedModel:
            return shard(read())

        read_part()
        return replace(self, read=read_part)


class TeacherEnsemble(Sequence[Teacher]):
    """log q = sum_i w_i·log q_i / sum_i w_i, of those that teach the sample.  [m].

    Sampled tokens are charged with log pi - log q, whose expectation is sum_i w_i·KL(pi ||
    q_i) / sum_i w_i: distilling from several is one number a token, and the weights say how
    much each is heard. (arXiv:2306.08543 for one.)
    """

    def __init__(self, teachers: Sequence[Teacher], *, keeps_heads: bool = False) -> None:
        """`keeps_heads`: of teachers that are read for their own pass, for whole distributions."""
        self._teachers = tuple(teachers)
        self._keeps_heads = keeps_heads
        self._heads: dict[int, LMHead] = {}

    def __len__(self) -> int:
        return len(self._teachers)

    def __getitem__(self, number: Any) -> Any:
        return self._teachers[number]

    def query_teachers(self, batch: TrainBatch, question: Callable[[LoadedModel, TrainBatch, int], None]) -> None:
        """One teacher at a time, each about all its samples: never more than one beside the policy."""
        for number, teacher in enumerate(self):
            own = TrainBatch([s.as_read_by(number) for s in batch.samples if teacher.applies_to(s.stream)])
            if not own.samples:
                continue
            if teacher.loaded is not None:
                question(teacher.loaded, own, number)
            elif teacher.read is not None:
                self._query_read(teacher.read, own, number, question)

    def _query_read(
        self,
        read: Callable[[], LoadedModel],
        own: TrainBatch,
        number: int,
        question: Callable[[LoadedModel, TrainBatch, int], None],
    ) -> None:
        """The same of a teacher whose weights go again before the next one is read."""
        loaded = read()
        question(loaded, own, number)
        if self._keeps_heads:
            self._heads[number] = loaded.head
        del loaded
        gc.collect()  # its modules and what is hooked into them name each other
        release_freed_memory()

    def combine_teachers(self, batch: TrainBatch) -> None:
        """The field "teacher" of every sample's tokens, out of those of each teacher."""
        for i, sample in enumerate(batch.samples):
            shares = self._teacher_weights(sample)
            if not shares or not shares.keys() <= sample.known.teachers.keys():
                raise TrainError(
                    f"no teacher of '{sample.stream}' has spoken of {batch.sample_name(i)}; model.teacher needs one "
                    "for this source, or for all"
                )
            opinions = torch.stack([sample.known.teachers[number].double() for number in shares])
            weights = torch.tensor(list(shares.values()), dtype=torch.float64)
            sample.known.teacher = (opinions * weights[:, None]).sum(0).div(weights.sum()).float()

    def teacher_distribution(self, batch: TrainBatch, packed: PackedBatch, temperature: float) -> TeacherDistribution:
        """What those who were asked for their hidden states think of the tokens of a micro-batch."""
        samples, device = [batch.samples[i] for i in packed.samples], packed.tokens.device
        lengths = [len(s.trainable) for s in samples]
        first = list(accumulate(lengths, initial=0))
        opinions = []
        for number, teacher in enumerate(self):
            mine = [i for i, s in enumerate(samples) if number in s.hidden]
            if not mine:
                continue
            head = teacher.loaded.head if teacher.loaded is not None else self._heads[number]
            hidden = torch.cat([samples[i].hidden[number] for i in mine]).to(device)
            at = torch.cat([torch.arange(first[i], first[i + 1]) for i in mine]).to(device)
            weight = torch.cat([torch.full((lengths[i],), self._teacher_weights(samples[i])[number]) for i in mine]).to(
                device
            )
            opinions.append(TeacherOpinion(head, hidden, at, weight))
        return TeacherDistribution(opinions, temperature)

    def _teacher_weights(self, sample: TrainSample) -> dict[int, float]:
        """How much each teacher of a sample counts, by its place."""
        mine = {number: t.weight for number, t in enumerate(self) if t.applies_to(sample.stream)}
        return {number: weight / sum(mine.values()) for number, weight in mine.items()}
