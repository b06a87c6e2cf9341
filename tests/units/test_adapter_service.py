"""The service that trains adapters: losses, gradients and steps are those of each client alone, by autograd in a plain
module in float64.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from kits.adapter_bank import merged
from kits.engine import SIZE, engine, inline, prompt, tiny, twin
from kits.sweeps import covering
from rondel.core.errors import TrainError, UserError
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_rows import HEAD, AdapterWeights
from rondel.training_api.backend import Adam, AdapterSpec, Example, SampleSettings
from rondel.training_api.losses import LOSSES
from rondel.training_api.packing import pack_examples
from rondel.training_api.service import AdapterService

SPECS = {
    "a": AdapterSpec(4, seed=1, unembed=True),
    "b": AdapterSpec(6, seed=2, mlp=False),
    "c": AdapterSpec(2, seed=3, attention=False),
}


def service(**how) -> tuple[AdapterService, torch.nn.Module]:
    loaded = tiny("llama", **SIZE)
    plain = twin(loaded)
    AdapterBank(loaded)
    return AdapterService(loaded, engine(loaded), run=inline, name="tiny", **how), plain


def examples(seed: int, count: int = 5, *, loss: str = "ppo", shared: int = 20) -> list[Example]:
    """Of which some begin with the same tokens."""
    g, out = np.random.default_rng(seed), []
    begin = prompt(seed, shared)
    for i in range(count):
        tokens = (begin if i % 3 else prompt(100 * seed + i, 9)) + prompt(50 * seed + i, 3 + 2 * i)
        n = len(tokens)
        inputs = {
            "logprobs": g.normal(-3, 0.5, n).astype(np.float32),
            "advantages": (g.normal(0, 1, n) * (g.random(n) > 0.3)).astype(np.float32),
            "weights": g.random(n).astype(np.float32),
        }
        needs = LOSSES[loss].needs
        out.append(Example(tokens, g.integers(5, 100, n), {key: inputs[key] for key in needs}))
    return out


def independent_loss(name: str, z: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Written token by token, in another way than the service's."""
    total = z.new_zeros(())
    if name == "gspo":
        chosen = given["advantages"].nonzero()[:, 0].tolist()
        s = torch.exp(sum(z[t] - given["logprobs"][t] for t in chosen) / max(1, len(chosen)))
    for t in range(len(z)):
        if name == "cross_entropy":
            total = total - given["weights"][t] * z[t]
            continue
        a, q = given["advantages"][t], given["logprobs"][t]
        r = torch.exp(z[t]) / torch.exp(q)
        if name == "importance_sampling":
            total = total - r * a
        elif name == "ppo":
            if a >= 0:
                total = total - a * (r if r <= 1.2 else 1.2)
            else:
                total = total - a * (r if r >= 0.8 else 0.8)
        elif name == "cispo":
            total = total - float(min(max(r.item(), 0.8), 1.2)) * a * z[t]
        elif name == "dro":
            total = total - a * z[t] + 0.025 * (z[t] - q) ** 2
        elif name == "gspo" and a != 0:
            low, high = 1 - 3e-4, 1 + 4e-4
            total = total - a * (min(s, s * 0 + high) if a > 0 else max(s, s * 0 + low))
    return total


def oracle(plain, weights: AdapterWeights, given: list[Example], loss: str) -> tuple[list, float, dict]:
    """Logprobs, loss and gradients by autograd through a merged module, in float64."""
    model = merged(plain, None).model.double()
    model.set_attn_implementation("eager")
    leaves = {
        name: tuple(t.detach().double().requires_grad_(True) for t in pair) for name, pair in weights.layers.items()
    }
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    changed = {
        f"{n}.weight": model.get_submodule(n).weight + weights.scale * b @ a
        for n, (a, b) in leaves.items()
        if n != HEAD
    }
    for example in given:
        hidden = torch.func.functional_call(
            model, changed, (torch.tensor([list(example.tokens)]),), {"use_cache": False, "output_hidden_states": True}
        ).hidden_states[-1][0]
        logits = hidden @ model.get_output_embeddings().weight.double().t()
        if HEAD in leaves:
            a, b = leaves[HEAD]
            logits = logits + weights.scale * hidden @ a.t() @ b.t()
        z = logits.log_softmax(-1).gather(1, torch.from_numpy(example.targets)[:, None])[:, 0]
        logprobs.append(z.detach().numpy())
        inputs = {key: torch.from_numpy(value).double() for key, value in example.inputs.items()}
        total = total + independent_loss(loss, z, inputs)
    total.backward()
    return logprobs, float(total.detach()), {n: tuple(t.grad for t in pair) for n, pair in leaves.items()}


