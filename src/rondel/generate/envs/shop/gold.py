"""Replies that deserve the best score: the agent asks for what it was not told, looks up, proposes,
acts and reports."""

from __future__ import annotations

from rondel.generate.calls import HERMES
from rondel.generate.envs.shop.database import ShopDatabase
from rondel.generate.envs.shop.line_calls import read_line_calls
from rondel.generate.envs.shop.scripted_user import ScriptedUser
from rondel.generate.envs.shop.speech import Speech
from rondel.generate.envs.shop.wishes import FACTS, UserGoal, Wish


def gold_replies(goal: UserGoal, shop: ShopDatabase, speech: Speech) -> list[str]:
    """What the agent writes, one reply after the other, with the scripted user on the other side."""
    asks = [] if goal.told else [speech.asks("identity")]
    replies = [*asks, speech.call(("find_user", {"who": goal.identity}))]
    for wish in goal.wishes:
        replies += _wish_replies(wish, goal, shop, speech)
    return replies


def gold_of_both(replies: list[str], user: ScriptedUser) -> list[str]:
    """The same with what the user says to each that is no call, in the order in which both are asked."""
    found = []
    for reply in replies:
        found.append(reply)
        if HERMES.opens not in reply and not read_line_calls(reply):
            said = user.answer(reply)
            found.append(f"{said.text} {user.speech.end}" if said.ends else said.text)
    return found


def _wish_replies(wish: Wish, goal: UserGoal, shop: ShopDatabase, speech: Speech) -> list[str]:
    if wish.outcome == "transferred":
        return [speech.call(("transfer_to_human", {"summary": f"a stamped invoice of {wish.order or 'an order'}"}))]
    refused = wish.outcome == "refused"
    needed = [name for name in FACTS[wish.kind] if name not in wish.told and (name == "order" or not refused)]
    replies = [speech.asks(name) for name in needed]
    replies += map(speech.call, goal.lookups(wish, shop))
    if refused:
        return [*replies, speech.refuses(wish)]
    if wish.outcome == "answered":
        return [*replies, speech.answers(wish)]
    return [*replies, speech.proposes(wish), speech.call(wish.write), speech.reports(wish)]
