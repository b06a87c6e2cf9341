"""The trajectories of one step as a web page: one file, no network, everything escaped."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
input { width: 100%; font: inherit; padding: .4rem .6rem; margin: 1rem 0; box-sizing: border-box }
article { border-top: 1px solid #ddd; padding: .8rem 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; color: #777 }
pre b { font-weight: normal; color: #0a5c2b; background: #e8f6ec }
.facts { color: #555 }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #161616 } .facts, pre { color: #999 } article { border-color: #333 }
  pre b { color: #8fe0a8; background: #1d3325 } input { color: inherit; background: #222; border: 1px solid #444 }
}
"""
SCRIPT = """
const box = document.querySelector("input"), all = [...document.querySelectorAll("article")], count = document.querySelector("#count");
box.oninput = () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const a of all) {
    const text = a.textContent.toLowerCase();
    a.hidden = !words.every(w => text.includes(w));
    shown += !a.hidden;
  }
  count.textContent = shown + " of " + all.length;
};
"""


def render_page(title: str, cards: list[dict[str, Any]]) -> str:
    """`cards` as `view.trajectory` makes them."""
    articles = "\n".join(map(_render_article, cards))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{STYLE}</style>
<h1>{escape(title)}</h1>
<p>Green is what the policy wrote. <span id="count">{len(cards)} of {len(cards)}</span> shown.</p>
<input type="search" placeholder="filter, for example: reward 0 length" aria-label="filter">
{articles}
<script>{SCRIPT}</script>
</html>
"""


def _render_article(card: dict[str, Any]) -> str:
    text = "".join(f"<b>{escape(t)}</b>" if written else escape(t) + "\n" for written, t in card["pieces"])
    answer = "" if card["answer"] is None else f"<div class=facts>answer: {escape(str(card['answer']))}</div>"
    facts = escape(" · ".join(card["facts"]))
    return (
        f"<article><strong>{escape(card['task'])}</strong> <span "
        f"class=facts>{facts}</span><pre>{text}</pre>{answer}</article>"
    )
