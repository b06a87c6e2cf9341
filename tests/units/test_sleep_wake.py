"""sleep and wake by tag: what goes comes back bit for bit, nothing computes meanwhile, and the bytes are counted."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kits.engine import all_of, ask, engine, idle, prompt, tiny
from rondel.core.errors import EngineError
from rondel.models import linear
from rondel.models.cpu_kernels import PANEL
from rondel.models.cuda_graphs import DecodeGraphs
from rondel.sync.from_tensor import FromTensor

REQUESTS = [ask(prompt(i, 12), key=i, n=6) for i in range(3)]
TAGS = ("kv_cache", "weights", "cuda_graph")


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True], ids=["on a CPU", "as beside a GPU"])
def test_what_sleeps_comes_back_bit_for_bit(moves):
    """Requests are parked in the middle; their answers are those of an engine that never
    slept, whose contexts were read in other pieces.
    """
    loaded = tiny()
    e = engine(loaded, transports={"tensor": FromTensor()})
    e.resting.moves = moves
    wanted = asyncio.run(all_of(engine(tiny()), REQUESTS))

    async def main():
        work = asyncio.create_task(all_of(e, REQUESTS))
        while not e.scheduler.decoded:
            await asyncio.sleep(0)
        await e.pause("hold")
        before = {name: p.data_ptr() for name, p in loaded.model.named_parameters()}
        objects = [id(p) for p in loaded.model.parameters()]
        awake = (await e.status()).memory
        assert awake["kv_cache"] > 0 and awake["weights"] > 0
        await e.sleep(TAGS)
        asleep = (await e.status()).memory
        assert asleep["kv_cache"] == asleep["packed"] == 0 and (asleep["weights"] == 0) == moves
        assert [id(p) for p in loaded.model.parameters()] == objects
        assert all((p.data_ptr() != before[name]) == moves for name, p in loaded.model.named_parameters())
        with pytest.raises(EngineError, match="weights are asleep"):
            await e.score(ask(prompt(9, 5)))
        await e.wake(("kv_cache",))
        await e.resume()
        assert e.state == "asleep" and not work.done(), "awake when every tag is back"
        await e.wake(TAGS)
        assert (await e.status()).memory["weights"] == awake["weights"]
        return await work

    for got, want in zip(asyncio.run(main()), wanted, strict=True):
        assert got.tokens == want.tokens
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs), atol=1e-5, rtol=0)
    for mine, others in zip(loaded.model.parameters(), tiny().model.parameters(), strict=True):
        assert torch.equal(mine, others)
    idle(e)


def test_packed_copies_are_made_again_at_their_next_use():
    loaded = tiny()
    e = engine(loaded, transports={"tensor": FromTensor()})
    first = asyncio.run(all_of(e, REQUESTS[:1]))[0]
    packed = e.resting.memory_bytes["packed"]
    if not packed:
        pytest.skip("this processor packs nothing")
    linears = [m for m in loaded.model.modules() if isinstance(m, torch.nn.Linear)]
    matrices = sum(m.weight.nbytes // len(m.weight) * (len(m.weight) + -len(m.weight) % PANEL) for m in linears)
    assert packed <= matrices
    asyncio.run(e.sleep(("weights",)))
    assert e.resting.memory_bytes["packed"] == 0 and not any(
        stack.packed_bytes for stack in linear.packed_linears(loaded.model)
    )
    asyncio.run(e.wake(("weights",)))
    e.scheduler.drop_cache(e.version)
    again = asyncio.run(all_of(e, REQUESTS[:1]))[0]
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs) and 0 < e.resting.memory_bytes[
        "packed"
    ] <= packed


def test_an_engine_in_the_trainers_module_gives_no_weights_away():
    loaded = tiny()
    e = engine(loaded)
    before = [p.data_ptr() for p in loaded.model.parameters()]
    asyncio.run(e.sleep(("weights",)))
    assert [p.data_ptr() for p in loaded.model.parameters()] == before and "weights" not in (
        asyncio.run(e.status())
    ).memory


def test_recorded_steps_are_forgotten_by_their_tag():
    pytest.importorskip("triton", reason="pip install triton")
    loaded = tiny()
    graphs = DecodeGraphs(loaded, 2)
    e = engine(loaded, compiled=graphs)
    graphs.recorded[1] = object()
    asyncio.run(e.sleep(("kv_cache",)))
    assert graphs.recorded
    asyncio.run(e.sleep(("cuda_graph",)))
    assert not graphs.recorded


def test_an_engine_that_sleeps_serves_when_every_tag_is_back():
    async def main():
        e = engine(tiny())
        await e.sleep(("kv_cache", "weights"))
        await e.sleep(())
        task = asyncio.create_task(e.generate(ask(prompt(1, 10))))
        await e.wake(("weights",))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await e.status()).state == "asleep" and not task.done()
        await e.wake(("kv_cache",))
        assert len((await task).tokens) == 16 and (await e.status()).state == "serving"

    asyncio.run(main())
