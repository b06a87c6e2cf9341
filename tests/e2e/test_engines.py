"""Whole tiny runs over several engines, and over engines of others."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kits.engine import SIZE, ask, plain_logprobs, prompt, twin
from kits.engine import tiny as tiny_model
from kits.runs import balances, events, run, tiny
from rondel.assemble import train
from rondel.core.errors import ConfigError, EngineError, SyncError
from rondel.core.events import StepDone, Synced, subscribe
from rondel.core.types import TensorInfo
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.engine.sglang import SglangServer
from rondel.models import names
from rondel.models.load import load_model
from rondel.models.main_grad import weights_changed
from rondel.models.save import save_model
from rondel.sync.from_disk import FromDisk
from rondel.sync.update import WeightUpdate

pytestmark = pytest.mark.slow

serve_kit = pytest.importorskip("kits.serve")

SHORT = {"loop__warmup__steps": 2, "loop__steps": 3, "loop__max_staleness": 1, "loop__window": "auto"}


def ended_well(folder, total: int) -> None:
    done = events(folder, "StepDone")
    assert [e["step"] for e in done] == [e["version"] for e in done] == list(range(1, total + 1))
    assert all(balances(e["ledger"]) and not e["note"] for e in done)
    assert events(folder, "RunEnded")[-1]["step"] == total


def test_a_run_survives_the_death_of_an_engine(tmp_path):
    """SIGKILL to one of two after the third step: what it had is sent to the other, it is started again and joins."""
    alive = []

    def kill(event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(alive[0].replicas["engine-1"].engine._worker.pid, signal.SIGKILL)

    stop = subscribe(kill)
    try:
        job = tiny(tmp_path, place__kind="split", place__engines=2, **SHORT)
        train(job, quiet=True, built=lambda parts: alive.append(parts.engine))
    finally:
        stop()
    ended_well(tmp_path, 5)
    assert sorted(alive[0].replicas) == ["engine-0", "engine-1"] and not alive[0].lost
    assert any("engine-1" in e["message"] and "SIGKILL" in e["message"] for e in events(tmp_path, "Warned"))
    assert max(e["probe_gap"] for e in events(tmp_path, "Synced")) < 1e-4
    logs = [
        path for path in (tmp_path / "wal").glob("engine-*") if any(p.stat().st_size > 100 for p in path.glob("*.bin"))
    ]
    assert len(logs) == 2, "one engine drew nothing"


# -- over HTTP --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(tiny_model("llama", **{**SIZE, "max_position_embeddings": 512}), path)
    return path


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    running = serve_kit.Server(folder, tmp_path_factory.mktemp("server"), "--kv-pages", "8192")
    yield running
    running.stop()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.port}"


class Trainer:
    """Weights that are multiplied by a little at each version."""

    def __init__(self, folder, weights) -> None:
        self.loaded, self.disk, self.version = (
            load_model(str(folder), dtype="float32"),
            FromDisk(weights, file=100_000),
            0,
        )

    async def publish(self, route):
        if self.version:
            for p in self.loaded.model.parameters():
                p.data.mul_(1.02)
            weights_changed()
        rows = [
            (TensorInfo(n, tuple(t.shape), "float32", names.tensor_digest(t)), t)
            for n, t in names.named_weights(self.loaded.model)
        ]
        self.version += 1
        return self.disk.publish(route, self.version, iter(rows))

    async def send(self, route):
        pass

    async def logprobs(self, tokens):
        return [0.0, *plain_logprobs(self.loaded, list(tokens))]


def test_tokens_logprobs_and_versions_over_http_are_those_of_the_model(url, folder, tmp_path):
    """Samples in flight over several updates: every token's logprob is that of the weights whose version it has."""

    async def work():
        trainer = Trainer(folder, tmp_path / "weights")
        e, moved = ForeignEngine(SglangServer(url)), [False]
        update = WeightUpdate(
            trainer.disk, probe=prompt(1, 12), score=trainer.logprobs, tolerance=1e-3, moved=lambda: moved[0]
        )
        assert await update(trainer, e) == 1
        models, moved[0] = {1: twin(trainer.loaded)}, True
        requests = [ask(prompt(g, 9), key=100 * g + i, n=150, temperature=0.8) for g in range(3) for i in range(3)]
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        last = 1
        while last < 3 or (last < 9 and not all(task.done() for task in tasks)):  # however fast this machine is
            await asyncio.sleep(0.1)
            last += 1
            assert await update(trainer, e) == last
            models[last] = twin(trainer.loaded)
        done = await asyncio.gather(*tasks)
        assert any(len(set(c.versions)) > 1 for c in done)
        for r, c in zip(requests, done):
            assert len(c.tokens) == 150 and c.finish_reason == "length" and c.versions == sorted(c.versions)
            exact = {
                v: plain_logprobs(m, r.tokens + c.tokens, temperature=0.8)[len(r.tokens) - 1 :]
                for v, m in models.items()
            }
            assert max(abs(lp - exact[v][i]) for i, (lp, v) in enumerate(zip(c.logprobs, c.versions))) < 1e-4
        again = await e.generate(requests[0])
        assert again.versions == [last] * 150
        assert (await e.generate(requests[0])).tokens == again.tokens  # its key decides
        assert len({tuple((await e.generate(ask(prompt(1, 9), key=k, n=12))).tokens) for k in range(5)}) == 5
        greedy = ask(prompt(2, 9), n=6, temperature=0.0)
        assert (await e.generate(greedy)).tokens == (await e.generate(greedy)).tokens
        await e.server.link.close()

    asyncio.run(work())


