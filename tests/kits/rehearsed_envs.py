"""One environment that is fit to be trained in, and others with one fault each."""

from __future__ import annotations

import asyncio
import itertools
import time

from rondel.core.types import Score


class Good:
    """Asks twice at most."""

    turns = 2

    async def run(self, task, chat):
        for said in (task.data["prompt"], " again "):
            chat.give([{"role": "user", "content": said}])
            done = await chat.reply()
            if done.text.strip() == str(task.data["answer"]) or done.finish_reason == "length":
                break
        chat.trajectory.score = self.worth(done.text.strip(), str(task.data["answer"]))
        return chat.trajectory

    def worth(self, said, gold):
        return Score(float(said == gold))


class GoldFails(Good):
    """Wants a form that no gold answer has."""

    def worth(self, said, gold):
        return Score(float(said == f"<{gold}>"))


class GoldFallsShort(Good):
    """Names more than any answer gets."""

    maximum = 2.0


class WrongScores(Good):
    def worth(self, said, gold):
        return Score(float(said != ""))


class Raises(Good):
    def worth(self, said, gold):
        return Score(float(int(said) == int(gold)))


class Blocks(Good):
    seconds = itertools.cycle([1.0, *[0.0] * 59])  # of a wrong answer: that some do is enough to be found

    def worth(self, said, gold):
        time.sleep(0.0 if said == gold else next(self.seconds))
        return super().worth(said, gold)


class Grows(Good):
    """Writes what it has to say into the trajectory, as much as it likes."""

    async def run(self, task, chat):
        trajectory = await super().run(task, chat)
        trajectory.extend([7] * 200)
        return trajectory


class Chatters(Good):
    """Never hears that the conversation is full."""

    async def run(self, task, chat):
        while True:
            chat.give([{"role": "user", "content": task.data["prompt"]}])
            if (await chat.reply()).text == str(task.data["answer"]):
                chat.trajectory.score = Score(1.0)
                return chat.trajectory


class TakesTurns(Good):
    """One episode after the other."""

    lock = None

    async def run(self, task, chat):
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            return await super().run(task, chat)


class Masks(Good):
    """Trains what the world said."""

    async def run(self, task, chat):
        trajectory = await super().run(task, chat)
        trajectory.mask[0] = True
        return trajectory


class Infinite(Good):
    def worth(self, said, gold):
        return Score(float("inf") if said != gold else 1.0)


class Notes:
    """A tool of the episode."""

    def __init__(self, task):
        self.text = ""

    def note(self, text: str) -> str:
        """Keep a text."""
        self.text += text
        return self.text

    def close(self):
        self.text = ""


class Sticks(Notes):
    def close(self):
        raise OSError("it does not close")


async def twice(task, chat):
    """Two turns, whatever was said."""
    chat.give([{"role": "user", "content": task.data["prompt"]}])
    await chat.reply()
    chat.give([{"role": "user", "content": "Once more."}])
    await chat.reply()
    return chat.trajectory
