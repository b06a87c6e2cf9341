"""What the agent of the shop may call. Mistakes raise ValueError, which the agent reads.

Tools refuse what makes no sense (an order that does not exist, a gift card that does not cover a price). The rules of
the shop (rules.py) are the agent's to keep: who is asking, what was confirmed, how long ago something was delivered.
"""

from __future__ import annotations

from rondel.generate.envs.shop.database import REASONS, Row, ShopSession, money

WRITES = {
    "cancel_order", "change_address", "change_payment", "change_items", "return_items", "exchange_items",
}  # fmt: skip
MOST_FOUND = 10


class ShopTools:
    """`ShopTools(session)`: its public methods are what the agent calls."""

    def __init__(self, session: ShopSession) -> None:
        self._session = session

    def find_user(self, who: str) -> Row:
        """The customer with an email address, a customer number, or "first and last name, zip"; and their orders."""
        id = self._session.database.users_by_key.get(" ".join(who.lower().split()))
        if id is None:
            raise ValueError("there is no such customer; name and zip are written as: Ana Keller, 20457")
        return {"customer": id, "name": self._session.user(id)["name"], "orders": self._session.user(id)["orders"]}

    def get_user(self, customer: str) -> Row:
        """Name, address, payment methods and orders of a customer, by customer number."""
        user = self._session.user(customer)
        shown = {id: "ok" if left is None else f"balance {money(left)}" for id, left in user["payments"].items()}
        return {"customer": customer, "name": user["name"], "address": user["address"]} | {
            "payments": shown,
            "orders": user["orders"],
        }

    def get_order(self, order: str) -> Row:
        """Status, customer, items with prices, total, payment, address and dates of an order."""
        row, shop = self._session.order(order), self._session.database
        items = {id: f"{shop.item_name(id)} {money(price)}" for id, price in row["items"].items()}
        total = money(sum(row["items"].values()))
        kept = {name: value for name, value in row.items() if name not in ("user", "items")}
        return {"order": order, "customer": row["user"], **kept, "items": items, "total": total, "today": shop.today}

    def get_product(self, product: str) -> Row:
        """A product by its number, its exact name or an item number: its variants with item number, options, price, and
        whether in stock."""
        shop, name = self._session.database, product.lower().strip()
        named = next((id for id, one in shop.products.items() if one["name"].lower() == name), product)
        id = shop.product_of.get(product, named)
        found = self._session.product(id)
        variants = {
            item: {**one["options"], "price": money(one["price"]), "in stock": one["stock"]}
            for item, one in found["variants"].items()
        }
        return {"product": id, "name": found["name"], "variants": variants}

    def search_products(self, text: str) -> list[str]:
        """Products whose name has all these words: "number name", at most ten."""
        words = text.lower().split()
        names = ((id, one["name"]) for id, one in self._session.database.products.items())
        found = [f"{id} {name}" for id, name in names if all(word in name.lower().split() for word in words)]
        if not found:
            raise ValueError("no product has all these words in its name")
        return found[:MOST_FOUND]

    def cancel_order(self, order: str, reason: str) -> str:
        """Cancel a pending order and refund it. reason: mistake or unneeded."""
        self._require_status(order, "pending")
        if reason not in REASONS:
            raise ValueError(f"the reason is one of: {', '.join(REASONS)}")
        row = self._session.own_order(order)
        row |= {"status": "cancelled", "changes": [*row["changes"], f"cancelled: {reason}"]}
        self._charge(row, row["payment"], -sum(row["items"].values()))
        return "cancelled"

    def change_address(self, order: str, address: str) -> str:
        """Send a pending order to another address, which is written whole."""
        self._require_status(order, "pending")
        if len(address.split()) < 2:
            raise ValueError("the address is not whole")
        self._session.own_order(order)["address"] = " ".join(address.split())
        return "changed"

    def change_payment(self, order: str, payment: str) -> str:
        """Pay a pending order with another payment method of its customer."""
        self._require_status(order, "pending")
        row = self._session.own_order(order)
        if payment == row["payment"]:
            raise ValueError("the order is paid with it already")
        total = sum(row["items"].values())
        self._charge(row, payment, total)
        self._charge(row, row["payment"], -total)
        row["payment"] = payment
        return "changed"

    def change_items(self, order: str, items: list[str], new_items: list[str], payment: str) -> str:
        """Change items of a pending order to other variants of the same products, once. The difference is paid with, or
        refunded to, a payment method of the customer."""
        self._require_status(order, "pending")
        return self._swap(order, items, new_items, payment, "items changed")

    def return_items(self, order: str, items: list[str], refund_to: str) -> str:
        """Return items of a delivered order. refund_to: a payment method of the customer, credited on arrival."""
        self._require_status(order, "delivered")
        row = self._session.own_order(order)
        self._require_items(row, items)
        self._require_payment(row, refund_to)
        row |= {
            "status": "return requested",
            "changes": [*row["changes"], f"return {' '.join(sorted(items))} to {refund_to}"],
        }
        return "return requested"

    def exchange_items(self, order: str, items: list[str], new_items: list[str], payment: str) -> str:
        """Exchange items of a delivered order for other variants of the same products, once. The difference is paid
        with, or refunded to, a payment method of the customer."""
        self._require_status(order, "delivered")
        said = self._swap(order, items, new_items, payment, "exchange requested")
        self._session.own_order(order)["status"] = said
        return said

    def transfer_to_human(self, summary: str) -> str:
        """Hand the conversation over to a human. It ends here."""
        self._session.transferred = True
        return "transferred"

    def _swap(self, order: str, items: list[str], new_items: list[str], payment: str, said: str) -> str:
        row, shop = self._session.order(order), self._session.database
        if any(change.startswith(said) for change in row["changes"]):
            raise ValueError("the items of this order were changed before, and may be changed once")
        self._require_items(row, items)
        if len(items) != len(new_items):
            raise ValueError("give one new item for each item")
        difference = 0
        for old, new in zip(items, new_items, strict=True):
            variants = shop.products[shop.product_of[old]]["variants"]
            if new not in variants or new == old:
                raise ValueError(f"{new[:20]} is no other variant of the product of {old}")
            if not variants[new]["stock"]:
                raise ValueError(f"{new} is not in stock")
            difference += variants[new]["price"] - row["items"][old]
        self._charge(row, payment, difference)
        own, places = self._session.own_order(order), dict(zip(items, new_items, strict=True))
        own["items"] = {
            places.get(id, id): shop.products[shop.product_of[id]]["variants"][places[id]]["price"]
            if id in places
            else price
            for id, price in own["items"].items()
        }
        own["changes"] = [*own["changes"], f"{said}: difference {money(difference)} by {payment}"]
        return said

    def _charge(self, row: Row, payment: str, cents: int) -> None:
        """Take cents from a payment method, or give them back where negative."""
        self._require_payment(row, payment)
        left = self._session.user(row["user"])["payments"][payment]
        if left is None:
            return
        if cents > left:
            raise ValueError(f"{payment} has a balance of {money(left)}, and {money(cents)} are due")
        self._session.own_user(row["user"])["payments"][payment] = left - cents

    def _require_payment(self, row: Row, payment: str) -> None:
        if payment not in (known := self._session.user(row["user"])["payments"]):
            raise ValueError(
                f"the customer of this order has no payment method {payment[:30]}; there are: {', '.join(known)}"
            )

    def _require_items(self, row: Row, items: list[str]) -> None:
        if not items or len(set(items)) != len(items) or not set(items) <= row["items"].keys():
            raise ValueError(f"name items of this order, each once: {', '.join(row['items'])}")

    def _require_status(self, order: str, status: str) -> None:
        if (found := self._session.order(order)["status"]) != status:
            raise ValueError(f"order {order} is {found}; this is for orders that are {status}")
