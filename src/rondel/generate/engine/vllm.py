"""vLLM over HTTP: /v1/completions by token ids; weights from a folder through the endpoints of its development mode.

Its logprobs are raw by default; other temperatures than 1 and everything that shapes
logits need `--logprobs-mode processed_logprobs`, which is asked for at the start. A request
that /abort_requests ends returns what it has
written. On a CPU it computes with packed copies of the weights, and that of a head
that is tied to the embeddings stays as it
was (0.32.0): refused at the first update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError, EngineError
from rondel.core.types import FinishReason, Manifest, Sampling
from rondel.generate.engine.foreign import DrawnTokens, Media, common_sampling_fields
from rondel.generate.engine.http import ServerClient, ServerRefusal
from rondel.generate.engine.trainer_group import TrainerGroup, described

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
PROCESSED = "processed_logprobs"
HEAD = "lm_head.weight"
TIED_HEAD = (
    f"vLLM on a CPU would go on with the old {HEAD} of a model whose head is tied to its embeddings: train a copy that "
    'was saved with tie_word_embeddings = false, or use a GPU or engine.kind = "sglang"'
)
WAIT = 300.0  # seconds that a worker waits for the trainer's group


class VllmServer:
    """Started with: VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --port 8000."""

    name = "vLLM"
    lacks = frozenset({"grammar", "top_k", "top_p", "min_p"})
    blind = (
        "beside token ids it takes images only as features that its own renderer has made, or as parts that it scales "
        "and places "
        "itself without telling the prompt that came of it (vllm-project/vllm#51472), so a trained prompt could be "
        "another than the drawn one"
    )

    def __init__(self, url: str) -> None:
        self.link = ServerClient(url, remedy=f"is a server running there? {self.__doc__}")
        self.model, self.packs, self._group = "", False, TrainerGroup()

    def open(self, sampling: Sampling) -> int:
        try:
            config = self.link.get_blocking("/server_info?config_format=json")["vllm_config"]
        except ServerRefusal as error:
            raise ConfigError(
                f"engine.url = '{self.link.url}': weights change only through the endpoints of vLLM's development "
                f"mode, which it does not have ({error}). {self.__doc__}"
            ) from error
        if sampling.temperature != 1 and config["model_config"]["logprobs_mode"] != PROCESSED:
            raise ConfigError(
                f"engine.sampling.temperature = {sampling.temperature}, but this vLLM tells logprobs of temperature 1: "
                f"start it with --logprobs-mode {PROCESSED}, or use 1.0"
            )
        self.packs = config["device_config"]["device"] == "cpu"
        found = self.link.get_blocking("/v1/models")["data"][0]
        self.model = found["id"]
        return int(found["max_model_len"])

    async def draw_tokens(
        self, tokens: list[int], media: Media, sampling: Sampling, seed: int, deadline: float | None
    ) -> DrawnTokens:
        body = {
            "model": self.model,
            "prompt": tokens,
            **sampling_params(sampling, seed),
            "logprobs": 0,
            "return_token_ids": True,
        }
        return drawn_tokens((await self.link.post("/v1/completions", body, deadline=deadline))["choices"][0])

    async def score(self, tokens: list[int], media: Media) -> list[float]:
        """Raw: temperature 1, over the prompt. One token has to be drawn with it."""
        asked = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        rows = (await self.link.post("/v1/completions", {"model": self.model, "prompt": tokens, **asked}))["choices"][
            0
        ]["prompt_logprobs"]
        if len(rows) != len(tokens):
            raise EngineError(f"{self.link.url}/v1/completions scored {len(rows)} of {len(tokens)} tokens")
        return [0.0, *(row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens[1:]))]

    async def interrupt(self) -> None:
        await self.link.post("/abort_requests", {})

    async def load(self, folder: str, version: str) -> None:
        if (
            self.packs
            and HEAD not in json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        ):
            raise EngineError(TIED_HEAD)
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.link.post("/collective_rpc", rpc, deadline=None)
        await self._reset_cache()
        await self.link.post("/update_weight_version", {"new_version": version})

    async def take_broadcast(self, group: dict[str, Any], manifest: Manifest) -> None:
        """By its own weight transfer, with the backend of vllm_worker.py: begin, a bucket a call, finish."""
        if self.packs and HEAD not in (row.name for row in manifest.tensors):
            raise EngineError(TIED_HEAD)

        async def ask(rank: int) -> None:
            if (size := (await self.link.get("/get_world_size"))["world_size"]) > 1:
                raise EngineError(
                    f'{self.link.url} has {size} workers: a broadcast is for servers of one, leave sync.kind at "auto"'
                )
            info = {name: group[name] for name in ("host", "port", "name", "size")}
            info |= {"rank": rank, "deadline": WAIT}
            await self.link.post("/init_weight_transfer_engine", {"init_info": info}, deadline=None)

        await self._group.join(group, ask, lambda _: self.link.post("/shutdown_weight_transfer_engine"))
        await self.link.post("/start_weight_update", deadline=None)
        for first, end in group["buckets"]:
            told = described(manifest.tensors[first:end])
            await self.link.post("/update_weights", {"update_info": told}, deadline=None)
        await self.link.post("/finish_weight_update", {"weight_version": str(manifest.version)}, deadline=None)
        await self._reset_cache()

    async def _reset_cache(self) -> None:
        if not (told := await self.link.post("/reset_prefix_cache"))["success"]:
            raise EngineError(f"{self.link.url}/reset_prefix_cache: {told}; requests of somebody else run there")

    async def version(self) -> str:
        return str((await self.link.get("/weight_info"))["weight_version"])


def sampling_params(s: Sampling, seed: int) -> dict[str, Any]:
    """All of them: what is left out, the server takes from the model's generation config."""
    return {
        **common_sampling_fields(s),
        "top_k": 0,
        "max_tokens": s.max_tokens,
        "min_tokens": s.min_tokens,
        "seed": seed,
    }


def drawn_tokens(choice: dict[str, Any]) -> DrawnTokens:
    """`token_ids` has every drawn token, the end token too, each with its logprob."""
    told = choice.get("logprobs") or {"token_logprobs": []}
    return DrawnTokens(
        tokens=choice["token_ids"] or [],
        logprobs=told["token_logprobs"],
        finish=FINISH[choice["finish_reason"]],
        text=choice["text"],
    )
