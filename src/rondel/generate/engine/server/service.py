"""What all endpoints share: the engine, the tokenizer on a thread of its own, the
limits, and the way of one request through them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rondel.core.errors import DataError
from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig
from rondel.core.types import Request, Sampling, sample_key
from rondel.generate.calls import CallFormat
from rondel.generate.engine.builtin.text import IncrementalDetokenizer, split_stops
from rondel.generate.engine.server.answers import RequestSamples, SampleAnswer
from rondel.generate.engine.server.engine_service import EngineService, RequestLimits
from rondel.generate.pictures import TooLarge, all_seen, load_message_images, place_images, split_images
from rondel.generate.template import Template, describe_tools
from rondel.system.http.response import RequestRefusal
from rondel.text.tokenization import special_tokens

if TYPE_CHECKING:
    from rondel.generate.engine.blocks.engine import BlockEngine
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.generate.engine.routed_experts import RoutedExperts
    from rondel.generate.engine.server.chat_fields import OfferedTools


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """What one request wants, whichever API it came by. `draw` are Sampling's fields but
    max_tokens: None is all the room there is.

    images   of each prompt, as data: URLs; of messages they are in them
    split    whether control tokens that a prompt's text spells are text; in messages they always are
    """

    prompts: list[str | list[int]] = field(default_factory=list)
    images: list[list[str]] = field(default_factory=list)
    split: bool = True
    messages: list[dict[str, Any]] | None = None
    tools: OfferedTools | None = None
    goes_on: bool = False  # the last message is the beginning of the answer
    template: dict[str, Any] = field(default_factory=dict)  # what else the chat template is given
    draw: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    n: int = 1
    seed: int = 0
    id: str = ""
    adapter: str = ""  # that the base is read with
    stream: bool = False
    top: int = 0  # how many of the likeliest tokens are told beside each
    wants: frozenset[str] = frozenset()
    echo: bool = False  # the prompt is told before the answer, with its log-probabilities where these are asked for
    tells_prompt: bool = False  # vLLM's prompt_logprobs
    keeps: int | None = None  # of an answer, no more than so many tokens are told


class GenerationService(EngineService):
    """`run` executes on the device's thread; nothing here touches a tensor on the event loop."""

    def __init__(
        self,
        engine: BuiltinEngine | BlockEngine,
        *,
        run: Callable[..., Awaitable[Any]],
        name: str,
        limits: RequestLimits,
        api_key: str = "",
        segment: Callable[[str, int, int], Any] | None = None,
        experts: RoutedExperts | None = None,
    ) -> None:
        """`segment(path, size, number)`: a piece of others' memory, as the engine's transport "ipc" opens it.
        `experts`: how to tell where tokens went, of an engine that records it.
        """
        super().__init__(
            engine,
            run=run,
            name=name,
            limits=limits.with_body(64 if engine.loaded.sight else 4),
            api_key=api_key,
        )
        self.segment, self.experts = segment, experts
        self.groups: dict[str, Any] = {}  # of trainers that broadcast weights, by name
        # the engine decodes with its own; the two must not share a borrow
        self.tokenizer = copy.deepcopy(engine.loaded.tokenizer)
        self.plain = not getattr(self.tokenizer, "chat_template", None)
        self.template = Template(self.tokenizer, engine.loaded.sight)
        self.special = special_tokens(self.tokenizer)
        self._image_marks = self.special.of_images(self.image_config.placeholder) if self.image_config else set[str]()
        self._longest = max(map(len, self.tokenizer.get_vocab()))
        self._text = ThreadPoolExecutor(1, "rondel-text")

    @property
    def max_context_tokens(self) -> int:
        """Tokens that a prompt and its answer can have together."""
        return self.engine.context_limit

    @property
    def adapters(self) -> list[str]:
        """That are served beside the model, under names of their own."""
        bank = self.engine.loaded.bank
        return [] if bank is None else list(bank.served)

    def adapter_called(self, model: str | None) -> str:
        """The adapter that a client means by a model's name, "" for the model itself. RequestRefusal: there is none."""
        if model is None or model == self.name:
            return ""
        if model in self.adapters:
            return model
        raise RequestRefusal(
            404,
            f"no model '{model[:200]}' here; this server serves "
            f"{', '.join(repr(n) for n in [self.name, *self.adapters])}",
            param="model",
            code="model_not_found",
        )

    @property
    def call_format(self) -> CallFormat:
        """How the model calls tools; refused where its template shows tools and writes calls in a form that is not
        read.
        """
        try:
            return self.template.call_format
        except DataError as error:
            raise RequestRefusal(400, str(error), param="tools") from None

    @property
    def image_config(self) -> ImageProcessorConfig | None:
        """How the model looks at images."""
        return self.engine.loaded.sight

    def close(self) -> None:
        self._text.shutdown(wait=True, cancel_futures=True)

    async def prepare_samples(self, asked: GenerationRequest) -> RequestSamples:
        """Prompts as tokens, checked against the room there is; nothing runs yet."""
        if asked.messages is None:
            sources = asked.images or [[] for _ in asked.prompts]
            given = [
                await self._encode_prompt(p, self._image_marks if own else set(), split=asked.split)
                if isinstance(p, str)
                else p
                for p, own in zip(asked.prompts, sources, strict=True)
            ]
            prompts = [
                await self._prepare_images(tokens, own) if own else (tokens, ())
                for tokens, own in zip(given, sources, strict=True)
            ]
        else:
            messages = asked.messages
            if self.image_config is not None and self.image_config.tiles is not None:  # the text says how they are cut
                messages = await self._cut_images(messages)
            plain, shown = split_images(messages)
            tokens = await self.off_loop(self.render_chat, plain, asked)
            prompts = [await self._prepare_images(tokens, shown) if self.image_config or shown else (tokens, ())]
        wants = asked.wants | ({f"top_logprobs:{asked.top}"} if asked.top else set())
        stops = split_stops(self.tokenizer, asked.draw.get("stop", ()))[1]
        pairs = []
        for i, (prompt, media) in enumerate(prompts):
            max_tokens = self._max_tokens(len(prompt), asked.max_tokens)
            try:
                sampling = Sampling(**asked.draw, max_tokens=max_tokens)
            except ValueError as error:
                raise RequestRefusal(400, str(error)) from None
            if asked.top and not _is_untransformed(sampling):
                raise RequestRefusal(
                    400,
                    "the likeliest tokens are told under the model alone, the drawn one under what it was drawn from: "
                    "to have both in one scale, ask with temperature 1 or 0 and without top_k, top_p, min_p, "
                    "penalties, logit_bias, min_tokens or a schema",
                    param="top_logprobs",
                )
            for j in range(asked.n):
                reader = IncrementalDetokenizer(self._decode_tokens, ()) if asked.stream else None
                answer = SampleAnswer(i * asked.n + j, prompt, stops, reader)
                request = Request(
                    prompt,
                    sampling,
                    key=sample_key(asked.seed, i, j),
                    adapter=asked.adapter,
                    id=asked.id,
                    wants=wants,
                    media=media,
                )
                request.deadline = self.limits.deadline
                pairs.append((answer, request))
        return RequestSamples(self.engine, pairs)

    async def _prepare_images(
        self, tokens: list[int], sources: list[Any]
    ) -> tuple[list[int], tuple[ImagePlaceholder, ...]]:
        """Its images at their placeholders: one for each, or as many as it has cells."""
        sight = self.image_config
        try:
            if sight is None:
                raise DataError(f"{len(sources)} images for '{self.name}', which reads text alone: leave them out")
            images = await all_seen(sources, sight, self.max_context_tokens)
            n, cells = tokens.count(sight.placeholder), sum(image.tokens for image in images)
            if n == cells != len(images):
                return tokens, _place_images(tokens, images, sight)
            if images and n > len(images):
                raise DataError(
                    f"{n} image placeholders for {len(images)} images of {cells} cells: one for each image, or one "
                    "for each cell"
                )
            whole, media = place_images(tokens, images, sight)
            return whole, tuple(media)
        except DataError as error:
            raise _image_refusal(error) from None

    async def _cut_images(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return await load_message_images(messages, self.image_config, self.max_context_tokens)
        except DataError as error:
            raise _image_refusal(error) from None

    def _max_tokens(self, prompt: int, wanted: int | None) -> int:
        left = self.max_context_tokens - prompt
        if left < (wanted or 1):
            raise RequestRefusal(
                400,
                f"{prompt} prompt tokens + max_tokens {wanted or 1} exceed the {self.max_context_tokens} that this "
                "server holds for one request",
                param="max_tokens" if left > 0 else "prompt",
                code="context_length_exceeded",
            )
        return wanted or left

    async def _encode_prompt(self, text: str, meant: set[str], *, split: bool) -> list[int]:
        """Of a prompt's text; the control tokens `meant` stand for its images."""
        if len(text) > self._longest * self.max_context_tokens:  # found out before it costs the tokenizer's time
            raise RequestRefusal(
                400,
                f"a prompt of {len(text)} characters; {self.max_context_tokens} tokens cannot hold it",
                code="context_length_exceeded",
            )
        covered = self.special.cover_but(text, meant) if split else self.special.cover_control_tokens(text, split=False)
        return await self.off_loop(partial(self.special.encode, covered, add_special_tokens=True))

    async def off_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._text, function, *args)

    def _decode_tokens(self, tokens: list[int]) -> str:
        return self.engine.loaded.tokenizer.decode(tokens, skip_special_tokens=True)

    def render_chat(self, messages: list[dict[str, Any]], asked: GenerationRequest) -> list[int]:
        """The model's chat template, of messages in which no control token is meant. What it
        raises is the client's to read: it knows which roles and orders it takes. Tools that it does not show are
        described in words."""
        if self.plain:
            raise RequestRefusal(
                400, f"'{self.name}' has no chat template: use /v1/completions", code="no_chat_template"
            )

        messages = self.template.calls_as_text(self.special.cover_control_tokens(messages))
        tools = self.special.cover_control_tokens(asked.tools.functions if asked.tools else [])
        if tools and self.call_format.told:
            messages, tools = describe_tools(messages, tools, speaker=self.template.speaker), []
        how = dict(self.special.cover_control_tokens(asked.template))
        if tools:
            how["tools"] = tools
        how["continue_final_message" if asked.goes_on else "add_generation_prompt"] = True
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **how))
        except Exception as error:
            raise RequestRefusal(
                400,
                f"the chat template refuses these messages: {type(error).__name__}: {str(error)[:300]}",
                param="messages",
            ) from None
        if (size := len(self.special.uncover_control_tokens(text))) > self._longest * self.max_context_tokens:
            raise RequestRefusal(
                400,
                f"messages of {size} characters; {self.max_context_tokens} tokens cannot hold them",
                code="context_length_exceeded",
            )
        sight = self.image_config
        return self.special.encode(text if sight is None else sight.write_media(text, messages, self.tokenizer))


def _place_images(tokens: list[int], images: list[Image], sight: ImageProcessorConfig) -> tuple[ImagePlaceholder, ...]:
    """The images among tokens that have a placeholder for each of their cells."""
    media: list[ImagePlaceholder] = []
    try:
        for image in images:
            media.append(ImagePlaceholder(tokens.index(sight.placeholder, media[-1].end if media else 0), image))
        ImagePlaceholder.check_placeholders(tokens, media)
    except ValueError as error:
        raise DataError(str(error)) from error
    return tuple(media)


def _image_refusal(error: DataError) -> RequestRefusal:
    code = "context_length_exceeded" if isinstance(error, TooLarge) else "invalid_image"
    return RequestRefusal(400, str(error), param="image", code=code)


def _is_untransformed(s: Sampling) -> bool:
    """Whether a token's logprob is that of the model alone; a greedy one's is."""
    return not s.changes_logits and (s.temperature == 0 or (s.temperature == 1 and not s.truncates_support))
