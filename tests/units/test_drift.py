"""What the chat template would write now against the tokens that were written: found, named, and answered by
task.env.drift. The template is Qwen3's own."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import lru_cache
from pathlib import Path

import httpx
import numpy as np
import pytest

from kits import vision
from kits.chat import Engine, chat, tokenizer
from kits.engine import engine, plain_logprobs, tiny
from rondel.core.errors import EnvError
from rondel.core.types import Drift, Group, Score, Task
from rondel.generate.drift import drift_kind, first_difference
from rondel.generate.envs.episode import EpisodeState, assign_parents, episode_of, share_scores
from rondel.generate.envs.gateway.env import Gateway
from rondel.generate.envs.tools import Tools

QWEN3 = Path(__file__).parents[1] / "kits/templates/qwen3.jinja"
THOUGHT = "<think>\nthree and four\n</think>\n\n"
USERS = ["what is three plus four?", "look again", "and again"]
TASK = Task("t/1", "chat", {"prompt": USERS[0]})


@lru_cache
def qwen3():
    """The test kit's byte-level BPE with the marks of Qwen3, which are no special tokens there either."""
    made = type(tokenizer())(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    made.chat_template = QWEN3.read_text()
    return made


def said(*texts):
    tok = qwen3()
    return Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in texts))


def served(messages, tools=None):
    """What a server sends for these messages, by transformers alone."""
    return qwen3().apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


class Talks:
    """Asks three times, and holds on to the trajectory that it began with."""

    def __init__(self, users=USERS):
        self.users = users

    async def run(self, task, talk):
        trajectory = talk.trajectory
        for user in self.users:
            talk.give([{"role": "user", "content": user}])
            await talk.reply()
        return trajectory


def play(env, answers, **state):
    policy = answers if hasattr(answers, "generate") else said(*answers)
    talk = chat(qwen3(), policy, episode=EpisodeState(**state))

    async def episode():
        return await talk.episode.finish(await episode_of(env, TASK, talk))

    return asyncio.run(episode()), policy


def test_a_thought_that_the_template_drops_is_found_where_it_stands_and_changes_nothing():
    answers = [THOUGHT + "seven", THOUGHT + "eight", "nine"]
    [kept], policy = play(Talks(), answers)
    opening = served([{"role": "user", "content": USERS[0]}])
    assert kept.drift == Drift("thought", len(opening), 1)
    messages = [{"role": "user", "content": USERS[0]}]
    for user, answer in zip(USERS[1:], answers):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
    assert first_difference(policy.requests[2].tokens, served(messages)) == len(opening)
    tok = qwen3()  # to the letter what was said, between what was given
    text = "".join(
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>{'' if answer == 'nine' else chr(10)}"
        for user, answer in zip(USERS, answers)
    )
    assert kept.tokens == tok.encode(text, add_special_tokens=False)
    group = Group(0, TASK, [kept], 0)
    assert group.count_episodes() == {"drift_thought": 1}
    [same], _ = play(Talks(USERS[:2]), ["seven", THOUGHT + "eight"])
    assert same.drift is None, "nothing was thought before the last question"


def test_branch_goes_on_from_what_a_server_would_send():
    answers = [THOUGHT + "seven", THOUGHT + "eight", "nine"]
    found, policy = play(Talks(), answers, drift="branch")
    messages = []
    for user, answer, request in zip(USERS, answers, policy.requests, strict=True):
        messages.append({"role": "user", "content": user})
        assert request.tokens == served(messages)
        messages.append({"role": "assistant", "content": answer})
    last, *closed = assign_parents(found)
    last.score = Score(0.5)
    share_scores([last, *closed])
    assert [t.parent for t in closed] == [0, 0] and {t.reward for t in closed} == {0.5}
    assert [t.drift and t.drift.kind for t in found] == [None, "thought", "thought"]
    assert sum(t.written for t in found) == sum(len(turn) for turn in policy.turns), "every token once"
    assert last.text == "\n".join(answers), "the reward reads the whole episode"
    assert Group(0, TASK, [last, *closed], 0).count_episodes() == {"drift_thought": 1}


def test_refuse_names_the_difference():
    with pytest.raises(EnvError, match=r"drift \(thought\): from token .*<think>.*task.env.drift = 'branch'"):
        play(Talks(), [THOUGHT + "seven", "eight"], drift="refuse")
    [fine], _ = play(Talks(USERS[:2]), ["seven", "eight"], drift="refuse")
    assert fine.drift is None


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ('{"name": "add", "arguments": {"a": 3, "b": 4}}', None),
        ('{"arguments": {"a": 3, "b": 4}, "name": "add"}', "tool_call"),
        ('{"name":"add", "arguments": {"a": 3, "b": 4}}', "whitespace"),
    ],
)
def test_calls_that_the_template_writes_otherwise(call, kind):
    """Thoughts stay while tools answer: only a user's message makes Qwen3 drop them."""
    answers = [f"{THOUGHT}<tool_call>\n{call}\n</tool_call>", THOUGHT + "seven"]
    [kept], policy = play(Tools([add]), answers)
    assert (kept.drift and kept.drift.kind) == kind
    messages = [
        {"role": "user", "content": USERS[0]},
        {"role": "assistant", "content": THOUGHT, "tool_calls": [{"type": "function", "function": json.loads(call)}]},
        {"role": "tool", "content": "7"},
    ]
    schema = [tool.schema for tool in Tools([add]).shared.values()]
    assert (policy.requests[1].tokens == served(messages, schema)) == (kind is None)


