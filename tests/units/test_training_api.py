"""The training API without a model: order, repetition, what is kept, what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kits.training_backend import CountingBackend
from rondel.assemble.served_engine import ServerSettings
from rondel.assemble.training_server import serve_training
from rondel.core.errors import CheckpointError, ConfigError, UserError
from rondel.system.folder_lock import lock_folder
from rondel.training_api import clients as clients_module
from rondel.training_api import promises as promises_module
from rondel.training_api import samplers as samplers_module
from rondel.training_api.backend import Adam, Example, SampleSettings
from rondel.training_api.clients import Clients
from rondel.training_api.promises import InOrder, Promises
from rondel.training_api.protobuf import decode_message, encode_message, packed_varints, read_varints
from rondel.training_api.samplers import ServedWeights
from rondel.training_api.store import Store, expiry
from rondel.training_api.wire import ForwardRequest, read_forward_request

NUMBERS = st.integers(0, 2**64 - 1)
FACTS = {"user_metadata": None, "display_name": None}


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 1000), st.one_of(NUMBERS, st.binary()))), st.lists(NUMBERS))
def test_messages_come_back(fields, numbers):
    sent = {}
    for number, value in fields:
        sent.setdefault(number, []).append(value)
    assert decode_message(encode_message(fields)) == sent
    assert read_varints([packed_varints(numbers)]) == numbers


@given(st.binary())
@example(b")\x15\0\0\0\0\0\x80\0")  # a number of four bytes where a double stands
def test_bytes_that_are_no_request_are_refused_and_nothing_worse(data):
    with suppress(UserError):
        read_forward_request(data)


def test_google_reads_what_is_written_and_the_other_way_round():
    pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="ppo", forward_only=True)
    request.loss_fn_config["beta"] = 0.25
    one = request.data.add()
    one.model_input.add().encoded_text.tokens = np.array([3, 4, 70000], np.int32).tobytes()
    targets, sparse = one.loss_fn_inputs["target_tokens"], one.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = np.array([[4, 1], [5, 2], [6, 3]], np.int64).tobytes(), pb.DTYPE_INT64
    targets.shape.extend([3, 2])
    csr = sparse.sparse_csr
    csr.values, csr.crow_indices = np.array([0.5, 2], np.float32).tobytes(), np.array([0, 1, 1, 2]).tobytes()
    csr.col_indices, sparse.dtype = np.array([1, 0]).tobytes(), pb.DTYPE_FLOAT32
    sparse.shape.extend([3, 2])
    read = read_forward_request(request.SerializeToString())
    assert (read.model, read.number, read.loss, read.config, read.backward) == ("m", 7, "ppo", {"beta": 0.25}, False)
    assert list(read.examples[0].tokens) == [3, 4, 70000] and read.examples[0].targets.tolist() == [
        [4, 1],
        [5, 2],
        [6, 3],
    ]
    assert read.examples[0].inputs["weights"].tolist() == [[0, 0.5], [0, 0], [2, 0]]
    csr.col_indices = np.array([1, 9]).tobytes()
    with pytest.raises(UserError, match="indices do not fit its shape"):
        read_forward_request(request.SerializeToString())


def test_requests_are_computed_in_the_order_of_their_numbers():
    async def go():
        order, done = InOrder(1), []

        async def work(number):
            done.append(number)
            return {}

        waiting = [asyncio.create_task(order.run(n, lambda n=n: work(n))) for n in (4, 2, 5)]
        await asyncio.sleep(0.01)
        assert done == []
        await order.skip(3)  # it was refused on arrival
        await order.run(1, lambda: work(1))
        await asyncio.gather(*waiting)
        assert done == [1, 2, 4, 5]

    asyncio.run(go())


@pytest.mark.parametrize("arrived", [(5, 4, 3, 2), (3, 5, 2, 4), (2, 3, 4, 5)])
def test_slow_passes_do_not_use_up_the_patience_of_what_waits_behind_them(arrived, monkeypatch):
    monkeypatch.setattr(InOrder, "PATIENCE", 0.02)

    async def go():
        order, done = InOrder(1), []

        async def work(number):
            await asyncio.sleep(0.05 if number <= 2 else 0)
            done.append(number)
            return {}

        tasks = [asyncio.create_task(order.run(1, lambda: work(1)))]
        await asyncio.sleep(0)
        for n in arrived:
            tasks.append(asyncio.create_task(order.run(n, lambda n=n: work(n))))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert done == [1, 2, 3, 4, 5]

    asyncio.run(go())


def test_what_was_never_sent_is_passed_over_and_refused_when_it_comes_after_all(monkeypatch):
    monkeypatch.setattr(InOrder, "PATIENCE", 0.02)

    async def go():
        order, done = InOrder(1), []

        async def work(number):
            done.append(number)
            return {}

        await asyncio.gather(*(order.run(n, lambda n=n: work(n)) for n in (4, 3)))
        assert done == [3, 4]
        with pytest.raises(UserError, match="seq_id 2 comes too late: this server is at 5"):
            await order.run(2, lambda: work(2))
        await order.run(None, lambda: work(None))
        assert done == [3, 4, None]

    asyncio.run(go())


def test_a_refusal_is_answered_while_a_pass_runs_and_leaves_no_gap():
    async def go():
        order, done, gate = InOrder(1), [], asyncio.Event()

        async def work(number):
            if number == 1:
                await gate.wait()
            done.append(number)
            return {}

        tasks = [asyncio.create_task(order.run(n, lambda n=n: work(n))) for n in (1, 3)]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(order.skip(2), 0.5)
        gate.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert done == [1, 3]

    asyncio.run(go())


def test_results_are_kept_within_a_number_of_bytes_and_fetched_ones_go_first(monkeypatch):
    monkeypatch.setattr(promises_module, "BYTES", 1000)

    async def go():
        promises = Promises()

        async def work():
            return bytes(300)

        for name in "abc":
            await promises.post(name, work).task
        await asyncio.sleep(0)
        assert await promises.retrieve("b", 0.0) == bytes(300)
        await promises.post("d", work).task
        await asyncio.sleep(0)
        with pytest.raises(KeyError):
            await promises.retrieve("b", 0.0)
        assert [len(await promises.retrieve(name, 0.0)) for name in "acd"] == [300] * 3
        monkeypatch.setattr(promises_module, "KEPT", -1.0)
        await promises.post("e", work).task
        await asyncio.sleep(0)
        assert list(promises._known) == ["e"] and promises._bytes == 300

    asyncio.run(go())


def test_what_is_sent_twice_is_computed_once_and_failures_are_results():
    async def go():
        promises, count = Promises(), [0]

        async def work():
            count[0] += 1
            await asyncio.sleep(0.01)
            if count[0] > 1:
                raise UserError("no")
            return {"n": count[0]}

        assert promises.post("a", work) is promises.post("a", work)
        assert await promises.retrieve("a", 0.0) is None
        assert await promises.retrieve("a", 1.0) == await promises.retrieve("a", 1.0) == {"n": 1}
        promises.post("b", work)
        assert await promises.retrieve("b", 1.0) == {"error": "no", "category": "user"}
        with pytest.raises(KeyError):
            await promises.retrieve("c", 0.0)

    asyncio.run(go())


def test_checkpoints_are_whole_or_not_there(tmp_path):
    store = Store(tmp_path)
    store.create_run("s:train:0", {"rank": 4})
    with pytest.raises(RuntimeError), store.new_checkpoint("s:train:0", "weights", "a", {}, overwrite=False) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("the disk is full")
    assert store.checkpoints() == []
    left = tmp_path / "runs" / "s_train_0" / "weights" / ".new-killed"
    left.mkdir()
    with store.new_checkpoint("s:train:0", "weights", "a", {}, overwrite=False) as folder:
        (folder / "x").write_text("12345")
    again = Store(tmp_path)
    assert not left.exists()
    [card] = again.checkpoints("s:train:0")
    assert (card["tinker_path"], card["size_bytes"]) == ("tinker://s:train:0/weights/a", 5)
    with (
        pytest.raises(UserError, match="exists already"),
        store.new_checkpoint("s:train:0", "weights", "a", {}, overwrite=False),
    ):
        pass
    again.change_note("s:train:0", "weights", "a", expires=time.time() - 1)
    with pytest.raises(KeyError, match="has expired"):
        again.place("tinker://s:train:0/weights/a")
    assert again.checkpoints() == []
    for bad in ("..", "a/b", ".new-x", "", "x" * 200):
        with pytest.raises(UserError), store.new_checkpoint("s:train:0", "weights", bad, {}, overwrite=False):
            pass
    for address in ("tinker://../weights/a", "tinker://x/other/a", "/etc/passwd", "tinker://a/weights/../../b"):
        with pytest.raises((UserError, KeyError)):
            store.place(address)
    for ttl in (10, 10**12):
        with pytest.raises(UserError, match="from 3600"):
            expiry(ttl)


def test_a_checkpoint_that_is_replaced_is_there_until_its_replacement_is(tmp_path, monkeypatch):
    """The server is killed between any two renames, and the next one on the folder finds the old or the new one."""

    def replace(store):
        with store.new_checkpoint("s:train:0", "weights", "a", {}, overwrite=True) as folder:
            (folder / "x").write_text("new")

    class Killed(BaseException):
        pass

    rename = os.rename
    for survived in range(3):
        store = Store(tmp_path / str(survived))
        store.create_run("s:train:0", {"rank": 4})
        with store.new_checkpoint("s:train:0", "weights", "a", {}, overwrite=False) as folder:
            (folder / "x").write_text("old")
        renames = []

        def die(old, new, *, survived=survived, renames=renames):
            if len(renames) == survived:
                raise Killed
            renames.append(new)
            rename(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", die)
            if survived < 2:
                with pytest.raises(Killed):
                    replace(store)
            else:
                replace(store)
        place = Store(tmp_path / str(survived)).place("tinker://s:train:0/weights/a")
        assert (place / "x").read_text() == ("new" if survived == 2 else "old")
        assert [path.name for path in place.parent.iterdir()] == ["a"]


def test_a_damaged_file_stops_neither_the_server_nor_the_list(tmp_path):
    store = Store(tmp_path)
    for run in ("a:train:0", "b:train:0", "c:train:0"):
        store.create_run(run, {"rank": 4})
        with store.new_checkpoint(run, "sampler_weights", "x", {}, overwrite=False):
            pass
    (tmp_path / "runs" / "a_train_0" / "facts.json").write_text("")
    (tmp_path / "runs" / "b_train_0" / "sampler_weights" / "x" / "checkpoint.json").write_bytes(b"[\xff")
    again = Store(tmp_path)
    assert [card["tinker_path"] for card in again.checkpoints()] == ["tinker://c:train:0/sampler_weights/x"]
    for address in ("tinker://b:train:0/sampler_weights/x",):
        with pytest.raises(CheckpointError, match=r"checkpoint\.json' is damaged: put back a copy of it, or remove"):
            again.place(address)
    with pytest.raises(CheckpointError, match=r"facts\.json' is damaged"):
        again.run("a:train:0")


def test_a_full_disk_is_told_with_its_remedy_and_what_was_done_is_done(tmp_path, capsys):
    """The log of requests is on the full disk, too: no step is told to have failed that was taken."""

    async def go():
        clients = Clients(CountingBackend(), tmp_path)
        model = await model_of(clients)
        example = Example([1, 2], np.array([1, 2]))
        clients.log._file.close()
        clients.log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        await clients.forward(ForwardRequest(model.id, 1, [example], "x", {}, True)).task
        assert (await clients.optim_step(model, 2, Adam(0.5)).task)["metrics"] == {"bias": 1.0}

        async def save(adapter, folder, *, optimizer):
            with open("/dev/full", "wb") as file:
                file.write(b"x" * 100)

        clients.backend.save = save
        promise = clients.save(model, 3, "weights", {"path": "a"})
        told = await clients.promises.retrieve(promise.id, 5)
        assert told["category"] == "user" and "the disk is full" in told["error"] and "weights/a" in told["error"]
        assert clients.store.checkpoints() == []
        await clients.close()

    asyncio.run(go())
    told = capsys.readouterr().err
    assert told.count("requests are not noted") == 1 and "requests.jsonl: the disk is full" in told


def test_lines_behind_one_that_a_kill_has_cut_off_are_whole(tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"at": 1.0, "what": "optim')

    async def go():
        clients = Clients(CountingBackend(), tmp_path)
        await model_of(clients)
        await clients.close()

    asyncio.run(go())
    asyncio.run(go())
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines[1:]] == ["create_model", "create_model"]


def test_a_folder_is_one_servers(tmp_path):
    """A second one would delete what the first is writing, and the snapshots of its clients."""
    with (
        lock_folder(tmp_path, "free"),
        pytest.raises(ConfigError, match=r"another server works in .*: end it, or give this one a --folder of its own"),
    ):
        serve_training("nowhere", ServerSettings(), folder=tmp_path, key="k", ready=print)


async def model_of(clients, number=0):
    session = clients.create_session(dict(FACTS))
    name = (await clients.create_model(session, number, {"rank": 4}, None).task)["model_id"]
    return clients.models[name]


def test_a_client_has_its_adapter_its_order_and_its_snapshots(tmp_path, monkeypatch):
    monkeypatch.setattr(samplers_module, "SERVED", 2)

    async def go():
        backend = CountingBackend()
        clients = Clients(backend, tmp_path)
        model = await model_of(clients)
        one = Example([1, 2, 3], np.array([1, 2, 3]))
        parts = [clients.forward(ForwardRequest(model.id, n, [one], "x", {}, True)) for n in (2, 1)]
        again = clients.forward(ForwardRequest(model.id, 2, [one], "x", {}, True))
        step = clients.optim_step(model, 3, Adam(1.0))
        assert again is parts[0] and (await step.task)["metrics"] == {"bias": 6.0}
        samplers = []
        for number in range(4, 9):
            done = await clients.save_for_sampler(model, number, {"sampling_session_seq_id": number}).task
            samplers.append(clients.samplers.get(done["sampling_session_id"]))
        assert len(backend.served) == 2, "the others lie on the disk"
        await clients.samplers.sample("x", 1, samplers[0].reads, [1], SampleSettings()).task
        assert len(backend.served) == 2 and samplers[0].reads.address in backend.served
        first = await clients.save_for_sampler(model, 9, {"sampling_session_seq_id": 90, "kind": "inflight"}).task
        moved = await clients.save_for_sampler(model, 10, {"sampling_session_seq_id": 91, "kind": "inflight"}).task
        follows = clients.samplers.get(first["sampling_session_id"])
        assert follows.reads.address == moved["path"] != first["path"]
        with pytest.raises(KeyError, match="there is no checkpoint"):
            await clients.samplers.sample(
                "x", 2, ServedWeights(f"tinker://{model.id}/weights/none"), [1], SampleSettings()
            ).task
        await clients.close()
        lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
        assert [line["what"] for line in lines[:4]] == [
            "create_model",
            "forward_backward",
            "forward_backward",
            "optim_step",
        ]
        assert "there is no checkpoint" in lines[-1]["failed"]
        assert json.loads((tmp_path / "card.json").read_text())["trained_tokens"] == 6

    asyncio.run(go())


def test_a_checkpoint_that_is_overwritten_is_read_anew_by_its_samplers(tmp_path):
    async def go():
        backend = CountingBackend()
        clients = Clients(backend, tmp_path)
        model = await model_of(clients)
        for number, bias in enumerate((3.0, 7.0), 1):
            backend.bias[model.id] = bias
            saved = await clients.save(model, number, "weights", {"path": "a", "overwrite": True}).task
            reads = ServedWeights(saved["path"])
            await clients.samplers.sample("x", number, reads, [1], SampleSettings()).task
            assert backend.served == {saved["path"]: bias}
        await clients.close()

    asyncio.run(go())


def test_silent_sessions_end_and_there_is_an_end_to_adapters(tmp_path, monkeypatch):
    monkeypatch.setattr(clients_module, "TRAINED", 2)

    async def go():
        backend = CountingBackend()
        clients = Clients(backend, tmp_path)
        first = await model_of(clients)
        await model_of(clients)
        with pytest.raises(UserError, match="2 adapters are trained here already"):
            await model_of(clients)
        clients.sessions[first.id.partition(":")[0]].heard -= 2 * clients_module.SILENCE
        clients.create_session(dict(FACTS))
        await asyncio.sleep(0.05)
        assert first.id not in clients.models and len(backend.bias) == 1
        await model_of(clients)
        await clients.close()

    asyncio.run(go())


def served(backend, tmp_path):
    from starlette.testclient import TestClient

    from rondel.training_api.app import build_app

    return TestClient(
        build_app(backend, tmp_path, "tml-k"), headers={"x-api-key": "tml-k"}, raise_server_exceptions=False
    )


BAD = {
    "create_model": [
        {"lora_config": [1]},
        {"lora_config": {"rank": [4]}},
        {"optimizer_config": "adam"},
        {"model_seq_id": "0"},
    ],
    "create_sampling_session": [{"model_path": 5}, {"base_model": {}}],
    "sessions/search": [{"user_metadata": [1]}, {"limit": "x"}],
    "load_weights": [{"path": 7}, {"path": "tinker://a/weights/b", "optimizer": "yes"}],
    "optim_step": [
        {"adam_params": [1]},
        {"adam_params": {"weight_decay": -1.0}},
        {"seq_id": "1", "adam_params": {}},
        *({"adam_params": {"learning_rate": rate}} for rate in (None, [1], "1e-4", True, float("inf"), 10**400)),
        {"adam_params": {"eps": float("nan")}},
        {"adam_params": {"momentum": 0.9}},
    ],
    "asample": [
        {"prompt": {"chunks": [{"tokens": [1]}]}} | more
        for more in (
            {"sampling_params": {"stop": 5}},
            {"sampling_params": {"stop": {"a": 1}}},
            {"sampling_params": {"stop": [True]}},
            {"sampling_params": {"max_tokens": float("inf")}},
            {"sampling_params": {"max_tokens": 1.5}},
            {"sampling_params": {"temperature": float("nan")}},
            {"sampling_params": {"seed": "1"}},
            {"topk_prompt_logprobs": [1]},
        )
    ],
    "save_weights": [{"path": 5}, {"ttl_seconds": "soon"}],
    "create_session": [{"display_name": "\ud800"}, {"display_name": 5}],
}


def test_wrong_kinds_are_refused_and_not_sent_again(tmp_path):
    """400 and 404: clients repeat what ends in 500."""
    with served(CountingBackend(), tmp_path) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        for path, bodies in BAD.items():
            for body in bodies:
                usual = {
                    "session_id": session,
                    "model_seq_id": 0,
                    "sampling_session_seq_id": 0,
                    "base_model": "counting",
                }
                sent = json.dumps(usual | {"lora_config": {"rank": 4}, "model_id": "x"} | body)
                reply = client.post(f"/api/v1/{path}", content=sent)
                assert reply.status_code in (400, 404) and reply.json()["detail"], (path, body, reply.text)
        assert client.post("/api/v1/create_session", json={}, headers={"x-api-key": "tml-o"}).status_code == 401


def test_half_a_character_is_refused_wherever_it_is_and_a_whole_pair_is_read(tmp_path):
    """As an escape, in a name or deep inside, and in bytes that are no UTF-8; numbers that are no numbers stay."""
    halves = (
        b'{"\\ud83d": 1}',
        b'{"a": [NaN, {"b": "\\uDE00"}]}',
        b'{"a": "\\ude00\\ud83d"}',
        b'{"a": "\xed\xa0\x80"}',
    )
    wholes = (b'{"a": [NaN, "\\ud83d\\ude00"]}', b'{"a": "\\\\ud83d"}', '{"a": "😀"}'.encode(), b"\xef\xbb\xbf{}")
    with served(CountingBackend(), tmp_path) as client:
        for body in (*halves, *wholes):
            reply = client.post("/api/v1/create_session", content=body)
            assert reply.status_code == (400 if body in halves else 200), (body, reply.text)


def test_sparse_tensors_of_a_request_have_one_limit():
    csr = encode_message([(1, b""), (2, bytes(8 * 4097)), (3, b"")])
    tensor = encode_message([(2, csr), (3, 1), (4, packed_varints([4096, 4096]))])
    entry = [(2, encode_message([(1, name), (2, tensor)])) for name in (b"a", b"b")]
    with pytest.raises(UserError, match="more than 16777216 numbers"):
        read_forward_request(encode_message([(1, b"m"), (2, 1), (3, encode_message(entry))]))


def test_a_copy_that_is_sent_twice_is_one_and_touches_nothing_that_is_there(tmp_path):
    async def go(clients):
        model = await model_of(clients)
        return (await clients.save(model, 1, "weights", {"path": "one"}).task)["path"], model.id

    with served(CountingBackend(), tmp_path) as client:
        path, run = client.portal.call(go, client.app.clients)
        body, again = {"source_path": path, "destination_project_id": "p"}, {"x-idempotency-key": "k1"}
        first, second = (client.post("/api/v1/copy_weights", json=body, headers=again).json() for _ in range(2))
        assert first == second and client.post("/api/v1/copy_weights", json=body).json() != first
        into = body | {"session_id": run.partition(":")[0], "model_seq_id": 0}
        assert client.post("/api/v1/copy_weights", json=into).status_code == 400


def test_snapshots_without_a_name_go_with_their_session_or_server(tmp_path):
    async def go():
        clients = Clients(CountingBackend(), tmp_path / str(finish))
        model = await model_of(clients)
        session = clients.sessions[model.id.partition(":")[0]]
        for number in (1, 2):
            await clients.save_for_sampler(model, number, {"sampling_session_seq_id": number}).task
        await clients.save_for_sampler(model, 3, {"path": "named"}).task
        assert len(clients.store.checkpoints()) == 3
        if finish:
            await clients.end_session(session, "success", None)
        return [card["checkpoint_id"] for card in Store(tmp_path / str(finish)).checkpoints()], clients.backend.served

    for finish in (True, False):
        kept, left = asyncio.run(go())
        assert set(kept) == {"sampler_weights/named"} and bool(left) is not finish


def test_who_stops_waiting_for_an_adapter_does_not_lose_it(tmp_path):
    class Slow(CountingBackend):
        async def serve_adapter(self, name, folder):
            await asyncio.sleep(0.02)
            assert name not in self.served, "it is loaded once"
            await super().serve_adapter(name, folder)

    async def go():
        clients = Clients(Slow(), tmp_path)
        model = await model_of(clients)
        path = (await clients.save_for_sampler(model, 1, {"path": "a"}).task)["path"]
        gone = asyncio.create_task(clients.samplers.served.load(path))
        await asyncio.sleep(0.005)
        gone.cancel()
        await asyncio.gather(
            clients.samplers.served.load(path), clients.samplers.served.drop(path), clients.samplers.served.load(path)
        )
        assert list(clients.samplers.served.addresses) == list(clients.backend.served) == [path]

    asyncio.run(go())
