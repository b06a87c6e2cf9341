"""Answers that must be looked up: `env = "search:Search"`, `data = { kind =
"search:questions" }`, `reward = "search:grade"`.

The corpus is thirty sentences about lighthouses that do not exist (`facts.tsv`), ranked by BM25 (`pip install bm25s`).
"""

from pathlib import Path

import bm25s

from rondel.generate.envs.tools import Tools

ROWS = [line.split("\t") for line in Path(__file__).with_name("facts.tsv").read_text(encoding="utf-8").splitlines()]
INDEX = bm25s.BM25(corpus=[fact for _, _, fact in ROWS])
INDEX.index(bm25s.tokenize([fact for _, _, fact in ROWS], stopwords="en", show_progress=False), show_progress=False)


def questions():
    """The tasks, as rows."""
    return ({"prompt": question, "answer": answer} for question, answer, _ in ROWS)


def search(query: str, k: int = 3) -> str:
    """The k sentences of the corpus that match best."""
    words = bm25s.tokenize(query, stopwords="en", show_progress=False)
    found, _ = INDEX.retrieve(words, k=max(1, min(k, 10)), show_progress=False)
    return "\n".join(found[0])


def grade(trajectory, task):
    """1 if the last line names the answer."""
    return float(str(task.data["answer"]).lower() in trajectory.text.strip().rpartition("\n")[2].lower())


class Search(Tools):
    def __init__(self):
        super().__init__([search], turns=4, suffix=" Look it up, then answer in one line.")
