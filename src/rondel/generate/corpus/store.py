"""A corpus on disk, opened by memory map and ranked by BM25.

    passages.jsonl   one passage a line: [title, section, text]; its number is its id
    offsets.npy      where each line begins, and the end
    bm25/            the index, written by bm25s: each word's passages with their weights
    corpus.json      how many passages, their digest, and the packages they are from

score(q, d) = sum over words w of q:  ln(1 + (N - n_w + 1/2) / (n_w + 1/2)) · f / (f + k1 (1 - b + b |d| / avg))

N passages, n_w of them with w, f times in d, |d| words in d; k1 = 1.5, b = 0.75 (Lucene's form, as bm25s computes it).
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.errors import DataError
from rondel.core.registry import locate_path
from rondel.generate.corpus.passages import Passage

WORD = re.compile(r"\w+")
# words of a question that say nothing about a passage
STOPWORDS = frozenset(
    WORD.findall(
        "a an and are as at be been but by can do does for from had has have how if in into is it its me my "
        "no not of on or our she so such than that the their them then there these they this to was we were "
        "what when where which who whose why will with you your"
    )
)
K1, B = 1.5, 0.75
FORMAT = 1


def words_of(text: str) -> list[str]:
    """The words that are indexed: "Which is os.path.join?" -> ["os", "path", "join"]."""
    return [word for word in WORD.findall(text.lower()) if word not in STOPWORDS]


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise DataError("a searchable corpus needs a package: pip install 'rondel[search]'") from error
    return bm25s


def write_corpus(folder: Path, passages: Iterable[Passage], sources: list[dict[str, Any]]) -> int:
    """Write different passages and their index; how many there are. `sources` say where they are from."""
    bm25s = _bm25s()
    folder.mkdir(parents=True, exist_ok=True)
    digest, seen, offsets, indexed = sha256(), set[bytes](), [0], list[list[str]]()
    with (folder / "passages.jsonl").open("wb") as out:
        for passage in passages:
            line = json.dumps(passage, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if (key := sha256(line).digest()) in seen:
                continue
            seen.add(key)
            digest.update(line)
            out.write(line)
            offsets.append(offsets[-1] + len(line))
            indexed.append(words_of(" ".join(passage)) or ["-"])
    if not indexed:
        raise DataError(f"no passage came of {', '.join(s['name'] for s in sources) or 'no source'}: name others")
    np.save(folder / "offsets.npy", np.asarray(offsets, np.int64))
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index(indexed, show_progress=False)
    index.save(str(folder / "bm25"), show_progress=False)
    about = {"format": FORMAT, "passages": len(indexed), "digest": digest.hexdigest(), "sources": sources}
    (folder / "corpus.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return len(indexed)


class Corpus:
    """Passages by number, and those that match a query best. Read-only: any number of processes may open one folder.

    >>> corpus = open_corpus("runs/corpus")  # doctest: +SKIP
    >>> [(id, corpus[id].title) for id, score in corpus.search("product of an iterable", 3)]  # doctest: +SKIP
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
            with (folder / "passages.jsonl").open("rb") as file:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
            index = _bm25s().BM25.load(str(folder / "bm25"), mmap=True, load_vocab=True)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"'{folder}' is no corpus ({error}): write one with `rondel tasks search --out {folder}`"
            ) from error
        if self.about.get("format") != FORMAT:
            raise DataError(f"'{folder}' was written by another version of Rondel: write it again")
        self._vocabulary, scores = index.vocab_dict, index.scores
        self._weights, self._places, self._starts = scores["data"], scores["indices"], scores["indptr"]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, id: int) -> Passage:
        return Passage(*json.loads(self._lines[self._offsets[id] : self._offsets[id + 1]]))

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """(id, score) of the k passages that match best; of equal ones the earlier."""
        scores = np.zeros(len(self), np.float32)
        for word in words_of(query):
            places, weights = self._postings(word)
            scores[places] += weights
        found = np.flatnonzero(scores)
        if len(found) > k:
            lowest = np.partition(scores[found], len(found) - k)[len(found) - k]
            found = found[scores[found] >= lowest]
        best = found[np.lexsort((found, -scores[found]))][:k]
        return [(int(id), float(scores[id])) for id in best]

    def containing(self, text: str) -> np.ndarray:
        """Ids of the passages with every word of a text, ascending."""
        found: np.ndarray | None = None
        for word in dict.fromkeys(words_of(text)):
            places = np.sort(self._postings(word)[0])
            found = places if found is None else np.intersect1d(found, places, assume_unique=True)
        return np.zeros(0, np.int64) if found is None else found

    def neighbours(self, id: int) -> list[int]:
        """The passages before and behind one in the same document."""
        title = self[id].title
        return [near for near in (id - 1, id + 1) if 0 <= near < len(self) and self[near].title == title]

    def _postings(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        place = self._vocabulary.get(word)
        if place is None:
            return self._places[:0], self._weights[:0]
        span = slice(self._starts[place], self._starts[place + 1])
        return self._places[span], self._weights[span]


@lru_cache
def _open_folder(folder: str, written: int) -> Corpus:
    return Corpus(Path(folder))


def open_corpus(path: str) -> Corpus:
    """The corpus in a folder, opened once by a process."""
    folder = locate_path(path)
    about = folder / "corpus.json"
    return _open_folder(str(folder), about.stat().st_mtime_ns if about.is_file() else 0)
