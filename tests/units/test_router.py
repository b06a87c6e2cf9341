"""Many engines as one: nothing is lost, nothing is answered twice, a cap is a cap, a group
stays together, and all serve one version.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.engine import ask, engine, idle, prompt, tiny, twin
from rondel.core.errors import EngineError, LawError, StalledError, SyncError, UserError, WorkerError
from rondel.core.types import (
    IDS,
    Abort,
    Begin,
    Commit,
    Completion,
    EngineStatus,
    Manifest,
    Request,
    Route,
    Sampling,
    TokenColumn,
    TokenScores,
)
from rondel.generate.engine import prompt_locations
from rondel.generate.engine.replica_fleet import EngineReplica
from rondel.generate.engine.resumption import generate_until_done
from rondel.generate.engine.router import EngineRouter
from rondel.sync.from_disk import FromDisk
from rondel.sync.update import WeightUpdate

CAP = 3
WRONG = 999  # the key of a request that no engine can serve


class Fake:
    """Answers after some turns of the loop, unless it is dead, held or refusing."""

    def __init__(self, seed: int = 0, version: int = 0) -> None:
        self.random, self.version, self.state = random.Random(seed), version, "serving"
        self.dead, self.now, self.most, self.answered, self.prompts = False, 0, 0, Counter(), []
        self.aborts = False

    def _live(self) -> None:
        if self.dead:
            raise WorkerError("worker was ended by SIGKILL")

    async def status(self) -> EngineStatus:
        self._live()
        return EngineStatus(
            self.version, self.state, self.now, 0, 0, 5, 1, 6, frozenset({"hold", f"only-{id(self)}"}), "r", 7
        )

    async def generate(self, request: Request) -> Completion:
        self.prompts.append(tuple(request.tokens))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(self.random.randrange(1, 9)):
                await asyncio.sleep(0)
                self._live()
                while self.state == "held" and not self.aborts:
                    await asyncio.sleep(0)
                    self._live()
                if self.aborts:
                    return Completion.empty("abort", len(request.tokens))
            if self.state == "refusing":
                raise EngineError("the engine refuses to generate until a good update")
            if request.key == WRONG:
                raise UserError("no such token")
            self.answered[request.key] += 1
            return Completion([request.key], [-1.0], [self.version], "stop")
        finally:
            self.now -= 1

    async def score(self, request: Request) -> TokenScores:
        self._live()
        return TokenScores([0.0, -1.0], self.version)

    async def pause(self, how="hold", lease=600.0) -> None:
        self._live()
        self.state, self.aborts = "held", how == "abort"

    async def resume(self) -> None:
        self._live()
        self.state, self.aborts = "serving", False

    async def receive(self, message) -> int:
        self._live()
        if isinstance(message, Commit):
            self.version, self.state = message.version, "serving" if self.state == "refusing" else self.state
        return self.version


def router(n: int = 3, **settings) -> tuple[EngineRouter, dict[str, Fake]]:
    fakes = {f"e{i}": Fake(i) for i in range(n)}
    return EngineRouter(fakes, **{"max_inflight": CAP, **settings}), fakes


def request(key: int, tokens: tuple[int, ...] = (1, 2), **more) -> Request:
    return Request(list(tokens), Sampling(), key=key, **more)


async def committed(r: EngineRouter, version: int) -> int:
    manifest = Manifest(version, ())
    await r.receive(Begin(manifest, beside=True))
    await r.receive(Route("disk"))
    return await r.receive(Commit(version, manifest.root))


ACTS = st.lists(
    st.tuples(st.sampled_from(["ask", "turn", "join", "leave", "die", "update", "give up", "hold"]), st.integers(0, 5)),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(ACTS, st.integers(0, 5))
def test_nothing_is_lost_and_nothing_twice_whatever_happens(acts, seed):
    """Random joins, departures, deaths, pauses and updates between requests of a few groups."""

    async def work():
        r, fakes = router(2)
        everyone, asked, gone, number, held = dict(fakes), {}, set(), 100, False
        for act, n in acts:
            alive = [name for name in r.replicas if not everyone[name].dead]
            match act:
                case "ask":
                    for _ in range(n):
                        number += 1
                        asked[number] = asyncio.create_task(generate_until_done(r.generate, request(number, (1, n))))
                case "turn":
                    for _ in range(n):
                        await asyncio.sleep(0)
                case "join" if not held:
                    name, fake = f"new-{number}-{len(everyone)}", Fake(number + seed, version=-1)

                    async def bring(e):
                        e.version = r.version
                        return e.version

                    everyone[name] = fake
                    await r.add_engine(name, fake, bring)
                case "leave" if len(alive) > 1:
                    await r.remove_engine(alive[n % len(alive)])
                case "die" if len(alive) > 1:
                    everyone[alive[n % len(alive)]].dead = True
                case "update":
                    assert await committed(r, r.version + 1) == r.version
                case "give up" if asked:
                    key = list(asked)[n % len(asked)]
                    gone.add(key) if asked[key].cancel() else None
                case "hold":
                    await (r.resume() if held else r.pause("hold"))
                    held = not held
        if held:
            await r.resume()
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        for key, answer in zip(asked, answers):
            assert key in gone if isinstance(answer, BaseException) else answer.tokens == [key], answer
        total = sum((fake.answered for fake in everyone.values()), Counter())
        assert all(n == 1 for key, n in total.items() if key not in gone)
        assert all(fake.most <= CAP for fake in everyone.values())
        assert all(replica.load == 0 and not replica.tasks for replica in r.replicas.values()) and not r.queue
        assert {everyone[name].version for name in r.replicas if not everyone[name].dead} <= {r.version}

    asyncio.run(work())


def test_a_group_stays_together_and_the_cap_sends_the_rest_elsewhere():
    async def work():
        r, fakes = router(3, max_inflight=8)
        await asyncio.gather(*(r.generate(request(10 * g + i, (g, 7))) for g in range(6) for i in range(4)))
        homes = {g: {name for name, fake in fakes.items() if (g, 7) in fake.prompts} for g in range(6)}
        assert all(len(names) == 1 for names in homes.values()) and len(set().union(*homes.values())) == 3
        for fake in fakes.values():
            fake.prompts.clear()
        await asyncio.gather(
            *(r.generate(request(i, (g, 7, 9, i), id=f"group-{g}")) for g in range(6) for i in range(4))
        )  # one id, many prompts
        assert all(sum(any(p[0] == g for p in fake.prompts) for fake in fakes.values()) == 1 for g in range(6))
        await asyncio.gather(*(r.generate(request(i, (5, 5))) for i in range(24)))
        assert all(fake.most <= 8 for fake in fakes.values()) and all((5, 5) in fake.prompts for fake in fakes.values())

    asyncio.run(work())


def common(a: list[int], b: list[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.lists(st.integers(0, 1), max_size=12)), max_size=12))
def test_what_a_replica_knows_of_a_prompt_is_its_longest_beginning_in_whole_blocks(acts):
    seen: dict[tuple[int, int], list[list[int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_locations, "BLOCK", 3)
        computed = prompt_locations.PromptLocations()
        for scope, replica, tokens in acts:
            wanted = {}
            for (of, name), rows in seen.items():
                most = max(common(row, tokens) // 3 * 3 for row in rows)
                if of == scope and most:
                    wanted[name] = most
            assert computed.known_tokens(scope, tokens) == wanted
            computed.record(scope, tokens, replica)
            seen.setdefault((scope, replica), []).append(tokens)
        computed.forget()
        assert not any(computed.known_tokens(scope, tokens) for scope, _, tokens in acts)


@pytest.mark.slow
def test_a_prompt_of_a_million_tokens_is_few_blocks():
    """Its beginning is known to a sixty-fourth, from a column as from a list."""
    tokens = [i * 7919 % 50_000 for i in range(1 << 20)]
    computed = prompt_locations.PromptLocations(most=450)
    computed.record("", TokenColumn(IDS, tokens), "a")
    known = computed.known_tokens("", tokens)["a"]
    assert len(tokens) * 63 / 64 <= known <= len(tokens)
    other = [*tokens[: len(tokens) // 2], *tokens]
    assert len(tokens) / 2 * 63 / 64 <= computed.known_tokens("", other)["a"] <= len(tokens) / 2


def test_few_blocks_are_remembered_those_that_were_asked_for_last():
    computed = prompt_locations.PromptLocations(most=2)
    one, two, three = ([n] * 64 for n in (1, 2, 3))
    for tokens in (one, two):
        computed.record("", tokens, "a")
    computed.known_tokens("", one)
    computed.record("", three, "a")
    assert [bool(computed.known_tokens("", tokens)) for tokens in (one, two, three)] == [True, False, True]


class Counting(Fake):
    """Counts the tokens that a prefix cache would not have had."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.computed, self.known = 0, []

    async def generate(self, request: Request) -> Completion:
        kept = max((common(row, request.tokens) for row in self.known), default=0)
        self.computed += len(request.tokens) - kept
        done = await super().generate(request)
        self.known.append([*request.tokens, *done.tokens])
        return done


