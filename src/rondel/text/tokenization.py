"""From text to tokens, and back without holding up the event loop.

Text stays text. A chat template writes control tokens; what people, tools, pages and policies write may spell them, and
must not become them.

    messages ──cover──> no control token can begin in them ──template──> whatever is spelled now, the template wrote ──encode──> tokens

`cover_control_tokens` replaces the characters that control tokens begin with ("<", "[") by stand-ins, and
`encode` puts them back. Text that spells no control token is encoded by the tokenizer
itself. Text that does is encoded by a twin of it,
in which every control token has a name that nobody can guess: those of the template are
renamed, those of the text are ordinary
characters there. So the rest of the text is split exactly as if its control tokens did not exist.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from secrets import token_hex
from typing import Any

from rondel.core.errors import TemplateError
from rondel.text.aliased_tokenizer import make_aliased_tokenizer

# False in a message, in a task's data or in a call: control tokens that its text spells are meant
SPLIT = "split_special_tokens"
ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"})
THOUGHTS = ("<think>", "</think>")  # written by the policy within its turn
# a hieroglyph and the first of those that follow it: letters, which no template treats apart
STAND_IN, CODES = "\U00013000", 0x13001
NOTHING = r"(?!)"  # a pattern that is found nowhere
LOOKS = re.compile(  # what a tokenizer that is not known here may read as a control token
    r"<(?=[|｜][^<>\n]{1,64}>|[^<>|｜\s]{1,64}[|｜]>|/?(?:s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn|extra_id_\d+)>|</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|THINK|gMASK|CLS|SEP|MASK|PAD|UNK)\])"
)
# that a template may look for in a message: </think>
TAG = re.compile(r"</?(?!image|img|video|audio)[A-Za-z_][^<>\s'\"{}|]{0,60}>")

USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
ASKS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "n", "arguments": {"k": "v"}}}],
}
ANSWER = {"role": "tool", "tool_call_id": "call00001", "name": "n", "content": "r"}


class SpecialTokens:
    """The control tokens of a tokenizer: those that it declares special, and those with which
    its chat template marks turns and answers.

    names   {"<|im_end|>": 2, ...}. Other added tokens are text, as <think> and <tool_call> are
            where they are not declared special
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = {token.content: (id, token) for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        marks = _template_marks(tokenizer, [name for name, (_, token) in added.items() if not token.special])
        self.names = {name: id for name, (id, token) in added.items() if name and (token.special or name in marks)}
        self._lengths = sorted({len(name) for name in self.names}, reverse=True)
        self._begins = re.compile("|".join(sorted({re.escape(name[:2]) for name in self.names})) or NOTHING)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalized = (
            any(added[name][1].normalized for name in self.names) and getattr(backend, "normalizer", None) is not None
        )
        self._normalized = normalized  # then other characters may become a token's name
        codes = [STAND_IN, *sorted({name[0] for name in self.names})]
        self._codes = {char: STAND_IN + chr(CODES + i) for i, char in enumerate(codes)}
        self._chars = {code: char for char, code in self._codes.items()}
        self._covering = self._cover_pattern()
        self._covered = re.compile("|".join(self._chars))

    # -- before the template -----------------------------------------------------------------------

    def cover_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each message covered, but those that have SPLIT = False."""
        return [
            self.cover_control_tokens(
                {key: value for key, value in message.items() if key != SPLIT}, split=message.get(SPLIT) is not False
            )
            for message in map(self._with_role, messages)
        ]

    def cover_control_tokens(self, value: Any, *, split: bool = True) -> Any:
        """The same text or JSON-shaped data, in which no control token can begin; with split
        = False those that it spells are meant.

        Where there is nothing to cover it is equal.
        """
        if isinstance(value, str):
            if not split:
                return value.replace(STAND_IN, self._codes[STAND_IN])
            return self._covering.sub(lambda found: self._codes.get(found[0], found[0]), value)
        if isinstance(value, dict):
            return {
                self.cover_control_tokens(key, split=split): self.cover_control_tokens(inner, split=split)
                for key, inner in value.items()
            }
        return (
            [self.cover_control_tokens(inner, split=split) for inner in value]
            if isinstance(value, list | tuple)
            else value
        )

    def cover_but(self, text: str, names: set[str]) -> str:
        """Text in which these control tokens are meant, and no others."""
        out, at = [], 0
        for begin, name in self._iter_control_tokens(text):
            if name in names:
                out += [self.cover_control_tokens(text[at:begin]), name]
                at = begin + len(name)
        return "".join([*out, self.cover_control_tokens(text[at:])])

    def _with_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """Templates put a role between other characters: 'im_end' between "<|" and "|>"."""
        role = message.get("role")
        if isinstance(role, str) and role not in ROLES and any(role in name for name in self.names):
            raise TemplateError(
                f"role = {role!r:.80} is part of a control token; use one of {', '.join(sorted(ROLES))}"
            )
        return message

    # -- after it ----------------------------------------------------------------------------------

    def encode(self, covered: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of what a template made of covered messages, or of covered text alone."""
        text = self.uncover_control_tokens(covered)
        if self._is_harmless(covered, text):
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if self._aliased_tokenizer is None:
            return self._in_pieces(covered, add_special_tokens)
        renamed, at = [], 0
        for begin, name in self._iter_control_tokens(covered):
            renamed += [covered[at:begin], self._token_aliases[name]]
            at = begin + len(name)
        renamed.append(covered[at:])
        return list(
            self._aliased_tokenizer.encode(
                self.uncover_control_tokens("".join(renamed)), add_special_tokens=add_special_tokens
            ).ids
        )

    def encode_text(self, text: str, *, split: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Tokens of text that no template has seen."""
        return self.encode(self.cover_control_tokens(text, split=split), add_special_tokens=add_special_tokens)

    def encode_behind(self, before: str, covered: str) -> list[int]:
        """Tokens of covered text that stands behind `before`, a line break or a control token: without the space that
        some tokenizers begin every text with, as Llama 2's.
        """
        if self._adds_space:
            mark, behind = self.encode(before), self.encode(before + covered)
            if behind[: len(mark)] == mark:
                return behind[len(mark) :]
        return self.encode(covered)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a text has other tokens alone than behind a line break."""
        alone, mark, behind = (self.encode_text(text) for text in ("x7", "\n", "\nx7"))
        return behind[: len(mark)] == mark and behind[len(mark) :] != alone

    def uncover_control_tokens(self, covered: str) -> str:
        """What it was before `cover_control_tokens`."""
        return self._covered.sub(lambda found: self._chars[found[0]], covered) if STAND_IN in covered else covered

    def find_control_tokens(self, text: str) -> list[str]:
        """The control tokens that a text spells, in order."""
        return [name for _, name in self._iter_control_tokens(text)]

    def of_images(self, placeholder: int) -> set[str]:
        """The tokens that a template writes for an image and for nothing else: the placeholder, and marks around it."""
        own = {name for name, id in self.names.items() if id == placeholder}
        with suppress(Exception):  # a template refuses what it does not know by raising whatever it likes
            shown = self._rendered_control_tokens(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "u"}]}]
            )
            own |= shown - self._rendered_control_tokens([{"role": "user", "content": [{"type": "text", "text": "u"}]}])
        return own

    def _rendered_control_tokens(self, messages: list[dict[str, Any]]) -> set[str]:
        return set(self.find_control_tokens(str(self.tokenizer.apply_chat_template(messages, tokenize=False))))

    def _iter_control_tokens(self, text: str) -> Iterator[tuple[int, str]]:
        """(place, name) of each, the longest where several begin."""
        at = 0
        while self.names and (found := self._begins.search(text, at)) is not None:
            begin = found.start()
            name = next((text[begin : begin + n] for n in self._lengths if text[begin : begin + n] in self.names), None)
            if name is not None:
                yield begin, name
            at = begin + len(name or " ")

    def _is_harmless(self, covered: str, text: str) -> bool:
        """Whether the tokenizer itself finds no control token in `text` that is not in `covered`."""
        if covered == text:
            return not self._normalized or text.isascii()
        return not self._normalized and self.find_control_tokens(text) == self.find_control_tokens(covered)

    def _in_pieces(self, covered: str, add_special_tokens: bool) -> list[int]:
        """For a tokenizer that has no twin: what stands between control tokens, each piece for itself."""
        out: list[int] = list(self.tokenizer.encode("")) if add_special_tokens else []
        at = 0
        for begin, name in [*self._iter_control_tokens(covered), (len(covered), "")]:
            if piece := self.uncover_control_tokens(covered[at:begin]):
                out += self._encode_piece(piece)
            out += [self.names[name]] if name else []
            at = begin + len(name)
        return out

    def _encode_piece(self, text: str) -> list[int]:
        control = set(self.names.values()) - {getattr(self.tokenizer, "unk_token_id", None)}
        tokens = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not control & set(tokens):
            return list(tokens)
        letters = [
            token
            for char in text
            for token in self.tokenizer.encode(char, add_special_tokens=False, split_special_tokens=True)
        ]
        return [token for token in letters if token not in control]

    # -- the tokenizer and its twin ----------------------------------------------------------------

    def _cover_pattern(self) -> re.Pattern[str]:
        """A character to cover, or a tag to leave: one that the template looks for and that is no control token."""
        source = str(getattr(self.tokenizer, "chat_template", None) or "")
        left = {tag for tag in TAG.findall(source) if not any(name.startswith(tag) for name in self.names)}
        marks = _any_of({STAND_IN, *(name[0] for name in self.names if not name[0].isalnum())})
        words = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in self.names if name[0].isalnum()]
        return re.compile("|".join([*map(re.escape, sorted(left, key=len, reverse=True)), *words, marks]))

    @cached_property
    def _token_aliases(self) -> dict[str, str]:
        return {name: f"<{token_hex(16)}>" for name in self.names}

    @cached_property
    def _aliased_tokenizer(self) -> Any:
        """The tokenizer with its control tokens renamed, by the same numbers; None if it cannot be made."""
        return make_aliased_tokenizer(self.tokenizer, self.names, self._token_aliases)


