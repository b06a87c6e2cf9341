"""models/compilation.py: the compiled serving pass gives what the model gives, for every
family, size and layout, and reads live weights.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from kits.engine import LLAMA, SIZE, ask, engine, idle, plain_logprobs, prompt, tiny
from kits.sweeps import covering
from rondel.core.errors import ConfigError
from rondel.models import compilation as module
from rondel.models.compilation import CompiledModel
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment

pytestmark = pytest.mark.slow
KINDS = {  # a layer of each type: those that follow are compiled to the same code
    "llama": SIZE | {"num_hidden_layers": 1},
    "gemma2": SIZE,
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 512},
}


def answers(e, requests):
    async def main():
        return await asyncio.gather(*(e.generate(r) for r in requests))

    return asyncio.run(main())


# each more is 6 to 10 s of a C++ compiler, for a graph of the same operations
@pytest.mark.parametrize("kind", covering(KINDS, {"llama"}))
def test_tokens_and_logprobs_are_those_of_the_model_before_and_after_an_update(kind):
    """Siblings, prefix hits, chunked prompts and a batch that shrinks to one request;
    then other weights in the same tensors.
    """
    loaded = tiny(kind, **KINDS[kind])
    e = engine(loaded, compiled=CompiledModel(loaded), prefill_tokens=16)
    for round_ in range(2):
        requests = [ask(prompt(g, 5 + 9 * g), key=10 * g + s, n=3 + 4 * s) for g in range(3) for s in range(2)]
        for request, got in zip(requests, answers(e, requests), strict=True):
            wanted = plain_logprobs(loaded, [*request.tokens, *got.tokens])[-len(got.tokens) :]
            assert max(abs(a - b) for a, b in zip(got.logprobs, wanted, strict=True)) < 1e-4
        idle(e)
        with torch.no_grad():
            for p in loaded.model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(round_)) * 0.05)
        e.scheduler.drop_cache(e.version)


def test_bfloat16_rounds_where_the_model_rounds():
    """Most results have equal bits; a fused loop that kept float32 between operations would differ in nearly all."""
    loaded = load_model(LLAMA | {"num_hidden_layers": 1}, dtype="bfloat16")
    compiled = CompiledModel(loaded)
    tokens, at = torch.tensor(prompt(0, 24)), torch.arange(24)
    layout = PackedLayout([PackedSegment(0, 24)])
    with torch.no_grad():
        same = compiled.hidden_states(tokens, at, layout) == loaded.hidden_states(tokens, at, layout)
    assert same.float().mean() > 0.9


def test_what_cannot_be_compiled_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match="mixture of experts"):
        CompiledModel(tiny("mixtral"))
    loaded = tiny("llama")
    loaded.aligned = True
    with pytest.raises(ConfigError, match="aligned"):
        CompiledModel(loaded)
    loaded.aligned = False

    def branches(**given):
        return loaded.model.model(**given) if bool(given["input_ids"].sum() > 0) else None

    monkeypatch.setattr(type(loaded.model), "base_model", property(lambda self: branches))
    with pytest.raises(ConfigError, match=r"depend on its numbers.*engine\.compile = false"):
        CompiledModel(loaded)


def test_a_graph_that_computes_something_else_is_refused(monkeypatch):
    loaded = tiny("llama", **KINDS["llama"])

    def other(t, p):
        return loaded.decoder(input_ids=t[None], position_ids=p[None], use_cache=False).last_hidden_state[0] * factor

    monkeypatch.setattr(module, "_compile", lambda loaded: other)
    factor = 1.0
    CompiledModel(loaded)
    factor = 1.5
    with pytest.raises(ConfigError, match="differs by"):
        CompiledModel(loaded)
