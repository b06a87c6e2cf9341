"""The routes of the training API, the key before them, and how a request becomes a promise.

    POST /api/v1/forward_backward ... -> {"request_id"}       POST /api/v1/retrieve_future {"request_id"} -> its result

A refusal is {"detail": why} with status 400, 401 or 404, which clients do not repeat.
"""

from __future__ import annotations

import base64
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rondel.core.errors import RondelError, UserError
from rondel.system.http.request import keys_match, read_body
from rondel.system.http.response import RequestRefusal
from rondel.text.unicode import HALF_PAIR, valid_unicode
from rondel.training_api import rest
from rondel.training_api.backend import Adam, TrainingBackend
from rondel.training_api.clients import OPTIMIZER, Clients
from rondel.training_api.promises import Promise
from rondel.training_api.samplers import ServedWeights
from rondel.training_api.wire import (
    PROTOBUF,
    is_number,
    read_forward_request,
    read_place,
    read_prompt,
    read_sample_settings,
)

BODY = 64 << 20  # bytes of one request
SAMPLES = 128  # answers of one request
POLL = 25.0  # seconds that a client waits for one answer; it gives up after 45
PREFIX = "/api/v1"

WORDS: dict[type, str] = {str: "a text", int: "a number", dict: "an object", bool: "true or false"}
KINDS: dict[type, tuple[str, ...]] = {
    str: ("model_id", "session_id", "path", "model_path", "base_model", "source_path", "tinker_path", "kind",
          "display_name", "project_id", "detail", "sampling_session_id"),
    int: ("seq_id", "sampling_session_seq_id", "ttl_seconds", "model_seq_id", "num_samples", "limit"),
    dict: ("lora_config", "optimizer_config", "user_metadata", "adam_params", "reason", "sampling_params"),
    bool: ("optimizer", "overwrite", "prompt_logprobs", "record_stability_info"),
}  # fmt: skip

Handler = Callable[[Clients, Request, dict[str, Any]], Awaitable[Any]]


