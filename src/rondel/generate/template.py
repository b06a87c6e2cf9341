"""How a tokenizer's chat template writes an opening, a later message, and the end of a turn: always as tokens.

A conversation is a buffer of tokens that only grows, so a later message is rendered
behind a fixed dummy conversation D and D's tokens are cut off again. What the
policy wrote is never part of what is rendered.

    opening   encode(tpl(messages, gen_prompt=True))
    later     encode(tpl(D + messages, gen_prompt=True))[len(encode(tpl(D))):]
    tail      what the template puts after an assistant's content: "<|im_end|>\\n" as tokens

Messages are covered when they come in (text/tokenization.py): control tokens are the
template's alone, and what a message spells is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from typing import Any

from rondel.core.errors import DataError, RondelError, TemplateError
from rondel.core.media import ImageProcessorConfig
from rondel.generate.calls import HERMES, PROBE, THOUGHT_ENDS, TOLD, CallFormat, read_off
from rondel.text.tokenization import special_tokens

Messages = list[dict[str, Any]]
Schemas = Sequence[dict[str, Any]]  # of tools, as OpenAI's `tools` has them

NAME = re.compile(r"[\w.:/-]{1,128}")  # of a tool; a policy may ask for one that is called "</tool_call>"
SYSTEM = {"role": "system", "content": "s"}  # given, so that no template injects its own
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
SPOKEN = {"role": "assistant", "content": "x7"}  # of a text that stands nowhere else
DUMMIES: tuple[
    list[dict[str, Any]], ...
] = (  # some templates refuse a system, some two users in a row, some a tool's answer that nobody asked for
    [SYSTEM, USER],
    [USER],
    [SYSTEM, USER, ASSISTANT],
    [USER, ASSISTANT],
    [SYSTEM, USER, PROBE],
    [USER, PROBE],
)


class Template:
    """`Template(tok).opening([{"role": "user", "content": "3 + 4 ="}])` -> [1, 4093,
    ...]. No template: the bare contents.
    """

    def __init__(self, tokenizer: Any, sight: ImageProcessorConfig | None = None) -> None:
        self.tokenizer, self.special, self.sight = tokenizer, special_tokens(tokenizer), sight
        self.plain = not getattr(tokenizer, "chat_template", None)

    def render_opening(self, messages: Messages, tools: Schemas = (), *, remember: bool = True) -> list[int]:
        """The first messages with the tools that are offered, up to where the policy starts to
        write. TemplateError where it refuses them. `remember` what others will ask for, too.
        """
        messages, tools = (
            self.calls_as_text(self.special.cover_messages(messages)),
            self.special.cover_control_tokens(tools),
        )
        if tools and self.call_format.told:
            messages, tools = describe_tools(messages, tools, speaker=self.speaker), ()
        if self.plain:
            return self._encode_plain(messages, opening=True)
        with _template_errors(messages):
            return self._render_tokens(messages, tools=tools, remember=remember)

    def render_after_turn(self, tokens: Sequence[int], messages: Messages) -> list[int]:
        """What follows a turn of the policy that wrote `tokens`: the rest of its end, and the
        messages up to where it writes again. TemplateError where the template refuses them."""
        with _template_errors(messages):
            if messages and messages[0]["role"] == "tool" and not self.plain and self.call_format.ends:
                return self._render_after_call(tokens, messages)
            tail, later = self.missing_tail(tokens), self.render_continuation(messages)
        return tail + later[self._said_already(tokens, later) if not tail else 0 :]

    def _render_after_call(self, tokens: Sequence[int], messages: Messages) -> list[int]:
        """What follows the mark that closes a call, but for what the policy has written behind it."""
        messages, ends = self.calls_as_text(self.special.cover_messages(messages)), self.call_format.ends
        written = self._render_text([USER, _build_calling_turn(messages), *messages], (), prompt=True)
        behind = self._encode_text(written[written.index(ends) + len(ends) :])
        mark = self._encode_text(ends)
        at = next((i for i in range(len(tokens), 0, -1) if tokens[max(0, i - len(mark)) : i] == mark), len(tokens))
        drawn = tokens[at:]
        return behind[len(drawn) :] if behind[: len(drawn)] == drawn else behind[self._said_already(tokens, behind) :]

    def _said_already(self, tokens: Sequence[int], behind: list[int]) -> int:
        """1 where the policy ended its turn with the mark that begins the next message, as GLM does."""
        return int(tokens[-1:] == behind[:1] and tokens[-1:] != [] and tokens[-1] in self.tokenizer.all_special_ids)

    def render_continuation(self, messages: Messages) -> list[int]:
        """Messages that follow a finished turn of the policy, up to where it writes again.
        TemplateError where it refuses them.
        """
        messages = self.calls_as_text(self.special.cover_messages(messages))
        if self.plain:
            return self._encode_plain(messages, opening=False)
        refused, asking = "", _build_calling_turn(messages)
        for dummy in ([asking if m is PROBE else m for m in dummy] for dummy in DUMMIES):
            try:
                prefix, whole = self._render_tokens(dummy, prompt=False), self._render_tokens([*dummy, *messages])
            except Exception as error:  # a template refuses a role order by raising whatever it likes
                refused = f"{type(error).__name__}: {error}"
                continue
            if (n := self._shared_prefix(prefix, whole)) is not None:
                return whole[n:]
        raise TemplateError(
            f"the chat template cannot append messages ({_role_list(messages)}): behind every dummy conversation it "
            f"rewrites what came before"
            f"{' or raises ' + refused if refused else ''}; use roles it knows, or a template that only appends"
        )

    def calls_as_text(self, messages: Messages) -> Messages:
        """Calls and what came of them, as the template can say them."""
        if not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            return messages
        if self.call_format.told:
            return _in_words(messages)
        return [{"tool_call_id": "call00001", **m} if m["role"] == "tool" else m for m in messages]

    def encode_demonstration(self, context: Sequence[int], text: str, *, split: bool = True) -> list[int]:
        """Tokens of a reply that the policy learns to write, as the template writes an assistant's last turn: behind an
        empty thought where the template puts one there and the reply has none of its own (Qwen3), or behind a space
        (DeepSeek V2).
        """
        begins = self._reply_prefix
        if (
            not begins
            or (begins.strip() and begins.strip() in text)
            or (THOUGHT_ENDS in begins and THOUGHT_ENDS in text)
        ):
            return self.encode_reply(context, text, split=split)
        if begins == " ":
            return self.encode_reply(context, text if text[:1].isspace() else f" {text}", split=split)
        head = self._encode_text(begins)
        return head + self.encode_reply([*context, *head], text, split=split)

    def encode_reply(self, context: Sequence[int], text: str, *, split: bool = True) -> list[int]:
        """Tokens of a reply that is shown, as it stands behind others. Some tokenizers (Llama 2's) begin every text
        with a space, which belongs there where the template writes one.
        """
        if self._leads_with_space or not len(context):
            return self.special.encode_text(text, split=split)
        names = {id: name for name, id in self.special.names.items()}
        covered = self.special.cover_control_tokens(text, split=split)
        return self.special.encode_behind(names.get(context[-1], "\n"), covered)

    @cached_property
    def _leads_with_space(self) -> bool:
        """Whether the template writes a space between the mark of the assistant and what it says."""
        return self._written_before_reply == " "

    @cached_property
    def _reply_prefix(self) -> str:
        """What stands there before a demonstration: "<think>\\n\\n</think>\\n\\n", or the space that a tokenizer does not
        add by itself; mostly "".
        """
        if self._leads_with_space:
            said = self.render_opening([USER], remember=False), self._render_tokens([USER, SPOKEN], prompt=False)
            words = self.special.encode_text("x7")
            return "" if said[1][len(said[0]) :][: len(words)] == words else " "
        return self._written_before_reply if self._written_before_reply.strip() else ""

    @cached_property
    def _written_before_reply(self) -> str:
        """Between the mark of the assistant, which ends a prompt, and what it says in the last turn."""
        if self.plain:
            return ""
        try:
            opening = self._render_text([USER], (), prompt=True)
            whole = self._render_text([USER, SPOKEN], ())
        except Exception:  # a template refuses what it does not know by raising whatever it likes
            return ""
        return whole.removeprefix(opening).partition("x7")[0] if whole.startswith(opening) else ""

    @cached_property
    def call_format(self) -> CallFormat:
        """How the policy calls tools."""
        return HERMES if self.plain else read_off(self._render_text)

    @cached_property
    def speaker(self) -> str:
        """Whose words describe tools where the template does not: "system", or "user" where it has none."""
        try:
            has = self.plain or "s7x" in self._render_text([{"role": "system", "content": "s7x"}, USER], ())
        except Exception:  # a template refuses a role by raising whatever it likes
            has = False
        return "system" if has else "user"

    @cached_property
    def turn_end_tokens(self) -> list[int]:
        """What ends an assistant's turn: the common end of two conversations that differ only in
        the assistant's words.
        """
        if self.plain:
            return []
        for pair in ("x7", "ab", "01"):  # a small vocabulary may read two letters as the same unknown token
            one, two = (
                self._render_tokens([USER, {"role": "assistant", "content": letter}], prompt=False) for letter in pair
            )
            if one != two:
                common = sum(1 for _ in takewhile(lambda ends: ends[0] == ends[1], zip(reversed(one), reversed(two))))
                return one[len(one) - common : self._goes_on(one)]
        raise DataError(
            "the chat template writes different answers alike, so the end of a turn cannot be told; look at how it "
            "uses 'content'"
        )

    def _goes_on(self, ended: list[int]) -> int:
        """How much of a rendered conversation stays when another message follows: some
        templates end every text with an end token.
        """
        try:
            alone, followed = (
                self._render_tokens([USER, ASSISTANT], prompt=False),
                self._render_tokens([USER, ASSISTANT, USER]),
            )
        except Exception:  # a template refuses a role order by raising whatever it likes
            return len(ended)
        n = self._shared_prefix(alone, followed)
        return len(ended) if n is None else len(ended) - (len(alone) - n)

    def _shared_prefix(self, prefix: list[int], whole: list[int]) -> int | None:
        """How much of `prefix` the longer conversation begins with, if it is all but an end token."""
        for n in (len(prefix), len(prefix) - (prefix[-1:] == [self.tokenizer.eos_token_id])):
            if whole[:n] == prefix[:n]:
                return n
        return None

    def missing_tail(self, tokens: Sequence[int]) -> list[int]:
        """The part of the tail that `tokens` (a turn as the policy left it) does not already end with."""
        have = next((k for k in range(len(self.turn_end_tokens), 0, -1) if tokens[-k:] == self.turn_end_tokens[:k]), 0)
        return self.turn_end_tokens[have:]

    def _render_tokens(
        self, messages: Sequence[dict[str, Any]], *, prompt: bool = True, tools: Schemas = (), remember: bool = True
    ) -> list[int]:
        render = _render_cached if remember else _render_cached.__wrapped__
        return list(render(self.tokenizer, self.sight, json.dumps(messages), prompt, json.dumps(tools)))

    def _render_text(self, messages: Messages, tools: Schemas, *, prompt: bool = False) -> str:
        more = {"tools": list(tools)} if tools or not prompt else {}
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **more))
        return text if self.sight is None else self.sight.write_media(text, messages, self.tokenizer)

    def _encode_text(self, text: str) -> list[int]:
        return self.special.encode(text)

    def _encode_plain(self, messages: Messages, *, opening: bool) -> list[int]:
        if any(isinstance(m["content"], list) for m in messages):
            raise DataError(
                "images for a tokenizer without a chat template, which alone says where they stand; take an instruct "
                "model"
            )
        return self.special.encode("".join(m["content"] for m in messages), add_special_tokens=opening)


@contextmanager
def _template_errors(messages: Messages) -> Iterator[None]:
    """What a template raises, as the fault of the episode that these messages are from."""
    try:
        yield
    except RondelError:
        raise
    except Exception as error:  # a template refuses by raising whatever it likes
        raise TemplateError(
            f"the chat template refuses messages ({_role_list(messages)}): {type(error).__name__}: {error}"[:1000]
        ) from error


def _role_list(messages: Messages) -> str:
    return ", ".join(str(m.get("role", "?")) for m in messages)


def _build_calling_turn(messages: Messages) -> dict[str, Any]:
    """The assistant's turn that these answers of tools belong to: a template may tell whose answer one is."""
    call = PROBE["tool_calls"][0]
    answers = list(takewhile(lambda m: m["role"] == "tool", messages))
    named = [
        (m.get("tool_call_id", call["id"]), name if NAME.fullmatch(name := str(m.get("name") or "")) else "unknown")
        for m in answers
    ]
    calls = [{**call, "id": id, "function": {**call["function"], "name": name}} for id, name in named]
    return {**PROBE, "tool_calls": calls} if calls else PROBE


def describe_tools(messages: Messages, tools: Schemas, *, speaker: str) -> Messages:
    """For a template that knows no tools: they are described at the head of the conversation."""
    words = TOLD.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0]["role"] == speaker:
        own = messages[0]["content"]
        if isinstance(own, list):
            return [{**messages[0], "content": [{"type": "text", "text": f"{words}\n\n"}, *own]}, *messages[1:]]
        return [
            {**messages[0], "content": f"{own}\n\n{words}" if speaker == "system" else f"{words}\n\n{own}"},
            *messages[1:],
        ]
    return [{"role": speaker, "content": words}, *messages]


