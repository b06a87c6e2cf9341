"""The formula of a row in plain text, for `rondel explain` and the card of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from inspect import cleandoc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm

SYMBOLS = {
    "shaping": "R",
    "advantage": "A",
    "distill": "d",
    "ratio": "r",
    "surrogate": "l",
    "correction": "c",
    "kl": "k",
    "entropy": "H",
    "aggregate": "w",
    "value": "m",
}


def explain_objective(row: Algorithm) -> str:
    """The effective formula in plain text: loss, what its letters stand for, gradient at ratio 1, knobs."""
    idle = {path for path in row.idle if "." not in path} | {
        name for name in ("kl", "entropy", "distill") if not getattr(row, name).coef
    }
    idle |= set() if row.reading is None else {"distill"}
    taught = row.distill.coef if row.reading is None and not row.distill.charged else 0.0
    shown = {family: part for family, part in row.parts.items() if family not in idle}
    penalty = f" + {row.kl.coef:g}·k" if row.kl.in_loss else ""
    penalty += f" + {taught:g}·d" if taught else ""
    penalty += "".join(f" + {term.coef:g}·{term.name}" for term in row.terms)
    bonus = f" - {row.entropy.coef:g}·H" if row.entropy.coef else ""
    slope = f" + {row.kl.coef:g}·({row.kl.slope})" if row.kl.in_loss and not row.kl.push else ""
    cost = [f"  each token pays {row.kl.coef:g}·k of its reward, with logp of the behavior"] if row.kl.in_reward else []
    cost += (
        [f"  each token pays {row.kl.coef:g}·k of its own and of those behind it, after the baseline"]
        if row.kl.in_advantage
        else []
    )
    critic = (
        ["critic    its own loss: sum of w·m over the same tokens, with V = v when the step began"]
        if "values" in row.needs
        else []
    )
    push = f" + c·{row.surrogate.push}" if row.surrogate.push else ""
    push += f" + {row.kl.coef:g}·{row.kl.push}" if row.kl.in_loss and row.kl.push else ""
    push += f" - {row.entropy.coef:g}·∇H" if row.entropy.coef else ""
    push += "".join(f" + {term.coef:g}·∇{term.name}" for term in row.terms)
    push += f" + {taught:g}·∇d" if taught else ""
    kept = row.correction.denominator != "all"
    lines = [
        f"{row.name}  ({row.paper})",
        f"loss      sum over the trainable tokens of w·(c·l{penalty}{bonus})",
        *(f"  {SYMBOLS[family]} = {part}" for family, part in shown.items()),
        *(f"  {term.name} = {term}" for term in row.terms),
        *cost,
        f"  w counts {'what the correction keeps of ' if kept else ''}the whole batch before the first forward pass: "
        "micro-batches and ranks cannot change it",
        f"gradient  at r = 1: sum of w·((c·({row.surrogate.slope}){slope})·∇logp{push})",
        *critic,
        *([] if row.reading is None else [f"reading   beside it, not weighed by w: {row.reading[1]:g}·{row.distill}"]),
        *(
            ["masked    answers that the token limit cut off: no gradient; their rewards stay in the baseline"]
            if row.mask_truncated
            else []
        ),
        f"groups    {'trained if they pass: ' + ', '.join(row.filters) if row.filters else 'all are trained'}",
        f"needs     {', '.join(sorted(row.needs)) or 'nothing beside the tokens'}",
        *_describe_knobs(row),
        *(
            f"idle      {', '.join(path for path, other in row.idle.items() if other == why)}: {why}"
            for why in dict.fromkeys(row.idle.values())
        ),
    ]
    return "\n".join(lines)


def _describe_knobs(row: Algorithm) -> Iterator[str]:
    """One line for every field that can change the loss, with its meaning."""
    for family, part in row.parts.items():
        meanings = field_meanings(type(part))
        for knob in (f.name for f in fields(part)):
            if family not in row.idle and f"{family}.{knob}" not in row.idle:
                yield f"knob      {family}.{knob} = {getattr(part, knob)}    {meanings.get(knob, '')}"


def field_meanings(of: type) -> dict[str, str]:
    """What a docstring says of each field, in one line.  `name    text`, further lines below the text."""
    meanings, last = dict[str, str](), ""
    for line in cleandoc(of.__doc__ or "").splitlines():
        name, _, text = line.partition("    ")
        if not name and last:
            meanings[last] += " " + text.strip()
        else:
            last = name if text and name.isidentifier() else ""
            if last:
                meanings[last] = text.strip()
    return meanings