async def episode(r: EngineRouter, number: int, turns: int, told: int) -> int:
    """Every turn has all that was said before and `told` tokens more, which take a while. -> tokens of its last prompt."""
    draw, tokens = random.Random(number), []
    for turn in range(turns):
        tokens = [*tokens, *(draw.randrange(1000) for _ in range(told))]
        for _ in range(draw.randrange(40)):
            await asyncio.sleep(0)
        tokens += (await r.generate(Request(tokens, Sampling(), key=100 * number + turn))).tokens
    return len(tokens) - 1


@pytest.mark.parametrize("forgets", [False, True])
def test_the_next_turn_of_an_episode_goes_where_the_last_one_lies(forgets, monkeypatch):
    """Four replicas compute nothing twice; without it several times as much."""
    if forgets:
        monkeypatch.setattr(prompt_locations.PromptLocations, "record", lambda *_: None)
    fakes = {f"e{i}": Counting(i) for i in range(4)}

    async def work():
        r = EngineRouter(fakes, max_inflight=32)
        return sum(await asyncio.gather(*(episode(r, number, 8, 200) for number in range(32))))

    least = asyncio.run(work())
    share = sum(fake.computed for fake in fakes.values()) / least
    told = [len(fake.prompts) for fake in fakes.values()]
    assert (share > 2 if forgets else share < 1.1) and max(told) <= 1.5 * 8 * 32 / 4, (share, told)


