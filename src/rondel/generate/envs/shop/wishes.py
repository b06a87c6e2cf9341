"""What a user of the shop wants, and the calls that are right for it: the hidden goal of a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rondel.generate.envs.shop.database import ShopDatabase

Kind = Literal["cancel", "address", "payment", "return", "exchange", "items", "total", "cheapest", "invoice"]
Outcome = Literal["done", "refused", "answered", "transferred"]
Call = tuple[str, dict[str, Any]]
# what the agent has to know for each kind of wish; a user who has not told it is asked
FACTS: dict[str, tuple[str, ...]] = {
    "cancel": ("order", "reason"),
    "address": ("order", "address"),
    "payment": ("order", "payment"),
    "return": ("order", "items", "payment"),
    "exchange": ("order", "items", "options", "payment"),
    "items": ("order", "items", "options", "payment"),
    "total": ("order",),
    "cheapest": (),
    "invoice": ("order",),
}
WRITE = {
    "cancel": "cancel_order",
    "address": "change_address",
    "payment": "change_payment",
    "return": "return_items",
    "exchange": "exchange_items",
    "items": "change_items",
}


@dataclass(frozen=True)
class Wish:
    """`Wish("return", "done", order="51234", items=("481920",), names=("desk lamp Orla",), payment="gift_2071")`.

    told      the facts that the user says unasked
    names     of the products of `items`, or of the one that is asked about: users know no item numbers
    options   of the wanted variants, "blue, large"; `new_items` are their numbers
    answer    what the agent has to say
    """

    kind: Kind
    outcome: Outcome
    order: str = ""
    reason: str = ""
    items: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    new_items: tuple[str, ...] = ()
    payment: str = ""
    address: str = ""
    answer: str = ""
    told: tuple[str, ...] = ()

    @property
    def write(self) -> Call:
        """The call that grants it."""
        arguments: dict[str, Any] = {"order": self.order}
        match self.kind:
            case "cancel":
                arguments["reason"] = self.reason
            case "address":
                arguments["address"] = self.address
            case "payment":
                arguments["payment"] = self.payment
            case "return":
                arguments |= {"items": list(self.items), "refund_to": self.payment}
            case _:
                arguments |= {"items": list(self.items), "new_items": list(self.new_items), "payment": self.payment}
        return WRITE[self.kind], arguments


@dataclass(frozen=True)
class UserGoal:
    """Who the user is, and the wishes, one after the other.

    identity   what the user gives when asked: an email address, a customer number, or "name, zip"
    told       whether the user says so in the first message
    """

    user: str
    name: str
    identity: str
    wishes: tuple[Wish, ...]
    told: bool = False
    facts: tuple[str, ...] = field(default=())  # all that the user may say of itself and its wishes

    @classmethod
    def read(cls, given: dict[str, Any]) -> UserGoal:
        """Of a row of tasks, where everything is a list or a text."""
        wishes = tuple(Wish(**_as_tuples(wish)) for wish in given["wishes"])
        return cls(**{**given, "wishes": wishes, "facts": tuple(given["facts"])})

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def writes(self) -> list[Call]:
        """The calls behind which the database is as it should be."""
        calls = [wish.write for wish in self.wishes if wish.outcome == "done"]
        handed = any(wish.outcome == "transferred" for wish in self.wishes)
        return [*calls, ("transfer_to_human", {"summary": "what was asked is for a human"})] if handed else calls

    def lookups(self, wish: Wish, shop: ShopDatabase) -> list[Call]:
        """What the agent reads before it decides on a wish."""
        calls: list[Call] = []
        if wish.order and wish.order not in shop.users[self.user]["orders"]:
            calls.append(("get_user", {"customer": self.user}))
        elif wish.order and wish.outcome != "transferred":
            calls.append(("get_order", {"order": wish.order}))
        if wish.new_items or wish.kind == "cheapest":
            calls += [("get_product", {"product": item}) for item in wish.items or wish.names]
        return calls


def _as_tuples(wish: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in wish.items()}


def described(shop: ShopDatabase, items: Iterable[str]) -> tuple[str, ...]:
    """The options of items: ("blue, large",)."""
    variants = (shop.products[shop.product_of[item]]["variants"][item] for item in items)
    return tuple(", ".join(variant["options"].values()) for variant in variants)


def spoken(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
