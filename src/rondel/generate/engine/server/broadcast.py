"""Weights over torch.distributed, as SGLang takes them: a group that a trainer leads
as rank 0, and one broadcast a tensor.

    /init_weights_update_group        join: both sides wait for each other
    /update_weights_from_distributed  some tensors by the names of the family's checkpoints, or by the module's; they
                                      wait beside those that serve. The call that brings the last one commits
    /destroy_weights_update_group     leave, and forget what has come

So an update is whole or none (law 6), where SGLang serves what has come so far. Bytes of
tensors and nothing else are read from the group.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from starlette.requests import Request
from torch import Tensor

from rondel.core.errors import StalledError, SyncError
from rondel.generate.engine.builtin import staged_update
from rondel.generate.engine.server.fields import RequestFields
from rondel.generate.engine.server.told import (
    client_lifetime,
    deliver_weights,
    errors_as_refusals,
    exclusive_update,
    fields_of,
    success_reply,
    version_of,
)
from rondel.models import names
from rondel.system import sockets
from rondel.system.http.response import RequestRefusal

if TYPE_CHECKING:
    from rondel.generate.engine.server.service import GenerationService

NAME, WAIT = "weight_update_group", 300.0  # SGLang's default name; seconds that either side waits for the other
AGAIN = 0.2  # seconds between two looks whether the other side listens
MOST = 1 << 16  # tensors of one call


@dataclass(slots=True)
class WeightGroup:
    """What has been joined (None until then), and what came through it since the last commit."""

    group: Any
    device: str
    arrived: dict[str, Tensor] = field(default_factory=dict)


async def init_weights_update_group(service: GenerationService, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    host, port = f.read_string("master_address", ""), f.read_integer("master_port", None, 1, 65535)
    rank, size = f.read_integer("rank_offset", 1, 1, 4095), f.read_integer("world_size", None, 2, 4096)
    name, backend, wait = (
        f.read_string("group_name", NAME),
        f.read_string("backend", "nccl"),
        f.take_number("timeout", WAIT, 0.1, 3600.0),
    )
    f.refuse_unknown_fields()
    device = service.engine.loaded.device.type
    if not host or port is None or size is None:
        raise RequestRefusal(400, "a group needs master_address, master_port and world_size", param="master_address")
    if name is None:
        raise RequestRefusal(400, "a group needs a group_name", param="group_name")
    if rank >= size:
        raise f.field_error("rank_offset", f"of {size} members the last one is {size - 1}")
    if backend != (fits := "nccl" if device == "cuda" else "gloo"):
        raise f.field_error("backend", f"the weights of this server lie on a {device}: {fits}")
    if name in service.groups:
        raise RequestRefusal(
            409, f"group '{name}' is there already, or is being joined; /destroy_weights_update_group ends it"
        )
    service.groups[name] = WeightGroup(None, device)  # nothing moves while it is joined: updates by other ways go on
    try:
        async with errors_as_refusals(service), client_lifetime(request):
            end = time.monotonic() + wait
            await _wait_for_port(host, port, end, wait)
            service.groups[name].group = await asyncio.to_thread(
                _join_group, host, port, rank, size, name, end - time.monotonic(), device
            )
    except BaseException:
        del service.groups[name]
        raise
    return success_reply(f"rank {rank} of {size} in group '{name}'")


async def _wait_for_port(host: str, port: int, end: float, wait: float) -> None:
    """Until somebody listens there. torch's store asks a dead address past its own
    time-out, on a thread that nobody can stop.
    """
    while True:
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
        except (OSError, UnicodeError, OverflowError) as error:  # TimeoutError is an OSError
            if time.monotonic() + AGAIN >= end:
                raise StalledError(
                    f"nobody listens at {host}:{port}: {error or 'no answer'} (waited {wait:g} s)"
                ) from error
            await asyncio.sleep(AGAIN)


def _join_group(host: str, port: int, rank: int, size: int, name: str, wait: float, device: str) -> Any:
    """The same keys in the same store as torch's own groups, of which the other side has
    one (its `_new_process_group_helper`).
    """
    limit = timedelta(seconds=max(wait, 0.1))
    try:
        store: Any = dist.TCPStore(host, port, size, is_master=False, timeout=limit)
        for prefix in (name, f"{name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)
        if device == "cpu":
            return dist.ProcessGroupGloo(store, rank, size, sockets.gloo_at(host, wait))
        options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise _transfer_error(f"joining '{name}' at {host}:{port}", wait, error) from error


async def destroy_weights_update_group(service: GenerationService, request: Request) -> dict[str, Any]:
    f = await fields_of(service, request)
    name = f.read_string("group_name", NAME)
    f.refuse_unknown_fields()
    async with exclusive_update(service):
        if service.groups.get(str(name), WeightGroup(None, "")).group is None:
            raise RequestRefusal(400, f"there is no group '{name}'", param="group_name")
        del service.groups[str(name)]
    return success_reply(f"group '{name}' is left")


async def update_weights_from_distributed(service: GenerationService, request: Request) -> dict[str, Any]:
    """`names`, `dtypes`, `shapes` of the broadcasts that follow, in order; with `load_format`
    "flattened_bucket" they are one broadcast.
    """
    f = await fields_of(service, request)
    rows, name = _announced_tensors(service, f), f.read_string("group_name", NAME)
    flat = f.read_string("load_format") == "flattened_bucket"
    f.allow_only("load_format", "flattened_bucket", "auto")
    version, keep, abort = (
        version_of(service, f),
        not f.read_flag("flush_cache", True),
        f.read_flag("abort_all_requests"),
    )
    f.refuse_unknown_fields()
    if (group := service.groups.get(str(name))) is None or group.group is None:
        raise RequestRefusal(
            400, f"there is no group '{name}': /init_weights_update_group makes one", param="group_name"
        )
    if twice := sorted(group.arrived.keys() & {row[0] for row in rows}):
        group.arrived.clear()
        raise RequestRefusal(
            400, f"{twice[0]} came twice before all tensors had come; what had come is forgotten", param="names"
        )
    async with exclusive_update(service):
        try:
            came = await asyncio.to_thread(_receive_tensors, group, rows, flat)
        except BaseException:
            service.groups.pop(str(name), None)  # its members are no longer in step
            raise
        wanted = names.updatable_tensors(service.engine.loaded.model, {*group.arrived, *came})
        if strangers := sorted(group.arrived.keys() - wanted.keys()):
            group.arrived.clear()
            raise RequestRefusal(
                400,
                f"{strangers[0]} is the module's name, and others are the checkpoint's: all of one update have one "
                f"kind",
                param="names",
            )
        group.arrived |= {n: t.to(wanted[n].dtype) for n, t in came.items()}
        if missing := len(wanted) - len(group.arrived):
            said = f"{len(came)} tensors wait for the {missing} that are still to come"
            return success_reply(said, weight_version=str(service.engine.version))
        whole, group.arrived = group.arrived, {}
        deliver = partial(
            staged_update.apply_update,
            service.engine,
            service.run,
            lambda _, found: found,
            whole,
            version=version,
            keep=keep,
        )
        return await deliver_weights(service, deliver, abort=abort)


def _announced_tensors(service: GenerationService, f: RequestFields) -> list[tuple[str, torch.dtype, list[int]]]:
    """Announced as this model has them, so that nothing is waited for that could not be taken."""
    found, dtypes, shapes = f.read_strings("names", MOST), f.read_strings("dtypes", MOST), f.read_field("shapes", [])
    if not found or not isinstance(shapes, list) or not len(found) == len(dtypes) == len(shapes):
        raise RequestRefusal(400, "names, dtypes and shapes are lists of one length, with a tensor each", param="names")
    if len(set(found)) < len(found):
        raise f.field_error("names", "each tensor comes once")
    mine = names.updatable_tensors(service.engine.loaded.model, found)
    rows = []
    for name, dtype, shape in zip(found, dtypes, shapes):
        if name not in mine:
            raise RequestRefusal(400, f"this model has no tensor '{name[:200]}'", param="names")
        if shape != list(mine[name].shape):
            raise RequestRefusal(
                400, f"{name} has shape {list(mine[name].shape)} here, and not {str(shape)[:80]}", param="shapes"
            )
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype) or kind.is_floating_point != mine[name].is_floating_point():
            raise RequestRefusal(
                400, f"{name} is {mine[name].dtype} here, and cannot come as '{dtype[:80]}'", param="dtypes"
            )
        rows.append((name, kind, shape))
    return rows


def _receive_tensors(
    group: WeightGroup, rows: list[tuple[str, torch.dtype, list[int]]], flat: bool
) -> dict[str, Tensor]:
    """On a thread of its own: the device goes on decoding while the other side sends."""
    tensors = {name: torch.empty(shape, dtype=kind, device=group.device) for name, kind, shape in rows}
    sizes = [t.numel() * t.element_size() for t in tensors.values()]
    whole = [torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)] if flat else list(tensors.values())
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        for work in [group.group.broadcast([t], options) for t in whole]:
            work.wait()
        if group.device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise _transfer_error(
            f"{len(rows)} tensors were announced and did not come, so the group is left", WAIT, error
        ) from error
    if flat:
        for tensor, piece in zip(tensors.values(), whole[0].split(sizes)):
            tensor.view(-1).view(torch.uint8).copy_(piece)
    return tensors


def _transfer_error(what: str, wait: float, error: RuntimeError) -> SyncError | StalledError:
    late = any(word in str(error).lower() for word in ("timeout", "timed out"))
    said = f"{what}: {str(error)[:300]}"
    return StalledError(f"{said} (waited at most {wait:g} s)") if late else SyncError(said)
