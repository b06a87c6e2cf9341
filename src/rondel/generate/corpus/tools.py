"""The tools that read a corpus: search, open, find.

What they return never repeats what the policy wrote: an answer that stands there is the corpus's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from rondel.generate.corpus.store import WORD, Corpus, words_of

MOST_RESULTS, MOST_LINES = 20, 5


class CorpusTools:
    """`CorpusTools(corpus, results=5, snippet=30)`: its public methods are what a policy calls.

    results   passages that a search returns
    snippet   words of each that it shows
    """

    def __init__(self, corpus: Corpus, *, results: int = 5, snippet: int = 30) -> None:
        self._corpus, self._results, self._snippet = corpus, min(results, MOST_RESULTS), snippet

    def search(self, query: str) -> str:
        """The passages that match best: [number] title, and the words around what was found."""
        wanted = set(words_of(query))
        shown = []
        for id, _ in self._corpus.search(query, self._results):
            text = self._corpus[id].text
            shown.append(f"{self._headline(id)}\n{best_window(text, wanted, self._snippet)}")
        return "\n".join(shown) or "nothing found"

    def open(self, id: int) -> str:
        """A whole passage by its number, and the numbers of those before and behind it."""
        near = ", ".join(f"[{n}]" for n in self._corpus.neighbours(self._known(id)))
        return f"{self._headline(id)}\n{self._corpus[id].text}" + (f"\nbefore and behind: {near}" if near else "")

    def find(self, id: int, text: str) -> str:
        """The sentences of a passage that have a text in them."""
        sentences = self._corpus[self._known(id)].text.replace(". ", ".\n").split("\n")
        found = [one for one in sentences if text.lower() in one.lower()][:MOST_LINES]
        return "\n".join([self._headline(id), *found]) if found else "nothing found"

    def _headline(self, id: int) -> str:
        passage = self._corpus[id]
        return f"[{id}] {passage.title}" + ("" if passage.section == passage.title else f": {passage.section}")

    def _known(self, id: int) -> int:
        if not 0 <= id < len(self._corpus):
            raise ValueError("there is no passage with this number")
        return id


def best_window(text: str, wanted: set[str], size: int) -> str:
    """The `size` words in a row with most different wanted words; the earliest such."""
    words = text.split()
    if len(words) <= size:
        return text
    marks: Sequence[set[str]] = [wanted.intersection(WORD.findall(word.lower())) for word in words]
    places = [i for i, found in enumerate(marks) if found] or [0]
    starts = [max(0, min(place - size // 4, len(words) - size)) for place in places]
    start = max(starts, key=lambda s: (len(set().union(*marks[s : s + size])), -s))
    return (
        ("... " if start else "")
        + " ".join(words[start : start + size])
        + (" ..." if start + size < len(words) else "")
    )
