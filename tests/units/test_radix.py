"""The prefix tree against an oracle that is one dictionary of prefixes, and page conservation after every operation."""

from __future__ import annotations

import heapq
import random
import sys

import pytest

from kits.sweeps import covering
from rondel.generate.engine.builtin import radix
from rondel.generate.engine.builtin.pages import PageAllocator
from rondel.generate.engine.builtin.radix import RadixTree


class Oracle:
    """{(root, prefix): [page, last use]}: a prefix is cached iff its key is here."""

    def __init__(self):
        self.known, self.clock = {}, 0

    def match(self, root, tokens):
        """The pages of the longest cached prefix; it counts as a use of each of them."""
        self.clock += 1
        pages = []
        for n in range(1, len(tokens) + 1):
            if (entry := self.known.get((root, tuple(tokens[:n])))) is None:
                break
            entry[1] = self.clock
            pages.append(entry[0])
        return pages

    def insert(self, root, tokens, pages):
        self.known |= {(root, tuple(tokens[: i + 1])): [page, self.clock] for i, page in enumerate(pages)}

    def oldest(self, locked):
        """Unlocked pages in the order of eviction. A use of a prefix is a use of all shorter
        ones, so ends come before what they stand on.
        """
        entries = sorted(
            (used, -len(prefix), page) for (_, prefix), (page, used) in self.known.items() if page not in locked
        )
        return [page for _, _, page in entries]

    def pages(self):
        return {page for page, _ in self.known.values()}

    def freed(self, pages):
        gone = set(pages)
        self.known = {key: entry for key, entry in self.known.items() if entry[0] not in gone}


@pytest.mark.slow
@pytest.mark.parametrize("operations", covering([10_000, 100_000], [10_000]))
def test_fuzz(operations):
    """After every operation: each page is free or cached, once; what is cached is what the
    oracle knows; what is locked is still there.
    """
    r = random.Random(1)
    tree, pages, oracle, locks, version = RadixTree(), PageAllocator(120), Oracle(), [], 0
    for _ in range(operations):
        root = (version if r.random() < 0.8 else max(0, version - 1), r.choice(["", "", "lora"]), r.choice(["", "b"]))
        tokens = [r.randrange(3) for _ in range(r.randrange(1, 12))]
        locked = {page for _, held in locks for page in held}
        verb = r.choices(["match", "insert", "lock", "unlock", "evict", "forget"], [2, 6, 2, 2.5, 1, 0.1])[0]
        if verb == "match":
            assert tree.match_prefix(root, tokens)[1] == oracle.match(root, tokens)
        elif verb == "insert":
            if pages.free_count < len(tokens):
                continue
            mine, known = pages.allocate_pages(len(tokens)), oracle.match(root, tokens)
            assert not locked & set(mine), "a locked page was given out"
            node, theirs, duplicates = tree.insert(root, tokens, mine)
            assert theirs == known + mine[len(known) :] and duplicates == mine[: len(known)]
            pages.free_pages(duplicates)
            oracle.insert(root, tokens, theirs)
            assert spelled(node) == tokens
        elif verb == "lock":
            node, known = tree.match_prefix(root, tokens)
            assert known == oracle.match(root, tokens)
            tree.lock(node)
            locks.append((node, known))
        elif verb == "unlock" and locks:
            tree.unlock(locks.pop(r.randrange(len(locks)))[0])
        elif verb == "evict":
            wanted, order = r.randrange(1, 40), oracle.oldest(locked)
            freed = tree.evict(wanted)
            assert len(freed) >= min(wanted, len(order)) and set(freed) == set(order[: len(freed)]), (
                "not the least recently used"
            )
            pages.free_pages(freed)
            oracle.freed(freed)
        elif verb == "forget":
            version += 1
            freed = tree.free_stale_nodes(version)
            assert set(freed) == {page for (root, _), (page, _) in oracle.known.items() if root[0] != version} - locked
            pages.free_pages(freed)
            oracle.freed(freed)
        locked = {page for _, held in locks for page in held}
        cached = [page for node in tree.iter_nodes() for page in node.pages]
        assert sorted([*cached, *pages.free]) == list(range(1, pages.count + 1))
        assert set(cached) == oracle.pages() >= locked and (tree.cached, tree.held) == (len(cached), len(locked))
    for node, _ in locks:
        tree.unlock(node)
    pages.free_pages(tree.evict(pages.count))
    assert pages.free_count == pages.count and tree.cached == tree.held == 0


