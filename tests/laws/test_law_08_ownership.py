"""Law 8, ownership: on a shared device with `trainer.memory.offload`, trainer state and KV cache are never both on the device.
`sleep` of an engine that runs requests is an error.

Counted in bytes of tensors; what sleeps wakes bit for bit.
"""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.engine import ask, engine, prompt, tiny
from kits.reward_models import saved
from kits.runs import events, final, run, run_and_die, steps
from kits.sweeps import covering
from kits.sync import wrote
from kits.train import awkward_groups, batch, bits, inline, model, row
from rondel.core.errors import ConfigError, EngineError, LawError, SyncError, TrainError
from rondel.core.events import Resident, subscribe
from rondel.core.types import Begin
from rondel.models import names
from rondel.runtime.devices import OneAtATime, SharedDevice
from rondel.score.pool import RewardPool
from rondel.sync.from_tensor import FromTensor
from rondel.train.critic import Critic
from rondel.train.draft import DraftTrainer
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer
from rondel.train.teachers import Teacher

ALL = row("ppo", kl={"coef": 0.1}, distill={"coef": 0.1})
OPTIMIZER = ("masters", "moments", "gradients", "critic", "reference", "teacher")


def crowded(dtype: str, *, claim: OneAtATime | None = None, shared=None, algo=ALL) -> LocalTrainer:
    """Everything that a trainer may have to keep: optimizer, critic, reference, teacher, a draft's optimizer."""
    loaded = shared or model("llama", dtype)
    chosen = TrainSettings(lr=1e-3, critic_lr=1e-3, start_probe=4, micro_tokens=40)
    critic = Critic(loaded, chosen) if "values" in algo.needs else None
    teacher = model("tied", dtype) if "teacher_logprobs" in algo.needs else None
    draft = DraftTrainer(model("llama", dtype), lr=1e-3)
    return LocalTrainer(
        loaded,
        chosen,
        run=inline,
        needs=algo.needs,
        critic=critic,
        teachers=[Teacher(teacher)] if teacher else [],
        draft=draft,
        claim=claim,
        transport=FromTensor(),
    )


def everything(t: LocalTrainer) -> list[bytes]:
    tensors = [
        x
        for owner in t.offload.owners
        for kind, held in owner.state_tensors().items()
        if kind != "gradients"
        for x in held
    ]
    tensors += [
        x
        for loaded in (t.loaded, t.critic.loaded, t.start, t.teachers[0].loaded, t.draft.loaded)
        for x in loaded.model.parameters()
    ]
    return [x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], {"bfloat16"}))  # which has masters besides
def test_after_any_number_of_naps_a_trainer_has_the_same_bits(dtype):
    """Parameters, masters and moments, of everyone; and the same steps. The KL to a reference is exactly 0 at first."""
    napping, awake = crowded(dtype), crowded(dtype)
    for number in range(2):
        b = batch(awkward_groups(number), ALL)
        told = [asyncio.run(t.step(copy.deepcopy(b), ALL)).metrics for t in (napping, awake)]
        assert {k: v for k, v in told[0].items() if not k.endswith("_s")} == {
            k: v for k, v in told[1].items() if not k.endswith("_s")
        }
        before = everything(napping)
        for _ in range(2):
            asyncio.run(napping.sleep(("optimizer",))), asyncio.run(napping.wake(("optimizer",)))
        assert everything(napping) == before == everything(awake)
        spent = [x for owner in napping.offload.owners for x in owner.state_tensors()["gradients"]]
        assert spent and not any(bool(g.any()) for g in spent), "gradients are spent, and zeros again"
    assert bits(napping) == bits(awake)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], {"float32"}))  # bfloat16: the offloaded run below
