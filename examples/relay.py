"""Two agents who must agree: `env = "relay:Relay"`. The speaker sees a number and sends its
letter; the listener sees that letter alone and says the number. Each is half of what the episode earns.
recipes/relay.toml gives the listener weights of its own.

Who speaks is named before it does, so that the weights that play it write:
`chat.trajectory.agent = ...`, `chat.beside("listener")`.
"""

from rondel.core.types import Score

LETTERS = "ab"


class Relay:
    """`agents`, if an environment has it, lets a recipe that names another be refused before anything is loaded."""

    agents = ("speaker", "listener")

    async def run(self, task, chat):
        chat.trajectory.agent = "speaker"
        chat.give([{"role": "user", "content": f"say {task.data['prompt']} "}])
        sent = (await chat.reply()).text
        listener = chat.beside("listener")
        listener.give([{"role": "user", "content": f"hear {sent} "}])
        said = (await listener.reply()).text
        right = {
            "speaker": sent.strip() == LETTERS[int(task.data["prompt"]) - 1],
            "listener": said.strip() == task.data["answer"],
        }
        chat.trajectory.score = Score(sum(right.values()) / 2, {agent: float(ok) / 2 for agent, ok in right.items()})
        return [chat.trajectory, listener.trajectory]  # the listener shares the score of the first


def numbers():
    return ({"prompt": str(n + 1), "answer": str(n + 1)} for n in range(len(LETTERS)))
