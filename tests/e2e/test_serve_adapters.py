"""`rondel serve --adapter`: several models on one base, asked for by the names that clients of vLLM and SGLang use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.adapter_bank import merged, noisy
from kits.engine import SIZE, plain_logprobs, tiny, twin
from kits.serve import Server
from rondel.cli import main
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_bank_files import save_weights
from rondel.models.random_model import CHAT
from rondel.models.save import save_model

pytestmark = pytest.mark.slow
pytest.importorskip("openai")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """-> the plain base, its folder, and the adapters that lie in folders beside it."""
    place = tmp_path_factory.mktemp("adapters")
    loaded = tiny("llama", **SIZE)
    loaded.tokenizer.chat_template = CHAT
    plain = twin(loaded)
    bank = AdapterBank(loaded)
    save_model(loaded, place / "base")
    weights = {name: noisy(bank, name, i + 2) for i, name in enumerate(("poet", "clerk"))}
    for name, one in weights.items():
        save_weights(loaded, one, place / name)
    return plain, place, weights


def test_models_of_one_server_are_the_base_and_its_adapters(base, tmp_path: Path) -> None:
    plain, place, weights = base
    server = Server(place / "base", tmp_path, "--adapter", f"poet={place / 'poet'}")
    try:
        assert [card.id for card in server.client.models.list()] == ["tiny", "poet"]
        asked = {
            "prompt": [9, 17, 23, 40],
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": 0,
            "extra_body": {"return_token_ids": True},
        }
        said = {name: server.client.completions.create(model=name, **asked) for name in ("tiny", "poet")}
        for name, reply in said.items():
            whole = [9, 17, 23, 40, *reply.choices[0].token_ids]
            wanted = plain_logprobs(merged(plain, weights.get(name)), whole)[3:]
            assert reply.model == name
            assert reply.choices[0].logprobs.token_logprobs == pytest.approx(wanted, abs=1e-3)

        status, refusal = server.post("/v1/completions", model="clerk", prompt="a")
        assert (
            status == 404 and "no model 'clerk' here; this server serves 'tiny', 'poet'" in refusal["error"]["message"]
        )
        told = server.ok("/v1/load_lora_adapter", lora_name="clerk", lora_path=str(place / "clerk"))
        assert told["loaded_adapters"] == ["poet", "clerk"]
        assert server.post("/v1/load_lora_adapter", lora_name="clerk", lora_path=str(place / "poet"))[0] == 400

        chat = server.client.chat.completions.create(
            model="clerk", messages=[{"role": "user", "content": "hi"}], max_tokens=4, temperature=0
        )
        native = server.ok(
            "/generate",
            input_ids=[9, 17, 23, 40],
            lora_path="clerk",
            sampling_params={"max_new_tokens": 6, "temperature": 0},
            return_logprob=True,
        )
        tokens = [t for _, t, _ in native["meta_info"]["output_token_logprobs"]]
        wanted = plain_logprobs(merged(plain, weights["clerk"]), [9, 17, 23, 40, *tokens])[3:]
        assert chat.model == "clerk"
        assert [lp for lp, _, _ in native["meta_info"]["output_token_logprobs"]] == pytest.approx(wanted, abs=1e-3)
        message = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert server.ok("/v1/messages", **message)["model"] == "poet"

        server.ok("/v1/unload_lora_adapter", lora_name="clerk")
        assert server.post("/v1/completions", model="clerk", prompt="a")[0] == 404
        server.idle()
    finally:
        server.stop()


def test_without_adapters_none_can_be_loaded_and_bad_ones_end_the_start(base, tmp_path: Path, capsys) -> None:
    _, place, _ = base
    server = Server(place / "base", tmp_path)
    try:
        status, refusal = server.post("/v1/load_lora_adapter", lora_name="poet", lora_path=str(place / "poet"))
        assert status == 409 and "--enable-adapters" in str(refusal)
    finally:
        server.stop()
    for given, message in (
        ("poet", "say a name and a folder"),
        (f"poet={place / 'base'}", "is no adapter: a folder with adapter_config.json"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", str(place / "base"), "--port", "0", "--adapter", given])
        assert message in " ".join(capsys.readouterr().err.split())