def test_an_engine_leaves_between_two_updates(tmp_path):
    """Who receives weights is counted before they travel: a broadcast would wait for one that is gone."""

    async def work():
        r, _fakes = router(2)
        update = WeightUpdate(FromDisk(tmp_path), probe=[], score=lambda _: None, tolerance=1.0)
        async with update.between_updates():  # as an update does
            leaves = asyncio.create_task(r.remove_engine("e1", between=update.between_updates()))
            await asyncio.sleep(0.01)
            assert r.replicas["e1"].leaving and len(r.fleet.all_replicas) == 2
        await leaves
        assert [*r.replicas] == ["e0"]

    asyncio.run(work())


class Writing(Fake):
    """Writes its version, token by token, for as long as it may."""

    async def generate(self, request: Request) -> Completion:
        written: list[int] = []
        while len(written) < request.sampling.max_tokens and not self.aborts:
            await asyncio.sleep(0)
            self._live()
            if self.state != "held":
                written.append(self.version)
        reason = "abort" if self.aborts else "length"
        n = len(written)
        return Completion(written, [-1.0] * n, written, reason, len(request.tokens))


def test_what_an_engine_that_leaves_has_not_ended_goes_on_from_its_tokens():
    """Drawn anew elsewhere, long answers would be cut off and drawn again until they are short (law 15)."""

    async def work():
        first, second = Writing(), Writing(version=1)
        r = EngineRouter({"e0": first}, max_inflight=CAP)
        ask = asyncio.create_task(generate_until_done(r.generate, Request([1], Sampling(max_tokens=40))))
        for _ in range(20):
            await asyncio.sleep(0)
        r.replicas["e1"] = EngineReplica("e1", second)
        await r.remove_engine("e0", patience=0.0)
        done = await ask
        assert len(done.tokens) == 40 and done.finish_reason == "length" and done.tokens == done.versions
        assert 10 < list(done.versions).count(0) < 30, "its tokens of the engine that left are kept"

    asyncio.run(work())


