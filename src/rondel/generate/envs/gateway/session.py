"""All that an agent asks with one key: of each request, what goes on from what was said
before, what is new, and what the policy makes of it.

Tokens are never rendered from what the policy wrote, as long as the agent sends it back as it was (law 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from rondel.core.errors import EnvError
from rondel.core.types import Completion
from rondel.generate.calls import text_before_calls
from rondel.generate.chat_apis.chat_request import ChatReply, ChatRequest
from rondel.generate.chat_apis.messages import canonical_messages, key_of
from rondel.generate.envs.chat import TokenChat, split_sources
from rondel.generate.envs.gateway.conversation_tree import AnsweredTurn, ConversationBranch, ConversationTree
from rondel.generate.envs.gateway.errors import TooLong
from rondel.generate.envs.sent_messages import describe_drift, drift_before
from rondel.generate.pictures import (
    TooLarge,
    count_image_tokens,
    load_message_images,
    run_on_image_thread,
    split_images,
)
from rondel.generate.template import Messages
from rondel.system.http.response import RequestRefusal
from rondel.text.tokenization import decode_answer


class GatewaySession:
    """`chat` is the episode's own, which every branch begins as a copy of. `fault` is the
    engine's: no agent can be blamed for it.
    """

    def __init__(self, chat: TokenChat) -> None:
        self.chat, self.forest = chat, ConversationTree(chat)
        self.fault: Exception | None = None
        self.full = self.closed = False
        self.stored: dict[str, Messages] = {}  # by a response's id, what it ended
        self._asked = self._called = 0
        self._work: set[asyncio.Task[Any]] = set()

    def start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """As a task that ends with the session."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def generate_replies(self, asked: ChatRequest) -> list[ChatReply]:
        """One, or n branches from the same place."""
        (replies,) = await self.generate_families([asked])
        return replies

    async def generate_families(self, asked: list[ChatRequest]) -> list[list[ChatReply]]:
        """The replies to each. If one of them fails, or the agent leaves, none is kept waiting, and none is kept: what
        nobody has read is no part of the episode.
        """
        together = asyncio.Barrier(sum(one.n for one in asked))
        tasks = [self.start_task(self._generate_reply(one, together)) for one in asked for _ in range(one.n)]
        try:
            replies = iter(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return [list(islice(replies, one.n)) for one in asked]

    async def count_tokens(self, messages: Messages, tools: list[dict[str, Any]]) -> int:
        """Tokens of a conversation that begins with these."""
        messages, sight = self.chat.whole_opening(canonical_messages(messages)), self.chat.sight
        with _encoding_errors():
            if sight is not None and sight.tiles is not None:  # the text says how they are cut
                messages = await load_message_images(messages, sight, self.chat.max_context)
            plain, sources = split_images(messages)
            tokens = self.chat.template.render_opening(plain, tools)
            if sight is None or not sources:
                return len(tokens)
            shown = sum(token in sight.placeholders for token in tokens)
            return len(tokens) + sum(await run_on_image_thread(count_image_tokens, sources, sight)) - shown

    async def close(self) -> None:
        """Whatever is still asked for is given up."""
        self.closed = True
        work = list(self._work)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    async def _generate_reply(self, asked: ChatRequest, together: asyncio.Barrier) -> ChatReply:
        messages, said = _messages_and_keys(asked.said)
        branch = self.forest.open_branch(said, asked.tools, lambda found: self._drifts(found, messages))
        branch.busy = True
        try:
            reply = await self._answer_turn(branch.chat, branch.turns, messages, said, asked)
            await together.wait()
        except BaseException as error:
            full = isinstance(error, TooLong)
            self.full = self.full or full
            self.forest.undo_turn(branch, "length" if full else None)
            raise
        finally:
            branch.busy = False
        if messages:
            branch.said = [*said, key_of(canonical_messages([reply.assistant_message])[0])]
        else:
            branch.said = said + reply.text if isinstance(said, str) else list(branch.chat.trajectory.tokens)
        branch.turns = [*branch.turns, AnsweredTurn(len(branch.said), branch.chat.turn_mark, reply.stopped)]
        return reply

    def _drifts(self, branch: ConversationBranch, messages: Messages) -> bool:
        """Whether the agent is to be answered behind what a server would render of its messages."""
        later, policy = messages[branch.turns[-1].length :], self.chat.episode.drift
        if policy == "keep" or not later or any(not isinstance(m["content"], str) for m in later):
            return False
        chat = branch.chat
        with _encoding_errors():
            found = drift_before(chat, later, split_sources)
        if found is None:
            return False
        chat.trajectory.drift = found.drift
        if policy == "refuse":
            self.fault = self.fault or EnvError(describe_drift(chat, found))
            raise RequestRefusal(500, str(self.fault)) from self.fault
        return True

    async def _answer_turn(
        self, chat: TokenChat, turns: list[AnsweredTurn], messages: Messages, said: Any, asked: ChatRequest
    ) -> ChatReply:
        """Gives what is new, and lets the policy write."""
        known = turns[-1].length if turns else 0
        number, self._asked = self._asked, self._asked + 1
        own, s = self.chat, self.chat.sampling
        limit = min(s.max_tokens, asked.max_tokens or s.max_tokens)
        chat.key = lambda _: own.key(number)  # no two replies of an episode are drawn with the same noise
        chat.sampling = replace(s, max_tokens=limit, min_tokens=min(s.min_tokens, limit), stop=(*s.stop, *asked.stop))
        try:
            with _encoding_errors():
                if messages:
                    chat.give(await load_message_images(messages[known:], chat.sight, chat.max_context), asked.tools)
                else:
                    chat.give_tokens(self._encode_text(said[known:], turns))
        except TooLarge as error:
            raise TooLong(chat.max_context) from error
        if chat.is_full:
            raise TooLong(chat.max_context)
        prompt = len(chat.trajectory.tokens)
        try:
            done = await chat.reply()
        except Exception as error:
            self.fault = self.fault or error
            raise RequestRefusal(500, f"the engine could not serve this: {error}") from error
        return await self._read_completion(done, chat, asked, prompt)

    def _encode_text(self, said: str | list[int], turns: list[AnsweredTurn]) -> list[int]:
        """New text as tokens. An agent that stops at a string writes that string again;
        the policy has written it already.
        """
        if isinstance(said, list):
            return said
        said = said.removeprefix(turns[-1].tail) if turns else said
        return self.chat.template.special.encode_text(said, add_special_tokens=not turns)

    async def _read_completion(self, done: Completion, chat: TokenChat, asked: ChatRequest, prompt: int) -> ChatReply:
        """Tokens as an API tells them: text before the first call, and the calls. One that cannot be read is text."""
        tokenizer = chat.tokenizer
        whole = await decode_answer(tokenizer, done.tokens)
        text = done.text if done.text is not None else whole
        stopped = (
            next((s for s in asked.stop if s in whole and s not in text), "") if done.finish_reason == "stop" else ""
        )
        calls = await chat.calls(done) if asked.tools and asked.calls and done.finish_reason == "stop" else []
        if not calls or any(call.fault for call in calls):
            return ChatReply(text, [], done, prompt, stopped)
        raw = await decode_answer(tokenizer, done.tokens, skip_special_tokens=False)
        text = text_before_calls(chat.template.call_format, raw).strip()
        named = []
        for call in calls if asked.parallel else calls[:1]:
            self._called += 1
            named.append((f"call_{self._called:06d}", call.name, call.arguments))
        return ChatReply(text, named, done, prompt, stopped)


@contextmanager
def _encoding_errors() -> Iterator[None]:
    """What cannot be written as tokens is the request's fault."""
    try:
        yield
    except TooLarge:
        raise
    except Exception as error:  # a template refuses what it cannot write by raising whatever it likes
        raise RequestRefusal(400, f"these messages cannot be written as tokens: {error}") from error


def _messages_and_keys(said: Messages | str | list[int]) -> tuple[Messages, Any]:
    """-> the messages to render, if it is messages, and what tells it from others."""
    if isinstance(said, list) and said and isinstance(said[0], dict):
        messages = canonical_messages(said)
        return messages, [key_of(message) for message in messages]
    return [], said
