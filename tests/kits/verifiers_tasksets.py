"""A taskset as users of verifiers 0.4 write them, and a harness that plays it in this
process; nothing in here knows of Rondel.
"""

from __future__ import annotations

from collections.abc import Iterable

import openai
import verifiers.v1 as vf

__all__ = ["Sums", "Talker"]


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    def _said(self, trace: vf.Trace) -> str:
        said = [m for m in trace.branches[-1].messages if m.role == "assistant"]
        return str(said[-1].content or "").strip() if said else ""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self._said(trace) == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        if self.data.answer == "9":
            raise ZeroDivisionError("a rubric that breaks")
        return 1.0 / (1 + len(self._said(trace)))


class SumsConfig(vf.TasksetConfig):
    n: int = 20


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterable[SumTask]:
        for i in range(self.config.n):
            yield SumTask(SumData(prompt=f"{i % 10}+{i // 10}=", answer=str(i % 10 + i // 10)), self.config.task)


class TalkerConfig(vf.HarnessConfig):
    turns: int = 1


class Talker(vf.Harness[TalkerConfig]):
    """Asks, and asks again."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(self.config.turns):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [
                    {"role": "assistant", "content": reply.choices[0].message.content},
                    {"role": "user", "content": " again "},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
