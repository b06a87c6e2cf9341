"""The database of the shop: products with variants, users with payment methods, orders. One file, read once.

    shop.json  {"today": "2026-06-30", "products": {id: {...}}, "users": {id: {...}}, "orders": {id: {...}}}

An episode works on a `ShopSession`: rows that it writes are its own copies, so a thousand episodes share one database.
Money is in cents.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError, DataError, error_boundary

Row = dict[str, Any]
FILE, TASKS = "shop.json", "tasks.jsonl"
REASONS = ("mistake", "unneeded")  # why an order may be cancelled
RETURN_DAYS = 30


@dataclass(frozen=True)
class ShopDatabase:
    """products  {id: {"name", "variants": {item: {"options": {name: value}, "price", "stock"}}}}
    users     {id: {"name", "email", "zip", "address", "payments": {id: balance of a gift card, or None}, "orders"}}
    orders    {id: {"user", "status", "placed", "delivered", "items": {item: price}, "payment", "address", "changes"}}
    """

    today: str
    products: dict[str, Row]
    users: dict[str, Row]
    orders: dict[str, Row]

    @cached_property
    def product_of(self) -> dict[str, str]:
        """{item: product}"""
        return {item: id for id, product in self.products.items() for item in product["variants"]}

    @cached_property
    def users_by_key(self) -> dict[str, str]:
        """{what identifies a user, in lower case: id}: email address, customer number, "name, zip"."""
        keys: dict[str, str] = {}
        for id, user in self.users.items():
            keys |= {id: id, user["email"].lower(): id, f"{user['name']}, {user['zip']}".lower(): id}
        return keys

    def item_name(self, item: str) -> str:
        """The name of its product."""
        return str(self.products[self.product_of[item]]["name"])

    @cached_property
    def digest(self) -> str:
        tables = [self.today, self.products, self.users, self.orders]
        return blake2b(json.dumps(tables, sort_keys=True).encode(), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        tables = {"today": self.today, "products": self.products, "users": self.users, "orders": self.orders}
        (folder / FILE).write_text(json.dumps(tables, separators=(",", ":")), encoding="utf-8")


@lru_cache(4)
def open_database(folder: Path) -> ShopDatabase:
    """The database that `rondel tasks shop` wrote."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(
            f"task.env.path = '{folder}' holds no {FILE}: write one with `rondel tasks shop --out {folder}`"
        )
    with error_boundary(DataError, f"reading {path}"):
        return ShopDatabase(**json.loads(path.read_text(encoding="utf-8")))


@dataclass
class ShopSession:
    """What one episode sees of the database, and what it changed."""

    database: ShopDatabase
    transferred: bool = False
    _orders: dict[str, Row] = field(default_factory=dict)
    _users: dict[str, Row] = field(default_factory=dict)

    def order(self, id: str) -> Row:
        return self._orders.get(id) or self._find(self.database.orders, id, "order")

    def user(self, id: str) -> Row:
        return self._users.get(id) or self._find(self.database.users, id, "customer")

    def product(self, id: str) -> Row:
        return self._find(self.database.products, id, "product")

    def own_order(self, id: str) -> Row:
        """The order, to be written to."""
        return self._orders.setdefault(id, copy.deepcopy(self.order(id)))

    def own_user(self, id: str) -> Row:
        return self._users.setdefault(id, copy.deepcopy(self.user(id)))

    def changes(self) -> dict[str, Any]:
        """The rows that differ from the database: two sessions left the same database where these are equal."""
        orders = {id: row for id, row in self._orders.items() if row != self.database.orders[id]}
        users = {id: row for id, row in self._users.items() if row != self.database.users[id]}
        return {"orders": orders, "users": users, "transferred": self.transferred}

    @staticmethod
    def _find(table: dict[str, Row], id: str, what: str) -> Row:
        if id not in table:
            raise ValueError(f"there is no {what} {id[:40]}")
        return table[id]


def money(cents: int) -> str:
    """4990 -> "49.90"."""
    return f"{cents / 100:.2f}"
