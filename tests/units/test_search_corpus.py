"""Corpora: documents cut into passages, BM25 against its formula, questions that have one answer."""

from __future__ import annotations

import json
import math
import re

import pytest

from kits.sweeps import covering
from rondel.core.errors import ConfigError, DataError
from rondel.generate.corpus.packages import table_passages
from rondel.generate.corpus.passages import (
    LONGEST,
    Passage,
    cut_passages,
    read_docstrings,
    read_html,
    read_roff,
)
from rondel.generate.corpus.questions import FIRST, make_questions
from rondel.generate.corpus.store import K1, B, open_corpus, words_of, write_corpus
from rondel.generate.corpus.tools import CorpusTools, best_window

PAGE = """<html><head><title>no</title></head><body><div class="sphinxsidebar">menu</div><h1>maths<a>¶</a></h1>
<p>Functions of numbers.</p><dl><dt class="sig" id="m.prod">m.prod(iterable, *, start=1)</dt><dd><p>The product.</p>
<p>New in version 3.8.</p></dd></dl><script>x()</script></body></html>"""
ROFF = r""".\" a comment
.TH GETPID 2 2022
.SH NAME
getpid, getppid \- get process identification
.SH SYNOPSIS
.B #include <unistd.h>
.PP
.BI "pid_t getpid(" void );
.SH OPTIONS
.TP
.BR \-v ", " \-\-verbose
say \fImore\fP
"""


def test_a_page_becomes_passages_with_their_headings():
    assert list(cut_passages(read_html(PAGE))) == [
        Passage("maths", "maths", "Functions of numbers."),
        Passage(
            "maths", "m.prod(iterable, *, start=1)", "m.prod(iterable, *, start=1) The product. New in version 3.8."
        ),
    ]


def test_a_manual_page_becomes_passages_with_their_headings():
    assert list(cut_passages(read_roff(ROFF))) == [
        Passage("getpid(2)", "getpid(2) NAME", "getpid, getppid - get process identification"),
        Passage("getpid(2)", "getpid(2) SYNOPSIS", "#include <unistd.h> pid_t getpid(void);"),
        Passage("getpid(2)", "getpid(2) OPTIONS", "-v, --verbose say more"),
    ]


def test_docstrings_are_read_without_import():
    source = 'raise SystemExit\ndef f(a, b=2, *, c=None):\n    """Does."""\nclass C:\n    """Is."""\n    def _g(self): "no"\n'
    assert list(cut_passages(read_docstrings("m", source))) == [
        Passage("m", "m.f(a, b=2, *, c=None)", "m.f(a, b=2, *, c=None) Does."),
        Passage("m", "m.C", "m.C Is."),
    ]


@pytest.mark.parametrize("words", [1, 60, 99, 149, 150, 151, 170, 299, 300, 301, 1234])
def test_cutting_loses_no_word_and_makes_no_crumbs(words):
    """Whatever the length: the words of the passages are those of the text, none longer than LONGEST."""
    text = " ".join(f"w{i}." if i % 17 == 0 else f"w{i}" for i in range(words))
    cut = list(cut_passages([("title", "t"), ("text", text)]))
    assert " ".join(p.text for p in cut) == text
    sizes = [len(p.text.split()) for p in cut]
    assert max(sizes) <= LONGEST and (len(sizes) == 1 or min(sizes) >= 25)


# -- ranking ---------------------------------------------------------------------------------------

DOCUMENTS = (
    "the lamp of the harbour is lit at dusk",
    "harbour harbour lamp",
    "keepers paint the door blue every spring and the lamp green",
    "no word of the query stands here",
    "dusk",
)


def bm25(query: str, documents: list[list[str]], at: int) -> float:
    """Lucene's form of the formula, written out."""
    n, average = len(documents), sum(map(len, documents)) / len(documents)
    total = 0.0
    for word in query.split():
        with_it = sum(word in d for d in documents)
        f = documents[at].count(word)
        idf = math.log(1 + (n - with_it + 0.5) / (with_it + 0.5))
        total += idf * f / (f + K1 * (1 - B + B * len(documents[at]) / average))
    return total


@pytest.mark.parametrize("query", ["harbour lamp", "dusk", "lamp lamp dusk", "blue harbour spring lamp", "absent"])
def test_scores_are_those_of_the_formula(tmp_path, query):
    pytest.importorskip("bm25s")
    write_corpus(tmp_path, [Passage(f"d{i}", f"s{i}", text) for i, text in enumerate(DOCUMENTS)], [])
    indexed = [[f"d{i}", f"s{i}", *words_of(text)] for i, text in enumerate(DOCUMENTS)]
    wanted = {i: bm25(query, indexed, i) for i in range(len(DOCUMENTS))}
    found = open_corpus(str(tmp_path)).search(query, 10)
    assert dict(found) == pytest.approx({i: s for i, s in wanted.items() if s}, rel=1e-5)
    assert [id for id, _ in found] == sorted(dict(found), key=lambda i: (-wanted[i], i))


def test_the_best_k_are_the_first_of_all(tmp_path):
    pytest.importorskip("bm25s")
    write_corpus(tmp_path, [Passage("t", f"s{i}", "w " * (1 + i % 7) + f"v{i % 3}") for i in range(200)], [])
    corpus = open_corpus(str(tmp_path))
    ranked = corpus.search("w v1", 200)
    assert len(ranked) == 200 and corpus.search("w v1", 9) == ranked[:9]
    assert corpus.containing("w v1").tolist() == [i for i in range(200) if i % 3 == 1]