def spelled(node):
    out = []
    while node.parent is not None:
        out, node = node.tokens + out, node.parent
    return out


def test_a_split_keeps_the_locks_of_both_halves():
    tree = RadixTree()
    node, *_ = tree.insert((0, "", ""), [1, 2, 3, 4], [11, 12, 13, 14])
    tree.lock(node)
    upper, pages = tree.match_prefix((0, "", ""), [1, 2, 9])
    assert pages == [11, 12] and upper.locks == node.locks == 1 and node.parent is upper and tree.held == 4
    assert tree.evict(4) == []
    tree.unlock(node)
    assert upper.locks == 0 and sorted(tree.evict(4)) == [11, 12, 13, 14]


def test_the_least_recently_used_leaf_goes_first():
    tree, root = RadixTree(), (0, "", "")
    for first in (1, 2, 3):
        tree.insert(root, [first, 7], [10 * first, 10 * first + 1])
    tree.match_prefix(root, [1, 7])
    assert tree.evict(1) == [20, 21] and tree.evict(1) == [30, 31] and tree.evict(9) == [10, 11]


@pytest.mark.slow
def test_an_eviction_works_for_what_it_frees_and_not_for_all_that_is_cached(monkeypatch):
    """It sorted every leaf at each call. Looked at are the leaves that go, and those that were used since, once."""
    tree, looked = RadixTree(), []
    for i in range(2000):
        tree.insert((0, "", ""), [i // 40, 7, 1000 + i], [3 * i, 3 * i + 1, 3 * i + 2])
    for i in range(10):
        tree.match_prefix((0, "", ""), [0, 7, 1000 + i])
    monkeypatch.setattr(radix, "heappop", lambda heap: looked.append(1) or heapq.heappop(heap))
    monkeypatch.setattr(tree, "iter_nodes", None)
    freed = tree.evict(8)
    assert freed == [3 * i + 2 for i in range(10, 18)] and len(looked) <= 8 + 10 + 2
    looked.clear()
    assert tree.evict(8) == [3 * i + 2 for i in range(18, 26)] and len(looked) == 8


def test_what_is_forgotten_leaves_nothing_behind():
    tree = RadixTree()
    for version in range(50):
        for i in range(20):
            tree.insert((version, "", ""), [i, 5], [2 * i, 2 * i + 1])
        tree.free_stale_nodes(version)
        assert len(tree._leaves) <= 2 * 20 + 1


def test_another_root_never_matches():
    tree = RadixTree()
    tree.insert((0, "", ""), [1, 2, 3], [4, 5, 6])
    for other in ((1, "", ""), (0, "lora", ""), (0, "", "held-out")):
        assert tree.match_prefix(other, [1, 2, 3])[1] == []
    assert tree.match_prefix((0, "", ""), [1, 2, 3])[1] == [4, 5, 6]


def test_an_unlock_too_many_is_noticed():
    tree = RadixTree()
    node, *_ = tree.insert((0, "", ""), [1], [1])
    with pytest.raises(AssertionError, match="twice"):
        tree.unlock(node)


@pytest.mark.slow
def test_a_path_deeper_than_the_recursion_limit_is_forgotten():
    """A conversation that grows by one token a turn is a path of as many nodes."""
    tree, deep = RadixTree(), sys.getrecursionlimit() + 200
    for n in range(1, deep + 1):
        tree.insert((0, "", ""), [1] * n, list(range(n)))
    assert sum(1 for _ in tree.iter_nodes()) == deep
    assert len(tree.free_stale_nodes(1)) == deep and tree.cached == 0 and not tree.roots
