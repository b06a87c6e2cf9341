"""The prefix cache: a radix tree of token runs whose root is (version, adapter,
namespace), so a stale prefix cannot match.

    root(version 3) ── [system prompt] ── [question A] ── [answer 1]
                                      └── [question B]            each node: tokens, their pages, lock count, last use

A locked path is never evicted; unlocked leaves go least recently used first. Pages in the tree belong to the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.states import SequenceStates

Root = tuple[int, str, str]


@dataclass(slots=True, eq=False)
class RadixNode:
    tokens: list[int]
    pages: list[int]
    parent: RadixNode | None
    children: dict[int, RadixNode] = field(default_factory=dict)  # by first token
    locks: int = 0
    used: int = 0
    queued: bool = False  # has an entry in the heap of leaves
    gone: bool = False
    state: int | None = None  # the slot that keeps the recurrent state at its end


class RadixTree:
    def __init__(self, states: SequenceStates | None = None) -> None:
        """`states`: of a model with recurrent layers, which can go on only where a state is kept."""
        self.states = states
        self.roots: dict[Root, RadixNode] = {}
        self.cached = 0  # pages in the tree
        self.held = 0  # those of them on locked paths; all others can be evicted
        self._clock = 0
        self._leaves: list[
            tuple[int, int, RadixNode]
        ] = []  # a heap: last use when it was entered, a number, a node that was an unlocked leaf then
        self._numbers, self._dead = count(), 0  # entries of nodes that are gone

    def match_prefix(self, root: Root, tokens: list[int]) -> tuple[RadixNode, list[int]]:
        """The deepest node that covers a prefix of `tokens`, and the pages of that
        prefix. Splits a node matched in part.
        """
        self._clock += 1
        node, at, pages = self.roots.setdefault(root, RadixNode([], [], None)), 0, []
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            n = _shared_prefix_length(child.tokens, tokens, at)
            if n < len(child.tokens):
                child = self._split_node(child, n)
            child.used = self._clock
            pages += child.pages
            node, at = child, at + n
        return node, pages

    def match_reusable(self, root: Root, tokens: list[int]) -> tuple[RadixNode, list[int]]:
        """The same for a sequence that will go on from there: with recurrent layers, up to the last kept state."""
        if self.states is None:
            return self.match_prefix(root, tokens)
        self._clock += 1
        top = self.roots.setdefault(root, RadixNode([], [], None))
        node = max(self._kept_states(root, tokens), key=lambda kept: kept[1], default=(top, 0))[0]
        pages: list[int] = []
        above: RadixNode | None = node
        while above is not None:
            above.used = self._clock
            pages = above.pages + pages
            above = above.parent
        return node, pages

    def _kept_states(self, root: Root, tokens: list[int]) -> Iterator[tuple[RadixNode, int]]:
        """Nodes along `tokens` that keep a state, with how many tokens they end behind."""
        node, at = self.roots.get(root), 0
        while node is not None and at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            at += len(child.tokens)
            if tokens[at - len(child.tokens) : at] != child.tokens:
                return
            if child.state is not None:
                yield child, at
            node = child

    def cached_prefix_length(self, root: Root, tokens: list[int]) -> int:
        """How many of `tokens`, from the first on, are cached. It counts as no use and changes nothing."""
        if self.states is not None:
            return max((end for _, end in self._kept_states(root, tokens)), default=0)
        node, at = self.roots.get(root), 0
        while node is not None and at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            n = _shared_prefix_length(child.tokens, tokens, at)
            node, at = child if n == len(child.tokens) else None, at + n
        return at

    def insert(self, root: Root, tokens: list[int], pages: list[int]) -> tuple[RadixNode, list[int], list[int]]:
        """Store `pages` of `tokens`. -> (node, the tree's pages for these tokens, those
        of `pages` that were duplicates).
        """
        node, known = self.match_prefix(root, tokens)
        rest = len(known)
        if rest < len(tokens):
            child = RadixNode(tokens[rest:], pages[rest:], node, used=self._clock)
            node.children[tokens[rest]] = child
            self.cached += len(child.pages)
            self._enqueue_leaf(child)
            node = child
        duplicates = [mine for mine, theirs in zip(pages, known) if mine != theirs]
        return node, known + pages[rest:], duplicates

    def lock(self, node: RadixNode | None) -> None:
        while node is not None:
            self.held += 0 if node.locks else len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: RadixNode | None) -> None:
        while node is not None:
            node.locks -= 1
            assert node.locks >= 0, "a cache path was unlocked twice"
            self.held -= 0 if node.locks else len(node.pages)
            self._enqueue_leaf(node)
            node = node.parent

    def evict(self, wanted: int) -> list[int]:
        """Free at least `wanted` pages if unlocked leaves allow it, least recently used first."""
        freed: list[int] = []
        while self._leaves and len(freed) < wanted:
            used, _, leaf = heappop(self._leaves)
            leaf.queued = False
            self._dead -= leaf.gone
            if leaf.gone or leaf.children or leaf.locks:
                continue  # it is entered again when it is an unlocked leaf again
            if leaf.used != used:
                self._enqueue_leaf(leaf)  # used since: its turn comes later
                continue
            freed += self._remove_leaf(leaf)
        return freed

    def free_stale_nodes(self, keep_version: int) -> list[int]:
        """Free all unlocked nodes of other versions: no request can match them any more."""
        freed: list[int] = []
        for name in [r for r in self.roots if r[0] != keep_version]:
            root = self.roots[name]
            for node in reversed(list(_walk_subtree(root))):  # children before their parents
                if not node.children and node.locks == 0:
                    freed += self._remove_leaf(node)
            if not root.children:
                del self.roots[name]
        return freed

    def iter_nodes(self) -> Iterator[RadixNode]:
        """Every node below a root."""
        for root in self.roots.values():
            yield from _walk_subtree(root)

    # -- inside ----------------------------------------------------------------------------------

    def _split_node(self, node: RadixNode, n: int) -> RadixNode:
        """The first n tokens of `node` become its new parent; locks hold for both halves."""
        assert node.parent is not None
        upper = RadixNode(node.tokens[:n], node.pages[:n], node.parent, locks=node.locks, used=node.used)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.pages, node.parent = node.tokens[n:], node.pages[n:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _remove_leaf(self, leaf: RadixNode) -> list[int]:
        assert leaf.locks == 0 and not leaf.children and leaf.parent is not None
        del leaf.parent.children[leaf.tokens[0]]
        self.cached -= len(leaf.pages)
        leaf.gone = True
        if self.states is not None:
            self.states.forget(leaf)
        self._dead += leaf.queued
        if self._dead > len(self._leaves) // 2:
            self._leaves = [entry for entry in self._leaves if not entry[2].gone]
            heapify(self._leaves)
            self._dead = 0
        self._enqueue_leaf(leaf.parent)
        return leaf.pages

    def _enqueue_leaf(self, node: RadixNode) -> None:
        """Enter an unlocked leaf into the heap, once."""
        if node.parent is not None and not (node.queued or node.children or node.locks or node.gone):
            node.queued = True
            heappush(self._leaves, (node.used, next(self._numbers), node))


def _walk_subtree(root: RadixNode) -> Iterator[RadixNode]:
    """The nodes under `root`, parents before their children."""
    stack = [*root.children.values()]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def _shared_prefix_length(run: list[int], tokens: list[int], at: int) -> int:
    """How many tokens of `run` continue `tokens[at:]`."""
    window = tokens[at : at + len(run)]
    if window == run:
        return len(run)
    return next((i for i, (a, b) in enumerate(zip(run, window)) if a != b), len(window))