def scatter(weights: AdapterWeights, seed: int) -> None:
    """B is no longer 0."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in weights.layers.values():
            b.copy_(0.1 * torch.randn(b.shape, generator=g))


async def made(s: AdapterService, names: str = "abc") -> None:
    for i, name in enumerate(names):
        await s.create_adapter(name, SPECS[name])
        scatter(s._trained[name].weights, i)


# a likelihood, a ratio of tokens, a ratio of sequences; the formulas of all: tests/parity/algos
@pytest.mark.slow
@pytest.mark.parametrize("loss", covering(LOSSES, ["cross_entropy", "ppo", "gspo"]))
def test_losses_and_gradients_of_three_clients_in_one_pass(loss: str) -> None:
    s, plain = service()
    given = {name: examples(i + 1, loss=loss) for i, name in enumerate("abc")}

    async def ask():
        await made(s)
        return await asyncio.gather(*(s.forward(n, given[n], loss, {}, backward=True) for n in "abc"))

    for name, told in zip("abc", asyncio.run(ask())):
        trained = s._trained[name]
        logprobs, total, gradients = oracle(plain, trained.weights, given[name], loss)
        for mine, theirs in zip(told.outputs, logprobs):
            assert np.allclose(mine["logprobs"], theirs, atol=2e-5)
        assert told.metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-3)
        for layer, pair in gradients.items():
            for part, wanted in zip("AB", pair):
                got = trained.parameters[f"{layer}.{part}"].grad.double()
                assert torch.linalg.norm(got - wanted) <= 1e-4 * torch.linalg.norm(wanted) + 1e-6, (layer, part)


def test_several_targets_of_a_token_and_a_forward_alone() -> None:
    """[N, K] targets, as distillation sends them; a forward pass adds no gradient."""
    s, plain = service()
    g = np.random.default_rng(0)
    tokens = prompt(1, 12)
    soft = Example(tokens, g.integers(5, 100, (12, 3)), {"weights": g.random((12, 3)).astype(np.float32)})
    columns = [Example(tokens, soft.targets[:, k], {"weights": soft.inputs["weights"][:, k]}) for k in range(3)]

    async def ask():
        await made(s, "a")
        return [await s.forward("a", [soft], "cross_entropy", {}, backward=False), s._trained["a"].added]

    told, added = asyncio.run(ask())
    logprobs, total, _ = oracle(plain, s._trained["a"].weights, columns, "cross_entropy")
    assert np.allclose(told.outputs[0]["logprobs"], np.stack(logprobs, 1), atol=2e-5) and added == 0
    assert told.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_clients_together_end_where_each_ends_alone() -> None:
    """Three steps of three clients with their own learning rates, micro-batches mixed; and AdamW is torch's."""
    adams = {n: Adam(lr, weight_decay=0.01, clip=1.0) for n, lr in zip("abc", (1e-2, 3e-3, 1e-3))}

    async def train(s: AdapterService, names: str) -> dict[str, AdapterWeights]:
        async def client(name: str) -> None:
            for step in range(3):
                for part in range(2):
                    await s.forward(name, examples(1 + step + part, 4), "ppo", {}, backward=True)
                await s.optim_step(name, adams[name])

        await made(s, "abc")
        await asyncio.gather(*(client(name) for name in names))
        return {name: s._trained[name].weights for name in names}

    together = asyncio.run(train(service(micro_tokens=120)[0], "abc"))
    for name in "abc":
        alone = asyncio.run(train(service(micro_tokens=300)[0], name))[name]
        for x, y in zip(together[name].tensors, alone.tensors):
            assert (x - y).abs().max() <= 1e-5


def test_a_step_is_adamw_by_hand() -> None:
    s, _ = service()
    adam = Adam(1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)

    async def go():
        await made(s, "a")
        trained, m, v, want = s._trained["a"], {}, {}, {}
        for step in (1, 2):
            await s.forward("a", examples(step), "ppo", {}, backward=True)
            for name, p in trained.parameters.items():
                g, old = p.grad.double(), want.get(name, p.detach().double())
                m[name] = 0.8 * m.get(name, 0) + 0.2 * g
                v[name] = 0.9 * v.get(name, 0) + 0.1 * g * g
                move = (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-6)
                want[name] = old * (1 - 1e-2 * 0.1) - 1e-2 * move
            told = await s.optim_step("a", adam)
        for name, p in trained.parameters.items():
            assert torch.allclose(p.detach().double(), want[name], atol=1e-6)
        assert told["optim/lr"] == 1e-2

    asyncio.run(go())


