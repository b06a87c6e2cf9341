"""The search environment: what is shown, what is masked, how it is called; and the reward of a cited answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kits.chat import Engine, chat, tokenizer
from rondel.checks.score_check import check_scores
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Sampling, Task, Trajectory, Turn
from rondel.generate.corpus.passages import Passage
from rondel.score import build_reward
from rondel.score.citation import normalise, split_answer
from rondel.score.pool import RewardPool
from rondel.score.preflight import check_reward

TASK = Task(
    "t/1",
    "search",
    {"prompt": "Which release was the first to have m.prod?", "answer": "3.8", "passages": [1], "queries": ["m.prod"]},
)
OTHER = Task("t/2", "search", {"prompt": "And m.sum?", "answer": "2.7", "passages": [0], "queries": ["m.sum"]})
PASSAGES = [
    Passage("m", "m.sum(x)", "m.sum(x) adds. New in version 2.7."),
    Passage("m", "m.prod(x)", "m.prod(x) multiplies " + "very " * 60 + "well. New in version 3.8."),
    Passage("n", "n.gap", "m.prod is not in version 3.7 but in 3.8."),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    pytest.importorskip("bm25s")
    from rondel.generate.corpus.store import open_corpus, write_corpus

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, PASSAGES, [])
    return open_corpus(str(folder))


def play(env, *says, task=TASK, max_tokens=200):
    tok = tokenizer("chatml")
    engine = Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in says))
    found = asyncio.run(env.run(task, chat(tok, engine, max_context=4000, max_tokens=max_tokens)))
    return found, [tok.decode(r.tokens) for r in engine.requests], engine


def lines(corpus, **more):
    from rondel.generate.envs.search import Search

    return Search(corpus, calls="lines", turns=4, **{"results": 2, "snippet": 6, **more})


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# -- the environment -------------------------------------------------------------------------------


def test_every_token_of_a_tool_has_mask_0_and_every_token_of_the_policy_mask_1(corpus):
    says = ("search: m.prod", "open: 1", "find: 1 new in", "3.8 [1]")
    found, asked, engine = play(lines(corpus), *says)
    tok = tokenizer("chatml")
    written = [t for t, mine in zip(found.tokens, found.mask) if mine]
    assert written == [t for turn in engine.turns for t in turn]
    given = tok.decode([t for t, mine in zip(found.tokens, found.mask) if not mine])
    for shown in ("[1] m: m.prod(x)", "very very", "before and behind: [0]", "New in version 3.8."):
        assert shown in given
    for turn in found.conversation:
        assert {*found.mask[turn.start : turn.end]} == {turn.written} or not turn.written
    assert not any(found.logprobs[i] for i in range(len(found.tokens)) if not found.mask[i])
    assert "search:" not in asked[0], "lines mode shows no description of tools"


def test_the_same_tools_are_called_as_the_template_writes_calls(corpus):
    from rondel.generate.corpus.tools import CorpusTools
    from rondel.generate.envs.search import Search
    from rondel.generate.envs.tools import Tools

    for env in (Search(corpus, results=2), Tools([CorpusTools(corpus)])):
        found, asked, _ = play(env, call("search", query="m.prod"), call("open", id=1), "3.8 [1]")
        assert all(f'"name": "{name}"' in asked[0] for name in ("search", "open", "find"))
        assert "[1] m: m.prod(x)" in asked[1] and "very very" in asked[2]
        assert build_reward("citation")(found, TASK).value == 1.0


def test_what_a_tool_returns_is_cut_to_its_tokens(corpus):
    tok = tokenizer("chatml")
    whole = play(lines(corpus, output_tokens=4000), "open: 1", "3.8 [1]")[0]
    cut = play(lines(corpus, output_tokens=20), "open: 1", "3.8 [1]")[0]
    [long], [short] = ([t for t in one.conversation if t.role == "tool"] for one in (whole, cut))
    assert long.text.startswith(short.text.removesuffix(" ...")) and short.text.endswith(" ...")
    assert len(tok.encode(short.text.removesuffix(" ..."), add_special_tokens=False)) <= 20


@pytest.mark.parametrize("wrong", ["open: 99", "open: x", "find: -1 a", "open: ", "find: 1"])
def test_a_wrong_call_is_an_error_to_read(corpus, wrong):
    found, _, _ = play(lines(corpus), wrong, "3.8 [1]")
    [turn] = [t for t in found.conversation if t.role == "tool"]
    assert turn.text.startswith("error: ") or turn.text == "nothing found" or wrong == "find: 1"


def test_gold_searches_and_deserves_the_best_score(corpus):
    from rondel.generate.envs.demonstrations import GoldEpisode
    from rondel.generate.envs.search import Search

    for env in (lines(corpus, snippet=100), Search(corpus, results=2, snippet=100)):
        tok = tokenizer("chatml")
        shown = chat(tok, Engine(), max_context=4000, max_tokens=200)
        [found] = asyncio.run(GoldEpisode(env).run(TASK, shown))
        assert build_reward("citation")(found, TASK).parts == {"answer": 0.5, "citation": 0.5, "unread": 0.0}
        said = [t.text for t in found.conversation if t.written]
        assert said == list(env.gold(TASK))
        tokens = [t for text in said for t in [*tok.encode(text, add_special_tokens=False), tok.eos_token_id]]
        assert [t for t, mine in zip(found.tokens, found.mask) if mine] == tokens
        assert set(found.versions) == {-1, 0} and not any(found.logprobs)


def test_gold_opens_a_passage_that_the_searches_found_and_did_not_show(corpus):
    from rondel.generate.envs.search import Search

    assert lines(corpus, snippet=100).gold(TASK) == ["search: m.prod", "3.8 [1]"]
    assert lines(corpus).gold(TASK) == ["search: m.prod", "open: 1", "3.8 [1]"]
    assert Search(corpus, turns=4, results=2, snippet=6).gold(TASK)[1] == call("open", id=1)
    missed = replace(TASK, data=TASK.data | {"queries": ["n.gap"]})  # no number that a search did not show is opened
    assert lines(corpus, results=1).gold(missed) == ["search: n.gap", "3.8 [1]"]
    with pytest.raises(DataError, match="has no queries, passages"):
        lines(corpus).gold(Task("t", "search", {"prompt": "?", "answer": "3.8"}))


def check(env, *tasks):
    tok = tokenizer("chatml")
    with RewardPool("citation") as pool:
        parts = SimpleNamespace(
            env=env, pool=pool, sampling=Sampling(max_tokens=200), tasks=SimpleNamespace(train=list(tasks)),
            model_info=SimpleNamespace(tokenizer=tok, max_context=4000, sight=None),
            job=SimpleNamespace(task=SimpleNamespace(system=None)),
        )  # fmt: skip
        return {f.what: f for f in asyncio.run(check_scores(parts))}


@pytest.mark.slow
def test_rondel_check_plays_gold_with_the_searches_that_it_stands_on(corpus):
    found = check(lines(corpus), TASK, OTHER)
    assert [f.what for f in found.values() if not f.ok or f.warning] == []
    assert found["reward: gold"].message == "all 2 gold answers score the reward's maximum, 1"
    assert found["reward: failures"].message == "the reward answered all 6 calls"


@pytest.mark.slow
def test_rondel_check_warns_of_gold_that_cannot_reach_the_maximum(corpus):
    from rondel.generate.envs.search import Search

    blind = {"reward: gold": lines(corpus, results=1, snippet=1)}  # two turns: none is left to open what was found
    blind["reward: gold"].turns = 2
    unread = Task("u", "search", {"prompt": "?", "answer": "3.8", "passages": [1]})  # the answer alone is judged
    for found in (check(blind["reward: gold"], TASK, OTHER), check(Search(corpus), unread)):
        gold = found["reward: gold"]
        assert gold.ok and gold.warning and "less than the reward's maximum, 1" in gold.message and gold.remedy


# -- the reward ------------------------------------------------------------------------------------


def episode(last: str, *shown: str, role: str = "tool", written: bool = False) -> Trajectory:
    """A question, what tools showed, and a last reply."""
    made = Trajectory(text=last)
    made.conversation = [Turn("user", "?", 0, 0, False), Turn("assistant", "search: x", 0, 0, True)]
    made.conversation += [Turn(role, text, 0, 0, written) for text in shown]
    made.conversation.append(Turn("assistant", last, 0, 0, True))
    return made


GOLD = "[1] m: m.prod(x)\nNew in version 3.8."


@pytest.mark.parametrize(
    ("last", "shown", "answer", "citation", "unread"),
    [
        ("3.8 [1]", [GOLD], 0.5, 0.5, 0),
        ("Thinking.\nAnswer: `3.8`. [1]", [GOLD], 0.5, 0.5, 0),
        ("3.8", [GOLD], 0.5, 0, 0),  # no citation
        ("3.8 [1]", [], 0.5, 0, -0.25),  # never looked
        ("3.8 [1]", ["[2] n\nit is 3.8"], 0.5, 0, 0),  # the cited one was not shown
        ("3.8 [2]", ["[2] n\nit is 3.8"], 0.5, 0, 0),  # shown, and not the one that says so
        ("3.8 [1] [2]", [GOLD, "[2] n\nit is 3.8"], 0.5, 0, 0),  # all that was seen
        ("3.8 [999]", [GOLD], 0.5, 0, 0),  # there is none
        ("3.8 [1]", ["[1] m: m.prod(x)\nmultiplies"], 0.5, 0, -0.25),  # the part with the answer was not shown
        ("3.8 [1]", ["[1] m\nversion 13.85"], 0.5, 0, -0.25),  # only within another number
        ("3.8 [1]", ["error: [1] m\nversion 3.8"], 0.5, 0, -0.25),  # an error repeats the policy
        ("2.7 [1]", [GOLD], 0, 0, 0),
        ("3.8 or 2.7 [1]", [GOLD], 0, 0, 0),
        ("", [GOLD], 0, 0, 0),
    ],
)
def test_what_an_answer_is_worth(last, shown, answer, citation, unread):
    score = build_reward("citation")(episode(last, *shown), TASK)
    assert score.parts == {"answer": answer, "citation": citation, "unread": unread}
    assert score.value == answer + citation + unread


def test_a_passage_that_the_policy_wrote_was_not_shown():
    for role, written in (("assistant", True), ("tool", True), ("user", False)):
        score = build_reward("citation")(episode("3.8 [1]", GOLD, role=role, written=written), TASK)
        assert score.parts["citation"] == 0 and score.parts["unread"] < 0


def test_a_task_without_passages_takes_any_that_was_shown_with_the_answer():
    task = Task("t", "search", {"prompt": "?", "answer": ["3.8", "three point eight"]})
    assert build_reward("citation")(episode("Three point eight [2]", "[2] n\nthree point eight"), task).value == 1.0


def test_reading_of_a_last_line():
    assert split_answer("x\n The answer is: 'ENOENT' [12].\n\n") == ("enoent", [12])
    assert normalise(" “Some  Words”. ") == "some words"


@pytest.mark.parametrize("weights", [{"answer": 0}, {"citation": -1}, {"unread": 0.1}, {"unread": -0.5}])
def test_weights_that_pay_for_the_wrong_are_refused(weights):
    with pytest.raises(ConfigError, match="reward 'citation'"):
        build_reward({"kind": "citation", **weights})


@pytest.mark.slow
def test_the_preflight_holds():
    other = Task("t/2", "search", {"prompt": "?", "answer": "ENOENT", "passages": [7]})
    with RewardPool("citation") as pool:
        found = asyncio.run(check_reward(pool, [TASK, other]))
    assert [(f.what, f.message) for f in found if not f.ok] == []


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_supervised_phase_plays_gold_and_the_policy_goes_on_from_there(tmp_path):
    """The recipe, smaller: each supervised episode is the gold one, with the tool's tokens masked, and each sampled
    one is scored in parts; behind two others that are shown, whose tokens are masked, too."""
    pytest.importorskip("bm25s")
    from pathlib import Path

    from rondel.assemble import train
    from rondel.cli.search_tasks import CorpusSource, make_corpus
    from rondel.core.config.job import Job
    from rondel.runtime.journal.store import read_step

    folder = tmp_path / "tables"
    make_corpus(folder, CorpusSource.tables, 60)
    smaller = {
        "task.env.corpus": str(folder), "task.data.corpus": str(folder), "task.data.holdout": 10, "loop.steps": 1,
        "loop.warmup.steps": 1, "loop.warmup.groups_per_step": 4, "loop.groups_per_step": 2, "algo.group_size": 2,
        "model.path": {"random": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 1024}, "task.data.where": {},
        "run.folder": str(tmp_path / "run"), "run.sinks": [], "place.threads": 1, "task.eval.n": 2,
    }  # fmt: skip
    train(Job.read(Path(__file__).parents[2] / "recipes" / "search.toml", smaller), quiet=True)
    shown, sampled = (read_step(tmp_path / "run", step) for step in (1, 2))
    assert len(shown) == 4 and len(sampled) == 4
    for row in shown:
        ask, answer = row["text"].split("\n")
        assert ask.startswith("search: ") and answer.endswith("]")
        assert sum(row["mask"]) == len(ask) + len(answer) + 2, "the letters of both replies, and their ends"
    assert all({*row["reward_parts"]} == {"answer", "citation", "unread"} for row in sampled)
