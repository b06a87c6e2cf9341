"""The unmodified `tinker` SDK against `rondel serve --training`: what its users write first, and what goes wrong."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from kits.adapter_bank import merged
from kits.engine import SIZE, plain_logprobs, prompt, tiny, twin
from kits.serve import Server
from kits.tinker_methods import call_all
from rondel.models.adapter_bank_files import read_weights
from rondel.models.random_model import CHAT
from rondel.models.save import save_model

pytestmark = pytest.mark.slow
tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

KEY = "tml-test-key"
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import make_tinker as PAGE  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    place = tmp_path_factory.mktemp("training")
    loaded = tiny("llama", **SIZE)
    loaded.tokenizer.chat_template = CHAT
    save_model(loaded, place / "base")
    return loaded, place


@pytest.fixture(scope="module")
def server(base):
    _, place = base
    server = start(place)
    yield server
    server.stop()


def start(place):
    words = ["--training", "--folder", str(place / "kept"), "--name", str(place / "base")]
    return Server(place / "base", place, *words, key=KEY)


@pytest.fixture
def client(server, monkeypatch):
    return connect(server, monkeypatch)


connected: list[tinker.ServiceClient] = []


def connect(server, monkeypatch, key=KEY):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    connected.append(tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.port}", api_key=key))
    return connected[-1]


@pytest.fixture(autouse=True)
def _ended():
    """A client that is not closed knocks at the door of a server that has ended, for as long as its process lives."""
    yield
    while connected:
        client = connected.pop()
        for holder in (client._session_holder, client._rest_holder):
            if holder is not None:
                holder.close()


def datum(tokens, **inputs):
    n = len(tokens) - 1
    given = {
        "target_tokens": np.array(tokens[1:]),
        **{key: np.full(n, value, np.float32) for key, value in inputs.items()},
    }
    tensors = {key: types.TensorData.from_numpy(array) for key, array in given.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


def logprobs_of(result, i=0):
    return result.loss_fn_outputs[i]["logprobs"].to_numpy().tolist()


def test_supervised_steps_teach_a_text_and_a_sampler_says_it(base, client):
    """Forward and backward, steps, a snapshot that is asked, states that are gone back to: as the SDK's readme does."""
    loaded, place = base
    training = client.create_lora_training_client(base_model=str(place / "base"), rank=8, seed=1).result()
    text = prompt(1, 12)
    fresh = training.forward([datum(text, weights=1.0)], "cross_entropy").result()
    assert logprobs_of(fresh) == pytest.approx(plain_logprobs(twin(loaded), text), abs=1e-3)
    losses = []
    for step in range(24):
        asked = training.forward_backward([datum(text, weights=1.0)], "cross_entropy")
        moved = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8))
        losses.append(asked.result().metrics["loss:sum"])
        assert moved.result().metrics["optim/grad_norm"] > 0
        if step == 20:
            middle = training.save_state("middle").result().path
    assert losses[-1] < 0.05 * losses[0]

    sampler = training.save_weights_and_get_sampling_client().result()
    said = sampler.sample(
        types.ModelInput.from_ints(text[:4]),
        2,
        types.SamplingParams(max_tokens=8, temperature=0.0),
        include_prompt_logprobs=True,
    ).result()
    assert said.sequences[0].tokens == text[4:] and said.sequences[0].stop_reason in ("length", "stop")
    told = sampler.compute_logprobs(types.ModelInput.from_ints(text)).result()
    assert told[0] is None and told[1:4] == pytest.approx(said.prompt_logprobs[1:4], abs=1e-4)
    trained = training.forward([datum(text, weights=1.0)], "cross_entropy").result()
    assert logprobs_of(trained) == pytest.approx(told[1:], abs=1e-4), "the sampler and the trainer agree"

    path = training.save_weights_for_sampler("last").result().path
    weights = read_weights(
        loaded, "x", place / "kept" / "runs" / path.split("/")[2].replace(":", "_") / "sampler_weights" / "last"
    )
    assert logprobs_of(trained) == pytest.approx(plain_logprobs(merged(twin(loaded), weights), text), abs=1e-3)

    again = client.create_training_client_from_state_with_optimizer(middle).result()
    for _ in range(3):
        asked = again.forward_backward([datum(text, weights=1.0)], "cross_entropy")
        again.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    assert asked.result().metrics["loss:sum"] == losses[-1], "it goes on as if it had never stopped"


def test_every_loss_and_a_loss_of_ones_own(client, base):
    _, place = base
    training = client.create_lora_training_client(base_model=str(place / "base"), rank=4, train_unembed=False).result()
    data = [datum(prompt(i, 9 + i), logprobs=-4.0, advantages=(-1.0) ** i) for i in range(4)]
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        result = training.forward_backward(data, loss).result()
        assert len(result.loss_fn_outputs) == 4 and np.isfinite(result.metrics["loss:sum"])
        z = torch.tensor(logprobs_of(result, 0), dtype=torch.float64)
        if loss == "importance_sampling":
            wanted = -sum(
                (-1.0) ** i * float((torch.tensor(logprobs_of(result, i), dtype=torch.float64) + 4).exp().sum())
                for i in range(4)
            )
            assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4) and len(z) == 8
    training.optim_step(types.AdamParams()).result()

    def own(data, logprobs):
        loss = sum((z - 1).square().sum() for z in logprobs)
        return loss, {"mine": float(loss)}

    before = training.forward_backward_custom(data, own).result().metrics["mine"]
    training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    assert training.forward_backward_custom(data, own).result().metrics["mine"] < before
    with pytest.raises(Exception, match="its formula is not published"):
        training.forward_backward(data, "stable_reinforce").result()
    with pytest.raises(Exception, match="lacks loss_fn_inputs"):
        training.forward_backward([datum(prompt(1, 5))], "ppo").result()
    training.optim_step(types.AdamParams()).result()  # the gradient of the custom loss; the refused ones added none


