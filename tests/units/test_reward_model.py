"""Reward models against transformers: a score does not depend on who is beside it,
nor on padding, which there is none of.
"""

import asyncio
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kits.chat import spaced_tokenizer
from kits.chat import tokenizer as chat_tokenizer
from kits.engine import tiny
from kits.forked_rewards import fork_reward_workers
from kits.reward_models import FAMILIES, saved
from rondel.algos.turn_advantages import StepGroups, TurnGae, Turns
from rondel.core.errors import ConfigError, RewardError
from rondel.core.types import Completion, Failed, Group, Sampling, Score, Task, Trajectory, Turn
from rondel.generate.envs.chat import TokenChat
from rondel.score import build_reward
from rondel.score.answer_text import asked_of, turns_of
from rondel.score.pool import RewardPool
from rondel.score.process import ProcessReward, steps_of
from rondel.text.tokenization import special_tokens
from rondel.train.pack import batch_of

TEMPLATE = "{question}\n{answer}"
TEXTS = ["7", "It is 8.", "x" * 90, "", "a\n\nb", "the sum of both is forty-two, or so", "é🎉"]


def task(question="What is 3 + 4?"):
    return Task("t/1", "single_turn", {"prompt": question, "answer": "7"})


def ids_of(reward, question, text):
    return reward.encode_conversation([{"role": "user", "content": question}], turns_of(Trajectory(text=text)))


def in_turns(tokenizer):
    """An episode in three turns of the policy's, with a tool and a user between: -> trajectory."""
    says = iter(["aa;\nbb;", "cc;dd;", "ee;ff;"])

    async def generate(request):
        text = next(says)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", text=text)

    async def play():
        talk = TokenChat(tokenizer, generate, sampling=Sampling(max_tokens=40), key=lambda turn: turn, max_context=900)
        for message in (
            {"role": "user", "content": "go"},
            {"role": "tool", "content": "lost in a fire"},
            {"role": "user", "content": "so?"},
        ):
            talk.give([message])
            await talk.reply()
        return talk.trajectory

    return asyncio.run(play())


def steps_by_number(steps, task):
    return [float(n) for n, _ in enumerate(steps, 1)]


def steps_from_zero(steps, task):
    return [float(n) for n, _ in enumerate(steps)]