def test_the_first_kl_to_a_reference_that_comes_and_goes_is_exactly_0(dtype):
    claim, algo = OneAtATime("trainer"), row("grpo", kl={"coef": 0.1})
    t = crowded(dtype, claim=claim, algo=algo)
    asyncio.run(t.wake(("optimizer",)))
    metrics = asyncio.run(t.step(batch(awkward_groups(), row("grpo", kl={"coef": 0.1})), algo)).metrics
    assert metrics["train/kl_ref"] == 0.0 and metrics["train/kl_to_start"] == 0.0
    later = asyncio.run(t.step(batch(awkward_groups(1), row("grpo", kl={"coef": 0.1})), algo)).metrics
    assert later["train/kl_ref"] > 0 and later["train/kl_to_start"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_on_the_device_is_counted_from_the_tensors(dtype):
    """Asleep: the weights alone. Awake: a closed form, of policy, critic and draft; frozen
    models are there for their pass and no longer.
    """
    claim = OneAtATime("trainer")
    t = crowded(dtype, claim=claim)

    def size(loaded, each: int | None = None) -> int:
        return sum(p.numel() * (each or p.element_size()) for p in loaded.model.parameters())

    buffers = sum(x.numel() * x.element_size() for x in t.loaded.model.buffers())
    asleep = t.offload.memory()
    assert asleep == {"weights": size(t.loaded) + buffers, **dict.fromkeys(OPTIMIZER, 0)}
    asyncio.run(t.wake(("optimizer",)))
    for number in range(2):
        assert asyncio.run(t.step(batch(awkward_groups(number), ALL), ALL)).stepped
    awake = t.offload.memory()
    models = [t.loaded, t.critic.loaded, t.draft.loaded]
    whole, critic = sum(size(m, 4) for m in models), size(t.critic.loaded)
    half = dtype == "bfloat16"
    masters = (
        whole
        - size(t.critic.loaded, 4)
        + sum(p.numel() * 4 for p in t.critic.loaded.model.parameters() if p.dtype != torch.float32)
    )
    assert awake["weights"] == asleep["weights"] and awake["gradients"] == whole and awake["moments"] == 2 * whole
    assert awake["masters"] == (masters if half else 0)
    assert awake["critic"] == critic + buffers and awake["reference"] == awake["teacher"] == 0
    frozen = max(size(t.start), size(t.teachers[0].loaded)) + buffers
    assert t.offload.high == sum(awake.values()) + frozen, "one frozen model at a time"
    asyncio.run(t.sleep(("optimizer",)))
    assert t.offload.memory() == asleep


@pytest.mark.slow
def test_a_checkpoint_is_written_and_read_in_ones_sleep(tmp_path):
    claims = [OneAtATime("trainer"), OneAtATime("trainer")]
    one, two = (crowded("bfloat16", claim=claim) for claim in claims)
    asyncio.run(one.wake(())), asyncio.run(one.step(batch(awkward_groups(), ALL), ALL)), asyncio.run(one.sleep(()))
    asyncio.run(one.save(tmp_path)), asyncio.run(two.load(tmp_path))
    assert sum(two.offload.memory().values()) == sum(one.offload.memory().values()) == one.offload.memory()["weights"]
    assert bits(one) == bits(two)
    for t in (one, two):
        asyncio.run(t.wake(()))
        asyncio.run(t.step(batch(awkward_groups(1), ALL), ALL))
    assert bits(one) == bits(two)


VERBS = (
    "pause",
    "resume",
    "generate",
    "engine sleeps",
    "engine wakes",
    "trainer sleeps",
    "trainer wakes",
    "step",
    "annotate",
    "publish",
)


@pytest.mark.slow
@given(st.lists(st.sampled_from(VERBS), min_size=4, max_size=16))
@settings(max_examples=12, deadline=None)
def test_no_interleaving_has_both_on_the_device(verbs):
    """Whatever is called in whatever order: it works, or it raises and changes nothing."""
    asyncio.run(_interleaved(verbs))


async def _interleaved(verbs):
    claim, loaded, algo = OneAtATime("engine"), model("llama"), row("grpo")
    e, t = engine(loaded, kv_pages=64, claim=claim), crowded("float32", claim=claim, shared=loaded, algo=algo)
    calls = {
        "pause": lambda: e.pause("hold"),
        "resume": e.resume,
        "generate": lambda: (
            asyncio.wait_for(e.generate(ask(prompt(0, 5), n=2)), 5) if e.state == "serving" else asyncio.sleep(0)
        ),
        "engine sleeps": lambda: e.sleep(("kv_cache",)),
        "engine wakes": lambda: e.wake(("kv_cache",)),
        "trainer sleeps": lambda: t.sleep(("optimizer",)),
        "trainer wakes": lambda: t.wake(("optimizer",)),
        "step": lambda: t.step(batch(awkward_groups(), algo), algo),
        "annotate": lambda: t.annotate(batch(awkward_groups(), algo), frozenset({"proximal_logprobs"})),
        "publish": lambda: t.logprobs([3, 4, 5]),
    }
    engine_awake, trainer_awake = True, False
    for verb in verbs:
        legal = {
            "engine wakes": not trainer_awake,
            "trainer wakes": not engine_awake,
            "step": trainer_awake,
            "annotate": trainer_awake,
        }
        if legal.get(verb, True):
            await calls[verb]()
            engine_awake = {"engine sleeps": False, "engine wakes": True}.get(verb, engine_awake)
            trainer_awake = {"trainer sleeps": False, "trainer wakes": True}.get(verb, trainer_awake)
        else:
            before = t.offload.memory(), e.state
            with pytest.raises(
                (LawError, TrainError), match=r"must sleep first|is asleep|are asleep|pause the engine first"
            ):
                await calls[verb]()
            assert (t.offload.memory(), e.state) == before
        state = sum(n for who, n in t.offload.memory().items() if who != "weights")
        cache = (await e.status()).memory["kv_cache"]
        assert not (state and cache), (verb, state, cache)
        assert not state or trainer_awake
        assert not cache or engine_awake
    await e.pause("abort")


@pytest.mark.slow
def test_shared_hands_over_in_the_order_that_never_needs_room_for_both():
    """Trainer off, then the update, then the cache; at most the weights lie there in between."""

    async def main():
        claim, loaded, algo, seen = OneAtATime("engine"), model("llama"), row("grpo"), []
        e, t = engine(loaded, kv_pages=64, claim=claim), crowded("float32", claim=claim, shared=loaded, algo=algo)
        devices, off = SharedDevice(e, t, offload=True), subscribe(lambda event: seen.append(event))
        for number in range(3):
            asked = asyncio.create_task(e.generate(ask(prompt(number, 5), n=20)))
            while not e.pages.keys.pool_bytes:
                await asyncio.sleep(0)
            async with devices.parked():
                async with devices.training():
                    assert (await e.status()).memory["kv_cache"] == 0
                    await t.step(batch(awkward_groups(), algo), algo)
                held = t.offload.memory()
                assert held["weights"] == sum(held.values()), "nothing but the weights while they are handed over"
                assert (await e.status()).memory["kv_cache"] == 0
            assert len((await asked).tokens) == 20, "a parked request goes on from its tokens"
        off()
        for told in (event for event in seen if isinstance(event, Resident)):
            assert (
                told.held["generate"]["kv_cache"] > 0 == told.held["train"]["kv_cache"] == told.held["sync"]["kv_cache"]
            )
            assert told.held["generate"]["moments"] == 0 < told.held["train"]["moments"]
            assert told.peak["sync"] == told.held["sync"]["weights"]
        with pytest.raises(EngineError, match=r"must sleep first|is asleep|are asleep|pause the engine first"):
            asked = asyncio.create_task(e.generate(ask(prompt(9, 5), n=20)))
            await asyncio.sleep(0.01)
            async with devices.training():
                pass
        await e.pause("abort")
        await asked

    asyncio.run(main())


def test_on_a_cpu_the_cache_of_an_idle_engine_is_given_back_while_the_trainer_works():
    """The update would empty it. A parked request keeps its own: it would compute its context again."""

    async def main():
        loaded, algo = model("llama"), row("grpo")
        e, t = engine(loaded, kv_pages=64), crowded("float32", shared=loaded, algo=algo)
        devices = SharedDevice(e, t)
        first = (await e.generate(ask(prompt(0, 5), n=20))).tokens
        lies = e.pages.keys.data_pointers
        for is_parked in (False, True):
            asked = asyncio.create_task(e.generate(ask(prompt(0, 5), n=20))) if is_parked else None
            while is_parked and not (await e.status()).running:
                await asyncio.sleep(0)
            async with devices.parked():
                async with devices.training():
                    assert bool((await e.status()).memory["kv_cache"]) is is_parked
                assert (await e.status()).state == ("held" if is_parked else "asleep")
            assert (await e.status()).state == "serving"
            assert (await asked if is_parked else await e.generate(ask(prompt(0, 5), n=20))).tokens == first
        assert e.pages.keys.data_pointers == lies, "who holds the address of a pool notices nothing"

    asyncio.run(main())


def test_a_reward_model_on_the_same_device_is_gone_while_the_trainer_works():
    """Law 8 with a third: it has its memory in `generate` alone, and the account of every phase says so."""

    class Reward:
        memory, said = 4000, []

        async def sleep(self):
            self.memory = 0
            self.said.append("sleeps")

        async def wake(self):
            self.memory = 4000
            self.said.append("wakes")

    async def main():
        claim, loaded, algo, seen, reward = OneAtATime("engine"), model("llama"), row("grpo"), [], Reward()
        e, t = engine(loaded, kv_pages=64, claim=claim), crowded("float32", claim=claim, shared=loaded, algo=algo)
        devices, off = SharedDevice(e, t, offload=True, beside=reward), subscribe(lambda event: seen.append(event))
        async with devices.parked():
            assert reward.memory == 0
            async with devices.training():
                await t.step(batch(awkward_groups(), algo), algo)
            assert reward.memory == 0
        off()
        (told,) = (event for event in seen if isinstance(event, Resident))
        assert {phase: held["reward"] for phase, held in told.held.items()} == {"generate": 4000, "train": 0, "sync": 0}
        assert (
            told.peak["generate"] == sum(told.held["generate"].values())
            and told.peak["sync"] == told.held["sync"]["weights"]
        )
        assert reward.said == ["sleeps", "wakes"] and reward.memory == 4000

    asyncio.run(main())


@pytest.mark.slow
def test_several_ranks_and_devices_of_ones_own_are_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"trainer\.memory\.offload = true has no effect on a device of its own"):
        run(tmp_path, trainer__memory__offload=True, place__kind="split")
    refused = r"task\.reward: offload = true is for one policy with place.kind = 'shared'"
    saved(tmp_path / "reward")
    reward = {"kind": "model", "path": str(tmp_path / "reward"), "template": "{question}\n{answer}", "offload": True}
    with monkeypatch.context() as patched:
        patched.setattr(RewardPool, "__init__", lambda *_, **__: pytest.fail("the reward is loaded first"))
        for number, whole in enumerate((reward, {"kind": "combine", "parts": {"model": reward, "number": "number"}})):
            with pytest.raises(ConfigError, match=refused):
                run(tmp_path / str(number), task__reward=whole, place__kind="split")
    (tmp_path / "drowsy.py").write_text(DROWSY)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=refused):
        run(tmp_path / "own", task__reward={"kind": "drowsy:Nap"}, place__kind="split")


