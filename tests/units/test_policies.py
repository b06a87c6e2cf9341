"""Agents with weights of their own: one episode, one step, one version; each policy
learns from its own agents' tokens and no others.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rondel
from kits.engine import SIZE, ask, engine, plain_logprobs, prompt, twin
from kits.engine import tiny as tiny_model
from kits.runs import balances, check, events, run, run_and_die, steps, tiny
from kits.sweeps import covering
from kits.sync import Publisher, wrote
from kits.train import batch, bits, model, row, step, trainer, trajectory
from kits.virtual_time import VirtualClockLoop
from rondel.assemble import check as check_recipe
from rondel.assemble.facts import devices_of, planned_memory
from rondel.cli import main
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, DataError, EngineError, LawError, SyncError
from rondel.core.types import Commit, Completion, Group, Manifest, Route, Sampling, Score, Task, TensorInfo
from rondel.driver.checkpoint_evaluation import evaluate_checkpoint
from rondel.generate.engine.multi_policy import MultiPolicyEngine
from rondel.generate.engine.router import EngineRouter
from rondel.generate.envs.agents import Agents
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import assign_parents, join_episodes
from rondel.planner.memory import memory_bills
from rondel.planner.workload import of_job
from rondel.runtime.devices import SharedDevice, SharedDevices
from rondel.runtime.journal import store
from rondel.runtime.telemetry.metrics import SCHEMA, metric_meaning
from rondel.sync.from_disk import FromDisk
from rondel.sync.multi_policy import MultiPolicyTransport
from rondel.sync.update import WeightUpdate
from rondel.train.multi_policy import MultiPolicyMemory, MultiPolicyTrainer
from rondel.train.pack import TrainBatch

ROOT = Path(__file__).parents[2]
ONLY = [{"agent": "only", "says": "{prompt}"}]
SHORT = dict(loop__warmup__steps=0, loop__steps=3, run__checkpoint__every=0)


def weights(folder: Path, policy: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a policy in the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    own = newest / "policies" / policy if policy else newest
    return {f"{path.stem}/{key}": t for path in own.glob("*.safetensors") for key, t in load_file(path).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_chain_of_one_agent_is_single_agent_training_to_the_bit(tmp_path):
    """Whether its weights are the main policy's or have a name of their own."""
    run(tmp_path / "plain", task__env={"kind": "agents", "agents": ONLY}, **SHORT)
    run(tmp_path / "named", task__env={"kind": "agents", "agents": ONLY}, policies__only={}, **SHORT)
    plain, named = weights(tmp_path / "plain"), weights(tmp_path / "named", "only")
    assert equal(plain, named) and not equal(plain, weights(tmp_path / "named"))
    for a, b in zip(events(tmp_path / "plain", "StepDone"), events(tmp_path / "named", "StepDone"), strict=True):
        assert (
            a["metrics"]["train/loss"] == b["metrics"]["only/loss"]
            and a["metrics"]["train/grad_norm"] == b["metrics"]["only/grad_norm"]
        )
        assert b["metrics"]["train/tokens"] == 0 and a["version"] == b["version"]


def relay(folder: Path, **changes) -> tuple[float, float]:
    """The recipe of the docs. -> mean rewards of its first and last groups."""
    from rondel.assemble import train

    train(
        Job.read(
            ROOT / "recipes" / "relay.toml", {"run.folder": str(folder), "run.sinks": [], "place.threads": 1, **changes}
        ),
        quiet=True,
    )
    rewards = [sum(e["rewards"]) / len(e["rewards"]) for e in events(folder, "GroupFinished")]
    return sum(rewards[:30]) / 30, sum(rewards[-50:]) / 50


SHORTER = {"loop.groups_per_step": 6, "trainer.lr": 1.4e-2}


