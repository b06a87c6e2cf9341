"""The user as a small state machine that knows its goal: it tells what it is asked for, says yes to what it wants and
no to what it does not want, and leaves when its wishes are settled or its patience is over. No model, no chance.

    wish ──question──> facts           ──refused──> accepts, or insists once and leaves
      │                                ──report───> next wish, or thanks and leaves
      └──proposal that fits──> yes     ──anything else──> the wish again, PATIENCE times
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rondel.generate.envs.shop.rules import DENIES, NUMBER
from rondel.generate.envs.shop.speech import VERB, Speech
from rondel.generate.envs.shop.wishes import FACTS, UserGoal, Wish

PATIENCE = 3  # messages that lead nowhere
CONFIRM = re.compile(r"\b(?:confirm|yes)\b", re.IGNORECASE)
DONE = re.compile(r"\b(?:done|has been|have been|is now|cancelled|changed|requested|completed)\b", re.IGNORECASE)
ORDER = re.compile(r"(?<!\w)\d{5}(?!\w)")
ASKS = {  # which fact a question is about
    "identity": r"\b(?:e-?mail|zip|postal code|customer number|your (?:full )?name|who)\b",
    "order": r"\b(?:order (?:number|id)|which order)\b|^order\?",
    "reason": r"\b(?:reason|why)\b",
    "items": r"\b(?:which|what) (?:item|product|article)s?\b|^items\?",
    "options": r"\b(?:which|what) (?:options?|colou?r|size|variant|version)s?\b|^options\?",
    "payment": r"\b(?:payment|refund|pay|paid)\b",
    "address": r"\b(?:which|what|new|whole) address\b|^address\?",
}


class UserReply(NamedTuple):
    """`ends`: the user leaves, and what it says last is not answered."""

    text: str
    ends: bool = False


class ScriptedUser:
    """`ScriptedUser(goal, PlainSpeech())`, for one episode; its first message is the opening of the task."""

    def __init__(self, goal: UserGoal, speech: Speech) -> None:
        self.goal, self.speech = goal, speech
        self.place = self.lost = 0
        self.agreed = self.insisted = False

    async def reply(self, text: str) -> UserReply:
        return self.answer(text)

    def answer(self, text: str) -> UserReply:
        """To a message of the agent."""
        wish = self.goal.wishes[self.place]
        asked = [name for name, about in ASKS.items() if re.search(about, text, re.IGNORECASE)] if "?" in text else []
        if self.agreed and DONE.search(text) and not CONFIRM.search(text):
            return self._next_wish()
        if "?" in text and (CONFIRM.search(text) or not asked) and ORDER.search(text):
            self.agreed = agrees(text, wish)
            return UserReply(self.speech.yes) if self.agreed else self._lost(self.speech.denial(wish))
        if facts := [name for name in asked if name == "identity" or name in FACTS[wish.kind]]:
            return UserReply(" ".join(self.speech.fact(name, self.goal, wish) for name in facts))
        if DENIES.search(text):
            return self._refused(wish)
        if wish.outcome == "answered" and wish.answer in NUMBER.findall(text):
            return self._next_wish()
        if DONE.search(text):
            return self._next_wish()
        return self._lost(self.speech.wish(wish))

    def _refused(self, wish: Wish) -> UserReply:
        if wish.outcome == "refused":
            return self._next_wish(self.speech.accepts)
        if self.insisted:
            return UserReply(self.speech.thanks, ends=True)
        self.insisted = True
        return UserReply(self.speech.insistence(wish))

    def _next_wish(self, first: str = "") -> UserReply:
        self.place += 1
        self.agreed = self.insisted = False
        if self.place == len(self.goal.wishes):
            return UserReply(f"{first} {self.speech.thanks}".strip(), ends=True)
        return UserReply(f"{first} {self.speech.wish(self.goal.wishes[self.place])}".strip())

    def _lost(self, text: str) -> UserReply:
        self.lost += 1
        return UserReply(self.speech.thanks, ends=True) if self.lost > PATIENCE else UserReply(text)


def agrees(text: str, wish: Wish) -> bool:
    """Whether a proposal is what the user wants: its order and no other, what is done with it, and the particulars."""
    lower = text.lower()
    names = (*wish.names, *wish.items)
    return (
        wish.kind in VERB
        and set(ORDER.findall(text)) - set(ORDER.findall(wish.address)) == {wish.order}
        and VERB[wish.kind] in lower
        and (not wish.items or any(name.lower() in lower for name in names))
        and all(option.lower() in lower for option in wish.options)
        and wish.address.lower() in lower
    )