@pytest.mark.slow
def test_a_state_goes_on_where_it_was(tmp_path: Path) -> None:
    async def steps(s: AdapterService, first: int, last: int) -> None:
        for step in range(first, last):
            await s.forward("a", examples(step + 1, 3), "ppo", {}, backward=True)
            await s.optim_step("a", Adam(1e-2))

    async def go() -> tuple[list, list, list]:
        s = service()[0]
        await made(s, "a")
        await steps(s, 0, 2)
        await s.save("a", tmp_path / "state", optimizer=True)
        await steps(s, 2, 4)
        other = service()[0]
        await other.create_adapter("a", SPECS["a"])
        await other.load("a", tmp_path / "state", optimizer=True)
        await steps(other, 2, 4)
        fresh = service()[0]
        await fresh.create_adapter("a", SPECS["a"])
        await fresh.load("a", tmp_path / "state", optimizer=False)
        await steps(fresh, 2, 4)
        wrong = service()[0]
        await wrong.create_adapter("a", AdapterSpec(2))
        with pytest.raises(UserError, match="of rank 4 on"):
            await wrong.load("a", tmp_path / "state", optimizer=True)
        return [one._trained["a"].weights.tensors for one in (s, other, fresh)]

    straight, resumed, without = asyncio.run(go())
    assert all(torch.equal(x, y) for x, y in zip(straight, resumed))
    assert not all(torch.equal(x, y) for x, y in zip(straight, without)), "moments matter"


def test_a_snapshot_is_served_and_never_changes(tmp_path: Path) -> None:
    async def go():
        s, _ = service()
        await made(s, "a")
        await s.save("a", tmp_path / "v1", optimizer=False)
        await s.serve_adapter("a/v1", tmp_path / "v1")
        ask = SampleSettings(n=2, max_tokens=6, seed=5, prompt_logprobs=True, top_prompt_logprobs=2)
        first = await s.sample(prompt(1, 9), "a/v1", ask)
        base = await s.sample(prompt(1, 9), None, ask)
        await s.forward("a", examples(1), "ppo", {}, backward=True)
        await s.optim_step("a", Adam(1e-1))
        again = await s.sample(prompt(1, 9), "a/v1", ask)
        assert [tokens for tokens, *_ in first.sequences] == [tokens for tokens, *_ in again.sequences]
        assert again.sequences[0][1] == pytest.approx(first.sequences[0][1], abs=1e-5)
        assert first.prompt_logprobs[1:] == pytest.approx(again.prompt_logprobs[1:], abs=1e-5)
        assert first.sequences[0][0] not in (base.sequences[0][0], first.sequences[1][0])
        assert first.prompt_logprobs[0] is None and len(first.top_prompt_logprobs[1]) == 2
        writing = asyncio.create_task(s.sample(prompt(1, 9), "a/v1", SampleSettings(n=1, max_tokens=50)))
        while not s.engine.scheduler.running:
            await asyncio.sleep(0)
        await s.drop_served("a/v1")
        with pytest.raises(UserError, match="deleted or overwritten while an answer was written"):
            await writing
        with pytest.raises(UserError, match="serves no adapter"):
            await s.sample(prompt(1, 9), "a/v1", ask)

    asyncio.run(go())


