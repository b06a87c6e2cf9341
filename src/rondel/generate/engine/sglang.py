"""SGLang over HTTP, and `rondel serve`, which speaks the same: /generate by token ids, weights from a folder.

Its logprobs are those after the temperature and before top-k, top-p and min-p (unless its
environment sets SGLANG_RETURN_ORIGINAL_LOGPROB), so these three are refused. An
aborted request returns what it has written.

Images go beside the ids, in which each has a placeholder for every cell, as the model sees
them: whole cells, in PNG, so that nothing is scaled again. A server that tokenizes
the ids anew (SGLang does so before its
SGLANG_MM_AVOID_RETOKENIZE, or without it) is found out where its prompt has another length.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

from rondel.core.errors import EngineError
from rondel.core.types import FinishReason, Manifest, Sampling
from rondel.generate.engine.foreign import DrawnTokens, Media, common_sampling_fields
from rondel.generate.engine.http import DEADLINE, ServerClient
from rondel.generate.engine.routed_experts import RoutedExperts
from rondel.generate.engine.trainer_group import TrainerGroup, described
from rondel.generate.pictures import run_on_image_thread, url_of

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangServer:
    """Started with: python -m sglang.launch_server --model-path MODEL --port 30000, or rondel
    serve MODEL --port 30000.
    """

    name = "SGLang"
    lacks = frozenset({"grammar", "top_k", "top_p", "min_p"})
    blind = ""
    experts: RoutedExperts | None = None  # is set where every answer is to tell them

    def __init__(self, url: str) -> None:
        self.link = ServerClient(url, remedy=f"is a server running there? {self.__doc__}")
        self._group = TrainerGroup()

    def open(self, sampling: Sampling) -> int:
        self.link.get_blocking("/get_model_info")
        return int(self.link.get_blocking("/v1/models")["data"][0]["max_model_len"])

    async def draw_tokens(
        self, tokens: list[int], media: Media, sampling: Sampling, seed: int, deadline: float | None
    ) -> DrawnTokens:
        body = {"sampling_params": sampling_params(sampling, seed), "return_logprob": True, "rid": uuid4().hex}
        if self.experts is None:
            return drawn_tokens(await self._post_generate(tokens, media, body, deadline))
        reply = await self._post_generate(tokens, media, body | {"return_routed_experts": True}, deadline)
        drawn = drawn_tokens(reply)
        if (told := reply["meta_info"].get("routed_experts")) is not None:
            drawn.experts = self.experts.decode(told, len(tokens) + len(drawn.tokens), f"{self.link.url}/generate")
        elif drawn.finish != "abort":
            raise EngineError(
                f"{self.link.url}/generate tells no routed experts, and the trainer is to send tokens where the engine "
                "sent them: start the server with --enable-return-routed-experts, or set trainer.routing_replay = false"
            )
        return drawn

    async def score(self, tokens: list[int], media: Media) -> list[float]:
        """Raw: temperature 1, over the prompt. One token has to be drawn with it."""
        asked = {"temperature": 0.0, "max_new_tokens": 1}
        body = {"sampling_params": asked, "return_logprob": True, "logprob_start_len": 0}
        rows = (await self._post_generate(tokens, media, body, DEADLINE))["meta_info"]["input_token_logprobs"]
        seen = {at for place in media for at in range(place.start, place.end)}  # SGLang has hashes of the images there
        if len(rows) != len(tokens) or any(
            row[1] != token for at, (row, token) in enumerate(zip(rows, tokens)) if at not in seen
        ):
            raise EngineError(
                f"{self.link.url}/generate scored {len(rows)} tokens, which are not the {len(tokens)} that were asked "
                f"for"
            )
        return [0.0, *(logprob for logprob, *_ in rows[1:])]

    async def _post_generate(
        self, tokens: list[int], media: Media, body: dict[str, Any], deadline: float | None
    ) -> dict[str, Any]:
        images = {"image_data": [await run_on_image_thread(url_of, place.image) for place in media]} if media else {}
        reply: dict[str, Any] = await self.link.post(
            "/generate", {"input_ids": tokens, **images, **body}, deadline=deadline
        )
        if media and (n := reply["meta_info"]["prompt_tokens"]) != len(tokens):
            raise EngineError(
                f"{self.link.url}/generate made {n} tokens of a prompt of {len(tokens)} with {len(media)} images: it "
                f"tokenizes anew or scales "
                "them. Start SGLang with SGLANG_MM_AVOID_RETOKENIZE=1 (a version that has it), and with the limits of "
                "pixels of this run"
            )
        return reply

    async def interrupt(self) -> None:
        await self.link.post("/abort_request", {"abort_all": True})

    async def load(self, folder: str, version: str) -> None:
        """The reply comes when they serve; the cache is flushed with it."""
        body = {"model_path": folder, "flush_cache": True} | await self._version_fields(version)
        await self._update("/update_weights_from_disk", body)

    async def take_broadcast(self, group: dict[str, Any], manifest: Manifest) -> None:
        """A bucket a call. Its cache is flushed, and its version changes, with the last one."""

        def ask(rank: int) -> Awaitable[None]:
            body = {"master_address": group["host"], "master_port": group["port"], "rank_offset": rank}
            body |= {"world_size": group["size"], "group_name": group["name"], "backend": group["backend"]}
            return self._update("/init_weights_update_group", body)

        def leave(name: str) -> Awaitable[Any]:
            return self.link.post("/destroy_weights_update_group", {"group_name": name})

        await self._group.join(group, ask, leave)
        for first, end in group["buckets"]:
            body: dict[str, Any] = described(manifest.tensors[first:end])
            body |= {"group_name": group["name"], "load_format": "flattened_bucket", "flush_cache": False}
            if end == len(manifest.tensors):
                body |= {"flush_cache": True} | await self._version_fields(str(manifest.version))
            await self._update("/update_weights_from_distributed", body)

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        told = await self.link.post(path, body, deadline=None)
        if not told["success"]:
            raise EngineError(f"{self.link.url}{path}: {told['message']}")

    async def _version_fields(self, version: str) -> dict[str, Any]:
        """`rondel serve` wants it said if a run goes on from an earlier step."""
        serves = await self.version()
        back = serves.isdecimal() and int(serves) > int(version)
        return {"weight_version": version} | ({"rollback": True} if back else {})

    async def version(self) -> str:
        return str((await self.link.get("/get_model_info"))["weight_version"])


def sampling_params(s: Sampling, seed: int) -> dict[str, Any]:
    """All of them: what is left out, the server may take from the model's generation config."""
    return {
        **common_sampling_fields(s),
        "top_k": -1,
        "max_new_tokens": s.max_tokens,
        "min_new_tokens": s.min_tokens,
        "sampling_seed": seed,
    }


def drawn_tokens(reply: dict[str, Any]) -> DrawnTokens:
    """`output_token_logprobs` has every drawn token, the end token too: (logprob, token, text or null)."""
    meta = reply["meta_info"]
    rows = meta.get("output_token_logprobs") or []  # none, if it was aborted before its first token
    return DrawnTokens(
        tokens=[token for _, token, *_ in rows],
        logprobs=[logprob for logprob, *_ in rows],
        finish=FINISH[(meta["finish_reason"] or {"type": "abort"})["type"]],
        text=reply.get("text") or "",
        cached=meta.get("cached_tokens", 0),
        version=str(meta["weight_version"]) if "weight_version" in meta else None,
    )
