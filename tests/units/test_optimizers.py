"""Optimizers beside AdamW: against the formulas of their papers, what they hold, resume to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kits.runs import run
from kits.train import awkward_groups, batch, bits, inline, model, row, step
from rondel.core.errors import ConfigError
from rondel.planner.memory import bytes_per_number
from rondel.planner.workload import what_if
from rondel.train.checkpoint import load_trainer, save_trainer
from rondel.train.optim import MasterWeights
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer

KINDS = ["adamw", "adamw_8bit", "muon"]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner, self.head = nn.Embedding(64, 128), nn.Linear(128, 96), nn.Linear(96, 64, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def moved(kind: str, rounds: int = 3) -> tuple[Toy, MasterWeights]:
    toy = Toy()
    weights = MasterWeights(toy, betas=(0.9, 0.99), weight_decay=0.01, optimizer=kind)
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        weights.zero_grad()
        for master in weights.masters:
            master.grad = torch.randn(master.shape, generator=generator)
        weights.step(lr=1e-2, clip=1e9, norm=torch.tensor(1.0))
    return toy, weights


def semi_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U Vᵀ of U S Vᵀ."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


def test_muon_moves_a_matrix_of_the_layers_by_its_orthogonal_part_and_the_rest_as_adamw() -> None:
    before, (after, _), (plain, _) = Toy(), moved("muon", 1), moved("adamw", 1)
    for name in ("embedding.weight", "inner.bias", "head.weight"):
        assert torch.equal(after.get_parameter(name), plain.get_parameter(name)), name
    start, end = before.inner.weight.detach(), after.inner.weight.detach()
    generator = torch.Generator().manual_seed(1)
    gradients = {n: torch.randn(p.shape, generator=generator) for n, p in before.named_parameters()}
    size = 0.2 * max(start.shape) ** 0.5  # of AdamW's moves (arXiv:2502.16982)
    step_ = (start * (1 - 1e-2 * 0.01) - end).double() / (1e-2 * size)
    wanted = semi_orthogonal(gradients["inner.weight"])
    cosine = (step_ * wanted).sum() / step_.norm() / wanted.norm()
    assert cosine > 0.97, "Newton and Schulz bring the singular values between 0.7 and 1.2"
    values = torch.linalg.svdvals(step_)
    assert values.min() > 0.5 and values.max() < 1.3


def test_eight_bits_move_as_thirty_two_do() -> None:
    (small, _), (plain, _) = moved("adamw_8bit"), moved("adamw")
    start = Toy()
    for name, parameter in plain.named_parameters():
        far = (parameter - start.get_parameter(name)).norm()
        apart = (parameter - small.get_parameter(name)).norm()
        assert apart < (1e-5 if parameter.numel() < 4096 else 0.1) * far, (name, float(apart / far))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_is_held(kind) -> None:
    _, weights = moved(kind)
    held = {name: sum(t.nbytes for t in weights.moments(i).values()) for i, name in enumerate(weights.names)}
    each = {name: held[name] / master.numel() for name, master in zip(weights.names, weights.masters)}
    inner = {"adamw": 8, "adamw_8bit": 2 + 8 / 256, "muon": 4}[kind]
    constant = 32  # the count of steps
    assert each["inner.weight"] == pytest.approx(inner, abs=constant / (96 * 128))
    assert each["head.weight"] == pytest.approx(inner if kind == "adamw_8bit" else 8, abs=constant / (96 * 64))
    whole = sum(held.values())
    assert weights.moment_bytes == pytest.approx(whole, abs=4 * (constant + 6 * 96))
    planned = bytes_per_number(what_if(["model=0.5b", f"optimizer={kind}"])).moments
    assert inner <= planned < 8 if kind != "adamw" else planned == 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_trainer_goes_on_bit_for_bit(tmp_path, kind, dtype) -> None:
    algo = row("grpo")

    def made() -> LocalTrainer:
        settings = TrainSettings(lr=1e-2, weight_decay=0.1, optimizer=kind)
        return LocalTrainer(model("llama", dtype), settings, run=inline)

    t, other = made(), made()
    for n in range(2):
        step(t, batch(awkward_groups(n), algo), algo)
    save_trainer(t, tmp_path)
    step(other, batch(awkward_groups(9), algo), algo)  # a trainer that was elsewhere forgets all of it
    load_trainer(other, tmp_path)
    assert bits(other) == bits(t)
    for which in (t, other):
        step(which, batch(awkward_groups(5), algo), algo)
    assert bits(other) == bits(t)


def test_several_ranks_and_unknown_kinds_are_refused(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r'trainer.optimizer.kind = "muon" with place.ranks = 2: it needs each tensor whole'
    ):
        run(tmp_path, trainer__optimizer={"kind": "muon"}, place__kind="split", place__ranks=2)
    with pytest.raises(ConfigError, match="'lion' is not a value of optimizer: it is adamw, adamw_8bit or muon"):
        what_if(["model=0.5b", "optimizer=lion"])
