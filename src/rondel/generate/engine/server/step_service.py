"""A server of points and actions: what a flow draws for a prompt, what a policy does about an observation.

POST /draw  {"prompt": "ring", "n": 4, "steps": 10, "temperature": 0, "seed": 0} -> {"points": [[...], ...], ...}
POST /act   {"observation": [...], "temperature": 0, "seed": 0}                  -> {"action": ..., ...}
            and "instruction": "catch the ball" where the observation is a picture
Both take "system" beside a text: task.system of the run.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import numpy as np
from starlette.requests import Request as HttpRequest

from rondel.core.types import Completion, Request, Sampling, sample_key
from rondel.generate.engine.server.engine_service import EngineService, RequestLimits
from rondel.generate.engine.server.fields import RequestFields
from rondel.generate.engine.server.told import client_lifetime, fields_of
from rondel.system.http.response import RequestRefusal
from rondel.text.tokenization import special_tokens

HOTTEST = 100.0
MOST_STEPS = 10_000


class StepService(EngineService):
    """Over an engine of a `StepHead`. `kind` is the head's."""

    def __init__(self, engine: Any, *, run: Callable[..., Awaitable[Any]], name: str, limits: RequestLimits, api_key: str = "") -> None:  # fmt: skip
        super().__init__(engine, run=run, name=name, limits=limits.with_body(4), api_key=api_key)
        self.kind = engine.head.kind
        self.tokenizer = copy.deepcopy(engine.loaded.tokenizer)  # the engine has its own

    def prompt_tokens(self, text: str, system: str | None) -> list[int]:
        """As a rollout gives it: a message of the user, behind that of the system where there is one, by the model's
        template."""
        special, above = (
            special_tokens(self.tokenizer),
            [] if system is None else [{"role": "system", "content": system}],
        )
        messages = special.cover_messages([*above, {"role": "user", "content": text}])
        return special.encode(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    async def draw_all(self, request: HttpRequest, asked: list[Request]) -> list[Completion]:
        """All or none; they end with the client that asked."""
        with self.reserve_queue_slots(len(asked)):
            async with client_lifetime(request), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.engine.generate(one)) for one in asked]
            return [task.result() for task in tasks]


async def draw_points(service: StepService, request: HttpRequest) -> dict[str, Any]:
    """Points of a flow, by prompt and sample."""
    f = await fields_of(service, request)  # type: ignore[arg-type]
    prompts, many = _read_prompts(f, service.limits.samples)
    n = f.read_integer("n", 1, 1, service.limits.samples)
    steps = f.read_integer("steps", None, 1, MOST_STEPS)
    if steps is None:
        raise RequestRefusal(
            400,
            "say how many denoising steps: steps = engine.sampling.max_tokens of the run, as a rule",
            param="steps",
        )
    system = f.read_string("system")
    sampling, seed, rid = _read_draw(f, max_tokens=steps)
    asked = [
        _to_request(
            service.prompt_tokens(prompt, system), sampling, sample_key(seed, i, j), rid, service.limits.deadline
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    drawn = await service.draw_all(request, asked)
    points = [done.steps.drawn[-1].tolist() for done in drawn]  # type: ignore[union-attr]
    rows = [points[i * n : (i + 1) * n] for i in range(len(prompts))]
    return {"id": rid, "points": rows if many else rows[0], "weight_version": str(service.engine.version)}


async def act(service: StepService, request: HttpRequest) -> dict[str, Any]:
    """An action for each observation: the number of one that is counted, its numbers, or a chunk of several [H, A]."""
    f = await fields_of(service, request)  # type: ignore[arg-type]
    head, pictured = service.engine.head, hasattr(service.engine.loaded.model.config, "frame")
    seen, many = _read_observations(f, head.observed, service.limits.samples, pictured=pictured)
    given = _read_instruction(service, f)
    sampling, seed, rid = _read_draw(f, max_tokens=1)
    asked = []
    for i, observation in enumerate(seen):
        one = _to_request(given, sampling, sample_key(seed, i, 0), rid, service.limits.deadline)
        one.observation = observation
        asked.append(one)
    drawn = await service.draw_all(request, asked)
    actions = [_told_action(done, service.engine.loaded.model.config) for done in drawn]
    densities = [float(done.logprobs[0]) for done in drawn]
    return {
        "id": rid,
        "action": actions if many else actions[0],
        "logprob": densities if many else densities[0],
        "weight_version": str(service.engine.version),
    }


DRAWS = {"flow": ("/draw", draw_points), "control": ("/act", act)}


def _told_action(done: Completion, config: Any) -> Any:
    assert done.actions is not None
    if getattr(config, "discrete", False):
        return int(done.actions[0][0])
    return done.actions.tolist() if hasattr(config, "chunk") else done.actions[0].tolist()


def _to_request(tokens: list[int], sampling: Sampling, key: int, rid: str, deadline: float) -> Request:
    request = Request(tokens, sampling, key=key, id=rid)
    request.deadline = deadline
    return request


def _read_draw(f: RequestFields, *, max_tokens: int) -> tuple[Sampling, int, str]:
    """(how to draw, the seed, the id); every other field is refused."""
    temperature = f.take_number("temperature", 0.0, 0.0, HOTTEST)
    seed, rid = f.read_integer("seed", 0, 0, (1 << 63) - 1), f.read_string("rid") or uuid4().hex
    f.read_string("model")
    f.refuse_unknown_fields()
    return Sampling(temperature=temperature, max_tokens=max_tokens), seed, rid


def _read_instruction(service: StepService, f: RequestFields) -> list[int]:
    """What stands before an observation."""
    if not hasattr(service.engine.loaded.model.config, "frame"):
        return [0]
    if not (text := f.read_string("instruction")):
        raise f.field_error("instruction", "it must say what the policy is to do, as task.env.instruction of the run")
    return service.prompt_tokens(text, f.read_string("system"))


def _read_prompts(f: RequestFields, most: int) -> tuple[list[str], bool]:
    given = f.read_field("prompt")
    rows = given if isinstance(given, list) else [given]
    if not rows or len(rows) > most or not all(isinstance(row, str) and row for row in rows):
        raise f.field_error("prompt", f"it must be a text, or a list of at most {most}")
    return rows, isinstance(given, list)


def _read_observations(f: RequestFields, observed: int, most: int, *, pictured: bool) -> tuple[list[np.ndarray], bool]:
    """[O] each; `pictured`: of pixels."""
    given = f.read_field("observation")
    many = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    rows = given if many else [given]
    right = 0 < len(rows) <= most and all(
        isinstance(row, list)
        and len(row) == observed
        and all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e30 for x in row)
        for row in rows
    )
    if not right:
        raise f.field_error("observation", f"it must be a list of {observed} numbers, or at most {most} such lists")
    if pictured and not all(0 <= x <= 255 and x == int(x) for row in rows for x in row):  # shares of 1 would be black
        raise f.field_error("observation", "a picture has whole numbers from 0 to 255, as a world renders it")
    return [np.array(row, np.float32) for row in rows], many
