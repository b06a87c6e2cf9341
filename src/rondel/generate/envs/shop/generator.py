"""A shop's database drawn from a seed: equal seeds and sizes make equal databases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, timedelta

from rondel.generate.envs.shop.database import Row, ShopDatabase

TODAY = date(2026, 6, 30)
DAYS = 120  # how long ago the oldest order was placed
COLOURS = ("black", "white", "red", "blue", "green", "grey", "yellow", "brown")
SIZES = ("small", "medium", "large", "extra large")
# a kind of product -> what its variants differ in, and the lowest and highest price in cents
KINDS: dict[str, tuple[dict[str, tuple[str, ...]], int, int]] = {
    "desk lamp": ({"colour": COLOURS, "bulb": ("warm", "cold", "dimmable")}, 1900, 8900),
    "backpack": ({"colour": COLOURS, "volume": ("18 l", "25 l", "32 l")}, 3900, 14900),
    "t-shirt": ({"colour": COLOURS, "size": SIZES}, 900, 3900),
    "running shoe": ({"colour": COLOURS, "size": ("38", "40", "42", "44", "46")}, 4900, 17900),
    "kettle": ({"colour": COLOURS, "volume": ("1 l", "1.5 l", "2 l")}, 1900, 9900),
    "keyboard": ({"layout": ("US", "UK", "German", "French"), "switch": ("linear", "tactile", "silent")}, 2900, 18900),
    "headphones": ({"colour": COLOURS, "link": ("wired", "wireless")}, 1900, 29900),
    "bookshelf": ({"wood": ("oak", "pine", "walnut"), "shelves": ("three", "four", "five")}, 5900, 39900),
    "water bottle": ({"colour": COLOURS, "volume": ("0.5 l", "0.7 l", "1 l")}, 900, 3900),
    "office chair": ({"colour": COLOURS, "arms": ("fixed", "adjustable", "none")}, 9900, 59900),
    "rug": ({"colour": COLOURS, "size": SIZES}, 3900, 29900),
    "frying pan": ({"diameter": ("20 cm", "24 cm", "28 cm"), "coating": ("ceramic", "steel", "iron")}, 1900, 12900),
    "jigsaw puzzle": ({"pieces": ("500", "1000", "2000"), "motif": ("sea", "city", "forest", "animals")}, 900, 3900),
    "tent": ({"colour": COLOURS, "persons": ("one", "two", "four")}, 6900, 49900),
    "notebook": ({"paper": ("plain", "ruled", "dotted"), "size": ("A4", "A5", "A6")}, 400, 2400),
    "rain jacket": ({"colour": COLOURS, "size": SIZES}, 3900, 24900),
    "bed sheet": ({"colour": COLOURS, "fabric": ("cotton", "linen", "satin")}, 1900, 9900),
    "coffee grinder": ({"colour": COLOURS, "drive": ("manual", "electric")}, 2900, 24900),
    "bicycle helmet": ({"colour": COLOURS, "size": SIZES}, 2900, 15900),
    "speaker": ({"colour": COLOURS, "link": ("wired", "wireless")}, 2900, 39900),
}
SYLLABLES = ("al", "ber", "cor", "dun", "el", "fin", "gar", "hol", "is", "jor", "kel", "lum")
FIRST = (
    "Ada Ana Ben Carla Chen Dario Ella Emil Eva Felix Finn Greta Hana Hugo Ida Ivan Jana Joel Kira Lars Lea Leo Lina "
    "Luca Maja Marco Mia Milan Nina Noah Nora Olga Omar Paul Petra Rosa Sara Tara Theo Zoe"
)
LAST = (
    "Adler Bauer Berger Brandt Costa Dietz Ebner Fischer Frank Gruber Haas Hofer Jansen Keller Klein Koch Kraus Lang "
    "Lorenz Maier Marin Moser Novak Okafor Pohl Reiter Rossi Roth Sato Schmid Silva Sommer Steiner Suzuki Thaler Urban "
    "Vogel Wagner Weber Winter"
)
STREETS = (
    "Elm Road",
    "Mill Lane",
    "Station Street",
    "Garden Way",
    "High Street",
    "River Walk",
    "Oak Avenue",
    "Hill Road",
)
CITIES = ("Aldbury", "Brenford", "Carvale", "Dunwick", "Eastmere", "Farholt", "Grendon", "Halsey")
STATUS = (("pending", 40), ("processing", 8), ("shipped", 10), ("delivered", 37), ("cancelled", 5))


def make_database(seed: int = 0, *, products: int = 2000, users: int = 1000, orders: int = 5000) -> ShopDatabase:
    """A database of these sizes."""
    draw = random.Random(seed)
    made_products = dict(_products(draw, products))
    made_users = dict(_users(draw, users))
    items = [(item, one["price"], id) for id, row in made_products.items() for item, one in row["variants"].items()]
    made_orders: dict[str, Row] = {}
    ids = list(made_users)
    for number in draw.sample(range(10_000, 100_000), orders):
        user = draw.choice(ids)
        made_orders[str(number)] = _order(draw, user, made_users[user], items)
        made_users[user]["orders"].append(str(number))
    return ShopDatabase(TODAY.isoformat(), made_products, made_users, made_orders)


def new_address(draw: random.Random) -> tuple[str, str]:
    """An address, and its zip."""
    zip = str(draw.randrange(10_000, 100_000))
    return f"{draw.randrange(1, 200)} {draw.choice(STREETS)}, {zip} {draw.choice(CITIES)}", zip


def _products(draw: random.Random, count: int) -> Iterator[tuple[str, Row]]:
    series = [f"{a}{b}{c}".capitalize() for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
    draw.shuffle(series)
    kinds = list(KINDS)
    numbers = iter(draw.sample(range(100_000, 1_000_000), count * 6))
    for place in range(count):
        kind = kinds[place % len(kinds)]
        options, low, high = KINDS[kind]
        (first, ones), (second, others) = options.items()
        pairs = [(a, b) for a in ones for b in others]
        base = draw.randrange(low, high, 100) + 90
        variants = {}
        for a, b in draw.sample(pairs, min(len(pairs), draw.randrange(3, 7))):
            price = base + 100 * draw.randrange(0, 10)
            stock = draw.random() < 0.85
            variants[str(next(numbers))] = {"options": {first: a, second: b}, "price": price, "stock": stock}
        # two products never share a series, so a name has one product
        yield (
            f"p{place:04}",
            {"name": f"{kind} {series[place % len(series)]}{place // len(series) or ''}", "variants": variants},
        )


def _users(draw: random.Random, count: int) -> Iterator[tuple[str, Row]]:
    for place in range(count):
        first, last = draw.choice(FIRST.split()), draw.choice(LAST.split())
        address, zip = new_address(draw)
        cards = [f"card_{draw.randrange(1000, 10_000)}" for _ in range(draw.randrange(1, 3))]
        payments: dict[str, int | None] = dict.fromkeys(cards)
        if draw.random() < 0.6:
            payments[f"gift_{draw.randrange(1000, 10_000)}"] = 100 * draw.randrange(10, 600)
        yield (
            f"u{place:04}",
            {
                "name": f"{first} {last}",
                "email": f"{first}.{last}{place}@post.example".lower(),
                "zip": zip,
                "address": address,
                "payments": payments,
                "orders": [],
            },
        )


def _order(draw: random.Random, user: str, of: Row, items: list[tuple[str, int, str]]) -> Row:
    """One order. Each item is of another product, so that a user can name it by that."""
    [status] = draw.choices([s for s, _ in STATUS], [w for _, w in STATUS])
    placed = TODAY - timedelta(days=draw.randrange(1, DAYS))
    delivered = min(placed + timedelta(days=draw.randrange(2, 8)), TODAY) if status == "delivered" else None
    by_product = {product: (item, price) for item, price, product in draw.sample(items, draw.randrange(1, 4))}
    return {
        "user": user,
        "status": status,
        "placed": placed.isoformat(),
        "delivered": delivered and delivered.isoformat(),
        "items": dict(by_product.values()),
        "payment": draw.choice(list(of["payments"])),
        "address": of["address"],
        "changes": [],
    }
