"""task.env.shots: what is shown before every prompt is what the same messages would be, is held out of training, and
counts as nothing that the episode did."""

from __future__ import annotations

import asyncio
from contextlib import closing
from types import SimpleNamespace

import pytest

from kits.chat import Engine, chat, tokenizer
from kits.runs import run, tiny
from rondel.assemble import shots as module
from rondel.assemble.components import build
from rondel.assemble.recipe_parts import load_run_tasks, set_shots_aside
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Sampling, Task
from rondel.driver.rollouts import rollouts_of
from rondel.generate.corpus.passages import Passage
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import TaskSet
from rondel.generate.envs.tools import Tools
from rondel.runtime.journal.store import read_step
from rondel.score.citation import Citation

TOK = tokenizer("chatml")
PASSAGES = [Passage("m", f"m.f{i}", f"m.f{i} has the code 4{i}.") for i in range(6)]
QUESTIONS = [
    Task(f"t/{i}", "search", {"prompt": f"code of m.f{i}?", "answer": f"4{i}", "passages": [i], "queries": [f"m.f{i}"]})
    for i in range(6)
]


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    pytest.importorskip("bm25s")
    from rondel.generate.corpus.store import open_corpus, write_corpus
    from rondel.generate.envs.search import Search

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, PASSAGES, [])
    return Search(open_corpus(str(folder)), calls="lines", turns=3, results=1)


def played(monkeypatch, env, tasks, suffix="", **sampling):
    """What `play_shots` makes of them, with a real tokenizer and without a recipe."""
    monkeypatch.setattr(module, "tokenizer_of", lambda path: (TOK, 4096, None))
    job = SimpleNamespace(model=SimpleNamespace(path=""), task=SimpleNamespace(env_kind="mine", suffix=suffix))
    sampling = Sampling(**{"max_tokens": 64, **sampling})
    return module.play_shots(job, TaskSet(tasks, [], shots=tuple(tasks)), env, sampling)


def encoded(*texts):
    return [[*TOK.encode(text, add_special_tokens=False), TOK.eos_token_id] for text in texts]


def test_a_shot_is_the_episode_that_gold_plays_and_stands_before_the_prompt(monkeypatch, search):
    shots = played(monkeypatch, search, QUESTIONS[:2])
    assert shots == {
        "": [
            message
            for i in range(2)
            for message in (
                {"role": "user", "content": f"code of m.f{i}?"},
                {"role": "assistant", "content": f"search: m.f{i}"},
                {"role": "tool", "name": "search", "content": f"[{i}] m: m.f{i}\nm.f{i} has the code 4{i}."},
                {"role": "assistant", "content": f"4{i} [{i}]"},
            )
        ]
    }
    by_hand = Task(
        "t/x", "search", {**QUESTIONS[5].data, "messages": [*shots[""], {"role": "user", "content": "code of m.f5?"}]}
    )
    says = encoded("search: m.f5", "45 [5]")
    shown = asyncio.run(search.run(QUESTIONS[5], chat(TOK, Engine(*says), episode=EpisodeState(shots=shots))))
    written = asyncio.run(search.run(by_hand, chat(TOK, Engine(*says))))
    assert shown.tokens == written.tokens and list(shown.mask) == list(written.mask)
    assert sum(shown.mask) == sum(map(len, says))
    assert [turn.text for turn in shown.conversation] == [
        "code of m.f5?", "search: m.f5", "[5] m: m.f5\nm.f5 has the code 45.", "45 [5]",
    ]  # fmt: skip


def test_what_was_shown_is_no_reading_of_the_episode(monkeypatch, search):
    """An answer that a shot's passage supports, without a search: guessed, and cited from nowhere."""
    shots = played(monkeypatch, search, QUESTIONS[:2])
    task = Task("t/9", "search", {**QUESTIONS[0].data, "prompt": "code of m.f0, please?"})
    talk = chat(TOK, Engine(*encoded("40 [0]")), episode=EpisodeState(shots=shots))
    assert Citation()(asyncio.run(search.run(task, talk)), task).value == 0.25


def test_a_system_message_stays_in_front_and_is_no_part_of_a_shot(monkeypatch):
    tasks = [
        Task("t/0", "list", {"prompt": "2+2", "answer": "4"}),
        Task("t/1", "list", {"prompt": "1+2", "answer": "3"}),
    ]
    env = SingleTurn(system="Add.", suffix=" =")
    shots = played(monkeypatch, env, tasks[:1], suffix=" =")
    assert shots == {"": [{"role": "user", "content": "2+2 ="}, {"role": "assistant", "content": "4"}]}
    talk = chat(TOK, Engine(*encoded("3")), episode=EpisodeState(shots=shots))
    asyncio.run(env.run(tasks[1], talk))
    by_hand = chat(TOK, Engine())
    by_hand.give([{"role": "system", "content": "Add."}, *shots[""], {"role": "user", "content": "1+2 ="}])
    n = len(by_hand.trajectory.tokens)
    assert talk.trajectory.tokens[:n] == by_hand.trajectory.tokens and sum(talk.trajectory.mask[:n]) == 0


