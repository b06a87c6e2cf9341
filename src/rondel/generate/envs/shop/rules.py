"""The rules of the shop: what the agent reads of them, whether it kept them, and what its episode is worth."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rondel.core.types import Score
from rondel.generate.envs.shop.database import RETURN_DAYS, ShopDatabase, ShopSession
from rondel.generate.envs.shop.tools import WRITES, ShopTools
from rondel.generate.envs.shop.wishes import UserGoal

POLICY = f"""You serve the customers of an online shop.

- First find out who is asking, with find_user: by email address, by customer number, or by name and zip code. Use only
  what the customer says. Act for this customer alone, and read or change nobody else's orders.
- Before every change say what you are about to do, with the order number and the item numbers or the new address, and
  ask for a yes or no. Call the tool only after the customer has said yes.
- Pending orders can be cancelled (reason: mistake or unneeded), sent to another address, paid with another of the
  customer's payment methods, and their items changed to other variants of the same products, once. Orders that are
  being processed or were shipped cannot be changed.
- Items of delivered orders can be returned, or exchanged once for other variants of the same products, within
  {RETURN_DAYS} days of delivery; get_order shows the day of delivery and today. A return is refunded to the payment method
  of the order or to a gift card.
- A gift card pays for no more than its balance.
- If the rules forbid what is asked, say that you cannot do it. If the customer wants something that no tool does and no
  rule forbids, call transfer_to_human.
- Either call tools or write to the customer, not both in one message. Invent nothing."""

CONFIRMS = re.compile(r"^\W*yes\b", re.IGNORECASE)
DENIES = re.compile(
    r"^no\W*$|\b(?:cannot|can't|can’t|can not|could not|unable|not able|not possible|impossible|not allowed|do not allow)\b",
    re.IGNORECASE,
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MOST_NUMBERS = 12  # of one message that answers a question: more is a guess at everything


@dataclass
class Conduct:
    """What was said and done in one episode, as far as the rules ask for it.

    identified  the customer that find_user found with what the user had said
    confirmed   the agent's message to which the user's last one said yes
    broken      names of the rules that were broken: "stranger", "unconfirmed"
    """

    session: ShopSession
    identified: str = ""
    confirmed: str = ""
    broken: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)  # messages of the agent to the user
    agreed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # changes to which the user had said yes
    heard: str = ""  # all that the user said
    read: set[str] = field(default_factory=set)  # orders and customers that were looked up

    def agent_said(self, text: str) -> None:
        self.told.append(text)
        self.confirmed = ""

    def user_said(self, text: str) -> None:
        self.heard += f" {text.lower()}"
        self.confirmed = self.told[-1] if self.told and CONFIRMS.match(text) else ""

    def before_call(self, name: str, arguments: dict[str, Any]) -> set[str]:
        """The rules that this call breaks where it succeeds."""
        found = set()
        order = str(arguments.get("order", ""))
        owner = str(arguments["customer"]) if "customer" in arguments else None
        if order in self.session.database.orders:
            owner = self.session.database.orders[order]["user"]
        if owner is not None and owner != self.identified:
            found.add("stranger")
        if name in WRITES and not all(_is_named(one, self.confirmed) for one in _particulars(arguments)):
            found.add("unconfirmed")
        return found

    def after_call(self, name: str, arguments: dict[str, Any]) -> None:
        """Of one that succeeded."""
        if name in WRITES and self.confirmed:
            self.agreed.append((name, arguments))
        if name == "find_user":
            who = " ".join(str(arguments["who"]).lower().split())
            if all(_is_named(part, self.heard) for part in re.split(r"[,\s]+", who)):
                self.identified = self.session.database.users_by_key[who]
        self.read.add(str(arguments.get("order", "")))

    def misled(self, goal: UserGoal) -> bool:
        """Whether the user said yes to a change that it does not want."""
        return any(call not in goal.writes for call in self.agreed)


def grade(conduct: Conduct, goal: UserGoal) -> Score:
    """1 where the database is as the right calls leave it, what must be said was said, and no rule was broken; else 0.
    Parts: which of the three hold."""
    shop = conduct.session.database
    parts = {
        "database": float(conduct.session.changes() == goal_changes(shop, goal)),
        "said": float(all(_was_said(conduct, wish, goal) for wish in goal.wishes)),
        "rules": float(not conduct.broken),
    }
    return Score(float(all(parts.values())), parts)


def goal_changes(shop: ShopDatabase, goal: UserGoal) -> dict[str, Any]:
    """What the right calls change."""
    session = ShopSession(shop)
    tools = ShopTools(session)
    for name, arguments in goal.writes:
        getattr(tools, name)(**arguments)
    return session.changes()


def _was_said(conduct: Conduct, wish: Any, goal: UserGoal) -> bool:
    """An answer, or a refusal of what was looked up before."""
    if wish.outcome == "answered":
        numbers = [NUMBER.findall(text) for text in conduct.told]
        return any(wish.answer in found and len(found) <= MOST_NUMBERS for found in numbers)
    if wish.outcome == "refused":
        looked = conduct.identified == goal.user
        own = wish.order in conduct.session.database.users[goal.user]["orders"]
        return looked and (not own or wish.order in conduct.read) and any(map(DENIES.search, conduct.told))
    return True


def _particulars(arguments: dict[str, Any]) -> list[str]:
    """What the user has to have agreed to: order, items, new items, address."""
    found = [str(arguments.get("order", ""))]
    for name in ("items", "new_items"):
        found += map(str, arguments.get(name, ()))
    return [*found, *([arguments["address"]] if "address" in arguments else [])]


def _is_named(what: str, text: str) -> bool:
    """Whether a text has these words: "51234" is not in "151234"."""
    return (
        re.search(rf"(?<!\w){re.escape(' '.join(what.lower().split()))}(?!\w)", " ".join(text.lower().split()))
        is not None
    )
