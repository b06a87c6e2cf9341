"""The chain as a picture: what each tier's primitive saves, and what asynchrony gains by
how unequal answers are. One SVG, no library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 1000, 640, 330, 60
BAR, GAP = 26, 14
INK, QUIET, FILL, MARK = "#1d2433", "#667085", "#3b6fb5", "#c2410c"


def render_svg(rows: dict[str, Any]) -> str:
    """`rows` as `chain.told` gives them."""
    body = "\n".join([*_tier_bars(rows["tiers"]), *_draw_gains(rows["gains"], rows["published"])])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="{INK}">\n'
        f'<title>What breaks from 8 devices to ten thousand</title>\n<rect width="{WIDTH}" height="{HEIGHT}" '
        f'fill="white"/>\n{body}\n</svg>\n'
    )


def _tier_bars(tiers: list[dict[str, Any]]) -> Iterator[str]:
    """A bar a tier: how many times less with the primitive than without it, on a scale of logarithms."""
    room = WIDTH - LEFT - 320
    most = max(math.log(tier["gain"]) for tier in tiers) or 1.0
    yield _svg_text(20, 30, "What saves each tier, and how many times (logarithmic)", size=16)
    for i, tier in enumerate(tiers):
        y = TOP + i * (BAR + GAP)
        wide = max(2.0, room * math.log(max(1.0, tier["gain"])) / most)
        yield _svg_text(LEFT - 12, y + 11, f"{tier['devices']:,} devices", anchor="end")
        yield _svg_text(LEFT - 12, y + 25, _truncate_text(tier["breaks"], 50), anchor="end", size=11, colour=QUIET)
        yield f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{FILL}"/>'
        yield _svg_text(LEFT + wide + 8, y + 11, f"{tier['gain']:.2f}x")
        yield _svg_text(LEFT + wide + 8, y + 25, _truncate_text(tier["helps"], 48), size=11, colour=QUIET)


def _draw_gains(gains: list[dict[str, float]], published: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The simulator's curve over sigma, and on it what others have published."""
    top, bottom, left, right = TOP + 6 * (BAR + GAP) + 70, HEIGHT - 50, 80, WIDTH - 360
    high = max([row["gain"] for row in gains] + [each["gain"] for each in published.values()]) * 1.1
    far = max(row["sigma"] for row in gains)

    def to_pixels(sigma: float, gain: float) -> tuple[float, float]:
        return left + (right - left) * sigma / far, bottom - (bottom - top) * gain / high

    yield _svg_text(20, top - 24, "What asynchrony gains (S = 4) by the sigma of log-normal lengths", size=16)
    for gain in range(int(high) + 1):
        (x, y), (end, _) = to_pixels(0, gain), to_pixels(far, gain)
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#d0d5dd"/>'
        yield _svg_text(x - 10, y + 4, f"{gain}x", anchor="end", colour=QUIET)
    for row in gains:
        x, y = to_pixels(row["sigma"], row["gain"])
        yield _svg_text(x, bottom + 20, f"{row['sigma']:g}", anchor="middle", colour=QUIET)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{FILL}"/>'
    yield _svg_text(right, bottom + 38, "sigma", anchor="end", colour=QUIET)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (to_pixels(row["sigma"], row["gain"]) for row in gains))
    yield f'<polyline points="{points}" fill="none" stroke="{FILL}" stroke-width="2"/>'
    for i, (name, each) in enumerate(published.items()):
        y = top + 14 + i * 40
        where = "at none of these" if each["sigma"] is None else f"needs sigma {each['sigma']:.2f} here"
        yield _svg_text(right + 40, y, f"{each['gain']}x  {name}", colour=MARK)
        yield _svg_text(right + 40, y + 15, where, size=11, colour=QUIET)
        if each["sigma"] is not None:
            x, mark = to_pixels(each["sigma"], each["gain"])
            yield f'<circle cx="{x:.1f}" cy="{mark:.1f}" r="6" fill="none" stroke="{MARK}" stroke-width="2"/>'


def _svg_text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, colour: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )


def _truncate_text(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip(" ,:") + "…"
