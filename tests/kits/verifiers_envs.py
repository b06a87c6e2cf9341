"""Environments as users of the verifiers package write them; nothing in here knows of Rondel."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def rows(n: int = 20) -> Dataset:
    return Dataset.from_list([{"question": f"{i % 10}+{i // 10}=", "answer": str(i % 10 + i // 10)} for i in range(n)])


def said(completion) -> list[str]:
    return [str(m["content"] or "").strip() for m in completion if m["role"] == "assistant"] or [""]


async def right(completion, answer) -> float:
    return float(said(completion)[-1] == answer)


async def short(completion) -> float:
    return 1.0 / (1 + len(said(completion)[-1]))


def single(n: int = 20):
    return vf.SingleTurnEnv(dataset=rows(n), rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.5]))


async def breaks(completion) -> float:
    return 1 / 0


def broken():
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[right, breaks]))


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": " again "}]


def twice():
    return Twice(dataset=rows(), rubric=vf.Rubric(funcs=[right]), max_turns=2)


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


def tools():
    return vf.ToolEnv(dataset=rows(), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=3)
