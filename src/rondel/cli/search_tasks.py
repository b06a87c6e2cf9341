"""rondel tasks search: a corpus, and questions that it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError


class CorpusSource(StrEnum):
    """Where passages come from; "auto" is debian where apt-get is there, else python."""

    auto = "auto"
    debian = "debian"
    python = "python"
    tables = "tables"


def make_corpus(out: Path, source: CorpusSource, most: int | None) -> None:
    """Passages and questions in a folder, and what they are on stdout."""
    from rondel.generate.corpus.packages import has_apt
    from rondel.generate.corpus.questions import make_questions
    from rondel.generate.corpus.store import open_corpus, write_corpus

    if (out / "corpus.json").exists():
        raise ConfigError(f"{out} holds a corpus already: name another folder, or remove it")
    if source is CorpusSource.auto:
        source = CorpusSource.debian if has_apt() else CorpusSource.python
        print(f"source: {source.value}{'' if source is CorpusSource.debian else ' (apt-get is not here)'}")
    began, sources = time.perf_counter(), list[dict[str, Any]]()
    passages = _passages(source, out, sources, most)
    count = write_corpus(out, passages, sources)
    about = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    print(f"{count} passages, digest {about['digest'][:16]}, {time.perf_counter() - began:.0f} s")
    rows = list(make_questions(open_corpus(str(out))))
    with (out / "questions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    levels = [sum(row["level"] == level for row in rows) for level in (1, 2, 3)]
    print(
        f"{len(rows)} questions: {levels[0]} that a plain search answers, {levels[1]} of two hops, {levels[2]} whose "
        f"passage a plain search misses"
    )


def _passages(source: CorpusSource, out: Path, sources: list[dict[str, Any]], most: int | None) -> Iterator[Any]:
    from itertools import islice

    from rondel.generate.corpus.packages import debian_passages, python_passages, table_passages

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    if source is CorpusSource.debian:
        return islice(debian_passages(out / "packages", sources, say), most)
    if source is CorpusSource.tables:
        return islice(table_passages(sources, say), most)
    return islice(python_passages(sources, say), most)
