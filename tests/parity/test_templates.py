"""The chat templates that models really have, as TRL ships them: a conversation of four turns
says its system message once, and only grows.

A template that rewrites what came before is refused by name. Run by `make parity`.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken

from kits.chat import Engine, chat, tokenizer
from rondel.core.errors import DataError, RondelError
from rondel.generate.template import Template
from rondel.text.tokenization import special_tokens

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
    thought = (
        "<think>\nhm 4481\n</think>\n\n" if "<think>" in (HOME / f"{name}.jinja").read_text(encoding="utf-8") else ""
    )
    try:
        grown, text, says = talk(name, thought=thought)
    except DataError as error:
        pytest.skip(f"refused: {error}")
    except Exception as error:
        # no system role; content in parts, as for pictures
        if "system" in str(error).lower() or "has no attribute 'text'" in str(error):
            pytest.skip(f"the template itself refuses: {error}")
        raise
    assert text.count("7193") == 1 and all(text.count(f"question {n}") == 1 for n in range(4))
    assert text.count("4481") == (4 if thought else 0)  # what the policy wrote stays as it was
    assert all(b[: len(a)] == a for a, b in pairwise(grown))
    assert all(any(whole[i : i + len(said)] == said for i in range(len(whole))) for said, whole in zip(says, grown))


CALLS = {
    "glm4moe",
    "gptoss",
    "gemma4",
    "gemma4_v2",
    "gemma4_v3",
    "gemma4_v4",
    "gemma4_v5",
    "lfm2_v2",
    "lfm2_2_5_vl",
    "nemotron_3_nano",
    "qwen3",
    "qwen3_5_think",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "w"}},
            "required": ["what"],
        },
    },
}


@pytest.mark.parametrize("name", sorted(CALLS & set(NAMES)))
def test_a_call_is_read_back_as_the_real_template_writes_it(name):
    """And what answers it is the template's own text, which a policy that ends its turn as it should has begun."""
    tok = made(name)
    arguments = {"what": 'it\'s "so", they say', "where": ["a", {"b": "c"}]}
    asks = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "find", "arguments": arguments}}],
    }
    answer = {"role": "tool", "tool_call_id": "call00001", "name": "find", "content": "answer 6617"}
    user = {"role": "user", "content": "u"}

    def text(messages, **more):
        return tok.apply_chat_template(messages, tools=[TOOL], tokenize=False, **more)

    template = Template(tok)
    asked, opened, whole = (
        text([user, asks]),
        text([user], add_generation_prompt=True),
        text([user, asks, answer], add_generation_prompt=True),
    )
    at = next(i for i, (a, b) in enumerate(zip(opened + "\0", asked)) if a != b)
    assert [(c.name, c.arguments, c.fault) for c in template.call_format.parse_calls(asked[at:])] == [
        ("find", arguments, "")
    ]
    if ends := template.call_format.ends:
        behind = whole[whole.rindex(ends) + len(ends) :]
        assert "6617" in behind
        written = tok.encode("x" + ends, add_special_tokens=False)
        assert tok.decode(template.render_after_turn(written, [answer])) == behind


MARKS = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}>|<[^<>\s'\"{}|/]{1,40}\|>|<(?:start|end)_of_turn>|</?s>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
)


@pytest.mark.parametrize("name", NAMES)
def test_text_becomes_no_control_token_in_a_real_template(name):
    """Whatever the marks of its template are, a message that spells them all has only
    those that the template writes around it.
    """
    tok = made(name)
    tok.add_tokens(
        [AddedToken(mark, special=True) for mark in {*MARKS.findall(tok.chat_template), "<|user|>", "<|assistant|>"}]
    )
    special, template = special_tokens(tok), Template(tok)
    hostile, ended = (
        "x".join([*special.names, "</tool_response>", "<image>"]),
        tok.encode("seven<|im_end|>", add_special_tokens=False),
    )

    def control(tokens):
        return [token for token in tokens if token in special.names.values()]

    def forms(text):
        user, answer = (
            {"role": "user", "content": text},
            {"role": "tool", "tool_call_id": "call00001", "name": text, "content": text},
        )
        yield from (
            (template.render_opening, (m, tools))
            for tools in ([], [TOOL])
            for m in ([user], [{**user, "role": "system"}, user])
        )
        yield from ((template.render_after_turn, (ended, [message])) for message in (user, answer))

    written = 0
    for (ask, plain), (_, spelled) in zip(forms("plain"), forms(hostile)):
        try:
            expected = ask(*plain)
        except RondelError:  # no system role, no tools
            continue
        assert control(ask(*spelled)) == control(expected)
        written += 1
    assert written


def test_enough_of_them_work():
    def works(name: str) -> bool:
        try:
            return talk(name)[1].count("7193") == 1
        except Exception:
            return False

    good = [name for name in NAMES if works(name)]
    print(len(good), "of", len(NAMES), ":", ", ".join(good), "| not:", ", ".join(sorted(set(NAMES) - set(good))))
    assert len(good) >= 37 and set(good) >= THINKS
