"""Tasks of the shop: a user with hidden wishes for each, drawn from the database.

level  1  one wish about an own order, all of it said in the first message
       2  one wish, some of which is said only when asked for; or one that is not to be granted
       3  items for other variants: the agent looks a product up
       4  two wishes, the second said when the first is settled
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rondel.generate.envs.shop.database import REASONS, RETURN_DAYS, TASKS, Row, ShopDatabase, money
from rondel.generate.envs.shop.generator import new_address
from rondel.generate.envs.shop.speech import PlainSpeech
from rondel.generate.envs.shop.wishes import FACTS, UserGoal, Wish, described

Draw = random.Random
Family = Callable[[Draw, ShopDatabase, str], Wish | None]
# how many tasks of each family: three of "cancel" for one of "invoice"
SHARES = {
    "cancel": 4, "late_cancel": 3, "address": 2, "payment": 2, "return": 3, "late_return": 2, "exchange": 3, "items": 3,
    "total": 2, "cheapest": 1, "stranger": 2, "invoice": 1, "two": 4,
}  # fmt: skip
LEVEL_1, LEVEL_3 = {"cancel", "late_cancel", "payment"}, {"exchange", "items"}


def make_tasks(shop: ShopDatabase, count: int, seed: int = 0) -> list[Row]:
    """Rows for task.data.kind = "shop_tasks": `count`, or fewer where the orders run out. No order has two tasks."""
    draw = random.Random(seed)
    orders = list(shop.orders)
    draw.shuffle(orders)
    left = {family: iter(orders) for family in SHARES}  # an order that did not fit a family is not tried for it again
    rows: dict[str, Row] = {}
    used: set[str] = set()
    for family in draw.choices(list(SHARES), list(SHARES.values()), k=count):
        made = (
            one
            for order in left[family]
            if order not in used and (one := _make_task(draw, shop, family, order, used)) and one["prompt"] not in rows
        )
        if (row := next(made, None)) is None:
            continue
        rows[row["prompt"]] = row
        used |= {wish["order"] for wish in row["goal"]["wishes"]}
    return list(rows.values())


def write_tasks(folder: Path, rows: list[Row]) -> None:
    with (folder / TASKS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _make_task(draw: Draw, shop: ShopDatabase, family: str, order: str, used: set[str]) -> Row | None:
    if family == "two":
        first = FAMILIES[draw.choice(["cancel", "return", "address"])](draw, shop, order)
        if first is None:
            return None
        user = shop.orders[order]["user"]
        others = [id for id in shop.users[user]["orders"] if id != order and id not in used]
        drawn = ((draw.choice(["cancel", "payment", "total"]), id) for id in others)
        second = next((wish for family, id in drawn if (wish := FAMILIES[family](draw, shop, id))), None)
        if second is None:
            return None
        return _row(draw, shop, family, 4, user, [first, replace(second, told=FACTS[second.kind])])
    wish = FAMILIES[family](draw, shop, order)
    if wish is None:
        return None
    user = shop.orders[order]["user"]
    if family == "stranger":
        user = draw.choice([id for id in shop.users if id != user])
    level = 3 if family in LEVEL_3 else 1 if family in LEVEL_1 and draw.random() < 0.75 else 2
    return _row(draw, shop, family, level, user, [wish])


def _row(draw: Draw, shop: ShopDatabase, family: str, level: int, user: str, wishes: list[Wish]) -> Row:
    one = shop.users[user]
    first = wishes[0]
    told = FACTS[first.kind] if level == 1 else tuple(name for name in FACTS[first.kind] if draw.random() < 0.5)
    wishes = [replace(first, told=told), *wishes[1:]]
    identity = draw.choice([one["email"], user, f"{one['name']}, {one['zip']}"])
    identity = user if level == 1 else identity
    facts = {one["email"], user, one["zip"], *one["name"].split(), *(p for w in wishes for p in _facts(w))}
    goal = UserGoal(
        user, one["name"], identity, tuple(wishes), told=level == 1 or draw.random() < 0.3, facts=tuple(sorted(facts))
    )
    prompt = PlainSpeech().opening(goal)
    items = len(shop.orders[first.order]["items"]) if first.order else 0
    return {"prompt": prompt, "answer": "", "family": family, "level": level, "items": items} | {
        "user": user,
        "goal": goal.row(),
    }


def _facts(wish: Wish) -> list[str]:
    return [one for one in (wish.order, wish.payment, wish.address, *wish.names) if one]


def _days_since(shop: ShopDatabase, day: str) -> int:
    return (date.fromisoformat(shop.today) - date.fromisoformat(day)).days


def _cancel(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    if shop.orders[order]["status"] != "pending":
        return None
    return Wish("cancel", "done", order, reason=draw.choice(REASONS))


def _late_cancel(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    if shop.orders[order]["status"] not in ("processing", "shipped", "delivered"):
        return None
    return Wish("cancel", "refused", order, reason=draw.choice(REASONS))


def _address(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    status = shop.orders[order]["status"]
    if status not in ("pending", "shipped"):
        return None
    return Wish("address", "done" if status == "pending" else "refused", order, address=new_address(draw)[0])


def _payment(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    row, total = shop.orders[order], sum(shop.orders[order]["items"].values())
    others = [id for id, left in _payments(shop, row) if id != row["payment"] and (left is None or left >= total)]
    return (
        Wish("payment", "done", order, payment=draw.choice(others)) if others and row["status"] == "pending" else None
    )


def _return(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    return _returned(draw, shop, order, late=False)


def _late_return(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    return _returned(draw, shop, order, late=True)


def _returned(draw: Draw, shop: ShopDatabase, order: str, *, late: bool) -> Wish | None:
    row = shop.orders[order]
    if row["status"] != "delivered" or (_days_since(shop, row["delivered"]) > RETURN_DAYS) is not late:
        return None
    items = tuple(sorted(draw.sample(list(row["items"]), draw.randrange(1, min(2, len(row["items"])) + 1))))
    refund = draw.choice([id for id, left in _payments(shop, row) if id == row["payment"] or left is not None])
    names = tuple(map(shop.item_name, items))
    return Wish("return", "refused" if late else "done", order, items=items, names=names, payment=refund)


def _exchange(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    row = shop.orders[order]
    if row["status"] != "delivered" or _days_since(shop, row["delivered"]) > RETURN_DAYS:
        return None
    return _swapped(draw, shop, order, "exchange")


def _items(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    return _swapped(draw, shop, order, "items") if shop.orders[order]["status"] == "pending" else None


def _swapped(draw: Draw, shop: ShopDatabase, order: str, kind: Any) -> Wish | None:
    row = shop.orders[order]
    item = draw.choice(list(row["items"]))
    variants = shop.products[shop.product_of[item]]["variants"]
    new = [id for id, one in variants.items() if one["stock"] and id != item]
    if not new:
        return None
    chosen = draw.choice(new)
    difference = variants[chosen]["price"] - row["items"][item]
    ways = [id for id, left in _payments(shop, row) if left is None or left >= difference]
    if not ways:
        return None
    options = described(shop, [chosen])
    return Wish(
        kind, "done", order, items=(item,), names=(shop.item_name(item),), options=options, new_items=(chosen,),
        payment=draw.choice(ways),
    )  # fmt: skip


def _total(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    return Wish("total", "answered", order, answer=money(sum(shop.orders[order]["items"].values())))


def _cheapest(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    item = draw.choice(list(shop.orders[order]["items"]))
    prices = [one["price"] for one in shop.products[shop.product_of[item]]["variants"].values() if one["stock"]]
    return Wish("cheapest", "answered", names=(shop.item_name(item),), answer=money(min(prices))) if prices else None


def _stranger(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    wish = _cancel(draw, shop, order)
    return wish and replace(wish, outcome="refused")


def _invoice(draw: Draw, shop: ShopDatabase, order: str) -> Wish | None:
    return Wish("invoice", "transferred", order)


def _payments(shop: ShopDatabase, row: Row) -> Iterator[tuple[str, int | None]]:
    yield from shop.users[row["user"]]["payments"].items()


FAMILIES: dict[str, Family] = {
    "cancel": _cancel,
    "late_cancel": _late_cancel,
    "address": _address,
    "payment": _payment,
    "return": _return,
    "late_return": _late_return,
    "exchange": _exchange,
    "items": _items,
    "total": _total,
    "cheapest": _cheapest,
    "stranger": _stranger,
    "invoice": _invoice,
}
