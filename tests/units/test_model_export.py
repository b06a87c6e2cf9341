"""`rondel export` of any run: a folder that transformers loads, a model card, and an upload through a stub of the hub."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from kits.run_folder import evaluated
from kits.runs import run
from rondel.cli import main
from rondel.runtime.telemetry.model_card import licence_of_base, render_model_card, write_model_card


class StubApi:
    """huggingface_hub.HfApi, of which two methods are asked for."""

    calls: list = []  # noqa: RUF012
    fails = False

    def __init__(self, token):
        self.token = token

    def create_repo(self, repository, **how):
        self.calls.append(("create", self.token, repository, how))
        return f"https://hub.example/{repository}"

    def upload_folder(self, **how):
        if self.fails:
            raise OSError("403: no write access")
        self.calls.append(("upload", how["repo_id"], how["folder_path"]))


@pytest.fixture
def hub(monkeypatch):
    module = ModuleType("huggingface_hub")
    module.HfApi, module.get_token, module.token = StubApi, lambda: module.token, "secret"
    StubApi.calls, StubApi.fails = [], False
    return lambda: monkeypatch.setitem(sys.modules, "huggingface_hub", module) or module


def rondel(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out = capsys.readouterr()
    return ended.value.code, out.out, out.err


@pytest.mark.slow
def test_a_run_becomes_a_model_folder_with_its_card_and_goes_to_the_hub(tmp_path, capsys, hub):
    from transformers import AutoModelForCausalLM

    run(tmp_path / "run", loop__steps=2, loop__warmup__steps=1, task__eval__samples=2)
    code, out, _ = rondel(capsys, "export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert code == 0 and "step-000003" in out and "vllm serve" in out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert "README.md" in files and not files & {"optimizer.safetensors", "state.json", "manifest.json"}
    kept = load_file(tmp_path / "run" / "checkpoints" / "step-000003" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| pass@2 |" in card and "after step 3" in card and "before training" in card and "grpo" in card

    module = hub()
    code, out, _ = rondel(capsys, "export", str(tmp_path / "run"), str(tmp_path / "two"), "--push", "me/tiny")
    assert code == 0 and "https://hub.example/me/tiny" in out and "secret" not in out
    assert StubApi.calls[0] == ("create", "secret", "me/tiny", {"private": True, "exist_ok": True})
    assert StubApi.calls[1] == ("upload", "me/tiny", str(tmp_path / "two"))
    assert 'from_pretrained("me/tiny")' in (tmp_path / "two" / "README.md").read_text()
    StubApi.fails = True
    code, _, err = rondel(capsys, "export", str(tmp_path / "run"), str(tmp_path / "three"), "--push", "me/tiny")
    assert code == 1 and "403" in err and f"hf upload me/tiny {tmp_path / 'three'}" in err
    module.token = None
    code, _, err = rondel(capsys, "export", str(tmp_path / "run"), str(tmp_path / "four"), "--push", "me/tiny")
    assert code == 1 and "hf auth login" in err and not (tmp_path / "four").exists()
    code, _, err = rondel(capsys, "export", str(tmp_path / "run"), str(tmp_path / "four"), "--push", "tiny")
    assert code == 1 and "USER/NAME" in err


def test_the_card_names_base_data_algorithm_and_figures_of_the_step():
    events = [
        {"kind": "Evaluated", **{k: getattr(e, k) for k in ("step", "profile", "score", "low", "high", "n", "draws")}}
        | {"metrics": {}, "reward_min": 0.0, "reward_max": 1.0}
        for e in (evaluated(0, 0, 0.2), evaluated(2, 2, 0.5), evaluated(4, 4, 0.9))
    ]
    recipe = {
        "model": {"path": "org/base"},
        "algo": {"kind": "dapo", "group_size": 4},
        "task": {"data": {"kind": "digits"}},
    }
    card = render_model_card(recipe, events, 2, name="me/model", kind="adapter")
    assert card.startswith("---\nbase_model: org/base\nlibrary_name: peft\n") and "AutoPeftModelForCausalLM" in card
    assert "50.0%" in card and "20.0%" in card and "90.0%" not in card and "dapo" in card and "digits" in card
    assert "could not be scored" not in card
    events[1]["request"] = {"failed": 9}
    assert "9 answers could not be scored and count as 0" in render_model_card(recipe, events, 2, name="me/model")
    loop = {"groups_per_step": 4, "warmup": {"steps": 3, "groups_per_step": 32}}
    for step, told in (
        (5, "3 supervised, 32 demonstrations each; 2 of RL, 4 tasks each"),
        (2, "2 supervised, 32 demonstrations each; 0 of RL, 4 tasks each"),
    ):
        assert f"| steps | {told} |" in render_model_card({"loop": loop}, [], step, name="x")
    assert "not evaluated" in render_model_card({}, [], 2, name="x") and "vllm serve x" in render_model_card(
        {}, [], 2, name="x"
    )
    assert "base_model" not in render_model_card({"model": {"path": {"random": "llama"}}}, [], 2, name="x")
    world = {"task": {"env": {"kind": "control"}, "reward": "number"}}  # as a run writes its recipe, defaults and all
    assert "| reward | what the world pays |" in render_model_card(world, [], 2, name="x", kind="control")
    below = render_model_card({"task": {"system": 'a "b"'}}, [], 2, name="x", kind="flow")
    assert '[{"role": "system", "content": "a \\"b\\""}, {"role": "user", "content": prompt}]' in below
    assert '"instruction": "...", "system": "kind"}' in render_model_card(
        {"task": {"system": "kind"}}, [], 2, name="x", kind="vla"
    )


@pytest.mark.parametrize(
    ("base", "way"),
    [("org/base", "AutoPeftModel"), (".", "AutoPeftModel"), (None, "rondel merge"), ("smollm2-135m", "rondel merge")],
)
def test_an_adapter_whose_base_peft_cannot_load_is_merged(tmp_path, base, way):
    """That of a random model lies nowhere, and Rondel knows names that peft does not."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    card = write_model_card(tmp_path / "run", 1, tmp_path)
    assert "library_name: peft" in card and "LoRA adapter" in card
    assert [way in card for way in ("AutoPeftModel", "rondel merge")] == [way == "AutoPeftModel", way == "rondel merge"]


@pytest.mark.parametrize(
    ("readme", "file", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\ntags: [a]\n---\n# Base\n", "LICENSE", "apache-2.0"),
        ("---\nlanguage: en\n---\nlicense: mit\n", "LICENSE", "LICENSE"),
        ("# Base\nlicense: mit\n", "", ""),
        (None, "", ""),
    ],
)
def test_the_licence_of_the_base_is_what_its_own_card_says(tmp_path, readme, file, licence):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    if file:
        (tmp_path / file).write_text("...")
    assert licence_of_base(str(tmp_path)) == licence
    card = render_model_card({"model": {"path": str(tmp_path)}}, [], 2, name="x", licence=licence)
    assert ("license: apache-2.0\n" in card.split("---")[1]) == (licence == "apache-2.0")
    assert ("not known" in card) == (not licence) and ("see LICENSE of the base" in card) == (licence == "LICENSE")
    assert licence_of_base({"random": "llama"}) == licence_of_base("nobody/has-this") == ""
