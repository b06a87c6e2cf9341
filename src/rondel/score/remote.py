"""A reward behind an address of the user's: one POST a trajectory, or one for several."""

from __future__ import annotations

from typing import Any

from rondel.core.errors import ConfigError, RewardError
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score.batch import Batcher
from rondel.score.http import Post
from rondel.score.result import read_score


class RemoteReward:
    """What the server returns: a number, or {"reward": x, "parts": {...}}. Anything
    else, null and NaN among it, is `Failed`.

    POST   {"task": {"id": ..., "env": ..., "data": {...}}, "text": "...", "finish_reason": "stop", "messages": [...]},
           with `tokens` also "tokens" and "mask"; a message has "role", "content" and, if
           it is the policy's, "written": true
    batch  above 1 the body is {"items": [such objects]} and the reply a list, or {"rewards":
           [...]}, of as many, in that order
    """

    def __init__(
        self,
        *,
        url: str,
        key_env: str = "",
        tokens: bool = False,
        batch: int = 1,
        together: int = 16,
        per_minute: float = 0,
        tries: int = 4,
        seconds: float = 60.0,
    ) -> None:
        self.post = Post(
            url, key_env=key_env, together=together, per_minute=per_minute, tries=tries, seconds=seconds, name="remote"
        )
        if batch < 1:
            raise ConfigError(f"reward 'remote': batch = {batch}; it is at least 1")
        self.tokens, self.batch, self.counts = tokens, batch, self.post.counts
        self.together = max(2, together * batch)
        self._batcher = Batcher(self._post_batch, most=batch, lanes=together, timed=False)

    async def __call__(self, trajectory: Trajectory, task: Task) -> Score | Failed:
        item: dict[str, Any] = {"task": {"id": task.id, "env": task.env, "data": task.data}, "text": trajectory.text}
        item["finish_reason"] = trajectory.finish_reason
        if trajectory.conversation:
            item["messages"] = [
                {"role": turn.role, "content": turn.text, "written": turn.written} for turn in trajectory.conversation
            ]
        if self.tokens:
            item |= {"tokens": list(trajectory.tokens), "mask": list(map(bool, trajectory.mask))}
        try:
            return self._read_reply(await (self._batcher(item) if self.batch > 1 else self.post(item)))
        except RewardError as error:
            return Failed("remote gave no answer", str(error))

    async def _post_batch(self, items: list[dict[str, Any]]) -> list[Any]:
        replies = await self.post({"items": items})
        if isinstance(replies, dict):
            replies = replies.get("rewards")
        if not isinstance(replies, list) or len(replies) != len(items):
            found = f"{len(replies)} rewards" if isinstance(replies, list) else type(replies).__name__
            raise RewardError(f"{self.post.url} was sent {len(items)} items and answered with {found}")
        return replies

    def _read_reply(self, reply: Any) -> Score | Failed:
        if isinstance(reply, dict):
            if "reward" not in reply:
                return Failed(
                    "remote gave no reward", f'{self.post.url} answered {reply!s:.200}; the rule is {{"reward": 1.0}}'
                )
            parts = reply.get("parts") or {}
            if not isinstance(parts, dict):
                return Failed("remote gave no reward", f"its parts are {type(parts).__name__}, and not named numbers")
            reply = {**parts, "total": reply["reward"]} if parts else reply["reward"]
        return read_score(reply)