def test_what_all_prompts_begin_with_does_not_bring_them_to_one_replica_and_weights_are_the_end_of_it():
    async def work():
        r, fakes = router(3, max_inflight=8)
        front = tuple(range(128))
        await asyncio.gather(*(r.generate(request(10 * g + i, (*front, g))) for g in range(6) for i in range(4)))
        assert [len(fake.prompts) for fake in fakes.values()] == [8, 8, 8]
        computed = r.queue.locations
        assert len(computed.known_tokens(("policy", "", ""), front)) == 3
        await committed(r, 1)
        assert not computed.known_tokens(("policy", "", ""), front)

    asyncio.run(work())


def test_popular_prompts_do_not_make_one_replica_late():
    """Zipf prompts, the load of the busiest at most 1.5 times the mean."""

    async def work():
        r, _fakes = router(4, max_inflight=256)
        draw = random.Random(0)
        prompts = draw.choices(range(1, 51), [1 / rank for rank in range(1, 51)], k=256)
        tasks = [asyncio.create_task(r.generate(request(i, (p,)))) for i, p in enumerate(prompts)]
        await asyncio.sleep(0)
        loads = [replica.load for replica in r.replicas.values()]
        assert sum(loads) == 256 and max(loads) <= 1.5 * 64
        await asyncio.gather(*tasks)
        assert [replica.load for replica in r.replicas.values()] == [0] * 4

    asyncio.run(work())


def test_who_waits_is_served_in_order():
    async def work():
        r, fakes = router(1, max_inflight=1)
        await asyncio.gather(*(r.generate(request(i)) for i in range(20)))
        assert list(fakes["e0"].answered) == list(range(20))

    asyncio.run(work())


def test_a_users_mistake_kills_nobody():
    async def work():
        r, _fakes = router(2)
        with pytest.raises(UserError, match="no such token"):
            await r.generate(request(WRONG))
        assert len(r.replicas) == 2 and not r.lost
        assert (await r.generate(request(14))).tokens == [14]

    asyncio.run(work())


def test_one_that_refuses_gets_nothing_until_a_good_update():
    async def work():
        r, fakes = router(2, max_inflight=50)
        fakes["e0"].state = "refusing"
        await asyncio.gather(*(r.generate(request(100 + i, (i,))) for i in range(10)))
        assert sum(fakes["e1"].answered.values()) == 10 and set(r.replicas) == {"e0", "e1"}
        fakes["e0"].prompts.clear()
        await asyncio.gather(*(r.generate(request(200 + i, (i,))) for i in range(10)))
        assert not fakes["e0"].prompts
        assert await committed(r, 1) == 1
        await asyncio.gather(*(r.generate(request(300 + i, (50 + i,))) for i in range(10)))
        assert fakes["e0"].answered

    asyncio.run(work())


def test_all_dead_names_the_causes_to_everyone_who_waits():
    async def work():
        r, fakes = router(2, max_inflight=1)
        tasks = [asyncio.create_task(r.generate(request(100 + i, (i,)))) for i in range(6)]
        await asyncio.sleep(0)
        for fake in fakes.values():
            fake.dead = True
        for told in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(told, EngineError) and "e0: WorkerError" in str(told) and "e1: WorkerError" in str(told)
        for verb in (r.status(), r.generate(request(1)), r.receive(Begin(Manifest(1, ())))):
            with pytest.raises(EngineError, match="no engine is left"):
                await verb

    asyncio.run(work())


def test_a_death_during_an_update_leaves_the_others_updated():
    async def work():
        r, fakes = router(3)
        manifest = Manifest(1, ())
        await r.receive(Begin(manifest, beside=True))
        fakes["e1"].dead = True
        await r.receive(Route("disk"))
        assert await r.receive(Commit(1, manifest.root)) == 1
        assert set(r.replicas) == {"e0", "e2"} and "SIGKILL" in r.lost["e1"]
        assert (await r.status()).replicas == 2

    asyncio.run(work())