def test_clients_at_once_end_where_each_ends_alone(server, base, monkeypatch):
    _, place = base

    def train(number):
        training = (
            connect(server, monkeypatch)
            .create_lora_training_client(base_model=str(place / "base"), rank=4, seed=number)
            .result()
        )
        for step in range(3):
            training.forward_backward([datum(prompt(10 * number + step, 14), weights=1.0)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
        return logprobs_of(training.forward([datum(prompt(3, 20), weights=1.0)], "cross_entropy").result())

    alone = [train(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(train, range(3)))
    assert np.allclose(alone, together, atol=1e-5) and not np.allclose(alone[0], alone[1], atol=1e-3)


def test_what_is_kept_can_be_listed_copied_fetched_and_removed(client, base, server):
    _, place = base
    training = client.create_lora_training_client(base_model=str(place / "base"), rank=4).result()
    rest, name = client.create_rest_client(), training.get_info().model_id
    state = training.save_state("one", ttl_seconds=7200).result().path
    fetched = training.save_weights_external("out").result().path
    assert {c.checkpoint_id for c in rest.list_checkpoints(name).result().checkpoints} == {
        "weights/one",
        "external_weights/out",
    }
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    assert rest.get_training_run(name).result().last_checkpoint.tinker_path == state
    urls = rest.get_external_weights_urls(fetched).result().urls
    assert "adapter_model.safetensors" in urls
    status, _, data = server.raw("GET", urls["adapter_config.json"].partition(str(server.port))[2])
    assert status == 200 and json.loads(data)["r"] == 4
    copy = rest.copy_weights(state, "elsewhere").result()
    assert client.create_training_client_from_state(copy).result().get_info().lora_rank == 4
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(Exception, match="there is no checkpoint"):
        training.load_state(state).result()
    for bad in ("../../x", "a/b", ""):
        with pytest.raises(Exception, match=r"no name of a checkpoint|exists"):
            training.save_state(bad or "one/..").result()


def test_a_server_started_anew_knows_what_was_saved_and_other_keys_are_refused(base, tmp_path, monkeypatch):
    _, place = base
    first = Server(place / "base", tmp_path, "--training", "--folder", str(tmp_path / "kept"), key=KEY)
    try:
        training = connect(first, monkeypatch).create_lora_training_client(base_model="tiny", rank=4).result()
        training.forward_backward([datum(prompt(1, 9), weights=1.0)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        path = training.save_state("kept").result().path
        known = logprobs_of(training.forward([datum(prompt(1, 9), weights=1.0)], "cross_entropy").result())
        with pytest.raises(Exception, match="not this server's"):
            connect(first, monkeypatch, "tml-wrong").get_server_capabilities()
        with pytest.raises(Exception, match="base_model 'llama' is not here; this server has 'tiny'"):
            connect(first, monkeypatch).create_lora_training_client(base_model="llama", rank=4).result()
    finally:
        first.stop(signal.SIGKILL)
    second = Server(place / "base", tmp_path, "--training", "--folder", str(tmp_path / "kept"), key=KEY)
    try:
        again = connect(second, monkeypatch).create_training_client_from_state(path).result()
        assert logprobs_of(again.forward([datum(prompt(1, 9), weights=1.0)], "cross_entropy").result()) == known
        lines = [json.loads(line) for line in (tmp_path / "kept" / "requests.jsonl").read_text().splitlines()]
        assert [line["what"] for line in lines[:4]] == [
            "create_model",
            "forward_backward",
            "optim_step",
            "save_weights",
        ]
        assert second.stop(signal.SIGTERM) == 0
        assert json.loads((tmp_path / "kept" / "card.json").read_text())["models"] == 1
    finally:
        second.process.kill() if second.process.poll() is None else None


def test_the_page_of_methods_says_what_is_answered(server, base, monkeypatch):
    """docs/tinker.md was written by calling every method; `python docs/make_tinker.py` writes it anew."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    told = call_all(f"http://127.0.0.1:{server.port}", KEY, str(base[1] / "base"))
    assert sum(said == "answered" for said in told.values()) >= 89
    assert all(
        said == "answered" or said.startswith("refused: ") or "whoami" in name for (_, name), said in told.items()
    )
    assert PAGE.page(told) == PAGE.PAGE.read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(server, base, monkeypatch, capsys):
    """docs/tinker.md, with the folder of the tiny base in place of the model."""
    code = PAGE.PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    assert "training.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8)).result()" in code
    code = code.replace("range(100, 112)", "range(50, 62)").replace('"smollm2-135m"', repr(str(base[1] / "base")))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{server.port}")
    exec(compile(code, "docs/tinker.md", "exec"), {"__name__": "__main__"})
    assert "tokens" in capsys.readouterr().out
