"""Weights that reach `rondel serve` by broadcast and by shared memory, from a trainer that knows
nothing of this house.
"""

from __future__ import annotations

import base64
import http.client
import json
import pickle
import threading
from unittest.mock import ANY

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from kits.engine import SIZE, plain_logits, prompt, twin
from kits.engine import tiny as tiny_model
from rondel.core.types import Route
from rondel.models import names
from rondel.models.save import save_model
from rondel.sync.from_ipc import FromIpc

pytestmark = pytest.mark.slow

serve_kit = pytest.importorskip("kits.serve")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", **{**SIZE, "max_position_embeddings": 512})


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save_model(model, folder)
    running = serve_kit.Server(folder, tmp_path_factory.mktemp("server"), "--kv-pages", "8192")
    yield running
    running.stop()


def init_custom_process_group(port: int, size: int, rank: int, name: str):
    """As OpenRLHF, slime and SGLang make it: torch's own helper over a store of the caller's."""
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=c10d.default_pg_timeout))
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), store, group_name=name, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


class Client:
    """The trainer's side of SGLang's protocol."""

    def __init__(self, server, name: str) -> None:
        self.server, self.name, port = server, name, _free_port()
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        asked = threading.Thread(
            target=lambda: setattr(self, "reply", server.post("/init_weights_update_group", group_name=name, **body))
        )
        asked.start()
        self.group = init_custom_process_group(port, 2, 0, name)
        asked.join(60)
        assert self.reply[0] == 200, self.reply

    def send(self, rows, *, flat: bool = False, **more):
        told: list = []
        described = {
            "names": [n for n, _ in rows],
            "dtypes": [str(t.dtype) for _, t in rows],
            "shapes": [list(t.shape) for _, t in rows],
        }
        described |= {"group_name": self.name, **({"load_format": "flattened_bucket"} if flat else {}), **more}
        asking = threading.Thread(
            target=lambda: told.append(self.server.post("/update_weights_from_distributed", **described))
        )
        asking.start()
        tensors = [t.contiguous() for _, t in rows]
        if flat:
            tensors = [torch.cat([t.view(-1).view(torch.uint8) for t in tensors])]
        for work in [dist.broadcast(t, src=0, group=self.group, async_op=True) for t in tensors]:
            work.wait()
        asking.join(60)
        return told[0]


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def moved(model, seed: int):
    other = twin(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.model.parameters():
            p.add_(0.2 * p.std() * torch.randn(p.shape, generator=generator))
    return other


def drawn(server, model) -> str:
    """Whose weights serve: the greedy continuation of a prompt and its logprobs agree with
    this model's, computed by transformers.
    """
    tokens = prompt(3, 9)
    reply = server.ok(
        "/generate", input_ids=tokens, sampling_params={"temperature": 0, "max_new_tokens": 4}, return_logprob=True
    )
    logp = plain_logits(model, tokens + reply["output_ids"])[len(tokens) - 1 : -1].log_softmax(-1)
    told = [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
    ours = [float(logp[i, t]) for i, t in enumerate(reply["output_ids"])]
    assert max(abs(a - b) for a, b in zip(told, ours)) < 1e-4, (told, ours)
    return reply["meta_info"]["weight_version"]


def test_tensors_by_broadcast_in_buckets(server, model):
    """The old version serves until the last tensor has come; then the new one, whole.
    Buckets flat or one by one, bf16 or fp32.
    """
    client, before = Client(server, "first"), drawn(server, model)
    for number, (flat, dtype) in enumerate([(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]):
        other = moved(model, number)
        with torch.no_grad():
            for p in other.model.parameters():
                p.copy_(p.to(dtype))
        rows = [(n, t.to(dtype)) for n, t in names.named_weights(other.model)]
        half = len(rows) // 2
        status, told = client.send(rows[:half], flat=flat)
        assert (status, told["weight_version"]) == (
            200,
            before,
        ) and f"{len(rows) - half} that are still to come" in told["message"]
        assert drawn(server, moved(model, number - 1) if number else model) == before
        status, told = client.send(rows[half:], flat=flat, weight_version=str(int(before) + 7))
        assert (status, told["weight_version"]) == (200, str(int(before) + 7))
        before = drawn(server, other)
        if dtype == torch.bfloat16:
            break
    server.ok("/destroy_weights_update_group", group_name="first")
    assert server.post("/destroy_weights_update_group", group_name="first")[0] == 400


def test_what_does_not_fit_is_refused_before_anyone_waits(server, model):
    serves, rows = server.get("/get_weight_version")["weight_version"], list(names.named_weights(model.model))
    ask = {"names": [rows[0][0]], "dtypes": ["float32"], "shapes": [list(rows[0][1].shape)], "group_name": "second"}
    status, told = server.post("/update_weights_from_distributed", **ask)
    assert status == 400 and "/init_weights_update_group makes one" in told["message"]
    client = Client(server, "second")
    for change, says in (
        ({"names": ["model.nothing"]}, "no tensor 'model.nothing'"),
        ({"shapes": [[3]]}, "has shape"),
        ({"dtypes": ["int8"]}, "cannot come as 'int8'"),
        ({"dtypes": ["__class__"]}, "cannot come as"),
        ({"names": []}, "lists of one length"),
        ({"weight_version": "latest"}, "whole number"),
        ({"load_format": "pickle"}, "does not offer it"),
        ({"zeta": 1}, "no field 'zeta'"),
    ):
        status, told = server.post("/update_weights_from_distributed", **{**ask, **change})
        assert status == 400 and told["success"] is False and says in told["message"], (change, told)
    for change, says in (
        ({"backend": "nccl"}, "gloo"),
        ({"world_size": 1}, "world_size"),
        ({"rank_offset": 2}, "of 2 members"),
    ):
        body = {
            "master_address": "127.0.0.1",
            "master_port": 1,
            "world_size": 2,
            "backend": "gloo",
            "group_name": "third",
            **change,
        }
        status, told = server.post("/init_weights_update_group", **body)
        assert status == 400 and says in told["message"]
    assert server.post("/init_weights_update_group", **{**body, "rank_offset": 1, "group_name": "second"})[0] == 409
    bad = rows[0][1].clone()
    bad.view(-1)[0] = float("nan")
    status, told = client.send([(rows[0][0], bad), *rows[1:]])
    assert status == 400 and "NaN" in told["message"] and f"version {serves} goes on serving" in told["message"]
    assert client.send(rows[:1])[0] == 200
    status, told = server.post("/update_weights_from_distributed", **ask)
    assert status == 400 and "came twice" in told["message"]
    assert client.send(rows, weight_version=int(serves) + 1)[0] == 200, (
        "what had come is forgotten, the group is in step"
    )
    drawn(server, model)
    del client.group
    server.ok("/destroy_weights_update_group", group_name="second")


def test_a_group_at_a_dead_address_holds_up_nobody(server, model):
    body = {
        "master_address": "127.0.0.1",
        "master_port": _free_port(),
        "world_size": 2,
        "backend": "gloo",
        "group_name": "dead",
    }
    told: list = []

    def ask():
        while not told or told[-1][0] == 409:  # the other one was there first
            told.append(server.post("/init_weights_update_group", **body, timeout=4.0))

    asking = threading.Thread(target=ask)
    asking.start()
    again: list = []
    serve_kit.until(
        lambda: again.append(server.post("/init_weights_update_group", **body, timeout=0.1)) or again[-1][0] == 409, 20
    )
    assert "being joined" in again[-1][1]["message"]
    assert server.post("/destroy_weights_update_group", group_name="nobody") == (400, ANY), (
        "409 while another update is on its way"
    )
    asking.join(30)
    status, reply = told[-1]
    assert status == 400 and "nobody listens at 127.0.0.1" in reply["message"] and "waited 4 s" in reply["message"]
    link = http.client.HTTPConnection("127.0.0.1", server.port)
    link.request("POST", "/init_weights_update_group", json.dumps({**body, "timeout": 900.0}), serve_kit.JSON)
    serve_kit.until(lambda: server.post("/init_weights_update_group", **body, timeout=0.1)[0] == 409, 20)
    link.close()
    serve_kit.until(lambda: server.post("/init_weights_update_group", **body, timeout=0.1)[0] == 400, 20)


def test_an_older_version_and_whole_numbers_are_not_served_by_mistake(server, model, tmp_path):
    serves = int(server.get("/get_weight_version")["weight_version"])
    rows = {n: t.contiguous() for n, t in names.named_weights(model.model)}
    server.ok("/update_weights_from_tensor", serialized_named_tensors=[_text(rows)], weight_version=serves + 5)
    for path, body in (
        ("/update_weights_from_tensor", {"serialized_named_tensors": [_text(rows)]}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path)}),
    ):
        status, told = server.post(path, **body, weight_version=serves + 4)
        assert status == 409 and f"{serves + 5} serves" in told["message"] and "rollback = true" in told["message"]
    octets, blob = {"Content-Type": "application/octet-stream"}, safetensors.torch.save(rows)
    assert server.raw("POST", f"/update_weights_from_tensor?weight_version={serves}", blob, octets)[0] == 409
    assert (
        server.raw("POST", f"/update_weights_from_tensor?weight_version={serves}&rollback=true", blob, octets)[0] == 200
    )
    assert (
        server.raw("POST", f"/update_weights_from_tensor?weight_version={serves}&rollback=yes", blob, octets)[0] == 400
    )
    codes = {n: (t * 100).to(torch.int32) for n, t in rows.items()}
    (tmp_path / "codes").mkdir()
    safetensors.torch.save_file(codes, tmp_path / "codes" / "model.safetensors", metadata={"format": "pt"})
    status, told = server.post("/update_weights_from_disk", model_path=str(tmp_path / "codes"))
    assert status == 400 and "is I32; weights are" in told["message"]
    assert server.post("/update_weights_from_tensor", serialized_named_tensors=[_text(codes)])[0] == 400
    assert drawn(server, model) == str(serves)


def _text(tensors) -> str:
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def test_a_trainer_that_dies_leaves_the_old_version(server, model):
    client, serves = Client(server, "dying"), server.get("/get_weight_version")["weight_version"]
    rows = list(names.named_weights(model.model))
    assert client.send(rows[:2])[0] == 200
    told: list = []
    ask = {"names": [rows[2][0]], "dtypes": ["float32"], "shapes": [list(rows[2][1].shape)], "group_name": "dying"}
    asking = threading.Thread(target=lambda: told.append(server.post("/update_weights_from_distributed", **ask)))
    asking.start()
    c10d.destroy_process_group(client.group)  # its connections close
    del client.group
    asking.join(60)
    status, reply = told[0]
    assert (
        status == 400
        and f"version {serves} goes on serving" in reply["message"]
        and "the group is left" in reply["message"]
    )
    assert drawn(server, model) == serves
    assert server.post("/update_weights_from_distributed", **ask)[0] == 400


def test_tensors_in_shared_memory_are_read_in_place(server, model):
    writer, serves = FromIpc(), int(server.get("/get_weight_version")["weight_version"])
    for number in range(3):
        other = moved(model, 20 + number)
        rows = list(names.describe_tensors((n, t) for n, t in names.named_weights(other.model)))
        manifest, route = writer.publish(Route("ipc"), 0, iter(rows))
        place = route.data
        body = {
            "manifest": manifest.to_dict(),
            "segment": {"path": place.path, "size": place.size, "number": place.number},
        }
        reply = server.ok("/update_weights_from_ipc", **body)
        serves += 1
        assert reply["weight_version"] == str(serves) == drawn(server, other)
    for change, says in (
        ({"segment": {**body["segment"], "path": "/etc/passwd"}}, "is no segment"),
        ({"segment": {**body["segment"], "path": "/proc/1/../self/fd/3"}}, "is no segment"),
        ({"segment": {**body["segment"], "number": place.number + 1}}, "holds publication"),
        ({"segment": {**body["segment"], "size": place.size - 4096}}, "bytes and not"),
        ({"segment": {**body["segment"], "cuda": "gASV"}}, "no field 'segment.cuda'"),
        ({"zmq_handles": {"GPU-0": "ipc:///tmp/x"}}, "pickle is never read"),
        ({"manifest": {**body["manifest"], "root": "0" * 32}}, "its rows have"),
        ({"manifest": {"version": 1, "tensors": [[1, 2]]}}, "it is no manifest"),
        ({"manifest": {**manifest.to_dict(), "tensors": manifest.to_dict()["tensors"][1:]}}, "its rows have"),
    ):
        status, told = server.post("/update_weights_from_ipc", **{**body, **change})
        assert status == 400 and says in told["message"], (change, told)
    assert drawn(server, other) == str(serves)
    writer.close()


class Bomb:
    """What unpickling it would do."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_no_pickle_is_read_from_the_network(server, tmp_path):
    """In any field and any body of any update endpoint."""
    blob = pickle.dumps(Bomb(tmp_path / "fired"))
    import base64

    text = base64.b64encode(blob).decode()
    for path in ("from_tensor", "from_distributed", "from_ipc", "from_disk"):
        for headers in ({"Content-Type": "application/octet-stream"}, serve_kit.JSON):
            assert server.raw("POST", f"/update_weights_{path}", blob, headers)[0] in (400, 415)
        for field in ("serialized_named_tensors", "manifest", "segment", "names", "zmq_handles", "load_format"):
            for value in (text, [text], {"x": text}):
                assert (
                    server.raw("POST", f"/update_weights_{path}", json.dumps({field: value}), serve_kit.JSON)[0] == 400
                )
    assert not (tmp_path / "fired").exists()
