"""Checkpoints: room on the disk before training, and a folder that is a whole model."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import namedtuple

import pytest
import torch

from kits.runs import run
from kits.train import awkward_groups, batch, model, row, step, trainer
from rondel.buffer import Buffer
from rondel.buffer.state import encode
from rondel.core.errors import CheckpointError
from rondel.core.types import Group, Task, Trajectory
from rondel.train.checkpoint import Checkpoints, save_trainer


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10**9, 10**9, 10**5))
    with pytest.raises(CheckpointError, match="free some space"):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / "journal.jsonl").exists()


@pytest.mark.slow
def test_what_lies_there_already_is_not_asked_for_again(tmp_path, monkeypatch):
    for n in (1, 2):
        (tmp_path / f"step-{n:06d}").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(0, 0, 150))
    Checkpoints(tmp_path, 2).check_disk(100)
    with pytest.raises(CheckpointError):
        Checkpoints(tmp_path, 3).check_disk(100)


def test_finished_groups_are_encoded_beside_the_event_loop(tmp_path):
    """One after the other when their turn comes, and what lies in the checkpoint is the buffer's state."""
    store, own, threads = Checkpoints(tmp_path, 2), threading.get_ident(), []
    buffer = Buffer(groups_per_step=2, max_staleness=1)

    def counted(group):
        threads.append(threading.get_ident())
        return encode(group)

    async def save(folder):
        (folder / "weights").write_text("")

    async def scenario():
        for n in range(3):
            await buffer.admit(Task(f"t{n}", "e", {}))
            t = Trajectory()
            t.extend([1])
            t.extend([2, 3], logprobs=[-0.5, -0.25], versions=[0, 0])
            slot = await buffer.claim()
            await buffer.put(slot, Group(slot.number, slot.task, [t], slot.born))
        await store.write(1, save, {"step": 1, "buffer": buffer.state_dict(0, encoded=False)}, counted)

    asyncio.run(scenario())
    state = json.loads((tmp_path / "step-000001" / "state.json").read_text())
    assert state["buffer"] == json.loads(json.dumps(buffer.state_dict(0))) and len(state["buffer"]["finished"]) == 3
    assert len(threads) == 3 and own not in threads


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3", "gemma3_text"])
def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    t = trainer(model(kind))
    step(t, batch(awkward_groups(), row()), row())
    save_trainer(t, tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    theirs = dict(loaded.named_parameters())
    assert all(torch.equal(theirs[n], p) for n, p in zip(t.weights.names, t.weights.compute, strict=True))


@pytest.mark.slow
def test_frozen_weights_and_buffers_are_saved_too(tmp_path):
    """A checkpoint that holds only what was trained is not a model."""
    from safetensors.torch import load_file

    loaded = model("llama")
    loaded.model.base_model.norm.weight.requires_grad_(False)
    loaded.model.base_model.register_buffer("bias_of_the_router", torch.arange(3.0))
    save_trainer(trainer(loaded), tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    assert "model.norm.weight" in kept and kept["model.bias_of_the_router"].tolist() == [0.0, 1.0, 2.0]
