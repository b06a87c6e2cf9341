"""A customer talks to the policy, which acts on orders: `env = "shop:Shop"`, `data = { kind =
"shop:wishes" }`. What counts is how the orders stand in the end. The customer is scripted, or a
model at the OpenAI-shaped address in $USER_URL.
"""

import os

from openai import AsyncOpenAI

from rondel.core.types import Score
from rondel.generate.envs.tools import Tool, Tools

ITEMS = ("lamp", "chair", "clock", "kettle")


def wishes(n=40):
    """The tasks: order n is to be cancelled, or changed to another item."""
    for i in range(n):
        wish = f"change order {i} to a {ITEMS[i // 2 % 4]}" if i % 2 else f"cancel order {i}"
        yield {
            "prompt": f"Hello! It is about order {i}.",
            "wish": wish,
            "answer": "",
            "order": i,
            "item": ITEMS[i // 2 % 4] if i % 2 else None,
        }


class Shop:
    turns = 6

    async def user(self, task, said, turn):
        if "USER_URL" not in os.environ:
            return f"Please {task.data['wish']}." if turn == 0 else "Thank you, that is all."
        role = f"You are a customer of a shop who wants to {task.data['wish']}. Answer the clerk in one sentence."
        messages = [{"role": "system", "content": role}, {"role": "user", "content": said or "?"}]
        async with AsyncOpenAI(
            base_url=os.environ["USER_URL"], api_key=os.environ.get("USER_KEY", "none"), timeout=60
        ) as client:
            reply = await client.chat.completions.create(model=os.environ.get("USER_MODEL", "user"), messages=messages)
        return reply.choices[0].message.content or ""

    async def run(self, task, chat):
        orders = {task.data["order"]: "table", task.data["order"] + 1: "bench"}

        def change(order: int, item: str) -> str:
            """Change an order to another item."""
            orders[order] = item
            return "changed"

        def cancel(order: int) -> str:
            """Cancel an order."""
            return "cancelled" if orders.pop(order, None) else "error: there is no such order"

        desk, spoken = Tools([change, cancel]), 0
        chat.give([{"role": "user", "content": task.data["prompt"]}], [Tool(change).schema, Tool(cancel).schema])
        for left in reversed(range(self.turns)):
            done = await chat.reply()
            calls = await chat.calls(done) if done.finish_reason == "stop" else []
            if not left or done.finish_reason == "length" or (not calls and spoken == 2):
                break
            if calls:
                chat.give([{"role": "tool", "name": c.name, "content": await desk.carry_out(c)} for c in calls])
            else:
                chat.give([{"role": "user", "content": await self.user(task, done.text, spoken)}])
                spoken += 1
        wanted = {task.data["order"]: task.data["item"], task.data["order"] + 1: "bench"}
        chat.trajectory.score = Score(float(orders == {order: item for order, item in wanted.items() if item}))
        return chat.trajectory
