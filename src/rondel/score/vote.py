"""The answer of a text as a vote: what majority@k counts as one answer."""

from __future__ import annotations

from rondel.score.answer_text import extract_answer, plain_number
from rondel.score.number import last_number

LONGEST = 200  # characters of a text that may be an answer as a whole


def vote_of(text: str) -> str | None:
    r"""The box or <answer> of a text, else its last number, else all of it where it is short; None without an answer.

    Numbers of one value are one vote, and so are texts that differ in case or white space:
    `vote_of(r"so \boxed{1,000}")` and `vote_of("it is 1000.0")` are both "1000".
    """
    said = extract_answer(text)
    boxed = said.startswith("\\boxed{")
    marked = boxed or ("<answer>" in text and "</answer>" in text)
    inside = said[len("\\boxed{") : -1] if boxed else said
    number = plain_number(inside) if marked else last_number(said)
    if number is not None:
        return str(number)
    plain = " ".join(inside.split()).casefold()
    return plain if plain and (marked or len(plain) <= LONGEST) else None