def test_a_fault_of_a_living_replica_is_everyones():
    async def work():
        r, fakes = router(2)

        async def refuse(message):
            raise SyncError("2 of 3 tensors did not arrive")

        await r.receive(Begin(Manifest(1, ()), beside=True))
        fakes["e1"].receive, whole = refuse, fakes["e1"].receive
        with pytest.raises(SyncError, match="2 of 3"):
            await r.receive(Route("disk"))
        fakes["e1"].receive = whole
        assert await r.receive(Abort("2 of 3")) == 0 and r.version == 0
        await r.receive(Begin(Manifest(1, ()), beside=True))
        fakes["e1"].receive = lambda message: asyncio.sleep(0, 5)
        with pytest.raises(LawError, match=r"versions \[1, 5\]"):
            await r.receive(Commit(1, Manifest(1, ()).root))

    asyncio.run(work())


def test_a_newcomer_gets_the_version_that_serves_even_if_it_changes_meanwhile():
    async def work():
        r, _ = router(1)
        new, brought = Fake(9, version=-1), []

        async def bring(e):
            e.version = r.version
            brought.append(e.version)
            if len(brought) == 1:
                await committed(r, 4)  # the weights move on while the first ones are on their way
                return brought[0]
            return e.version

        await r.add_engine("new", new, bring)
        assert brought == [0, 4] and new.version == 4 and r.replicas["new"].engine is new
        with pytest.raises(EngineError, match="another name"):
            await r.add_engine("new", new, bring)

    asyncio.run(work())


def test_a_newcomer_ahead_of_the_others_takes_part_in_the_update_that_brings_them_there():
    """Where only the trainer's own weights could be brought, which it has trained since; any other difference is a fault."""

    async def work():
        r, _ = router(2)
        new = Fake(9)

        async def bring(e):
            e.version = r.version + 1
            return e.version

        await r.add_engine("new", new, bring)
        for last in (Abort("once more"), None):
            await r.receive(Begin(Manifest(1, ()), beside=True))
            await r.receive(Route("distributed"))
            if last is not None:
                await r.receive(last)
        assert await r.receive(Commit(1, Manifest(1, ()).root)) == 1 and new.version == 1
        new.version = 7
        with pytest.raises(LawError, match=r"versions \[1, 7\]; they must serve one"):
            await r.receive(Begin(Manifest(2, ()), beside=True))

    asyncio.run(work())


def test_nobody_joins_in_the_middle_of_an_update():
    async def work():
        r, _ = router(1, deadline=0.05)
        new = Fake(9)
        await r.receive(Begin(Manifest(1, ()), beside=True))

        async def bring(e):
            e.version = r.version
            return e.version

        with pytest.raises(StalledError, match=r"'new' waits to join since 0\.05 s: update"):
            await r.add_engine("new", new, bring)
        r.deadline = 10.0
        joining = asyncio.create_task(r.add_engine("new", new, bring))
        await asyncio.sleep(0)
        await r.receive(Commit(1, Manifest(1, ()).root))
        await joining
        assert new.version == 1 and "new" in r.replicas

    asyncio.run(work())


def test_what_is_asked_of_all_is_summed():
    async def work():
        r, fakes = router(3)
        s = await r.status()
        assert (s.pages_free, s.pages_cached, s.pages_total, s.bytes_copied, s.replicas) == (15, 3, 18, 21, 3)
        assert s.capabilities == {"hold"} and s.root == "r" and s.state == "serving"
        await r.pause("hold")
        assert (await r.status()).state == "held"
        fakes["e1"].state = "serving"
        assert (await r.status()).state == "serving"  # so that whoever updates pauses it, too
        assert (await r.score(request(1))).logprobs == [0.0, -1.0]
        fakes["e2"].score = lambda q: asyncio.sleep(0, TokenScores([0.0, -1.5], 0))
        with pytest.raises(EngineError, match=r"differ by 0\.25 nats"):
            await r.score(request(1))

    asyncio.run(work())


def test_an_abort_returns_those_who_wait_with_nothing():
    async def work():
        r, fakes = router(1, max_inflight=1)
        fakes["e0"].state = "held"
        tasks = [asyncio.create_task(r.generate(request(100 + i))) for i in range(3)]
        await asyncio.sleep(0)
        await r.pause("abort")
        await asyncio.sleep(0)
        assert [t.result().finish_reason for t in tasks[1:]] == ["abort", "abort"]
        assert (await tasks[0]).finish_reason == "abort", "of the engine itself"
        await r.resume()
        assert (await r.generate(request(103))).tokens == [103]
        with pytest.raises(StalledError, match="waits for a replica"):
            fakes["e0"].state = "held"
            await asyncio.gather(*(r.generate(request(i, deadline=0.02)) for i in (1, 2)))

    asyncio.run(work())


