"""The report of one evaluation as a web page: one file with its pictures inside, no network, everything escaped."""

from __future__ import annotations

import dataclasses
import math
from html import escape
from typing import Any

from rondel.driver.evaluation import SetEvaluation, is_right, sample_row
from rondel.runtime.telemetry.scores import failure_text, interval_text, is_share, score_text

EXAMPLES = 6  # right ones and wrong ones, of each set
LONGEST = 3000  # characters of an answer that are shown
WIDTH, ROW, LEFT, RIGHT = 640, 34, 140, 150  # of the bars
PLOT_HEIGHT, PAD = 240, 44  # of the curves
COLORS = {"pass": "#2563a8", "majority": "#b3541e"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
svg { max-width: 100%; height: auto } svg text { font: 13px system-ui, sans-serif; fill: currentColor }
table { border-collapse: collapse } td, th { padding: .2rem .9rem .2rem 0; text-align: left; font-variant-numeric: tabular-nums }
article { border-top: 1px solid #ddd; padding: .6rem 0 } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 }
.right { border-left: 4px solid #2a7d46; padding-left: .8rem } .wrong { border-left: 4px solid #b3261e; padding-left: .8rem }
.facts { color: #555 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } .facts { color: #999 } article { border-color: #333 } }
"""


def render_evaluation(model: str, done: list[SetEvaluation]) -> str:
    """All sets: bars with intervals, pass@k and majority@k over k, and answers, right ones and wrong ones."""
    first = done[0].event
    title = f"Held-out evaluation of {model}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=facts>weights of version {first.version} after step {first.step}</p>",
        _bars(done),
        *(_section(each) for each in done),
    ]
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _bars(done: list[SetEvaluation]) -> str:
    """One bar a set from 0 to its score, with a whisker from low to high."""
    low = min(0.0, *(each.event.low for each in done))
    high = max(1.0, *(each.event.high for each in done))

    def x(value: float) -> float:
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    rows = []
    for i, each in enumerate(done):
        e, middle, share = each.event, i * ROW + ROW // 2, is_share(dataclasses.asdict(each.event))
        a, b = sorted((x(0.0), x(e.score)))
        rows.append(
            f'<text x="0" y="{middle + 5}">{escape(e.profile[:18])}</text>'
            f'<rect x="{a}" y="{middle - 9}" width="{round(b - a, 1)}" height="18" fill="#7fa8d1"/>'
            f'<path d="M{x(e.low)} {middle}H{x(e.high)}M{x(e.low)} {middle - 6}v12M{x(e.high)} {middle - 6}v12" '
            'stroke="currentColor" stroke-width="1.5" fill="none"/>'
            f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 5}">{score_text(e.score, share)} '
            f"({interval_text(e.low, e.high, share)})</text>"
        )
    width = WIDTH + 60
    return (
        f'<svg viewBox="0 0 {width} {len(done) * ROW}" width="{width}" role="img" aria-label="score of each set with '
        f'its 95 % interval">{"".join(rows)}</svg>'
    )


def _section(each: SetEvaluation) -> str:
    e, share = each.event, is_share(dataclasses.asdict(each.event))
    draws = f"{e.draws} draws each at" if e.draws > 1 else "one answer each at"
    failed = f", {e.request['failed']} answers {failure_text(e.request)}" if e.request.get("failed") else ""
    facts = f"{e.n} tasks, {draws} temperature {e.request['temperature']:g}; 95 % intervals: {e.interval}{failed}"
    facts += f"; weights {weights}" if (weights := e.request.get("weights")) else ""
    rows = [("score" if share else "mean reward", e.score, e.low, e.high, share)]
    for name, (value, low, high) in e.metrics.items():
        rows.append((name, value, low, high, share or not name.startswith("avg@")))
    table = "".join(
        f"<tr><td>{escape(name)}<td>{score_text(value, own)}<td>{interval_text(low, high, own)}"
        for name, value, low, high, own in rows
    )
    return (
        f"<h2>{escape(e.profile)}</h2><p class=facts>{escape(facts)}</p>"
        f"<table><tr><th>metric<th>value<th>95 % interval{table}</table>{_curves(e.metrics)}{_examples(each)}"
    )


def _curves(metrics: dict[str, list[float]]) -> str:
    """pass@k and majority@k over k, k on a logarithmic scale, with their intervals as bands."""
    series = {
        what: [
            (int(name.partition("@")[2]), *values) for name, values in metrics.items() if name.startswith(f"{what}@")
        ]
        for what in COLORS
    }
    ks = [point[0] for points in series.values() for point in points]
    if len(set(ks)) < 2:
        return ""
    span = math.log2(max(ks)) - math.log2(min(ks))

    def x(k: float) -> float:
        return round(PAD + (math.log2(k) - math.log2(min(ks))) / span * (WIDTH - 2 * PAD), 1)

    def y(value: float) -> float:
        return round(PLOT_HEIGHT - PAD / 2 - value * (PLOT_HEIGHT - PAD), 1)

    marks = [
        f'<text x="0" y="{y(v) + 4}">{v:.0%}</text><path d="M{PAD} {y(v)}H{WIDTH - PAD}" stroke="currentColor" '
        'opacity=".15"/>'
        for v in (0.0, 0.5, 1.0)
    ] + [f'<text x="{x(k) - 4}" y="{PLOT_HEIGHT}">{k:g}</text>' for k in sorted(set(ks))]
    for i, (what, points) in enumerate((w, p) for w, p in series.items() if p):
        line = " ".join(f"{x(k)},{y(v)}" for k, v, _, _ in points)
        band = [f"{x(k)},{y(low)}" for k, _, low, _ in points] + [f"{x(k)},{y(h)}" for k, _, _, h in reversed(points)]
        marks.append(
            f'<polygon points="{" ".join(band)}" fill="{COLORS[what]}" opacity=".15"/>'
            f'<polyline points="{line}" fill="none" stroke="{COLORS[what]}" stroke-width="2"/>'
            f'<text x="{PAD + 8 + 110 * i}" y="14" style="fill:{COLORS[what]}">{what}@k</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {PLOT_HEIGHT + 6}" width="{WIDTH}" role="img" aria-label="pass@k and majority@k '
        f'over k">{"".join(marks)}</svg>'
    )


def _examples(each: SetEvaluation) -> str:
    drawn = [(task, t) for task, own in zip(each.tasks, each.draws) for t in own[:1]]
    right = [pair for pair in drawn if is_right(pair[1].reward, each.pass_reward)]
    wrong = [pair for pair in drawn if not is_right(pair[1].reward, each.pass_reward)]
    out = []
    for title, mark, pairs in (("Right", "right", right), ("Wrong", "wrong", wrong)):
        if pairs:
            cards = "".join(_example(sample_row(task, t), mark) for task, t in pairs[:EXAMPLES])
            out.append(f"<h3>{title}: {len(pairs)} of {len(drawn)} first answers</h3>{cards}")
    return "".join(out)


def _example(row: dict[str, Any], mark: str) -> str:
    text = str(row["text"])
    cut = f"\n[{len(text) - LONGEST} more characters]" if len(text) > LONGEST else ""
    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:g}"
    gold = "" if row["answer"] is None else f" · correct: {row['answer']}"
    return (
        f"<article class={mark}><pre class=facts>{escape(str(row['prompt'])[:LONGEST])}</pre>"
        f"<pre>{escape(text[:LONGEST] + cut)}</pre><div class=facts>{escape(f'{reward}{gold}')}</div></article>"
    )
