"""A conversation with the policy. Its token buffer is the only truth (law 5);
messages are a view that is rendered once.

give ──> opening            mask 0 │ first time: the whole prompt
reply ─> the policy's turn  mask 1 │ exactly the tokens that were sampled, never decoded and encoded again
give ──> rest of the tail   mask 0 │ "<|im_end|>\\n", as far as the policy did not write it itself
         later messages     mask 0 │ cut from behind a dummy conversation
reply ─> ...
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rondel.core.clocks import now
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import DataError, EnvError
from rondel.core.media import ImagePlaceholder, ImageProcessorConfig, message_text
from rondel.core.types import (
    POLICY,
    Completion,
    Drift,
    FinishReason,
    Request,
    Sampling,
    Trajectory,
    Turn,
    earliest_routes,
)
from rondel.generate.calls import THOUGHT_ENDS, ToolCall, read_calls
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.sent_messages import SentTurn, find_drift, rendered_branch, sent_messages
from rondel.generate.pictures import place_images
from rondel.generate.template import Messages, Schemas, Template
from rondel.generate.video import process_media, split_media
from rondel.system.loop_turns import TURN_TOKENS, take_loop_turn
from rondel.text.tokenization import LONG, beside_loop, decode_answer
from rondel.text.unicode import valid_unicode


@dataclass(frozen=True, slots=True)
class ConversationMark:
    """Where a conversation stood after a turn of the policy: its tokens, characters and
    turns, where this one began, how it ended.
    """

    tokens: int = 0
    text: int = 0
    turn: int = 0
    began: int = 0
    finish_reason: FinishReason = "stop"
    messages: int = 0


START = ConversationMark()
THOUGHT_BEGINS, THOUGHT_TOKENS = "<think>", 16  # which the last tokens before a reply may spell
TURNS = 1 << 20  # more than one conversation has
BESIDE = 1 << 20  # more conversations than are opened beside one


@dataclass(slots=True, eq=False)
class ConversationNumber:
    """Which conversation of its episode: 0 the first, 1 and 2 those beside it, BESIDE + 1 and BESIDE + 2 those beside
    the one with number 1. So it does not depend on who else opens one meanwhile. Copies share it.
    """

    number: int = 0
    opened: int = 0

    def open_beside(self) -> ConversationNumber:
        self.opened += 1
        return ConversationNumber(self.number * BESIDE + self.opened)


class TokenChat:
    """One trajectory being written: `chat.give(messages)`, `await chat.reply()`, again.

    generate     the engine's verb: Request -> Completion
    key          turn -> 128-bit key of that turn's noise
    max_context  tokens the model can hold; a turn gets what is left of it, at most sampling.max_tokens
    system       a system message for prompts that bring none
    sight        how the model looks at images; None for one that reads text alone
    cast         {agent: policy}: whose weights write for whom; the policy's own for everyone else
    episode      what the conversations of one episode share: its budget, and what follows from drift
    stop_ids     tokens at which the model's answers end

    Who speaks is `trajectory.agent`, and is named before the first reply:
    `chat.trajectory.agent = "writer"`, `chat.beside("critic")`.

    A turn may end without the template's end of turn: cut by length, aborted, or
    closed by another end token. The missing tokens are then *given* (mask 0) before the
    next message, so the conversation stays
    well-formed and nothing that the policy did not sample is trained. When a later message or turn no longer fits into
    max_context nothing is appended, and `reply` returns an empty completion with finish_reason "length"; so it does
    where the episode's budget is used up.

    `closed` are trajectories of this conversation that ended where the template would have written it otherwise
    (drift = "branch"), or where it was compacted; `trajectory` is always the one that goes on.
    """

    def __init__(
        self,
        tokenizer: Any,
        generate: Callable[[Request], Awaitable[Completion]],
        *,
        sampling: Sampling,
        key: Callable[[int], int],
        max_context: int,
        policy: str = POLICY,
        system: str | None = None,
        sight: ImageProcessorConfig | None = None,
        cast: Mapping[str, str] | None = None,
        episode: EpisodeState | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.template, self.generate = tokenizer, Template(tokenizer, sight), generate
        self.sampling, self.key, self.max_context, self.system = sampling, key, max_context, system
        self._root_key, self._place = key, ConversationNumber()  # the key is that of the episode's first conversation
        self.sight, self.cast = sight, cast or {}
        self.trajectory, self.closed = Trajectory(policy=policy), list[Trajectory]()
        self.episode, self.stop_ids = episode or EpisodeState(), stop_ids
        self.sent = list[SentTurn]()  # the same as messages, for what a server would make of them
        self.tools: Schemas = ()
        self.group_key: int | None = None  # of noise that the answers of one group may share; None: it is no one's
        self.start_key: int | None = None  # of the noise that a flow begins with; None: its own
        # whether its first messages hold what others wrote: too much of that is no fault of the data
        self.others = False
        self.turn = 0
        self._open = False  # a prompt waits for its reply
        self._full = False
        self._commands = 0
        self.last_turn: Sequence[int] = []
        self._opening: Messages | None = []  # what the next messages stand behind, where they begin a trajectory
        self.asked = (0, 0)  # tokens and messages that the last reply answers

    def give(self, messages: Messages, tools: Schemas = ()) -> None:
        """Render once, append, mask 0. `tools` are offered with the first messages, once for the whole conversation.

        Whoever wrote them, they come in here: as valid text, in which control tokens are
        only spelled (text/tokenization.py).
        """
        if self._open:
            raise EnvError("give() twice without a reply() between: hand over all messages in one call")
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise EnvError(
                f"give({messages!r:.40}): it takes messages, as in give([{{'role': 'user', 'content': 'text'}}])"
            )
        self._open = True
        messages, tools = valid_unicode(messages), valid_unicode(tools)
        if self._opening is not None:
            self._give_opening(messages, tools)
            return
        try:
            plain, sources = split_sources(messages, self.sight)
        except DataError as error:  # what came in the middle of an episode is its world's, and no fault of the data
            raise EnvError(str(error)) from error
        later = self.template.render_after_turn(self.last_turn, plain)
        if (found := rendered_branch(self, messages, split_sources, later, policy=self.episode.drift)) is not None:
            self._close_trajectory()
            self.sent += messages
            self._append_tokens(found.tokens, found.sources)
            record_turns(self.trajectory, messages)
            return
        self._append_tokens(later, sources)
        if not self._full:
            self.sent += messages
            record_turns(self.trajectory, messages)

    def _give_opening(self, messages: Messages, tools: Schemas) -> None:
        """The first messages of a trajectory, rendered whole."""
        first, new = self.turn == 0, messages
        messages, self._opening = _behind(self._opening or [], messages), None
        own = self._with_system(messages)
        messages = self.whole_opening(messages) if first else own
        self.sent, self.tools = [], tools or self.tools
        plain, sources = split_sources(messages, self.sight)
        tokens = self.template.render_opening(plain, self.tools)
        if first:
            tokens, media = images_in(tokens, sources, self.sight)
            self.trajectory.extend(tokens, media=media)
            self.sent += messages
            record_turns(self.trajectory, own)
            return
        self.sent += messages
        self._append_tokens(tokens, sources)
        record_turns(self.trajectory, new)

    def whole_opening(self, messages: Messages) -> Messages:
        """What a conversation that begins with these messages is rendered from: the system's message stands before
        them, and the shots."""
        messages = self._with_system(messages)
        at = sum(m.get("role") == "system" for m in messages[:1])
        return [*messages[:at], *self.episode.shots.get(self.trajectory.agent, ()), *messages[at:]]

    def _with_system(self, messages: Messages) -> Messages:
        if self.system is None or any(m.get("role") == "system" for m in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def give_tokens(self, tokens: list[int]) -> None:
        """The same for what is text alone, without roles and without a template."""
        self._open, self._opening = True, None
        self._append_tokens(tokens)
        if not self._full:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            self.sent.append((tokens, ""))
            record_turns(self.trajectory, [{"role": "user", "content": text}])

    def _append_tokens(self, tokens: list[int], sources: Sequence[Any] = ()) -> None:
        try:
            tokens, media = images_in(tokens, list(sources), self.sight)
        except DataError as error:  # what came in the middle of an episode is its world's, and no fault of the data
            raise EnvError(str(error)) from error
        self._full = self._full or len(tokens) >= self._remaining_tokens
        if not self._full:
            self.trajectory.extend(tokens, media=media)

    async def reply(self) -> Completion:
        """The policy writes one turn, mask 1."""
        self._check_turn()
        if self not in self.episode.chats:
            self.episode.chats.append(self)
        budget = self.episode.budget
        if budget is not None and not budget.has_room():
            self._open, self.trajectory.finish_reason = False, "length"
            return Completion.empty("length", len(self.trajectory.tokens))
        if self._full or self._remaining_tokens <= 0:
            self._full, self._open, self.trajectory.finish_reason = True, False, "length"
            return Completion.empty("length", len(self.trajectory.tokens))
        name_speaker(self.trajectory, self.cast)
        limit = min(self.sampling.max_tokens, self._remaining_tokens)
        limit = limit if budget is None else budget.limit_tokens(limit)
        sampling = replace(self.sampling, max_tokens=limit, min_tokens=min(self.sampling.min_tokens, limit))
        tokens = self.trajectory.tokens.copy()
        self.asked = (len(tokens), len(self.sent))
        began, key = now(), self.key(self.turn)
        media = tuple(self.trajectory.media)
        with self.episode.watched_turn(self, key):
            request = Request(tokens, sampling, key=key, policy=self.trajectory.policy, media=media)
            request.start_key = self.start_key
            done = await self.generate(request)
        took = now() - began
        if done.text is None:  # before its tokens are there twice
            done.text = await decode_answer(self.tokenizer, done.tokens)
        await extend_in_pieces(self.trajectory, done)
        self.trajectory.laps.append(("chat", began, took, len(tokens), len(done.tokens)))
        # of the whole stream: every turn's request carries all tokens so far
        self.trajectory.experts = earliest_routes(self.trajectory.experts, done.experts)
        for what, seconds in done.timings.items():
            self.trajectory.timings[what] = self.trajectory.timings.get(what, 0.0) + seconds
        self._close_turn(done.tokens, done.text)
        self.trajectory.finish_reason = done.finish_reason
        self.episode.end_turn(self)
        if budget is not None:
            budget.spend(len(done.tokens), cut=done.finish_reason == "length")
        return done

    async def compact(self, prompt: str, *, keep: int = 0) -> Completion:
        """The policy is asked for a summary, and the conversation goes on from [system, summary, last `keep`
        messages] in a trajectory of its own. What was written so far, the summary with it, is trained with the score
        of the episode.

        keep   1 keeps the turn of the policy, whose calls are answered next
        A summary for which there is no room is empty, and changes nothing.
        """
        messages = sent_messages(self.sent, self.template, tools=self.tools)
        system = [m for m in messages[:1] if m["role"] == "system"]
        kept = messages[len(system) :][-keep:] if keep else []
        self.give([{"role": "user", "content": prompt}])
        done = await self.reply()
        if not done.tokens:
            return done
        summary = (done.text or "").rpartition(THOUGHT_ENDS)[2].strip()
        self.trajectory.drift = self.trajectory.drift or self.find_drift()
        self._close_trajectory()
        self._opening = _behind([*system, {"role": "user", "content": summary}], kept)
        return done

    def find_drift(self) -> Drift | None:
        """Where the template would write other tokens than those that the last reply answers,
        from the second reply on."""
        return find_drift(self, split_sources) if self.turn > 1 else None

    def _close_trajectory(self) -> None:
        """What was read and written so far is set aside, and the same object goes on empty: with all that was said."""
        t = self.trajectory
        values = {f.name: getattr(t, f.name) for f in fields(t)}
        self.closed.append(Trajectory(**{**values, "conversation": list(t.conversation)}))
        fresh = Trajectory(policy=t.policy, agent=t.agent, text=t.text)
        fresh.conversation = [turn._replace(start=0, end=0) for turn in t.conversation]
        for name in values:
            setattr(t, name, getattr(fresh, name))
        self.asked = (0, 0)

    async def calls(self, done: Completion) -> list[ToolCall]:
        """The tools that a reply asks for, as the template writes calls; what it only thought of is not asked for."""
        said = await decode_answer(self.tokenizer, done.tokens, skip_special_tokens=False)
        form = self.template.call_format
        given = (form, said, self.tools)
        return await beside_loop(read_calls, *given) if len(done.tokens) > LONG else read_calls(*given)

    def write(
        self,
        text: str,
        *,
        version: int = 0,
        split_special_tokens: bool = True,
        trained: bool = True,
        steps: ContinuousSteps | None = None,
    ) -> None:
        """Put words into the policy's mouth, for supervised phases: mask 1, logprob 0, then `end_token`. `trained`: the
        policy learns from it, and does not only read it as an earlier turn.

        What does not fit into max_context is cut, with finish_reason "length", as it would be for the policy itself.
        Control tokens that the text spells are text, or with split_special_tokens = False tokens. Of a policy that
        draws points: `steps`, which are not cut, and no text.
        """
        self._check_turn()
        text, end, context = valid_unicode(text), self.end_token, self.trajectory.tokens
        if steps is None:
            encode = self.template.encode_demonstration if trained else self.template.encode_reply
            tokens = encode(context, text, split=split_special_tokens)
            tokens += [] if end is None else [end]
        elif (n := len(steps)) <= self._remaining_tokens:
            tokens = list(range(n))
        else:
            raise DataError(
                f"{n} steps behind {len(self.trajectory.tokens)} tokens: the context holds {self.max_context}"
            )
        kept = [] if self._full else tokens[: max(0, self._remaining_tokens)]
        self.trajectory.extend(kept, logprobs=[0.0] * len(kept), versions=[version] * len(kept), steps=steps)
        self._close_turn(kept, text)
        self.trajectory.finish_reason = "stop" if len(kept) == len(tokens) else "length"

    @property
    def end_token(self) -> int | None:
        """What ends a turn that is shown: the mark that the template ends it with, where answers end there, as Gemma's
        <end_of_turn>; else the tokenizer's end token.
        """
        own = self.tokenizer.eos_token_id
        if self.template.plain or not set(self.stop_ids) - {own}:
            return own  # type: ignore[no-any-return]
        try:
            mark = self.template.turn_end_tokens[:1]
        except Exception:  # a template of a model that looks may refuse a content that is a text, by whatever it likes
            return own  # type: ignore[no-any-return]
        return mark[0] if mark and mark[0] in self.stop_ids else own

    def refuse_open_thought(self, context: Sequence[int], text: str) -> None:
        """DataError where the template has begun a thought that a shown reply does not end: it would teach the policy
        to answer within its thought. `context`: the tokens that the reply stands behind.
        """
        opening = self.tokenizer.decode(list(context[-THOUGHT_TOKENS:]), skip_special_tokens=False)
        if self.template.plain or THOUGHT_ENDS in text or not opening.rstrip().endswith(THOUGHT_BEGINS):
            return
        raise DataError(
            f"the chat template begins a thought with {THOUGHT_BEGINS}, and the reply to show, {text!r:.60}, does not "
            f"end it: the policy would learn to answer within its thought. Begin what is shown with its end, "
            f"'{THOUGHT_ENDS}' or a thought and '{THOUGHT_ENDS}', or give the model a template that begins none"
        )

    def log_command(self, command: Any, *, exit: int, folder: str) -> None:
        """The environment ran a command in its sandbox: its exit code, and a digest of the working folder behind it.
        To be called before the policy reads what came of it. EnvError where the episode was interrupted, and the
        same command ended otherwise before.
        """
        n, self._commands = self._commands, self._commands + 1
        if self.episode.commands is not None:
            self.episode.commands.record(self.key(0), n, command, exit=exit, folder=folder)

    def spend(self, cost: float) -> None:
        """What a call of a remote model cost, for task.env.budget.cost."""
        if self.episode.budget is not None:
            self.episode.budget.used_cost += cost

    @property
    def is_full(self) -> bool:
        """Whether what was given last leaves no room for an answer."""
        budget = self.episode.budget
        return self._full or self._remaining_tokens <= 0 or (budget is not None and not budget.has_room())

    @property
    def turn_mark(self) -> ConversationMark:
        """Of the turn that the policy has just written."""
        n = len(self.trajectory.tokens)
        t = self.trajectory
        return ConversationMark(
            n, len(t.text), self.turn, n - len(self.last_turn), t.finish_reason, len(t.conversation)
        )

    def beside(self, agent: str = "") -> TokenChat:
        """An empty conversation of the same episode, with noise of its own, whichever conversation it is beside: for
        another agent, by the weights that play it.
        """
        root, twin = self._root_key, self.fork()
        twin._place = self._place.open_beside()
        first = twin._place.number * TURNS
        twin.key = lambda turn: root(first + turn)
        twin.trajectory.agent = agent
        return twin

    def fork(self, mark: ConversationMark = START) -> TokenChat:
        """Another conversation with the same first turns: tokens, and all that is
        recorded of them, are copied as they are.
        """
        t, n = self.trajectory, mark.tokens
        twin = TokenChat(
            self.tokenizer,
            self.generate,
            sampling=self.sampling,
            key=self.key,
            max_context=self.max_context,
            system=self.system,
            sight=self.sight,
            cast=self.cast,
            episode=self.episode,
            stop_ids=self.stop_ids,
        )
        twin.template = self.template  # what it has found out about its tokenizer
        twin._root_key, twin._place = self._root_key, self._place
        twin.trajectory = Trajectory(
            tokens=t.tokens[:n],
            mask=t.mask[:n],
            logprobs=t.logprobs[:n],
            versions=t.versions[:n],
            experts=None if t.experts is None or not n else t.experts[: n - 1],
            support=None if t.support is None else t.support[:n],
            behavior_top=None if t.behavior_top is None else t.behavior_top[:n],
            steps=None if t.steps is None else t.steps[: sum(t.mask[:n])],
            media=[place for place in t.media if place.end <= n],
            policy=t.policy,
            agent=t.agent,
            finish_reason=mark.finish_reason,
            text=t.text[: mark.text],
            conversation=t.conversation[: mark.messages],
        )
        twin.turn, twin.last_turn = mark.turn, t.tokens[mark.began : n]
        if n:
            before = len(self.sent) - len(t.conversation)  # shots are sent, and not of the conversation
            twin.sent, twin.tools, twin._opening = self.sent[: before + mark.messages], self.tools, None
        return twin

    @property
    def _remaining_tokens(self) -> int:
        return self.max_context - len(self.trajectory.tokens)

    def _check_turn(self) -> None:
        if not self._open:
            raise EnvError("the policy's turn without a give() before it: it would go on behind its own end of turn")
        if self.turn == 0 and self._remaining_tokens <= 0 and not self.others:
            raise DataError(
                f"a prompt of {len(self.trajectory.tokens)} tokens leaves no room for an answer: the context holds "
                f"{self.max_context}; "
                "shorten or drop this task, or raise the context length"
            )

    def _close_turn(self, tokens: Sequence[int], text: str) -> None:
        """A turn of the policy is over. Turns are joined by a line break, so that a number at an end does not grow."""
        self.trajectory.text += ("\n" if self.turn else "") + text
        n = len(self.trajectory.tokens)
        self.sent.append((tokens, text))
        self.trajectory.conversation.append(Turn("assistant", text, n - len(tokens), n, True))
        self.last_turn, self._open, self.turn = tokens, False, self.turn + 1


def _behind(opening: Messages, messages: Messages) -> Messages:
    """Messages that follow others; two of the user are one, as templates want turns to be taken."""
    if not opening or not messages:
        return [*opening, *messages]
    last, first = opening[-1], messages[0]
    if not all(m["role"] == "user" and isinstance(m["content"], str) for m in (last, first)):
        return [*opening, *messages]
    return [*opening[:-1], {**first, "content": f"{last['content']}\n\n{first['content']}"}, *messages[1:]]


def name_speaker(trajectory: Trajectory, cast: Mapping[str, str]) -> None:
    """The weights that write are those of the agent, from its first turn on."""
    if not cast:
        return
    t, plays = trajectory, cast.get(trajectory.agent, POLICY)
    if t.policy != plays and t.written:
        raise DataError(
            f"agent '{t.agent}' is played by '{plays}', and '{t.policy}' has written its first turn: name it before "
            f"it speaks, "
            f'chat.beside("{t.agent}") or chat.trajectory.agent = "{t.agent}"'
        )
    t.policy = plays


def record_turns(trajectory: Trajectory, messages: Messages) -> None:
    """What was just given, as rewards read it. The template writes all messages at once, so only their common end is a
    place.
    """
    known, end = trajectory.conversation, len(trajectory.tokens)
    for message in messages:
        calls = "".join(
            f"\n{json.dumps(call, ensure_ascii=False, default=str)}" for call in message.get("tool_calls") or ()
        )
        content = message.get("content") or ""
        text = content if isinstance(content, str) else message_text(content)
        known.append(Turn(str(message.get("role", "user")), text + calls, known[-1].end if known else 0, end))


async def extend_in_pieces(trajectory: Trajectory, done: Completion) -> None:
    """An answer into the trajectory, in passes of the event loop that are short however many tokens it has, and however
    many answers come at once.
    """
    for at in range(0, len(done.tokens) or 1, TURN_TOKENS):
        if len(done.tokens) > LONG:
            await take_loop_turn()
        part = slice(at, at + TURN_TOKENS)
        trajectory.extend(
            done.tokens[part],
            logprobs=done.logprobs[part],
            versions=done.versions[part],
            support=None if done.support is None else done.support[part],
            behavior_top=None if done.behavior_top is None else done.behavior_top[part],
            steps=None if done.steps is None else done.steps[part],
        )


def split_sources(messages: Messages, sight: ImageProcessorConfig | None) -> tuple[Messages, list[Any]]:
    """Messages with a placeholder for each image, and the images. DataError where the model reads text alone."""
    if all(isinstance(m.get("content"), str) for m in messages):
        return messages, []
    plain, sources = split_media(messages, sight)
    if sources and sight is None:
        raise DataError(
            f"{len(sources)} images in a conversation with a model that reads text alone: take a vision-language "
            f"model, or leave them out"
        )
    return plain, sources


def images_in(
    tokens: list[int], sources: list[Any], sight: ImageProcessorConfig | None
) -> tuple[list[int], list[ImagePlaceholder]]:
    """Tokens with room for each image, and where they lie."""
    if sight is None:
        return tokens, []
    return place_images(tokens, process_media(sources, sight), sight)
