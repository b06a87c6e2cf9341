"""What is kept, for clients that look, copy and tidy up: training runs, checkpoints, sessions, samplers."""

from __future__ import annotations

import secrets
import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import FileResponse

from rondel.core.errors import UserError
from rondel.training_api.clients import OPTIMIZER, Clients, Session
from rondel.training_api.store import NOTE, expiry, to_time

OWNER = "local"
LINK = 3600.0  # seconds that an address of a file is good for


def _page(request: Request) -> tuple[int, int]:
    try:
        limit, offset = (int(request.query_params.get(name, usual)) for name, usual in (("limit", 100), ("offset", 0)))
    except ValueError as error:
        raise UserError(f"limit and offset are numbers: {error}") from error
    return max(1, min(limit, 1000)), max(0, offset)


def _cut(rows: list[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    limit, offset = _page(request)
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


# -- runs ----------------------------------------------------------------------------------------


def _run_card(clients: Clients, facts: dict[str, Any]) -> dict[str, Any]:
    cards = clients.store.checkpoints(facts["run"])
    live = clients.models.get(facts["run"])
    last = {kind: next((c for c in cards if c["checkpoint_type"] == kind), None) for kind in ("training", "sampler")}
    return {
        "training_run_id": facts["run"],
        "base_model": facts["base_model"],
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": facts["rank"],
        "last_request_time": to_time(facts["born"] if live is None else live.heard),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": {str(k): str(v) for k, v in (facts.get("metadata") or {}).items()} or None,
    }


async def list_runs(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    rows, cursor = _cut(clients.store.runs(), request)
    return {"training_runs": [_run_card(clients, facts) for facts in rows], "cursor": cursor}


async def get_run(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    return _run_card(clients, clients.store.run(request.path_params["run"]))


async def weights_info(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    run, _, _ = clients.store.find(str(sent.get("tinker_path")))
    facts = clients.store.run(run)
    return {
        "base_model": facts["base_model"],
        "optimizer_config": OPTIMIZER,
        "is_lora": True,
        "lora_rank": facts["rank"],
        "train_unembed": facts["unembed"],
        "train_mlp": facts["mlp"],
        "train_attn": facts["attention"],
    }


# -- checkpoints ---------------------------------------------------------------------------------


def _named(request: Request) -> tuple[str, str, str]:
    return request.path_params["run"], request.path_params["kind"], request.path_params["name"]


async def list_checkpoints(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    rows, cursor = _cut(clients.store.checkpoints(request.path_params.get("run")), request)
    return {"checkpoints": rows, "cursor": cursor}


async def delete_checkpoint(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    run, kind, name = _named(request)
    clients.store.note(run, kind, name)
    await clients.samplers.served.drop(f"tinker://{run}/{kind}/{name}")
    clients.store.delete(run, kind, name)


async def set_ttl(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    clients.store.change_note(*_named(request), expires=expiry(sent.get("ttl_seconds")))


async def publish(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    """Whoever has the key can read all checkpoints; this is what their list says of one."""
    clients.store.change_note(*_named(request), public=True)


async def unpublish(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    clients.store.change_note(*_named(request), public=False)


async def copy_weights(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    """Into a run of its own, which nobody trains."""
    source, kind, name = clients.store.find(str(sent.get("source_path")))
    key = request.headers.get("x-idempotency-key", "")
    session = sent.get("session_id")
    run = f"{session}:train:{sent.get('model_seq_id')}" if session else f"copy-{key or uuid4().hex}"
    if run in clients.models:
        raise UserError(f"'{run}' is a model that is trained: a copy needs a number of its own")
    note = {"expires": expiry(sent.get("ttl_seconds")), "copied": [sent["source_path"], key]}
    address = f"tinker://{run}/{kind}/{name}"
    try:
        if key and clients.store.note(run, kind, name).get("copied") == note["copied"]:
            return {"tinker_path": address}  # the same request again
    except KeyError:
        pass
    facts = {k: v for k, v in clients.store.run(source).items() if k not in ("run", "born")}
    try:
        clients.store.run(run)
    except KeyError:
        clients.store.create_run(run, facts)
    return {"tinker_path": clients.store.copy(str(sent["source_path"]), run, note)}


async def external_weights_urls(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    """An address for each file, good for an hour and without a key."""
    run, kind, name = _named(request)
    clients.store.note(run, kind, name)
    place = clients.store.place(f"tinker://{run}/{kind}/{name}")
    until, token = time.time() + LINK, secrets.token_urlsafe(24)
    for old in [t for t, (end, _) in clients.links.items() if end < time.time()]:
        del clients.links[old]
    clients.links[token] = until, place
    base = str(request.base_url).rstrip("/")
    files = sorted(file.name for file in place.iterdir() if file.name != NOTE)
    return {"urls": {file: f"{base}/api/v1/files/{token}/{file}" for file in files}, "expires": to_time(until)}


async def send_file(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    until, place = clients.links.get(request.path_params["token"], (0.0, clients.store.folder))
    name = request.path_params["file"]
    if until < time.time() or name not in {file.name for file in place.iterdir()}:
        raise KeyError("this address is not good (any more): ask for another")
    return FileResponse(place / name)


# -- sessions and samplers -----------------------------------------------------------------------


async def get_sampler(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    sampler = clients.samplers.get(request.path_params["sampler"])
    return {"sampler_id": sampler.id, "base_model": clients.backend.base_model, "model_path": sampler.reads.address}


def _session_of(clients: Clients, request: Request) -> Session:
    if (session := clients.sessions.get(request.path_params["session"])) is None:
        raise KeyError(f"no session '{request.path_params['session'][:100]}' here")
    return session


async def get_session(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    session = _session_of(clients, request)
    return {
        "training_run_ids": session.models,
        "sampler_ids": clients.samplers.of_session(session.id),
        "user_metadata": session.facts["user_metadata"],
        "display_name": session.facts["display_name"],
    }


async def list_sessions(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    rows, _ = _cut(sorted(clients.sessions.values(), key=lambda s: -s.born), request)
    return {"sessions": [session.id for session in rows]}


async def search_sessions(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    wanted, words = sent.get("session_id"), str(sent.get("display_name") or "").lower().split()
    found = []
    for session in sorted(clients.sessions.values(), key=lambda s: -s.born):
        title, told = str(session.facts["display_name"] or "").lower(), session.facts["user_metadata"] or {}
        either = [session.id == wanted] if wanted else []
        either += [all(word in title for word in words)] if words else []
        pairs = (sent.get("user_metadata") or {}).items()
        if (any(either) or not either) and all(told.get(key) == value for key, value in pairs):
            found.append(session)
    shown = found[: int(sent.get("limit", 50))]
    return {"sessions": [_summary(clients, session) for session in shown], "next_cursor": None}


def _summary(clients: Clients, session: Session) -> dict[str, Any]:
    cards = [card for run in session.models for card in clients.store.checkpoints(run)]
    done = session.finished
    return {
        "session_id": session.id,
        "created_at": to_time(session.born),
        "owner": OWNER,
        "project_id": session.project,
        "status": {"type": "active"} if done is None else {"type": "client_finished", **done},
        "checkpoints_count": len(cards),
        "display_name": session.facts["display_name"],
        "user_metadata": session.facts["user_metadata"],
        "checkpoint_storage_bytes": sum(card["size_bytes"] for card in cards),
    }


async def finish_session(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    how = (sent.get("reason") or {}).get("type", "success")
    if how not in ("success", "errored", "interrupted"):
        raise UserError(f"reason.type = {how!r:.40}; it is success, errored or interrupted")
    await clients.end_session(_session_of(clients, request), how, sent.get("detail"))


async def assign_project(clients: Clients, request: Request, sent: dict[str, Any]) -> Any:
    _session_of(clients, request).project = str(sent.get("project_id") or "default")
