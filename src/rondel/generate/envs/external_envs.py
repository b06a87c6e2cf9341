"""Worlds of others under Gymnasium's verbs, for `env = "gym"`: an OpenEnv server, and TextArena's games for one player.

reset(seed=...) -> text, info       step(text) -> text, reward, terminated, truncated, info       close()
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from rondel.core.errors import ConfigError, EnvError
from rondel.text.unicode import read_json

PATIENCE = 60.0  # seconds for one answer of a server; task.env.timeout may end the wait before


class OpenEnv:
    """A session of an OpenEnv server (the `/ws` endpoint of openenv-core):
    `OpenEnv("http://127.0.0.1:8000", action="message")`.

    action   the field of the action that gets the policy's text; "" means that the text is the action, a JSON object
    show     the field of the observation that the policy reads; "" shows the whole observation as JSON
    reset    what reset is told beside the seed

    An action that the server finds invalid is the policy's fault: it reads why and may
    go on. Anything else is the world's.
    """

    def __init__(self, url: str, *, action: str = "", show: str = "", reset: dict[str, Any] | None = None) -> None:
        try:
            from websockets.sync.client import connect
        except ImportError as error:
            raise ConfigError(
                "a world of OpenEnv is spoken to with websockets, which is not installed: pip install websockets"
            ) from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the world 'openenv:{url}' has no address: write openenv:http://127.0.0.1:8000")
        self.url, self.action, self.show, self.more = url.rstrip("/"), action, show, reset or {}
        self._ends = ExitStack()
        self._link = self._ends.enter_context(
            connect(f"ws{self.url.removeprefix('http')}/ws", proxy=None, max_size=64 << 20, open_timeout=PATIENCE)
        )

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        told = self._send_request("reset", {"seed": seed, **self.more})
        if told["type"] == "error":
            raise EnvError(f"{self.url} does not reset: {self._error_text(told)}")
        return self._observation_text(told["data"]), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            action = {self.action: text} if self.action else read_json(text)
        except (ValueError, RecursionError) as error:
            return f"That is not a JSON object: {error}.", 0.0, False, False, {}
        if not isinstance(action, dict):  # an empty one in its place may be an action, and be paid
            return f"That is not a JSON object: {text[:40]}.", 0.0, False, False, {}
        told = self._send_request("step", action)
        if told["type"] == "error":
            if (told.get("data") or {}).get("code") != "VALIDATION_ERROR":
                raise EnvError(f"{self.url} does not step: {self._error_text(told)}")
            return self._error_text(told), 0.0, False, False, {}
        data = told["data"]
        return self._observation_text(data), float(data.get("reward") or 0.0), bool(data.get("done")), False, {}

    def close(self) -> None:
        with self._ends:
            self._link.send(json.dumps({"type": "close"}))

    def _send_request(self, verb: str, data: dict[str, Any]) -> dict[str, Any]:
        self._link.send(json.dumps({"type": verb, "data": data}))
        told = json.loads(self._link.recv(timeout=PATIENCE))
        if not isinstance(told, dict) or told.get("type") not in ("observation", "error"):
            raise EnvError(
                f"{self.url} answers {verb} with {str(told)[:200]}, which is no observation: is it a server of OpenEnv?"
            )
        return told

    def _observation_text(self, data: dict[str, Any]) -> str:
        observation = data.get("observation") or {}
        if not self.show:
            return json.dumps(observation, ensure_ascii=False)
        if self.show not in observation:
            raise EnvError(
                f"{self.url} shows no '{self.show}'; it has: {', '.join(observation) or 'nothing'}. Set "
                f"task.data.args.show"
            )
        return str(observation[self.show])

    @staticmethod
    def _error_text(told: dict[str, Any]) -> str:
        data = told.get("data") or {}
        errors = [
            f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}"
            for e in data.get("errors") or []
            if isinstance(e, dict)
        ]
        return f"{data.get('message', 'an error without a message')} {'; '.join(errors)}".strip()


class TextArena:
    """A game for one player: `TextArena("GuessTheNumber-v0")`. Its reward comes with its end."""

    def __init__(self, name: str, **args: Any) -> None:
        try:
            import textarena
        except ImportError as error:
            raise ConfigError(
                f"the world 'textarena:{name}' is a game of TextArena, which is not installed: pip install textarena"
            ) from error
        raw = f"{name.removesuffix('-raw')}-raw"  # without the wrappers that show the whole history at every turn
        self._game = textarena.make(raw, **args)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._game.reset(num_players=1, seed=seed)
        return self._unread_observation(), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, info = self._game.step(action=text)
        if not done:
            return self._unread_observation(), 0.0, False, False, dict(info or {})
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True, False, dict(info or {})

    def _unread_observation(self) -> str:
        """What the player has not read; its own words it knows."""
        player, messages = self._game.get_observation()
        return "\n".join(str(text) for who, text, *_ in messages if who != player)
