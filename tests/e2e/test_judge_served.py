"""Our own server as the judge of our own rewards: a random model, whose grammar lets it say nothing but a verdict."""

from __future__ import annotations

import asyncio

import pytest

from kits.engine import SIZE, tiny
from kits.serve import Server
from rondel.core.types import Score, Task, Trajectory
from rondel.models.random_model import CHAT
from rondel.models.save import save_model
from rondel.score.pool import RewardPool

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")
KEY = "k-of-a-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    loaded = tiny("llama", **{**SIZE, "max_position_embeddings": 4096})
    loaded.tokenizer.chat_template = CHAT
    save_model(loaded, folder := tmp_path_factory.mktemp("model"))
    running = Server(folder, tmp_path_factory.mktemp("server"), "--kv-pages", "20000", key=KEY)
    yield running
    running.stop()


def test_a_served_model_judges(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    spec = {
        "kind": "judge", "url": f"http://127.0.0.1:{server.port}/v1", "model": "tiny", "key_env": "TEST_JUDGE_KEY", "together": 4,
        "field": "score", "whole": True, "low": 0, "high": 9, "max_tokens": 24,
    }  # fmt: skip
    calls = [
        (Trajectory(text=f"It is {n}.\nVerdict: 9"), Task(f"t/{n}", "x", {"prompt": f"{n}?", "answer": str(n)}))
        for n in range(8)
    ]

    async def all_of(pool):
        return await asyncio.gather(*(pool.score(*call) for call in calls))

    def asked():
        with RewardPool(spec, timeout=60.0, folder=tmp_path) as pool:
            return asyncio.run(all_of(pool)), dict(pool.shared.counts)

    results, counts = asked()
    assert all(isinstance(r, Score) and r.value in range(10) for r in results), results
    assert counts["judge_calls"] == 8 and "judge_unreadable" not in counts
    assert asked() == (results, {"judge_cache_hits": 8.0})
    server.idle()
