"""The plan of a flow against the flow: weights, arithmetic and kept bytes of small ones that run, and the simulator in closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kits.flows import FLOWS, flow
from rondel.assemble.facts import planned_memory
from rondel.cli import main
from rondel.core.config.job import Job
from rondel.core.errors import UserError
from rondel.core.mesh import Mesh
from rondel.models import collectives
from rondel.models.collectives import computed_again
from rondel.models.flow.block_cuts import cut_blocks
from rondel.models.flow.velocity_dit import FlowDit, FlowDitConfig
from rondel.models.flow.video_dit import FlowVideo, FlowVideoConfig
from rondel.planner import flow_cost
from rondel.planner.flow_plan import make_flow_plan
from rondel.planner.flow_shape import flow_shape, is_planned_flow
from rondel.planner.flow_workload import FlowWorkload, flow_what_if
from rondel.planner.hardware import find_hardware
from rondel.simulate import simulate, world_of

VIDEO = {"frames": 4, "height": 8, "width": 8, "channels": 2, "hidden_size": 96, "num_attention_heads": 4}
VIDEO |= {"intermediate_size": 160, "num_hidden_layers": 3}
RECIPE = str(Path(__file__).parents[2] / "recipes" / "video.toml")
IMAGE = {"dim": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


def plain(kind: str, sizes: dict):
    """Without the linear layers that a CPU packs, which no counter sees."""
    config = {"flow_video": FlowVideoConfig, "flow_dit": FlowDitConfig}[kind](vocab_size=105, **sizes)
    return {"flow_video": FlowVideo, "flow_dit": FlowDit}[kind](config)


@pytest.mark.parametrize(("kind", "sizes"), [("flow_video", VIDEO), ("flow_dit", IMAGE)])
def test_weights_and_arithmetic_are_those_of_the_model(kind, sizes):
    model, shape = plain(kind, sizes), flow_shape({"random": kind, **sizes})
    assert shape.parameter_count == sum(p.numel() for p in model.parameters())
    assert (shape.dim, shape.tokens) == (model.config.dim, model.token_count)
    x, sigma, condition = torch.randn(3, shape.dim), torch.rand(3), torch.randn(3, shape.hidden)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):  # every product is seen there
        out = model(x, sigma, condition)
        forward = counted.get_total_flops()
        out.square().sum().backward()
    assert forward == 3 * shape.forward_flops
    both = counted.get_total_flops()
    # what is written out is not computed again, and inputs have no gradient
    counts = 3 * (shape.train_flops(recompute=False, shared=False) - 0.5 * shape.attention_flops)
    assert 0.97 * counts <= both <= counts


class OneOfTwo:
    """A rank of tp whose sums are its own share; it counts what it would receive of the other."""

    index, size = 0, 2

    def __init__(self):
        self.received = 0

    def all_reduce(self, x):
        self.received += x.nbytes  # 2 (n - 1) / n of it
        return x


def spread_rows(monkeypatch, ranks):
    """Runs of rows that the other rank has are zeros, as long as those of this one."""

    def gather(x, lengths, of):
        ranks.received += x.nbytes  # (n - 1) / n of what there is then
        return torch.cat([x, torch.zeros_like(x)])

    def reduce(x, lengths, of):
        ranks.received += x.nbytes // 2
        return x[: lengths[0]].clone()

    monkeypatch.setattr(collectives, "gather_runs", gather)
    monkeypatch.setattr(collectives, "reduce_runs", reduce)


@pytest.mark.parametrize(
    ("shared", "tp", "sp"),
    [(False, 1, False), (True, 1, False), (False, 2, False), (True, 2, False), (False, 2, True), (True, 2, True)],
)
def test_a_layer_keeps_what_the_plan_says(shared, tp, sp, monkeypatch):
    """Bytes of distinct storages that autograd saves of a token, with one layer more."""
    spread_rows(monkeypatch, OneOfTwo())

    def kept(layers: int) -> int:
        model, found = plain("flow_video", VIDEO | {"num_hidden_layers": layers}), {}
        if tp == 2:
            cut_blocks(model, OneOfTwo(), sequence=sp)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(t):
            storage = t.untyped_storage()
            if storage._cdata not in weights:
                found[storage._cdata] = (storage.nbytes(), t)  # alive, so that no address is taken twice
            return t

        def attend(q, rows):
            return F.scaled_dot_product_attention(q, *rows.permute(1, 2, 3, 0, 4))

        share = SimpleNamespace(attend=attend, own=lambda x: x) if shared else None
        with saved_tensors_hooks(pack, lambda t: t):
            patches = model.cut_patches(torch.randn(2, model.config.dim))
            model.patch_velocities(patches, torch.rand(2), torch.randn(2, 96), share).sum()
        return sum(size for size, _ in found.values())

    shape = flow_shape({"random": "flow_video", **VIDEO})
    each = (kept(3) - kept(2)) / 4 / 2
    steering = 8 * shape.hidden + 20  # of a sample and not of a token
    assert each - steering <= shape.tokens * shape.kept_numbers(shared=shared, tp=tp, sp=sp) <= each


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_sums_of_tp_and_weights_of_a_rank_are_those_of_the_plan(recompute):
    """Of a pass of one layer, then another; the weights by name."""
    model, ranks, mesh = plain("flow_video", VIDEO), OneOfTwo(), Mesh(tp=2, sp=False)
    cut_blocks(model, ranks)
    steer, hidden = torch.randn(3, 96), torch.randn(3, model.token_count, 96, requires_grad=True)
    for layer in model.layers:
        again = recompute == "layers"
        hidden = computed_again(layer, hidden, steer, model.turns()) if again else layer(hidden, steer, model.turns())
    hidden.square().sum().backward()
    asked = setting(mesh=mesh, gpus=2, prompts=1, group=1, output=3, micro=10**9, recompute=recompute)
    assert ranks.received == flow_cost.tensor_bytes(asked, mesh)
    assert flow_cost.held_numbers(asked, mesh) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_rows_that_lie_apart_receive_the_bytes_of_the_plan(recompute, monkeypatch):
    """Gathers and scattered sums of a pass, its ends and what steers it."""
    model, ranks, mesh = plain("flow_video", VIDEO), OneOfTwo(), Mesh(tp=2)
    spread_rows(monkeypatch, ranks)
    cut_blocks(model, ranks, sequence=True)
    if recompute == "layers":
        for layer in model.layers:
            layer.forward = partial(computed_again, layer.forward)
    patches = model.cut_patches(torch.randn(3, model.config.dim))
    model.patch_velocities(patches, torch.rand(3), torch.randn(3, 96)).square().sum().backward()
    asked = setting(mesh=mesh, gpus=2, prompts=1, group=1, output=3, micro=10**9, recompute=recompute)
    assert ranks.received == flow_cost.tensor_bytes(asked, mesh)


def setting(**more) -> FlowWorkload:
    shape = flow_shape({"random": "flow_video", **VIDEO})
    return FlowWorkload(shape, find_hardware("h100"), **{"prompts": 4, "group": 4, "output": 8, **more})


def test_a_layout_is_told_to_run_or_marked():
    """Those of shards, replicas, cp and tp run; what is cut by pp is planned and marked."""
    wide = setting().on_devices(gpus=16, place="split", trainers=8)
    rows = flow_cost.flow_layouts(wide)
    assert {row.mesh.world for row in rows} == {8} and len(rows) == len({row.mesh for row in rows})
    assert all(row.is_supported == (row.mesh.pp == 1) for row in rows)
    assert {row.is_supported for row in rows} == {True, False} and any(row.mesh.cp == 8 for row in rows)
    assert {row.mesh.tp for row in rows} == {1, 2, 4}  # it has four heads
    again = replace(wide, mesh=Mesh(cp=4, tp=2)).on_devices(trainers=12, gpus=24)
    assert str(again.mesh) == str(Mesh(shards=2, cp=3, tp=2))
    told = make_flow_plan(wide)
    assert told["layouts"][0]["mesh"] == str(wide.mesh) and not told["layouts"][-1]["exists"]


def test_more_ranks_divide_what_can_be_divided():
    """State over shards · cp, activations over cp, points nowhere; replicas have the same."""
    alone = flow_cost.trainer_rows(setting())
    four = flow_cost.trainer_rows(setting(gpus=4, mesh=Mesh(shards=2, cp=2)))
    twice = flow_cost.trainer_rows(setting(gpus=8, mesh=Mesh(replicas=2, shards=2, cp=2)))
    assert four["moments"]["train"] == alone["moments"]["train"] / 4 == twice["moments"]["train"]
    shape = setting().shape
    kept = [shape.kept_numbers(shared=shared) for shared in (False, True)]
    steps = [setting().pass_steps, setting(mesh=Mesh(shards=2, cp=2)).pass_steps]
    wanted = alone["activations"]["train"] / kept[0] / steps[0] * kept[1] * steps[1] / 2
    assert four["activations"]["train"] == pytest.approx(wanted, rel=1e-3)
    assert four["points"]["train"] > alone["points"]["train"] / steps[0] * steps[1]


def test_the_simulator_has_the_rates_of_the_plan():
    """All samples are as long: in turn R + T, apart with staleness the slower of the two."""
    shared = setting(prompts=8)
    r, t = (
        shared.samples * shared.output * flow_cost.draw_seconds(shared),
        flow_cost.make_layout(shared, shared.mesh).seconds,
    )
    told = simulate(world_of(shared), steps=4)
    assert told["step_seconds"] == pytest.approx(r + t, rel=0.02)
    apart = replace(shared, place="split", gpus=2, trainers=1, staleness=2)
    told = simulate(world_of(apart), steps=6)
    assert told["step_seconds"] == pytest.approx(max(r, t), rel=0.05)
    assert told["mean_length"] == shared.output
    wide = setting(prompts=2, group=8, gpus=8, running=2)  # a group lies over as many engines as it fills
    told, work = simulate(world_of(wide), steps=4), wide.samples * wide.output * flow_cost.draw_seconds(wide) / 8
    assert told["step_seconds"] == pytest.approx(work + flow_cost.make_layout(wide, wide.mesh).seconds, rel=0.02)


def said(capsys, words):
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert not end.value.code, err
    return out


def test_a_recipe_of_a_flow_is_planned_and_simulated(capsys):
    sizes = ["--model.path.frames=25", "--model.path.height=100", "--model.path.width=160", "--model.path.channels=16"]
    told = json.loads(said(capsys, ["plan", RECIPE, *sizes, "--what-if", "hardware=h100 gpus=8", "--json"]))
    assert told["model"]["tokens"] == 100_000 and told["model"]["dim"] == 6_400_000
    assert told["work"]["attention_flops"] > 0.9 * told["work"]["forward_flops"]
    assert "a step of one is" in said(capsys, ["plan", RECIPE, *sizes])
    rows = json.loads(
        said(capsys, ["simulate", RECIPE, *sizes, "--what-if", "hardware=h100", "--steps", "2", "--json"])
    )
    assert rows["rows"][0]["samples_per_second"] > 0
    for words, why in ((["gpus=2", "lora=8"], "of a flow it is one of"), (["recompute=mlp"], "none or layers")):
        with pytest.raises(UserError, match=why):
            flow_what_if(words, setting())
    with pytest.raises(UserError, match="leave --lengths"):
        world_of(setting(), lambda draw: 1.0)


def test_a_run_is_told_what_was_planned():
    """Beside what its trainer holds, in the run card: weights, gradients and two moments in float32."""
    job, n = Job.read(RECIPE), flow_shape(Job.read(RECIPE).model.path).parameter_count
    assert planned_memory(job) == {"weights": 4 * n, "gradients": 4 * n, "moments": 8 * n}


def test_what_does_not_fit_is_told_with_what_helps():
    large = flow_shape({"random": "flow_video", "frames": 25, "height": 100, "width": 160, "channels": 16} | WIDE)
    told = make_flow_plan(FlowWorkload(large, find_hardware("h100"), output=20, every=10))
    assert not told["fits"] and any("recompute" in line for line in told["advice"])
    for odd, why in (({"frames": 5, "patch_frames": 2}, "cannot be cut"), ({"random": "flow_mlp"}, "does not know")):
        with pytest.raises(UserError, match=why):
            flow_shape({"random": "flow_video", **odd})
    assert is_planned_flow({"random": "flow_dit"}) and not is_planned_flow({"random": "llama"})


WIDE = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 30}


def test_a_stored_flow_is_planned_from_its_folder(tmp_path):
    ours = flow(**FLOWS["videos"])
    ours.model.save_pretrained(tmp_path)
    assert is_planned_flow(str(tmp_path))
    assert flow_shape(str(tmp_path)).parameter_count == sum(p.numel() for p in ours.model.parameters())
