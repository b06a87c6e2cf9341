"""A conversation as messages: what a client would send to a server that renders every request anew, compared with what
the policy reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rondel.core.errors import EnvError
from rondel.core.types import Drift, Trajectory, Turn
from rondel.generate.calls import read_calls, text_before_calls
from rondel.generate.drift import drift_kind, first_difference

if TYPE_CHECKING:
    from rondel.generate.template import Messages, Schemas, Template

# a message that was given, or tokens and text of what the policy wrote
SentTurn = dict[str, Any] | tuple[Sequence[int], str]


def sent_messages(turns: Sequence[SentTurn], template: Template, *, tools: bool) -> Messages:
    """The messages of a conversation, those of the policy as an API tells them: the text before the first call, and
    the calls."""
    return [turn if isinstance(turn, dict) else _written_message(*turn, template, tools=tools) for turn in turns]


def renders_whole(turns: Sequence[SentTurn]) -> bool:
    """Whether a template can write it: a conversation that begins with a message, and has no images."""
    return (
        bool(turns)
        and isinstance(turns[0], dict)
        and all(isinstance(turn.get("content"), str) for turn in turns if isinstance(turn, dict))
    )


def compare_with_template(
    template: Template, written: Sequence[int], sent: Sequence[SentTurn], tools: Schemas, conversation: Sequence[Turn]
) -> tuple[Drift, list[int]] | None:
    """Where `written` differs from the tokens that the template writes of these messages, and those tokens; None where
    it does not, or where that cannot be said. `conversation` tells the turns of the policy among the written ones.
    """
    if template.plain or not renders_whole(sent):
        return None
    messages = sent_messages(sent, template, tools=bool(tools))
    rendered = template.render_opening(messages, tools, remember=False)
    if (at := first_difference(written, rendered)) is None:
        return None
    text, wanted, before = (
        template.tokenizer.decode(list(t), skip_special_tokens=False) for t in (written, rendered, written[:at])
    )
    turn = sum(turn.written and turn.start <= at for turn in conversation)
    return Drift(drift_kind(text, wanted, len(before), template.call_format), at, turn), rendered


def describe_drift(tokenizer: Any, drift: Drift, written: Sequence[int], rendered: Sequence[int]) -> str:
    """A difference in words, with the remedy."""
    here, there = (
        tokenizer.decode(list(tokens[drift.at : drift.at + 16]), skip_special_tokens=False)
        for tokens in (written, rendered)
    )
    return (
        f"drift ({drift.kind}): from token {drift.at} on, in turn {drift.turn}, the policy's context is {here!r}, and "
        f"the chat template writes {there!r}; task.env.drift = 'branch' goes on from what it writes, 'keep' from what "
        f"was written"
    )


class RenderedChat(Protocol):
    """What is read of a conversation here.

    sent       its messages, as a client would send them
    asked      (tokens, messages) that the last reply answers
    last_turn  tokens of the policy's last turn
    """

    template: Template
    trajectory: Trajectory
    sent: list[SentTurn]
    tools: Schemas
    asked: tuple[int, int]
    last_turn: Sequence[int]


def drift_before(
    chat: RenderedChat, messages: Messages, later: Sequence[int] | None = None
) -> tuple[Drift, list[int]] | None:
    """Where the template would write other tokens of the conversation with these messages behind it, and which.
    `later`: the tokens that would be given for them.
    """
    if later is None:
        later = chat.template.render_after_turn(chat.last_turn, messages)
    written = [*chat.trajectory.tokens, *later]
    return compare_with_template(
        chat.template, written, [*chat.sent, *messages], chat.tools, chat.trajectory.conversation
    )


def find_drift(chat: RenderedChat) -> Drift | None:
    """Where the template would write other tokens than those that the last reply answers."""
    n, known = chat.asked
    if sum(turn.written for turn in chat.trajectory.conversation) < 2 or not n:
        return None
    t = chat.trajectory
    found = compare_with_template(chat.template, t.tokens[:n], chat.sent[:known], chat.tools, t.conversation)
    return None if found is None else found[0]


def branch_tokens(
    chat: RenderedChat, messages: Messages, later: Sequence[int] | None = None, *, policy: str
) -> list[int] | None:
    """The conversation as it is rendered, where that is not what stands there; `policy`: task.env.drift. EnvError where
    it is "refuse".
    """
    if policy == "keep" or (found := drift_before(chat, messages, later)) is None:
        return None
    chat.trajectory.drift, rendered = found
    if policy == "refuse":
        raise EnvError(describe_drift(chat.template.tokenizer, found[0], chat.trajectory.tokens, rendered))
    return rendered


def _written_message(tokens: Sequence[int], text: str, template: Template, *, tools: bool) -> dict[str, Any]:
    raw = template.tokenizer.decode(list(tokens), skip_special_tokens=False) if tools else ""
    calls = read_calls(template.call_format, raw) if tools else []
    if not calls or any(call.fault for call in calls):
        return {"role": "assistant", "content": text}
    listed = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(calls, 1)
    ]
    content = text_before_calls(template.call_format, raw).strip()
    return {"role": "assistant", "content": content, "tool_calls": listed}
