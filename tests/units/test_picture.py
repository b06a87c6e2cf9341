"""The chain's picture says what the chain's rows say."""

from __future__ import annotations

import xml.etree.ElementTree as tree

import pytest

from rondel.simulate.picture import render_svg

SVG = "{http://www.w3.org/2000/svg}"
ROWS = {
    "tiers": [
        {"devices": n, "breaks": f"breaks <{n}>", "helps": f"helps & {n}", "gain": gain}
        for n, gain in zip((8, 64, 256, 1024, 4096, 10240), (2.0, 8.0, 64.0, 4.0, 1.0, 16.0))
    ],
    "gains": [{"sigma": s, "gain": g} for s, g in ((0.0, 1.0), (0.8, 2.0), (1.6, 4.0))],
    "published": {"theirs": {"gain": 3.0, "sigma": 1.2}, "others": {"gain": 9.0, "sigma": None}},
}


def test_every_row_is_in_it_to_scale():
    root = tree.fromstring(render_svg(ROWS))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {
        "8 devices",
        "10,240 devices",
        "breaks <8>",
        "helps & 8",
        "2.00x",
        "3.0x  theirs",
        "needs sigma 1.20 here",
        "at none of these",
    } <= set(texts)
    bars = [float(rect.get("width")) for rect in root.iter(f"{SVG}rect")][1:]
    assert [3 * bars[3], 6 * bars[0]] == pytest.approx([bars[2]] * 2, abs=0.5) and bars[4] == 2.0, (
        "64, 4, 2 and 1 times, in logarithms"
    )
    marks = [c for c in root.iter(f"{SVG}circle") if c.get("fill") == "none"]
    line = [tuple(map(float, point.split(","))) for point in next(root.iter(f"{SVG}polyline")).get("points").split()]
    assert len(marks) == 1 and len(line) == 3
    (x0, y0), (x1, y1) = line[1:]
    assert float(marks[0].get("cx")) == pytest.approx((x0 + x1) / 2, abs=0.2) and float(
        marks[0].get("cy")
    ) == pytest.approx((y0 + y1) / 2, abs=0.2)
    assert all(
        0 <= float(text.get("x")) <= 1000 and 0 <= float(text.get("y")) <= 640 for text in root.iter(f"{SVG}text")
    )