@pytest.mark.slow
@pytest.mark.parametrize("steps", covering([3, 80], [3]))
def test_a_game_of_two_is_learned_by_both(tmp_path, monkeypatch, steps):
    """After eighty steps; that both move shows after three."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    first, last = relay(tmp_path / "both", **{"loop.steps": steps, "run.checkpoint.every": 1, "run.checkpoint.keep": 3})
    print(f"CURVE game with weights of their own: {first:.2f} -> {last:.3f}")
    assert steps < 80 or (first < 0.3 and last > 0.9)
    checkpoints = sorted((tmp_path / "both" / "checkpoints").glob("step-*"))[-2:]
    for own in ("", "policies/listener"):
        early, late = (load_file(at / own / "model.safetensors") for at in checkpoints)
        assert not any(torch.equal(early[name], late[name]) for name in early), own


@pytest.mark.slow
@pytest.mark.parametrize("steps", covering([3, 40], [3]))
def test_beside_a_listener_that_stays_as_it_was_the_speaker_learns_its_half_and_no_more(tmp_path, monkeypatch, steps):
    """After forty steps; who wrote under which weights, and what is stored, shows after three."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    _, last = relay(tmp_path / "half", **{"policies.listener.frozen": True, "loop.steps": steps, **SHORTER})
    assert steps < 40 or 0.4 < last < 0.6
    number = store.stored_steps(tmp_path / "half")[-1]
    rows = store.read_step(tmp_path / "half", number)
    assert {(row["agent"], row["policy"]) for row in rows} == {("speaker", "policy"), ("listener", "listener")}
    assert {v for row in rows for v in row["versions"] if v >= 0} == {number - 1}  # of the episode, whoever wrote
    assert not (sorted((tmp_path / "half" / "checkpoints").glob("step-*"))[-1] / "policies").exists()


# -- the gradient ----------------------------------------------------------------------------------


def two_sided(seed: int = 0) -> list[Group]:
    """Two groups of three episodes, each with a trajectory of two policies."""
    rng, groups = np.random.default_rng(seed), []
    for number in range(2):
        asked = rng.integers(5, 100, 6).tolist()
        episodes = []
        for _ in range(3):
            pair = [
                trajectory([(int(rng.integers(2, 9)), 1)], rng, prompt=asked),
                trajectory([(4, 1), (2, 0), (3, 1)], rng, prompt=asked[:3]),
            ]
            pair[1].agent = pair[1].policy = "critic"
            episodes.append(pair)
        groups.append(Group(number, Task(f"t{number}", "fake", {}), join_episodes(map(assign_parents, episodes)), 0))
    return groups


def of(groups: list[Group], policy: str) -> list[Group]:
    return [Group(g.id, g.task, [t for t in g.trajectories if t.policy == policy], g.born) for g in groups]


@pytest.mark.parametrize("kind", ["grpo", "dapo", "gspo"])
def test_each_policy_is_trained_as_if_it_were_alone(kind):
    groups, algo = two_sided(), row(kind)
    together = MultiPolicyTrainer({"policy": trainer(model(), algo), "critic": trainer(model("tied"), algo, lr=3e-3)})
    stats = asyncio.run(together.step(batch(groups, algo), algo))
    for name, metric, alone in (
        ("policy", "train", trainer(model(), algo)),
        ("critic", "critic", trainer(model("tied"), algo, lr=3e-3)),
    ):
        apart = step(alone, batch(of(groups, name), algo), algo)
        assert bits(together.each[name]) == bits(alone)
        for what in ("loss", "grad_norm", "gap_max", "tokens", "lr"):
            assert stats.metrics[f"{metric}/{what}"] == apart.metrics[f"train/{what}"]
    assert stats.stepped and together.moved
    for name in (n for n in stats.metrics if n.startswith("critic/")):
        known = metric_meaning(name.replace("critic/", "train/")) or name in (
            "critic/reward_mean",
            "critic/length_mean",
        )
        assert (metric_meaning(name) is not None) == bool(known), name
    assert metric_meaning("critic/gap_max") == (
        SCHEMA["train/gap_max"][0],
        f"{SCHEMA['train/gap_max'][1]}; of the policy 'critic'",
    )
    assert metric_meaning("critic/nothing") is None


@pytest.mark.slow
def test_what_one_agent_wrote_changes_no_other_policy():
    plain, other, algo = two_sided(), two_sided(), row("grpo")
    for t in (t for g in other for t in g.trajectories if t.policy == "critic"):
        t.tokens = [(token + 7) % 90 + 5 for token in t.tokens]
        t.score = Score(-t.reward)
    ends = []
    for groups in (plain, other):
        both = MultiPolicyTrainer({"policy": trainer(model(), algo), "critic": trainer(model(), algo)})
        asyncio.run(both.step(batch(groups, algo), algo))
        ends.append([bits(both.each[name]) for name in ("policy", "critic")])
    assert ends[0][0] == ends[1][0] and ends[0][1] != ends[1][1]