def test_a_fork_knows_the_messages_behind_its_tokens(monkeypatch, search):
    """What a branch of the conversation would send holds the shots, and every turn up to its mark."""
    shots = played(monkeypatch, search, QUESTIONS[:1])

    async def work():
        talk = chat(TOK, Engine(*encoded("a", "b")), episode=EpisodeState(shots=shots))
        talk.give([{"role": "user", "content": "one"}])
        await talk.reply()
        mark = talk.turn_mark
        talk.give([{"role": "user", "content": "two"}])
        await talk.reply()
        twin = talk.fork(mark)
        assert len(twin.sent) == len(shots[""]) + 2 and twin.sent == talk.sent[: len(twin.sent)]
        assert [turn.text for turn in twin.trajectory.conversation] == ["one", "a"]
        other = talk.beside("critic")
        other.give([{"role": "user", "content": "three"}])
        assert len(other.sent) == 1, "shots are the agent's who was shown playing"

    asyncio.run(work())


def test_shots_are_the_same_in_any_order_and_leave_training():
    tasks = [Task(f"t/{i}", "list", {"prompt": str(i)}) for i in range(20)]
    one = set_shots_aside(TaskSet(tasks, tasks, sources=((1.0, tasks[:10]), (2.0, tasks[10:]))), 3, 0)
    two = set_shots_aside(TaskSet(tasks[::-1], []), 3, 0)
    assert one.shots == two.shots and len(one.shots) == 3 and not set(map(id, one.shots)) & set(map(id, one.train))
    assert [task for _, own in one.sources for task in own] == one.train == one.held_out and [
        w for w, _ in one.sources
    ] == [1.0, 2.0]
    assert set_shots_aside(TaskSet(tasks, []), 3, 1).shots != one.shots
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        set_shots_aside(TaskSet(tasks, []), 20, 0)


def test_an_evaluation_shows_what_the_run_did_and_no_task_that_it_asks(tmp_path):
    ten = {"kind": "list", "rows": [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10)]}
    how = {"task.data": ten, "task.env": {"kind": "single_turn", "shots": 3}, "task.eval.every": 0}
    first = load_run_tasks(tiny(tmp_path, **how)).shots
    asked = {"kind": "list", "rows": [first[0].data]}
    job = tiny(tmp_path, **how, **{"task.eval.sets": {"mine": asked}})
    trained, measured = (load_run_tasks(job, trains).shots for trains in (True, False))
    assert [task.id for task in trained] == [task.id for task in measured] and len(trained) == 3
    assert first[0].data["prompt"] not in [task.data["prompt"] for task in trained]


def test_what_cannot_be_shown_is_said(monkeypatch, search):
    with pytest.raises(ConfigError, match="knows no replies to show"):
        played(monkeypatch, Tools([]), QUESTIONS[:1])
    with pytest.raises(ConfigError, match=r"t/0 do not fit into engine.sampling.max_tokens = 2"):
        played(monkeypatch, search, QUESTIONS[:1], max_tokens=2)

    class Broken:
        def gold(self, task):
            return ["a"]

        async def run(self, task, chat):
            raise KeyError("no such page")

    with pytest.raises(DataError, match=r"broke at t/0, played as gold: KeyError: 'no such page'"):
        played(monkeypatch, Broken(), QUESTIONS[:1])


@pytest.mark.slow
def test_a_run_shows_trains_and_measures(tmp_path):
    """The tiny recipe: every prompt begins with the same two sums, none of which is trained or held out."""
    changes = {"task.env": {"kind": "single_turn", "shots": 2}, "loop.steps": 1, "loop.warmup.steps": 1}
    job = tiny(tmp_path / "parts", **changes)
    tasks = load_run_tasks(job)
    assert len(tasks.shots) == 2
    with closing(build(job)) as parts:
        rollouts = rollouts_of(parts)
        prompts = []
        for task in (tasks.train[0], tasks.held_out[0]):
            talk = rollouts.open_chat(lambda turn: 0)
            talk.give(*parts.env.prompt(task))
            prompts.append(parts.model_info.tokenizer.decode(talk.trajectory.tokens))
    for task in tasks.shots:
        assert all(f"{task.data['prompt']}" in prompt for prompt in prompts)
    run(tmp_path / "run", **changes)
    trained = {row["task"] for step in (1, 2) for row in read_step(tmp_path / "run", step)}
    assert trained and not trained & {task.id for task in [*tasks.shots, *tasks.held_out]}
