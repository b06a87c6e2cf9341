"""Functions of a number in one line, asked for without an example: `data = { kind = "functions:functions" }`.

The reward `code` runs what the policy writes on numbers that it has not seen. SmolLM2 knows how to write such a function,
and explains it, fences it, or calls it by another name.
"""

import itertools
import random

FORMS = {
    "x plus {k}": "x + {k}",
    "x minus {k}": "x - {k}",
    "{k} minus x": "{k} - x",
    "x times {k}": "x * {k}",
    "the square of x, plus {k}": "x * x + {k}",
    "twice x, minus {k}": "2 * x - {k}",
    "x divided by {k}, rounded down": "x // {k}",
    "the remainder of x divided by {k}": "x % {k}",
    "the larger of x and {k}": "max(x, {k})",
    "the smaller of x and {k}": "min(x, {k})",
    "whether x is larger than {k}": "x > {k}",
    "whether {k} divides x": "x % {k} == 0",
    "the distance between x and {k}": "abs(x - {k})",
}
ASKED = "Write f(x) that returns {}, as one line of Python: def f(x): return"


def functions(seed=0):
    """The tasks, as rows: all 169, each another function."""
    draw = random.Random(seed)
    for (form, chosen), k in itertools.product(FORMS.items(), range(2, 15)):
        code = f"def f(x): return {chosen.format(k=k)}"
        made = {}
        exec(code, made)
        numbers = [
            *draw.sample(range(-20, k), 4),
            k,
            *draw.sample(range(k + 1, 60), 4),
            *(k * n for n in draw.sample(range(2, 9), 3)),
        ]
        yield {
            "prompt": ASKED.format(form.format(k=k)),
            "answer": code,
            "tests": ["\n".join(f"assert f({x}) == {made['f'](x)}" for x in numbers)],
            "entry_point": "f",
        }
