"""Policies that are adapters on one base: one base in memory, one engine, and the same numbers as models apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kits.adapter_bank import merged
from kits.engine import SIZE, all_of, ask, engine, idle, plain_logprobs, prompt, twin
from kits.engine import tiny as tiny_model
from kits.runs import events, run, run_and_die, tiny
from rondel.assemble.components import build
from rondel.assemble.one_base import shares_base
from rondel.core.errors import EngineError, SyncError
from rondel.core.types import Begin, Commit, Manifest, Route
from rondel.driver.checkpoint_evaluation import evaluate_checkpoint
from rondel.generate.engine.adapter_policies import AdapterPolicyEngine
from rondel.generate.engine.builtin.adapter_receiver import AdapterReceiver
from rondel.models import names
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_rows import AdapterWeights
from rondel.models.adapters import add_adapter
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.shared_base import adapter_weights, share_base
from rondel.planner.memory import memory_bills
from rondel.planner.workload import of_job

TURNS = [
    {"agent": "writer", "says": "{prompt}"},
    {"agent": "critic", "says": "{prompt}? {writer} "},
    {"agent": "rival", "says": "{critic} "},
]
PLAY = dict(
    task__env={"kind": "agents", "agents": TURNS},
    task__reward="kits.rewards:thirds",
    task__data={"kind": "digits", "holdout": 4},
    policies__critic={"lr": 2e-3},
    policies__rival={"frozen": True},
    model__adapter={"kind": "lora", "rank": 4},
    model__path__num_hidden_layers=1,
    model__path__max_position_embeddings=128,
    loop__warmup__steps=0,
    loop__steps=2,
    loop__groups_per_step=2,
    algo__group_size=2,
    run__checkpoint__every=1,
)


def stored(folder: Path, policy: str = "") -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    own = newest / "policies" / policy if policy else newest
    tensors = {f"{path.stem}/{key}": t for path in own.glob("*.safetensors") for key, t in load_file(path).items()}
    del tensors["optimizer/rng"]  # of the process: nothing here draws from it, and loading does
    return tensors


@pytest.mark.slow
def test_who_shares_an_aligned_base_is_aligned():
    base = tiny_model("llama")
    align_numerics(base)
    shared = share_base(base)
    assert shared.aligned and shared.head.aligned


@pytest.mark.slow
def test_a_killed_run_on_one_base_ends_as_models_apart_to_the_bit(tmp_path):
    """Aligned: else in which batch a turn is computed, and so its last bits, depends on the clock. Models of folders of
    their own, with equal weights, are loaded apart.
    """
    model = load_model(tiny(tmp_path, **PLAY).model.path, dtype="float32")
    for name in ("policy", "critic", "rival"):
        model.model.save_pretrained(tmp_path / name)
        model.tokenizer.save_pretrained(tmp_path / name)
    start = {key: value for key, value in PLAY.items() if not key.startswith("model__path")}
    one = {**start, "model__path": str(tmp_path / "policy"), "engine__numerics": "aligned"}
    apart = one | {
        "policies__critic": {"lr": 2e-3, "model": str(tmp_path / "critic")},
        "policies__rival": {"frozen": True, "model": str(tmp_path / "rival")},
    }
    assert shares_base(tiny(tmp_path / "one", **one)) and not shares_base(tiny(tmp_path / "apart", **apart))
    run(tmp_path / "apart", **apart)
    assert run_and_die(tmp_path / "one", ("GroupsTaken", 2), **one) == -9
    run(tmp_path / "one", **one)

    for policy in ("", "critic"):
        ours, theirs = stored(tmp_path / "one", policy), stored(tmp_path / "apart", policy)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert any(key.startswith("adapter_model") and tensor.any() for key, tensor in ours.items() if "lora_B" in key)
    rewards = [[e["rewards"] for e in events(tmp_path / name, "GroupFinished")] for name in ("one", "apart")]
    assert {str(r) for r in rewards[1]} <= {str(r) for r in rewards[0]} and len(set(map(str, rewards[1]))) > 1
    for mine, alone in zip(events(tmp_path / "one", "StepDone"), events(tmp_path / "apart", "StepDone"), strict=True):
        for name in ("train/loss", "critic/loss", "train/grad_norm", "critic/grad_norm"):
            assert mine["metrics"][name] == alone["metrics"][name]
    held = [events(tmp_path / name, "Resident")[-1]["held"]["train"] for name in ("one", "apart")]
    base = sum(parameter.nbytes for parameter in model.model.parameters())
    assert held[1]["weights"] - held[0]["weights"] >= base
    within = events(tmp_path / "one", "Evaluated")[-1]
    again = evaluate_checkpoint(str(tmp_path / "one"), None, {})
    assert (again.score, [s["text"] for s in again.samples]) == (
        within["score"],
        [s["text"] for s in within["samples"]],
    )


@pytest.mark.slow
def test_memory_counts_the_base_once(tmp_path):
    parts = build(tiny(tmp_path, **PLAY))
    try:
        critic, policy = (parts.placed.trainers[name].loaded.model for name in ("critic", "policy"))
        base = {id(p) for p in parts.engine.loaded.model.parameters()}
        for model in (critic, policy):
            assert {id(p) for p in model.parameters() if not p.requires_grad} == base
        held = parts.trainer.offload.memory()
        adapter = sum(p.nbytes for p in critic.parameters() if p.requires_grad)
        assert held["weights"] <= sum(p.nbytes for p in policy.parameters()) + adapter + 4096  # tables of positions
        assert parts.placed.frozen_bytes == 0
    finally:
        parts.close()
    bill = memory_bills(of_job(tiny(tmp_path, **PLAY)))[0]
    assert {name for name in bill.rows if ":" in name} == {
        f"critic: {t}" for t in ("policy weights", "gradients", "moments")
    }
    assert bill.rows["critic: policy weights"]["train"] == adapter
    whole = memory_bills(of_job(tiny(tmp_path, **PLAY, engine__compile=True)))[0]
    assert whole.rows["critic: policy weights"] == whole.rows["policy weights"]


# -- the engine --------------------------------------------------------------------------------------


def two_on_one_base() -> tuple[AdapterPolicyEngine, dict[str, LoadedModel], LoadedModel]:
    """Engine, policies, and the base without a bank."""
    base = tiny_model(**SIZE)
    plain, policies = twin(base), {name: share_base(base) for name in ("policy", "critic")}
    for seed, loaded in enumerate(policies.values()):
        add_adapter(loaded, rank=4, alpha=8, seed=seed)
    bank = AdapterBank(base)
    for name, loaded in policies.items():
        bank.add(adapter_weights(name, loaded))
    one = engine(base, max_running=12, receiver=AdapterReceiver(bank, policies))
    names_of = {"policy": "policy", "critic": "critic", "rival": ""}
    return AdapterPolicyEngine(one, names_of, trained=list(policies)), policies, plain


def move(policies: dict[str, LoadedModel], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for loaded in policies.values():
            for parameter in loaded.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def update_of(policies: dict[str, LoadedModel], version: int) -> tuple[Manifest, Route]:
    joined = Manifest.join_policies({name: names.build_manifest(p.model, version) for name, p in policies.items()})
    data = {name: Route("tensor", dict(names.named_weights(loaded.model))) for name, loaded in policies.items()}
    return joined, Route("policies", data)


async def deliver(e: AdapterPolicyEngine, manifest: Manifest, route: Route) -> int:
    await e.receive(Begin(manifest, beside=False))
    await e.receive(route)
    return await e.receive(Commit(manifest.version, manifest.root))


def snapshot(name: str, loaded: LoadedModel) -> AdapterWeights:
    return adapter_weights(name, loaded)


@pytest.mark.slow
def test_requests_of_all_policies_are_decoded_together_with_the_weights_of_the_last_update():
    """Twelve requests in one batch, against merged modules one by one, before and after the trainers have moved."""
    e, policies, plain = two_on_one_base()

    async def play() -> None:
        for version in (1, 2):
            move(policies, version)
            assert await deliver(e, *update_of(policies, version)) == version == e.version
            asked = [
                replace(ask(prompt(7, 21) + prompt(i, 3), n=8), policy=name) for i in range(4) for name in e.adapters
            ]
            done = await all_of(e, asked)
            for request, completion in zip(asked, done):
                own = policies.get(request.policy)
                oracle = merged(plain, None if own is None else snapshot(request.policy, own))
                whole = [*request.tokens, *completion.tokens]
                wanted = plain_logprobs(oracle, whole)[len(request.tokens) - 1 :]
                assert list(completion.logprobs) == pytest.approx(wanted, abs=1e-4)
                assert set(completion.versions) == {version}
            assert len({tuple(c.logprobs) for c in done[:3]}) == 3
            scored = await e.score(replace(ask(prompt(3, 30)), policy="critic"))
            oracle = merged(plain, snapshot("critic", policies["critic"]))
            assert scored.logprobs[1:] == pytest.approx(plain_logprobs(oracle, prompt(3, 30)), abs=1e-4)
        idle(e.engine)

    asyncio.run(play())
    with pytest.raises(EngineError, match=r"the policy 'crtic', which this run does not have. Did you mean 'critic'"):
        asyncio.run(e.generate(replace(ask(prompt(1, 4)), policy="crtic")))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["policy missing", "other bits", "another root"])
def test_an_update_that_fails_for_one_policy_serves_none(fault):
    """They have been written over already: nobody generates until a good update (law 6)."""
    e, policies, _ = two_on_one_base()

    async def play() -> None:
        manifest, route = update_of(policies, 1)
        if fault == "policy missing":
            del route.data["critic"]
        if fault == "other bits":
            move({"critic": policies["critic"]}, 3)  # after they were announced
        if fault == "another root":
            manifest = replace(manifest, base="0")
        with pytest.raises(SyncError):
            await deliver(e, manifest, route)
        with pytest.raises(EngineError, match="until a good update"):
            await e.generate(replace(ask(prompt(1, 4)), policy="policy"))
        assert await deliver(e, *update_of(policies, 1)) == 1
        assert (await e.generate(replace(ask(prompt(1, 4)), policy="policy"))).tokens

    asyncio.run(play())
