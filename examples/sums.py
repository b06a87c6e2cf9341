"""Sums that a small model cannot do in its head, each behind three conversations in which a calculator was asked.

`data = { kind = "sums:sums" }` with `env = "tools"`, `tools = ["calculator"]`. A model that has
never called a tool follows the examples now and then, which is enough for reinforcement to begin.
"""

import json
import random

SHOTS = {"215 + 437": "652", "38 * 52": "1976", "904 - 356": "548"}


def conversation(question):
    for expression, result in SHOTS.items():
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        yield "user", f"What is {expression}?"
        yield "assistant", f"<tool_call>\n{call}\n</tool_call>"
        yield "user", f"<tool_response>\n{result}\n</tool_response>"
        yield "assistant", f"The answer is {result}."
    yield "user", f"What is {question}?"


def sums(n=200, seed=0):
    """The tasks, as rows."""
    draw = random.Random(seed)
    for _ in range(n):
        a, sign, b = draw.randint(100, 999), draw.choice("+-*"), draw.randint(11, 99)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        yield {
            "messages": [{"role": r, "content": c} for r, c in conversation(f"{a} {sign} {b}")],
            "answer": str(result),
        }