def test_a_policy_of_which_nobody_wrote_keeps_its_bits_and_counts_the_version():
    algo = row("grpo")
    both = MultiPolicyTrainer({"policy": trainer(model(), algo), "critic": trainer(model(), algo)})
    before = bits(both.each["critic"])
    asyncio.run(both.step(batch(of(two_sided(), "policy"), algo), algo))
    assert bits(both.each["critic"]) == before and not both.each["critic"].moved and both.moved
    assert [t.version for t in both.each.values()] == [t.step_number for t in both.each.values()] == [1, 1]


def test_a_step_that_one_policy_refuses_is_no_whole_step():
    algo, groups = row("grpo"), two_sided()
    groups[0].trajectories[1].score = Score(float("nan"))
    both = MultiPolicyTrainer({"policy": trainer(model(), algo), "critic": trainer(model(), algo)})
    before = bits(both.each["critic"])
    stats = asyncio.run(both.step(TrainBatch(batch(groups, algo).samples), algo))
    assert not stats.stepped and stats.note.startswith("reward of 'critic': ") and bits(both.each["critic"]) == before
    assert stats.note.endswith("('policy' took theirs)") and both.each["policy"].moved
    assert stats.outcomes == {0: "", 1: ""}  # the other policy learned from both


def test_of_a_step_that_one_policy_refuses_the_ledger_books_what_the_other_one_learned():
    """Group 0 has both policies, group 1 the refusing one alone."""
    algo, groups = row("grpo"), two_sided()
    groups[0].trajectories[1].score = Score(float("nan"))
    groups[1:] = of(groups[1:], "critic")
    both = MultiPolicyTrainer({"policy": trainer(model(), algo), "critic": trainer(model(), algo)})
    stats = asyncio.run(both.step(TrainBatch(batch(groups, algo).samples), algo))
    assert stats.outcomes == {0: "", 1: "reward of 'critic'"}
    silent = asyncio.run(both.step(TrainBatch(batch(groups[1:], algo).samples), algo))
    assert silent.stepped and silent.outcomes == {1: ""} and not silent.note


# -- versions, interruption, the folder --------------------------------------------------------------

