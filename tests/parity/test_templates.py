"""The chat templates that models really have, as TRL ships them: a conversation of four turns says its system message once, and only grows.

A template that rewrites what came before is refused by name. Run by `make parity`.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from units.chat_kit import Engine, chat, tokenizer

from rondel.words.errors import DataError

trl = pytest.importorskip("trl", reason="make parity installs it")
HOME = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in HOME.glob("*.jinja") if not path.stem.endswith("_training"))
SYSTEM = "be brief 7193"
THINKS = {"qwen3"}  # drop the thoughts of earlier turns


def made(name: str):
    tok = tokenizer.__wrapped__("chatml")
    tok.chat_template = (HOME / f"{name}.jinja").read_text(encoding="utf-8")
    tok.bos_token, tok.pad_token = "<|endoftext|>", "<|endoftext|>"
    return tok


def talk(name: str, turns: int = 4, thought: str = ""):
    """-> (tokens after each reply, the whole as text)."""
    tok = made(name)
    says = [[*tok.encode(f"{thought}answer {n}", add_special_tokens=False), tok.eos_token_id] for n in range(turns)]
    conversation = chat(tok, Engine(*says))
    grown = []

    async def go() -> None:
        for n in range(turns):
            given = [{"role": "user", "content": f"question {n}"}]
            conversation.give([{"role": "system", "content": SYSTEM}, *given] if n == 0 else given)
            await conversation.reply()
            grown.append(list(conversation.trajectory.tokens))

    asyncio.run(go())
    return grown, tok.decode(grown[-1]), says


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_says_its_preamble_once_and_only_grows(name):
    thought = "<think>\nhm 4481\n</think>\n\n" if "<think>" in (HOME / f"{name}.jinja").read_text(encoding="utf-8") else ""
    try:
        grown, text, says = talk(name, thought=thought)
    except DataError as error:
        pytest.skip(f"refused: {error}")
    except Exception as error:
        if "system" in str(error).lower() or "has no attribute 'text'" in str(error):  # no system role; content in parts, as for pictures
            pytest.skip(f"the template itself refuses: {error}")
        raise
    assert text.count("7193") == 1 and all(text.count(f"question {n}") == 1 for n in range(4))
    assert text.count("4481") == (4 if thought else 0)  # what the policy wrote stays as it was
    assert all(b[: len(a)] == a for a, b in pairwise(grown))
    assert all(any(whole[i : i + len(said)] == said for i in range(len(whole))) for said, whole in zip(says, grown))


def test_enough_of_them_work():
    def works(name: str) -> bool:
        try:
            return talk(name)[1].count("7193") == 1
        except Exception:
            return False

    good = [name for name in NAMES if works(name)]
    print(len(good), "of", len(NAMES), ":", ", ".join(good), "| not:", ", ".join(sorted(set(NAMES) - set(good))))
    assert len(good) >= 37 and set(good) >= THINKS
