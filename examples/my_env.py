"""An environment of your own, in two turns: `env = { kind = "my_env:SecondThought", hint = "Look again." }`. The settings
beside `kind` are the arguments of its class.

An environment is an async function of a task and a chat. `give` hands over messages,
`reply` lets the policy write; the chat keeps the tokens, so there is nothing to mask and nothing to tokenise here.
"""


class SecondThought:
    """Asks, says "right" or "look again", and lets the policy answer once more."""

    def __init__(self, hint="Look again."):
        self.hint = hint

    async def run(self, task, chat):
        chat.give([{"role": "user", "content": task.data["prompt"]}])
        first = await chat.reply()
        if first.finish_reason == "stop" and str(task.data["answer"]) not in chat.trajectory.text:
            chat.give([{"role": "user", "content": self.hint}])
            await chat.reply()
        return chat.trajectory
