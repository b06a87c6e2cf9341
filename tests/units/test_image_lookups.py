"""Which pictures a rank encodes of a row that it shares, and where its tokens find their cells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rondel.train.pack import ImageLookups


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_a_rank_see_the_same_cells_among_fewer_pictures(seed):
    make = torch.Generator().manual_seed(seed)
    sizes = [4, 6, 3, 5]
    begins = [0, 4, 10, 13]
    features = torch.randn(sum(sizes), 2, generator=make)
    rows = torch.randperm(40, generator=make)[:18].sort()[0]
    shown = torch.randint(4, (18,), generator=make)
    cells = torch.tensor([begins[i] + int(torch.randint(sizes[i], (), generator=make)) for i in shown.tolist()])
    images = [SimpleNamespace(tokens=n, number=i) for i, n in enumerate(sizes)]
    looks = ImageLookups(images, rows, cells, shown)
    own = torch.randperm(40, generator=make)[: int(torch.randint(1, 20, (), generator=make))]
    place = torch.full((40,), -1)
    place[own] = torch.arange(len(own))
    found = looks.of_rows(place)
    seen = {int(row): features[cell] for row, cell in zip(rows, cells)}
    wanted = {n: seen[row] for n, row in enumerate(own.tolist()) if row in seen}
    if not wanted:
        assert found is None
        return
    assert found.rows.tolist() == sorted(wanted), "in the order of the rank's rows"
    told = torch.cat([features[begins[i.number] :][: i.tokens] for i in found.images])
    assert all(torch.equal(told[cell], wanted[row]) for row, cell in zip(found.rows.tolist(), found.cells))
    assert {i.number for i in found.images} == set(found.numbers.tolist()), (
        "pictures that nobody here sees are left out"
    )
