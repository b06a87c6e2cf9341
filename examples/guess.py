"""A game of several turns that scores itself: `env = "guess:Guess"`. Three guesses for a number from 1 to 7, each answered by more or less."""

from rondel.words.types import Score


class Guess:
    turns = 3

    async def run(self, task, chat):
        said, secret = "guess ", int(task.data["answer"])
        for _ in range(self.turns):
            chat.give([{"role": "user", "content": said}])
            guess = (await chat.reply()).text.strip()
            if guess == str(secret):
                chat.trajectory.score = Score(1.0)
                break
            said = " no " if guess not in "1234567" or not guess else " more " if int(guess) < secret else " less "
        else:
            chat.trajectory.score = Score(0.0)
        return chat.trajectory