class TrainingApp(Starlette):
    """The ASGI application; `clients` is what it keeps."""

    def __init__(self, clients: Clients, key: str, *, body: int, samples: int) -> None:
        """`body`: most bytes of a request; `samples`: most answers of one."""
        self.clients, self.body, self.samples = clients, body, samples
        posted = {
            "create_session": create_session,
            "session_heartbeat": session_heartbeat,
            "sessions/{session}/finish": rest.finish_session,
            "create_model": create_model,
            "get_info": get_info,
            "unload_model": unload_model,
            "optim_step": optim_step,
            "save_weights": save_weights,
            "save_weights_external": save_weights_external,
            "save_weights_for_sampler": save_weights_for_sampler,
            "load_weights": load_weights,
            "create_sampling_session": create_sampling_session,
            "join_sampling_session": join_sampling_session,
            "asample": asample,
            "retrieve_future": retrieve_future,
            "retrieve_futures": refuse(
                "retrieve_futures", "sample_use_retrieve_futures is false here: poll retrieve_future"
            ),
            "cancel_future": cancel_future,
            "create_custom_loss": refuse(
                "create_custom_loss", "forward_backward_custom computes your function where you are"
            ),
            "telemetry": telemetry,
            "client/config": client_config,
            "client/dynamic_config": client_dynamic_config,
            "auth/token": auth_token,
            "weights_info": rest.weights_info,
            "copy_weights": rest.copy_weights,
            "sessions/search": rest.search_sessions,
            "training_runs/{run}/checkpoints/{kind}/{name}/publish": rest.publish,
        }
        got = {
            "healthz": healthz,
            "get_server_capabilities": capabilities,
            "samplers/{sampler}": rest.get_sampler,
            "training_runs": rest.list_runs,
            "training_runs/{run}": rest.get_run,
            "training_runs/{run}/checkpoints": rest.list_checkpoints,
            "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": rest.external_weights_urls,
            "checkpoints": rest.list_checkpoints,
            "sessions": rest.list_sessions,
            "sessions/{session}": rest.get_session,
            "sessions/{session}/trace_export": refuse(
                "export_session_trace", "requests.jsonl in the service's folder has the requests"
            ),
            "audit": refuse(
                "get_audit_log", "this server has one owner; requests.jsonl in its folder has the requests"
            ),
            "billing/usage/events": refuse("get_billing_usage", "nothing is billed here"),
            "billing/usage/checkpoints/current": refuse(
                "get_current_checkpoint_storage_usage", "nothing is billed here"
            ),
        }
        put = {
            "training_runs/{run}/checkpoints/{kind}/{name}/ttl": rest.set_ttl,
            "sessions/{session}/project": rest.assign_project,
        }
        deleted = {
            "training_runs/{run}/checkpoints/{kind}/{name}": rest.delete_checkpoint,
            "training_runs/{run}/checkpoints/{kind}/{name}/publish": rest.unpublish,
        }
        routes = [
            Route(f"{PREFIX}/{path}", self._endpoint(handler, key), methods=[method])
            for method, handlers in (("POST", posted), ("GET", got), ("PUT", put), ("DELETE", deleted))
            for path, handler in handlers.items()
        ]
        routes.append(
            Route(f"{PREFIX}/forward_backward", self._endpoint(forward_backward, key, raw=True), methods=["POST"])
        )
        routes.append(Route(f"{PREFIX}/files/{{token}}/{{file}}", self._endpoint(rest.send_file, ""), methods=["GET"]))
        super().__init__(routes=routes)

    def _endpoint(self, handler: Handler, key: str, *, raw: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            sent: dict[str, Any] = {}
            try:
                if key and not keys_match(request.headers.get("x-api-key", ""), key):
                    return JSONResponse(
                        {"detail": "the key is not this server's: TINKER_API_KEY is the one that it printed"}, 401
                    )
                body = await read_body(request, self.body, remedy=": send fewer examples at a time")
                sent = {"body": body} if raw else _parse_json(body)
                answer = await handler(self.clients, request, sent)
            except Exception as error:
                refusal = _refusal(error)
                if refusal.status_code not in (400, 404):  # its client sends it again
                    return refusal
                await self.clients.skip_refused(
                    *read_place(sent["body"]) if "body" in sent else (sent.get("model_id"), sent.get("seq_id"))
                )
                return refusal
            if isinstance(answer, Response):
                return answer
            if isinstance(answer, Promise):
                return JSONResponse({"request_id": answer.id})
            return JSONResponse(answer) if answer is not None else Response(status_code=204)

        return endpoint


def build_app(
    backend: TrainingBackend, folder: Path, key: str, *, body: int = BODY, samples: int = SAMPLES
) -> TrainingApp:
    """`folder`: where runs and checkpoints lie; those of an earlier server in it are there again."""
    return TrainingApp(Clients(backend, folder), key, body=body, samples=samples)


def _parse_json(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        text = body.decode("utf-8-sig")
        sent = json.loads(text)
        whole = not HALF_PAIR.search(text) or valid_unicode(sent) == sent
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is no JSON: {error}") from error
    if not isinstance(sent, dict):
        raise UserError("the request is no JSON object")
    if not whole:
        raise UserError("the request has a text with half a character in it (a lone surrogate): it cannot be written")
    _check_kinds(sent)
    return sent


def _check_kinds(sent: dict[str, Any]) -> None:
    """Of fields that may be left out."""
    for kind, names in KINDS.items():
        for name in names:
            value = sent.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
                raise UserError(f"{name} = {str(value)[:80]!r}; it must be {WORDS[kind]}, or left out")


def _refusal(error: Exception) -> Response:
    match error:
        case RequestRefusal():
            return JSONResponse({"detail": str(error)}, error.status)
        case KeyError():
            return JSONResponse({"detail": str(error.args[0]) if error.args else "it is not here"}, 404)
        case RondelError() | ValueError():
            return JSONResponse({"detail": str(error)}, 400)
    traceback.print_exception(error, file=sys.stderr)
    return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)


def refuse(method: str, why: str) -> Handler:
    """A method that a client may call and that cannot be answered here."""

    async def handler(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
        raise UserError(f"{method} is not offered by this server: {why}")

    return handler


def _number(sent: dict[str, Any], name: str) -> int:
    if not isinstance(value := sent.get(name), int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{name} must be a number that is not negative")
    return value


def _text(sent: dict[str, Any], name: str) -> str:
    if not isinstance(value := sent.get(name), str):
        raise UserError(f"{name} must be a text")
    return value


# -- sessions ------------------------------------------------------------------------------------


async def healthz(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return {"status": "ok"}


async def capabilities(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    backend = clients.backend
    facts = {"model_name": backend.base_model, "max_context_length": backend.max_context}
    return {"supported_models": [facts | {"trainable": True, "sampleable": True}]}


async def client_config(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "custom_loss_server_side": False,
            "sample_use_retrieve_futures": False, "sample_join_sampling_session": True, "use_pyqwest_transport": False}  # fmt: skip


async def client_dynamic_config(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


async def auth_token(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    """What clients read of their owner: a token that is signed by nobody and accepted by nobody."""
    claims = {"sub": "tml:user:local", "org_id": "local", "email": ""}
    parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims))
    return {"jwt": ".".join([*(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts), ""])}


async def telemetry(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    """Taken and thrown away."""
    return {"status": "accepted"}


async def create_session(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    session = clients.create_session({k: sent.get(k) for k in ("user_metadata", "display_name", "project_id", "tags")})
    return {"type": "create_session", "session_id": session.id}


async def session_heartbeat(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    clients.session(_text(sent, "session_id"))
    return {"type": "session_heartbeat"}


# -- models --------------------------------------------------------------------------------------


async def create_model(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    session = clients.session(_text(sent, "session_id"))
    _check_base(clients, sent.get("base_model"))
    _check_optimizer(sent.get("optimizer_config"))
    if sent.get("lora_config") is None:
        raise UserError("a whole model cannot be trained here, an adapter can: create_lora_training_client")
    return clients.create_model(session, _number(sent, "model_seq_id"), sent["lora_config"], sent.get("user_metadata"))


def _check_base(clients: Clients, name: str | None) -> None:
    if name is not None and name != clients.backend.base_model:
        raise UserError(f"base_model '{name[:200]}' is not here; this server has '{clients.backend.base_model}'")


def _check_optimizer(config: dict[str, Any] | None) -> None:
    if config is not None and config.get("type", "adamw") != "adamw":
        raise UserError(f"optimizer '{config['type']}' is not offered here: AdamW is")


async def get_info(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    model, name = clients.model(_text(sent, "model_id")), clients.backend.base_model
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_data": {"arch": None, "model_name": name, "tokenizer_id": name},
        "model_name": name,
        "is_lora": True,
        "lora_rank": model.spec.rank,
        "optimizer_config": OPTIMIZER,
    }


async def unload_model(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return clients.unload(clients.model(_text(sent, "model_id")))


async def forward_backward(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    if PROTOBUF not in (kind := request.headers.get("content-type", "")):
        raise UserError(f"forward_backward comes as {PROTOBUF}, not as '{kind[:80]}'")
    if coding := request.headers.get("content-encoding"):
        raise UserError(f"content-encoding '{coding[:40]}' was not offered: client/config says so")
    return clients.forward(read_forward_request(sent["body"]))


async def optim_step(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    if not isinstance(given := sent.get("adam_params"), dict):
        raise UserError("adam_params are missing: AdamW is the optimizer here")
    known = {"learning_rate": "lr", "beta1": "beta1", "beta2": "beta2", "eps": "eps", "weight_decay": "weight_decay",
             "grad_clip_norm": "clip"}  # fmt: skip
    if unknown := sorted(given.keys() - known.keys()):
        raise UserError(f"adam_params has no '{unknown[0][:80]}'; it has {', '.join(known)}")
    if strange := [key for key, value in given.items() if not is_number(value)]:
        raise UserError(f"adam_params.{strange[0]} = {str(given[strange[0]])[:80]!r}; it must be a finite number")
    adam = Adam(**{known[key]: float(value) for key, value in ({"learning_rate": 1e-4} | given).items()})
    if not (
        adam.lr >= 0
        and adam.weight_decay >= 0
        and 0 <= adam.beta1 < 1
        and 0 <= adam.beta2 < 1
        and adam.eps >= 0
        and adam.clip >= 0
    ):
        raise UserError(
            f"adam_params {given}: learning_rate, eps, weight_decay and grad_clip_norm are not negative, betas in [0, "
            "1)"
        )
    return clients.optim_step(clients.model(_text(sent, "model_id")), sent.get("seq_id"), adam)


async def save_weights(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return clients.save(clients.model(_text(sent, "model_id")), sent.get("seq_id"), "weights", sent)


async def save_weights_external(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    if sent.get("age_encryption_recipients"):
        raise UserError("age_encryption_recipients: files are not encrypted here")
    return clients.save(clients.model(_text(sent, "model_id")), sent.get("seq_id"), "external_weights", sent)


async def save_weights_for_sampler(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return clients.save_for_sampler(clients.model(_text(sent, "model_id")), sent.get("seq_id"), sent)


async def load_weights(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    address, optimizer = _text(sent, "path"), bool(sent.get("optimizer"))
    clients.store.find(address)
    _check_optimizer(sent.get("optimizer_config"))
    if sent.get("model_id") is not None:
        return clients.load(clients.model(_text(sent, "model_id")), sent.get("seq_id"), address, optimizer=optimizer)
    _check_base(clients, sent.get("base_model"))
    session, number = clients.session(_text(sent, "session_id")), _number(sent, "model_seq_id")
    return clients.load_new_model(session, number, address, optimizer=optimizer, metadata=sent.get("user_metadata"))


# -- sampling ------------------------------------------------------------------------------------


async def create_sampling_session(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    session, address = clients.session(_text(sent, "session_id")), sent.get("model_path")
    if address is None:
        _check_base(clients, _text(sent, "base_model"))
    sampler = await clients.samplers.create(session.id, _number(sent, "sampling_session_seq_id"), address)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


async def join_sampling_session(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    sampler = clients.samplers.get(_text(sent, "sampling_session_id"))
    sampler.clones += 1
    return {"type": "join_sampling_session", "client_counter": sampler.clones}


async def asample(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    prompt, how = read_prompt(sent.get("prompt")), read_sample_settings(sent)
    most = request.app.samples
    if not 1 <= how.n <= most:
        raise UserError(f"num_samples = {how.n}; this server gives 1 to {most} to one request (--max-samples)")
    number = sent.get("seq_id")
    if sent.get("sampling_session_id") is not None:
        sampler = clients.samplers.get(_text(sent, "sampling_session_id"))
        name, reads = sampler.id, sampler.reads
    else:
        if (address := sent.get("model_path")) is not None:
            clients.store.find(address)
        else:
            _check_base(clients, _text(sent, "base_model"))
        name, reads, number = "sample", ServedWeights(address), None
    promise = clients.samplers.sample(name, number, reads, prompt, how)
    return {"request_id": promise.id, "sample_sequence_ids": [f"{promise.id}:{i}" for i in range(how.n)]}


async def retrieve_future(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    name = _text(sent, "request_id")
    try:
        result = await clients.promises.retrieve(name, POLL)
    except KeyError:
        return JSONResponse({"detail": f"'{name[:200]}' is not known (any more): ask anew"}, 410)
    if result is None:
        return {"type": "try_again", "request_id": name, "queue_state": "active"}
    return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result


async def cancel_future(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    clients.promises.cancel(_text(sent, "request_id"))
    return None
