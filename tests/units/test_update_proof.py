"""Law 6, where bytes lie, proved by z3 for tensors of any size: each in its place, aligned, inside, none over another,
none left out. The code that runs is the real one, on numbers of no fixed value (kits/symbolic.py).

How many tensors there are is not fixed either. Buckets and segments are filled one tensor after the other, and what the
next step sees of all before is one number: the room left, or the place reached. A first tensor of any size leads to each
such number, so what holds for the tensors behind it holds behind any number of tensors.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import pytest

if find_spec("xdist") is None:  # it comes with rondel[dev], as z3 does: there a missing z3 is an error and no skip
    pytest.importorskip("z3", reason="pip install z3-solver")

from kits.sweeps import covering
from kits.symbolic import Int, Refuted, Truth, exactly_one, paths, some
from rondel.core.errors import SyncError
from rondel.core.tensor_parts import Block, TensorPart
from rondel.core.types import Manifest, TensorInfo
from rondel.sync import from_distributed, from_ipc, ipc_parts, tensor_bytes
from rondel.sync.from_distributed import split_bucket, split_into_buckets
from rondel.sync.from_ipc import FromIpc, tensor_offsets
from rondel.sync.ipc_parts import WrittenPiece
from rondel.sync.tensor_bytes import ALIGN, HEAD, size_of
from rondel.sync.transfer_plan import Copy, TransferPlanner, split_buckets

DTYPES = ("uint8", "bfloat16", "float32", "int64")  # tensors of 1, 2, 4 and 8 bytes a number


def rows_of(*dtypes):
    """Tensors of n0, n1, ... numbers, and that these are no negative ones."""
    numbers = [Int(f"n{i}") for i in range(len(dtypes))]
    rows = tuple(TensorInfo(f"w{i}", (n,), dtype, "") for i, (n, dtype) in enumerate(zip(numbers, dtypes)))
    return rows, [n >= 0 for n in numbers]


class Recorder:
    """Bytes of memory of which only it is asked where: `buffer[at : at + size]`."""

    def __init__(self):
        self.slices = []

    def __len__(self):
        return 1 << 62

    def __getitem__(self, part):
        self.slices.append((part.start, part.stop))
        return self

    def view(self, *_):
        return self


# -- a segment of shared memory ------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(a, b, "float32") for a in DTYPES for b in DTYPES])
def test_tensors_of_a_segment_lie_apart_aligned_and_inside(dtypes):
    rows, assumed = rows_of(*dtypes)
    (path,) = paths(lambda: tensor_offsets(rows), *assumed)
    at = path.result
    for i, row in enumerate(rows):
        path.prove(at[i] % ALIGN == 0)
        path.prove((at[i] >= HEAD) & (at[i] + size_of(row) <= at[i + 1]))
        path.prove(at[i + 1] < at[i] + size_of(row) + ALIGN, "less than ALIGN bytes lost")


def test_any_place_of_a_segment_is_reached_by_one_tensor():
    """The step of the induction above: the place behind any tensors is a multiple of ALIGN behind HEAD."""
    place = Int("place")
    row = TensorInfo("w", (place - HEAD,), "uint8", "")
    (path,) = paths(lambda: tensor_offsets((row,)), place % ALIGN == 0, place >= HEAD)
    path.prove(path.result[1] == place)


@pytest.mark.parametrize("dtypes", list(product(DTYPES, repeat=2)))
def test_readers_look_where_writers_wrote(dtypes):
    """What writes segments, what reads them whole, and what reads the pieces of several."""
    rows, assumed = rows_of(*dtypes)
    written = []
    segment = SimpleNamespace(
        write=lambda at, tensor: written.append(at), finish_writing=written.append, unlock=lambda: None,
        path="", map=(), cuda_handle=lambda: b"", number=0,
    )  # fmt: skip

    class Writer(FromIpc):
        def _lock_free_segment(self):
            return segment

    def tensor(row):
        return SimpleNamespace(numel=lambda: row.shape[0], element_size=lambda: item_size(row))

    def write_and_read():
        written.clear()
        memory = Recorder()
        Writer(named=True)._write_segment(map(tensor, rows))
        list(ipc_parts._open_pieces(memory, [WrittenPiece(r.name, (0,), r.shape) for r in rows], Manifest(1, rows)))
        return list(written), tensor_offsets(rows), memory.slices

    fit = [row.shape[0] < 1 << 56 for row in rows]
    (path,) = paths(write_and_read, *assumed, *fit)
    wrote, reads, pieces = path.result
    assert len(wrote) == len(reads) == len(rows) + 1 == len(pieces) + 1
    for mine, theirs in zip(wrote, reads):
        path.prove(Int(mine) == theirs)
    for row, begins, (start, stop) in zip(rows, reads, pieces):
        path.prove((Int(begins) == start) & (stop == start + size_of(row)))


def item_size(row):
    return size_of(TensorInfo("", (1,), row.dtype, ""))


# -- buckets of a broadcast ----------------------------------------------------------------------


def prove_buckets(dtypes):
    rows, assumed = rows_of(*dtypes)
    most = Int("most")

    def fill():
        plan = split_into_buckets(rows, most)
        return [(bucket, list(split_bucket(bucket, memory := Recorder())), memory.slices) for bucket in plan]

    for path in paths(fill, *assumed, most >= 1):
        assert [row.name for bucket, _, _ in path.result for row in bucket] == [row.name for row in rows], "complete"
        for bucket, slots, slices in path.result:
            assert [row for row, _ in slots] == bucket
            used = sum(map(from_distributed._aligned_size, bucket))
            end = Int(0)
            for row, (start, stop) in zip(bucket, slices):
                path.prove(Int(start) % ALIGN == 0, "aligned")
                path.prove(start >= end, "over the one before")
                path.prove((stop == start + size_of(row)) & (stop <= used), "inside what is sent")
                end = stop
            path.prove((end <= most) | Truth(len(bucket) == 1), "larger than a bucket may be")


@pytest.mark.parametrize("dtypes", [(a, b, "bfloat16") for a in DTYPES for b in DTYPES])
def test_tensors_of_a_bucket_lie_apart_aligned_and_inside(dtypes):
    prove_buckets(dtypes)


def test_any_room_of_a_bucket_is_left_by_one_tensor():
    """The step of the induction: whatever lies in the last bucket takes a multiple of ALIGN, and so does one tensor."""
    taken = Int("taken")
    row = TensorInfo("w", (taken,), "uint8", "")
    (path,) = paths(lambda: from_distributed._aligned_size(row), taken % ALIGN == 0, taken >= 0)
    path.prove(path.result == taken)


@pytest.mark.parametrize(
    "planted",
    [lambda at: at, lambda at: at // ALIGN * ALIGN, lambda at: -(-at // 32) * 32],
    ids=["packed", "down", "32"],
)
def test_a_planted_bug_is_found(planted, monkeypatch):
    for module in (tensor_bytes, from_distributed, from_ipc, ipc_parts):
        monkeypatch.setattr(module, "aligned", planted, raising=False)
    with pytest.raises(Refuted, match="false for"):
        prove_buckets(("uint8", "float32", "uint8"))
    with pytest.raises(Refuted, match="false for"):
        test_tensors_of_a_segment_lie_apart_aligned_and_inside(("uint8", "float32", "uint8"))


# -- boxes of tensors, and who copies them -------------------------------------------------------


def block_of(name, dims):
    """A box anywhere, and that its sizes are positive."""
    start, size, here = (tuple(Int(f"{name}.{what}{d}") for d in range(dims)) for what in ("start", "size", "here"))
    return Block(start, size, here), [n >= 1 for n in size]


def has(block, point):
    claim = Truth(True)
    for x, a, n in zip(point, block.start, block.size):
        claim = claim & (x >= a) & (x < a + n)
    return claim


def lies_at(block, point):
    """Where a point of the whole lies in the part."""
    return [h + x - a for x, a, h in zip(point, block.start, block.here)]


def equal(places):
    claim = Truth(True)
    for a, b in places:
        claim = claim & (a == b)
    return claim


def implies(a, b):
    return ~a | b


@pytest.mark.slow
@pytest.mark.parametrize("dims", covering([1, 2, 3], [2]))  # a third is cut as the second was
def test_what_two_boxes_share_is_what_both_have(dims):
    (mine, sizes), (other, others) = block_of("mine", dims), block_of("other", dims)
    point = [Int(f"x{d}") for d in range(dims)]
    for path in paths(lambda: mine.overlap(other), *sizes, *others):
        box = path.result
        both = has(mine, point) & has(other, point)
        path.prove(~both if box is None else implies(both, has(box, point)) & implies(has(box, point), both))
        if box is not None:
            path.prove(implies(has(box, point), equal(zip(lies_at(box, point), lies_at(mine, point)))))


@pytest.mark.slow
@pytest.mark.parametrize("dims", covering([1, 2, 3], [2]))
def test_a_box_without_another_is_each_other_point_once(dims):
    (mine, sizes), (other, others) = block_of("mine", dims), block_of("other", dims)
    point = [Int(f"x{d}") for d in range(dims)]
    for path in paths(lambda: mine.without(other), *sizes, *others):
        pieces = path.result
        left = has(mine, point) & ~has(other, point)
        path.prove(implies(left, exactly_one([has(piece, point) for piece in pieces])))
        for piece in pieces:
            path.prove(implies(has(piece, point), left))
            path.prove(implies(has(piece, point), equal(zip(lies_at(piece, point), lies_at(mine, point)))))


@pytest.mark.slow
def test_a_plan_copies_every_number_once_from_where_it_lies():
    """Two holders of any boxes of a vector, which may overlap, and a taker of another one."""
    wanted, sizes = block_of("wanted", 1)
    held = [block_of(f"held{i}", 1) for i in range(2)]
    x = Int("x")

    def plan():
        holders = [(i, TensorPart((), (block,))) for i, (block, _) in enumerate(held)]
        return TransferPlanner().plan_tensor("w", 4, holders, [(0, TensorPart((), (wanted,)))])

    def somebody(x):
        return has(held[0][0], [x]) | has(held[1][0], [x])

    done = 0
    for path in paths(plan, *sizes, *held[0][1], *held[1][1], raises=SyncError):
        if path.error is not None:
            gaps = [wanted.start[0], *(block.start[0] + block.size[0] for block, _ in held)]  # where one may begin
            path.prove(
                some([has(wanted, [x]) & ~somebody(x) for x in gaps]), "refused, and every number lies somewhere"
            )
            continue
        done += 1
        boxes = [Block((c.to[0] - wanted.here[0] + wanted.start[0],), c.size, c.at) for c in path.result]
        path.prove(implies(has(wanted, [x]), exactly_one([has(box, [x]) for box in boxes])))
        for copy, box in zip(path.result, boxes):
            source = held[copy.source][0]
            path.prove(implies(has(box, [x]), has(source, [x]) & equal(zip(lies_at(box, [x]), lies_at(source, [x])))))
            path.prove(copy.bytes == copy.size[0] * 4)
    assert done > 2


def test_a_copy_that_is_cut_into_buckets_stays_whole():
    """Bounded, for `range` takes numbers alone: every size up to 4 x 3 x 3, every bucket up to the whole."""
    for size in product(range(1, 5), range(1, 4), range(1, 4)):
        n = 4 * size[0] * size[1] * size[2]
        copy = Copy("w", 0, 0, (5, 0, 1), (0, 2, 0), size, n)
        for most in range(4, n + 5, 4):
            pieces = [piece for bucket in split_buckets([copy], most) for piece in bucket]
            points = [
                (tuple(a + i for a, i in zip(piece.at, index)), tuple(a + i for a, i in zip(piece.to, index)))
                for piece in pieces
                for index in product(*map(range, piece.size))
            ]
            whole = [
                (tuple(a + i for a, i in zip(copy.at, index)), tuple(a + i for a, i in zip(copy.to, index)))
                for index in product(*map(range, size))
            ]
            assert sorted(points) == sorted(whole)
            assert all(piece.bytes == 4 * len(list(product(*map(range, piece.size)))) <= most for piece in pieces)
            assert all(sum(piece.bytes for piece in bucket) <= most for bucket in split_buckets([copy], most))
