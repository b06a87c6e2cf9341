"""The tasks, and how one of them is played. recipe.toml names both: `kind = "environment:sums"`, `kind =
"environment:SecondTry"`.

An environment is an async function of a task and a chat. `give` hands over messages, `reply` lets the policy write.
The chat keeps the tokens, so there is nothing to mask and nothing to tokenize here.
"""


def sums(largest=9, form="{a}+{b}="):
    """The tasks, as rows. A row has a prompt and an answer, and any other field that your reward reads."""
    for a in range(largest + 1):
        for b in range(largest + 1):
            yield {"prompt": form.format(a=a, b=b), "answer": str(a + b)}


class SecondTry:
    """Asks, and asks once more if the answer was wrong. The settings beside `kind` are its arguments."""

    def __init__(self, suffix="", hint="no "):
        self.suffix, self.hint = suffix, hint

    async def run(self, task, chat):
        chat.give([{"role": "user", "content": task.data["prompt"] + self.suffix}])
        first = await chat.reply()
        if first.finish_reason == "stop" and task.data["answer"] not in first.text.split():
            chat.give([{"role": "user", "content": self.hint + task.data["prompt"] + self.suffix}])
            await chat.reply()
        return chat.trajectory
