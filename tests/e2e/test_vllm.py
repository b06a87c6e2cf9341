"""A whole run over a real vLLM, where RONDEL_VLLM_PYTHON names an interpreter that has it
and RONDEL_VLLM_MODEL a small model's folder.
"""

from __future__ import annotations

import os
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

import rondel
from kits.runs import balances, events
from kits.serve import until
from rondel.assemble import train
from rondel.core.config.job import Job

PYTHON, MODEL = os.environ.get("RONDEL_VLLM_PYTHON", ""), os.environ.get("RONDEL_VLLM_MODEL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON and MODEL), reason="RONDEL_VLLM_PYTHON and RONDEL_VLLM_MODEL are not set"),
]
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A copy whose head is its own: on a CPU vLLM would not update one that is tied."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole, path = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"), tmp_path_factory.mktemp("model")
    whole.config.tie_word_embeddings = False
    whole.lm_head.weight = type(whole.lm_head.weight)(whole.model.embed_tokens.weight.detach().clone())
    whole.save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "PYTHONPATH": str(Path(rondel.__file__).parents[1]),
    }
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--worker-extension-cls",
        "rondel.generate.engine.vllm_worker.RondelBroadcast",
        "--weight-transfer-config",
        '{"backend": "rondel"}',
    ]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--dtype", "float32", "--max-model-len", "512"], env=env, stdout=out, stderr=out
        )

    def listens():
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        until(listens, 300)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("kind", ["auto", "distributed"])
def test_three_steps_with_vllm(url, model, tmp_path, kind):
    """Weights change live under samples in flight, from a folder or by broadcast; what vLLM says of a token is what the
    trainer computes, up to its arithmetic.
    """
    tree = {
        "model": {"path": model, "dtype": "float32"},
        "task": {"data": {"kind": "digits", "holdout": 4}, "reward": "number", "eval": {"n": 4}},
        "algo": {"group_size": 4, "correction": {"kind": "importance"}},
        "loop": {"steps": STEPS, "groups_per_step": 4, "max_staleness": 1, "window": "auto", "max_refills": 50},
        "engine": {"kind": "vllm", "url": url, "max_running": 32, "sampling": {"max_tokens": 24}},
        "trainer": {"lr": 5e-6},
        "place": {"kind": "split", "device": "cpu"},
        "sync": {"kind": kind},
        "run": {"folder": str(tmp_path), "checkpoint": {"every": 0}, "sinks": []},
    }
    train(Job.parse(tree), quiet=True)
    done, synced = events(tmp_path, "StepDone"), events(tmp_path, "Synced")
    assert [e["version"] for e in done] == list(range(1, STEPS + 1)) and all(balances(e["ledger"]) for e in done)
    assert len(synced) == STEPS + 1 and len({e["root"] for e in synced}) > 1
    assert max(e["probe_gap"] for e in synced) < 1e-4
    for e in synced:
        print(
            f"version {e['version']}: {e['seconds']:.2f} s, of which {e['paused']:.2f} s paused; gap on the probe "
            f"{e['probe_gap']:.1e}"
        )
    for e in done:
        print({k: v for k, v in e["metrics"].items() if "gap" in k or "mismatch" in k or "tokens" in k}, e["seconds"])
