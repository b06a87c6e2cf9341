"""Masters, gradients and moments in host memory: the step is that of the device, bit for bit, and nothing stays there."""

from __future__ import annotations

import pytest
import torch

from kits.runs import run
from kits.train import awkward_groups, batch, bits, gradient, inline, model, row, step, trainer
from rondel.core.errors import ConfigError
from rondel.models.adapters import add_adapter
from rondel.planner.advice import bill_sentences
from rondel.planner.cost import train_seconds
from rondel.planner.host_memory import bytes_beside
from rondel.planner.memory import memory_bills
from rondel.planner.workload import what_if
from rondel.train.checkpoint import load_trainer, save_trainer
from rondel.train.critic import Critic
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer


def pair(dtype: str, algo, **settings) -> tuple[LocalTrainer, LocalTrainer]:
    """On the device, and on the host, which is the same on a CPU but for the copies between."""
    plain, host = (trainer(model(dtype=dtype), algo, optimizer_on_host=h, **settings) for h in (False, True))
    return plain, host


def weights_of(t: LocalTrainer) -> list[torch.Tensor]:
    owners = [t.weights, *([t.critic.weights] if t.critic else [])]
    return [x.detach() for owner in owners for x in (*owner.compute, *owner.masters)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, dtype",
    [("adamw", "float32"), ("adamw", "float16"), ("adamw_8bit", "bfloat16"), ("muon", "bfloat16"), ("muon", "float32")],
)
def test_steps_have_the_same_bits(dtype, kind):
    algo = row("grpo")
    plain, host = pair(dtype, algo, optimizer=kind, weight_decay=0.1)
    for n in range(2):
        told = [step(t, batch(awkward_groups(n), algo), algo).metrics for t in (plain, host)]
        for name in ("train/loss", "train/grad_norm", "train/weights_changed"):
            assert told[0].get(name) == told[1].get(name), name
    assert bits(plain) == bits(host)
    compute, masters = host.weights.compute, host.weights.masters
    assert all(p is not m and m.device.type == "cpu" and m.dtype == torch.float32 for p, m in zip(compute, masters))
    assert all(p.grad is None for p in compute), "each gradient has left"


@pytest.mark.slow
def test_a_critic_and_an_adapter_too():
    algo = row("ppo")
    plain, host = pair("float32", algo)
    for t in (plain, host):
        step(t, batch(awkward_groups(), algo), algo)
    assert host.critic is not None and host.critic.weights.on_host
    assert all(map(torch.equal, weights_of(plain), weights_of(host)))
    moved = []
    for on_host in (False, True):
        loaded = model()
        add_adapter(loaded, rank=4, alpha=8)
        t = trainer(loaded, optimizer_on_host=on_host)
        step(t, batch(awkward_groups(), row("grpo")), row("grpo"))
        moved.append(weights_of(t))
    assert all(map(torch.equal, *moved))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_that_of_a_plain_trainer_and_goes_on_in_either(tmp_path, dtype):
    algo = row("grpo")
    plain, host = pair(dtype, algo)
    for n, t in enumerate((plain, host)):
        step(t, batch(awkward_groups(1), algo), algo)
        save_trainer(t, tmp_path / str(n))
    files = [(tmp_path / str(n) / "optimizer.safetensors").read_bytes() for n in range(2)]
    assert len(files[0]) == len(files[1])
    back, forth = pair(dtype, algo)
    load_trainer(back, tmp_path / "1")
    load_trainer(forth, tmp_path / "0")
    for t in (plain, back, forth):
        step(t, batch(awkward_groups(2), algo), algo)
    assert bits(plain) == bits(back) == bits(forth)


@pytest.mark.slow
def test_asleep_or_awake_the_host_keeps_what_it_has():
    """Law 8 counts the device: with `offload` beside it nothing of the optimizer is copied once more."""
    algo = row("ppo")
    settings = TrainSettings(lr=1e-3, critic_lr=1e-3, start_probe=0, optimizer_on_host=True)
    loaded = model(dtype="bfloat16")
    t = LocalTrainer(loaded, settings, run=inline, needs=algo.needs, critic=Critic(loaded, settings))
    step(t, batch(awkward_groups(), algo), algo)
    held = t.offload.memory()
    assert held["weights"] > 0 and held["masters"] == held["moments"] == held["gradients"] == 0
    places = [m.data_ptr() for m in t.weights.masters]
    t.offload.sleep()
    t.offload.wake()
    assert places == [m.data_ptr() for m in t.weights.masters]
    assert step(t, batch(awkward_groups(1), algo), algo).stepped


@pytest.mark.slow
def test_gradients_of_several_micro_batches_add_up():
    algo = row("grpo")
    plain, host = pair("bfloat16", algo)
    grads = [gradient(t, batch(awkward_groups(), algo), algo, micro_tokens=20) for t in (plain, host)]
    assert torch.equal(*grads) and grads[0].any()


@pytest.mark.slow
def test_where_it_saves_nothing_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'trainer.memory.optimizer = "host" saves memory of a GPU.*: remove the key'):
        run(tmp_path, trainer__memory={"optimizer": "host"})
    with pytest.raises(ConfigError, match=r'"host" with place.ranks = 2: each rank keeps a shard'):
        run(tmp_path, trainer__memory={"optimizer": "host"}, place__kind="split", place__ranks=2)


def test_the_plan_counts_both_sides():
    plain, host = (what_if(["model=7b", "hardware=h100", f"host_optimizer={h}"]) for h in ("no", "yes"))
    n = plain.trained_parameters
    (here,), (there,) = memory_bills(plain), memory_bills(host)
    beside = bytes_beside(host)["host"]
    assert bytes_beside(plain) == {}
    assert beside == {"masters": 4 * n, "gradients": 4 * n, "moments": 8 * n}
    for name, size in beside.items():
        assert here.rows[name]["train"] == size and name not in there.rows
    assert train_seconds(host) > train_seconds(plain)
    assert any(f"host memory beside the devices: {16 * n / 1e9:.2f} GB" in line for line in bill_sentences(host))
    with pytest.raises(ConfigError, match="is for one device that trains, and these are 8"):
        what_if(["model=7b", "gpus=8", "host_optimizer=yes"])
    with pytest.raises(ConfigError, match="cpu is a CPU"):
        what_if(["model=0.5b", "hardware=cpu", "host_optimizer=yes"])


def test_what_is_planned_beside_is_what_a_trainer_holds_there():
    t = trainer(model(dtype="bfloat16"), optimizer_on_host=True)
    step(t, batch(awkward_groups(), row("grpo")), row("grpo"))
    held = {name: sum(x.nbytes for x in tensors) for name, tensors in t.weights.state_tensors().items()}
    n = sum(p.numel() for p in t.weights.compute)
    assert held == {"masters": 4 * n, "gradients": 4 * n, "moments": 8 * n}
