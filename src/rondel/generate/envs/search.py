"""Answers that must be looked up in a corpus, and given with the passage that says so: "EPERM [79183]".

question -> search: ranked passages -> open, find: what one says -> "answer [passage]"
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rondel.core.errors import DataError
from rondel.core.protocols import AskedCall, Chat
from rondel.core.types import Completion, Task
from rondel.generate.calls import HERMES, ToolCall
from rondel.generate.corpus.store import Corpus
from rondel.generate.corpus.tools import CorpusTools
from rondel.generate.envs.tools import Tool, Tools
from rondel.generate.template import Messages, Schemas

LINE = re.compile(r"^(search|open|find): ?(.*)$", re.MULTILINE)
CUT = " ..."  # ends what was cut to output_tokens


class Search(Tools):
    """`Search(open_corpus("runs/corpus"), results=5)`: the tools of a corpus for one question.

    output_tokens  most tokens that one call returns
    calls          "template", or "lines" for models whose template knows no tools and that cannot read a description
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        results: int = 5,
        snippet: int = 30,
        output_tokens: int = 512,
        calls: str = "template",
        **settings: Any,
    ) -> None:
        self.reader = CorpusTools(corpus, results=results, snippet=snippet)
        super().__init__([self.reader], **settings)
        self.output_tokens, self.lines = output_tokens, calls == "lines"

    def prompt(self, task: Task, tools: dict[str, Tool] | None = None) -> tuple[Messages, Schemas]:
        messages, schemas = super().prompt(task, tools)
        return messages, () if self.lines else schemas

    def gold(self, task: Task) -> list[str]:
        """A search for each hop, a look into the passage where the searches found it and did not show the answer in
        it, then the answer with its passage. DataError for a task that does not say how it is answered.
        """
        if missing := [name for name in ("queries", "passages", "answer") if not task.data.get(name)]:
            raise DataError(
                f"{task.id} has no {', '.join(missing)}, which gold replies are written from: tasks of task.data.kind "
                '= "search_questions" have them'
            )
        queries, passage, answer = task.data["queries"], task.data["passages"][0], str(task.data["answer"])
        calls = [self._write_call("search", query, query=query) for query in queries]
        shown = [self.reader.search(query).partition(f"[{passage}] ")[2].partition("\n[")[0] for query in queries]
        if any(shown) and not any(answer in text for text in shown):
            calls.append(self._write_call("open", str(passage), id=passage))
        return [*calls[: self.turns - 1], f"{answer} [{passage}]"]

    def _write_call(self, name: str, rest: str, **arguments: Any) -> str:
        """A call as the policy writes it: `rest` is what stands behind the name on a line."""
        if self.lines:
            return f"{name}: {rest}"
        return f"{HERMES.opens}{json.dumps({'name': name, 'arguments': arguments})}{HERMES.closes}"

    async def _read_calls(self, done: Completion, chat: Chat) -> Sequence[AskedCall]:
        if not self.lines:
            return await super()._read_calls(done, chat)
        return [read_line_call(name, rest) for name, rest in LINE.findall(done.text or "")]

    def _visible_result(self, call: AskedCall, result: Any, tools: dict[str, Tool], chat: Chat) -> Any:
        """Cut to output_tokens of the policy's tokenizer."""
        text, tokenizer = super()._visible_result(call, result, tools, chat), getattr(chat, "tokenizer", None)
        if not isinstance(text, str) or tokenizer is None:
            return text
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return text if len(tokens) <= self.output_tokens else tokenizer.decode(tokens[: self.output_tokens]) + CUT


def read_line_call(name: str, rest: str) -> ToolCall:
    """A call that is written as a line: "find: 17 since version" -> find(id=17, text="since version")."""
    if name == "search":
        return ToolCall(name, {"query": rest.strip()})
    id, _, text = rest.strip().partition(" ")
    return ToolCall(name, {"id": id} if name == "open" else {"id": id, "text": text})
