"""rondel tasks shop: a database of a shop, and users who want something of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rondel.core.errors import ConfigError


def make_shop(out: Path, n: int, seed: int) -> None:
    """Database and tasks in a folder, and what they are on stdout."""
    from rondel.generate.envs.shop.database import FILE
    from rondel.generate.envs.shop.generator import make_database
    from rondel.generate.envs.shop.rules import POLICY
    from rondel.generate.envs.shop.task_set import make_tasks, write_tasks

    if (out / FILE).exists():
        raise ConfigError(f"{out} holds a shop already: name another folder, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    shop = make_database(seed)
    rows = make_tasks(shop, n, seed)
    shop.write(out)
    write_tasks(out, rows)
    (out / "rules.md").write_text(POLICY + "\n", encoding="utf-8")
    variants = sum(len(product["variants"]) for product in shop.products.values())
    print(
        f"{len(shop.products)} products in {variants} variants, {len(shop.users)} customers, {len(shop.orders)} "
        f"orders, digest {shop.digest[:16]}"
    )
    levels = Counter(row["level"] for row in rows)
    print(f"{len(rows)} tasks; by level: {', '.join(f'{level}: {levels[level]}' for level in sorted(levels))}")