def test_a_bad_folder_is_refused_and_a_dead_server_is_named(folder, tmp_path):
    own = serve_kit.Server(folder, tmp_path, "--kv-pages", "1024")

    async def work():
        trainer, e = Trainer(folder, tmp_path / "weights"), ForeignEngine(SglangServer(f"http://127.0.0.1:{own.port}"))
        update = WeightUpdate(trainer.disk, probe=[], score=trainer.logprobs, tolerance=1e-3)
        assert await update(trainer, e) == 1
        publish = trainer.publish

        async def halved(route):
            manifest, where = await publish(route)
            next((tmp_path / "weights" / "v-000002").glob("model-00001*")).write_bytes(b"torn")
            return manifest, where

        trainer.publish, update.moved = halved, lambda: True
        with pytest.raises(SyncError, match="/update_weights_from_disk answered 400"):
            await update(trainer, e)
        with pytest.raises(EngineError, match="refuses to generate until a good update"):
            await e.generate(ask(prompt(1, 5)))
        trainer.publish = publish
        assert await update(trainer, e) == 3
        task = asyncio.create_task(e.generate(ask(prompt(1, 5), n=400)))
        await asyncio.sleep(0.2)
        own.stop()
        with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:\d+/generate cannot be reached"):
            await task
        with pytest.raises(EngineError, match="cannot be reached"):
            await e.status()

    asyncio.run(work())


HTTP = {"place__kind": "split", "engine__kind": "sglang", "model__path": None, "model__dtype": "float32"}


def test_a_whole_run_over_http(url, server, folder, tmp_path):
    """The tiny recipe with its engine behind `rondel serve`; stale by one step, so that
    samples are in flight when weights change.

    The server has served a later version: a run begins at 0 wherever its engine was before,
    as one does that goes on from a checkpoint.
    """
    server.ok("/update_weights_from_disk", model_path=str(folder), weight_version=40)
    more = {**HTTP, "engine__url": url, "model__path": str(folder), "engine__sampling": {"max_tokens": 16}, **SHORT}
    run(tmp_path, **more)
    ended_well(tmp_path, 5)
    synced = events(tmp_path, "Synced")
    assert len(synced) == 6 and max(e["probe_gap"] for e in synced) < 1e-4
    gaps = [e["metrics"]["train/gap_max"] for e in events(tmp_path, "StepDone") if "train/gap_max" in e["metrics"]]
    assert gaps
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v-000004", "v-000005"]
    with pytest.raises(ConfigError, match="begun with another recipe"):
        run(tmp_path, **{**more, "engine__url": url + "/x"})


def test_a_server_takes_weights_by_broadcast(url, server, folder, tmp_path):
    """The trainer leads a group that the server joins over SGLang's endpoints; nothing is written for it. It has served a
    later version before, and a second run makes a group of its own.
    """
    server.ok("/update_weights_from_disk", model_path=str(folder), weight_version=40)
    more = {**HTTP, "engine__url": url, "model__path": str(folder), "engine__sampling": {"max_tokens": 8}}
    for number in range(2):
        steps = 2 - number
        run(tmp_path / str(number), **more, loop__warmup__steps=0, loop__steps=steps, sync__kind="distributed")
        synced = events(tmp_path / str(number), "Synced")
        assert [e["version"] for e in synced] == [0, 1, 2][: steps + 1] and len(
            {e["root"] for e in synced}
        ) == steps + 1
        assert max(e["probe_gap"] for e in synced) < 1e-4 and min(e["bytes_copied"] for e in synced) > 0
        assert not (tmp_path / str(number) / "weights").exists()


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"engine__url": None}, "needs an address"),
        ({"place__kind": "shared"}, 'set place.kind = "split"'),
        ({"sync__kind": "ipc"}, "engines of others read"),
        ({"engine__numerics": "aligned"}, "bit by bit"),
        ({"engine__sampling": {"max_tokens": 4, "top_k": 5}}, "which tokens it drew from"),
        ({"engine__sampling": {"max_tokens": 4, "stop": ["END"]}, "loop__max_staleness": 1}, "its token ids"),
        ({"model__adapter": {"kind": "lora"}}, "reads whole weights"),
        ({"place__engines": 2}, "counts by engine.url"),
        ({"engine__kind": "builtin"}, "has no effect"),
        ({"engine__kind": "slang"}, "Did you mean 'sglang'"),
        ({"engine__url": "http://127.0.0.1:9"}, "cannot be reached"),
        ({"engine__kv_pages": 512}, "set, but without effect in this run: engine.kv_pages"),
        ({"engine__sampling": {"max_tokens": 600}}, "600|context"),
    ],
)
def test_what_an_engine_of_others_lacks_is_refused_by_name(url, folder, tmp_path, changes, told):
    with pytest.raises((ConfigError, EngineError, ValueError), match=told):
        run(tmp_path, **{**HTTP, "engine__url": url, "model__path": str(folder), **changes})