def _in_words(messages: Messages) -> Messages:
    """And what tools answered is said by the user, what was asked of them by the assistant."""
    out: Messages = []
    for answers, run in groupby(messages, key=lambda m: m["role"] == "tool"):
        if answers:
            said = [m["content"] for m in run]
            text = "\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in said)
            out.append({"role": "user", "content": _in_parts(said) if any(isinstance(c, list) for c in said) else text})
        else:
            out += map(_with_calls, run)
    return out


def _in_parts(said: list[Any]) -> list[dict[str, Any]]:
    """The same where some answer with images."""
    parts: list[dict[str, Any]] = []
    for content in said:
        own = content if isinstance(content, list) else [{"type": "text", "text": content}]
        parts += [{"type": "text", "text": "<tool_response>\n"}, *own, {"type": "text", "text": "\n</tool_response>\n"}]
    return parts


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or []
    ]
    return (
        {"role": message["role"], "content": "\n".join([message["content"]] * bool(message["content"]) + written)}
        if written
        else message
    )


@lru_cache(maxsize=4096)
def _render_cached(
    tokenizer: Any, sight: ImageProcessorConfig | None, messages: str, prompt: bool, tools: str
) -> tuple[int, ...]:
    """Siblings ask for the same opening; a template is slow enough to render it once."""
    more = {"tools": offered} if (offered := json.loads(tools)) else {}
    plain = json.loads(messages)
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt, **more)
    return tuple(special_tokens(tokenizer).encode(text if sight is None else sight.write_media(text, plain, tokenizer)))
