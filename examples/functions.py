"""Functions of a list in one line, each behind conversations in which such were written: `data = { kind = "functions:functions" }`.

What is asked for is one of seven choices of numbers, with a number of its own, and one of five things to tell of them. The
reward `code` runs what the policy writes on lists that it has not seen.
"""

import itertools
import random

CHOICES = {
    "the first {k} numbers of the list x": "x[:{k}]",
    "the last {k} numbers of the list x": "x[-{k}:]",
    "the list x without its first {k} numbers": "x[{k}:]",
    "the list x without its last {k} numbers": "x[:-{k}]",
    "the numbers of the list x that are larger than {k}": "[n for n in x if n > {k}]",
    "the numbers of the list x that are smaller than {k}": "[n for n in x if n < {k}]",
    "the numbers of the list x that {k} divides": "[n for n in x if n % {k} == 0]",
}
TOLD = {
    "the sum of {}": "sum({})",
    "the largest of {}": "max({})",
    "how many there are of {}": "len({})",
    "{}, sorted": "sorted({})",
    "{}, backwards": "{}[::-1]",
}
SHOTS = {
    "the smallest of the first 7 numbers of the list x": "min(x[:7])",
    "the sum of the last 8 numbers of the list x": "sum(x[-8:])",
    "the numbers of the list x that are smaller than 7, sorted": "sorted([n for n in x if n < 7])",
}


LARGEST, LARGER = "the largest of {}", "the numbers of the list x that are larger than {k}"


def conversation(asked):
    for question, code in SHOTS.items():
        yield "user", f"Write f(x) that returns {question}."
        yield "assistant", f"def f(x): return {code}"
    yield "user", f"Write f(x) that returns {asked}."


def lists_for(chosen, draw, n):
    """n lists of which something is chosen: nothing has no largest number."""
    while n:
        x = draw.sample(range(1, 20), draw.randint(8, 10))
        if eval(chosen, {"x": x}):
            yield x
            n -= 1


def functions(seed=0):
    """The tasks, as rows: all 204, each another function."""
    draw = random.Random(seed)
    for choice, told, k in itertools.product(CHOICES, TOLD, range(2, 8)):
        if (choice, told) == (LARGER, LARGEST):  # that of all numbers
            continue
        asked, chosen = told.format(choice.format(k=k)), CHOICES[choice].format(k=k)
        code = f"def f(x): return {TOLD[told].format(chosen)}"
        made = {}
        exec(code, made)
        asserts = [f"assert f({x}) == {made['f'](x)}" for x in lists_for(chosen, draw, 12)]
        yield {
            "messages": [{"role": role, "content": text} for role, text in conversation(asked)],
            "answer": code,
            "tests": ["\n".join(asserts)],
            "entry_point": "f",
        }