def test_equal_documents_have_equal_digests_and_repeats_are_dropped(tmp_path):
    pytest.importorskip("bm25s")
    passages = [Passage("t", "s", text) for text in ("a one", "a two", "a one")]
    assert [write_corpus(tmp_path / name, passages, []) for name in "ab"] == [2, 2]
    digests = {json.loads((tmp_path / name / "corpus.json").read_text())["digest"] for name in "ab"}
    assert len(digests) == 1
    write_corpus(tmp_path / "c", passages[:1], [])
    assert open_corpus(str(tmp_path / "c")).about["digest"] not in digests


def test_a_folder_that_is_no_corpus_is_refused(tmp_path):
    pytest.importorskip("bm25s")
    with pytest.raises(DataError, match="write one with `rondel tasks search"):
        open_corpus(str(tmp_path / "none"))
    with pytest.raises(DataError, match="no passage came of x"):
        write_corpus(tmp_path, [], [{"name": "x"}])


# -- tools -----------------------------------------------------------------------------------------


def test_tools_show_passages_and_never_what_was_asked(tmp_path):
    pytest.importorskip("bm25s")
    texts = ["one two three. The lamp is green. End here.", "behind it", "elsewhere"]
    titles = ["a", "a", "b"]
    write_corpus(tmp_path, [Passage(t, "s", text) for t, text in zip(titles, texts)], [])
    tools = CorpusTools(open_corpus(str(tmp_path)), results=2, snippet=4)
    assert tools.search("lamp forged-answer") == "[0] a: s\n... The lamp is green. ..."
    assert tools.search("forged-answer") == "nothing found"
    assert tools.open(0) == f"[0] a: s\n{texts[0]}\nbefore and behind: [1]"
    assert tools.find(0, "LAMP") == "[0] a: s\nThe lamp is green."
    assert tools.find(0, "[2] forged") == "nothing found"
    for id in (-1, 3, 10**30):
        with pytest.raises(ValueError, match="no passage with this number"):
            tools.open(id)


def test_a_window_has_the_most_wanted_words():
    text = " ".join(["lamp", *["x"] * 20, "green", "lamp", *["y"] * 20])
    assert best_window(text, {"lamp", "green"}, 6).strip(". ").split()[1:3] == ["green", "lamp"]


# -- questions -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("bm25s")
    folder = tmp_path_factory.mktemp("corpus")
    filler = [Passage("m", f"m.f{i}(x)", f"m.f{i}(x) New in version 3.{i % 9}.") for i in range(40)]
    passages = [
        *cut_passages(read_html(PAGE)),
        *cut_passages(read_roff(ROFF)),
        Passage("twice", "t.a(x)", "t.a(x) New in version 3.1."),
        Passage("twice", "t.a(x)", "t.a(x) again. New in version 3.2."),
        *filler,
    ]
    write_corpus(folder, passages, [])
    return open_corpus(str(folder)), list(make_questions(open_corpus(str(folder))))


def test_every_question_has_one_passage_with_its_answer(made):
    corpus, rows = made
    for row in rows:
        [gold] = row["passages"]
        assert re.search(rf"(?<!\w){re.escape(row['answer'])}(?!\w)", corpus[gold].text)
        if row["level"] == 1:
            assert gold in [id for id, _ in corpus.search(row["queries"][-1], FIRST)]
    asked = {row["prompt"]: row for row in rows}
    assert len(asked) == len(rows)
    assert asked["Which release was the first to have m.prod?"]["answer"] == "3.8"
    assert asked["If a caller of m.prod leaves out start, what value does it get?"]["answer"] == "1"
    assert asked["How is the flag -v of getpid spelled out in full?"]["answer"] == "--verbose"
    assert "Which release was the first to have t.a?" not in asked, "it has two answers"
    hops = asked[
        'Which file has to be included for the function whose manual page is headed "get process identification"?'
    ]
    assert hops["answer"] == "unistd.h" and hops["level"] == 2
    assert hops["queries"] == ["get process identification", "getpid synopsis include"]


def test_no_document_is_asked_about_on_both_sides(made, tmp_path):
    from rondel.generate.envs.sources import load_tasks

    corpus, rows = made
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_tasks({"kind": "search_questions", "corpus": str(tmp_path), "holdout": 0.3}, env="search")
    sides = [{corpus[t.data["passages"][0]].section for t in side} for side in (found.train, found.held_out)]
    assert all(sides) and not sides[0] & sides[1]
    documents = [{t.data["document"] for t in side} for side in (found.train, found.held_out)]
    assert not documents[0] & documents[1]


def test_tables_of_the_library_are_facts(tmp_path, capsys):
    """What a machine without packages has, too; every row of each table once."""
    sources: list[dict] = []
    passages = list(table_passages(sources, print))
    assert sources[0]["passages"] == len(passages) == len(set(passages)) > 1500
    facts = {(p.title, *p.text.split(" ", 1)) for p in passages}
    assert {
        ("entity", "hearts", "2665"),
        ("extension", "json", "application/json"),
        ("signal", "SIGKILL", "9"),
    } <= facts


@pytest.mark.slow
# how docstrings are read, and that repeats are dropped, is above
@pytest.mark.parametrize("source", covering(["tables", "python"], ["tables"]))
def test_the_command_writes_a_corpus_and_its_questions(tmp_path, capsys, source):
    pytest.importorskip("bm25s")
    from rondel.cli.search_tasks import CorpusSource, make_corpus

    make_corpus(tmp_path / "c", CorpusSource(source), 600)
    about = json.loads((tmp_path / "c" / "corpus.json").read_text())
    assert about["passages"] == 600 or source == "python"  # repeats of docstrings are dropped
    assert sum(s["passages"] for s in about["sources"]) >= about["passages"]
    assert (tmp_path / "c" / "questions.jsonl").stat().st_size > 1000
    assert "questions:" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a corpus already"):
        make_corpus(tmp_path / "c", CorpusSource(source), 600)
