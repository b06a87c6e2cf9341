"""Three small tasks over three digits: `data = { kind = "three_digits:reverse", n = 400 }`.

A model of 0.3 million parameters learns any of them in a minute: recipes/pipelines/specialists.toml trains a
specialist for each, and then one student from all three.
"""

import itertools
import random


def _numbers(n, seed):
    """n different numbers of three digits, none of them a zero."""
    return random.Random(seed).sample(["".join(digits) for digits in itertools.product("123456789", repeat=3)], n)


def reverse(n=400, seed=0):
    """Backwards: "r472=" -> "274"."""
    for number in _numbers(n, seed):
        yield {"prompt": f"r{number}=", "answer": number[::-1]}


def ascend(n=400, seed=0):
    """In rising order: "s472=" -> "247"."""
    for number in _numbers(n, seed):
        yield {"prompt": f"s{number}=", "answer": "".join(sorted(number))}


def largest(n=400, seed=0):
    """The largest of them: "m472=" -> "7"."""
    for number in _numbers(n, seed):
        yield {"prompt": f"m{number}=", "answer": max(number)}
