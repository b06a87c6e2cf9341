"""Teachers behind a url: the driver asks them of every sample, before the trainer credits its tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rondel.core.config.job import Job
from rondel.core.config.model import TeacherConfig
from rondel.core.errors import ConfigError
from rondel.core.events import Warned, emit
from rondel.core.types import Sampling
from rondel.generate.engine.foreign import check_logprobs
from rondel.train.pack import TrainBatch, TrainSample

AT_ONCE = 64  # questions that one server has in hand
PLAIN = "The water in the river was cold, and the children went home before it was dark."


@dataclass
class RemoteTeachers:
    """Those of model.teacher that have a url, by their place in it.

    wants   whether the row of a source needs a teacher at all
    """

    servers: dict[int, tuple[TeacherConfig, Any]]
    wants: Callable[[str], bool]
    checked: bool = False
    plain: list[int] = field(default_factory=list)
    vocabulary: int = 2

    async def __call__(self, batch: TrainBatch) -> None:
        """The note `teacher.<place>` of every sample that is taught: log q of its trainable tokens, [m] float32."""
        if not self.checked:
            await asyncio.gather(
                *(self._check_vocabulary(teacher, server) for teacher, server in self.servers.values())
            )
            self.checked = True
        await asyncio.gather(
            *(self._query_teacher(place, teacher, server, batch) for place, (teacher, server) in self.servers.items())
        )

    async def _query_teacher(self, place: int, teacher: TeacherConfig, server: Any, batch: TrainBatch) -> None:
        free = asyncio.Semaphore(AT_ONCE)

        async def score_sample(sample: TrainSample) -> None:
            if sample.media and server.blind:
                raise ConfigError(
                    f"the teacher at {teacher.url} is sent no images, and {sample.group}/{sample.index} has some: "
                    f"{server.blind}. "
                    "Load it with a path"
                )
            async with free:
                told = await server.score(sample.tokens.tolist(), sample.media)
            at = sample.trainable.tolist()
            of = check_logprobs(f"the teacher at {teacher.url}", sample.tokens[at].tolist(), [told[i] for i in at])
            sample.known.teachers[place] = torch.tensor(of, dtype=torch.float32)

        mine = [s for s in batch.samples if teacher.source in (None, s.stream) and self.wants(s.stream)]
        await asyncio.gather(*map(score_sample, mine))

    async def _check_vocabulary(self, teacher: TeacherConfig, server: Any) -> None:
        """A teacher that reads other tokens under the same numbers finds plain text less likely than chance."""
        told = check_logprobs(f"the teacher at {teacher.url}", self.plain, await server.score(self.plain, ()))[1:]
        mean, chance = sum(told) / max(1, len(told)), -math.log(self.vocabulary)
        if mean < chance:
            emit(
                Warned(
                    f"the teacher at {teacher.url} finds a plain sentence less likely than chance ({mean:.1f} nats a "
                    f"token, chance is {chance:.1f}): "
                    "does it read the same tokens? It must have the policy's tokenizer"
                )
            )


def connect_teachers(
    job: Job, tokenizer: Any, kinds: dict[str, Any], wants: Callable[[str], bool], most: Callable[[], int]
) -> RemoteTeachers | None:
    """`kinds` of servers by name. Each is asked now whether it is there, and how long a text it reads."""
    servers: dict[int, tuple[TeacherConfig, Any]] = {}
    far = {place: teacher for place, teacher in enumerate(job.model.teachers) if teacher.url is not None}
    longest = most() if far else 0
    for place, teacher in far.items():
        server: Any = kinds[teacher.kind](teacher.url)
        if (room := server.open(Sampling())) <= longest:
            raise ConfigError(
                f"the longest prompt and its answer have {longest} tokens, and the teacher at {teacher.url} reads "
                f"{room - 1}: "
                "start it with a longer context, or lower engine.sampling.max_tokens"
            )
        servers[place] = teacher, server
    plain = tokenizer(PLAIN, add_special_tokens=False)["input_ids"][: max(2, longest)]
    return RemoteTeachers(servers, wants, plain=plain, vocabulary=len(tokenizer)) if servers else None
