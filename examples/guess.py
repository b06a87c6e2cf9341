"""A game of several turns that scores itself: three guesses for a number from 1 to
7, each answered by more, less or no.

`env = "guess:Guess"`, with tasks of its own: `data = { kind = "guess:numbers" }`.
Whoever halves what is left always wins.
"""

from rondel.core.types import Score


def numbers(n=70):
    """The tasks, as rows."""
    return ({"prompt": f"game {i}", "answer": 1 + i % 7} for i in range(n))


class Guess:
    turns = 3

    async def run(self, task, chat):
        said, secret = "guess ", str(task.data["answer"])
        for _ in range(self.turns):
            chat.give([{"role": "user", "content": said}])
            guess = (await chat.reply()).text.strip()
            if guess == secret:
                break
            said = (" more " if guess < secret else " less ") if guess.isdigit() else " no "
        chat.trajectory.score = Score(float(guess == secret))
        return chat.trajectory
