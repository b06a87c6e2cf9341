"""Master weights, clipping, schedules: against torch's own, in numbers."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from torch import nn

from kits.train import awkward_groups, batch, bits, model, row, step, trainer
from rondel.planner.memory import WHOLE_MASTERS
from rondel.train import optim
from rondel.train.checkpoint import load_trainer, save_trainer
from rondel.train.optim import PART, MasterWeights, learning_rate, spread_within_rounding
from rondel.train.settings import TrainSettings
from rondel.train.step_metrics import StepMetricSums

torch.set_num_threads(1)


class Tied(nn.Module):
    """An embedding that is also the head, a matrix, a bias, and a frozen weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.to(dtype)

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embed(ids)) + self.frozen)).float()


def loss_of(module: nn.Module, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    ids, wanted = torch.randint(0, 11, (2, 7), generator=g)
    return nn.functional.cross_entropy(module(ids), wanted, reduction="sum")


def make(dtype: torch.dtype, **knobs) -> tuple[Tied, MasterWeights]:
    module = Tied(dtype)
    return module, MasterWeights(module, **{"betas": (0.9, 0.99), "weight_decay": 0.1, **knobs})


@pytest.mark.parametrize("part", [PART, 45, 1])
def test_between_two_steps_a_bf16_weight_is_half_of_its_master(part, monkeypatch):
    """Steps with masters that stay whole have the same bits, and so has what a checkpoint reads; however many masters a
    step joins at a time."""
    assert PART == WHOLE_MASTERS, "what the planner bills for a step"
    monkeypatch.setattr(optim, "PART", part)
    (module, weights), (whole_module, whole) = make(torch.bfloat16), make(torch.bfloat16)
    whole.keep_whole()
    for n in range(12):
        for one, masters in ((module, weights), (whole_module, whole)):
            masters.zero_grad()
            loss_of(one, n).backward()
            masters.step(lr=(1e-2, 0.0)[n == 5], clip=1.0, norm=masters.gradient_norm())
        told = [weights.read_master(i) for i in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(told, whole.masters))
        assert all(torch.equal(a, b) for a, b in zip(weights.compute, whole.compute))
        assert sum(t.nbytes for t in weights.state_tensors()["masters"]) == 2 * sum(weights.sizes)
        assert all(m.untyped_storage().nbytes() == 4 for m in weights._masters), "they have no room of their own"
        assert sum(t.nbytes for t in whole.state_tensors()["masters"]) == 4 * sum(weights.sizes)
        assert len(weights._parts()) == {PART: 1, 45: 2, 1: 3}[part]
    weights.load_masters({name: 2 * t for name, t in zip(weights.names, told)})
    assert all(torch.equal(weights.read_master(i), 2 * t) for i, t in enumerate(told))
    assert sum(t.nbytes for t in weights.state_tensors()["masters"]) == 2 * sum(weights.sizes)
    assert all(torch.equal(m, 2 * t) for m, t in zip(weights.masters, told)), "who asks for them has them whole"
    assert sum(t.nbytes for t in weights.state_tensors()["masters"]) == 4 * sum(weights.sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_follow_float32_adamw_fed_with_the_same_gradients(dtype):
    module, weights = make(dtype)
    assert len(weights.masters) == 3  # tied once, frozen not at all
    reference = [nn.Parameter(m.detach().clone()) for m in weights.masters]
    groups = [
        {"params": [p for p in reference if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in reference if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-8, fused=False)
    for n in range(12):
        weights.zero_grad()
        for micro in range(3):
            loss_of(module, 10 * n + micro).backward()
        for p, m in zip(reference, weights.masters):
            p.grad = m.grad.clone()
        assert all(m.grad.dtype == torch.float32 for m in weights.masters)
        norm = weights.gradient_norm()
        clipped = nn.utils.clip_grad_norm_(reference, 0.7)
        assert float(norm) == pytest.approx(float(clipped), rel=1e-6)
        lr = 1e-2 * (n + 1) / 12
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        weights.step(lr=lr, clip=0.7, norm=norm)
        for p, m in zip(reference, weights.masters):
            assert torch.allclose(p, m, rtol=1e-6, atol=1e-7)
        for c, m in zip(weights.compute, weights.masters):
            assert torch.equal(c, m.to(dtype))  # the compute copy is the rounded master, always


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_micro_batches_accumulate_in_float32_with_tied_weights(dtype):
    """The hook must see embedding and head together, once a backward, and add in float32."""
    module, weights = make(dtype)
    singles = []
    for seed in range(16):
        weights.zero_grad()
        loss_of(module, seed).backward()
        singles.append([m.grad.double().clone() for m in weights.masters])
    weights.zero_grad()
    for seed in range(16):
        loss_of(module, seed).backward()
    for i, m in enumerate(weights.masters):
        exact = sum(s[i] for s in singles)
        assert (m.grad - exact).norm() <= 1e-6 * exact.norm()
    if dtype != torch.float32:
        assert all(p.grad is None for p in weights.compute)  # nothing is kept twice
    exact_module = Tied(torch.float64)
    exact_module.load_state_dict(module.state_dict())
    loss_of(exact_module, 0).backward()
    truth = dict(exact_module.named_parameters())
    for name, grad in zip(weights.names, singles[0]):
        assert (grad - truth[name].grad).norm() <= (0.03 if dtype != torch.float32 else 1e-5) * truth[name].grad.norm()


def test_small_updates_are_not_lost_in_bfloat16():
    """lr = 1e-6 is far below bf16's grid: without masters 0 weights would ever move."""
    module, weights = make(torch.bfloat16, weight_decay=0.0)
    start_compute, start_masters = ([x.detach().clone() for x in xs] for xs in (weights.compute, weights.masters))
    shares = []
    for _ in range(50):
        weights.zero_grad()
        loss_of(module, 0).backward()
        shares.append(weights.step(lr=1e-6, clip=1e9, norm=weights.gradient_norm()))
    moved = torch.cat([(m - s).abs().flatten() for m, s in zip(weights.masters, start_masters)])
    used = torch.cat([m.grad.flatten() for m in weights.masters]) != 0
    assert moved[used].median() == pytest.approx(50e-6, rel=0.1)  # AdamW with a steady gradient goes lr a step
    assert sum(shares) > 0 and max(shares) < 0.5
    different = sum(int((c != s).sum()) for c, s in zip(weights.compute, start_compute))
    assert 0 < different < sum(c.numel() for c in weights.compute)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update", [1e-6, 3e-5, -3e-5, 1e-3])
def test_a_rounded_policy_moves_by_its_update_in_the_mean(dtype, update):
    """Masters in the middle of their rounding interval would all have to cross half of it before one weight moves."""
    weights = (torch.randn(400_000, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)
    moved = (spread_within_rounding("layer.weight", weights) + update).to(dtype).double() - weights.double()
    assert float(moved.mean()) == pytest.approx(update, abs=4 * float(moved.std()) / len(weights) ** 0.5)
    if abs(update) == 3e-5 and dtype == torch.bfloat16:
        assert abs(float(((weights.float() + update).to(dtype) - weights).double().mean())) < 0.5 * abs(update)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spread_masters_round_to_the_weights_they_came_from(dtype):
    """Powers of two have two widths beside them; zeros, subnormal numbers, inf and NaN keep their bits."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    masters = spread_within_rounding("all", every)
    numbers = ~every.isnan()
    assert torch.equal(masters.to(dtype)[numbers], every[numbers]) and masters[~numbers].isnan().all()
    ordinary = every.float().abs() >= torch.finfo(torch.float32).tiny
    ordinary &= every.isfinite()
    assert torch.equal(masters[~ordinary & numbers], every.float()[~ordinary & numbers])
    assert (masters[ordinary] != every.float()[ordinary]).float().mean() > 0.99
    across = every[ordinary & (every > 0)]
    interval = 2.0 ** (torch.frexp(across.double())[1] - 1) * torch.finfo(dtype).eps
    inside = (masters[ordinary & (every > 0)].double() - across.double()) / interval
    assert inside.abs().max() < 0.5 and inside.var() == pytest.approx(1 / 12, rel=0.03)
    transposed = spread_within_rounding("all", every.view(256, 256).t().contiguous().t())  # the same numbers
    assert torch.equal(transposed.flatten()[numbers], masters[numbers])
    assert not torch.equal(spread_within_rounding("other", every)[ordinary], masters[ordinary])


def test_the_share_of_changed_weights_is_counted():
    module, weights = make(torch.bfloat16, weight_decay=0.0)
    loss_of(module, 0).backward()
    before = [c.detach().clone() for c in weights.compute]
    share = weights.step(lr=1e-3, clip=1e9, norm=weights.gradient_norm())
    changed = sum(int((c != b).sum()) for c, b in zip(weights.compute, before))
    assert share == changed / sum(c.numel() for c in weights.compute) > 0
    assert weights.step(lr=0.0, clip=1e9, norm=weights.gradient_norm()) == 0.0
    module, weights = make(torch.float32)
    loss_of(module, 0).backward()
    assert weights.step(lr=0.0, clip=1e9, norm=weights.gradient_norm()) == 0.0
    assert weights.step(lr=1e-3, clip=1e9, norm=weights.gradient_norm()) == 1.0


def test_a_vanishing_update_is_not_called_a_move():
    """In bf16 a tiny lr moves masters, but no bit that the engine reads: the digest
    stays, and the sync must expect that.
    """
    algo = row("grpo")
    t = trainer(model("llama", "bfloat16"), algo, lr=1e-12)
    compute, masters = ([x.detach().clone() for x in xs] for xs in (t.weights.compute, t.weights.masters))
    stats = step(t, batch(awkward_groups(), algo), algo)
    assert stats.stepped and stats.metrics["train/grad_norm"] > 0 and stats.metrics["train/weights_changed"] == 0
    assert not t.moved and all(map(torch.equal, compute, t.weights.compute))
    assert not all(map(torch.equal, masters, t.weights.masters))
    object.__setattr__(t.settings, "lr", 1e-2)
    stats = step(t, batch(awkward_groups(), algo), algo)
    assert t.moved and stats.metrics["train/weights_changed"] > 0.1


@pytest.mark.parametrize("scale,clip", [(1.0, 0.5), (1.0, 1e6), (0.0, 1.0), (1e18, 1.0)])
def test_clipping_is_torchs(scale, clip):
    module, weights = make(torch.float32)
    (loss_of(module, 1) * scale).backward()
    reference = [nn.Parameter(torch.zeros_like(m)) for m in weights.masters]
    for p, m in zip(reference, weights.masters):
        p.grad = m.grad.clone()
    norm = weights.gradient_norm()
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(reference, clip)), rel=1e-5)
    weights.step(lr=0.0, clip=clip, norm=norm)
    for p, m in zip(reference, weights.masters):
        assert torch.allclose(p.grad, m.grad, rtol=1e-5, atol=0)


def test_schedules_at_named_points():
    def at(step, schedule="constant", warmup=4, steps=24, lr=2.0):
        return learning_rate(lr, step, TrainSettings(lr, schedule=schedule, warmup_steps=warmup, steps=steps))

    assert [at(n) for n in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert at(1000) == 2.0
    assert [at(n, "linear") for n in (3, 4, 14, 24, 30)] == pytest.approx([2.0, 2.0, 1.0, 0.0, 0.0])
    assert [at(n, "cosine") for n in (3, 4, 9, 14, 24, 99)] == pytest.approx(
        [2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 0.0, 0.0]
    )
    assert at(0, "linear", warmup=0) == 2.0 and at(23, "linear", warmup=0) > 0
    # nothing left to decay over
    assert at(0, "cosine", warmup=8, steps=8) == 0.25 and at(8, "cosine", warmup=8, steps=8) == 2.0


@pytest.mark.slow
def test_the_schedule_counts_from_the_first_step_of_its_phase():
    """After 3 supervised steps the RL schedule begins at its own 0."""
    algo = row("grpo")
    t = trainer(model("llama"), algo, lr=1.0, warmup_steps=2, schedule="linear", steps=6, first_step=3, clip=1e-9)
    t.step_number = 3
    rates = [step(t, batch(awkward_groups(n), algo), algo).metrics["train/lr"] for n in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moving_and_loading_on_a_gpu(dtype, tmp_path):
    """Offload and resume with the fused AdamW, whose step count lives on the device."""
    algo = row("grpo")

    def fresh():
        loaded = model("tied", dtype)
        loaded.model.to("cuda")
        return trainer(loaded, algo)

    t, other = fresh(), fresh()
    step(t, batch(awkward_groups(), algo), algo)
    save_trainer(t, tmp_path)
    before = bits(t)
    asyncio.run(t.sleep(()))
    asyncio.run(t.wake(()))
    assert bits(t) == before
    load_trainer(other, tmp_path)
    assert bits(other) == before
    for which in (t, other):
        assert step(which, batch(awkward_groups(1), algo), algo).stepped
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(t.weights.masters, other.weights.masters))


def test_metrics_over_updates_are_means_and_extremes():
    sums = StepMetricSums()
    for loss, norm in ((1.0, 3.0), (2.0, 1.0)):
        sums.add_terms(
            torch.tensor(loss),
            {
                "ratio": torch.tensor([1.0, 1.5 * loss]),
                "clipped": torch.tensor([True, False]),
                "gap": torch.tensor([-0.25, 0.125]),
            }
            | {"correction": torch.tensor([0.0, 3.0])},
        )
        sums.put("train/grad_norm", norm)
    got = sums.to_metrics(2)
    assert got["train/loss"] == 1.5 and got["train/grad_norm"] == 3.0 and got["train/clip_fraction"] == 0.5
    assert got["train/gap_max"] == 0.25 and got["train/gap_mean"] == 0.1875 and got["train/ratio_max_deviation"] == 2.0
    assert got["train/correction"] == 1.5 and got["train/correction_dropped"] == 0.5
    assert StepMetricSums().to_metrics(0)["train/loss"] == 0.0


@pytest.mark.slow
def test_the_first_of_two_updates_has_ratio_one_by_construction():
    """Proximal logprobs come from the very packing of the update; what is left is the
    attention kernel of a pass without gradient.
    """
    algo = row("grpo")
    for kind in ("llama", "qwen3"):
        t = trainer(model(kind), algo, lr=0.0, updates_per_step=2, micro_tokens=30)
        metrics = step(t, batch(awkward_groups(), algo), algo).metrics
        assert metrics["train/ratio_max_deviation"] == 0.0 and metrics["train/clip_fraction"] == 0.0


def test_the_distance_to_the_start():
    """0 before the first move, the k3 estimate of one sample of 16 afterwards, and the start itself never moves."""
    algo = row("grpo")
    t = trainer(model("llama"), algo, lr=3e-3, start_probe=8)
    frozen = [p.clone() for p in t.start.model.parameters()]
    first = step(t, batch(awkward_groups(), algo), algo).metrics["train/kl_to_start"]
    b = batch(awkward_groups(1), algo)
    second = step(t, b, algo).metrics["train/kl_to_start"]
    trained = [s for s in b.samples if s.known.trained is not None]
    probed = [s for s in trained if s.known.start is not None]
    assert probed == trained[: -(-len(trained) // 16)]
    x = torch.cat([torch.from_numpy(s.known.trained.numpy() - s.known.start.numpy()) for s in probed])
    assert first < 1e-9 and second == pytest.approx(float((torch.expm1(-x) + x).mean()), rel=1e-5) and second > 1e-6
    assert all(map(torch.equal, frozen, t.start.model.parameters()))


@pytest.mark.slow
def test_the_trainer_is_built_on_the_device_thread(tmp_path, monkeypatch):
    """One cast of a large tensor on the main thread gives it an OpenMP pool, and every
    later region of the device waits to be woken.
    """
    from kits.runs import tiny
    from rondel.assemble.components import build
    from rondel.train import parallel

    made: list[str] = []

    class Noted(MasterWeights):
        def __init__(self, *args, **settings):
            made.append(threading.current_thread().name)
            super().__init__(*args, **settings)

    monkeypatch.setattr(parallel, "MasterWeights", Noted)
    parts = build(tiny(tmp_path / "run"))
    parts.close()
    assert made and all(name.startswith("rondel-") for name in made)
