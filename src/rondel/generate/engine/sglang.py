"""SGLang over HTTP, and `rondel serve`, which speaks the same: /generate by token ids, weights from a folder.

Its logprobs are those after the temperature and before top-k, top-p and min-p (unless its environment sets SGLANG_RETURN_ORIGINAL_LOGPROB),
so these three are refused. An aborted request returns what it has written.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from rondel.generate.engine.foreign import Piece, common
from rondel.generate.engine.http import Link
from rondel.words.errors import EngineError
from rondel.words.types import FinishReason, Sampling

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Sglang:
    """Started with: python -m sglang.launch_server --model-path MODEL --port 30000, or rondel serve MODEL --port 30000."""

    name = "SGLang"
    lacks = frozenset({"grammar", "top_k", "top_p", "min_p"})

    def __init__(self, url: str) -> None:
        self.link = Link(url, remedy=f"is a server running there? {self.__doc__}")

    def open(self, sampling: Sampling) -> int:
        self.link.now("/get_model_info")
        return int(self.link.now("/v1/models")["data"][0]["max_model_len"])

    async def draw(self, tokens: list[int], sampling: Sampling, seed: int, deadline: float | None) -> Piece:
        body = {"input_ids": tokens, "sampling_params": params(sampling, seed), "return_logprob": True, "rid": uuid4().hex}
        reply = await self.link.post("/generate", body, deadline=deadline)
        return piece(reply)

    async def score(self, tokens: list[int]) -> list[float]:
        """Raw: temperature 1, over the prompt. One token has to be drawn with it."""
        asked = {"temperature": 0.0, "max_new_tokens": 1}
        body = {"input_ids": tokens, "sampling_params": asked, "return_logprob": True, "logprob_start_len": 0}
        rows = (await self.link.post("/generate", body))["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in rows] != tokens:
            raise EngineError(f"{self.link.url}/generate scored {len(rows)} tokens, which are not the {len(tokens)} that were asked for")
        return [0.0, *(logprob for logprob, *_ in rows[1:])]

    async def interrupt(self) -> None:
        await self.link.post("/abort_request", {"abort_all": True})

    async def load(self, folder: str, version: str) -> None:
        """The reply comes when they serve; the cache is flushed with it."""
        body = {"model_path": folder, "weight_version": version, "flush_cache": True}
        told = await self.link.post("/update_weights_from_disk", body, deadline=None)
        if not told["success"]:
            raise EngineError(f"{self.link.url}/update_weights_from_disk: {told['message']}")

    async def version(self) -> str:
        return str((await self.link.get("/get_model_info"))["weight_version"])


def params(s: Sampling, seed: int) -> dict[str, Any]:
    """All of them: what is left out, the server may take from the model's generation config."""
    return {**common(s), "top_k": -1, "max_new_tokens": s.max_tokens, "min_new_tokens": s.min_tokens, "sampling_seed": seed}


def piece(reply: dict[str, Any]) -> Piece:
    """`output_token_logprobs` has every drawn token, the end token too: (logprob, token, text or null)."""
    meta = reply["meta_info"]
    rows = meta.get("output_token_logprobs") or []  # none, if it was aborted before its first token
    return Piece(
        tokens=[token for _, token, *_ in rows],
        logprobs=[logprob for logprob, *_ in rows],
        finish=FINISH[(meta["finish_reason"] or {"type": "abort"})["type"]],
        text=reply.get("text") or "",
        cached=meta.get("cached_tokens", 0),
        version=str(meta["weight_version"]) if "weight_version" in meta else None,
    )
