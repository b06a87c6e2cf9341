"""Small repositories with one wrong line each: `python examples/small_repositories.py runs/small-repositories`.

A module has three functions of a list, each in one line. One of these is wrong: a number that is off by one, the
wrong end of the list, the wrong comparison, another thing to tell. No two repositories have the same wrong function, so
one that is held out was never mended in training. A check that is there shows one list, the hidden one 24.
"""

import difflib
import itertools
import random
import sys
from pathlib import Path

CHOICES = {
    "the first {k} numbers": ("x[:{k}]", "x[-{k}:]"),
    "the last {k} numbers": ("x[-{k}:]", "x[:{k}]"),
    "all but the first {k} numbers": ("x[{k}:]", "x[:-{k}]"),
    "all but the last {k} numbers": ("x[:-{k}]", "x[{k}:]"),
    "the numbers above {k}": ("[n for n in x if n > {k}]", "[n for n in x if n < {k}]"),
    "the numbers below {k}": ("[n for n in x if n < {k}]", "[n for n in x if n > {k}]"),
}
TOLD = {"Sum of": "sum", "Largest of": "max", "Smallest of": "min", "Length of": "len"}
NUMBERS = range(2, 9)
SAME = {("the numbers above {k}", "Largest of"), ("the numbers below {k}", "Smallest of")}  # as of all numbers
TASK = 'test = "python3 check.py"\nreport = "exit"\nseconds = 20\npackages = []\nprotected = ["check.py"]\n'
CHECK = """from lists import {name}

for x, right in {cases}:
    found = {name}(x)
    assert found == right, f"{name}({{x}}) is {{found}} and should be {{right}}"
"""


def source(name, about, chosen, tells):
    return f'def {name}(x):\n    """{about}"""\n    return {tells}({chosen})\n'


def wrong_line(draw, choice, k, told):
    """The function with one line wrong, as (chosen, tells)."""
    right, other = CHOICES[choice]
    kind = draw.choice(["number", "other", "told"])
    if kind == "number":
        return right.format(k=k + draw.choice([-1, 1])), TOLD[told]
    if kind == "other":
        return other.format(k=k), TOLD[told]
    return right.format(k=k), draw.choice([tells for tells in TOLD.values() if tells != TOLD[told]])


def cases(draw, right, wrong, n):
    """n lists with what the function returns, of which the first shows the mistake; None where none does."""
    of = {}
    exec(right, of)
    mend = of["f"]
    exec(wrong, of)
    found = []
    for _ in range(200):
        x = draw.sample(range(20), draw.randint(9, 12))
        try:
            said = mend(x)
        except ValueError:  # nothing has no largest number
            continue
        try:
            shown = of["f"](x) != said
        except ValueError:
            shown = True
        if found or shown:
            found.append((x, said))
        if len(found) == n:
            return found
    return None


def write_repository(folder, draw, function, others):
    """False where no list shows the mistake."""
    choice, k, told = function
    right, about = CHOICES[choice][0].format(k=k), f"{told} {choice.format(k=k)}."
    wrong = wrong_line(draw, choice, k, told)
    found = cases(draw, source("f", about, right, TOLD[told]), source("f", about, *wrong), 24)
    if found is None:
        return False
    names = draw.sample(["alpha", "beta", "gamma", "delta", "omega"], 3)
    texts = [
        source(name, f"{b} {a.format(k=n)}.", CHOICES[a][0].format(k=n), TOLD[b])
        for name, (a, n, b) in zip(names[1:], others)
    ]
    place, name = draw.randrange(3), names[0]
    before, after = (
        "\n\n".join([*texts[:place], source(name, about, *both), *texts[place:]])
        for both in (wrong, (right, TOLD[told]))
    )
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a/lists.py", "b/lists.py")
    files = {
        "task.toml": TASK,
        "statement.md": f"{name} in lists.py is wrong: {name}({found[0][0]}) should be {found[0][1]}. See check.py.\n",
        "repository/lists.py": before,
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
    functions = [(a, k, b) for a, k, b in itertools.product(CHOICES, NUMBERS, TOLD) if (a, b) not in SAME]
    draw.shuffle(functions)
    made = 0
    for function in functions:
        others = draw.sample([one for one in functions if one != function], 2)
        made += made < n and write_repository(Path(out) / f"lists-{made:03d}", draw, function, others)
    print(f"{made} repositories in {out}")


if __name__ == "__main__":
    main(sys.argv[1])
