"""One prompt, one answer, of a policy that fills in blocks of masks: its demonstrations are masked at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rondel.core.errors import DataError
from rondel.core.types import FLAGS, IDS, NUMBERS, Task, TokenColumn, Trajectory
from rondel.core.unmasking_steps import ABSENT, MASKED, SHOWN, UnmaskingSteps
from rondel.generate.envs.single_turn import Example, SingleTurn
from rondel.text.tokenization import SPLIT


class BlockTurn(SingleTurn):
    """`SingleTurn` for blocks of `block` tokens."""

    def __init__(
        self, block: int, *, suffix: str = "", system: str | None = None, examples: Sequence[Example] = ()
    ) -> None:
        super().__init__(suffix=suffix, system=system, examples=examples)
        self.block = block

    def demonstrate(self, task: Task, chat: Any, key: int) -> Trajectory:
        """The task's answer, its blocks masked by `key` alone (`mask_blocks`). Behind its end the last block is full of
        end tokens, which are learned like others: a block is drawn from as many masks, however short the text is.
        """
        if "answer" not in task.data:
            raise DataError(f"task {task.id} has no 'answer' to demonstrate; it has: {', '.join(task.data)}")
        chat.give(*self.prompt(task))
        chat.write(str(task.data["answer"]), split_special_tokens=task.data.get(SPLIT, True))
        t: Trajectory = chat.trajectory
        whole = -(-t.written // self.block) * self.block
        room = max(t.written, min(whole, chat.sampling.max_tokens))
        more = room - t.written if t.finish_reason == "stop" else 0
        return _with_steps(t, [t.tokens[-1]] * more, self.block, key)


def _with_steps(t: Trajectory, end: list[int], block: int, key: int) -> Trajectory:
    """The same with more end tokens, and its tokens masked."""
    n = len(end)
    tokens = t.tokens + TokenColumn(IDS, end)
    *read, said = t.conversation
    return replace(
        t,
        tokens=tokens,
        mask=t.mask + TokenColumn(FLAGS, [True]) * n,
        logprobs=t.logprobs + TokenColumn(NUMBERS, [0.0]) * n,
        versions=t.versions + t.versions[-1:] * n,
        steps=mask_blocks(np.asarray(tokens[len(t.tokens) - t.written :], np.int32), block, key),
        conversation=[*read, said._replace(end=len(tokens))],
    )


def mask_blocks(answer: np.ndarray, block: int, key: int) -> UnmaskingSteps:
    """Of K tokens each block with n of its L tokens masked: n is uniform from 1 to L, and each choice of n as likely.

    The sum of their weighted log-probabilities has the mean sum over all orders of a block of log p(its tokens one
    after the other, in this order), which bounds log p of the block from below (arXiv:2502.09992, eq. 14).
    """
    random = np.random.Generator(np.random.Philox(key=key % (1 << 128)))
    rows = np.full((len(answer), 1 + block), ABSENT, np.int32)
    rows[:, 0] = SHOWN
    for first in range(0, len(answer), block):
        own = answer[first : first + block].copy()
        n = int(random.integers(1, len(own) + 1))
        own[random.permutation(len(own))[:n]] = MASKED
        rows[first : first + block, 1 : 1 + len(own)] = own
    return UnmaskingSteps(rows)
