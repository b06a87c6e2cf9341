"""A conversation as messages: what a client would send to a server that renders every request anew, compared with what
the policy reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rondel.core.errors import EnvError
from rondel.core.types import Drift, Trajectory, Turn
from rondel.generate.calls import read_calls, text_before_calls
from rondel.generate.drift import drift_kind, first_difference

if TYPE_CHECKING:
    from rondel.core.media import ImagePlaceholder, ImageProcessorConfig
    from rondel.generate.template import Messages, Schemas, Template

# a message that was given, or tokens and text of what the policy wrote
SentTurn = dict[str, Any] | tuple[Sequence[int], str]
# messages, and how a model sees images -> the messages with a placeholder for each image, and the images
SplitImages = Callable[["Messages", "ImageProcessorConfig | None"], "tuple[Messages, list[Any]]"]


def sent_messages(turns: Sequence[SentTurn], template: Template, *, tools: Schemas) -> Messages:
    """The messages of a conversation, those of the policy as an API tells them: the text before the first call, and
    the calls."""
    return [turn if isinstance(turn, dict) else _written_message(*turn, template, tools=tools) for turn in turns]


class AnotherRendering(NamedTuple):
    """Where a conversation differs from what its template writes now: that, as tokens with one placeholder an image,
    and the images in order.
    """

    drift: Drift
    tokens: list[int]
    sources: list[Any]


def compare_with_template(
    template: Template,
    written: Sequence[int],
    sent: Sequence[SentTurn],
    tools: Schemas,
    conversation: Sequence[Turn],
    *,
    split: SplitImages,
    sight: ImageProcessorConfig | None = None,
    media: Sequence[ImagePlaceholder] = (),
) -> AnotherRendering | None:
    """How the template writes these messages, where that is not `written`; None where it is, or where that cannot be
    said. `conversation` tells the turns of the policy among the written ones, `media` where its images lie.
    """
    if template.plain or not sent or not isinstance(sent[0], dict):
        return None
    messages, sources = split(sent_messages(sent, template, tools=tools), sight)
    rendered = template.render_opening(messages, tools, remember=False)
    short = one_token_an_image(written, media)
    if (at := first_difference(short, rendered)) is None:
        return None
    text, wanted, before = (
        template.tokenizer.decode(list(t), skip_special_tokens=False) for t in (short, rendered, short[:at])
    )
    for place in media:
        at += place.image.tokens - 1 if place.start < at else 0
    turn = sum(turn.written and turn.start <= at for turn in conversation)
    kind = drift_kind(text, wanted, len(before), template.call_format)
    return AnotherRendering(Drift(kind, at, turn), rendered, sources)


def one_token_an_image(tokens: Sequence[int], media: Sequence[ImagePlaceholder]) -> Sequence[int]:
    """Tokens with room for each image -> with one placeholder each, as a template writes them."""
    if not media:
        return tokens
    out, done = list[int](), 0
    for place in media:
        out += tokens[done : place.start + 1]
        done = place.end
    return [*out, *tokens[done:]]


def describe_drift(chat: RenderedChat, found: AnotherRendering) -> str:
    """A difference in words, with the remedy."""
    drift, t = found.drift, chat.trajectory
    before = len(one_token_an_image(t.tokens[: drift.at], [p for p in t.media if p.end <= drift.at]))
    here, there = (
        chat.template.tokenizer.decode(list(tokens[at : at + 16]), skip_special_tokens=False)
        for tokens, at in ((t.tokens, drift.at), (found.tokens, before))
    )
    return (
        f"drift ({drift.kind}): from token {drift.at} on, in turn {drift.turn}, the policy's context is {here!r}, and "
        f"the chat template writes {there!r}; task.env.drift = 'branch' goes on from what it writes, 'keep' from what "
        f"was written"
    )


class RenderedChat(Protocol):
    """What is read of a conversation here.

    sent       its messages, as a client would send them
    sight      how its model sees images
    asked      (tokens, messages) that the last reply answers
    last_turn  tokens of the policy's last turn
    """

    template: Template
    trajectory: Trajectory
    sent: list[SentTurn]
    tools: Schemas
    asked: tuple[int, int]
    last_turn: Sequence[int]
    sight: ImageProcessorConfig | None


def drift_before(
    chat: RenderedChat, messages: Messages, split: SplitImages, later: Sequence[int] | None = None
) -> AnotherRendering | None:
    """How the template would write the conversation with these messages behind it, where otherwise. `later`: the tokens
    that would be given for them, with one placeholder an image.
    """
    if later is None:
        later = chat.template.render_after_turn(chat.last_turn, split(messages, chat.sight)[0])
    t = chat.trajectory
    return compare_with_template(
        chat.template, [*t.tokens, *later], [*chat.sent, *messages], chat.tools, t.conversation,
        split=split, sight=chat.sight, media=t.media,
    )  # fmt: skip


def find_drift(chat: RenderedChat, split: SplitImages) -> Drift | None:
    """Where the template would write other tokens than those that the last reply answers."""
    n, known = chat.asked
    if sum(turn.written for turn in chat.trajectory.conversation) < 2 or not n:
        return None
    t = chat.trajectory
    media = [place for place in t.media if place.end <= n]
    found = compare_with_template(
        chat.template, t.tokens[:n], chat.sent[:known], chat.tools, t.conversation,
        split=split, sight=chat.sight, media=media,
    )  # fmt: skip
    return None if found is None else found.drift


def rendered_branch(
    chat: RenderedChat, messages: Messages, split: SplitImages, later: Sequence[int] | None = None, *, policy: str
) -> AnotherRendering | None:
    """The conversation as it is rendered, where that is not what stands there; `policy`: task.env.drift. EnvError where
    it is "refuse".
    """
    if policy == "keep" or (found := drift_before(chat, messages, split, later)) is None:
        return None
    chat.trajectory.drift = found.drift
    if policy == "refuse":
        raise EnvError(describe_drift(chat, found))
    return found


def _written_message(tokens: Sequence[int], text: str, template: Template, *, tools: Schemas) -> dict[str, Any]:
    raw = template.tokenizer.decode(list(tokens), skip_special_tokens=False) if tools else ""
    calls = read_calls(template.call_format, raw, tools) if tools else []
    if not calls or any(call.fault for call in calls):
        return {"role": "assistant", "content": text}
    listed = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(calls, 1)
    ]
    content = text_before_calls(template.call_format, raw).strip()
    return {"role": "assistant", "content": content, "tool_calls": listed}