DROWSY = '''
class Nap:
    """A reward of one's own that leaves its device to the trainer: known when it is built."""

    naps, together, memory = True, 2, 0

    def load_to_device(self) -> None: ...

    async def __call__(self, trajectory, task) -> float:
        return 0.0
'''


# -- whole runs --------------------------------------------------------------------------------------------

WITH = {"algo__kl": {"coef": 0.01}, "model__dtype": "bfloat16", "loop__warmup__steps": 0, "loop__steps": 3}


@pytest.mark.slow
def test_an_offloaded_run_is_the_same_run(tmp_path):
    """A key that only moves bytes: every number and every bit is that of a run without it."""
    rows = []
    run(tmp_path / "plain", **WITH)
    off = subscribe(lambda event: rows.append(event) if isinstance(event, Resident) else None)
    run(tmp_path / "off", **WITH, trainer__memory__offload=True)
    off()
    assert steps(tmp_path / "off") == steps(tmp_path / "plain")
    ours, theirs = final(tmp_path / "off"), final(tmp_path / "plain")
    assert ours.keys() == theirs.keys() and [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    assert len(rows) == 3 and all(
        sum(r.held["sync"].values()) == r.held["sync"]["weights"] == r.peak["sync"] for r in rows
    )
    assert all(r.peak["train"] > r.held["train"]["weights"] for r in rows) and rows[-1].held["generate"]["kv_cache"] > 0
    assert events(tmp_path / "off", "StepDone")[0]["metrics"]["train/kl_ref"] == 0


@pytest.mark.slow
@pytest.mark.sweep  # a checkpoint in ones sleep is below, a killed run is law 9's, one that is offloaded is above
def test_an_offloaded_run_that_was_killed_ends_as_the_plain_one(tmp_path):
    run(tmp_path / "plain", **WITH)
    theirs = final(tmp_path / "plain")
    assert run_and_die(tmp_path / "dies", ("StepDone", 2), **WITH, trainer__memory__offload=True) == -9
    run(tmp_path / "dies", **WITH, trainer__memory__offload=True)
    assert np.all([torch.equal(a, theirs[n]) for n, a in final(tmp_path / "dies").items()])


@pytest.mark.slow
def test_a_run_whose_reward_model_comes_and_goes(tmp_path):
    """The metrics say who had what: its weights while answers are written and scored, nothing
    while the trainer works.
    """
    path = saved(tmp_path / "reward")
    size = sum(
        p.numel() * p.element_size()
        for p in transformers.AutoModelForSequenceClassification.from_pretrained(path).parameters()
    )
    reward = {"kind": "model", "path": str(path), "template": "{question}\n{answer}", "offload": True}
    few = {"loop__steps": 2, "loop__groups_per_step": 2, "algo__group_size": 2, "loop__warmup__steps": 0}
    run(tmp_path / "run", task__reward=reward, loop__max_staleness=1, loop__window="auto", **few)
    rows = [e["metrics"] for e in events(tmp_path / "run", "StepDone")]
    assert len(rows) == 2 and all(
        e["reasons"] == {} for e in events(tmp_path / "run", "GroupFinished") if "reasons" in e
    )
    held = [e["held"] for e in events(tmp_path / "run", "Resident")]
    assert [h["generate"]["reward"] >= size and h["train"]["reward"] == h["sync"]["reward"] == 0 for h in held] == [
        True
    ] * 2


def test_sleep_and_update_of_an_engine_that_runs_are_errors():
    model = tiny()

    async def main():
        e = engine(model)
        task = asyncio.create_task(e.generate(ask(prompt(1, 10), n=40)))
        await wrote(e, 2)
        with pytest.raises(EngineError, match=r"pause the engine first"):
            await e.sleep(("kv_cache",))
        with pytest.raises(SyncError, match="pause the engine first"):
            await e.receive(Begin(names.build_manifest(model.model, 1)))
        done = await task
        assert len(done.tokens) == 40 and (await e.status()).state == "serving"
        await e.sleep(("kv_cache",))  # idle: no pause needed
        assert (await e.status()).state == "asleep"

    asyncio.run(main())
