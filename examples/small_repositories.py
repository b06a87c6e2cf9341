"""Small repositories with one wrong line each: `python examples/small_repositories.py runs/small-repositories`.

A module has three functions of a number, each in one line. One of these is wrong: a number that is off by one, or
another operation. No two repositories have the same wrong function, so one that is held out was never mended in
training. A check that is there shows one number, the hidden one 24.
"""

import difflib
import itertools
import random
import sys
from pathlib import Path

from functions import FORMS

# what a line was mistaken for
OTHER = {
    "x + {k}": "x - {k}", "x - {k}": "x + {k}", "{k} - x": "x - {k}", "x * {k}": "x + {k}", "x * x + {k}": "x + {k}",
    "2 * x - {k}": "x - {k}", "x // {k}": "x / {k}", "x % {k}": "x // {k}", "max(x, {k})": "min(x, {k})",
    "min(x, {k})": "max(x, {k})", "x > {k}": "x < {k}", "x % {k} == 0": "x % {k}", "abs(x - {k})": "x - {k}",
}  # fmt: skip
NUMBERS = range(2, 14)
TASK = 'test = "python3 check.py"\nreport = "exit"\nseconds = 20\npackages = []\nprotected = ["check.py"]\n'
CHECK = """from numbers_of import {name}

for x, right in {cases}:
    found = {name}(x)
    assert found == right, f"{name}({{x}}) is {{found}} and should be {{right}}"
"""


def source(name, about, code):
    return f'def {name}(x):\n    """{about}"""\n    return {code}\n'


def describe(form, k):
    """What a function returns, as a sentence: "The larger of x and 3."."""
    said = form.format(k=k)
    return f"{said if said[0] == 'x' else said[0].upper() + said[1:]}."


def wrong_code(draw, code, k):
    return code.format(k=k + draw.choice([-1, 1])) if draw.random() < 0.5 else OTHER[code].format(k=k)


def cases(draw, right, wrong, n):
    """n numbers with what the function returns, of which the first shows the mistake; None where none does."""
    of = {}
    exec(source("mend", "", right) + source("broken", "", wrong), of)
    told = [(x, of["mend"](x)) for x in draw.sample(range(-30, 60), 60)]
    shown = next((one for one in told if one[1] != of["broken"](one[0])), None)
    return shown and [shown, *[one for one in told if one != shown][: n - 1]]


def write_repository(folder, draw, function, others):
    """False where no number shows the mistake."""
    form, k = function
    right, about = FORMS[form].format(k=k), describe(form, k)
    wrong = wrong_code(draw, FORMS[form], k)
    found = cases(draw, right, wrong, 24)
    if found is None:
        return False
    name, *more = draw.sample(["alpha", "beta", "gamma", "delta", "omega"], 3)
    texts = [source(other, describe(f, n), FORMS[f].format(k=n)) for other, (f, n) in zip(more, others)]
    place = draw.randrange(3)
    before, after = (
        "\n\n".join([*texts[:place], source(name, about, code), *texts[place:]]) for code in (wrong, right)
    )
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a/numbers_of.py", "b/numbers_of.py")
    files = {
        "task.toml": TASK,
        "statement.md": f"{name} in numbers_of.py is wrong: {name}({found[0][0]}) should be {found[0][1]}. See check.py.\n",
        "repository/numbers_of.py": before,
        "repository/check.py": CHECK.format(name=name, cases=found[:1]),
        "hidden/check.py": CHECK.format(name=name, cases=found),
        "gold.patch": "".join(diff),
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return True


def main(out, n=140, seed=0):
    draw = random.Random(seed)
    functions = list(itertools.product(FORMS, NUMBERS))
    draw.shuffle(functions)
    made = 0
    for function in functions:
        others = draw.sample([one for one in functions if one != function], 2)
        made += made < n and write_repository(Path(out) / f"numbers-{made:03d}", draw, function, others)
    print(f"{made} repositories in {out}")


if __name__ == "__main__":
    main(sys.argv[1])
