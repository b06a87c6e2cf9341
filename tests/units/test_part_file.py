"""A file that several ranks write has the numbers that one would write."""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rondel.core.tensor_parts import IndexRun, TensorPart
from rondel.train import part_file
from rondel.train.part_file import (
    PartFile,
    StoredTensor,
    assign_owners,
    own_pieces,
    slice_box,
    whole_pieces,
    whole_shape,
)


def deal(tensor: torch.Tensor, ranks: int, draw: random.Random) -> list[tuple[TensorPart, torch.Tensor]]:
    """Whole on each rank, in rows as FSDP deals them, or every n-th slice of another dimension."""
    whole, dim = TensorPart.whole(tensor.shape), draw.choice([None, *range(tensor.ndim)])
    if dim is None:
        return [(whole, tensor)] * ranks
    if dim == 0:
        rows = tensor.chunk(ranks, 0)
        return [(whole.shard(r, ranks), rows[r] if r < len(rows) else tensor[:0]) for r in range(ranks)]
    found = []
    for rank in range(ranks):
        own = [i for i in range(tensor.shape[dim]) if i % ranks == rank]
        runs = [IndexRun(here, i, 1) for here, i in enumerate(own)]
        piece = tensor.index_select(dim, torch.tensor(own, dtype=torch.long))
        found.append((whole.cut(dim, len(own), runs), piece))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_every_number_is_written_once_by_one_that_holds_it(tmp_path, seed):
    draw, path = random.Random(seed), tmp_path / "x.safetensors"
    ranks = draw.randrange(1, 5)
    tensors = {
        f"t{i}": torch.randn([draw.randrange(1, 7) for _ in range(draw.randrange(4))]).to(
            draw.choice([torch.float32, torch.bfloat16, torch.int64])
        )
        for i in range(6)
    }
    dealt = {name: deal(tensor, ranks, draw) for name, tensor in tensors.items()}
    held = [{name: parts[r][0] for name, parts in dealt.items()} for r in range(ranks)]
    assigned = assign_owners(held, {name: tensor.itemsize for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        assert sum(block.numel for of in assigned for block in of.get(name, ())) == tensor.numel()
        assert whole_shape(of[name] for of in held) == tuple(tensor.shape)
    file = PartFile([StoredTensor.whole(name, t.dtype, t.shape) for name, t in tensors.items()])
    file.create(path)
    for rank in range(ranks):
        file.write(path, own_pieces(assigned[rank], [(name, parts[rank][1]) for name, parts in dealt.items()]))
    found = load_file(path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())
    assert path.stat().st_size == file.size


def test_replicas_share_the_work():
    held = [{f"w{i}": TensorPart.whole((4, 4)) for i in range(10)} for _ in range(2)]
    assert [len(of) for of in assign_owners(held, dict.fromkeys(held[0], 4))] == [5, 5]


def test_views_that_are_boxes_are_known():
    """Experts of a stack, halves of a matrix; neither a transposed one nor every second row of it."""
    whole = torch.arange(48).view(2, 6, 4)
    for view in (whole, whole[1, :3], whole[0, 3:], whole[1, 2], whole[:, 2], whole[1, 3, 1:3]):
        box = slice_box(whole.shape, view.shape, view.stride(), view.storage_offset())
        found = whole
        for dim, (first, n) in enumerate(zip(box.start, box.size)):
            found = found.narrow(dim, first, n)
        assert torch.equal(found.reshape(view.shape), view)
    for view in (whole.transpose(1, 2), whole[:, ::2], whole[..., 1::2]):
        assert slice_box(whole.shape, view.shape, view.stride(), view.storage_offset()) is None


def test_the_pieces_are_asked_for_to_their_end_whatever_the_disk_says(tmp_path):
    """Other ranks give something of each."""
    file, asked = PartFile([StoredTensor.whole("a", torch.float32, (2,))]), []
    pieces = [("a", TensorPart.whole((2,)).blocks[0], torch.ones(2))] * 3
    with pytest.raises(FileNotFoundError):
        file.write(tmp_path / "nowhere", (asked.append(1) or piece for piece in pieces))
    assert len(asked) == 3
    file.write(None, (asked.append(1) or piece for piece in pieces))
    assert len(asked) == 6 and not list(Path(tmp_path).iterdir())


def test_a_writer_waits_for_its_disk_on_the_way_and_not_for_all_bytes_at_the_end(tmp_path, monkeypatch):
    """A process shows no progress while it waits, and one that shows none for a minute is ended as stuck."""
    dirty, waits, write = 0, [], os.pwrite

    def counted(fd, data, at):
        nonlocal dirty
        dirty += (done := write(fd, data, at))
        return done

    def synced(fd):
        nonlocal dirty
        waits.append(dirty)
        dirty = 0

    monkeypatch.setattr(part_file, "AHEAD", 4096)
    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(os, "fsync", synced)
    draw = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(n, generator=draw) for i, n in enumerate((3, 5000, 1, 700, 1024))}
    file = PartFile([StoredTensor.whole(name, t.dtype, t.shape) for name, t in tensors.items()])
    file.create(tmp_path / "whole")
    file.write(tmp_path / "whole", whole_pieces(tensors.items()))
    assert max(waits) <= 4096 and sum(waits) == sum(t.nbytes for t in tensors.values()) and dirty == 0
    assert all(torch.equal(t, tensors[name]) for name, t in load_file(tmp_path / "whole").items())
