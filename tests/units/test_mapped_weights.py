"""Frozen weights in a mapped file: the same bits, resident only while they are read."""

import copy

import pytest
import torch
from torch import nn

from kits.train import awkward_groups, batch, model, step, trainer
from rondel.algos.table import resolve_algorithm
from rondel.core.errors import RondelError
from rondel.models.mapped_weights import MappedWeights
from rondel.system.process_memory import resident_memory
from rondel.train import offload


def resident() -> int:
    return resident_memory()["rss"]


def layers(width: int = 512, depth: int = 8) -> nn.Sequential:
    """8 layers of 4 MB, and one of 4 MB behind them."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(depth))
    return nn.Sequential(blocks, nn.Linear(width, 4 * width)).requires_grad_(False)


def test_weights_keep_their_bits_and_their_objects(tmp_path):
    plain = layers()
    plain[0][1].to(torch.bfloat16)
    mapped = copy.deepcopy(plain)
    objects = [*mapped.parameters()]
    file = MappedWeights(mapped, objects, tmp_path)
    for again in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mapped.parameters())), again
        file.release()
    assert all(a is b for a, b in zip(objects, mapped.parameters()))
    assert [p.dtype for p in mapped.parameters()] == [p.dtype for p in plain.parameters()]
    assert not [*tmp_path.iterdir()], "the file has no name: nothing is left of it after any exit"
    assert file.size >= sum(p.nbytes for p in objects)


def test_what_is_written_by_mistake_is_not_lost(tmp_path):
    mapped = layers(8, 1)
    file = MappedWeights(mapped, mapped.parameters(), tmp_path)
    mapped[1].weight.fill_(3.0)
    file.release()
    assert bool((mapped[1].weight == 3.0).all())


def test_a_layer_is_resident_while_it_computes(tmp_path):
    """A pass over 8 layers of 4 MB has one of them resident; a pass over the plain ones has them all."""
    mapped = layers()
    file = MappedWeights(mapped, mapped.parameters(), tmp_path)
    file.release()
    before, x = resident(), torch.ones(1, 512)
    most = 0
    for layer in mapped[0]:
        layer(x)
        most = max(most, resident() - before)
    assert most < 16 << 20, f"{most >> 20} MB of 32 are resident after their layers"
    [p.sum() for p in mapped.parameters()]
    assert resident() - before > 24 << 20
    file.release()
    assert resident() - before < 8 << 20


def test_a_trained_weight_is_left_alone(tmp_path):
    plain = layers(8, 1).requires_grad_(True)
    held = [p.data_ptr() for p in plain.parameters()]
    assert MappedWeights(plain, plain.parameters(), tmp_path).size == 0
    assert [p.data_ptr() for p in plain.parameters()] == held


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RondelError, match="file"):
        MappedWeights(layers(8, 1), layers(8, 1).parameters(), tmp_path / "file" / "folder")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_with_a_mapped_reference_trains_the_same_bits(tmp_path, monkeypatch, dtype):
    """Two steps with a KL to the reference and the KL to the start that a step shows: equal weights and metrics."""
    algo = resolve_algorithm({"kind": "grpo", "kl": {"coef": 0.1}})
    told = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(offload, "LEAST_MAPPED", least)
        t = trainer(model("llama", dtype), algo, start_probe=4, lr=1e-2, folder=str(tmp_path))
        assert (t.offload.mapped is not None) == (least == 0)
        metrics = [step(t, batch(awkward_groups(), algo), algo).metrics for _ in range(2)]
        shown = [
            {k: m[k] for k in ("train/kl_ref", "train/kl_to_start", "train/loss", "train/grad_norm")} for m in metrics
        ]
        told.append((shown, [p.detach().clone() for p in t.loaded.model.parameters()], t.offload.memory()["reference"]))
    assert told[0][0] == told[1][0] and told[0][0][1]["train/kl_ref"] > 0
    assert all(torch.equal(a, b) for a, b in zip(told[0][1], told[1][1]))
    assert told[0][2] > told[1][2], "what lies in the file is not counted as held"


def test_a_trainer_gives_the_reference_back_after_each_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_MAPPED", 0)
    algo = resolve_algorithm({"kind": "grpo", "kl": {"coef": 0.1}})
    t = trainer(model("llama"), algo, start_probe=4, folder=str(tmp_path))
    packed, release = [], t.offload.mapped.release
    monkeypatch.setattr(
        t.offload.mapped, "release", lambda: (packed.append(t.start.head.stack.packed_bytes), release())
    )
    step(t, batch(awkward_groups(), algo), algo)
    assert len(packed) == 2, "after the reference's log-probabilities, and after the KL that the step shows"
    assert t.start.head.stack.packed_bytes == 0, f"a copy of its head stays; while it computed it had {packed} bytes"