def test_the_same_text_in_other_tokens():
    tok = qwen3()
    letters = [token for letter in "seven" for token in tok.encode(letter, add_special_tokens=False)]
    assert letters != tok.encode("seven", add_special_tokens=False)
    policy = said("", "eight")
    policy.turns[0] = [*letters, tok.eos_token_id]
    [kept], _ = play(Talks(USERS[:2]), policy)
    assert kept.drift == Drift("tokenization", len(served([{"role": "user", "content": USERS[0]}])), 1)
    assert drift_kind("a b", "a c", 2, None) == "other"


@pytest.mark.slow
def test_what_is_trained_has_the_logprobs_of_the_context_that_a_server_would_send():
    """Random weights write what no tokenizer would: recorded = recomputed on the prompt that is rendered anew."""
    tok = qwen3()
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = tiny("llama", vocab_size=len(tok), max_position_embeddings=1024, **sizes)
    built, asked, texts = engine(model), [], []

    class Policy:
        async def generate(self, request):
            asked.append(request.tokens)
            done = await built.generate(request)
            done.text = None  # of the random model's own tokenizer
            texts.append(tok.decode(list(done.tokens), skip_special_tokens=True))
            return done

    found, _ = play(Talks(), Policy(), drift="branch")
    messages = []
    for user, tokens, text in zip(USERS, asked, texts, strict=True):
        messages.append({"role": "user", "content": user})
        assert tokens == served(messages)
        messages.append({"role": "assistant", "content": text})
    assert len(found) == 3 and sum(t.written for t in found) >= 3
    for t in found:
        own = plain_logprobs(model, list(t.tokens))
        assert max(abs(own[i - 1] - t.logprobs[i]) for i, wrote in enumerate(t.mask) if wrote) < 1e-4
    [kept], _ = play(Talks(), Policy())
    ours = [m for user, text in zip(USERS, texts[3:]) for m in (user_of(user), said_by_policy(text))][:-1]
    assert kept.drift is not None and kept.drift.at == first_difference(asked[-1], served(ours))


@pytest.mark.slow
def test_an_agent_behind_the_gateway_is_answered_on_what_is_rendered():
    """The branch that its harness could have made itself: rendered whole, with the score of the first."""
    answers = [THOUGHT + "seven", THOUGHT + "eight", "nine"]

    async def agent(task, base_url, api_key):
        messages = []
        async with httpx.AsyncClient(base_url=base_url, headers={"authorization": f"Bearer {api_key}"}) as client:
            for user in USERS:
                messages.append({"role": "user", "content": user})
                asked = await client.post("/v1/chat/completions", json={"model": "policy", "messages": messages})
                if asked.status_code != 200:
                    raise RuntimeError(asked.text)
                messages.append(asked.json()["choices"][0]["message"])
        return 1.0

    found, policy = play(Gateway(agent), answers, drift="branch")
    assert [r.tokens for r in policy.requests] == [
        served([m for u, a in zip(USERS[:n], answers) for m in (user_of(u), said_by_policy(a))] + [user_of(USERS[n])])
        for n in range(3)
    ]
    assert [t.drift and t.drift.kind for t in found] == ["thought", "thought", None]
    [kept], _ = play(Gateway(agent), answers)
    assert kept.drift.kind == "thought" and kept.written == sum(t.written for t in found)
    with pytest.raises(EnvError, match=r"drift \(thought\)"):
        play(Gateway(agent), answers, drift="refuse")


def user_of(text):
    return {"role": "user", "content": text}


def said_by_policy(text):
    return {"role": "assistant", "content": text}


class Shows:
    """Three questions, the first two with a picture of another size each."""

    def __init__(self):
        rng = np.random.default_rng(0)
        pictures = [rng.integers(0, 256, (28 * n, 56, 3), dtype=np.uint8) for n in (2, 4)]
        self.asked = [
            [{"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "3 + 4"}]}]
            for shown in pictures
        ] + [[{"role": "user", "content": "7 - 2"}]]

    async def run(self, task, talk):
        for messages in self.asked:
            talk.give(messages)
            await talk.reply()
        return talk.trajectory


@pytest.mark.parametrize("policy", ["keep", "branch"])
def test_a_conversation_with_images_is_compared_too(policy):
    """A template that drops what stands before = in earlier turns: found where it stands, behind images of several
    tokens; a branch is what the template writes, with its images."""
    seer = vision.model()
    tok = copy.deepcopy(seer.tokenizer)
    plain = "{{ m['content'] }}{% else %}"
    dropped = "{{ m['content'] if m['role'] == 'user' or loop.last else m['content'].split('=')[-1] }}{% else %}"
    assert plain in tok.chat_template
    tok.chat_template = tok.chat_template.replace(plain, dropped)
    answers = ["7", "3 = 7", "5"]
    engine = Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in answers))
    env, talk = Shows(), chat(tok, engine, sight=seer.sight, episode=EpisodeState(drift=policy))

    async def episode():
        return await talk.episode.finish(await episode_of(env, TASK, talk))

    last, *closed = asyncio.run(episode())
    said = [m for asked, text in zip(env.asked, answers) for m in (*asked, {"role": "assistant", "content": text})]
    fresh = chat(tok, engine, sight=seer.sight)
    fresh.give(said[:5])
    wanted, written = fresh.trajectory, engine.requests[2].tokens
    first = closed[0] if closed else last
    media = fresh.trajectory.media
    assert len(media) == 2 and all(place.image.tokens > 1 for place in media)
    if policy == "keep":
        assert not closed and last.drift.turn == 2
        assert last.drift.at == first_difference(written, wanted.tokens) > media[1].end
        return
    assert [t.drift and t.drift.kind for t in (last, first)] == [None, "other"]
    assert written == wanted.tokens and [(p.start, p.image) for p in engine.requests[2].media] == [
        (p.start, p.image) for p in media
    ]
