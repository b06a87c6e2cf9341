"""Top-k and top-p in training (law 4): the trainer's logprob runs over the tokens that
the engine kept, as recorded with the draw.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kits.engine import all_of, ask, engine, prompt
from kits.runs import events, run, tiny
from kits.sweeps import covering
from kits.train import apart, batch, gradient, model, row, step, trainer
from rondel.assemble import replay
from rondel.assemble.components import build
from rondel.buffer.state import decode, encode
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import DATA, Group, Sampling, Score, Task, Trajectory
from rondel.driver.rollouts import rollouts_of
from rondel.generate.envs.episode import WIDEST, refuse_untrainable, refuse_wide, refuse_without_support
from rondel.models.head import LMHead
from rondel.runtime.journal import store
from rondel.train import logprobs
from rondel.train.annotate import annotate_logprobs
from rondel.train.logprobs import logprob_and_entropy
from rondel.train.sampling_mask import SupportMask

CUTS = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 7, "temperature": 0.7},
    "both": {"top_p": 0.9, "top_k": 12, "temperature": 1.3},
    "min-p": {"min_p": 0.4, "temperature": 0.7},
    "one token": {"top_p": 1e-6},
}


def groups(loaded, how, *, per_group: int = 3) -> list[Group]:
    """Answers of the engine under `how`, of several lengths; in each group a demonstration too, which nobody drew."""
    rng = np.random.default_rng(0)
    prompts = [prompt(i, 4 + i) for i in range(3)]
    asked = [
        replace(ask(p, n=int(rng.integers(1, 9)), key=10 * i + s, **how), wants=frozenset({"support"}))
        for i, p in enumerate(prompts)
        for s in range(per_group)
    ]
    done = iter(asyncio.run(all_of(engine(loaded), asked)))
    found = []
    for i, p in enumerate(prompts):
        members = []
        for c in (next(done) for _ in range(per_group)):
            t = Trajectory(score=Score(float(rng.normal())))
            t.extend(list(p))
            t.extend(c.tokens, logprobs=c.logprobs, versions=c.versions, support=c.support)
            members.append(t)
        shown = Trajectory(policy=DATA, score=Score(1.0))
        shown.extend(list(p))
        shown.extend([60, 61], logprobs=[0.0, 0.0], versions=[0, 0])
        found.append(Group(i, Task(f"t{i}", "fake", {}), [*members, shown], 0))
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_behavior_and_trainer_agree_at_ratio_one(cut):
    loaded, how = model(), CUTS[cut]
    b = batch(groups(loaded, how), row("grpo"))
    settings = {"budget": 40, "temperature": how.get("temperature", 1.0)}
    annotate_logprobs(loaded, b, "trained", drawn=True, **settings)
    annotate_logprobs(loaded, b, "start", **settings)
    drawn = [s for s in b.samples if not s.guided]
    assert max(np.abs(s.known.trained.numpy() - s.known.behavior.numpy()).max() for s in drawn) < 1e-5
    lost = np.concatenate([s.known.trained.numpy() - s.known.start.numpy() for s in drawn])
    assert lost.min() > -1e-6 and lost.max() > 0.05  # what was cut off was divided among the rest
    assert all(np.array_equal(s.known.trained.numpy(), s.known.start.numpy()) for s in b.samples if s.guided)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "kind"),
    covering(product(["top-p", "both"], ["llama", "gemma3_text"]), [("top-p", "llama"), ("both", "gemma3_text")]),
)
def test_the_gradient_is_that_of_the_formula_for_any_split(kind, cut):
    """Token by token through the plain transformers model, in float64: logp and entropy over the recorded ids alone."""
    how, algo = CUTS[cut], row("reinforce", entropy={"coef": 0.02}, correction={"kind": "importance"})
    loaded = model(kind)
    temperature = how.get("temperature", 1.0)
    t = trainer(loaded, algo, temperature=temperature)
    b = batch(groups(loaded, how), algo)
    for s in b.samples:
        s.known.behavior = torch.as_tensor(
            s.known.behavior.numpy() - 0.2
        )  # so that the correction has something to weigh
    mine = gradient(t, b, algo)
    for micro_tokens, share in ((1, True), (20, False), (40, True)):
        assert apart(gradient(t, b, algo, micro_tokens=micro_tokens, share=share), mine) <= 1e-6
    plain = AutoModelForCausalLM.from_config(loaded.model.config, attn_implementation="eager")
    plain.load_state_dict(loaded.model.state_dict())
    plain = plain.double().eval()
    loss = 0.0
    for s in b.samples:
        logits = plain(torch.tensor(s.tokens)[None], use_cache=False).logits[0].double() / temperature
        for i, at in enumerate(s.trainable):
            ids = None if s.support is None else s.support[i]
            kept = list(range(logits.shape[1])) if ids is None else ids.tolist()
            logp = logits[at - 1][kept].log_softmax(-1)
            own = logp[kept.index(int(s.tokens[at]))]
            weight = 1.0 if s.guided else min(float((own.detach() - float(s.known.behavior.numpy()[i])).exp()), 2.0)
            loss = loss - (weight * s.reward * own - 0.02 * (logp.exp() * logp).sum()) / len(b.samples)
    loss.backward()
    theirs = dict(plain.named_parameters())
    exact = torch.cat(
        [
            theirs[n].grad.flatten() if theirs[n].grad is not None else torch.zeros(theirs[n].numel())
            for n in t.weights.names
        ]
    )
    assert apart(mine, exact) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("softcap", covering([None, 3.0], [3.0]))
def test_forward_and_backward_across_chunks_equal_autograd(softcap, monkeypatch):
    """Some rows cut and some not, in several chunks of rows."""
    monkeypatch.setattr(logprobs, "LOGITS", LOGITS := 1 << 19)
    torch.manual_seed(0)
    vocab = 1 << 14
    m = 2 * (LOGITS // vocab) + 3
    hidden, target = torch.randn(m, 6).requires_grad_(), torch.randint(0, vocab, (m,))
    head = LMHead(torch.nn.Parameter(torch.randn(vocab, 6)), softcap=softcap)
    rows = [
        None if i % 3 == 0 else np.unique([*np.random.default_rng(i).integers(0, vocab, 1 + i % 9), int(target[i])])
        for i in range(m)
    ]
    counts = [0 if ids is None else len(ids) for ids in rows]
    kept = SupportMask(
        torch.tensor(np.concatenate([ids for ids in rows if ids is not None])),
        torch.arange(m).repeat_interleave(torch.tensor(counts)),
    )
    logprob, entropy = logprob_and_entropy(hidden, target, head, temperature=0.8, kept=kept)
    some = [0, 1, 2, LOGITS // vocab, LOGITS // vocab + 1, m - 2, m - 1]
    h, w = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    exact = []
    for i in some:
        z = h[i] @ w.T
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.8
        ids = torch.arange(vocab) if rows[i] is None else torch.tensor(rows[i])
        logp = z[ids].log_softmax(-1)
        exact.append((logp[ids == target[i]][0], -(logp.exp() * logp).sum()))
        assert all(
            abs(float((ours[i] - theirs).detach())) < 1e-4 for ours, theirs in zip((logprob, entropy), exact[-1])
        )
    ours = torch.autograd.grad((logprob + 0.3 * entropy)[some].sum(), [hidden, head.weight])
    wanted = torch.autograd.grad(sum(a + 0.3 * e for a, e in exact), [h, w])
    for mine, theirs in zip(ours, wanted):
        assert apart(mine.double(), theirs) < 5e-6


def test_a_record_that_lacks_its_own_token_is_refused():
    (group, *_) = groups(model(), CUTS["top-p"])
    t = group.trajectories[0]
    last = max(i for i, ids in enumerate(t.support) if ids is not None)
    t.support[last] = [x for x in t.support[last] if x != t.tokens[last]]
    with pytest.raises(ValueError, match=f"token {t.tokens[last]} at position {last} is none of the"):
        batch([group], row("grpo"))


def test_only_the_writer_of_a_token_says_what_it_was_drawn_from():
    t = Trajectory()
    t.extend([1, 2])
    assert t.support is None
    t.extend([3], logprobs=[-1.0], versions=[0], support=[[3, 4]])
    t.extend([5])
    assert t.support == [None, None, [3, 4], None]
    for more in ({}, {"logprobs": [-1.0], "versions": [0]}):
        with pytest.raises(ValueError, match="one a drawn token"):
            t.extend([6], **more, support=[[6], [7]])


def test_records_survive_the_store_and_the_buffer(tmp_path):
    made = groups(model(), CUTS["both"])
    store.write_step(tmp_path, 1, made)
    for again in (store.groups_of(store.read_step(tmp_path, 1)), [decode(encode(copy.deepcopy(g))) for g in made]):
        assert [t.support for g in again for t in g.trajectories] == [t.support for g in made for t in g.trajectories]


def test_what_is_nearly_the_vocabulary_or_was_not_recorded_is_refused_by_name():
    refuse_untrainable(Sampling(top_p=0.9, top_k=WIDEST))
    with pytest.raises(ConfigError, match=f"engine.sampling.top_k = {WIDEST + 1}; at most {WIDEST} are recorded"):
        refuse_untrainable(Sampling(top_k=WIDEST + 1))
    refuse_wide([None, range(WIDEST)], Sampling(top_p=0.9))
    with pytest.raises(
        ConfigError,
        match=f"top_p = 0.9, min_p = 0.0 left {WIDEST + 1} tokens .* Set engine.sampling.top_k = {WIDEST // 2}",
    ):
        refuse_wide([None, range(WIDEST + 1)], Sampling(top_p=0.9))
    lost = Trajectory()
    lost.extend([5])
    lost.extend([6], logprobs=[-1.0], versions=[0])
    refuse_without_support(lost, Sampling())
    with pytest.raises(DataError, match=r"must hand Completion.support to extend\(\)"):
        refuse_without_support(lost, Sampling(top_p=0.9))


def test_an_environment_draws_at_the_temperature_that_is_trained(tmp_path):
    parts = build(tiny(tmp_path, engine__sampling__temperature=0.8))
    try:
        chat = rollouts_of(parts).open_chat(lambda turn: turn)

        async def draw(temperature: float):
            await parts.sync(parts.trainer, parts.engine)
            chat.sampling = replace(chat.sampling, temperature=temperature, max_tokens=2)
            chat.give([{"role": "user", "content": "3 + 4 ="}])
            return await chat.reply()

        with pytest.raises(ConfigError, match=r"draws at temperature 0\.5, and the policy is trained at 0\.8"):
            asyncio.run(draw(0.5))
    finally:
        parts.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",  # both cuts are the same record of ids; their gradients are above
    [
        pytest.param({"engine__sampling__top_p": 0.9}, marks=pytest.mark.sweep),
        {"engine__sampling__top_k": 5, "loop__updates_per_step": 2},
        pytest.param({"engine__sampling__min_p": 0.2}, marks=pytest.mark.sweep),
    ],
)
def test_a_run_under_truncation_has_no_gap_and_replays(tmp_path, how):
    run(tmp_path, loop__steps=4, **how)
    done = events(tmp_path, "StepDone")[-4:]
    for event in done:
        rows = store.read_step(tmp_path, event["step"])
        cut = [ids for r in rows for ids in r["support"] if ids is not None]
        assert cut and all(r["support"] is not None for r in rows)
        assert event["metrics"]["train/gap_max"] < 1e-4 and not event["note"]
    again = replay(tmp_path, done[-1]["step"])
    assert (
        again["train/loss"] == done[-1]["metrics"]["train/loss"]
        and again["train/gap_max"] == done[-1]["metrics"]["train/gap_max"]
    )


def test_a_reference_keeps_its_whole_vocabulary():
    """x = log pi - log pi_ref is that of the cut policy: with the same weights it is
    what the cut left out, never below 0.
    """
    algo, loaded = row("grpo", kl={"coef": 0.1, "kind": "k1"}), model()
    t = trainer(loaded, algo)
    b = batch(groups(loaded, CUTS["top-p"]), algo)
    stats = step(t, b, algo)
    assert stats.stepped and stats.metrics["train/kl_ref"] > 0.01 and stats.metrics["train/ratio_max_deviation"] < 1e-5
