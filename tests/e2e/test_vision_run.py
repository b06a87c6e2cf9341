"""The recipe with pictures, whole and small: it learns to look, survives a kill bit for
bit, and a step is trained again from its store.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kits.runs import context, events, final, steps
from kits.sweeps import covering
from rondel.assemble import train
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, DataError
from rondel.driver.replay import replay
from rondel.runtime.journal import store

RECIPE = Path(__file__).parents[2] / "recipes" / "vision.toml"
SMALL = {
    "loop.warmup.steps": 2, "loop.steps": 3, "loop.groups_per_step": 2, "loop.warmup.groups_per_step": 4, "algo.group_size": 4,
    "task.data.size": 24, "task.data.holdout": 4, "place.threads": 1, "run.checkpoint.every": 2, "run.sinks": [],
}  # fmt: skip


def run(folder: Path, **changes) -> None:
    train(
        Job.read(RECIPE, {**SMALL, "run.folder": str(folder), **{k.replace("__", "."): v for k, v in changes.items()}}),
        quiet=True,
    )


def _dies(folder: Path, kind: str, n: int, **changes) -> None:
    import os
    import signal

    from rondel.core.events import subscribe

    seen = 0

    def tick(event) -> None:
        nonlocal seen
        seen += type(event).__name__ == kind
        if seen == n:
            os.kill(os.getpid(), signal.SIGKILL)

    subscribe(tick)
    run(folder, **changes)


@pytest.mark.slow
def test_a_run_that_looks_survives_a_kill_and_is_replayed(tmp_path):
    """Law 9: two whole steps, a third that was stored and not trained, and a life after it."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole)
    child = context.Process(target=_dies, args=(broken, "GroupsTaken", 4))
    child.start()
    child.join(120)
    assert child.exitcode == -9
    run(broken)
    ours, theirs = final(broken), final(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == [] and ours.keys() == theirs.keys()
    assert steps(broken) == steps(whole)
    for n in store.stored_steps(whole):
        mine, other = store.read_step(broken, n), store.read_step(whole, n)
        assert [(r["tokens"], r["media"], r["task_data"]) for r in mine] == [
            (r["tokens"], r["media"], r["task_data"]) for r in other
        ]
        assert all(len(r["media"]) == 1 for r in mine)
    seen = {row["media"][0].image.digest for n in store.stored_steps(whole) for row in store.read_step(whole, n)}
    kept = list((whole / "rollouts" / "media").glob("*.png"))
    assert len(seen) <= len(kept) <= 2 * len(seen), "each picture as a model saw it, and as the task has it"
    again, done = replay(whole, 5), events(whole, "StepDone")[4]["metrics"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert again[name] == done[name]


LOOKING = [{"shards": 2}, {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", covering(LOOKING, LOOKING[1:2]), ids=str)
def test_a_run_that_looks_ends_over_a_mesh_where_one_rank_ends(tmp_path, mesh):
    """Checkpoints with the same tensors. Gradients agree to 5e-7 (test_mesh.py); Adam divides small ones by their size."""
    for name, place in (("one", {}), ("mesh", {"place__mesh": mesh})):
        run(tmp_path / name, place__kind="split", trainer__micro_tokens=64, **place)
    ours, theirs = (final(tmp_path / name) for name in ("mesh", "one"))
    assert ours.keys() == theirs.keys()
    names = [name for name in theirs if name.startswith("model/")]
    mine, whole = (torch.cat([t[name].flatten().double() for name in names]) for t in (ours, theirs))
    assert float((mine - whole).norm()) <= 1e-5 * float(whole.norm())


@pytest.mark.slow
@pytest.mark.sweep  # runs over pictures, killed and replayed, follow; gradients are in tests/parity/test_vision.py
def test_the_policy_learns_to_look(tmp_path):
    """The recipe reduced: more of the supervised phase and less of RL, which keeps what was learned."""
    run(tmp_path, **LEARNS)
    rewards = [r for event in events(tmp_path, "GroupFinished") for r in event["rewards"]]
    phase = rewards[LEARNS["loop__warmup__steps"] * 16 :]
    first, last = sum(phase[:256]) / 256, sum(phase[-256:]) / 256
    evaluated = [e["score"] for e in events(tmp_path, "Evaluated")]
    print(f"CURVE reward {first:.2f} -> {last:.2f}, held out {evaluated}")
    assert evaluated[0] < 0.4 and evaluated[-1] > 0.9


LEARNS = {
    "task__data__size": 160, "task__data__holdout": 32, "loop__warmup__steps": 60, "loop__warmup__lr": 1.5e-3, "loop__warmup__groups_per_step": 16,
    "loop__steps": 2, "loop__groups_per_step": 16, "algo__group_size": 8, "run__checkpoint__every": 0,
}  # fmt: skip


TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
SQUARES = {
    **TEXT, "random": "gemma3", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "mm_tokens_per_image": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
        "vision_use_head": False,
    },
}  # fmt: skip
RECURRENT = {
    **TEXT, "random": "qwen3_5", "head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "num_position_embeddings": 64},
}  # fmt: skip

POSITIONED = {
    **TEXT, "random": "gemma4", "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 109, "pad_token_id": 0,
    "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 64, "patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 16,
    },
}  # fmt: skip
TILES = {
    **TEXT, "random": "smolvlm", "max_position_embeddings": 160, "scale_factor": 2,
    "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(  # one picture of one size, and several of a kind that an image is cut into
    "model",
    covering([SQUARES, RECURRENT, TILES, POSITIONED], [TILES]),
    ids=["gemma3", "qwen3_5", "smolvlm", "gemma4"],
)
def test_other_families_run_and_are_replayed(model, tmp_path):
    """Rollouts with images, steps and syncs; a step is trained again from its store with the same numbers."""
    run(tmp_path, model__path=model)
    again, done = replay(tmp_path, 5), events(tmp_path, "StepDone")[4]["metrics"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert again[name] == done[name]
    gaps = [
        metrics["train/gap_max"] for e in events(tmp_path, "StepDone") if "train/gap_max" in (metrics := e["metrics"])
    ]
    assert len(gaps) >= 3 and max(gaps) < 1e-4, "engine and trainer, under the same weights"
    if model is TILES:
        assert {len(row["media"]) for row in store.read_step(tmp_path, 5)} == {5}, "two by two tiles, and the whole"
    if model is SQUARES:
        with pytest.raises(ConfigError, match=r"image_tokens = 16: 'random-gemma3' makes 4 tokens of every image"):
            run(tmp_path / "other", model__path=model, model__vision__image_tokens=16)


VIDEOS = {
    "model__path": {
        **TEXT, "random": "qwen3_vl", "head_dim": 16, "max_position_embeddings": 96,
        "vision_config": {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "task__data": {"kind": "kits.vision:lit_videos", "video": "clip", "size": 24, "holdout": 4},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep  # over pictures it does above; videos are in tests/parity/test_vision_video.py
def test_a_run_over_videos_survives_a_kill_and_is_replayed(tmp_path):
    """Five frames are three steps of two; after a kill -9 the same weights, and a step trained again from its store."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, **VIDEOS)
    child = context.Process(target=_dies, args=(broken, "GroupsTaken", 4), kwargs=VIDEOS)
    child.start()
    child.join(120)
    assert child.exitcode == -9
    run(broken, **VIDEOS)
    ours, theirs = final(broken), final(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == [] and ours.keys() == theirs.keys()
    for n in store.stored_steps(whole):
        for mine, other in zip(store.read_step(broken, n), store.read_step(whole, n), strict=True):
            assert (mine["tokens"], mine["media"], mine["task_data"]) == (
                other["tokens"],
                other["media"],
                other["task_data"],
            )
            assert [place.image.frames for place in mine["media"]] == [2, 2, 2]
    again, done = replay(whole, 5), events(whole, "StepDone")[4]["metrics"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert again[name] == done[name]
    gaps = [metrics["train/gap_max"] for e in events(whole, "StepDone") if "train/gap_max" in (metrics := e["metrics"])]
    assert len(gaps) >= 3 and max(gaps) < 1e-4, "engine and trainer, under the same weights"


@pytest.mark.slow
def test_a_recipe_is_refused_before_it_costs_anything(tmp_path):
    plain = {"random": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(
        DataError, match="1 images in a conversation with a model that reads text alone: take a vision-language model"
    ):
        run(tmp_path / "blind", model__path=plain)
    text = {"kind": "digits", "holdout": 4}
    for key, value in (("model.vision.tower", "trained"), ("model.vision.image_tokens", 16)):
        with pytest.raises(ConfigError, match=rf"{key} = .*, but 'random-llama' reads text alone"):
            train(
                Job.read(
                    RECIPE, {"run.folder": str(tmp_path / "x"), "model.path": plain, "task.data": text, key: value}
                ),
                quiet=True,
            )
    with pytest.raises(
        ConfigError, match=r"model.vision.tower = 'trained' beside model.adapter, which alone is trained"
    ):
        run(tmp_path / "both", model__vision__tower="trained", model__adapter__kind="lora")
    with pytest.raises(DataError, match=r"task.data.rows\[1\]: .*ffmpeg -i there.mp4"):
        rows = [{"prompt": "what?", "answer": "1", "clip": "there.mp4"}]
        run(tmp_path / "codec", task__data={"kind": "list", "rows": rows, "video": "clip"})
    with pytest.raises(DataError, match=r"the prompt of task .* exceeds the model's context of 40: leave out"):
        tiny = {**VIDEOS["model__path"], "max_position_embeddings": 40}
        run(tmp_path / "long", **{**VIDEOS, "model__path": tiny})
    with pytest.raises(DataError, match=r"task.data.rows\[1\]: no image at .*/there.png"):
        rows = [{"prompt": "what?", "answer": "1", "image": "there.png"}]
        run(tmp_path / "gone", task__data={"kind": "list", "rows": rows, "image": "image"})