@lru_cache(maxsize=16)
def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Those of a tokenizer, found out once."""
    return SpecialTokens(tokenizer)


def broken_up(text: str) -> str:
    """For a server whose tokenizer is not known: a space in whatever looks like a control
    token, "<|im_end|>" -> "< |im_end|>".
    """
    return LOOKS.sub(lambda found: f"{found[0]} ", text)


def _any_of(chars: set[str]) -> str:
    """A pattern for one of these characters."""
    return f"[{''.join(map(re.escape, sorted(chars)))}]"


def _template_marks(tokenizer: Any, candidates: list[str]) -> set[str]:
    """Those of the added tokens that a template writes around turns and around answers of
    tools, without being declared special.
    """
    found = [
        name for name in candidates if re.fullmatch(r"\S{3,}", name) and not name[0].isalnum() and name not in THOUGHTS
    ]
    if not found or not getattr(tokenizer, "chat_template", None):
        return set()

    def rendered_tokens(*messages: dict[str, Any]) -> set[str]:
        try:
            text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
        except Exception:  # a template refuses what it does not know by raising whatever it likes
            return set()
        return {name for name in found if name in text}

    return (
        rendered_tokens(USER, ASSISTANT, USER)
        | rendered_tokens(USER)
        | (rendered_tokens(USER, ASKS, ANSWER) - rendered_tokens(USER, ASKS))
    )


# -- from tokens to text -------------------------------------------------------------------------------------

LONG = 2048  # tokens that are decoded at once: two or three milliseconds
BEFORE = 8  # tokens that a piece is decoded behind: what one says depends on the one before
_reader = ThreadPoolExecutor(1, "long-answers")
HALF = "\ufffd"  # how a decoder shows bytes that are not yet a character


async def decode_answer(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """What `tokenizer.decode(tokens, skip_special_tokens=...)` says. A million tokens take a second in which a
    tokenizer lets no other thread run, so long answers are decoded in pieces, beside the event loop and one after the
    other: several at once would each take a turn of the interpreter before the loop gets one.
    """
    if len(tokens) <= LONG:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    return await beside_loop(partial(decode_in_pieces, tokenizer, tokens, skip_special_tokens=skip_special_tokens))


async def beside_loop(work: Callable[..., Any], *args: Any) -> Any:
    """What is read of a long answer, on the one thread that all of them share: a thread each, and the event loop would
    wait for one turn of the interpreter after the other before its own.
    """
    return await asyncio.get_running_loop().run_in_executor(_reader, work, *args)


def decode_in_pieces(tokenizer: Any, ids: Sequence[int], size: int = LONG, *, skip_special_tokens: bool = True) -> str:
    """The same text, from pieces that end where a character does."""

    def say(first: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[first:end]), skip_special_tokens=skip_special_tokens))

    pieces, at = [], 0
    while at < len(ids):
        end = min(at + size, len(ids))
        while end < len(ids) and say(max(at, end - BEFORE), end)[-1:] in ("", HALF) and end - at < 2 * size:
            end += 1
        behind = max(0, at - BEFORE)
        before, both = say(behind, at), say(behind, end)
        if not both.startswith(before) or end - at >= 2 * size:  # no tokenizer that is known
            return say(0, len(ids))
        pieces.append(both[len(before) :])
        at = end
    return "".join(pieces)
