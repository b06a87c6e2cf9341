"""The digest of a tensor and the root over all of them: what must change it, and what must not."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondel.core.tensor_parts import TensorPart
from rondel.models import names
from rondel.models.shard_cut import ShardCut, part_of

SHAPES = [(1,), (3,), (7, 5), (64, 64), (1 << 16,), (1 << 15, 5), (3, 70_001)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_flipped_bit_changes_the_digest(shape, dtype):
    r = random.Random(0)
    t = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    raw, whole = t.view(-1).view(torch.uint8), names.tensor_digest(t)
    places = [(0, 0), (len(raw) - 1, 7)] + [(r.randrange(len(raw)), r.randrange(8)) for _ in range(30)]
    for byte, bit in places:
        raw[byte] ^= 1 << bit
        assert names.tensor_digest(t) != whole
        raw[byte] ^= 1 << bit
    assert names.tensor_digest(t) == whole


def test_accidents_that_keep_the_sum_of_words():
    """Swapped rows, swapped words, a transposed matrix, flipped signs: each would fool a plain sum."""
    g = torch.Generator().manual_seed(2)
    for n in (64, 300, 400):
        t = torch.randn(n, n, generator=g)
        odd = torch.arange(n) % 2 * -2 + 1  # negates every other column
        seen = {
            names.tensor_digest(x)
            for x in (t, t.clone(), t.T, -t, t * odd, t * -odd, t.flip(0), t.flip(1), t.bfloat16(), -t.bfloat16())
        }
        assert len(seen) == 9
        for _ in range(40):
            i, j = torch.randperm(n, generator=g)[:2].tolist()
            swapped = t.clone()
            swapped[[i, j]] = t[[j, i]]
            seen.add(names.tensor_digest(swapped))
        assert len(seen) >= 9 + 38


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("n", [1022, 1023, 2046, 4092, 8184, 65536])
def test_flipped_signs_of_all_or_of_every_second_number(dtype, n):
    """Only the highest bit of a float64 flips: what a sum modulo 2^64 sees as an even number of nothing."""
    t = torch.randn(n, generator=torch.Generator().manual_seed(6)).to(dtype)
    assert (
        len(
            {
                names.tensor_digest(t * sign)
                for sign in (1, -1, torch.arange(n) % 2 * -2 + 1, torch.arange(n) % 4 // 2 * -2 + 1)
            }
        )
        == 4
    )


def test_the_digest_of_a_gpu_is_that_of_a_cpu():
    """Both ways to multiply, on random rows."""
    rows = torch.randint(-(2**63), 2**63 - 1, (5, names._ROW), generator=torch.Generator().manual_seed(7))
    odd = names._hash_multipliers(rows.device, names._ROW, names._INSIDE)
    assert torch.equal(names._row_products(rows, odd), (rows * odd).sum(1))


@pytest.mark.parametrize("bit", [15, 31, 47, 62, 63])
def test_two_flips_of_the_same_high_bit_do_not_cancel(bit):
    """A multiplication modulo 2^64 carries only upwards: without the fold, two flipped
    signs at odd places would be invisible.
    """
    words = torch.randint(-(2**62), 2**62, (100_000,), generator=torch.Generator().manual_seed(3))
    whole, r = names.tensor_digest(words), random.Random(bit)
    for _ in range(60):
        i, j = r.sample(range(len(words)), 2)
        both = words.clone()
        for at in (i, j):
            both[at] ^= -(2**63) if bit == 63 else 1 << bit
        assert names.tensor_digest(both) != whole


def test_words_swapped_across_rows_are_seen():
    """Position (row j, word i+1) and (row i, word j+1): equal products if rows and words shared their multipliers."""
    t = torch.randint(-(2**62), 2**62, (4, names._ROW), generator=torch.Generator().manual_seed(4))
    whole = names.tensor_digest(t)
    for i, j in ((0, 1), (1, 3), (0, 2)):
        other = t.clone()
        other[i, j + 1], other[j, i + 1] = t[j, i + 1].clone(), t[i, j + 1].clone()
        assert names.tensor_digest(other) != whole


def test_the_digest_is_of_the_bits_not_of_the_memory():
    base = torch.randn(1001, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    for view in (base[1:], base[3:500], base[::2], base[:1000].view(10, 100).T):
        assert names.tensor_digest(view) == names.tensor_digest(view.clone().contiguous())
    assert (
        names.tensor_digest(torch.zeros(0))
        != names.tensor_digest(torch.zeros(1))
        != names.tensor_digest(torch.zeros(2))
    )
    assert names.tensor_digest(torch.tensor(0.0)) != names.tensor_digest(torch.tensor(-0.0))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    ranks=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 2), max_size=3),
    seed=st.integers(0, 99),
)
def test_pieces_add_up_to_the_digest_of_the_whole(shape, dtype, ranks, cuts, seed):
    """However a tensor lies over ranks: each adds what it has, and nobody has it whole."""
    g = torch.Generator().manual_seed(seed)
    whole = (torch.randn(shape, generator=g) * 50).to(dtype)
    pieces = [TensorPart.whole(shape)]
    for dim in cuts:
        if dim < len(shape):
            pieces = [piece for part in pieces for piece in cut_evenly(part, dim, ranks)]
    size = whole.numel() * whole.element_size()
    total = torch.zeros(names.digest_length(size), dtype=torch.int64)
    for piece in pieces:
        own = names.DigestSums(size, device=whole.device)
        for block in piece.blocks:
            box = whole
            for d, (first, n) in enumerate(zip(block.start, block.size)):
                box = box.narrow(d, first, n)
            own.add_box(tuple(shape), block.start, box)
        total += own.values
    sums = names.DigestSums(size, device=whole.device, values=total)
    assert sums.digest() == names.tensor_digest(whole)
    total[-1] += 1
    assert sums.digest() != names.tensor_digest(whole)


def cut_evenly(part: TensorPart, dim: int, ranks: int) -> list[TensorPart]:
    return [part_of(part, ShardCut(dim, uneven=True), ranks, index) for index in range(ranks)]


def test_large_pieces_at_odd_places_add_up_too():
    """Rows of the digest that begin and end within a piece, and pieces that begin within a word."""
    raw = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(8))
    borders = [0, 3, 8184, 8191, 1_050_000, 2_000_003, 2_999_999, len(raw)]
    sums = names.DigestSums(len(raw), device=raw.device)
    for first, last in reversed(list(itertools.pairwise(borders))):
        sums.add_bytes(first, raw[first:last])
    assert sums.digest() == names.tensor_digest(raw)


def test_the_root_knows_names_shapes_and_dtypes():
    def root(**tensors):
        model = torch.nn.ParameterDict({k: torch.nn.Parameter(v, requires_grad=False) for k, v in tensors.items()})
        return names.build_manifest(model, 0).root

    a, b = torch.arange(6.0), torch.ones(6)
    roots = [
        root(a=a, b=b),
        root(a=b, b=a),
        root(a=a.view(2, 3), b=b),
        root(a=a.view(torch.int32), b=b),
        root(c=a, b=b),
        root(a=a),
    ]
    assert len(set(roots)) == len(roots) and root(a=a, b=b) == root(b=b, a=a)
