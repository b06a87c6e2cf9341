"""`rondel check` at lr = 0: a sound recipe passes line by line, and each way to be wrong fails its own line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kits.runs import tiny
from kits.sweeps import covering
from rondel.assemble import check
from rondel.checks import recipe_check
from rondel.checks import self_test as room
from rondel.checks.layout_check import check_layouts
from rondel.models.load import load_model
from rondel.train import annotate
from rondel.train.optim import MasterWeights
from rondel.train.step import LocalTrainer

LINES = {"lr = 0: ratio", "lr = 0: clip", "lr = 0: weights", "lr = 0: gap"}
SMALL = {"loop__warmup__steps": 1, "loop__groups_per_step": 2, "algo__group_size": 2}


def lines(tmp_path, **changes) -> dict[str, tuple[bool, str]]:
    return {
        f.what: (f.ok, f.message)
        for f in check(tiny(tmp_path / "run", **(SMALL | changes)))
        if f.what.startswith("lr = 0")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    covering(
        SOUND := [{}, {"loop__updates_per_step": 2}, {"model__dtype": "bfloat16"}, {"algo__kind": "ppo"}],
        [SOUND[2], SOUND[3]],
    ),
    ids=["one", "two updates", "bf16", "with a critic"],
)
def test_a_sound_recipe_passes(tmp_path, changes):
    found = lines(tmp_path, **changes)
    assert found.keys() == LINES and all(ok for ok, _ in found.values()), found


def test_an_environment_that_never_asks_the_policy_is_found(tmp_path, monkeypatch):
    (tmp_path / "mute.py").write_text(
        "async def play(task, chat):\n"
        "    chat.give([{'role': 'user', 'content': task.data['prompt']}])\n"
        "    return chat.trajectory\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [f for f in check(tiny(tmp_path / "run", task__env="mute:play", **SMALL)) if f.what == "rollouts"]
    assert [f.ok for f in found] == [False], found
    assert "wrote nothing" in found[0].message and "await chat.reply()" in found[0].remedy


def failing(tmp_path, **changes) -> set[str]:
    return {what for what, (ok, _) in lines(tmp_path, **changes).items() if not ok}


LLAMA = {"random": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LATENTS = LLAMA | {"random": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1}
MIXTURE = {"random": "mixtral", "num_local_experts": 4, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("model", "mesh", "said"),
    [
        (LLAMA, {"tp": 16}, "tp = 16 does not divide"),
        (LLAMA, {"tp": 2, "overlap": True}, ""),
        (LLAMA, {"cp": 2, "cp_attention": "ring"}, ""),
        (LATENTS, {"cp": 2, "cp_attention": "ring"}, "latents, which are smaller than the keys made of them, cannot"),
        (LLAMA, {"ep": 2}, "no experts that ep could lay apart"),
        (LLAMA, {"pp": 3}, "2 layers: every stage needs one"),
        (MIXTURE, {"ep": 3}, "ep = 3 does not divide the 4 experts"),
        (MIXTURE, {"tp": 2, "ep": 2, "pp": 2}, ""),
    ],
)
def test_a_mesh_over_which_the_model_cannot_lie_is_a_finding(tmp_path, model, mesh, said):
    """The check runs on one rank, which alone would not notice."""
    job = tiny(tmp_path, place__mesh=mesh, place__kind="split")
    loaded = load_model(model, dtype="float32")
    trainer = SimpleNamespace(loaded=loaded)
    [found] = check_layouts(job, SimpleNamespace(trainer=trainer, placed=SimpleNamespace(trainers={"policy": trainer})))
    assert found.what == "layout" and found.ok == (not said) and said in found.message


@pytest.mark.slow
def test_the_layout_is_checked_with_all_else(tmp_path):
    how = {"place__mesh": {"tp": 16}, "place__kind": "split", "place__engines": {"count": 1, "tp": 2}}
    found = [f for f in check(tiny(tmp_path, **(SMALL | how))) if f.what == "layout"]
    assert [f.ok for f in found] == [False, True] and "tp = 16 does not divide the 4 attention heads" in found[
        0
    ].message


@pytest.mark.slow
def test_each_answer_that_was_drawn_passes_once(tmp_path, monkeypatch):
    """The steps share the groups out; where there are fewer groups than steps, the others take them all."""
    stepped, seen = LocalTrainer.step, []

    async def step(self, batch, algo):
        seen.append({(sample.group, sample.index) for sample in batch.samples})
        stats = await stepped(self, batch, algo)
        assert "train/not_computed" not in stats.metrics, "answers without an advantage are looked at, too"
        return stats

    monkeypatch.setattr(LocalTrainer, "step", step)
    assert not failing(tmp_path)
    assert [len(one) for one in seen] == [4, 4, 4] and len(set.union(*seen)) == 12
    seen.clear()
    monkeypatch.setattr(recipe_check, "GROUPS", 2)
    assert not failing(tmp_path / "few") and [len(one) for one in seen] == [2, 2, 4]


@pytest.mark.slow
def test_weights_that_move_are_found(tmp_path, monkeypatch):
    stepped = MasterWeights.step

    def drifts(self, **how):
        with torch.no_grad():
            self.masters[0].view(-1)[0] += 1e-3
        return stepped(self, **how)

    monkeypatch.setattr(MasterWeights, "step", drifts)
    assert "lr = 0: weights" in failing(tmp_path)


@pytest.mark.slow
def test_an_engine_that_samples_from_another_distribution_is_found(tmp_path, monkeypatch):
    """The trainer forgets a temperature of 0.7: the commonest lie of a log-probability."""
    forward = annotate.forward
    monkeypatch.setattr(
        annotate,
        "forward",
        lambda loaded, packed, *, temperature, **more: forward(loaded, packed, temperature=1.0, **more),
    )
    assert failing(tmp_path, engine__sampling={"temperature": 0.7, "max_tokens": 6}) == {"lr = 0: gap"}


@pytest.mark.slow
def test_a_pass_that_is_not_the_same_twice_is_found(tmp_path, monkeypatch):
    """As with dropout: the anchor and the policy of two updates are different passes."""
    forward, noise = annotate.forward, torch.Generator().manual_seed(0)

    def shaken(*words, **how):
        logprobs, entropy = forward(*words, **how)
        return logprobs + 0.3 * torch.randn(logprobs.shape, generator=noise), entropy

    monkeypatch.setattr(annotate, "forward", shaken)
    assert failing(tmp_path, loop__updates_per_step=2) >= {"lr = 0: ratio", "lr = 0: gap"}


@pytest.mark.slow
def test_a_large_model_is_stepped_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "SMALL", 10)
    assert lines(tmp_path)["lr = 0"][0]
    found = {f.what for f in recipe_check.check(tiny(tmp_path / "asked", **SMALL), asked=True)}
    assert found >= LINES
