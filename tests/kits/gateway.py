"""An episode behind the gateway: an agent of the test's, a policy of scripted
turns, and what must hold of every record.
"""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from typing import Any

from kits.chat import chat, tokenizer
from rondel.core.types import Completion, Task, Trajectory
from rondel.generate.envs.gateway.agent import function_agent
from rondel.generate.envs.gateway.env import Gateway

TASK = Task("t/1", "gateway", {"prompt": "what is three plus four?", "answer": "7"})
QWEN = (  # tools in the system message, calls as tagged JSON, results from the user
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content "
    "}}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "what is three plus four?"}]
AGAIN = {"role": "user", "content": "look again."}
ADD = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOL = {"type": "function", "function": ADD}


@lru_cache
def tok() -> Any:
    made = tokenizer.__wrapped__("chatml")
    made.chat_template = QWEN
    return made


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Policy:
    """Says a text for each request: the next of a list, or what a function makes of the
    request's text. Every token has its own logprob.
    """

    def __init__(self, *says: Any) -> None:
        self.says, self.requests, self.drawn = list(says), [], []

    async def generate(self, request: Any) -> Completion:
        t, n = tok(), len(self.requests)
        self.requests.append(request)
        await asyncio.sleep(0)
        said = self.says[0](t.decode(request.tokens)) if callable(self.says[0]) else self.says[n]
        if isinstance(said, Exception):
            raise said
        tokens = [*t.encode(said, add_special_tokens=False), t.eos_token_id][: request.sampling.max_tokens]
        finish = "stop" if tokens[-1] == t.eos_token_id else "length"
        text = t.decode(tokens, skip_special_tokens=True)
        for stop in request.sampling.stop:
            if stop in text:
                while stop in t.decode(tokens[:-1], skip_special_tokens=True):
                    tokens.pop()
                text, finish = text[: text.index(stop)], "stop"
        done = Completion(
            tokens,
            [-0.01 * (i + 1) - n for i in range(len(tokens))],
            [n] * len(tokens),
            finish,
            len(request.tokens),
            text=text,
        )
        self.drawn.append((request, done))
        return done


def play(agent: Any, policy: Policy, *, timeout: float = 60.0, task: Task = TASK, **how: Any) -> list[Trajectory]:
    """One episode. -> its trajectories, each of which was recorded as it was drawn."""
    gateway = Gateway(function_agent(agent), timeout=timeout)
    how = {"max_tokens": 200, "max_context": 8192, **how}
    found = asyncio.run(gateway.run(task, chat(tok(), policy, **how)))
    assert gateway.listening.port is None and not gateway.listening.sessions, "the port is closed with the last episode"
    found = found if isinstance(found, list) else [found]
    for trajectory in found:
        recorded(trajectory, policy)
    return found


def recorded(trajectory: Trajectory, policy: Policy) -> None:
    """Law 5: a run of the policy's tokens is one of its replies, to the letter, behind exactly
    the tokens it was given; all else is masked.
    """
    at, mask = 0, trajectory.mask
    assert len(trajectory.tokens) == len(mask) == len(trajectory.logprobs) == len(trajectory.versions)
    while at < len(mask):
        if not mask[at]:
            assert trajectory.versions[at] == -1 and trajectory.logprobs[at] == 0
            at += 1
            continue
        (done,) = (
            d
            for r, d in policy.drawn
            if r.tokens == trajectory.tokens[:at] and d.versions[0] == trajectory.versions[at]
        )
        end = at + len(done.tokens)
        assert trajectory.tokens[at:end] == done.tokens and mask[at:end] == [True] * len(done.tokens)
        assert trajectory.logprobs[at:end] == done.logprobs and trajectory.versions[at:end] == done.versions
        at = end
    assert mask[-1], "the last token is the policy's"


def runs(trajectory: Trajectory) -> int:
    """How many turns the policy wrote."""
    return sum(now and not before for before, now in zip([False, *trajectory.mask], trajectory.mask))


NOTED: list[list[tuple[int, int, int]]] = []  # of each episode, each turn: tokens asked with, found cached, written


async def three_turns(task: Task, base_url: str, api_key: str) -> float:
    """For runs with a real engine."""
    import openai

    NOTED.append([])
    mine, messages, right = NOTED[-1], [{"role": "user", "content": task.data["prompt"]}], 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            mine.append(
                (
                    reply.usage.prompt_tokens,
                    reply.usage.prompt_tokens_details.cached_tokens,
                    reply.usage.completion_tokens,
                )
            )
            said = reply.choices[0].message
            right += (said.content or "").strip() == str(task.data["answer"])
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": " again "}]
    return right / 3


async def compacting(task: Task, base_url: str, api_key: str) -> float:
    """Forgets what was said after its second turn, and asks a helper on the way: three branches an episode."""
    import openai

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(messages: list[Any]) -> list[Any]:
            reply = await client.chat.completions.create(model="policy", messages=messages)
            return [*messages, reply.choices[0].message.model_dump(exclude_none=True)]

        main = await ask([user(task.data["prompt"])])
        await ask([{"role": "system", "content": "help"}, user(task.data["prompt"])])
        await ask([*main, user(" one ")])
        last = await ask([*main, user(" two ")])
        return float((last[-1].get("content") or "").strip() == str(task.data["answer"]))