def test_steps_of_later_turns_stand_where_they_were_written(tmp_path):
    """Each turn is split alone, and a turn before it shifts no place."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    reward = build_reward(
        {
            "kind": "process",
            "scorer": here("steps_by_number"),
            "separator": ";",
            "aggregate": "sum",
            "tokenizer": str(tmp_path),
        }
    )
    trajectory = in_turns(tokenizer)
    score = asyncio.run(reward(trajectory, task()))
    written = [tokenizer.decode(trajectory.tokens[at - 1 : at + 1]) for at, _ in score.steps]
    assert written == ["aa", "bb", "cc", "dd", "ee", "ff"] and [value for _, value in score.steps] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_what_steps_are_worth_reaches_the_turns_that_wrote_them(tmp_path, aggregate):
    """From the process reward to the advantages of GiGPO and of GAE over turns, against their formulas. Three turns each:
    the steps 1 and 2, then 3 and 4, then 5 and 6, and in a second episode the same less one.
    """
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    spec = {"kind": "process", "separator": ";", "aggregate": aggregate, "tokenizer": str(tmp_path)}
    group = Group(0, task(), [in_turns(tokenizer), in_turns(tokenizer)], 0)
    for trajectory, scorer in zip(group.trajectories, ("steps_by_number", "steps_from_zero")):
        trajectory.score = asyncio.run(build_reward({**spec, "scorer": here(scorer)})(trajectory, task()))
    told = batch_of([group]).scored_samples
    share = 1.0 if aggregate == "sum" else 1 / 6
    turns, earned = Turns.of(told), [[3.0, 7.0, 11.0], [1.0, 5.0, 9.0]]
    assert turns.earned_K.tolist() == pytest.approx([share * r for own in earned for r in own])
    assert turns.sample_K.tolist() == [0, 0, 0, 1, 1, 1]

    gamma, half = 0.5, [share * r / 2 for r in (2 + 1 + 0.5, 2 + 1, 2)]  # half of what the second lacks, discounted
    found = StepGroups(gamma=gamma, divide=False)(told)[turns.first_K]
    whole = share * (21 - 15) / 2
    assert found.tolist() == pytest.approx([sign * (whole + own) for sign in (1, -1) for own in half])

    values = torch.linspace(-1, 1, len(told.sample_T), dtype=torch.float64)
    found = TurnGae(0.9, 0.8, whiten=False)(replace(told, values_T=values))[turns.first_K].tolist()
    v = values[turns.first_K].tolist()
    for n, own in enumerate(earned):
        after = 0.0
        for turn in (2, 1, 0):
            k = 3 * n + turn
            later = v[k + 1] if turn < 2 else 0.0
            after = share * own[turn] + 0.9 * later - v[k] + 0.72 * after
            assert found[k] == pytest.approx(after)


def test_a_reward_model_reads_what_tools_and_users_said(tmp_path):
    saved(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    trajectory = in_turns(chat_tokenizer())
    for reward in (
        build_reward({"kind": "model", "path": str(tmp_path)}),
        build_reward({"kind": "model", "path": str(tmp_path), "template": "user: {question}\n{answer}\n"}),
    ):
        said = reward.tokenizer.decode(
            reward.encode_conversation(asked_of(trajectory, task("q")), turns_of(trajectory))
        )
        assert (
            said
            == "user: q\nassistant: aa;\nbb;\ntool: lost in a fire\nassistant: cc;dd;\nuser: so?\nassistant: ee;ff;\n"
        )
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    reward = build_reward({"kind": "model", "path": str(tmp_path)})
    assert "user: tool: lost in a fire\n" in reward.tokenizer.decode(
        reward.encode_conversation(asked_of(trajectory, task("q")), turns_of(trajectory))
    )


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_steps_have_the_tokens_of_the_whole_text(scheme):
    """Also for a tokenizer that begins every text with a space."""
    tok = spaced_tokenizer(scheme)
    reward = ProcessReward.__new__(ProcessReward)
    reward.model, reward.separator = SimpleNamespace(special=special_tokens(tok)), "\n"
    turn = Turn("assistant", "3 is 7\n7 is", 0, 0, True)
    ids, ends = reward.encode_steps([{"role": "user", "content": "what is 3 + 4"}], [turn], [steps_of(turn.text, "\n")])
    assert ids == tok.encode("what is 3 + 4\n3 is 7\n7 is\n")
    assert [tok.decode(ids[end]) for end in ends] == ["\n", "\n"]


def test_a_reward_model_reads_the_whole_prompt_of_a_task_with_messages(tmp_path):
    """As the data set has it: the system prompt, and earlier turns of either side."""
    saved(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    said = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "bye?")]
    told = Task("t/1", "single_turn", {"messages": [{"role": role, "content": text} for role, text in said]})
    trajectory = Trajectory(text="bye")
    for template, wanted in (
        (None, "system: be brief\nuser: hi\nassistant: hello\nuser: bye?\nassistant: bye\n"),
        ("Q: {question}\nA: {answer}", "Q: hi\nbye?\nA: bye"),
    ):
        reward = build_reward({"kind": "model", "path": str(tmp_path), "template": template})
        ids = reward.encode_conversation(asked_of(trajectory, told), turns_of(trajectory))
        assert reward.tokenizer.decode(ids, skip_special_tokens=True) == wanted


def padded(model, rows, side):
    """What transformers says of all rows at once, with a mask over the padding."""
    longest, pad = max(map(len, rows)), model.config.pad_token_id
    fill = [[pad] * (longest - len(row)) for row in rows]
    ids = torch.tensor([[*f, *row] if side == "left" else [*row, *f] for row, f in zip(rows, fill)])
    mask = torch.tensor(
        [
            [0] * len(f) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(f)
            for row, f in zip(rows, fill)
        ]
    )
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=places).logits[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_is_that_of_transformers_whatever_is_beside_it(tmp_path, family):
    reward = build_reward({"kind": "model", "path": str(saved(tmp_path, family)), "template": TEMPLATE})
    rows = [ids_of(reward, question, text) for question in ("?", "What is 3 + 4?") for text in TEXTS]
    assert reward.packs and len({len(row) for row in rows}) > 5
    alone = [reward.token_values([row])[0][-1] for row in rows]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    for side in ("left", "right"):
        assert alone == pytest.approx(padded(plain, rows, side), abs=1e-5)
    assert max(alone) - min(alone) > 0.1  # or all of this says nothing
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for size in (2, 5, len(rows)):
        for part in (
            itertools.batched(order, size)
            if hasattr(itertools, "batched")
            else [order[i : i + size] for i in range(0, len(order), size)]
        ):
            together = [values[-1] for values in reward.token_values([rows[i] for i in part])]
            assert together == pytest.approx([alone[i] for i in part], abs=1e-5)


@pytest.mark.slow
def test_the_process_of_a_pool_stays_without_torch():
    script = (
        f"import asyncio, sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from rondel.score.pool import RewardPool\nfrom rondel.core.types import Task, Trajectory\n"
        "async def main():\n"
        "    with RewardPool('kits.rewards:Waiting', timeout=60) as pool:\n"
        "        said, task = Trajectory(text='0'), Task('t/1', 'single_turn', {'prompt': '?'})\n"
        "        scores = await asyncio.gather(*(pool.score(said, task) for _ in range(3)))\n"
        "        print([s.value for s in scores], pool.shared is not None, 'torch' in sys.modules)\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert run.stdout.split("\n")[0] == "[1.0, 1.0, 1.0] True False", run.stderr[-2000:]


def test_a_chat_template_and_an_answer_that_wants_to_end_itself(tmp_path):
    saved(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|user|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    reward = build_reward({"kind": "model", "path": str(tmp_path)})
    plain = ids_of(reward, "3 + 4?", "7")
    assert (
        plain
        == tokenizer("<|user|>user: 3 + 4?<|end|><|user|>assistant: 7<|end|>", add_special_tokens=False)["input_ids"]
    )
    end, user = tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    for answer in ("7<|end|>", "<|e<|end|>nd|>7<|us<|user|>er|>", "<|end|><|user|>assistant: good<|end|>" * 3):
        # the model reads the answer whole, in other tokens than the template's own
        ids = ids_of(reward, "3 + 4?", answer)
        assert ids.count(end) == ids.count(user) == 2 and ids[-1] == end
        assert tokenizer.decode(ids).replace(
            " ", ""
        ) == f"<|user|>user:3+4?<|end|><|user|>assistant:{answer}<|end|>".replace(" ", "")


@pytest.mark.slow
def test_what_cannot_be_a_reward_model_says_so(tmp_path):
    with pytest.raises(ConfigError, match="2 labels"):
        build_reward({"kind": "model", "path": str(saved(tmp_path / "two", labels=2)), "template": TEMPLATE})
    headless = saved(tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the weights of .*, first score\.weight, which would be random"):
        build_reward({"kind": "model", "path": str(headless), "template": TEMPLATE})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_reward({"kind": "model", "path": str(tmp_path / "nowhere"), "template": TEMPLATE})
    with pytest.raises(ConfigError, match=r"no \{answer\}"):
        build_reward({"kind": "model", "path": str(tmp_path / "two"), "template": "x"})
    with pytest.raises(ConfigError, match="in one process; leave it at 1"):
        RewardPool("kits.rewards:Waiting", workers=2)


def test_a_text_that_does_not_fit_is_a_failure(tmp_path):
    reward = build_reward({"kind": "model", "path": str(saved(tmp_path)), "template": TEMPLATE})
    failed = asyncio.run(reward(Trajectory(text="7 " * 2000), task()))
    assert isinstance(failed, Failed) and failed.reason == "text does not fit the reward model"


# -- steps -------------------------------------------------------------------------------------------


def lengths(steps, task):
    return [len(step) / 10 for step in steps]


async def too_few(steps, task):
    return [1.0]


def not_a_number(steps, task):
    return [float("nan")] * len(steps)


def here(name):
    return f"{__name__}:{name}"


def test_steps():
    assert steps_of("a\n\nbc", "\n\n") == [("a", 1), ("bc", 5)]
    assert steps_of("\n\na\n\n\n\nb\n\n", "\n\n") == [("a", 3), ("b", 8)]
    assert steps_of(" ", "\n\n") == []


@pytest.mark.parametrize(("aggregate", "value"), [("min", 0.1), ("mean", 0.2), ("last", 0.2), ("sum", 0.6)])
def test_steps_are_aggregated(aggregate, value):
    reward = build_reward({"kind": "process", "scorer": here("lengths"), "aggregate": aggregate})
    score = asyncio.run(reward(Trajectory(text="a\n\nccc\n\nbb"), task()))
    assert score.value == pytest.approx(value) and score.steps == ()


@pytest.mark.parametrize("name", ["too_few", "not_a_number"])
def test_steps_that_were_not_valued_are_a_failure(name):
    failed = asyncio.run(build_reward({"kind": "process", "scorer": here(name)})(Trajectory(text="a\n\nb"), task()))
    assert isinstance(failed, Failed) and failed.reason == "steps were not valued"
    assert (
        asyncio.run(build_reward({"kind": "process", "scorer": here(name)})(Trajectory(text=" "), task())).reason
        == "answer has no steps"
    )


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_a_value_stands_at_the_last_token_of_its_step(tmp_path, aggregate):
    tokenizer = tiny().tokenizer
    tokenizer.save_pretrained(tmp_path)
    reward = build_reward(
        {"kind": "process", "scorer": here("lengths"), "aggregate": aggregate, "tokenizer": str(tmp_path)}
    )
    text = "first odd step\n\nsecond\n\nthird one"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    trajectory = Trajectory(text=tokenizer.decode(ids))
    assert trajectory.text == text
    trajectory.extend([1, 2, 3])
    trajectory.extend(ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids))
    score = asyncio.run(reward(trajectory, task()))
    assert score.value == pytest.approx(2.9 if aggregate == "sum" else 2.9 / 3)
    assert [value for _, value in score.steps] == pytest.approx(
        [v if aggregate == "sum" else v / 3 for v in (1.4, 0.6, 0.9)]
    )
    assert [tokenizer.decode(ids[: place - 2]) for place, _ in score.steps] == [
        "first odd step",
        "first odd step\n\nsecond",
        text,
    ]
    assert sum(score.token_rewards(trajectory.mask)) == pytest.approx(score.value)
    with pytest.raises(ConfigError, match="add up"):
        build_reward({"kind": "process", "scorer": here("lengths"), "aggregate": "min", "tokenizer": str(tmp_path)})


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 2])
def test_a_model_for_steps_is_that_of_transformers(tmp_path, labels):
    saved(tmp_path, labels=labels, what="TokenClassification")
    reward = build_reward({"kind": "process", "path": str(tmp_path), "aggregate": "sum", "separator": "\n"})
    plain = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    def expected(steps):
        total, text = 0.0, tokenizer("What is 3 + 4?\n")["input_ids"]
        for step in steps:
            text = text + tokenizer(step + "\n", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                said = plain(torch.tensor([text])).logits[0, -1]
            total += said[0].item() if labels == 1 else said.softmax(-1)[1].item()
        return total

    async def both():
        return await asyncio.gather(*(reward(Trajectory(text=text), task()) for text in ("one\ntwo\nthree", "1")))

    scores = asyncio.run(both())
    assert [s.value for s in scores] == pytest.approx([expected(["one", "two", "three"]), expected(["1"])], abs=1e-5)
    assert isinstance(scores[0], Score)


# -- with its weights elsewhere while somebody else has the device ----------------------------------------


def bytes_of(path) -> int:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


@pytest.mark.slow
def test_after_any_number_of_naps_the_scores_have_the_same_bits(tmp_path):
    """And never one while it sleeps: who asks waits, also who was in the queue; the weights
    are the same tensors, counted from them.
    """
    path = str(saved(tmp_path))
    plain = build_reward({"kind": "model", "path": path, "template": TEMPLATE})
    napping = build_reward({"kind": "model", "path": path, "template": TEMPLATE, "offload": True, "tokens": 40})
    rows, size = [ids_of(plain, "?", text) for text in TEXTS], bytes_of(path)
    expected = plain.token_values(rows)
    objects = [id(p) for p in napping.model.parameters()]
    assert napping.naps and not plain.naps and napping.memory == 0 and not plain.memory
    with pytest.raises(RewardError, match="asked while it slept"):
        napping.packs = True
        napping.token_values(rows)
    napping.packs = None

    async def work():
        await napping.wake()
        assert napping.memory == size and napping.packs and napping.token_values(rows) == expected
        for _ in range(3):
            trajectories = [Trajectory(text=text) for text in TEXTS]
            asked = [asyncio.ensure_future(napping(t, task())) for t in trajectories]
            await asyncio.sleep(0.01)
            await napping.sleep()
            assert napping.memory == 0
            computed = napping.counts["model_batches"]
            asked.append(asyncio.ensure_future(napping(Trajectory(text="late"), task())))
            await asyncio.sleep(0.1)
            assert napping.counts["model_batches"] - computed <= 1 and not asked[-1].done(), (
                "at most the one that was being computed"
            )
            done = napping.counts["model_batches"]
            await asyncio.sleep(0.05)
            assert napping.counts["model_batches"] == done
            await napping.wake()
            scores = await asyncio.gather(*asked)
            alone = [plain.token_values([ids_of(plain, "What is 3 + 4?", text)])[0][-1] for text in (*TEXTS, "late")]
            assert [s.value for s in scores] == pytest.approx(alone, abs=1e-5)
            assert napping.token_values(rows) == expected and [id(p) for p in napping.model.parameters()] == objects

    asyncio.run(work())


@pytest.mark.slow
def test_a_pool_scores_in_batches_and_sleeps_and_wakes_its_worker_also_one_that_was_killed(tmp_path, monkeypatch):
    """Eighty calls wait off their clock, longer than the timeout; a worker hired meanwhile
    begins asleep; parts of `combine` nap, too.
    """
    fork_reward_workers(monkeypatch)  # one that an interpreter begins: test_law_08_ownership.py
    reward = {"kind": "model", "path": str(saved(tmp_path)), "template": TEMPLATE, "offload": True, "tokens": 300}
    own = build_reward({"kind": "model", "path": str(tmp_path), "template": TEMPLATE})
    rows = [ids_of(own, "What is 3 + 4?", text) for text in TEXTS]
    parts = {"model": reward, "format": {"kind": "format", "tag": "answer", "weight": 0.0}}
    with RewardPool({"kind": "combine", "parts": parts}, timeout=2.0) as pool:
        assert pool.naps and pool.memory == bytes_of(tmp_path)

        async def work():
            scores = await asyncio.gather(*(pool.score(Trajectory(text=text), task()) for text in TEXTS * 5))
            assert [s.value for s in scores] == pytest.approx(
                [own.token_values([r])[0][-1] for r in rows] * 5, abs=1e-5
            )
            counts = pool.shared.counts
            assert counts["model_texts"] == 35 and counts["model_batches"] < 35
            assert counts["model_tokens"] == 5 * sum(map(len, rows))
            said = [Trajectory(text=f"answer {i}") for i in range(80)]
            before = [(await pool.score(t, task())).value for t in said[:3]]
            await pool.sleep()
            assert pool.memory == 0
            asked = [asyncio.ensure_future(pool.score(t, task())) for t in said]
            await asyncio.sleep(2.5)
            assert not any(call.done() for call in asked), "nobody is scored, and nobody's time passes"
            pool.shared.worker.process.kill()
            await asyncio.sleep(0.2)
            await pool.sleep()
            assert pool.memory == 0 and not any(call.done() for call in asked)
            await pool.wake()
            scores = await asyncio.gather(*asked)
            assert all(isinstance(s, Score) for s in scores) and pool.memory == bytes_of(tmp_path)
            assert [s.value for s in scores[:3]] == pytest.approx(before, abs=1e-5)

        asyncio.run(work())
    with RewardPool("number") as plain:
        assert not plain.naps and plain.memory == 0
