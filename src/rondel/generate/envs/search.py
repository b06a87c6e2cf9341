"""Answers that must be looked up in a corpus, and given with the passage that says so: "EPERM [79183]".

question -> search: ranked passages -> open, find: what one says -> "answer [passage]"
"""

from __future__ import annotations

import json
import re
from typing import Any

from rondel.core.protocols import Chat
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
        super().__init__([CorpusTools(corpus, results=results, snippet=snippet)], **settings)
        self.output_tokens, self.lines = output_tokens, calls == "lines"

    def prompt(self, task: Task, tools: dict[str, Tool] | None = None) -> tuple[Messages, Schemas]:
        messages, schemas = super().prompt(task, tools)
        return messages, () if self.lines else schemas

    def gold(self, task: Task) -> list[str]:
        """A search for each hop, then the answer with its passage."""
        queries: list[str] = task.data["queries"]
        calls = [
            f"search: {query}"
            if self.lines
            else f"{HERMES.opens}{json.dumps({'name': 'search', 'arguments': {'query': query}})}{HERMES.closes}"
            for query in queries
        ]
        return [*calls[: self.turns - 1], f"{task.data['answer']} [{task.data['passages'][0]}]"]

    async def _read_calls(self, done: Completion, chat: Chat) -> list[ToolCall]:
        if not self.lines:
            return await super()._read_calls(done, chat)
        return [read_line_call(name, rest) for name, rest in LINE.findall(done.text or "")]

    def _visible_result(self, call: ToolCall, result: Any, tools: dict[str, Tool], chat: Chat) -> Any:
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
