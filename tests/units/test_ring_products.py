"""Products beside rows that travel round a ring: those of whole rows and matrices, for ranks that are threads here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kits.families import model as family
from kits.thread_ranks import ThreadRank, on_ranks
from rondel.core.errors import ModelError
from rondel.core.mesh import Mesh
from rondel.models.ring_collectives import gather_ring, reduce_ring, run_slices
from rondel.models.ring_products import install_ring, ring_products
from rondel.models.shard_cut import ShardCut, split_shards
from rondel.models.tensor_parallel import check_tensor_parallel, cut_model

RUNS = [[3, 2], [1, 0], [0, 4], [4, 3, 3], [0, 5, 1], [1, 1, 0, 0], [2, 0, 3, 1]]


@pytest.mark.parametrize("lengths", RUNS, ids=str)
def test_rings_gather_and_sum(lengths):
    """As one concatenation and one sum; every run is used once, the own one first; bytes as the formula has them."""
    n, total = len(lengths), sum(lengths)
    whole = torch.randn(n, total, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    places = run_slices(lengths)

    def work(rank):
        used = []
        rows = gather_ring(whole[0][places[rank.index]], lengths, rank, lambda at, run: used.append((at, run.clone())))
        asked, gathered = [], rank.received
        own = reduce_ring(lengths, rank, lambda at: asked.append(at) or whole[rank.index][at].clone())
        return rows, used, own, asked, gathered

    done, ranks = on_ranks(n, work)
    for rank, (rows, used, own, asked, gathered) in zip(ranks, done):
        assert torch.equal(rows, whole[0])
        assert [at for at, _ in used] == [
            places[(rank.index - s) % n] for s in range(n) if lengths[(rank.index - s) % n]
        ]
        assert all(torch.equal(run, whole[0][at]) for at, run in used)
        torch.testing.assert_close(own, whole.sum(0)[places[rank.index]], rtol=1e-13, atol=1e-13)
        assert sorted(at.start for at in asked) == sorted(at.start for at in places)
        assert gathered == 5 * (total - lengths[rank.index])
        assert rank.received - gathered == 5 * (total - lengths[rank.index - 1])
    assert sum(rank.received for rank in ranks) == 2 * 5 * total * (n - 1)


class Part(nn.Module):
    """`gated`: of two matrices that read the input, else of one; with a bias on all of them or on none."""

    def __init__(self, names, bias):
        super().__init__()
        *self.columns, self.row = names
        for name in self.columns:
            setattr(self, name, nn.Linear(6, 12, bias=bias, dtype=torch.float64))
        setattr(self, self.row, nn.Linear(12, 6, bias=bias, dtype=torch.float64))

    def forward(self, hidden_states):
        found = [getattr(self, name)(hidden_states) for name in self.columns]
        return getattr(self, self.row)(torch.stack([x.sin() for x in found]).prod(0))


def cut(part, rank):
    """This rank's part of it, with the ring."""
    cuts = {f"{name}.{own}": ShardCut(0) for name in part.columns for own in ("weight", "bias")}
    cuts[f"{part.row}.weight"] = ShardCut(1)
    mine = Part([*part.columns, part.row], part.get_submodule(part.row).bias is not None)
    for name, parameter in part.named_parameters():
        own = split_shards(parameter.detach(), cuts[name], rank.size)[rank.index] if name in cuts else parameter
        layer, _, kind = name.rpartition(".")
        setattr(mine.get_submodule(layer), kind, nn.Parameter(own.detach().clone()))
    return mine, cuts


@pytest.mark.parametrize("lengths", RUNS, ids=str)
@pytest.mark.parametrize(
    ("names", "bias"), [(["gate_proj", "up_proj", "down_proj"], False), (["c_fc", "c_proj"], True)], ids=str
)
def test_a_part_on_a_ring_is_the_whole_part(names, bias, lengths):
    """Output, and every gradient: that of rows on their rank, of cut matrices on theirs, of what all have in parts."""
    torch.manual_seed(0)
    part, places = Part(names, bias), run_slices(lengths)
    x = torch.randn(1, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    after = torch.randn_like(x)
    out = part(x)
    (out * after).sum().backward()

    def work(rank):
        mine, cuts = cut(part, rank)
        install_ring(mine, ring_products(mine, cuts), rank, lambda: lengths)
        here = x.detach()[:, places[rank.index]].requires_grad_()
        own = mine(here)
        with torch.no_grad():
            assert torch.equal(mine(hidden_states=here), own)
        (own * after[:, places[rank.index]]).sum().backward()
        return own.detach(), here.grad, {name: p.grad for name, p in mine.named_parameters()}, cuts

    done, ranks = on_ranks(len(lengths), work)

    def near(a, b):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    for rank, (own, grad, of_weights, cuts) in zip(ranks, done):
        near(own, out.detach()[:, places[rank.index]])
        near(grad, x.grad[:, places[rank.index]])
        for name, of_weight in of_weights.items():
            if name in cuts:
                near(of_weight, split_shards(part.get_parameter(name).grad, cuts[name], rank.size)[rank.index])
            else:  # summed over the ranks once an update
                near(sum(grads[name] for *_, grads, _ in done), part.get_parameter(name).grad)


def test_whoever_else_reads_the_rows_of_others_reads_nan():
    """A part that adds its input to its output, which no ring carries."""

    class Adds(Part):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + hidden_states.mean(1)

    part = Part(["c_fc", "c_proj"], False)

    def work(rank):
        mine, cuts = cut(part, rank)
        mine.__class__ = Adds
        install_ring(mine, ring_products(mine, cuts), rank, lambda: [2, 2])
        return mine(torch.ones(1, 2, 6, dtype=torch.float64))

    assert all(out.isnan().all() for out in on_ranks(2, work)[0])


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("llama", {"self_attn", "mlp"}),
        ("gpt_oss", {"self_attn"}),  # a mixture stays on gathered rows
        ("phi3", {"mlp"}),  # its q, k and v are one matrix, which is not cut
        ("lfm2", {"feed_forward"}),  # as is a convolution, in the first of its layers
    ],
)
def test_which_parts_of_a_layer_have_a_ring(kind, parts):
    decoder = (model := copy.deepcopy(family(kind)).model).model
    check_tensor_parallel(model, 2, overlap=True)
    cut_model(model, ThreadRank(0, 2, {}), overlap=True)
    assert {n for n, part in decoder.layers[0].named_children() if RING in map(_name, part.children())} == parts


RING = "_row_product"


def _name(layer):
    return getattr(getattr(layer.__dict__.get("forward"), "func", None), "__name__", "")


def test_it_is_refused_where_it_would_have_no_effect():
    with pytest.raises(ValueError, match=r"overlap = true with tp = 1 and sp = true: .* set tp to 2 or more"):
        Mesh(shards=2, overlap=True)
    with pytest.raises(ValueError, match=r"sp = false: .* or leave overlap out"):
        Mesh(tp=2, sp=False, overlap=True)
    assert str(Mesh(tp=2, overlap=True)) == "{ tp = 2, overlap = true }"
    model = copy.deepcopy(family("deepseek_v2")).model
    check_tensor_parallel(model, 2, overlap=True)
    del model.model.layers[0]  # the others have latent attention and a mixture
    check_tensor_parallel(model, 2)
    with pytest.raises(ModelError, match=r"no effect on model type 'deepseek_v2': .* leave overlap out"):
        check_tensor_parallel(model, 2, overlap=True)
