"""The prefix tree against an oracle that only has sets of prefixes, and page conservation after every operation."""

from __future__ import annotations

import random

import pytest

from rondel.generate.engine.builtin.pages import Pages
from rondel.generate.engine.builtin.radix import RadixTree


class Oracle:
    """{(root, prefix): page}: a prefix is cached iff its key is here."""

    def __init__(self):
        self.page = {}

    def match(self, root, tokens):
        pages = []
        for n in range(1, len(tokens) + 1):
            if (root, tuple(tokens[:n])) not in self.page:
                break
            pages.append(self.page[root, tuple(tokens[:n])])
        return pages

    def freed(self, pages):
        gone = set(pages)
        self.page = {k: p for k, p in self.page.items() if p not in gone}


@pytest.mark.parametrize("operations", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzz(operations):
    r = random.Random(1)
    tree, pages, oracle, locks, version = RadixTree(), Pages(120), Oracle(), [], 0
    for step in range(operations):
        root = (version if r.random() < 0.8 else max(0, version - 1), "", r.choice(["", "b"]))
        tokens = [r.randrange(3) for _ in range(r.randrange(1, 12))]
        verb = r.choices(["match", "insert", "lock", "unlock", "evict", "forget"], [2, 6, 2, 2, 1, 0.1])[0]
        if verb == "match":
            assert tree.match(root, tokens)[1] == oracle.match(root, tokens)
        elif verb == "insert":
            if pages.free < len(tokens):
                continue
            mine, known = pages.take(len(tokens)), oracle.match(root, tokens)
            node, theirs, duplicates = tree.insert(root, tokens, mine)
            assert theirs == known + mine[len(known) :] and duplicates == mine[: len(known)]
            pages.give(duplicates)
            oracle.page |= {(root, tuple(tokens[: i + 1])): p for i, p in enumerate(theirs)}
            assert spelled(node) == tokens
        elif verb == "lock":
            node, known = tree.match(root, tokens)
            tree.lock(node)
            locks.append((node, known))
        elif verb == "unlock" and locks:
            tree.unlock(locks.pop(r.randrange(len(locks)))[0])
        elif verb == "evict":
            wanted, kept = r.randrange(1, 40), {p for _, held in locks for p in held}
            assert tree.held == len(kept)
            freed = tree.evict(wanted)
            assert len(freed) >= min(wanted, len(oracle.page) - len(kept)) and not kept & set(freed), "a locked page was evicted"
            pages.give(freed)
            oracle.freed(freed)
        elif verb == "forget":
            version += 1
            kept = {p for _, held in locks for p in held}
            freed = tree.forget(version)
            old = {p for (root, _), p in oracle.page.items() if root[0] != version}
            assert set(freed) == old - kept
            pages.give(freed)
            oracle.freed(freed)
        assert pages.free + tree.cached == pages.count and tree.cached == len(oracle.page)
        if step % 97 == 0:
            everything = [p for n in tree.nodes() for p in n.pages]
            assert sorted(everything + pages._free) == list(range(1, pages.count + 1))
            assert set(everything) == set(oracle.page.values())
    for node, _ in locks:
        tree.unlock(node)
    pages.give(tree.evict(pages.count))
    assert pages.free == pages.count and tree.cached == tree.held == 0


def spelled(node):
    out = []
    while node.parent is not None:
        out, node = node.tokens + out, node.parent
    return out


def test_a_split_keeps_the_locks_of_both_halves():
    tree = RadixTree()
    node, *_ = tree.insert((0, "", ""), [1, 2, 3, 4], [11, 12, 13, 14])
    tree.lock(node)
    upper, pages = tree.match((0, "", ""), [1, 2, 9])
    assert pages == [11, 12] and upper.locks == node.locks == 1 and node.parent is upper and tree.held == 4
    assert tree.evict(4) == []
    tree.unlock(node)
    assert upper.locks == 0 and sorted(tree.evict(4)) == [11, 12, 13, 14]


def test_the_least_recently_used_leaf_goes_first():
    tree, root = RadixTree(), (0, "", "")
    for first in (1, 2, 3):
        tree.insert(root, [first, 7], [10 * first, 10 * first + 1])
    tree.match(root, [1, 7])
    assert tree.evict(1) == [20, 21] and tree.evict(1) == [30, 31] and tree.evict(9) == [10, 11]


def test_another_root_never_matches():
    tree = RadixTree()
    tree.insert((0, "", ""), [1, 2, 3], [4, 5, 6])
    for other in ((1, "", ""), (0, "lora", ""), (0, "", "held-out")):
        assert tree.match(other, [1, 2, 3])[1] == []
    assert tree.match((0, "", ""), [1, 2, 3])[1] == [4, 5, 6]


def test_an_unlock_too_many_is_noticed():
    tree = RadixTree()
    node, *_ = tree.insert((0, "", ""), [1], [1])
    with pytest.raises(AssertionError, match="twice"):
        tree.unlock(node)


def test_a_path_deeper_than_the_recursion_limit_is_forgotten():
    """A conversation that grows by one token a turn is a path of as many nodes."""
    tree = RadixTree()
    for n in range(1, 3000):
        tree.insert((0, "", ""), [1] * n, list(range(n)))
    assert sum(1 for _ in tree.nodes()) == 2999
    assert len(tree.forget(1)) == 2999 and tree.cached == 0 and not tree.roots