def test_an_answer_whose_first_piece_never_had_a_place_keeps_its_lists():
    """Aborted in the router's queue, a piece has no lists; those of the pieces behind it are the answer's."""
    wants = frozenset({"support", "raw_logprobs", "top_logprobs:2", "behavior_top:3", "prompt_logprobs"})
    lists = ("support", "raw_logprobs", "top_logprobs", "behavior_top", "prompt_logprobs")

    async def work():
        e = engine(tiny())
        asked = [replace(ask(prompt(i, 6), key=i + 1, n=6, top_p=0.8), wants=wants) for i in range(3)]
        alone = [await e.generate(request) for request in asked]
        r = EngineRouter({"e0": e}, max_inflight=1)
        tasks = [asyncio.create_task(generate_until_done(r.generate, request)) for request in asked]
        while not e.scheduler.running or not e.scheduler.running[0].written:
            await asyncio.sleep(0)
        assert len(r.queue) == 2
        await r.pause("abort")
        await r.resume()
        for done, whole in zip(await asyncio.gather(*tasks), alone):
            assert done.tokens == whole.tokens
            assert {len(getattr(done, name)) for name in lists} == {6}

    asyncio.run(work())


@pytest.mark.slow
def test_two_real_engines_draw_what_one_draws_through_a_death_and_an_update(tmp_path):
    """The same keys, the same tokens: alone, behind a router, and where one replica breaks in the middle."""
    loaded = tiny()
    requests = [ask(prompt(g, 12), key=100 * g + i, n=12) for g in range(4) for i in range(3)]

    class Dies:
        def __init__(self, whole) -> None:
            self.whole, self.left = whole, 25

        def __getattr__(self, verb):
            return getattr(self.whole, verb)

        async def status(self):
            if self.left < 0:
                raise WorkerError("worker was ended by SIGKILL")
            return await self.whole.status()

    class Trainer:
        version = 3

        async def publish(self, route):
            from rondel.core.types import TensorInfo
            from rondel.models import names

            other = {n: t * 1.01 for n, t in names.named_weights(twin(loaded).model)}
            rows = [(TensorInfo(n, tuple(t.shape), "float32", names.tensor_digest(t)), t) for n, t in other.items()]
            return FromDisk(tmp_path).publish(route, 3, iter(rows))

        async def send(self, route):
            pass

    async def work():
        alone = engine(twin(loaded))
        expected = [c.tokens for c in await asyncio.gather(*map(alone.generate, requests))]
        disk = {"transports": {"disk": FromDisk(tmp_path)}}
        a, b = engine(twin(loaded), **disk), Dies(engine(twin(loaded), **disk))
        step = b.whole.runner.step

        def counted(*plans):
            b.left -= 1
            if b.left < 0:
                raise RuntimeError("the device fell off the bus")
            return step(*plans)

        b.left = 5
        b.whole.runner.step = counted
        r = EngineRouter({"a": a, "b": b}, max_inflight=8)
        assert [c.tokens for c in await asyncio.gather(*map(r.generate, requests))] == expected
        assert set(r.replicas) == {"a"} and a.serving.seconds > 0 and b.left < 0
        late = engine(twin(loaded), **disk)
        r.replicas["late"] = type(r.replicas["a"])("late", late)
        ahead = twin(loaded)  # the trainer's own, which it scores when it publishes
        with torch.no_grad():
            for parameter in ahead.model.parameters():
                parameter.mul_(1.01)
        update = WeightUpdate(
            FromDisk(tmp_path), probe=prompt(9, 8), score=lambda tokens: score(engine(ahead), tokens), tolerance=1e-3
        )
        assert await update(Trainer(), r) == 3
        done = await asyncio.gather(*map(r.generate, requests))
        assert {v for c in done for v in c.versions} == {3} and late.serving.seconds > 0
        idle(a), idle(late)

    async def score(e, tokens):
        return (await e.score(Request(list(tokens)))).logprobs

    asyncio.run(work())
