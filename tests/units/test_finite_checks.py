"""Five borders at which a number must be finite. On a hit nothing is stepped: not a weight, not a moment."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kits.fakes import NoDevices, Rollouts, as_is, endless, nothing
from kits.train import awkward_groups, batch, bits, model, row, step, trainer
from rondel import loop
from rondel.algos.component import Component
from rondel.algos.surrogate import Surrogate
from rondel.buffer import Buffer
from rondel.core.errors import SyncError, TrainError
from rondel.core.events import StepDone, Warned, subscribe
from rondel.core.types import StepStats
from rondel.generate.engine.builtin import staged_update
from rondel.models import names


@dataclass(frozen=True)
class BrokenRatio(Component):
    """NaN for one sample."""

    sample: int

    def __call__(self, log_ratio_T, sample_T):
        return torch.where(sample_T == self.sample, torch.nan, log_ratio_T)


@dataclass(frozen=True)
class BrokenRatios(Component):
    """NaN for several samples."""

    samples: tuple[int, ...]

    def __call__(self, log_ratio_T, sample_T):
        return torch.where(torch.isin(sample_T, torch.tensor(self.samples)), torch.nan, log_ratio_T)


@dataclass(frozen=True)
class BrokenAdvantage(Component):
    """Infinite for one sample."""

    sample: int

    def __call__(self, scored):
        return torch.where(torch.arange(len(scored.rewards_N)) == self.sample, torch.inf, scored.rewards_N)


@dataclass(frozen=True)
class BrokenGradient(Component):
    """A finite loss whose gradient is not: sqrt at 0."""

    def __call__(self, tokens):
        return Surrogate(tokens.log_ratio.abs().sqrt() - tokens.logprobs, torch.zeros_like(tokens.guided))


def broken(border: str):
    """(trainer, batch, row, what the note must say) with one fault at one border, after one good step."""
    algo = row("grpo", correction={"kind": "importance"})
    t = trainer(model("tied"), algo, max_bad_steps=3, every_answer=True)
    assert step(t, batch(awkward_groups(1), algo), algo).stepped
    b, named = batch(awkward_groups(), algo), ["group 8, sample 2"]
    at = next(i for i, s in enumerate(b.samples) if (s.group, s.index) == (8, 2))
    if border == "reward":
        b.samples[at].reward = float("nan")
    elif border == "advantage":
        algo = replace(algo, advantage=BrokenAdvantage(at))
    elif border == "logprob of the behavior":
        b.samples[at].known.behavior.numpy()[0] = -np.inf
    elif border == "logprob":
        with torch.no_grad():
            t.weights.masters[0][int(b.samples[at].tokens[0])] = torch.nan
        named = ["group "]
    elif border == "ratio":
        algo = replace(algo, ratio=BrokenRatio(at))
    elif border == "gradient":
        algo, named = replace(algo, surrogate=BrokenGradient()), ["group 3, sample 0", "more"]
    return t, b, algo, named


BORDERS = ["reward", "advantage", "logprob of the behavior", "logprob", "ratio", "gradient"]


@contextmanager
def heard(kind):
    found = []
    end = subscribe(lambda event: found.append(event) if isinstance(event, kind) else None)
    try:
        yield found
    finally:
        end()


@pytest.mark.slow
@pytest.mark.parametrize("micro_tokens", [10, 10**6])
@pytest.mark.parametrize("border", BORDERS)
def test_a_number_that_is_not_finite_stops_the_step(border, micro_tokens):
    t, b, algo, named = broken(border)
    object.__setattr__(t.settings, "micro_tokens", micro_tokens)
    before, version = bits(t), t.version
    with heard(Warned) as warnings:
        stats = step(t, b, algo)
    assert not stats.stepped and not t.moved
    assert stats.note.startswith(border.split()[0])
    assert all(name in stats.note for name in named), stats.note
    assert bits(t) == before
    assert t.version == version + 1 and t.bad_steps == 1
    assert len(warnings) == 1 and stats.note in warnings[0].message and "--step 2" in warnings[0].message


@pytest.mark.parametrize("micro_tokens", [10, 10**6])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_such_sample_is_named_however_the_batch_is_dealt(monkeypatch, micro_tokens, ranks):
    """Two samples far apart: one micro-batch or many; of two ranks the first has seen the second one."""
    t, b, algo, _ = broken("reward")
    b.samples[next(i for i, s in enumerate(b.samples) if (s.group, s.index) == (8, 2))].reward = 0.0
    object.__setattr__(t.settings, "micro_tokens", micro_tokens)
    if ranks == 2:
        monkeypatch.setattr(
            t.ranks, "all_gather_object", lambda told: [told[1:], told[:1]] if isinstance(told, list) else [told]
        )
    last = len(b.samples) - 1
    stats = step(t, b, replace(algo, ratio=BrokenRatios((0, last))))
    assert stats.note == f"ratio: not finite for {b.sample_name(0)}, {b.sample_name(last)}"


@pytest.mark.slow
def test_the_step_after_a_refused_one_is_as_if_that_had_not_been():
    """No half of a gradient stays behind."""
    runs = []
    for faulty in (False, True):
        algo = row("grpo")
        t = trainer(model("llama"), algo, micro_tokens=10, every_answer=True)
        assert step(t, batch(awkward_groups(1), algo), algo).stepped
        if faulty:
            b = batch(awkward_groups(), algo)
            assert not step(t, b, replace(algo, ratio=BrokenRatio(len(b.samples) - 1))).stepped
        assert step(t, batch(awkward_groups(2), algo), algo).stepped and t.bad_steps == 0
        runs.append(bits(t))
    assert runs[0] == runs[1]


def test_too_many_in_a_row_end_the_run():
    algo = row("grpo")
    t = trainer(model("llama"), algo, max_bad_steps=3)

    def bad():
        b = batch(awkward_groups(), algo)
        b.samples[0].reward = float("nan")
        return b

    before = bits(t)
    assert [step(t, bad(), algo).stepped for _ in range(2)] == [False, False]
    assert step(t, batch(awkward_groups(), algo), algo).stepped  # a good one in between starts the count again
    assert [step(t, bad(), algo).stepped for _ in range(2)] == [False, False]
    with pytest.raises(TrainError, match=r"3 steps in a row.*reward.*group 3, sample 0"):
        step(t, bad(), algo)
    assert bits(t) != before


@pytest.mark.slow
def test_a_refusal_between_two_updates_tells_what_was_taken():
    """The first update cannot be taken back; the trainer says so, and that the weights
    did move, so that the sync agrees.
    """
    algo = row("grpo")
    t = trainer(model("llama"), algo, updates_per_step=2)
    b = batch(awkward_groups(), algo)
    broken_in_second = replace(algo, ratio=BrokenLater())
    before = bits(t)
    stats = step(t, b, broken_in_second)
    assert not stats.stepped and t.moved and bits(t) != before
    assert "update 2 of 2, 1 were taken" in stats.note
    first, second = ({s.group for s in update.samples} for update in b.split_updates(2))
    assert stats.outcomes == {**dict.fromkeys(first, ""), **dict.fromkeys(second, "ratio")}


@dataclass(frozen=True)
class BrokenLater(Component):
    """Finite until the policy has moved from its anchor."""

    def __call__(self, log_ratio_T, sample_T):
        return log_ratio_T if log_ratio_T.detach().abs().max() < 1e-5 else log_ratio_T * torch.nan


def test_faults_of_the_data_are_found_before_the_first_of_two_updates():
    algo = row("grpo")
    t = trainer(model("llama"), algo, updates_per_step=2)
    b = batch(awkward_groups(), algo)
    last = b.split_updates(2)[1].samples[-1]
    last.known.behavior.numpy()[-1] = np.nan
    before = bits(t)
    stats = step(t, b, algo)
    assert not stats.stepped and not t.moved and bits(t) == before
    assert f"group {last.group}, sample {last.index}" in stats.note


def test_a_batch_without_signal_moves_nothing():
    """All advantages 0: neither the momentum of earlier steps nor weight decay may move
    the weights, and the sync must know.
    """
    algo = row("dr_grpo")
    t = trainer(model("llama"), algo, weight_decay=0.1)
    assert step(t, batch(awkward_groups(), algo), algo).stepped and t.moved
    b = batch(awkward_groups(1), algo)
    for s in b.samples:
        s.reward, s.earned = 1.0, None
    before = bits(t)
    stats = step(t, b, algo)
    assert stats.stepped and not t.moved and bits(t) == before
    assert stats.metrics["train/grad_norm"] == 0 and stats.metrics["train/weights_changed"] == 0


def test_the_loop_books_a_refused_batch_as_failed_and_the_ledger_balances():
    class Moody:
        version = 0

        async def step(self, groups, algo):
            self.version += 1
            bad = self.version in (2, 5)
            return StepStats(not bad, {}, "reward: not finite for group 3, sample 1" if bad else "")

    moody, buffer = Moody(), Buffer(groups_per_step=3)

    async def sync(trainer, engine):
        return moody.version

    rollouts = Rollouts(0, 0.2)
    with heard(StepDone) as done:
        asyncio.run(
            loop.run(
                endless(), buffer, attempt=rollouts.generate_group, score=rollouts.score, judge=rollouts.judge, prepare=as_is, trainer=moody,
                engine=None, devices=NoDevices(), sync=sync, algo=None, steps=range(6), milestone=nothing,
            )
        )  # fmt: skip
    book = buffer.ledger()
    assert book["trained"] == 4 * 3
    assert sum(n for name, n in book.items() if name.startswith("failed/")) == 2 * 3
    assert book["issued"] == sum(n for name, n in book.items() if name != "issued")
    assert buffer.version == 6  # v counts consumed batches
    assert [bool(event.note) for event in done] == [False, True, False, False, True, False]


def test_of_a_step_that_was_taken_in_part_each_group_is_booked_for_itself():
    """The first group of each step is trained; of the last one nothing is told, so it counts as the step does."""

    class InPart:
        version = 0

        async def step(self, groups, algo):
            self.version += 1
            first, second, _ = (group.id for group in groups)
            note = "ratio: not finite for group 1, sample 0 (update 2 of 2, 1 were taken)"
            return StepStats(False, {}, note, {first: "", second: "ratio"})

    half, buffer = InPart(), Buffer(groups_per_step=3)

    async def sync(trainer, engine):
        return half.version

    rollouts = Rollouts(0, 0.2)
    asyncio.run(
        loop.run(
            endless(), buffer, attempt=rollouts.generate_group, score=rollouts.score, judge=rollouts.judge, prepare=as_is, trainer=half,
            engine=None, devices=NoDevices(), sync=sync, algo=None, steps=range(2), milestone=nothing,
        )
    )  # fmt: skip
    book = buffer.ledger()
    assert book["trained"] == 2 and book["failed/ratio"] == 4


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=str
)
def test_what_is_finite_is_known_for_every_type_of_weights(dtype):
    values = torch.tensor([0.0, -1.5, 2.0, 1.0]).to(dtype)
    assert names.is_finite(values).tolist() == [True] * 4
    if dtype.is_floating_point:
        bad = torch.tensor([1.0, torch.nan, torch.inf, 2.0]).to(dtype)
        # it has none: the cast saturates or gives NaN
        infinity = dtype == torch.float8_e4m3fn and not bool(bad.float()[2].isnan())
        assert names.is_finite(bad).tolist() == [True, False, infinity, True]


def test_staged_weights_of_8_bits_are_looked_at():
    async def inline(f, *args):
        return f(*args)

    def read(loaded, source):
        return {"weight": torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)}

    with pytest.raises(SyncError, match="weight holds NaN or infinity"):
        asyncio.run(staged_update.apply_update(SimpleNamespace(loaded=None), inline, read, None, version=1, keep=False))
