"""A model that takes part in an episode and is not trained: any server with OpenAI's chat completions."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rondel.core.errors import EnvError
from rondel.system.http.client import client_settings, import_httpx, require_address, shorten_body
from rondel.text.unicode import valid_unicode

KEY = "RONDEL_PARTNER_KEY"  # environment variable
MOST = 4000  # characters of one answer


@dataclass(frozen=True)
class RemoteChat:
    """`await RemoteChat("http://127.0.0.1:8000/v1", "name", "task.env.user").ask(messages)` -> its answer. A key in
    $RONDEL_PARTNER_KEY is sent. EnvError, a fault of the environment, where no answer comes.
    """

    url: str
    model: str
    key: str  # of the recipe, for errors
    timeout: float = 30.0

    async def ask(self, messages: list[dict[str, str]]) -> str:
        http = import_httpx(self.key)
        url = f"{require_address(self.key, self.url)}/chat/completions"
        settings = client_settings(http, os.environ.get(KEY, ""))
        try:
            async with http.AsyncClient(timeout=self.timeout, **settings) as client:
                reply = await client.post(url, json={"model": self.model, "messages": messages})
            if reply.status_code != 200:
                raise EnvError(f"{self.key}: {url} answered {reply.status_code}: {shorten_body(reply.text)}")
            text = str(reply.json()["choices"][0]["message"]["content"] or "")
        except http.HTTPError as error:
            raise EnvError(f"{self.key}: {url} cannot be reached ({type(error).__name__}: {error})") from error
        except (LookupError, TypeError, ValueError) as error:
            raise EnvError(f"{self.key}: {url} answered with no choices: {type(error).__name__}: {error}") from error
        return str(valid_unicode(text[:MOST]))
