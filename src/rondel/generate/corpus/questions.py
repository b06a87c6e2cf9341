"""Questions that a corpus answers, made from its own passages and checked against them.

A family reads facts (subject, answer) off passages, and asks for them in other words than the passage. A fact is
asked only if one passage alone has both its subject and its answer, and the subject has one answer in its family.

level  1  the plain query brings its passage among the first FIRST
       2  two hops: one passage names what another one must be asked for
       3  the plain query does not bring it among the first FIRST
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rondel.generate.corpus.passages import Passage
from rondel.generate.corpus.store import Corpus

FIRST = 5
PER_PASSAGE = 2  # facts of one passage and family, so that none is asked a hundred times


class Fact(NamedTuple):
    """`Fact("since", 81538, "math.prod", "3.8", "In which ... ?", "math.prod")`: `query` is the plain search for it."""

    family: str
    passage: int
    subject: str
    answer: str
    question: str
    query: str
    hops: tuple[str, ...] = ()  # queries before it


SIGNATURE = re.compile(r"(?:class |async |classmethod |static )?([A-Za-z_][\w.]*)\((.*)\)$")
NAMED = re.compile(r"(\w+)\s*=\s*('[^']{1,20}'|-?\d[\w.]*|True|False)(?=[,\])]|$)")
NEW = re.compile(r"New in version (\d+\.\d+)")
OPTION = re.compile(r"(?:^|\s)(-[A-Za-z0-9]), (--[a-z][\w-]+)")
NAME = re.compile(r"^([\w.+-]+)(?:, [\w.+, -]+)? - (.{12,90}?)\.?$")
HEADER = re.compile(r"#include <([\w./]+\.h)>")
SETTING = re.compile(r"Default: ([^\s()]{1,24})(?= |$)")
RFC = re.compile(r"\bRFC ?(\d{3,4})\b")
PAGE = re.compile(r"^([\w.+:-]+)\((\d\w*)\)$")


def _since(id: int, p: Passage) -> Iterator[Fact]:
    found, made = NEW.findall(p.text), SIGNATURE.match(p.section)
    if len(found) == 1 and made and "." in made[1]:
        yield Fact("since", id, made[1], found[0], f"Which release was the first to have {made[1]}?", made[1])


def _default(id: int, p: Passage) -> Iterator[Fact]:
    if made := SIGNATURE.match(p.section):
        for name, value in NAMED.findall(made[2])[:PER_PASSAGE]:
            asked = f"If a caller of {made[1]} leaves out {name}, what value does it get?"
            yield Fact("default", id, f"{made[1]} {name}", value.strip("'"), asked, f"{made[1]} {name}")


def _option(id: int, p: Passage) -> Iterator[Fact]:
    if page := PAGE.match(p.title):
        for short, long in OPTION.findall(p.text)[:PER_PASSAGE]:
            asked = f"How is the flag {short} of {page[1]} spelled out in full?"
            yield Fact("option", id, f"{page[1]} {short}", long, asked, f"{page[1]} options {short}")


def _described(id: int, p: Passage) -> Iterator[Fact]:
    if PAGE.match(p.title) and p.section.endswith(" NAME") and (made := NAME.match(p.text)):
        asked = f'Whose page of the manual is headed "{made[2]}"?'
        yield Fact("described", id, made[2], made[1], asked, made[2])


def _header(id: int, p: Passage) -> Iterator[Fact]:
    page = PAGE.match(p.title)
    if page and page[2][0] in "23" and p.section.endswith(" SYNOPSIS") and (found := HEADER.search(p.text)):
        asked = f"Which file has to be included by C code that calls {page[1]}?"
        yield Fact("header", id, page[1], found[1], asked, f"{page[1]} synopsis include")


def _setting(id: int, p: Passage) -> Iterator[Fact]:
    if (found := SETTING.findall(p.text)) and len(found) == 1 and re.fullmatch(r"[A-Z][A-Z_]{3,}", p.section):
        asked = f"What is the setting {p.section} when a project does not give it?"
        yield Fact("setting", id, p.section, found[0].strip("'\""), asked, f"{p.section} default")


def _rfc(id: int, p: Passage) -> Iterator[Fact]:
    numbers, made = set(RFC.findall(p.text)), SIGNATURE.match(p.section)
    if len(numbers) == 1 and made:
        asked = f"What is the number of the internet standard that {made[1]} follows?"
        yield Fact("rfc", id, made[1], numbers.pop(), asked, f"{made[1]} rfc")


def _table(id: int, p: Passage) -> Iterator[Fact]:
    if p.title == p.section and p.title in ("entity", "extension", "signal"):
        name, _, value = p.text.partition(" ")
        yield Fact(p.title, id, name, value, f"{p.title} {name}?", name)


FAMILIES: tuple[Callable[[int, Passage], Iterator[Fact]], ...] = (
    _since, _default, _option, _described, _header, _setting, _rfc, _table,
)  # fmt: skip


def make_questions(corpus: Corpus) -> Iterator[dict[str, Any]]:
    """The rows: prompt, answer, passages (that support it), queries (one for each hop), family, length (characters
    of the subject), level, document."""
    facts = [fact for id in range(len(corpus)) for family in FAMILIES for fact in family(id, corpus[id])]
    answers = _answers(facts)
    facts = [fact for fact in facts if len(answers[fact.family, fact.subject]) == 1 and _is_unique(corpus, fact)]
    facts += list(_two_hops(corpus, facts))
    asked = Counter(fact.question for fact in facts)
    for fact in facts:
        if asked[fact.question] == 1:
            found = [id for id, _ in corpus.search(fact.query, FIRST)]
            passage = corpus[fact.passage]
            yield {
                "prompt": fact.question,
                "answer": fact.answer,
                "passages": [fact.passage],
                "queries": [*fact.hops, fact.query],
                "family": fact.family,
                "length": len(fact.subject),
                "level": 2 if fact.hops else 1 if fact.passage in found else 3,
                "document": passage.title if PAGE.match(passage.title) else f"passage {fact.passage}",
            }


def _answers(facts: list[Fact]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for fact in facts:
        found.setdefault((fact.family, fact.subject), set()).add(fact.answer)
    return found


def _is_unique(corpus: Corpus, fact: Fact) -> bool:
    """Whether its passage has subject and answer as they are written, and no other passage has."""
    ids = [
        int(id)
        for id in corpus.containing(f"{fact.subject} {fact.answer}")
        if all(_has_word(" ".join(corpus[int(id)]), word) for word in (*fact.subject.split(" "), fact.answer))
    ]
    return ids == [fact.passage]


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w])", text) is not None


def _two_hops(corpus: Corpus, facts: list[Fact]) -> Iterator[Fact]:
    """What a page is about -> its name -> the file that declares it."""
    headers = {fact.subject: fact for fact in facts if fact.family == "header"}
    for one in facts:
        other = headers.get(one.answer) if one.family == "described" else None
        if other is not None and corpus[other.passage].title == corpus[one.passage].title:
            asked = f'Which file has to be included for the function whose manual page is headed "{one.subject}"?'
            yield other._replace(family="described header", question=asked, hops=(one.query,))
