"""Documents cut into passages: a heading, and some 60 to 150 words below it.

    read_html, read_roff, read_docstrings -> blocks -> cut_passages -> Passage

A block is (kind, text). "title" names the document, "heading" a section, "entry" a signature that begins a passage
of its own, "text" is a paragraph.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from typing import Literal, NamedTuple

Block = tuple[Literal["title", "heading", "entry", "text"], str]

FULL, LONGEST, SHORT = 100, 150, 25  # words: a passage is closed from FULL on, none is longer, a shorter tail joins


class Passage(NamedTuple):
    """`Passage("math", "math.prod(iterable, *, start=1)", "Calculate the product of all the elements ...")`."""

    title: str
    section: str
    text: str


def cut_passages(blocks: Iterable[Block]) -> Iterator[Passage]:
    """Passages of one document, in its order; no passage crosses a heading."""
    title = section = ""
    words: list[str] = []

    def closed() -> Iterator[Passage]:
        while words:
            end = len(words) if len(words) <= LONGEST else _sentence_end(words)
            if 0 < len(words) - end < SHORT:
                end = len(words) - SHORT
            yield Passage(title, section or title, " ".join(words[:end]))
            del words[:end]

    for kind, text in blocks:
        if kind == "text":
            words += text.split()
            if len(words) > 2 * LONGEST:  # the last words stay, so that a tail is never a passage of three
                while len(words) > 2 * LONGEST:
                    end = _sentence_end(words)
                    yield Passage(title, section or title, " ".join(words[:end]))
                    del words[:end]
            continue
        yield from closed()
        title, section = (text, "") if kind == "title" else (title, text)
        if kind == "entry":
            words += text.split()[:LONGEST]
    yield from closed()


def _sentence_end(words: list[str]) -> int:
    """Behind the first sentence that ends within FULL and LONGEST words; else LONGEST."""
    return next((i + 1 for i in range(FULL, LONGEST) if words[i][-1] in ".:;"), LONGEST)


# -- HTML ------------------------------------------------------------------------------------------

HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
BLOCKS = {"p", "li", "dd", "dt", "pre", "tr", "div", "blockquote", "section", "table", "td", "th", "br"}
SKIPPED = {"script", "style", "nav", "head", "footer", "form"}
NAVIGATION = re.compile(
    r"\b(?:sphinxsidebar|related|footer|toctree-wrapper|navheader|navfooter|toc|contents|fancy_toc)\b"
)


class _HtmlBlocks(HTMLParser):
    """Blocks of an HTML page, without its navigation."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self.parts: list[str] = []
        self.kind: Literal["heading", "entry", "text"] = "text"
        self.skipping: list[str] = []  # open tags from the one that is skipped on

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        if self.skipping:
            if tag == self.skipping[0]:
                self.skipping.append(tag)
            return
        marks = f"{about.get('class') or ''} {about.get('id') or ''}"
        if tag in SKIPPED or (tag in ("div", "ul", "table", "dl") and NAVIGATION.search(marks)):
            self.skipping.append(tag)
        elif tag in HEADINGS or (tag == "dt" and "sig" in marks.split()):
            self._close()
            self.kind = "entry" if tag == "dt" else "heading"
        elif tag in BLOCKS:
            self._close()

    def handle_endtag(self, tag: str) -> None:
        if self.skipping:
            if tag == self.skipping[0]:
                self.skipping.pop()
        elif tag in HEADINGS or tag in BLOCKS:
            self._close()

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data)

    def _close(self) -> None:
        text = " ".join("".join(self.parts).replace("¶", "").split())
        if text:
            self.blocks.append((self.kind, text))
        self.parts, self.kind = [], "text"


def read_html(page: str) -> list[Block]:
    """Blocks of an HTML page; its first heading is its title."""
    reader = _HtmlBlocks()
    reader.feed(page)
    reader.close()
    reader._close()
    blocks = reader.blocks
    first = next((i for i, (kind, _) in enumerate(blocks) if kind == "heading"), None)
    if first is not None:
        blocks = [("title", blocks[first][1]), *blocks[first + 1 :]]
    return blocks


# -- manual pages ----------------------------------------------------------------------------------

ESCAPES = (
    (re.compile(r"\\\".*$"), ""),
    (re.compile(r"\\f(?:\([A-Z]{2}|\[[A-Z]*\]|.)"), ""),
    (re.compile(r"\\s[+-]?\d"), ""),
    (re.compile(r"\\\*?\((?:aq|cq|oq)"), "'"),
    (re.compile(r"\\\*?\((?:lq|rq|dq)"), '"'),
    (re.compile(r"\\\((?:en|em|mi|hy)|\\-"), "-"),
    (re.compile(r"\\\*?\(..|\\\[[^\]]*\]|\\\*(?:\[[^\]]*\]|.)|\\[hvwm]'[^']*'"), " "),
    (re.compile(r"\\[&|^/,%cpd:!)]"), ""),
    (re.compile(r"\\[~0 t]"), " "),
    (re.compile(r"\\[e\\]"), r"\\"),
)  # fmt: skip
FONTS = {"B", "I", "SM", "SB", "R"}
MIXED = {"BR", "RB", "IR", "RI", "BI", "IB"}
WORD = re.compile(r'"((?:[^"]|"")*)"|(\S+)')


def read_roff(page: str) -> list[Block]:
    """Blocks of a manual page written with the man macros: `getpid(2)` and its sections."""
    blocks: list[Block] = []
    text: list[str] = []
    inside = False

    def close() -> None:
        if text:
            blocks.append(("text", " ".join(text)))
            text.clear()

    for line in page.splitlines():
        macro, _, rest = line[1:].lstrip().partition(" ") if line[:1] in (".", "'") else ("", "", line)
        if not inside and macro != "TH":
            continue
        words = [a or b for a, b in WORD.findall(rest)] if macro else []
        if macro == "TH":
            inside = len(words) > 1
            blocks += [("title", f"{_plain(words[0]).lower()}({words[1]})")] if inside else []
        elif macro in ("SH", "SS"):
            close()
            blocks.append(("heading", f"{blocks[0][1]} {_plain(' '.join(words))}"))
        elif macro in MIXED:
            text.append(_plain("".join(words)))
        elif macro in FONTS:
            text.append(_plain(" ".join(words)))
        elif macro in ("TP", "PP", "P", "LP", "IP", "HP"):
            close()
            text += [_plain(words[0])] if macro == "IP" and words else []
        elif not macro and (found := _plain(rest)):
            text.append(found)
    close()
    return blocks


def _plain(text: str) -> str:
    for pattern, put in ESCAPES:
        text = pattern.sub(put, text)
    return " ".join(text.split())


# -- Python source -----------------------------------------------------------------------------------


def read_docstrings(module: str, source: str) -> list[Block]:
    """Blocks of a Python file: each documented function and class with its signature. Nothing is imported."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    blocks: list[Block] = [("title", module)]
    if about := ast.get_docstring(tree):
        blocks += [("text", part) for part in about.split("\n\n")]

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            own = f"{name}.{child.name}"
            if not child.name.startswith("_") and (about := ast.get_docstring(child)):
                given = "" if isinstance(child, ast.ClassDef) else f"({ast.unparse(child.args)})"
                blocks.append(("entry", f"{own}{given}"))
                blocks.extend(("text", part) for part in about.split("\n\n"))
            if isinstance(child, ast.ClassDef):
                walk(child, own)

    walk(tree, module)
    return blocks