PAIR = [
    {"agent": "writer", "says": "{prompt}"},
    {"agent": "critic", "says": "{prompt}? {writer} "},
    {"agent": "writer", "turn": "final", "says": "{critic} "},
]
PLAY = dict(
    task__env={"kind": "agents", "agents": PAIR},
    loop__warmup__steps=0,
    policies__critic={"lr": 2e-3},
    model__path__max_position_embeddings=128,
)
FEWER = dict(loop__groups_per_step=2, algo__group_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("place", covering([{}, {"place__kind": "split"}], [{"place__kind": "split"}]))
def test_stale_episodes_have_versions_of_their_own_policies_within_the_limit(tmp_path, place):
    run(
        tmp_path,
        loop__max_staleness=1,
        algo__correction={"kind": "importance"},
        loop__steps=3,
        **PLAY,
        **FEWER,
        **place,
    )
    rows = check(tmp_path, staleness=1, total=3)
    assert {(r["agent"], r["policy"]) for r in rows} == {("writer", "policy"), ("critic", "critic")}
    for metrics in (e["metrics"] for e in events(tmp_path, "StepDone")):
        assert metrics["train/tokens"] > 0 and metrics["critic/tokens"] > 0
    fresh = events(tmp_path, "StepDone")[0]["metrics"]
    assert max(fresh["train/gap_max"], fresh["critic/gap_max"]) < 1e-4
    assert all(e["probe_gap"] < 1e-3 for e in events(tmp_path, "Synced"))


def test_a_token_of_a_version_that_its_policy_never_had_is_a_broken_law():
    algo, groups = row("grpo"), two_sided()
    both = MultiPolicyTrainer({"policy": trainer(model(), algo), "critic": trainer(model(), algo)})
    both._published = {name: Manifest(3, ()) for name in both.each}
    asyncio.run(both.step(batch(groups, algo), algo))
    groups[1].trajectories[3].versions = [4 if v == 0 else v for v in groups[1].trajectories[3].versions]
    with pytest.raises(LawError, match="'critic' is at version 3, and a token of its agents was written by version 4"):
        asyncio.run(both.step(batch(groups, algo), algo))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_bits_and_its_folder_holds_every_policy(tmp_path, capsys):
    """Aligned: in which batch a turn is computed depends on when the turn before it ended, and so on the clock."""
    settings = dict(
        loop__steps=3,
        run__checkpoint__every=2,
        engine__numerics="aligned",
        task__data={"kind": "digits", "holdout": 6},
        **PLAY,
        **FEWER,
    )
    run(tmp_path / "whole", **settings)
    assert run_and_die(tmp_path / "killed", ("GroupsTaken", 3), **settings) == -9
    run(tmp_path / "killed", **settings)
    for policy in ("", "critic"):
        assert equal(weights(tmp_path / "whole", policy), weights(tmp_path / "killed", policy))
    assert steps(tmp_path / "whole") == steps(tmp_path / "killed")
    assert not equal(weights(tmp_path / "whole"), weights(tmp_path / "whole", "critic"))
    assert all(balances(e["ledger"]) for e in events(tmp_path / "killed", "StepDone"))

    newest = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))[-1]
    for source, left in ((newest, True), (newest / "policies" / "critic", False)):
        with pytest.raises(SystemExit) as ended:
            main(["export", str(source), str(tmp_path / f"exported-{source.name}")])
        said = f"'critic' has weights of its own: rondel export {newest / 'policies' / 'critic'} "
        assert not ended.value.code and (said in capsys.readouterr().out) == left, "it is told what was left"
    ids = prompt(3, 12, vocab=40)
    for folder in (newest, newest / "policies" / "critic"):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
        want = plain(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        out = rondel.Engine.load(str(folder)).generate([ids], rondel.Sampling(max_tokens=1, temperature=0.0))[0][0]
        assert want.isfinite().all() and out.logprobs[0] <= 0
    within = events(tmp_path / "whole", "Evaluated")[-1]
    again = evaluate_checkpoint(str(tmp_path / "whole"), None, {})
    assert (again.score, [s["text"] for s in again.samples]) == (
        within["score"],
        [s["text"] for s in within["samples"]],
    )
    card = json.loads((tmp_path / "whole" / "card.json").read_text())
    assert card["policies"]["critic"]["agents"] == ["critic"] and card["policies"]["critic"]["reward_last"] is not None
    assert "| critic | critic |" in (tmp_path / "whole" / "card.md").read_text()


# -- one transaction ---------------------------------------------------------------------------------


class Moving(Publisher):
    moved = True


class Balking:
    """An engine that fails at the messages that it is told to."""

    def __init__(self, of):
        self.of, self.at = of, ()

    async def receive(self, message):
        if isinstance(message, self.at):
            raise SyncError(f"{type(message).__name__} went wrong")
        return await self.of.receive(message)

    def __getattr__(self, verb):
        return getattr(self.of, verb)


@pytest.mark.slow
@pytest.mark.parametrize("at", [Route, Commit])
def test_when_one_policy_fails_nothing_is_mixed(tmp_path, at):
    """Before anyone has committed the old version goes on serving, for all; after that
    nobody generates until a good update.
    """
    mine = {
        "policy": tiny_model(),
        "critic": tiny_model(**SIZE | {"seed": 4, "hidden_size": 32}),
    }
    engines = {name: engine(loaded, transports={"disk": FromDisk(tmp_path / name)}) for name, loaded in mine.items()}
    critic = Balking(engines["critic"])
    both = MultiPolicyEngine({"policy": engines["policy"], "critic": critic})
    trainers = MultiPolicyTrainer(
        {name: Moving(twin(loaded), transport=FromDisk(tmp_path / name)) for name, loaded in mine.items()}
    )

    def said(name):
        async def logprobs(tokens):
            return [0.0, *plain_logprobs(trainers.each[name].loaded, tokens)]

        return logprobs

    ways = MultiPolicyTransport({name: FromDisk(tmp_path / name) for name in mine})
    update = WeightUpdate(
        ways,
        probe=prompt(0, 12),
        score=said("policy"),
        others={"critic": said("critic")},
        tolerance=1e-4,
        moved=lambda: True,
    )

    async def answers():
        asked = [ask(prompt(1, 9), key=7, n=6) for _ in mine]
        for name, request in zip(mine, asked):
            request.policy = name
        return [(done.tokens, set(done.versions)) for done in await asyncio.gather(*map(both.generate, asked))]

    async def main():
        assert await update(trainers, both) == 0
        before = await answers()
        for t in trainers.each.values():
            t.train()
        critic.at = at
        with pytest.raises(SyncError, match="went wrong"):
            await update(trainers, both)
        if at is Route:
            assert await answers() == before and (await both.status()).version == 0
        else:
            assert (await both.status()).state == "refusing"
            with pytest.raises(EngineError, match=r"good update.*'critic' did not take version 1, and others did"):
                await answers()
        critic.at = ()
        trainers._published = {}  # as a run that begins again
        assert await update(trainers, both) == 1 == both.version
        after = await answers()
        assert [versions for _, versions in after] == [{1}, {1}] and after != before

    asyncio.run(main())


@pytest.mark.parametrize(
    "shared, join",
    [(SharedDevice, MultiPolicyEngine), (SharedDevices, partial(EngineRouter, max_inflight=4))],
    ids=["policies", "router"],
)
def test_engines_stand_still_for_as_long_as_the_trainer_of_a_shared_device_takes(shared, join):
    """An hour, in which one that went on would draw from weights that are half of one version and half of the next."""
    engines = {name: engine(tiny_model(seed=seed)) for seed, name in enumerate(("policy", "critic"))}
    idle = SimpleNamespace(offload=MultiPolicyMemory({}))
    devices = shared(join(engines), idle)

    async def main():
        asked = [asyncio.create_task(e.generate(ask(prompt(1, 9), n=20))) for e in engines.values()]
        for e in engines.values():
            await wrote(e, 2)
        async with devices.parked(), devices.training():
            written = [e.scheduler.running[0].written for e in engines.values()]
            await asyncio.sleep(3600)
            assert [(await e.status()).state for e in engines.values()] == ["held", "held"]
            assert [e.scheduler.running[0].written for e in engines.values()] == written
        assert [len((await one).tokens) for one in asked] == [20, 20]

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


def test_each_policy_must_move_when_it_was_moved():
    """The digest of all would hide one that stood still."""
    trainers = MultiPolicyTrainer({name: Moving(tiny_model()) for name in ("policy", "critic")})
    route = Route("policies", {name: Route("tensor") for name in trainers.each})

    async def main():
        await trainers.publish(route)
        trainers.each["policy"].train()
        trainers.each["critic"].version += 1
        with pytest.raises(SyncError, match="'critic' made a step with lr > 0, but the weights"):
            await trainers.publish(route)

    asyncio.run(main())


def test_a_manifest_of_several_comes_apart_again():
    parts = {
        name: Manifest(4, tuple(TensorInfo(f"layer.{i}.{name}", (2, i), "float32", f"{i:x}") for i in range(3)), base)
        for name, base in (("policy", ""), ("critic", "beef"))
    }
    whole = Manifest.join_policies(parts)
    assert {name: whole.policy_part(name) for name in parts} == parts and Manifest.from_dict(whole.to_dict()) == whole
    with pytest.raises(ValueError, match="one version has one number"):
        Manifest.join_policies({**parts, "critic": parts["critic"].with_version(5)})


# -- who speaks ----------------------------------------------------------------------------------------


def played(env, cast):
    asked = []
    tok = model().tokenizer

    async def generate(request):
        asked.append(request.policy)
        tokens = [*tok.encode("ok", add_special_tokens=False), tok.eos_token_id]
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", text="ok")

    chat = TokenChat(tok, generate, sampling=Sampling(max_tokens=8), key=lambda turn: turn, max_context=400, cast=cast)
    return asyncio.run(env(chat)), asked


def test_the_weights_that_write_are_those_of_who_speaks():
    turns = [
        {"agent": "a", "says": "x"},
        {"agent": "b", "says": "{a}"},
        {"agent": "c", "says": "{b}"},
        {"agent": "a", "turn": "end", "says": "{c}"},
    ]
    task = Task("t", "agents", {"prompt": "2+2"})
    found, asked = played(lambda chat: Agents(turns).run(task, chat), {"b": "critic", "a": "writer"})
    assert asked == ["writer", "critic", "policy", "writer"]
    assert {t.agent: t.policy for t in found} == {"a": "writer", "b": "critic", "c": "policy"}

    async def late(chat):
        chat.give([{"role": "user", "content": "x"}])
        await chat.reply()
        chat.trajectory.agent = "critic"
        chat.give([{"role": "user", "content": "y"}])
        await chat.reply()

    with pytest.raises(DataError, match=r"name it before it speaks, chat.beside\(\"critic\"\)"):
        played(late, {"critic": "critic"})


class Unnamed(Agents):
    """It names its agents when they have spoken, so that the main policy wrote for all."""

    def __init__(self) -> None:
        super().__init__([{"agent": "one", "says": "{prompt}"}])
        self.agents = ["one", "critic"]

    async def run(self, task, chat):
        [found] = await super().run(task, chat)
        found.agent = "critic"
        return found


# -- what is refused, and what is told ------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_not_carried_is_refused_by_name_before_anything_is_loaded(tmp_path):
    from rondel.assemble.components import build

    for changes, said in [
        ({"task__env": "single_turn"}, 'has one agent, without a name.*use env = "agents"'),
        (
            {"policies__crtic": {}},
            "plays the agent 'crtic', and the environment has none of that name. Did you mean 'critic'",
        ),
        ({"place__kind": "split", "place__ranks": 2}, "place.ranks = 2 shards one: set it to 1"),
        ({"place__kind": "split", "place__engines": 2}, "place.engines = 2 are replicas of one: set it to 1"),
        ({"place__kind": "split", "place__cluster": "ray"}, 'place.cluster = "ray".*cluster = "process"'),
        ({"algo__kind": "ppo"}, "has a critic of one.*grpo or rloo"),
        ({"algo__kind": "opd", "model__teacher": "x"}, "model.teacher teaches one"),
        ({"loop__warmup__steps": 2}, "loop.warmup shows answers to one: run it first as a run of its own"),
        ({"trainer__memory__offload": True}, "trainer.memory.offload"),
        ({"run__record": True}, 'run.record: engine.numerics = "fast"'),
        ({"engine__speculative": {"kind": "draft", "model": "x"}}, 'use "ngram" or "off"'),
        (
            {"engine__kind": "sglang", "engine__url": "http://127.0.0.1:1", "place__kind": "split"},
            "use the built-in engine",
        ),
        ({"policies__critic": {"frozen": True, "lr": 1.0}}, "lr = 1 has no effect on frozen weights"),
        ({"policies__train": {}}, "a policy cannot be called 'train'"),
        ({"policies__b": {"agents": ["critic"]}}, "'critic' cannot play both 'critic' and 'b'"),
        ({"policies__critic": {"frozn": True}}, "unknown key 'policies.critic.frozn'. Did you mean 'frozen'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            build(tiny(tmp_path, **{**PLAY, **changes}))
    with pytest.raises(
        ConfigError, match=r"policies.critic.model = 'random-llama' carries 64 tokens and 'random-llama' 128"
    ):
        build(
            tiny(
                tmp_path,
                **PLAY,
                policies__critic__model={**tiny(tmp_path, **PLAY).model.path, "max_position_embeddings": 64},
            )
        )
    job = tiny(tmp_path, task__env="test_policies:Unnamed", policies__critic={}, loop__warmup__steps=0)
    [fault] = [f for f in [*_faults(job)] if "is played by 'critic'" in f]
    assert "an environment names its agents before they speak" in fault


def _faults(job):
    try:
        yield from (f.message for f in check_recipe(job) if not f.ok)
    except DataError as error:
        yield str(error)


@pytest.mark.slow
def test_memory_counts_every_policy(tmp_path):
    alone, both = tiny(tmp_path), tiny(tmp_path, **PLAY)
    one, two = memory_bills(of_job(alone))[0], memory_bills(of_job(both))[0]
    for tenant in ("policy weights", "gradients", "moments"):
        assert two.rows[f"critic: {tenant}"] == two.rows[tenant] == one.rows[tenant]
    frozen = memory_bills(of_job(tiny(tmp_path, **{**PLAY, "policies__critic": {"frozen": True}})))[0]
    assert {name for name in frozen.rows if name.startswith("critic")} == {"critic: KV cache", "critic: policy weights"}
    assert planned_memory(both) == planned_memory(
        tiny(tmp_path, **{k: v for k, v in PLAY.items() if k != "policies__critic"})
    )
    apart = tiny(tmp_path, **PLAY, policies__rival={"agents": ["nobody"], "frozen": True}, place__kind="split")
    assert devices_of(both) == 1 and devices_of(apart) == 5
    assert [bill.pool for bill in memory_bills(of_job(apart))] == [
        "trainer",
        "engine",
        "trainer of critic",
        "engine of critic",
        "engine of rival",
    ]
    told = {f.what: f.message for f in check_recipe(both)}
    assert told["policy critic"] == "plays critic with random-llama, lr 0.002" and "of 2 policies" in told["memory"]
