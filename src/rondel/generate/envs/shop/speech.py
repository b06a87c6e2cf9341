"""The words of the scripted user, and those in which gold replies are written.

`PlainSpeech` is English sentences; `ShortSpeech` says the least, for models that read letters and no language.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Protocol

from rondel.generate.calls import HERMES
from rondel.generate.envs.shop.database import ShopDatabase
from rondel.generate.envs.shop.wishes import FACTS, Call, UserGoal, Wish, spoken

BRIEF = """You play a customer of an online shop who wants the following, one after the other.
{who}
{wishes}

- Write one short message at a time, as the customer would. Say what you are asked for, and not everything at once.
- Say nothing that is not written here. If you are asked for something else, say that you do not know.
- If the shop asks whether it should do exactly what you want, begin your answer with Yes. If it is something else, begin
  with No and say what you want.
- If the shop says that something is not possible, go on to the next wish.
- When all wishes are settled, write {end} and nothing else."""
REASON_TEXT = {"mistake": "I ordered it by mistake.", "unneeded": "I do not need it any more."}
VERB = {
    "cancel": "cancel", "address": "change", "payment": "change", "return": "return", "exchange": "exchange",
    "items": "change",
}  # fmt: skip


class Speech(Protocol):
    yes: str
    accepts: str
    thanks: str
    end: str  # in what a model writes as the user: it leaves

    def brief(self, goal: UserGoal) -> str: ...  # what a model that plays the user has to know
    def opening(self, goal: UserGoal) -> str: ...  # the first message of the user
    def wish(self, wish: Wish) -> str: ...  # with the facts in wish.told
    def fact(self, name: str, goal: UserGoal, wish: Wish) -> str: ...  # where the agent asks for it
    def denial(self, wish: Wish) -> str: ...  # what was proposed is not what is wanted
    def insistence(self, wish: Wish) -> str: ...

    # of the agent
    def asks(self, name: str) -> str: ...
    def proposes(self, wish: Wish) -> str: ...
    def reports(self, wish: Wish) -> str: ...
    def refuses(self, wish: Wish) -> str: ...
    def answers(self, wish: Wish) -> str: ...
    def call(self, call: Call) -> str: ...
    def result(self, name: str, result: Any, shop: ShopDatabase) -> str: ...  # what the agent reads of a call


class PlainSpeech:
    """Sentences; calls as the most common chat templates write them, results as JSON."""

    yes, accepts, thanks = "Yes, please do.", "I see. All right.", "Thank you, that is all."
    end = "[END]"

    def brief(self, goal: UserGoal) -> str:
        wishes = [self.wish(replace(wish, told=FACTS[wish.kind])) for wish in goal.wishes]
        lines = "\n".join(f"{number}. {text}" for number, text in enumerate(wishes, 1))
        return BRIEF.format(who=f"You are {goal.name}. Your details: {goal.identity}.", wishes=lines, end=self.end) + (
            f"\nYou began with: {self.opening(goal)}\n\nThe shop answers:"
        )

    def opening(self, goal: UserGoal) -> str:
        who = f" My details are: {goal.identity}." if goal.told else ""
        return f"Hello, this is {goal.name}.{who} {self.wish(goal.wishes[0])}"

    def wish(self, wish: Wish) -> str:
        order = f"order {wish.order}" if "order" in wish.told else "an order of mine"
        things = f"the {spoken(wish.names)}" if "items" in wish.told else "something"
        match wish.kind:
            case "cancel":
                said = f"I want to cancel {order}."
            case "address":
                said = f"{order.capitalize()} should go to another address."
            case "payment":
                said = f"I want to pay {order} in another way."
            case "return":
                said = f"I want to return {things} from {order}."
            case "exchange":
                said = f"I want to exchange {things} from {order} for another variant."
            case "items":
                said = f"I want another variant of {things} in {order}, which has not been sent yet."
            case "total":
                said = f"What did {order} cost in total?"
            case "cheapest":
                said = f"What is the lowest price at which the {wish.names[0]} is in stock?"
            case _:
                said = f"Please post me a printed and stamped invoice of {order}."
        more = [self._fact(name, wish) for name in wish.told if name not in ("order", "items")]
        return " ".join([said, *more])

    def fact(self, name: str, goal: UserGoal, wish: Wish) -> str:
        return f"My details are: {goal.identity}." if name == "identity" else self._fact(name, wish)

    def _fact(self, name: str, wish: Wish) -> str:
        return {
            "order": f"It is order {wish.order}.",
            "reason": REASON_TEXT.get(wish.reason, ""),
            "items": f"It is the {spoken(wish.names)}." if wish.names else "",
            "options": f"I want it as: {spoken(wish.options)}." if wish.options else "",
            "payment": f"Use {wish.payment} for the money.",
            "address": f"The address is {wish.address}.",
        }[name]

    def denial(self, wish: Wish) -> str:
        return f"No, that is not what I want. {self.wish(wish)}"

    def insistence(self, wish: Wish) -> str:
        return f"I am sure that it is possible. {self.wish(wish)}"

    def asks(self, name: str) -> str:
        return {
            "identity": "May I have your email address, your customer number, or your name with your zip code?",
            "order": "What is the order number?",
            "reason": "For what reason do you want to cancel it?",
            "items": "Which items is it about?",
            "options": "Which options should the new variant have?",
            "payment": "Which payment method should I use?",
            "address": "To which address should it go?",
        }[name]

    def proposes(self, wish: Wish) -> str:
        items = spoken([f"{name} ({item})" for name, item in zip(wish.names, wish.items)]) if wish.items else ""
        new = spoken([f"{item} ({text})" for item, text in zip(wish.new_items, wish.options)]) if wish.new_items else ""
        match wish.kind:
            case "cancel":
                said = f"I will cancel order {wish.order} (reason: {wish.reason}) and refund it."
            case "address":
                said = f"I will change the address of order {wish.order} to {wish.address}."
            case "payment":
                said = f"I will change the payment of order {wish.order} to {wish.payment}."
            case "return":
                said = f"I will return the {items} of order {wish.order} and refund to {wish.payment}."
            case "exchange":
                said = f"I will exchange the {items} of order {wish.order} for {new}, with {wish.payment}."
            case _:
                said = f"I will change the {items} of order {wish.order} to {new}, with {wish.payment}."
        return f"{said} Do you confirm (yes or no)?"

    def reports(self, wish: Wish) -> str:
        return f"That is done for order {wish.order}. What else can I do for you?"

    def refuses(self, wish: Wish) -> str:
        return f"I am sorry, I cannot do that for order {wish.order}: our rules do not allow it."

    def answers(self, wish: Wish) -> str:
        return f"It is {wish.answer}."

    def call(self, call: Call) -> str:
        name, arguments = call
        return f"{HERMES.opens}{json.dumps({'name': name, 'arguments': arguments})}{HERMES.closes}"

    def result(self, name: str, result: Any, shop: ShopDatabase) -> str:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


class ShortSpeech:
    """Few letters: `u0417 cancel 51234 mistake`, `cancel 51234 mistake?`, `yes`; calls are lines (line_calls.py)."""

    yes, accepts, thanks = "yes", "ok", "bye"
    end = "bye"

    def brief(self, goal: UserGoal) -> str:
        return " ".join([goal.identity, *(self.wish(replace(wish, told=FACTS[wish.kind])) for wish in goal.wishes)])

    def opening(self, goal: UserGoal) -> str:
        return " ".join([*([goal.identity] if goal.told else []), self.wish(goal.wishes[0])])

    def wish(self, wish: Wish) -> str:
        facts = [self._fact(name, wish) for name in FACTS_IN_ORDER if name in wish.told]
        about = list(wish.names) if wish.kind == "cheapest" else []  # it is about no order
        return " ".join([wish.kind, *about, *facts])

    def fact(self, name: str, goal: UserGoal, wish: Wish) -> str:
        return goal.identity if name == "identity" else self._fact(name, wish)

    def _fact(self, name: str, wish: Wish) -> str:
        value = getattr(wish, name)
        return value if isinstance(value, str) else "; ".join(value)

    def denial(self, wish: Wish) -> str:
        return f"no {self.wish(wish)}"

    insistence = denial

    def asks(self, name: str) -> str:
        return {"identity": "who?", "options": "options?"}.get(name, f"{name}?")

    def proposes(self, wish: Wish) -> str:
        pairs = [f"{a}={b} {text}" for a, b, text in zip(wish.items, wish.new_items, wish.options)] or list(wish.items)
        rest = [one for one in (wish.reason, *pairs, wish.payment, wish.address) if one]
        return f"{' '.join([VERB[wish.kind], wish.order, *rest])}?"

    def reports(self, wish: Wish) -> str:
        return "done"

    def refuses(self, wish: Wish) -> str:
        return "no"

    def answers(self, wish: Wish) -> str:
        return wish.answer

    def call(self, call: Call) -> str:
        name, arguments = call
        if "new_items" in arguments:
            pairs = [f"{a}={b}" for a, b in zip(arguments["items"], arguments["new_items"])]
            words = [arguments["order"], *pairs, arguments["payment"]]
        else:
            words = [" ".join(value) if isinstance(value, list) else str(value) for value in arguments.values()]
        return f"{LINE_NAMES[name]}: {' '.join(words)}"

    def result(self, name: str, result: Any, shop: ShopDatabase) -> str:
        if isinstance(result, str):
            return result
        if isinstance(result, list):
            return "\n".join(result)
        if name == "find_user":
            return str(result["customer"])
        if name == "get_user":
            return " ".join([*result["orders"], *result["payments"]])
        if name == "get_order":
            when = [result["delivered"]] if result["delivered"] else []
            return "\n".join(
                [" ".join([result["status"], *when]), *result["items"], f"{result['payment']} {result['total']}"]
            )
        if name == "get_product":
            return "\n".join(" ".join(map(str, [item, *one.values()])) for item, one in result["variants"].items())
        return json.dumps(result)


FACTS_IN_ORDER = ("order", "reason", "items", "options", "payment", "address")
LINE_NAMES = {
    "find_user": "find",
    "get_user": "user",
    "get_order": "order",
    "get_product": "product",
    "search_products": "search",
    "cancel_order": "cancel",
    "change_address": "address",
    "change_payment": "payment",
    "change_items": "items",
    "return_items": "return",
    "exchange_items": "exchange",
    "transfer_to_human": "transfer",
}