class Enough(Exception):
    """The test has seen what it wanted."""


@pytest.mark.slow
def test_engines_join_late_and_come_back_while_a_run_goes_on(folder, tmp_path):
    """One server of the recipe; a second one joins by `--join`; the first dies, the run
    goes on, and it comes back at its address.
    """
    places = {name: tmp_path / name for name in ("first", "second")}
    for place in places.values():
        place.mkdir()
    first = serve_kit.Server(folder, places["first"], "--kv-pages", "4096")
    home, servers, seen = tmp_path / "run", {"first": first}, {}
    url = f"http://127.0.0.1:{first.port}"
    more = {**HTTP, "engine__url": url, "model__path": str(folder), "engine__sampling": {"max_tokens": 8}}
    job = tiny(home, **{**more, **SHORT, "loop__steps": 400, "run__checkpoint__every": 0})

    def watch(event) -> None:
        if not isinstance(event, Synced):  # not StepDone: engines may still fetch the version of a step that is done
            return
        router, have = seen["router"], seen["router"].replicas
        if "joined" not in seen and event.version >= 3:
            if "second" not in servers:
                servers["second"] = serve_kit.Server(
                    folder, places["second"], "--kv-pages", "4096", "--join", str(home)
                )
            if len(have) == 2:
                seen["joined"] = event.version
        elif "died" not in seen and "joined" in seen and event.version >= seen["joined"] + 2:
            assert {r.engine.version for r in have.values()} == {router.version} == {event.version}
            assert servers["second"].get("/get_weight_version")["weight_version"] == str(event.version)
            first.stop()
            seen["died"] = event.version
        elif "back" not in seen and "died" in seen:
            if len(have) == 1 and "again" not in servers:
                assert url in router.lost
                servers["again"] = serve_kit.Server(folder, places["first"], "--kv-pages", "4096", port=first.port)
            if url in have and "again" in servers:
                seen["back"] = event.version
        elif "back" in seen and event.version >= seen["back"] + 2:
            assert {s.get("/get_weight_version")["weight_version"] for n, s in servers.items() if n != "first"} == {
                str(event.version)
            }
            raise Enough

    stop = subscribe(watch)
    try:
        with pytest.raises(BaseException) as ended:
            train(job, quiet=True, built=lambda parts: seen.update(router=parts.engine))
        assert (
            ended.group_contains(Enough)
            if isinstance(ended.value, BaseExceptionGroup)
            else isinstance(ended.value, Enough)
        )
    finally:
        stop()
        for server in servers.values():
            if server.process.poll() is None:
                server.stop(signal.SIGTERM)
    done = events(home, "StepDone")
    assert [e["step"] for e in done] == list(range(1, len(done) + 1)) and all(balances(e["ledger"]) for e in done)
    said = [e["message"] for e in events(home, "Warned")]
    assert sum("has joined at version" in message for message in said) == 2 and any(
        "is lost" in message for message in said
    )
    assert max(e["probe_gap"] for e in events(home, "Synced")) < 1e-4
    assert not list((home / "engines").iterdir()), "who ends takes its name away"


def test_a_run_that_cannot_be_joined_is_named_before_a_model_is_loaded(tmp_path):
    from rondel.core.errors import UserError
    from rondel.driver.elastic_engines import check_run

    with pytest.raises(UserError, match="no run has begun there"):
        check_run(tmp_path, "127.0.0.1")
    import tomli_w

    from rondel.core.config.differences import without_none

    (tmp_path / "job.toml").write_text(tomli_w.dumps(without_none(tiny(tmp_path).to_dict())))
    with pytest.raises(UserError, match=r'engine\.kind = "builtin"'):
        check_run(tmp_path, "127.0.0.1")
    changed = tiny(tmp_path, **{**HTTP, "engine__url": "http://127.0.0.1:1", "model__path": "x"})
    (tmp_path / "job.toml").write_text(tomli_w.dumps(without_none(changed.to_dict())))
    with pytest.raises(UserError, match="name the address"):
        check_run(tmp_path, "0.0.0.0")
    check_run(tmp_path, "127.0.0.1")