def test_one_client_whose_numbers_explode_stands_alone() -> None:
    """Its gradient is gone and it is told; the others' are what they were."""
    s, plain = service()
    bad, good = examples(1, 2), examples(2, 3)
    huge = {
        "logprobs": np.full(len(bad[0].tokens), -1e4, np.float32),
        "advantages": np.ones(len(bad[0].tokens), np.float32),
    }
    bad[0] = Example(bad[0].tokens, bad[0].targets, huge)

    async def go():
        await made(s)
        return await asyncio.gather(
            s.forward("a", bad, "importance_sampling", {}, backward=True),
            s.forward("b", good, "importance_sampling", {}, backward=True),
            return_exceptions=True,
        )

    fault, told = asyncio.run(go())
    assert isinstance(fault, TrainError) and "loss is" in str(fault)
    assert s._trained["a"].added == 0 and all(p.grad is None for p in s._trained["a"].parameters.values())
    _, total, gradients = oracle(plain, s._trained["b"].weights, good, "importance_sampling")
    assert told.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    layer = next(iter(gradients))
    assert torch.allclose(
        s._trained["b"].parameters[f"{layer}.A"].grad.double(), gradients[layer][0], rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
async def _slowly(function, *args):
    await asyncio.sleep(0.02)
    return function(*args)


def test_one_that_leaves_and_fails_leaves_its_neighbours_their_answers() -> None:
    """Its client cancels it while the pass is computed in which it turns out to be broken."""

    async def go() -> None:
        s, _ = service()
        await made(s, "ab")
        s._run = _slowly
        broken = examples(1, 2)
        for one in broken:
            one.inputs["logprobs"][:] = -1e30  # its ratio is infinite
        leaves = asyncio.create_task(s.forward("a", broken, "ppo", {}, backward=True))
        stays = asyncio.create_task(s.forward("b", examples(2, 2), "ppo", {}, backward=True))
        await asyncio.sleep(0.03)  # the pass of both has failed, and its own is computed
        leaves.cancel()
        assert (await asyncio.wait_for(stays, 5)).metrics["loss:sum"]
        with pytest.raises((asyncio.CancelledError, TrainError)):
            await leaves

    asyncio.run(go())


def test_a_gradient_that_was_cancelled_is_in_no_step() -> None:
    async def go() -> None:
        s, _ = service(micro_tokens=32)
        await made(s, "ab")
        s._run = _slowly
        leaves = asyncio.create_task(s.forward("a", examples(1), "ppo", {}, backward=True))
        stays = asyncio.create_task(s.forward("b", examples(2), "ppo", {}, backward=True))
        await asyncio.sleep(0.05)  # some of its passes are done
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert all(p.grad is None for p in s._trained["a"].parameters.values())
        with pytest.raises(UserError, match="there is no gradient"):
            await s.optim_step("a", Adam(lr=1e-3))
        await stays
        assert (await s.optim_step("b", Adam(lr=1e-3)))["optim/grad_norm"] > 0

    asyncio.run(go())


def test_a_fault_between_gradients_is_not_repeated(monkeypatch) -> None:
    """A part may have been added: all clients of the pass are told, none has half of a gradient or twice the whole."""
    s, plain = service()
    mine, others = examples(1, 2), examples(2, 3)
    backward = torch.Tensor.backward

    def failing(loss: torch.Tensor) -> None:
        monkeypatch.setattr(torch.Tensor, "backward", backward)
        backward(loss)
        raise RuntimeError("out of memory")

    async def both():
        calls = [s.forward(name, own, "ppo", {}, backward=True) for name, own in (("a", mine), ("b", others))]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def go():
        await made(s)
        monkeypatch.setattr(torch.Tensor, "backward", failing)
        faults = await both()
        assert all(isinstance(f, TrainError) and "out of memory: the gradient that was" in str(f) for f in faults)
        assert all(p.grad is None for name in "ab" for p in s._trained[name].parameters.values())
        return await both()

    told = asyncio.run(go())
    for name, own, result in zip("ab", (mine, others), told):
        _, total, gradients = oracle(plain, s._trained[name].weights, own, "ppo")
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
        layer = next(iter(gradients))
        grad = s._trained[name].parameters[f"{layer}.A"].grad.double()
        assert torch.allclose(grad, gradients[layer][0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "pppo"}, "loss_fn 'pppo' does not exist. Did you mean 'ppo'"),
        ({"loss": "stable_reinforce"}, "its formula is not published"),
        ({"config": {"clip": 1}}, "loss_fn_config of 'ppo' has no 'clip'; it reads clip_low_threshold"),
        ({"examples": []}, "no example was sent"),
        ({"targets": np.array([1, 2])}, r"target_tokens has shape \[2\]; it is \[3\]"),
        ({"tokens": [5, 6, 10**6]}, "example 0 has the token 1000000"),
        ({"inputs": {"logprobs": np.zeros(3)}}, r"example 0 for loss_fn 'ppo' lacks loss_fn_inputs\['advantages'\]"),
        ({"inputs": {"logprobs": np.zeros(3), "advantages": np.full(3, np.nan)}}, "advantages has a number that is not finite"),
        ({"inputs": {"logprobs": np.zeros(3), "advantages": np.zeros(3), "weights": np.zeros(3)}}, "which it does not read"),
    ],
)  # fmt: skip
def test_bad_requests_say_what_is_wrong(change: dict, message: str) -> None:
    s, _ = service()
    inputs = {"logprobs": np.zeros(3), "advantages": np.zeros(3)}
    one = Example(
        change.get("tokens", [5, 6, 7]), change.get("targets", np.array([6, 7, 8])), change.get("inputs", inputs)
    )

    async def go() -> None:
        await made(s, "a")
        with pytest.raises(UserError, match=message):
            await s.forward(
                "a", change.get("examples", [one]), change.get("loss", "ppo"), change.get("config", {}), backward=True
            )
        with pytest.raises(UserError, match="there is no gradient"):
            await s.optim_step("a", Adam(1e-3))
        with pytest.raises(UserError, match="no adapter 'z'"):
            await s.optim_step("z", Adam(1e-3))

    asyncio.run(go())


def test_what_answers_share_is_computed_once() -> None:
    s, _ = service()

    async def go() -> None:
        await made(s, "ab")

    asyncio.run(go())
    a, b = (s._trained[n].weights for n in "ab")
    begin = prompt(1, 40)
    given = [Example(begin + prompt(i, 5), np.zeros(45, np.int64)) for i in range(4)]
    packed = pack_examples([(w, e) for w in (a, b) for e in given], "cpu")
    assert len(packed.tokens) == 2 * (40 + 4 * 5) and [n for _, n in packed.owners] == [60, 60]
